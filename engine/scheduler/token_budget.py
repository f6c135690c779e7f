"""The token budget: how many rows and tokens a plan may contain.

With pipeline stages, each plan in flight gets an equal share of the rows and of the pending tokens, so that no stage is
idle while another is overloaded. With automatic step size, the number of prompt tokens in a plan is chosen by the
predicted step time, which is learned from measured steps (see `quire.engine.scheduler.step_time`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from quire.engine.architecture.media_spec import NO_WORK, TowerWork
from quire.engine.config.engine_config import SchedulerConfig
from quire.engine.protocol.scheduler_output import SchedulerOutput
from quire.engine.scheduler.request import Request
from quire.engine.scheduler.request_queue import RequestQueue
from quire.engine.scheduler.step_time import StepLoad, StepTimeModel

_FIRST_CHUNK = 256
"""Prompt tokens of a tuned step before step times are known; then at most twice the largest number measured."""
_MIN_CHUNK = 32
"""Minimum prompt tokens of a tuned step whatever its target, so that prefills progress."""
_DECODE_STEPS = (5.0, 15.0)
"""Default target of a step with prompt tokens, as a multiple of a decode-only step: low for a short inter-token
latency, up to the second value when prompts queue up, which are then computed at nearly the best rate."""
_MAX_QUEUED_STEPS = 8.0
"""Prompts that this many short steps can compute do not count as queued. With three times as many, the target reaches
its maximum."""
_LOOK_AHEAD = 32
"""Number of waiting requests counted as queued."""
_ENCODER_SHARE = 0.8
"""Share of the target time that a step may fill that encodes images, or has a prompt before the end of some: a tower's
steps are predicted less exactly than tokens, and an image keeps many steps full."""
_DECODE_ONLY_EVERY = 64
"""One in this many mixed plans contains decodes only, to measure them."""
_MIN_TARGET = 0.02
"""Seconds. Shorter steps of small models have no visible benefit."""
_MAX_OVERHEAD = 0.05
"""Maximum share of the fixed cost in the time of a prompt-only step."""
_MAX_LARGER = 2
"""How many times larger than any before an image may be for a prediction."""


def _largest_item(plan: SchedulerOutput) -> int:
    """Features of the largest image that a plan encodes, at least in part."""
    return max((item.num_features for item in plan.media.encoded), default=0) if plan.media is not None else 0


class TowerTime(NamedTuple):
    """The time that a plan has for a tower."""

    seconds: float
    cost: Callable[[TowerWork], float]
    """Seconds of such work; infinite while they are not known."""


class TokenBudget:
    """Computes the row and token limits of each plan."""

    def __init__(self, config: SchedulerConfig, stages: int) -> None:
        self.config = config
        self.stages = stages
        self.step_time = StepTimeModel() if config.dynamic_chunking else None
        self._loads: dict[int, StepLoad] = {}
        """The load of each plan in flight, to learn its step time."""
        self._largest_item = 0
        """Features of the largest image that a measured step has encoded: patches that attend to each other cost more
        in larger ones."""
        self._mixed_plans = _DECODE_ONLY_EVERY
        """Mixed plans since the last decode-only one."""

    def share(self, running: Sequence[Request], waiting: RequestQueue, tokens_in_flight: int) -> tuple[int, int]:
        """Return the maximum rows and tokens of a plan: the pending work divided by `stages`, rounded up.

        Tokens in flight count as pending, so that a long prompt is split into equal chunks.
        """
        limits = self.config
        if self.stages == 1:
            return limits.max_num_seqs, limits.max_num_batched_tokens
        room = limits.max_num_seqs - len(running)
        rows = -(-(len(running) + min(room, len(waiting))) // self.stages)
        tokens = tokens_in_flight + sum(request.num_pending_tokens for request in (*running, *waiting.first(room)))
        return rows, limits.share(tokens, self.stages)

    def measures_decodes(self, decodes: int, prefilling: Sequence[Request], waiting: RequestQueue) -> bool:
        """Whether a plan that could have prompts or images beside its decodes has only these, to measure them."""
        if self.step_time is None or self.config.itl_target is not None or not decodes or not (prefilling or waiting):
            return False
        self._mixed_plans = (self._mixed_plans + 1) % (_DECODE_ONLY_EVERY + 1)
        return not self._mixed_plans

    def max_prompt_tokens(
        self,
        decodes: int,
        context: int,
        prefilling: Sequence[Request],
        waiting: RequestQueue,
        tower: TowerWork = NO_WORK,
        *,
        is_latency_bound: bool,
        waits_for_encoder: bool = False,
    ) -> int:
        """Return the maximum prompt tokens of a plan, such that the step stays within its target time.

        `context` is the number of KV tokens that the decodes read, and `tower` the work on images in the step.
        `waits_for_encoder`: all prompts have waited for these. If the step is not latency-bound, because no request
        waits for its next token, it is as long as is efficient.
        """
        limits, step_time = self.config, self.step_time
        limit = limits.max_num_batched_tokens
        if step_time is None or not (prefilling or waiting):
            return limit
        limit = min(limit, max(_FIRST_CHUNK, 2 * step_time.max_prompt_tokens_seen))
        if not step_time.is_ready:
            return min(limit, _FIRST_CHUNK)
        if not is_latency_bound:
            return int(min(limit, max(_FIRST_CHUNK, step_time.efficient_prompt_tokens(_MAX_OVERHEAD))))
        position = prefilling[0].num_computed_tokens if prefilling else 0

        def within(seconds: float, tower: TowerWork = tower) -> int:
            tokens = step_time.prompt_tokens_within(seconds, decodes, context, position, tower)
            return max(0 if any(tower) and waits_for_encoder else _MIN_CHUNK, int(min(limit, tokens)))

        has_images = any(tower) or any(request.num_computed_tokens < request.media_end for request in prefilling)
        target = self._target(step_time, decodes, context, has_images=has_images)
        if limits.itl_target is not None:
            return within(target)
        short, long = _DECODE_STEPS
        # What waits for images does not queue up: these come one by one, most of the time.
        queued = sum(request.num_pending_texts for request in (*prefilling, *waiting.first(_LOOK_AHEAD)))
        return within(target * min(long / short, max(1.0, queued / within(target, NO_WORK) / _MAX_QUEUED_STEPS)))

    def _target(self, step_time: StepTimeModel, decodes: int, context: int, *, has_images: bool) -> float:
        """Target of a latency-bound step with these decodes, in seconds, if no prompts queue up."""
        share = _ENCODER_SHARE if has_images else 1.0
        if self.config.itl_target is not None:
            return share * self.config.itl_target / self.stages  # a token passes through every stage
        return share * max(_MIN_TARGET, _DECODE_STEPS[0] * step_time.predict(StepLoad(0, decodes, context, 0.0)))

    def prompt_seconds(self, start: int, end: int) -> float | None:
        """Return the expected time for a prompt's tokens from `start` to `end`; None: it is not known."""
        step_time = self.step_time
        return step_time.prompt_seconds(start, end) or None if step_time is not None and step_time.is_ready else None

    def tower_time(self, decodes: int, context: int, waits_for_encoder: bool) -> TowerTime:
        """Return the time for a tower in a latency-bound step, next to the minimum prompt tokens if a prompt does not
        wait for features. Step times must be modelled."""
        assert self.step_time is not None
        target = self._target(self.step_time, decodes, context, has_images=True)
        load = StepLoad(0 if waits_for_encoder else _MIN_CHUNK, decodes, context, 0.0)
        return TowerTime(target - self.step_time.predict(load), self.step_time.tower_seconds)

    def max_chunk(self, tokens_left: int, num_prompts: int, *, is_alone: bool) -> int:
        """Return the maximum tokens of a prompt in a plan with `tokens_left` for `num_prompts` prompts.

        `is_alone`: there is no other request.
        """
        share = -(-tokens_left // max(1, min(num_prompts, self.config.max_num_partial_prefills)))
        return share if is_alone else min(share, self.config.long_prefill_token_threshold or share)

    def on_scheduled(
        self, plan: SchedulerOutput, rows: Sequence[Request], decodes: int, context: int, tower: TowerWork
    ) -> None:
        """Record the load of a plan with this work of a tower, and whose first rows are decodes (of several tokens each
        if a grammar forces some).

        Not of one without rows, which does not wait for a GPU. Not of one with drafts, which cost less than the tokens
        of prompts, or after which some are made. Not of one that copies adapters to devices.
        """
        if self.step_time is None or not rows or plan.num_drafts or plan.num_draft_tokens or plan.places_adapters:
            return
        prompt_context = 0.0
        chunks = plan.scheduled[decodes - len(plan.decodes) :]
        for request, row in zip(rows[decodes:], chunks, strict=True):
            prompt_context += row.num_tokens * (request.num_computed_tokens - row.num_tokens / 2)
        self._loads[plan.step] = StepLoad(plan.num_tokens - decodes, decodes, context, prompt_context, *tower)

    def predict(self, plan: SchedulerOutput) -> float | None:
        """Return the expected duration of a plan's step, in seconds; None if too few steps have been measured, or none
        with images of about this size."""
        load = self._loads.get(plan.step)
        if load is None or self.step_time is None or not self.step_time.can_predict(load):
            return None
        if _largest_item(plan) > _MAX_LARGER * self._largest_item:
            return None
        return self.step_time.predict(load)

    def learn(self, plan: SchedulerOutput, seconds: float | None) -> None:
        """Record how long the plan's step took (None: unknown). Must be called for every plan."""
        load = self._loads.pop(plan.step, None)
        if load is not None and seconds is not None and self.step_time is not None:
            self.step_time.learn(load, seconds)
            self._largest_item = max(self._largest_item, _largest_item(plan))
