"""What is asked: prompts of given lengths, with a shared beginning or without, as token ids or as text."""

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
"""Added to the seed, so that the prompts of a warm-up are not those that are measured."""
_WORDS = """
time year people way day man thing woman life child world school state family student group country problem hand
part place case week company system program question work government number night point home water room mother
area money story fact month lot right study book eye job word business issue side kind head house service friend
father power hour game line end member law car city community name president team minute idea kid body
information back parent face others level office door health person art war history party result change morning
reason research girl guy moment air teacher force education
"""
"""Common enough to be one token each in most vocabularies."""


@dataclass(frozen=True, kw_only=True)
class DatasetOptions:
    """Which requests a benchmark makes; the names are those of `vllm bench`."""

    num_prompts: int = flag(1000, "requests to make")
    random_input_len: int = flag(1024, "tokens of a prompt, the shared prefix not included")
    random_output_len: int = flag(128, "tokens of an answer")
    random_range_ratio: float = flag(
        0.0, "lengths are drawn evenly from length × (1 - X) to length × (1 + X)", metavar="X"
    )
    random_prefix_len: int = flag(0, "tokens that all prompts begin with alike, before their own")
    input_len: int | None = flag(None, "the same as --random-input-len")
    output_len: int | None = flag(None, "the same as --random-output-len")

    @property
    def mean_input_len(self) -> int:
        return self.random_input_len if self.input_len is None else self.input_len

    @property
    def mean_output_len(self) -> int:
        return self.random_output_len if self.output_len is None else self.output_len

    def check(self) -> None:
        """Raise `ConfigError` for what cannot be drawn."""
        if self.num_prompts < 1:
            raise ConfigError(f"--num-prompts {self.num_prompts}: at least 1 is needed")
        if not 0.0 <= self.random_range_ratio < 1.0:
            raise ConfigError(f"--random-range-ratio {self.random_range_ratio}: from 0 to below 1")
        if self.random_prefix_len < 0 or self.mean_input_len < 0 or self.mean_output_len < 1:
            raise ConfigError("lengths must not be negative, and an answer has at least one token")
        if self.random_prefix_len + math.floor(self.mean_input_len * (1 - self.random_range_ratio)) < 1:
            raise ConfigError("a prompt has at least one token: raise --random-input-len")


@dataclass(frozen=True)
class Sample:
    """One request: its prompt, the prompt's length and the output's, in tokens."""

    prompt: list[int] | str
    prompt_len: int
    output_len: int


def token_samples(options: DatasetOptions, vocab_size: int, seed: int) -> list[Sample]:
    """Prompts of random token ids."""
    first = min(_FIRST_ID, vocab_size // 2)

    def draw(rng: np.random.Generator, count: int) -> list[int]:
        ids: list[int] = rng.integers(first, vocab_size, count).tolist()
        return ids

    return [
        Sample(prefix + own, len(prefix) + len(own), output_len)
        for prefix, own, output_len in _draw(options, draw, seed)
    ]


def text_samples(options: DatasetOptions, words_for: Callable[[int], int], seed: int) -> list[Sample]:
    """Prompts of random words, for servers that take no token ids; `words_for` says how many make N tokens."""

    words = _WORDS.split()

    def draw(rng: np.random.Generator, count: int) -> list[str]:
        return [words[index] for index in rng.integers(0, len(words), count)]

    samples = []
    for prefix, own, output_len in _draw(options, draw, seed):
        length = len(prefix) + len(own)
        samples.append(Sample(" ".join((prefix + own)[: words_for(length)]), length, output_len))
    return samples


def text_of(num_words: int) -> str:
    """Words to find out with how many tokens a server counts."""
    return " ".join(itertools.islice(itertools.cycle(_WORDS.split()), num_words))


def words_per_token(few: tuple[int, int], many: tuple[int, int]) -> Callable[[int], int]:
    """How many words make N tokens, from what two texts of (words, tokens) came to.

    Tokens grow in proportion to words, above what a chat template adds.
    """
    slope = max((many[1] - few[1]) / (many[0] - few[0]), 1e-9)
    overhead = few[1] - slope * few[0]
    return lambda tokens: max(1, round((tokens - overhead) / slope))


def _draw(
    options: DatasetOptions, draw: Callable[[np.random.Generator, int], list[T]], seed: int
) -> Iterator[tuple[list[T], list[T], int]]:
    """For each request the shared prefix, its own part of the prompt, and the length of its output."""
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
