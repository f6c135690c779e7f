"""The positions that several heads compute again, without a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from quire.engine.distributed.communicator import Parallel
from quire.engine.protocol.sampling_params import SamplingParams
from quire.engine.protocol.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from quire.engine.worker.head_drafter import SeveralHeadsDrafter
from quire.engine.worker.input_batch import InputBatch


class Heads(SeveralHeadsDrafter):
    """Three heads for one request in slot 1, of which only the books are kept."""

    def __init__(self) -> None:
        head = SimpleNamespace(arch=SimpleNamespace(num_heads=3))
        super().__init__(cast(Any, head), [], Parallel(), cast(Any, None))
        self.input_batch, self.slots = InputBatch(4, 64, 16), np.array([1])

    def start(self, num_computed: int, freed: list[int]) -> None:
        """The slot has a new request, with so many tokens of the prefix cache."""
        new = NewRequestData(1, [*range(40)], 40, num_computed, [0, 1, 2], SamplingParams())
        self.input_batch.apply(SchedulerOutput(0, freed, [new], [CachedRequestData(1, 1, [], [])]))

    def run(self, first: int, count: int) -> int:
        """The heads run in a step; how many positions before it are computed again."""
        at = np.array([first])
        behind = self._catch_up(at, self.slots, self.input_batch)
        self._remember(self.slots, at, behind, at + count, self.input_batch)
        return int(behind[0])


@pytest.fixture
def heads() -> Heads:
    made = Heads()
    made.start(0, [])
    return made


def test_the_last_positions_of_the_step_before_are_computed_again(heads: Heads) -> None:
    """As many as there are heads behind the first one, if the request has had so many since they run."""
    assert [heads.run(first, 1) for first in range(4)] == [0, 1, 2, 2]
    assert heads.run(4, 30) == 2
    assert heads.run(34, 4) == 2
    assert heads.run(35, 4) == 2  # none of three drafts has counted


@pytest.mark.parametrize("cached", [0, 16])
def test_another_request_in_the_slot_begins_anew(heads: Heads, cached: int) -> None:
    """Or the same one, after it was preempted: earlier positions were computed with other states."""
    heads.run(0, 30)
    heads.start(cached, [1])
    assert heads.run(cached, 4) == 0
    assert heads.run(cached + 4, 1) == 2


def test_so_does_one_after_a_step_without_the_heads(heads: Heads) -> None:
    """Even if it is within earlier drafts: 34 to 37 with rejected drafts, 35 without the heads."""
    assert heads.run(0, 34) == 0
    assert heads.run(34, 4) == 2
    heads.input_batch.drafted_until[heads.slots] = 0
    assert heads.run(36, 1) == 0
    assert heads.run(37, 1) == 1
