"""Made-up steps that a rank runs before it serves: the largest, for its memory, and decodes, for their kernels.

All KV is that of block 0, and what stands in it afterwards is nobody's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, repeat
from typing import Any

from quire.engine.config.options import EngineConfig
from quire.engine.protocol.messages import CachedRequestData, NewRequestData, SamplingParams, SchedulerOutput

_LONG_CONTEXT, _SHORT_CONTEXT = 16384, 1024
"""Tokens that the largest step's long row and its other rows have behind them at most: attending to more takes time,
and hardly memory (see `memory._longer`)."""
_PENALTIES: dict[str, Any] = {"presence_penalty": 0.1, "frequency_penalty": 0.1, "repetition_penalty": 1.1}
_SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0.8, "top_k": 50},
)
"""For each, `kernels.sample` has other kernels, or other variants of them."""
_PENALTY_LENGTHS = 32, 4096
"""Tokens of a request from which on, and up to which, each power of two has a penalty kernel of its own."""


def largest_step(config: EngineConfig) -> list[SchedulerOutput]:
    """As many tokens and rows as a step may have, which all sample with all that costs memory; and the end of them."""
    rows, tops = largest_rows(config), _max_logprobs(config)
    sampling: dict[str, Any] = {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "seed": 0}
    params = SamplingParams(**sampling, **_PENALTIES, logit_bias={0: 1.0}, logprobs=tops)
    first = SamplingParams(temperature=0.8, logprobs=tops, prompt_logprobs=tops)
    params_of_rows = [params if config.model.pooling is not None else first, *[params] * (len(rows) - 1)]
    return [_plan(config, -2, 0, rows, params_of_rows), _plan(config, -1, len(rows), [], [])]


def largest_rows(config: EngineConfig) -> list[tuple[int, int]]:
    """Of each row, the tokens behind it and its own. Prompts that are embedded are whole; others leave room for one."""
    pools, left = config.model.pooling is not None, config.scheduler.max_num_batched_tokens
    longest = config.model.max_model_len - (not pools)
    rows: list[tuple[int, int]] = []
    while left and len(rows) < config.scheduler.max_num_seqs:
        others = config.scheduler.max_num_seqs - len(rows) - 1
        count = min(longest, left if pools else max(1, left - others))
        computed = 0 if pools else max(0, min(longest, _SHORT_CONTEXT if rows else _LONG_CONTEXT) - count)
        rows.append((computed, count))
        left -= count
    return rows


def decode_steps(config: EngineConfig) -> Iterator[SchedulerOutput]:
    """Decodes of one request and of more and more, each drawn in another way; the first request grows; and their end.

    Kernels come in variants by the number of rows (experts, matrix products), by how a step samples, and by the length
    of what is penalized. As these do not depend on one another, a step tries one of each.
    """
    counts = _powers(1, config.scheduler.max_num_seqs)
    least, most = _PENALTY_LENGTHS
    lengths = _powers(least, min(most, config.model.max_model_len - 1))
    steps = max(len(counts), len(lengths), len(_SAMPLING))
    before = 0
    for number in range(steps):
        count, length = (some[min(number, len(some) - 1)] for some in (counts, lengths))
        params = SamplingParams(**_SAMPLING[number % len(_SAMPLING)])
        first = SamplingParams(**_SAMPLING[number % len(_SAMPLING)], **_PENALTIES, logprobs=_max_logprobs(config))
        rows = [(length - 1, 1), *[(0, 1)] * (count - 1)]
        yield _plan(config, number - steps - 1, before, rows, chain([first], repeat(params, count - 1)))
        before = count
    yield _plan(config, -1, before, [], [])


def _powers(first: int, last: int) -> list[int]:
    """`first`, its double and so on, and `last` in the end, which may be less than all of them."""
    powers = []
    while first < last:
        powers.append(first)
        first *= 2
    return [*powers, last]


def _max_logprobs(config: EngineConfig) -> int:
    """That a request may ask for; as many as are usual where any number may be."""
    row_params = config.model.max_logprobs
    return min(20, config.model.architecture.vocab_size) if row_params < 0 else row_params


def _plan(
    config: EngineConfig,
    number: int,
    released: int,
    rows: Sequence[tuple[int, int]],
    params: Iterable[SamplingParams],
) -> SchedulerOutput:
    """Of new requests with tokens behind them and in this step, in the first slots, of which so many are released."""
    plan = SchedulerOutput(number, list(range(released)), [], [])
    tokens = [0] * max(map(sum, rows), default=0)
    for slot, ((computed, count), row_params) in enumerate(zip(rows, params, strict=True)):
        known = computed + count
        blocks = [0] * (-(-known // config.cache.block_size) * len(config.cache.groups))
        plan.new.append(NewRequestData(slot, tokens[:known], known, computed, blocks, row_params))
        plan.scheduled.append(CachedRequestData(slot, count, [], []))
    plan.has_work = True if config.parallel.is_coupled else None
    return plan
