"""The schedule of requests: at a given rate (open loop), or when others finish (closed loop)."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

T = TypeVar("T")


class LoadClock:
    """Seconds since a fixed moment, and a way to wait for a moment. Tests replace it."""

    def now(self) -> float:
        return time.perf_counter()

    async def until(self, moment: float) -> None:
        while (left := moment - self.now()) > 0:
            await asyncio.sleep(left)


@dataclass(frozen=True, slots=True)
class SendTimes:
    """The times at which a request was scheduled and sent, and from which its times are measured."""

    scheduled: float
    sent: float
    start: float


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds from the start at which requests arrive; all 0 for an infinite rate.

    The intervals are gamma distributed with shape `burstiness`: 1 is a Poisson process, less is burstier, more is more
    even, infinite is perfectly even. They are scaled to a sum of count / rate, so that runs with different seeds are
    comparable.
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
    clock: LoadClock,
) -> list[T]:
    """Send the requests and return their results.

    Without a concurrency limit, times are measured from the scheduled arrival, so that a slow client cannot make the
    server look better. With a limit, they are measured from when the limit admits the request.
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
