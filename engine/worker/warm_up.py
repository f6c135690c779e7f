"""Warm-up steps that a rank runs before it accepts requests: the largest step, to measure its memory, and decode steps,
to compile their kernels.

All requests use block 0, whose content is meaningless afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, repeat
from typing import Any

from quire.engine.config.engine_config import CacheConfig, EngineConfig
from quire.engine.protocol.sampling_params import SamplingParams
from quire.engine.protocol.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput

_LONG_CONTEXT, _SHORT_CONTEXT = 16384, 1024
"""Maximum tokens computed before the largest step, for its long row and for its other rows: attending to more takes
time but hardly any memory (see `memory._extra_workspace`)."""
_PENALTIES: dict[str, Any] = {"presence_penalty": 0.1, "frequency_penalty": 0.1, "repetition_penalty": 1.1}
_SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0.8, "top_k": 50},
)
"""`kernels.sample` has different kernels, or variants of them, for each of these."""
_PENALTY_LENGTHS = 32, 4096
"""Penalty kernels come in one variant for each power of two tokens in this range."""


def largest_step(config: EngineConfig) -> list[SchedulerOutput]:
    """A plan with the maximum number of tokens and rows, all of which sample with every feature that costs memory; and
    a plan that releases them."""
    rows, tops = largest_rows(config), _max_logprobs(config)
    sampling: dict[str, Any] = {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "seed": 0}
    params = SamplingParams(**sampling, **_PENALTIES, logit_bias={0: 1.0}, logprobs=tops)
    first = SamplingParams(temperature=0.8, logprobs=tops, prompt_logprobs=tops)
    params_of_rows = [params if config.model.pooling is not None else first, *[params] * (len(rows) - 1)]
    plan = _plan(config, -2, 0, rows, params_of_rows)
    if (drafts := min(config.scheduler.max_sampled_tokens - len(rows), rows[0][1] - 1)) > 0:
        plan.new[0].token_ids = plan.new[0].token_ids[:-drafts]
        plan.scheduled[0].draft_token_ids = [0] * drafts
    return [plan, _plan(config, -1, len(rows), [], [])]


def largest_rows(config: EngineConfig) -> list[tuple[int, int]]:
    """The computed tokens and the new tokens of each row. Embedding requests have whole prompts; others leave room for
    one token."""
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
    """Decode steps of more and more requests, each with another sampling method, while the first request grows; and a
    plan that releases them.

    Kernels have variants by the number of rows (experts, matrix products), by the sampling method, and by the length
    for penalties. As these are independent of each other, each step covers one variant of each.
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
    """`first`, doubled as long as it is less than `last`, and finally `last`."""
    powers = []
    while first < last:
        powers.append(first)
        first *= 2
    return [*powers, last]


def _max_logprobs(config: EngineConfig) -> int:
    """The maximum that a request may ask for; the usual maximum if there is no limit."""
    limit = config.model.max_logprobs
    return min(20, config.model.architecture.vocab_size) if limit < 0 else limit


def _plan(
    config: EngineConfig,
    number: int,
    num_freed: int,
    rows: Sequence[tuple[int, int]],
    params: Iterable[SamplingParams],
) -> SchedulerOutput:
    """A plan that releases the first `num_freed` slots and adds one new request for each of `rows`."""
    plan = SchedulerOutput(number, list(range(num_freed)), [], [])
    tokens = [0] * max(map(sum, rows), default=0)
    for slot, ((computed, count), row_params) in enumerate(zip(rows, params, strict=True)):
        known = computed + count
        blocks = _block_ids(config.cache, computed, known)
        plan.new.append(NewRequestData(slot, tokens[:known], known, computed, blocks, row_params))
        plan.scheduled.append(CachedRequestData(slot, count, [], []))
    plan.has_work = True if config.parallel.is_coupled else None
    if (speculative := config.scheduler.speculative) is not None and speculative.model is not None:
        plan.num_drafts = speculative.num_speculative_tokens
    return plan


def _block_ids(cache: CacheConfig, computed: int, known: int) -> list[int]:
    """Block 0 everywhere, except where a row neither reads nor writes a recurrent state."""
    size = cache.block_size
    last = {max(0, computed - 1) // size, (known - 1) // size}
    places = range(-(-known // size))
    return [-1 if group.is_state and place not in last else 0 for place in places for group in cache.groups]
