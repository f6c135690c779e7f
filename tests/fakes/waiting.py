"""Waits for what other threads and processes do, which end with what was last seen."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")


def _pauses(seconds: float, seen: Callable[[], object]) -> Iterator[float]:
    """How long to sleep before each next look: longer and longer. Raises `AssertionError` when the time is over."""
    begin = time.monotonic()
    while (passed := time.monotonic() - begin) < seconds:
        yield min(0.001 + passed / 10, 0.1)
    raise AssertionError(f"it has not come to that within {seconds:g} seconds; last seen: {seen()}")


def until(look: Callable[[], T], seconds: float = 120.0, seen: Callable[[], object] | None = None) -> T:
    """Look repeatedly, until what is found is true; returns it. The error has what was `seen`, or found, last."""
    pauses = _pauses(seconds, seen or (lambda: repr(found)))
    while not (found := look()):
        time.sleep(next(pauses))
    return found


async def until_async(
    look: Callable[[], object], seconds: float = 120.0, seen: Callable[[], object] | None = None
) -> None:
    """As `until`, on the event loop; a coroutine that `look` returns is awaited."""
    pauses = _pauses(seconds, seen or (lambda: repr(found)))
    while not (found := await each if inspect.isawaitable(each := look()) else each):
        await asyncio.sleep(next(pauses))
