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

import torch
from transformers import AutoTokenizer

from quire import LLM, SamplingParams, kernels
from quire.engine.config.options import DEMO_MODEL, EngineOptions
from quire.engine.config.resolve import resolve
from quire.engine.distributed.communicator import Parallel
from quire.engine.layers.batch import Batch, KVBlocks
from quire.engine.layers.kv_cache import LayerCache
from quire.engine.models.build import load
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
    "int8, bfloat16": {"quantization": "int8", "dtype": "bfloat16"},
    "int4": {"quantization": "int4"},
    "fp8": {"quantization": "fp8"},
}
WRITTEN = ("w8a8", "fp8_dynamic", "w4a16", "w4a16, gptq", "mxfp4a16", "nvfp4a16")
"""Schemes of `quire quantize`."""
_CPU = torch.device("cpu")
_BLOCK = 16


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


def answers(prompts: Sequence[list[int]], options: dict[str, Any]) -> list[list[int]]:
    """Greedy replies of the engine, including the end token."""
    with LLM(max_model_len=1024, **options) as llm:
        found = llm.generate(list(prompts), SamplingParams(temperature=0, max_tokens=120))
    return [result.outputs[0].token_ids for result in found]


def perplexity(prompts: Sequence[list[int]], replies: Sequence[list[int]], options: dict[str, Any]) -> float:
    """The perplexity of all reply tokens, each given the tokens before it."""
    config = resolve(EngineOptions(device="cpu", max_model_len=1024, **options))
    arch = config.model.architecture
    decoder = load(config, 0, Parallel(), _CPU)
    attention = arch.layers[0].attention
    assert attention is not None
    num_tensors, kv_heads, head_dim = attention.kv_shape(1)
    dtype = kernels.kv_cache_dtype(config.cache.dtype)
    memory = kernels.allocate_kv_cache(arch.num_layers, 64, kv_heads, _BLOCK, head_dim, dtype, _CPU, num_tensors)
    caches = [LayerCache(of_layer) for of_layer in memory]
    loss, count = 0.0, 0
    with torch.inference_mode():  # not during loading, which uses threads
        for prompt, reply in zip(prompts, replies, strict=True):
            tokens = torch.tensor(prompt + reply)
            positions = torch.arange(len(tokens) - 1)
            batch = Batch(
                token_ids=tokens[:-1],
                positions=positions,
                sequence_lengths=torch.tensor([len(positions)]),
                query_starts=torch.tensor([0, len(positions)]),
                logits_indices=positions[len(prompt) - 1 :],
                groups={0: KVBlocks(positions, torch.arange(64)[None])},
            )
            logits = decoder.logits(decoder(None, batch, caches)[batch.logits_indices])
            loss += torch.nn.functional.cross_entropy(logits, tokens[len(prompt) :], reduction="sum").item()
            count += len(reply)
    return math.exp(loss / count)


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
        found = answers(prompts, options)
        exact = exact or found
        right = sum(one == other for one, other in zip(found, replies, strict=True)) / len(replies)
        same = sum(one == other for one, other in zip(found, exact, strict=True)) / len(replies)
        measured = perplexity(prompts, replies, options)
        figures[name] = {"right": right, "same_as_float32": same, "perplexity": measured}
        print(f"{name:<18}{right:>8.1%}{same:>12.1%}{measured:>12.4f}", flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    kernels.prepare("cpu")()
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(PRECISIONS | written(Path(folder)))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
