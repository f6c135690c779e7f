"""The engine without a server: scheduler and a single rank in this process, driven like the engine core does."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from quire.engine.config.options import EngineOptions
from quire.engine.config.resolve import resolve
from quire.engine.executor import factory
from quire.engine.executor.base import STEP_TIMEOUT, StepFuture
from quire.engine.protocol.engine_core import EngineCoreRequest
from quire.engine.protocol.media import MediaItem
from quire.engine.protocol.sampling_params import SamplingParams
from quire.engine.protocol.scheduler_output import SchedulerOutput
from quire.engine.scheduler.scheduler import Scheduler


@dataclass(frozen=True)
class Step:
    """A plan whose result has arrived."""

    plan: SchedulerOutput
    ended: float
    """`time.perf_counter`"""

    @property
    def rows(self) -> int:
        return self.plan.num_rows

    @property
    def is_decode(self) -> bool:
        """Whether every row has one token."""
        return self.plan.num_tokens == self.plan.num_rows


class Engine:
    """A loaded model and its requests."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.executor = factory.start(resolve(EngineOptions(**options)), "warning", on_end=lambda: None)
        self.config = self.executor.config
        self.scheduler = Scheduler(self.config)
        self.outputs: dict[str, list[int]] = {}
        """Output tokens of each request so far."""

    def add(self, name: str, prompt: list[int], output: int, media: Sequence[MediaItem] = (), **params: Any) -> None:
        """Add a request with exactly `output` tokens, greedy unless `params` says otherwise; `media` are its images."""
        asked = SamplingParams(**({"temperature": 0.0} | params), max_tokens=output, ignore_eos=True)
        refusal = self.scheduler.add(EngineCoreRequest(0, name, prompt, asked.for_engine(seed=0), media=[*media]))
        assert refusal is None, refusal
        self.outputs[name] = []

    def steps(self) -> Iterator[Step]:
        """Run until no request is left, with as many plans in flight as `EngineCore.run`."""
        in_flight: deque[tuple[SchedulerOutput, StepFuture]] = deque()
        depth = self.config.scheduler.depth
        while in_flight or self.scheduler.has_work:
            plan = self.scheduler.schedule()
            if plan is not None:
                in_flight.append((plan, self.executor.submit(plan, STEP_TIMEOUT)))
            if in_flight and (len(in_flight) == depth or plan is None):
                done, pending = in_flight.popleft()
                news = self.scheduler.update(done, pending.result())
                ended = time.perf_counter()
                for reported in news.values():
                    for output in reported.outputs:
                        self.outputs[output.request_id] += output.token_ids
                    for name, token in zip(reported.request_ids, reported.token_ids, strict=True):
                        self.outputs[name].append(token)
                yield Step(done, ended)

    def run(self) -> None:
        """All steps."""
        for _ in self.steps():
            pass

    def close(self) -> None:
        self.executor.close()
