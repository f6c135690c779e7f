"""Requests in the order in which they go: sorted lists of those that run, and the heap of those that wait."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort

from quire.engine.scheduler.request import Request


def order(request: Request) -> tuple[int, int]:
    return request.order


def insert(queue: list[Request], request: Request) -> None:
    """Put a request into a list that is sorted by `order`."""
    insort(queue, request, key=order)


def discard(queue: list[Request], request: Request) -> bool:
    """Take a request out of a list that is sorted by `order`; False if it is not there."""
    index = bisect_left(queue, request.order, key=order)
    found = index < len(queue) and queue[index] is request
    if found:
        del queue[index]
    return found


class RequestQueue:
    """Requests that wait to be admitted. Those that end meanwhile stay in the heap until they are met."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Request]] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(self, request: Request) -> None:
        heapq.heappush(self._heap, (request.order, request))
        self._count += 1

    def first(self) -> Request | None:
        while self._heap and self._heap[0][1].finish_reason is not None:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> None:
        """Take the `first` out."""
        heapq.heappop(self._heap)
        self._count -= 1

    def end_one(self) -> None:
        """One of those that wait has ended."""
        self._count -= 1
        if len(self._heap) > 2 * self._count + 64:
            self._heap = [entry for entry in self._heap if entry[1].finish_reason is None]
            heapq.heapify(self._heap)

    def pending(self, most: int) -> int:
        """Tokens of about the first `most` that are to be computed."""
        return sum(request.num_pending_tokens for _, request in self._heap[:most] if request.finish_reason is None)

    def check_integrity(self) -> list[Request]:
        """Assert that the count is right; returns those that wait."""
        waiting = [request for _, request in self._heap if request.finish_reason is None]
        assert self._count == len(waiting)
        return waiting
