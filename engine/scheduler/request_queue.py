"""Request order: sorted lists for running requests, and a queue for waiting ones."""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from operator import attrgetter

from quire.engine.scheduler.request import Request, ShareQueue

_SERVED = attrgetter("served")
_LOAD_AND_SERVED = attrgetter("load", "served")


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
    """Requests waiting for admission, by share. A request that ends while waiting is removed from its heap lazily.

    Two things are shared: places in the running batch, and the prompt tokens of a step. Among shares with less than
    their part of the places, the least served is first: start-time fair queueing (Goyal et al., 1996) of prompt tokens.
    Then follow the others, the one with the lowest load first: weighted max-min fairness of places. Inside a share,
    requests are sorted by `Request.order`.
    """

    def __init__(self) -> None:
        self._shares: dict[bytes, ShareQueue] = {}
        """Shares with unfinished requests."""
        self._count = 0
        self._virtual_time = 0.0
        """The highest `ShareQueue.served` at which a share was served: where one starts that had no waiting
        requests."""

    def __len__(self) -> int:
        return self._count

    @property
    def shares(self) -> Collection[ShareQueue]:
        """The shares with unfinished requests, running ones included."""
        return self._shares.values()

    def share(self, key: bytes, weight: float) -> ShareQueue:
        """Return the share of a new request."""
        share = self._shares.get(key) or ShareQueue(key, weight)
        if share.weight != weight:
            share.weight = weight
            share.count_running(0)
        return share

    def add(self, request: Request) -> None:
        """Queue a new request."""
        self._shares[request.share.key] = request.share
        request.share.num_requests += 1
        self.push(request)

    def push(self, request: Request) -> None:
        """Queue a new or preempted request."""
        share = request.share
        if not share.num_waiting:
            share.served = max(share.served, self._virtual_time)
        heapq.heappush(share.waiting, (request.order, request))
        share.num_waiting += 1
        self._count += 1

    def peek(self, num_places: int) -> Request | None:
        """Return the next request to admit, if the shares divide `num_places` places among them."""
        if not self._count:
            return None
        share, *others = [share for share in self._shares.values() if share.num_waiting]
        if others:
            part = num_places / sum([share.weight for share in self._shares.values()])
            if below := [share for share in (share, *others) if share.load < part]:
                share = min(below, key=_SERVED)
            else:
                share = min((share, *others), key=_LOAD_AND_SERVED)
        while share.waiting[0][1].finish_reason is not None:
            heapq.heappop(share.waiting)
        return share.waiting[0][1]

    def pop(self, request: Request) -> None:
        """Remove the request that `peek` has returned."""
        heapq.heappop(request.share.waiting)
        request.share.num_waiting -= 1
        self._count -= 1

    def withdraw(self, request: Request) -> None:
        """Remove the request that `peek` has returned until it is added again, with the share that it will have."""
        self.pop(request)
        request.share.num_requests -= 1
        if not request.share.num_requests:
            del self._shares[request.share.key]

    def serve(self, request: Request, count: int) -> None:
        """Count scheduled prompt tokens."""
        share = request.share
        self._virtual_time = max(self._virtual_time, share.served)
        share.served += count / share.weight

    def finish(self, request: Request) -> None:
        """Forget a request that has ended, running or waiting."""
        share = request.share
        share.num_requests -= 1
        if not share.num_requests:
            del self._shares[share.key]
        if request.slot is None:
            share.num_waiting -= 1
            self._count -= 1
            if len(share.waiting) > 2 * share.num_waiting + 64:
                share.waiting = [entry for entry in share.waiting if entry[1].finish_reason is None]
                heapq.heapify(share.waiting)

    def by_place(self, running: list[Request]) -> list[Request]:
        """Return the running requests, the first one to preempt last.

        A request's place is the number of requests of its share before it, divided by the weight.
        """
        if len(self._shares) <= 1:
            return running
        seen: Counter[bytes] = Counter()
        places: list[tuple[float, tuple[int, int], Request]] = []
        for request in running:
            share = request.share
            places.append((seen[share.key] / share.weight, request.order, request))
            seen[share.key] += 1
        return [request for _, _, request in sorted(places)]

    def overloaded(self, below: ShareQueue) -> ShareQueue | None:
        """Return the most loaded share, if its load exceeds `below`'s even without its newest request."""
        shares = [share for share in self.shares if share.num_running > 1]
        share = max(shares, key=_load_without_newest, default=below)
        return share if _load_without_newest(share) > below.load else None

    def first(self, limit: int) -> Iterator[Request]:
        """Approximately the first `limit` requests."""
        first = itertools.islice(itertools.chain.from_iterable(share.waiting for share in self.shares), limit)
        return (request for _, request in first if request.finish_reason is None)

    def check_integrity(self, running: Sequence[Request]) -> list[Request]:
        """Assert that the counts are right; returns the waiting requests."""
        waiting = [r for share in self.shares for _, r in share.waiting if r.finish_reason is None]
        assert self._count == len(waiting)
        num_waiting, num_running = (Counter(request.share.key for request in each) for each in (waiting, running))
        assert self._shares.keys() == num_waiting.keys() | num_running.keys()
        for key, share in self._shares.items():
            assert (share.num_waiting, share.num_running) == (num_waiting[key], num_running[key])
            assert share.num_requests == share.num_waiting + share.num_running
            assert share.load == share.num_running / share.weight
        assert all(request.share is self._shares[request.share.key] for request in (*waiting, *running))
        return waiting


def _load_without_newest(share: ShareQueue) -> float:
    return (share.num_running - 1) / share.weight
