"""A plan while it is made: its rows are in the order of the requests, and each change is sent once."""

from __future__ import annotations

import pytest

from quire.engine.protocol.scheduler_output import CachedRequestData
from quire.engine.scheduler.plan_builder import PlanBuilder, PlanLimits
from quire.engine.scheduler.request import Request
from tests.unit.engine.scheduler.test_speculation import request


def running(slot: int, *, computed: int = 0) -> Request:
    """A request of ten tokens."""
    made = request([*range(slot * 10, slot * 10 + 10)])
    made.slot, made.num_computed_tokens = slot, computed
    return made


@pytest.mark.parametrize("keep", [True, False])
def test_rows_with_more_blocks_follow_those_without_changes(keep: bool) -> None:
    plan = PlanBuilder(7, workers_keep_tokens=keep)
    first, second, third, fourth = (running(slot) for slot in range(4))
    plan.decodes += [first, second, third]
    plan.add_decode(fourth, 3, [5], [8, 9])
    plan.add_blocks({fourth: [6], second: [7]})
    output, rows = plan.finish()
    assert rows == [first, third, second, fourth]
    assert (output.step, output.decodes, output.token_ids) == (7, [0, 2], [] if keep else [9, 29])
    last = [[], []] if keep else [[19], [39]]
    assert output.scheduled == [
        CachedRequestData(1, 1, last[0], [7]),
        CachedRequestData(3, 3, last[1], [5, 6], [8, 9]),
    ]


def test_what_the_workers_do_not_know_is_sent_once() -> None:
    plan, one = PlanBuilder(0), running(0)
    one.unsent_to_workers, one.num_accepted = [8, 9], 1
    plan.add_decode(one, 2, [])
    plan.add_decode(one, 1, [])
    one.unsent_to_workers = [4]
    plan.add_chunk(one, 2, [])
    plan.add_chunk(one, 1, [])
    known = [(row.new_token_ids, row.num_accepted) for row in plan.output.scheduled]
    assert known == [([8, 9], 1), ([], 0), ([4], 0), ([], 0)]
    assert plan.num_tokens == 6


@pytest.mark.parametrize(
    ("is_chunked", "tokens_left", "max_chunk", "expected"),
    [(True, 20, 20, 7), (True, 5, 20, 5), (True, 20, 4, 4), (False, 20, 4, 7), (False, 6, 6, 0)],
)
def test_a_chunk_is_within_the_limits(is_chunked: bool, tokens_left: int, max_chunk: int, expected: int) -> None:
    plan, one = PlanBuilder(0, is_chunked=is_chunked), running(0, computed=3)
    plan.decodes.append(running(1))
    limits = PlanLimits(max_rows=2, max_tokens=1 + tokens_left, max_chunk=max_chunk)
    assert plan.chunk(one, limits) == expected
    assert not plan.is_full(limits)
    plan.add_chunk(one, expected, [])
    assert plan.is_full(limits)  # of rows
