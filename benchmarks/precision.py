"""The accuracy of each precision on the bundled demo model and its held-out questions.

    .venv/bin/python benchmarks/precision.py [--json FILE]

Also the accuracy of checkpoints from `quire quantize`; GPTQ gets chats similar to the training data.

For each precision: the share of held-out chats answered correctly (greedy, equal to the expected reply character for
character, as scripts/train_demo_model.py scores), the number of replies identical to float32, and the perplexity of the
expected replies given their prompts.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from quire import LLM, SamplingParams
from quire.engine.config.options import DEMO_MODEL
from quire.server.cli.main import main as quire

sys.path.append(str(Path(__file__).resolve().parent.parent / "scripts"))
from demo_chats import NEW_CITIES, Chats, held_out

PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "int8": {"quantization": "int8"},
    "int8, int8 KV": {"quantization": "int8", "kv_cache_dtype": "int8"},
    "fp8 KV": {"kv_cache_dtype": "fp8"},
    "int8 KV": {"kv_cache_dtype": "int8"},
    "int4 KV": {"kv_cache_dtype": "int4"},
    "int8, bfloat16": {"quantization": "int8", "dtype": "bfloat16"},
    "int4": {"quantization": "int4"},
    "fp8": {"quantization": "fp8"},
}
WRITTEN = ("w8a8", "fp8_dynamic", "w4a16", "w4a16, gptq", "mxfp4a16", "nvfp4a16")
"""Schemes of `quire quantize`."""


def questions() -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and expected replies as token ids; replies include the end token."""
    tokenizer: Any = AutoTokenizer.from_pretrained(DEMO_MODEL)
    prompts, replies = [], []
    for chat in held_out():
        if chat.kind == NEW_CITIES:
            continue
        options = {"tools": chat.tools, "tokenize": False}
        prompt = tokenizer.apply_chat_template(chat.messages[:-1], add_generation_prompt=True, **options)
        whole = tokenizer.apply_chat_template(chat.messages, **options)
        prompts.append(tokenizer.encode(prompt, add_special_tokens=False))
        reply = tokenizer.encode(whole.removeprefix(prompt).removesuffix("\n"), add_special_tokens=False)
        replies.append(reply)
    return prompts, replies


def answers(llm: LLM, prompts: Sequence[list[int]]) -> list[list[int]]:
    """Greedy replies of the engine, including the end token."""
    found = llm.generate(list(prompts), SamplingParams(temperature=0, max_tokens=120), use_tqdm=False)
    return [result.outputs[0].token_ids for result in found]


def perplexity(llm: LLM, prompts: Sequence[list[int]], replies: Sequence[list[int]]) -> float:
    """The perplexity of all reply tokens, each given the tokens before it."""
    texts = [prompt + reply for prompt, reply in zip(prompts, replies, strict=True)]
    loss = 0.0
    for result, reply in zip(
        llm.generate(texts, SamplingParams(prompt_logprobs=0, max_tokens=1), use_tqdm=False), replies, strict=True
    ):
        scores: Any = (result.prompt_logprobs or [])[-len(reply) :]
        loss -= sum(of_place[token].logprob for token, of_place in zip(reply, scores, strict=True))
    return math.exp(loss / sum(map(len, replies)))


def written(folder: Path) -> dict[str, dict[str, Any]]:
    """The models that `quire quantize` writes to a folder."""
    tokenizer: Any = AutoTokenizer.from_pretrained(DEMO_MODEL)
    chats = Chats(seed=1)
    texts = [tokenizer.apply_chat_template(chats.sample().messages, tokenize=False) for _ in range(256)]
    (folder / "texts.jsonl").write_text("\n".join(map(json.dumps, texts)))
    for name in WRITTEN:
        scheme, _, method = name.partition(", ")
        gptq = ["--method", "gptq", "--calibration", str(folder / "texts.jsonl")] if method else []
        assert quire(["quantize", str(DEMO_MODEL), str(folder / name), "--scheme", scheme, *gptq]) == 0
    return {name: {"model": str(folder / name)} for name in WRITTEN}


def measure(precisions: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Print a line for each precision."""
    prompts, replies = questions()
    figures: dict[str, dict[str, float]] = {}
    exact: list[list[int]] = []
    print(f"{len(prompts)} held-out chats, {sum(map(len, replies))} reply tokens\n")
    print(f"{'precision':<18}{'right':>8}{'as float32':>12}{'perplexity':>12}")
    for name, options in precisions.items():
        with LLM(max_model_len=1024, **options) as llm:
            found, measured = answers(llm, prompts), perplexity(llm, prompts, replies)
        exact = exact or found
        right = sum(one == other for one, other in zip(found, replies, strict=True)) / len(replies)
        same = sum(one == other for one, other in zip(found, exact, strict=True)) / len(replies)
        figures[name] = {"right": right, "same_as_float32": same, "perplexity": measured}
        print(f"{name:<18}{right:>8.1%}{same:>12.1%}{measured:>12.4f}", flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(PRECISIONS | written(Path(folder)))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
