"""A scheduler of a few lines: requests by hand, chunks by choice, blocks from a shuffled pool."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec import structs

from quire.engine.protocol.adapters import NO_SLOT, AdapterPlan
from quire.engine.protocol.logprobs import TokenLogprobs
from quire.engine.protocol.media import MediaItem
from quire.engine.protocol.runner_output import EncoderOutput, ModelRunnerOutput
from quire.engine.protocol.sampling_params import SamplingParams
from quire.engine.protocol.scheduler_output import CachedRequestData, MediaPlan, NewRequestData, SchedulerOutput
from quire.engine.worker.model_runner import ModelRunner

Execute = Callable[[SchedulerOutput], ModelRunnerOutput | None]


def executing(runner: ModelRunner) -> Execute:
    """A function that runs each step to its end."""

    def execute(plan: SchedulerOutput) -> ModelRunnerOutput | None:
        result = runner.launch(plan).result()
        assert not isinstance(result, EncoderOutput)
        return result

    return execute


@dataclass
class Request:
    prompt: list[int]
    params: SamplingParams
    output: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    slot: int = -1
    computed: int = 0
    known: int = 0
    """Tokens that the workers know."""
    blocks: list[int] = field(default_factory=list)
    media: list[MediaItem] = field(default_factory=list)
    adapter_slot: int = NO_SLOT
    adapter_start: int = 0

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output


class Driver:
    """Turns calls into plans. One plan is in flight at a time."""

    def __init__(
        self,
        execute: Execute,
        slots: int,
        num_blocks: int,
        block_size: int,
        *,
        workers_keep: bool = True,
        groups: int = 1,
    ) -> None:
        """`workers_keep`: with a single stage, sampled tokens need not be sent. `groups` of layers have blocks each."""
        self._workers_keep, self._groups = workers_keep, groups
        self._execute, self._block_size = execute, block_size
        self._slots, self._blocks = list(range(slots)), list(range(num_blocks))
        random.Random(0).shuffle(self._blocks)
        self._released: list[int] = []
        self._step = 0
        self._encoded: set[bytes] = set()
        self.encoding_failures: dict[bytes, str] = {}
        self.adapter_failures: dict[bytes, str] = {}
        """Both of all steps."""
        self._freed: list[bytes] = []
        self.adapters: AdapterPlan | None = None
        """Of the next step."""

    def step(self, *rows: tuple[Request, int]) -> None:
        """Run `count` more tokens of each request, and add the sampled tokens."""
        plan = SchedulerOutput(self._step, self._released, [], [])
        self._step, self._released = self._step + 1, []
        plan.adapters, self.adapters = self.adapters, None
        if self._freed:
            plan.media, self._freed = MediaPlan([], self._freed), []
        for request, count in rows:
            needed = self._groups * -(-(request.computed + count) // self._block_size) - len(request.blocks)
            fresh = [self._blocks.pop() for _ in range(needed)]
            request.blocks += fresh
            if request.slot < 0:
                request.slot = self._slots.pop()
                new = (request.slot, request.tokens, len(request.prompt), 0, list(request.blocks), request.params)
                media = [structs.replace(item, data=None) for item in request.media]
                own = NewRequestData(*new, media=media)
                own.adapter_slot, own.adapter_start = request.adapter_slot, request.adapter_start
                plan.new.append(own)
                plan.scheduled.append(CachedRequestData(request.slot, count, [], []))
            else:
                plan.scheduled.append(CachedRequestData(request.slot, count, request.tokens[request.known :], fresh))
            self._plan_media(plan, request, count)
            request.known = len(request.tokens)
            request.computed += count
        result = self._execute(plan)
        assert result is not None
        assert result.step == plan.step
        self.encoding_failures |= result.encoding_failures
        self.adapter_failures |= result.adapter_failures
        assert len(result.token_ids) == len(rows)
        assert len(result.logprobs) in (0, len(rows))
        for number, (request, _) in enumerate(rows):
            sampled = result.token_ids[number]
            assert (sampled >= 0) == (request.computed == request.known)
            if sampled >= 0:
                request.output.append(sampled)
                request.known += self._workers_keep
                request.logprobs += result.logprobs[number : number + 1]

    def _plan_media(self, plan: SchedulerOutput, request: Request, count: int) -> None:
        """Encode the items that the row reaches, unless they are known."""
        begin, end = request.computed, request.computed + count
        found = [item for item in request.media if item.offset < end and item.end > begin]
        needed = [item for item in found if item.digest not in self._encoded]
        if needed:
            plan.media = plan.media or MediaPlan([], [])
            plan.media.encoded += needed
            self._encoded.update(item.digest for item in needed)

    def drop(self, item: MediaItem) -> None:
        """Free an item's features in the next step."""
        self._encoded.discard(item.digest)
        self._freed.append(item.digest)

    def release(self, request: Request) -> None:
        """Preempt the request, or end it: its slot and blocks are free, its tokens stay."""
        self._released.append(request.slot)
        self._slots.insert(0, request.slot)
        self._blocks = request.blocks + self._blocks
        request.slot, request.computed, request.known, request.blocks = -1, 0, 0, []

    def decode(self, requests: list[Request], until: int, budget: int) -> None:
        """Step until each has `until` output tokens, with at most `budget` tokens a step, decodes first."""
        while open := [request for request in requests if len(request.output) < until]:
            left, rows = budget, []
            for request in sorted(open, key=lambda request: len(request.tokens) - request.computed):
                count = min(left, len(request.tokens) - request.computed)
                if count:
                    rows.append((request, count))
                    left -= count
            self.step(*rows)
