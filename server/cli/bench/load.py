"""When requests are sent: at a rate whatever the server does (open loop), or as others end (closed loop)."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

T = TypeVar("T")


class Clock:
    """Seconds since some moment, and a way to wait for one. Tests have their own."""

    def now(self) -> float:
        return time.perf_counter()

    async def until(self, moment: float) -> None:
        while (left := moment - self.now()) > 0:
            await asyncio.sleep(left)


@dataclass(frozen=True, slots=True)
class SendTimes:
    """When a request was to be sent, when it was, and from when its times are measured."""

    scheduled: float
    sent: float
    start: float


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds from the beginning at which requests arrive; all at 0 for an infinite rate.

    The intervals are gamma distributed with shape `burstiness`: 1 is a Poisson process, less comes in bursts, more is
    more even, infinite is even. They are scaled to sum up to count / rate, so that runs with other seeds compare.
    """
    if math.isinf(rate):
        return [0.0] * count
    rng = np.random.default_rng(seed)
    intervals = np.ones(count) if math.isinf(burstiness) else rng.gamma(burstiness, size=count)
    moments: list[float] = (np.cumsum(intervals) * (count / rate / intervals.sum())).tolist()
    return moments


async def drive(
    send: Callable[[int, SendTimes], Awaitable[T]],
    arrivals: Sequence[float],
    max_concurrency: int | None,
    clock: Clock,
) -> list[T]:
    """Send request after request and return what came of each.

    Without a limit, a request's times are measured from its scheduled arrival, so that a client which falls behind
    cannot make the server look better. With one, they are measured from when there was room for it.
    """
    begun = clock.now()
    room = None if max_concurrency is None else asyncio.Semaphore(max_concurrency)

    async def one(index: int, scheduled: float) -> T:
        try:
            sent = clock.now()
            return await send(index, SendTimes(scheduled, sent, scheduled if room is None else sent))
        finally:
            if room is not None:
                room.release()

    async with asyncio.TaskGroup() as group:
        tasks = []
        for index, arrival in enumerate(arrivals):
            await clock.until(begun + arrival)
            if room is not None:
                await room.acquire()
            tasks.append(group.create_task(one(index, begun + arrival)))
    return [task.result() for task in tasks]
