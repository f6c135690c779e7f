"""The ranks that count as slower than the others of their stage, and for how long."""

from __future__ import annotations

import logging

import pytest

from quire.engine.executor.local_ranks import ranks_text
from quire.engine.executor.stragglers import StragglerDetector
from quire.engine.protocol.stats import RankStats


class Stages:
    """Ranks whose steps take as long as the slowest of their stage; the others wait for it."""

    def __init__(self, width: int, stages: int = 1) -> None:
        self.times = [RankStats() for _ in range(width * stages)]
        self.width, self.detector = width, StragglerDetector(width, ranks_text)

    def run(self, *busy: float, seconds: float = 60.0) -> list[int]:
        """Let the ranks compute for `busy` seconds a step each, until `seconds` have passed; returns the stragglers."""
        marked: list[RankStats] = []
        passed = 0.0
        while passed < seconds:
            passed += max(busy)
            for rank, each in enumerate(busy):
                first = rank - rank % self.width
                duration = max(busy[first : first + self.width])
                before = self.times[rank]
                self.times[rank] = RankStats(
                    before.steps + 1, before.seconds + duration, before.waited + duration - each
                )
            marked = self.detector.update(self.times)
        return [rank for rank, each in enumerate(marked) if each.is_straggler]


def test_a_slow_rank_is_told_once_until_it_has_recovered(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    stage = Stages(4)
    assert stage.run(0.1, 0.11, 0.1, 0.09) == []
    assert not caplog.messages
    assert stage.run(0.1, 0.11, 0.15, 0.09) == [2]
    assert stage.run(0.1, 0.11, 0.12, 0.09) == [2]  # better, but not as good as the others
    (told,) = caplog.messages
    assert told.startswith(
        "rank 2 is slower than the other ranks of its stage, which wait for it: it computes for 150.0 ms in a step, "
        "they for 100.0 ms; look for "
    )
    assert stage.run(0.1, 0.1, 0.1, 0.1) == []
    assert caplog.messages[1:] == ["rank 2 is no longer slower than the other ranks of its stage"]
    assert stage.run(0.2, 0.1, 0.1, 0.1) == [0]
    assert len(caplog.messages) == 3


def test_two_of_many_may_be_slow() -> None:
    assert Stages(8).run(*[0.1] * 5, 0.14, 0.1, 0.2) == [5, 7]


def test_short_delays_do_not_count() -> None:
    stage = Stages(2)
    for _ in range(10):
        assert stage.run(0.1, 0.3, seconds=10.0) == []
        assert stage.run(0.1, 0.1, seconds=5.0) == []
        assert stage.run(0.3, 0.1, seconds=10.0) == []


def test_a_slow_stage_is_no_straggler() -> None:
    stages = Stages(2, stages=2)
    assert stages.run(0.1, 0.1, 0.4, 0.4) == []
    assert stages.run(0.1, 0.1, 0.4, 0.2) == [2]
    assert stages.run(0.1, 0.2, 0.4, 0.4) == [1]
    assert Stages(1, stages=2).run(0.1, 0.4) == []


def test_ranks_that_report_late_are_compared_by_their_own_steps() -> None:
    """Ranks on other hosts report every second."""
    detector = StragglerDetector(2, ranks_text)
    for step in range(1000):
        known = step - step % 20
        times = detector.update([RankStats(step, step * 0.3, step * 0.02), RankStats(known, known * 0.3, 0.0)])
        assert not any(each.is_straggler for each in times)
