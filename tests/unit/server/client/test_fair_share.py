"""Turns of shares. Tests of shares in the engine are in tests/unit/engine/scheduler."""

from __future__ import annotations

import asyncio
import math

import pytest

from quire.server.client.fair_share import SHARE, FairSlots, Overloaded, Share


class Runs:
    """Tasks that hold a slot until they are told to end."""

    def __init__(self, count: int, max_waiting: float = math.inf) -> None:
        self.slots = FairSlots(count, max_waiting)
        self.begun: list[str] = []
        self.ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def start(self, *names: str) -> None:
        """Start a task for each name, whose first letter is its share."""
        for name in names:
            self.ends[name] = asyncio.Event()
            self.tasks[name] = asyncio.create_task(self._hold(name))
        await settle()

    async def _hold(self, name: str) -> None:
        SHARE.set(Share(name[:1].encode()))
        async with self.slots:
            self.begun.append(name)
            await self.ends[name].wait()

    async def end(self, name: str) -> None:
        self.ends[name].set()
        await settle()

    async def cancel(self, name: str) -> None:
        self.tasks[name].cancel()
        await settle()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_shares_that_wait_take_turns() -> None:
    runs = Runs(2)
    await runs.start("a1", "a2", "a3", "a4", "a5", "b1", "b2", "c1")
    assert runs.begun == ["a1", "a2"]
    for name in ("a1", "a2", "a3", "b1", "c1", "a4", "b2", "a5"):
        await runs.end(name)
    assert runs.begun == ["a1", "a2", "a3", "b1", "c1", "a4", "b2", "a5"]
    await runs.start("d1", "d2", "d3")
    assert runs.begun[-2:] == ["d1", "d2"]
    for name in ("d1", "d2", "d3"):
        await runs.end(name)


async def test_no_more_wait_than_may() -> None:
    runs = Runs(1, max_waiting=4)
    await runs.start("a1", "a2", "a3", "a4", "b1", "b2", "c1")
    for name in ("a4", "c1"):  # half of the room is for other shares
        with pytest.raises(Overloaded):
            await runs.tasks[name]
    await runs.cancel("a2")
    await runs.start("c2")
    for name in ("a1", "b1", "c2", "a3", "b2"):
        await runs.end(name)
    assert runs.begun[0] == "a1"
    assert sorted(runs.begun) == ["a1", "a3", "b1", "b2", "c2"]


async def test_no_slot_is_lost_with_a_task_that_is_cancelled() -> None:
    runs = Runs(1)
    await runs.start("a1", "a2", "b1", "b2")
    await runs.cancel("a2")  # it waits
    await runs.cancel("a1")  # it runs
    assert runs.begun == ["a1", "b1"]
    await runs.end("b1")
    await runs.end("b2")
    await runs.start("a3")
    assert runs.begun[-1] == "a3"
    await runs.end("a3")
    assert all(task.done() for task in runs.tasks.values())


async def test_a_slot_given_to_a_task_that_is_cancelled_goes_on() -> None:
    slots = FairSlots(1)
    await slots.__aenter__()
    first, second = asyncio.create_task(slots.__aenter__()), asyncio.create_task(slots.__aenter__())
    await settle()
    await slots.__aexit__()  # the slot is given to the first one, which has not run yet
    first.cancel()
    await settle()
    assert first.cancelled()
    assert second.done()
