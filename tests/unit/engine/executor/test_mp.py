"""The time for which an executor waits for ranks that are processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from quire.engine.executor import mp
from quire.engine.executor.base import WorkerError
from quire.engine.protocol.runner_output import EncoderOutput, ModelRunnerOutput
from tests.fakes.configs import engine_config


class Waiting(mp.ProcessExecutor):
    """An executor of one rank, whose progress at each poll is given. A poll takes a second, and the last one brings the
    result of step 3."""

    def __init__(self, progress: Sequence[int], clock: SimpleNamespace) -> None:
        super().__init__(engine_config().parallel)
        self._left, self._clock = deque(progress), clock
        arrived, encoded = deque[ModelRunnerOutput](), dict[int, EncoderOutput]()
        self._ranks: Any = SimpleNamespace(arrived=arrived, encoded=encoded, progress=[*progress[:1]], waiting=[])

    def _poll(self, timeout: float | None) -> bool:
        self._clock.now += 1.0
        self._ranks.progress = [self._left.popleft()]
        if not self._left:
            self._ranks.arrived.append(ModelRunnerOutput(3, []))
        return True


@pytest.mark.parametrize(
    ("progress", "is_late"), [([2, 2, 4, 4, 6, 6], False), ([2, 2, 2, 2], True), ([2, 4, 6, 6, 6, 6, 6], True)]
)
def test_progress_extends_the_time_of_a_step(
    progress: list[int], is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(mp, "time", SimpleNamespace(monotonic=lambda: clock.now))
    executor = Waiting(progress, clock)
    if is_late:
        with pytest.raises(WorkerError, match="rank 0 did not answer within 3 s"):
            executor.receive(3, 3.0)
    else:
        assert executor.receive(3, 3.0).step == 3


def test_a_result_has_what_the_first_stage_reports_of_its_items(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which may arrive behind the result of the last stage, or before that of the step before."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(mp, "time", SimpleNamespace(monotonic=lambda: clock.now))
    executor = Waiting([], clock)
    executor._has_stages = True
    failures = {b"digest": "it is too large"}
    arriving: list[ModelRunnerOutput | EncoderOutput] = [ModelRunnerOutput(3, []), EncoderOutput(4, failures)]
    arriving += [EncoderOutput(3, {}), ModelRunnerOutput(4, [])]

    def poll(timeout: float | None) -> bool:
        match message := arriving.pop(0):
            case ModelRunnerOutput():
                executor._ranks.arrived.append(message)
            case EncoderOutput(step):
                executor._ranks.encoded[step] = message
        return True

    monkeypatch.setattr(executor, "_poll", poll)
    assert not executor.receive(3, 9.0, encodes=True).encoding_failures
    assert executor.receive(4, 9.0, encodes=True).encoding_failures == failures
    assert not executor._ranks.encoded
