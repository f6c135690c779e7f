"""The plans whose results have not arrived, and their handling when one fails."""

from __future__ import annotations

from quire.engine.protocol.scheduler_output import CachedRequestData, SchedulerOutput
from quire.engine.scheduler.plans_in_flight import PlansInFlight
from quire.engine.scheduler.request import Request
from tests.unit.engine.scheduler.test_speculation import request


def added(plans: PlansInFlight, *rows: Request) -> SchedulerOutput:
    """A plan of two tokens for each of these requests."""
    step = plans.next_step
    plan = SchedulerOutput(step, [], [], [CachedRequestData(slot, 2, [], []) for slot in range(len(rows))])
    for row in rows:
        row.last_step = step
    plans.add(plan, [*rows])
    return plan


def test_a_request_is_in_flight_until_the_result_of_its_last_row() -> None:
    plans, one, other = PlansInFlight(), request([1]), request([1])
    first, second = added(plans, one, other), added(plans, other)
    assert (len(plans), plans.num_tokens) == (2, 6)
    plans.finish(first)
    assert (plans.contains(one), plans.contains(other), plans.num_tokens) == (False, True, 2)
    plans.finish(second)
    assert not plans.contains(other)
    assert (len(plans), plans.num_tokens, plans.next_step) == (0, 0, 2)


def test_plans_behind_a_failed_one_are_skipped_and_the_next_says_so() -> None:
    plans = PlansInFlight()
    rows = [request([number]) for number in range(4)]
    failed, *skipped = added(plans, *rows[:2]), added(plans, rows[2], rows[1]), added(plans, *rows[1:])
    assert plans.fail(failed.step) == [rows[2], rows[1], rows[3]]
    plans.finish(failed)
    for plan in skipped:
        assert not plan.clears_failure
        assert plans.fail(plan.step) is None
        plans.finish(plan)
    following = [added(plans, rows[0]) for _ in range(2)]
    assert [plan.clears_failure for plan in following] == [True, False]
    assert plans.fail(following[0].step) == [rows[0]]
