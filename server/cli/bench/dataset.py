"""Prompts for benchmarks: of given lengths, with an optional common prefix, as token ids or text."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from quire.engine.config.options import flag
from quire.engine.protocol.errors import ConfigError

T = TypeVar("T")

_FIRST_ID = 100
"""Tokenizers keep their special tokens below this or at the end of their vocabulary."""
WARMUP_SEED = 1_000_003
"""Added to the seed, so that warm-up prompts differ from measured ones."""
_WORDS = """
time year people way day man thing woman life child world school state family student group country problem hand
part place case week company system program question work government number night point home water room mother
area money story fact month lot right study book eye job word business issue side kind head house service friend
father power hour game line end member law car city community name president team minute idea kid body
information back parent face others level office door health person art war history party result change morning
reason research girl guy moment air teacher force education
"""
"""Common words, each of which is one token in most vocabularies."""


@dataclass(frozen=True, kw_only=True)
class DatasetOptions:
    """The requests of a benchmark, with the names of `vllm bench`."""

    num_prompts: int = flag(1000, "number of requests", is_common=True)
    random_input_len: int = flag(1024, "tokens of each prompt, without the common prefix", is_common=True)
    random_output_len: int = flag(128, "tokens of each output", is_common=True)
    random_range_ratio: float = flag(
        0.0, "draw lengths uniformly from length × (1 - X) to length × (1 + X)", metavar="X"
    )
    random_prefix_len: int = flag(0, "tokens of the prefix that all prompts share")
    input_len: int | None = flag(None, "same as --random-input-len")
    output_len: int | None = flag(None, "same as --random-output-len")

    @property
    def mean_input_len(self) -> int:
        return self.random_input_len if self.input_len is None else self.input_len

    @property
    def mean_output_len(self) -> int:
        return self.random_output_len if self.output_len is None else self.output_len

    def check(self) -> None:
        """Raise `ConfigError` for invalid options."""
        if self.num_prompts < 1:
            raise ConfigError(f"--num-prompts {self.num_prompts}: must be at least 1")
        if not 0.0 <= self.random_range_ratio < 1.0:
            raise ConfigError(f"--random-range-ratio {self.random_range_ratio}: must be at least 0 and less than 1")
        if self.random_prefix_len < 0 or self.mean_input_len < 0 or self.mean_output_len < 1:
            raise ConfigError("lengths must not be negative, and outputs must have at least one token")
        if self.random_prefix_len + math.floor(self.mean_input_len * (1 - self.random_range_ratio)) < 1:
            raise ConfigError("prompts must have at least one token: increase --random-input-len")


@dataclass(frozen=True)
class Sample:
    """One request: its prompt, and the lengths of prompt and output in tokens."""

    prompt: list[int] | str
    prompt_len: int
    output_len: int


def token_samples(options: DatasetOptions, vocab_size: int, seed: int) -> list[Sample]:
    """Create prompts of random token ids."""
    first = min(_FIRST_ID, vocab_size // 2)

    def draw(rng: np.random.Generator, count: int) -> list[int]:
        ids: list[int] = rng.integers(first, vocab_size, count).tolist()
        return ids

    return [
        Sample(prefix + own, len(prefix) + len(own), output_len)
        for prefix, own, output_len in _draw(options, draw, seed)
    ]


def text_samples(options: DatasetOptions, words_for: Callable[[int], int], seed: int) -> list[Sample]:
    """Create prompts of random words, for servers that do not accept token ids; `words_for` maps tokens to words."""

    words = _WORDS.split()

    def draw(rng: np.random.Generator, count: int) -> list[str]:
        return [words[index] for index in rng.integers(0, len(words), count)]

    samples = []
    for prefix, own, output_len in _draw(options, draw, seed):
        length = len(prefix) + len(own)
        samples.append(Sample(" ".join((prefix + own)[: words_for(length)]), length, output_len))
    return samples


def text_of(num_words: int) -> str:
    """Return words, to measure how a server counts tokens."""
    return " ".join(itertools.islice(itertools.cycle(_WORDS.split()), num_words))


def words_per_token(few: tuple[int, int], many: tuple[int, int]) -> Callable[[int], int]:
    """Return a function from tokens to words, from the (words, tokens) of two texts.

    Tokens are proportional to words, plus a constant for the chat template.
    """
    slope = max((many[1] - few[1]) / (many[0] - few[0]), 1e-9)
    overhead = few[1] - slope * few[0]
    return lambda tokens: max(1, round((tokens - overhead) / slope))


def _draw(
    options: DatasetOptions, draw: Callable[[np.random.Generator, int], list[T]], seed: int
) -> Iterator[tuple[list[T], list[T], int]]:
    """Yield for each request the common prefix, the rest of the prompt, and the output length."""
    rng = np.random.default_rng(seed)
    input_lens = _lengths(rng, options.mean_input_len, options, least=0)
    output_lens = _lengths(rng, options.mean_output_len, options, least=1)
    prefix = draw(rng, options.random_prefix_len)
    for input_len, output_len in zip(input_lens, output_lens, strict=True):
        yield prefix, draw(rng, input_len), output_len


def _lengths(rng: np.random.Generator, mean: int, options: DatasetOptions, least: int) -> list[int]:
    low = max(math.floor(mean * (1 - options.random_range_ratio)), least)
    high = max(math.ceil(mean * (1 + options.random_range_ratio)), low)
    lengths: list[int] = rng.integers(low, high + 1, options.num_prompts).tolist()
    return lengths
