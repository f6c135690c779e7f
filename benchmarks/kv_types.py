"""What each type of KV cache costs in accuracy, on the bundled demo model.

    .venv/bin/python benchmarks/kv_types.py [--write docs/benchmarks/kv-types.md]
    .venv/bin/python benchmarks/kv_types.py --chats 8 --texts 2 --types float32 int8    # a smoke test

Every type runs the same requests through the engine, greedily. Weights and activations are float32, so only the cache
makes a difference.

- **chats**: held-out questions, with answers of up to 120 tokens. `right`: the share of right answers; `as float32`:
  the share of answers that are identical to those with a float32 cache; `perplexity` of the expected answers.
- **long contexts**: texts of `--length` tokens, each made of many chats. For the tokens of the answers in them: the
  perplexity in each quarter of the positions (it grows, because the model was trained on single chats); the error of
  the log-probability relative to a float32 cache (mean and 99th percentile); and the share of positions at which a
  different token is the most likely one. Finally, the share of answers to questions at the end of such contexts that
  are identical to those with a float32 cache.

Large models have a few channels of keys that are much larger than the others (Liu et al. 2024, Hooper et al. 2024). The
demo model has none, so it is measured a second time with such channels: in each key head, the rows of two rotary pairs
are multiplied by `--outliers`, a power of two, and the matching rows of the queries are divided by it. This changes no
score, and not a bit of the results with a float cache.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import tempfile
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
from machine import provenance
from precision import answers, perplexity, questions
from safetensors import safe_open
from safetensors.torch import save_file

from quire import LLM, SamplingParams
from quire.engine.config.kv_cache_groups import block_bytes, cached_layers
from quire.engine.config.options import DEMO_MODEL, EngineOptions
from quire.engine.config.resolve import resolve

TYPES = ("float32", "bfloat16", "fp8", "int8", "int4", "int4:32")
"""With `--block-size` if it is not the default. The first is what the others are compared with."""
_QUARTERS = 4
_ANSWER = 120
"""Most tokens of an answer."""


class Text(NamedTuple):
    """A long context."""

    tokens: list[int]
    is_answer: list[bool]
    """Whether each token is of an answer: the model has learnt these alone."""


class Scores(NamedTuple):
    """A model's scores of the tokens of answers in long contexts, `[tokens]` each."""

    positions: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float64]
    """The natural logarithms of the tokens' probabilities."""
    likeliest: npt.NDArray[np.int64]
    """The most likely tokens."""


class Results(NamedTuple):
    """What one type of cache gives."""

    answers: list[list[int]]
    """To the questions of the chats."""
    expected: float
    """Perplexity of the expected answers."""
    scores: Scores
    """Of the long texts."""
    late_answers: list[list[int]]
    """To questions at the end of long texts."""


def with_outliers(folder: Path, factor: float) -> Path:
    """Write the demo model with large channels of keys to a new folder."""
    folder.mkdir()
    for file in DEMO_MODEL.iterdir():
        if file.name != "model.safetensors":
            (folder / file.name).symlink_to(file)
    with safe_open(DEMO_MODEL / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    arch = resolve(EngineOptions(model=str(DEMO_MODEL), device="cpu")).model.architecture
    attention: Any = arch.layers[0].attention
    half = attention.head_dim // 2
    channels = [pair + side for pair in (half // 3, half - 3) for side in (0, half)]
    for name, weight in tensors.items():
        if "language_model" in name and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = weight.view(-1, attention.head_dim, weight.shape[1])
            heads[:, channels] *= factor if name.endswith("k_proj.weight") else 1 / factor
    save_file(tensors, folder / "model.safetensors")
    return folder


def long_texts(chats: Sequence[tuple[list[int], list[int]]], count: int, length: int) -> list[Text]:
    """Texts of `length` tokens: prompts and answers in random orders, one after the other."""
    texts = []
    for seed in range(count):
        tokens, is_answer = list[int](), list[bool]()
        for prompt, reply in random.Random(seed).choices(chats, k=length):
            tokens += prompt + reply
            is_answer += [False] * len(prompt) + [True] * len(reply)
            if len(tokens) >= length:
                break
        texts.append(Text(tokens[:length], is_answer[:length]))
    return texts


def score(llm: LLM, texts: Sequence[Text]) -> Scores:
    rows = list[tuple[int, float, int]]()
    prompts = [text.tokens for text in texts]
    results = llm.generate(prompts, SamplingParams(prompt_logprobs=1, max_tokens=1), use_tqdm=False)
    for text, result in zip(texts, results, strict=True):
        for place, scores in enumerate(cast("list[Any]", result.prompt_logprobs)):
            if place and text.is_answer[place]:
                best = next(token for token, each in scores.items() if each.rank == 1)
                rows.append((place, scores[text.tokens[place]].logprob, best))
    positions, logprobs, likeliest = zip(*rows, strict=True)
    return Scores(np.array(positions), np.array(logprobs), np.array(likeliest))


def measure(
    model: Path, kind: str, prompts: Sequence[list[int]], replies: Sequence[list[int]], texts: Sequence[Text]
) -> Results:
    options = {"model": str(model), "device": "cpu", "dtype": "float32", **cache_options(kind)}
    length = len(texts[0].tokens)
    asked = prompts[:: max(1, len(prompts) // (4 * len(texts)))]
    late = [
        text.tokens[: length - len(prompt) - _ANSWER] + prompt
        for text, prompt in zip(cycle(texts), asked, strict=False)
    ]
    with LLM(max_model_len=length + 1, **options) as llm:
        return Results(answers(llm, prompts), perplexity(llm, prompts, replies), score(llm, texts), answers(llm, late))


def cache_options(kind: str) -> dict[str, Any]:
    name, _, size = kind.partition(":")
    return {"kv_cache_dtype": name} | ({"block_size": int(size)} if size else {})


def named(kind: str) -> str:
    name, _, size = kind.partition(":")
    return f"`{name}`" + f", blocks of {size}" * bool(size)


def bytes_of_token(model: Path, kind: str) -> float:
    """Bytes of a token in all layers."""
    config = resolve(EngineOptions(model=str(model), device="cpu", **cache_options(kind)))
    size = config.cache.block_size
    specs, _ = cached_layers(config.model, config.parallel, config.scheduler.speculative, size)
    return sum(block_bytes(spec.shape, size, config.cache.dtype) for layer in specs for spec in layer) / size


def percent(fraction: float, digits: int = 1) -> str:
    return f"{100 * fraction:.{digits}f} %"


def share(found: Sequence[list[int]], others: Sequence[list[int]]) -> str:
    return percent(sum(one == other for one, other in zip(found, others, strict=True)) / len(others))


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = (heads, ["---", *["---:"] * (len(heads) - 1)], *rows)
    return [f"| {' | '.join(line)} |" for line in lines] + [""]


def tables(
    results: dict[str, Results], replies: Sequence[list[int]], model: Path, options: argparse.Namespace
) -> list[str]:
    """Markdown of what has been measured so far of one model."""
    exact = next(iter(results.values()))
    chats, long = [], []
    for kind, found in results.items():
        chats.append(
            [
                named(kind),
                f"{bytes_of_token(model, kind):,.0f}",
                share(found.answers, replies),
                share(found.answers, exact.answers),
                f"{found.expected:.4f}",
            ]
        )
        quarter = found.scores.positions * _QUARTERS // options.length
        perplexities = [math.exp(-found.scores.logprobs[quarter == each].mean()) for each in range(_QUARTERS)]
        errors = np.abs(found.scores.logprobs - exact.scores.logprobs)
        long.append(
            [
                named(kind),
                *(f"{each:.3f}" for each in perplexities),
                f"{errors.mean():.4f}",
                f"{np.quantile(errors, 0.99):.3f}",
                percent((found.scores.likeliest != exact.scores.likeliest).mean(), 2),
                share(found.late_answers, exact.late_answers),
            ]
        )
    first = table(["KV cache", "bytes per token", "right", "as float32", "perplexity"], chats)
    ends = [f"to {(number + 1) * options.length // _QUARTERS:,}" for number in range(_QUARTERS)]
    ends[0] = f"perplexity {ends[0]}"
    errors_of = ["error: mean", "99th percentile", "most likely token differs", "answers as float32"]
    return ["Chats:", "", *first, "Long contexts:", "", *table(["KV cache", *ends, *errors_of], long)]


def document(sections: Sequence[str]) -> str:
    method = (__doc__ or "").partition("smoke test\n\n")[2].strip()
    lines = [
        "# Types of KV cache",
        "",
        "`benchmarks/kv_types.py --write` writes this page: change the program, not the page.",
    ]
    lines += ["", "What each `--kv-cache-dtype` costs in accuracy, on the bundled demo model.", ""]
    return "\n".join([*lines, method, "", *sections, "## Provenance", "", *provenance()]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--types", nargs="+", default=TYPES, help="types of KV cache; the first is the one to compare with"
    )
    parser.add_argument("--chats", type=int, default=10**6, help="held-out chats (default: all)")
    parser.add_argument("--texts", type=int, default=16, help="long contexts")
    parser.add_argument("--length", type=int, default=2000, help="tokens of a long context")
    parser.add_argument("--outliers", type=float, default=8.0, help="size of the large channels of keys")
    parser.add_argument("--write", type=Path, metavar="FILE.md", help="write the tables to this file, too")
    options = parser.parse_args()
    prompts, replies = (each[: options.chats] for each in questions())
    texts = long_texts([*zip(prompts, replies, strict=True)], options.texts, options.length)
    sections: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        large = with_outliers(Path(folder) / "outliers", options.outliers)
        other = f"The demo model with channels of keys that are {options.outliers:g} times as large"
        for title, model in (("The demo model", DEMO_MODEL), (other, large)):
            results: dict[str, Results] = {}
            for kind in options.types:
                results[kind] = measure(model, kind, prompts, replies, texts)
                print(f"{title}: {kind} measured", file=sys.stderr, flush=True)
            sections += [f"## {title}", "", *tables(results, replies, model, options)]
    print("\n".join(sections))
    if options.write:
        options.write.write_text(document(sections))


if __name__ == "__main__":
    main()
