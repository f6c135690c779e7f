"""Request order: sorted lists for running requests, and a heap for waiting ones."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort

from quire.engine.scheduler.request import Request


def order(request: Request) -> tuple[int, int]:
    return request.order


def insert(queue: list[Request], request: Request) -> None:
    """Insert a request into a list sorted by `order`."""
    insort(queue, request, key=order)


def discard(queue: list[Request], request: Request) -> bool:
    """Remove a request from a list sorted by `order`; returns False if it is not in the list."""
    index = bisect_left(queue, request.order, key=order)
    is_present = index < len(queue) and queue[index] is request
    if is_present:
        del queue[index]
    return is_present


class RequestQueue:
    """Requests waiting for admission. A request that ends while waiting is removed from the heap lazily."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Request]] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(self, request: Request) -> None:
        heapq.heappush(self._heap, (request.order, request))
        self._count += 1

    def peek(self) -> Request | None:
        while self._heap and self._heap[0][1].finish_reason is not None:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> None:
        """Remove the request that `peek` returns."""
        heapq.heappop(self._heap)
        self._count -= 1

    def discard_one(self) -> None:
        """Count one waiting request as ended."""
        self._count -= 1
        if len(self._heap) > 2 * self._count + 64:
            self._heap = [entry for entry in self._heap if entry[1].finish_reason is None]
            heapq.heapify(self._heap)

    def pending(self, limit: int) -> int:
        """Pending tokens of approximately the first `limit` requests."""
        return sum(request.num_pending_tokens for _, request in self._heap[:limit] if request.finish_reason is None)

    def check_integrity(self) -> list[Request]:
        """Assert that the count is right; returns the waiting requests."""
        waiting = [request for _, request in self._heap if request.finish_reason is None]
        assert self._count == len(waiting)
        return waiting
