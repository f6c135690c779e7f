"""How much work a step takes: its share of what is at hand, and so many prompt tokens that nobody waits too long.

With pipeline stages, each plan in flight gets its share of the rows and of the pending tokens, so that no stage stands
idle while another is overfull. Where steps are tuned, prompt tokens are given to a plan by the time that it will take,
which is learned from the steps that ran (see `quire.engine.scheduler.step_time`).
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.engine.config.options import SchedulerConfig
from quire.engine.protocol.messages import SchedulerOutput
from quire.engine.scheduler.request import Request
from quire.engine.scheduler.request_queue import RequestQueue
from quire.engine.scheduler.step_time import StepLoad, StepTimeModel

_LEAST_SHARE = 256
"""Tokens that a stage may always take: a step of fewer costs about as much, as it reads the same weights."""
_FIRST_CHUNK = 256
"""Prompt tokens of a tuned step before anything is known of its time. From there, at most twice what was measured."""
_LEAST_CHUNK = 32
"""Prompt tokens that a tuned step may always take, whatever its target, so that prompts get on."""
_DECODE_STEPS = (5.0, 15.0)
"""A step with prompt tokens takes by default as long as so many of decodes alone: few, so that nobody waits long for a
token, but more where prompts queue up, which are then computed at nearly the best rate."""
_SOON = 8.0
"""Prompts that so many short steps compute do not queue up. With three times as many, steps are as long as they get."""
_LOOK_AHEAD = 32
"""Waiting requests that are looked at for it."""
_ALONE_EVERY = 64
"""Of plans with decodes and prompt tokens, one in so many leaves the prompts out, to measure the decodes alone."""
_LEAST_TARGET = 0.02
"""Seconds: steps of small models need not be shorter, as nobody sees it."""
_OVERHEAD = 0.05
"""The part of a step of prompts alone that may go into its fixed cost."""


class TokenBudget:
    """The limits of the plan that is being made."""

    def __init__(self, config: SchedulerConfig, stages: int) -> None:
        self.config = config
        self.stages = stages
        self.step_time = StepTimeModel() if config.is_tuned else None
        self._loads: dict[int, StepLoad] = {}
        """What each plan in flight computes, where its time is learned from."""
        self._mixed_plans = _ALONE_EVERY
        """Tuned plans since the last that left the prompts out."""

    def share(self, running: Sequence[Request], waiting: RequestQueue, tokens_in_flight: int) -> tuple[int, int]:
        """Rows and tokens that a plan may take of the work at hand: one part in `stages`, rounded up.

        What is in flight counts as work at hand, so that a long prompt is cut into equal chunks.
        """
        limits = self.config
        if self.stages == 1:
            return limits.max_num_seqs, limits.max_num_batched_tokens
        room = limits.max_num_seqs - len(running)
        rows = -(-(len(running) + min(room, len(waiting))) // self.stages)
        if not limits.enable_chunked_prefill:
            return rows, limits.max_num_batched_tokens
        tokens = tokens_in_flight + sum(request.num_pending_tokens for request in running) + waiting.pending(room)
        share = max(-(-tokens // self.stages), _LEAST_SHARE)
        return rows, min(limits.max_num_batched_tokens, share)

    def prompt_tokens(
        self,
        decodes: int,
        context: int,
        prefilling: Sequence[Request],
        waiting: RequestQueue,
        *,
        is_latency_bound: bool,
    ) -> int:
        """Prompt tokens that a tuned plan takes beside its decodes: so many that the step stays within the target.

        `context` is how many KV tokens the decodes read. Unless the step `is_latency_bound` by somebody who needs its
        next token, it is as long as it pays.
        """
        limits, step_time = self.config, self.step_time
        most = limits.max_num_batched_tokens
        if step_time is None or not (prefilling or waiting):
            return most
        if limits.itl_target is None and decodes:
            self._mixed_plans += 1
            if self._mixed_plans > _ALONE_EVERY:
                self._mixed_plans = 0
                return 0
        most = min(most, max(_FIRST_CHUNK, 2 * step_time.most_prompt_tokens))
        if not step_time.is_ready:
            return min(most, _FIRST_CHUNK)
        if not is_latency_bound:
            return int(min(most, max(_FIRST_CHUNK, step_time.paying_prompt_tokens(_OVERHEAD))))
        position = prefilling[0].num_computed_tokens if prefilling else 0

        def within(seconds: float) -> int:
            tokens = step_time.prompt_tokens_within(seconds, decodes, context, position)
            return max(_LEAST_CHUNK, int(min(most, tokens)))

        if limits.itl_target is not None:
            return within(limits.itl_target / self.stages)  # a token passes every stage
        short, long = _DECODE_STEPS
        target = max(_LEAST_TARGET, short * step_time.predict(StepLoad(0, decodes, context, 0.0)))
        queued = sum(request.num_pending_tokens for request in prefilling) + waiting.pending(_LOOK_AHEAD)
        return within(target * min(long / short, max(1.0, queued / within(target) / _SOON)))

    def on_scheduled(self, plan: SchedulerOutput, rows: Sequence[Request], decodes: int, context: int) -> None:
        """A plan goes out, of which the first rows are decodes (more than a token each where some are forced)."""
        if self.step_time is None:
            return
        prompt_context = 0.0
        chunks = plan.scheduled[decodes - len(plan.decodes) :]
        for request, row in zip(rows[decodes:], chunks, strict=True):
            prompt_context += row.num_tokens * (request.num_computed_tokens - row.num_tokens / 2)
        self._loads[plan.step] = StepLoad(plan.num_tokens - decodes, decodes, context, prompt_context)

    def learn(self, plan: SchedulerOutput, seconds: float | None) -> None:
        """The step of this plan took so long; None: nobody can say. To be called for every plan."""
        load = self._loads.pop(plan.step, None)
        if load is not None and seconds is not None and self.step_time is not None:
            self.step_time.learn(load, seconds)
