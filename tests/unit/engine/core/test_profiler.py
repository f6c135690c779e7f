"""The core's part of a profile, with an executor and a wire that live in the test."""

from __future__ import annotations

import threading
from typing import Any

from quire.engine.core.engine_core import EngineCore, Inbound
from quire.engine.protocol.engine_core import ToCore
from quire.engine.protocol.profile import CORE, ProfileOptions, ProfileReply, StartProfile, StopProfile, TracePiece
from quire.engine.protocol.supervision import Shutdown
from tests.unit.engine.core.test_engine_core import core_with, submit, wire_of
from tests.unit.engine.process.test_trace import merged

HOUR = ProfileOptions(3600.0, 0)


def start(call_id: int, options: ProfileOptions = HOUR, client: int = 0) -> StartProfile:
    return StartProfile(client, call_id, options)


def run(core: EngineCore) -> None:
    """Run the core, and wait until it has sent its trace."""
    before = set(threading.enumerate())
    core.run()
    for thread in set(threading.enumerate()) - before:
        thread.join(10)


def replies(core: EngineCore) -> list[tuple[int, str]]:
    return [(m.call_id, m.error) for _, m in wire_of(core).sent if isinstance(m, ProfileReply)]


def spans(core: EngineCore, client: int) -> list[dict[str, Any]]:
    pieces = [m for c, m in wire_of(core).sent if isinstance(m, TracePiece) and c == client]
    assert {piece.rank for piece in pieces} == {CORE}
    summary = pieces[-1].summary
    assert summary is not None
    events = merged(*(each.data for each in pieces[:-1]), summaries=[summary])["traceEvents"]
    found = [event for event in events if event["ph"] == "X"]
    assert len(found) == summary.num_events
    return found


def test_ranks_start_and_stop_with_plans_and_the_loop_is_recorded_between_them() -> None:
    commands: list[tuple[int, object]] = []
    script: dict[int, list[Inbound]] = {3: [start(7)], 8: [StopProfile(1, 8)], 12: [Shutdown()]}
    core = core_with(script, [submit(0, "a", [1], 50)])
    executed = core.executor.submit

    def submit_plan(plan: Any, limit: float) -> Any:
        commands.append((plan.step, plan.profile))
        return executed(plan, limit)

    core.executor.submit = submit_plan  # type: ignore[method-assign]
    run(core)
    assert [(step, each) for step, each in commands if each] == [(4, start(7)), (9, StopProfile(1, 8))]
    assert replies(core) == [(7, ""), (8, "")]
    found = spans(core, client=1)
    steps = {name: [e["args"]["step"] for e in found if e["name"] == name] for name in ("schedule", "update")}
    assert steps == {"schedule": [4, 5, 6, 7, 8, 9], "update": [4, 5, 6, 7, 8]}
    assert {event["name"] for event in found} >= {"receive", "wait for result", "send"}
    assert found[0]["args"] == {"step": 4, "requests": 1, "prefill_tokens": 0, "decode_tokens": 1}
    assert all(event["ts"] > 0 and event["dur"] >= 0 for event in found)


def test_an_idle_replica_is_profiled_by_heartbeats() -> None:
    core = core_with({0: [StopProfile(0, 2)], 1: [Shutdown()]}, [start(1)])
    run(core)
    assert replies(core) == [(1, ""), (2, "")]


def test_only_one_profile_runs_at_a_time() -> None:
    first: list[ToCore] = [StopProfile(0, 1), start(2), start(3)]
    script: dict[int, list[Inbound]] = {0: [start(4)], 1: [StopProfile(0, 5)], 3: [StopProfile(0, 6)]}
    core = core_with({**script, 5: [Shutdown()]}, [*first, submit(0, "a", [1], 50)])
    run(core)
    errors = dict(replies(core))
    assert errors[1] == "no profile is running; start one with start_profile"  # a route, or a method of `LLM`
    assert "just being started" in errors[3]
    assert "running already" in errors[4]
    assert errors[4].endswith("; stop it with stop_profile")
    assert (errors[2], errors[5]) == ("", "")
    assert "no profile is running" in errors[6]


def test_a_forgotten_profile_ends_by_itself_and_gives_way_to_the_next() -> None:
    short = ProfileOptions(1e-9, 0)
    core = core_with(
        {1: [start(2)], 3: [StopProfile(0, 3, discard=True)], 6: [Shutdown()]},
        [
            start(1, short),
            submit(0, "a", [1], 50),
        ],
    )
    run(core)
    assert replies(core) == [(1, ""), (2, ""), (3, "")]
    assert not [m for _, m in wire_of(core).sent if isinstance(m, TracePiece)], "nobody wants it"


def test_commands_that_are_in_flight_at_the_same_time_belong_to_their_own_profiles() -> None:
    origin = ProfileOptions(3600.0, -(10**15))
    script: dict[int, list[Inbound]] = {
        4: [StopProfile(0, 2)],
        5: [StopProfile(0, 3)],
        6: [start(4, origin)],
        7: [StopProfile(1, 5), start(6)],
        8: [StopProfile(0, 7, discard=True)],
        12: [Shutdown()],
    }
    core = core_with(script, [start(1), *(submit(0, name, [1], 50) for name in "abcd")], stages=4)
    run(core)
    assert [call for call, _ in replies(core)] == [1, 3, 6, 2, 7, 4, 5], "the refused ones at once"
    assert [call for call, error in replies(core) if error] == [3, 6, 7]
    first, second = spans(core, client=0), spans(core, client=1)
    assert max(event["ts"] for event in first) + 10**12 < min(event["ts"] for event in second)


def test_a_start_that_no_rank_has_seen_is_taken_back() -> None:
    commands: list[object] = []
    core = core_with({3: [Shutdown()]}, [start(1), StopProfile(0, 2, discard=True), submit(0, "a", [1], 50)])
    executed = core.executor.submit

    def submit_plan(plan: Any, limit: float) -> Any:
        commands.append(plan.profile)
        return executed(plan, limit)

    core.executor.submit = submit_plan  # type: ignore[method-assign]
    run(core)
    assert [each for each in commands if each] == [StopProfile(0, 2, discard=True)]
    assert [(call, bool(error)) for call, error in replies(core)] == [(1, True), (2, False)]
