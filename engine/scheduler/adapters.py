"""The adapters of requests: which ones the ranks have in the host's memory, and which ones are in slots of the devices.

Plain Python, no torch: the weights are on the ranks, and this module only does the bookkeeping. An adapter is known by
its digest. All ranks of the replica read an adapter when the first request needs it, beside the steps, and keep it
until its room is needed for another one and no request has it, or as long as it is *pinned*. A few are read at a time.
The others wait in line here, and none is begun while those that wait for a slot fill the memory, so that requests with
many cannot exceed it by much. A reading that has begun goes on without its requests, so that a client that asks again
finds what it has waited for, and each rank answers once.

A request whose adapter is not prepared is not in the queue of the scheduler, so it delays nobody. One whose adapter has
no slot leaves the queue when its turn comes, unless slots and bytes of adapters without running requests are enough for
it. Adapters that wait for a slot get it in this order. For the first of them, the adapters that started least recently
are *reserved*, as many as it needs: their requests leave the queue, too, so that they run out. So neither a stream of
requests with other adapters keeps one waiting forever, nor do waiting ones delay requests without an adapter.

Workers apply the changes of a plan before its rows, and run plans in order: a slot that a plan frees was last read by
an earlier one. What a plan assigns is used at once, by the running request that it is assigned for, or to encode its
image: if it changes the tower, it keeps its slot to the end of the plan that completes the image.

Invariants (`check_integrity`):
- the slots in use are different, and what they hold is no more than the capacity, and prepared;
- the adapters of running requests, and of the image that is encoded in parts, have a slot;
- what no request has and is not pinned is dropped before the host's memory exceeds its limit; what is pinned fits.
"""

from __future__ import annotations

import math
import time
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import chain, takewhile

from quire.engine.config.engine_config import EngineConfig
from quire.engine.config.lora_config import no_room_to_pin, too_large
from quire.engine.protocol.adapters import MAX_READS, NO_RANK, NO_SLOT, AdapterPlan, AdapterPrepared, AdapterRef
from quire.engine.protocol.stats import EngineStats
from quire.engine.scheduler.request import Request

_DIGEST_BYTES = 32
_READ_SECONDS = 540.0
"""Seconds after which the requests with an adapter that is being read end, so that they do not wait forever for a disk
that does not answer: less than those after which a server gives up loading it, which would not know why."""


@dataclass(slots=True, eq=False)
class KnownAdapter:
    """An adapter that requests need, or that the ranks have."""

    ref: AdapterRef
    requests: dict[Request, None] = field(default_factory=dict)
    """Unfinished requests."""
    is_called: bool = False
    """Its turn to be read comes even if no request needs it any more."""
    num_answers: int = 0
    """Ranks that have answered."""
    is_prepared: bool = False
    is_pinned: bool = False
    """It is prepared, and stays."""
    error: str = ""
    """A rank cannot use it; the others have yet to answer."""
    is_invalid: bool = False
    """See `AdapterPrepared`."""
    host_bytes: int = 0
    """On the rank with the most."""
    device_bytes: int = 0
    changes_tower: bool = False
    """See `AdapterPrepared`."""
    num_running: int = 0
    """Running requests, and the item that is encoded with it in parts."""
    slot: int | None = None
    """Its device slot."""
    unqueued: dict[Request, None] = field(default_factory=dict)
    """Requests that have left the queue, and wait for a slot."""


class AdapterManager:
    """Decides which adapters the ranks read, keep, and have in slots of their devices."""

    def __init__(self, config: EngineConfig, stats: EngineStats) -> None:
        lora = config.lora
        self._num_slots, self._capacity, self._max_host_bytes = (
            (0, 0, 0) if lora is None else (lora.num_slots, lora.device_bytes, lora.host_bytes)
        )
        self._world_size, self._stats = config.parallel.world_size, stats
        self._known: dict[bytes, KnownAdapter] = {}
        self._unread: dict[bytes, None] = {}
        """Adapters that the ranks are not asked for yet, in order."""
        self._reading: dict[bytes, float] = {}
        """Adapters that some rank has yet to answer for, and until when (`time.monotonic`); inf: that has passed."""
        self._idle: OrderedDict[bytes, None] = OrderedDict()
        """Prepared adapters without requests that are not pinned, in the order in which they will be dropped."""
        self._pins: dict[int, list[bytes]] = {}
        """Adapters that are to be pinned when they are prepared, as far as there is room, by API process."""
        self._pinned: dict[bytes, None] = {}
        """All of them."""
        self._pinned_bytes = 0
        """Of those that are."""
        self._host_bytes = 0
        """Of prepared adapters."""
        self._free_slots = [*range(self._num_slots)]
        """A heap: low slots first."""
        self._resident: OrderedDict[bytes, None] = OrderedDict()
        """Adapters with a slot, the one that started least recently first."""
        self._resident_bytes = 0
        self._awaiting: dict[bytes, None] = {}
        """Adapters that wait for a slot, in order. The requests of those that could have one are in the queue."""
        self._reserved: set[bytes] = set()
        """Adapters with a slot that run out for the first of `_awaiting`."""
        self._unqueued: dict[bytes, None] = {}
        """Adapters with requests in `KnownAdapter.unqueued`."""
        self._plan = AdapterPlan()
        """Of the next plan."""

    # --- requests ---------------------------------------------------------------------------------------------

    def error_of(self, adapter: AdapterRef) -> tuple[str, bool]:
        """Why a new request cannot have an adapter, and whether it is invalid; empty: it can, as far as is known."""
        if not self._num_slots:
            return "adapters are not supported here; start the server with --enable-lora", True
        if len(adapter.digest) != _DIGEST_BYTES or not adapter.paths:
            return f"the adapter has no digest of {_DIGEST_BYTES} bytes, or no path", True
        known = self._known.get(adapter.digest)
        return ("", True) if known is None else (known.error, known.is_invalid)

    def add(self, request: Request) -> bool:
        """Add a request; returns whether it may be queued now. Otherwise it may when its adapter is prepared."""
        if (adapter := request.core_request.adapter) is None:
            return True
        known = self._know(adapter)
        self._idle.pop(adapter.digest, None)
        known.requests[request] = None
        self._read()
        return known.is_prepared

    def prepare(self, adapter: AdapterRef) -> tuple[str, bool] | None:
        """Let the ranks read an adapter. Returns like `error_of`; None: `on_prepared` will."""
        if (found := self.error_of(adapter))[0]:
            return found
        known = self._know(adapter)
        known.is_called = not known.is_prepared
        if adapter.digest in self._idle:
            self._idle.move_to_end(adapter.digest)
        self._read()
        return found if known.is_prepared else None

    def pin_all(self, client: int, digests: Iterable[bytes]) -> None:
        """Pin these adapters, now or when they are prepared, as far as there is room, and no others except those of
        other API processes."""
        self._pins[client] = [*digests]
        self._pinned = dict.fromkeys(chain.from_iterable(self._pins.values()))
        for digest, known in self._known.items():
            if known.is_pinned and digest not in self._pinned:
                known.is_pinned, self._pinned_bytes = False, self._pinned_bytes - known.host_bytes
                if not known.requests:
                    self._idle[digest] = None
        for digest in self._pinned:
            self.pin(digest)
        self._trim()

    def pin(self, digest: bytes) -> tuple[str, bool]:
        """Pin an adapter that was prepared. Returns why it cannot be pinned, and whether that stays so; empty: it is
        pinned."""
        known = self._known.get(digest)
        if known is not None and known.is_pinned:
            return "", True
        if known is None and digest not in self._pinned:
            return "the adapter was to be pinned, but has been dropped meanwhile; load it again", False
        # One that is to be pinned is dropped only if pinned ones alone leave it no room.
        if known is None or not known.is_prepared or self._pinned_bytes + known.host_bytes > self._max_host_bytes:
            return no_room_to_pin(self._pinned_bytes, self._max_host_bytes), True
        known.is_pinned, self._pinned_bytes = True, self._pinned_bytes + known.host_bytes
        self._idle.pop(digest, None)
        return "", True

    def _know(self, adapter: AdapterRef) -> KnownAdapter:
        if (known := self._known.get(adapter.digest)) is None:
            known = self._known[adapter.digest] = KnownAdapter(adapter)
            self._unread[adapter.digest] = None
        if adapter.digest in self._unread:
            known.ref = adapter  # the earlier request's paths may be gone
        return known

    def requests_of(self, digest: bytes) -> list[Request]:
        """The unfinished requests with an adapter."""
        return [] if (known := self._known.get(digest)) is None else [*known.requests]

    def changes_tower(self, request: Request) -> bool:
        """Whether the features of a request's items depend on its adapter, which is prepared."""
        adapter = request.core_request.adapter
        return adapter is not None and self._known[adapter.digest].changes_tower

    def is_queued(self, request: Request) -> bool:
        """Whether a request that does not run is in the queue, or could be."""
        if (adapter := request.core_request.adapter) is None:
            return True
        known = self._known[adapter.digest]
        return known.is_prepared and request not in known.unqueued

    def finish(self, request: Request) -> None:
        """Remove a request that has ended and does not run."""
        if (adapter := request.core_request.adapter) is None:
            return
        digest, known = adapter.digest, self._known[adapter.digest]
        del known.requests[request]
        known.unqueued.pop(request, None)
        if not known.unqueued:
            self._unqueued.pop(digest, None)
        if not known.requests:
            if digest in self._awaiting:
                del self._awaiting[digest]
                self._reserve()
            self._release(digest, known)
            self._read()

    def _release(self, digest: bytes, known: KnownAdapter) -> None:
        """Keep an adapter without requests as long as there is room; forget it if it cannot be used, or is in line."""
        if known.is_prepared:
            if not known.is_pinned:
                self._idle[digest] = None
            self._trim()
        elif known.num_answers == self._world_size or (digest in self._unread and not known.is_called):
            self._forget(digest)

    def _trim(self) -> None:
        """Drop adapters without requests until the others fit into the host's memory."""
        while self._host_bytes > self._max_host_bytes and self._idle:
            self._forget(next(iter(self._idle)))

    # --- the host's memory ------------------------------------------------------------------------------------

    def _read(self) -> None:
        """Ask the ranks for the next adapters in line, unless enough wait for a slot."""
        while self._unread and sum(map(math.isfinite, self._reading.values())) < MAX_READS:
            kept = (each for each in self._known.values() if each.is_prepared and each.requests and each.slot is None)
            size = sum(each.host_bytes for each in kept if not each.is_pinned)
            if size and size >= self._max_host_bytes - self._pinned_bytes:
                break
            digest = next(iter(self._unread))
            del self._unread[digest]
            self._reading[digest] = time.monotonic() + _READ_SECONDS
            self._plan.prepared.append(self._known[digest].ref)

    def _forget(self, digest: bytes) -> None:
        """Let the ranks drop an adapter that no request has, and that they do not read."""
        known = self._known.pop(digest)
        if known.slot is not None:
            self._evict(digest, known)
        if known.is_prepared:
            self._host_bytes -= known.host_bytes
        self._idle.pop(digest, None)
        if digest in self._unread:
            del self._unread[digest]
        else:
            self._plan.dropped.append(digest)

    def on_prepared(self, answer: AdapterPrepared) -> str | None:
        """Process a rank's answer. Returns why the adapter cannot be used, so that its requests must end; empty: they
        may be queued now; None: nothing has changed.
        """
        digest, known = answer.digest, self._known[answer.digest]
        known.num_answers += answer.rank != NO_RANK
        known.host_bytes = max(known.host_bytes, answer.host_bytes)
        known.device_bytes = max(known.device_bytes, answer.device_bytes)
        known.changes_tower |= answer.changes_tower
        if not (had_error := bool(known.error)):
            known.error, known.is_invalid = answer.error, answer.is_invalid
        if known.num_answers == self._world_size:
            del self._reading[digest]
            if known.device_bytes > self._capacity and not known.error:
                known.error = too_large(known.device_bytes, self._capacity)
            if not known.error:
                known.is_prepared, known.is_called = True, False
                self._host_bytes += known.host_bytes
                if digest in self._pinned:
                    self.pin(digest)
            if not known.requests:
                self._release(digest, known)
        self._trim()
        self._read()
        return known.error if known.is_prepared or (known.error and not had_error) else None

    def overdue(self) -> list[AdapterPrepared]:
        """Answers in place of those that ranks should have given by now, once for each adapter. It is not read again
        before they have."""
        now, answers = time.monotonic(), list[AdapterPrepared]()
        for digest, deadline in self._reading.items():
            if deadline <= now:
                self._reading[digest] = math.inf
                error = (
                    f"{self._known[digest].ref.paths[-1]} has not been read within {_READ_SECONDS:g} s; its disk or "
                    "network may not answer. The adapter can be used once it has been read; restart the server if that "
                    "does not happen"
                )
                answers.append(AdapterPrepared(digest, NO_RANK, error=error, is_invalid=False))
        return answers

    # --- slots ------------------------------------------------------------------------------------------------

    def can_start(self, request: Request) -> bool:
        """Whether a queued request may start, as far as its adapter is concerned."""
        if (adapter := request.core_request.adapter) is None:
            return True
        digest, known = adapter.digest, self._known[adapter.digest]
        if digest in self._unqueued:
            return False
        if known.slot is not None:
            return digest not in self._reserved
        first = self._known[next(iter(self._awaiting), digest)]
        return self._has_room(known) and (first is known or self._has_room(first))

    def wait(self, request: Request) -> None:
        """Let a request that cannot start, and has left the queue, wait until `take_startable` returns it."""
        assert request.core_request.adapter is not None
        digest = request.core_request.adapter.digest
        known = self._known[digest]
        known.unqueued[request] = self._unqueued[digest] = None
        if known.slot is None and digest not in self._awaiting:
            self._awaiting[digest] = None
            self._reserve()

    def take_startable(self) -> list[Request]:
        """Return the requests that have left the queue and may be in it again."""
        if not self._unqueued:
            return []
        self._reserve()
        ready = [digest for digest in self._unqueued if digest in self._resident and digest not in self._reserved]
        ready += takewhile(lambda digest: self._has_room(self._known[digest]), self._awaiting)
        requests: list[Request] = []
        for digest in ready:
            requests += self._known[digest].unqueued
            self._known[digest].unqueued.clear()
            self._unqueued.pop(digest, None)
        return requests

    def _has_room(self, known: KnownAdapter) -> bool:
        """Whether a slot and the bytes for an adapter are free, or used by adapters without running requests."""
        unused = [each for each in map(self._known.__getitem__, self._resident) if not each.num_running]
        free = self._capacity - self._resident_bytes + sum(each.device_bytes for each in unused)
        return bool(self._free_slots or unused) and known.device_bytes <= free

    def _reserve(self) -> None:
        """Choose the adapters that run out for the first one that waits for a slot."""
        self._reserved.clear()
        first = next(iter(self._awaiting), None)
        if first is None or self._has_room(known := self._known[first]):
            return
        slots, free = len(self._free_slots), self._capacity - self._resident_bytes
        for digest in self._resident:
            if slots and known.device_bytes <= free:
                break
            self._reserved.add(digest)
            slots, free = slots + 1, free + self._known[digest].device_bytes

    def start(self, request: Request) -> None:
        """Give a request that is admitted, or one of whose items is encoded, a slot with its adapter, as `can_start`
        allows."""
        if (adapter := request.core_request.adapter) is None:
            return
        digest, known = adapter.digest, self._known[adapter.digest]
        if known.slot is None:
            for other in [*self._resident]:
                if self._free_slots and self._resident_bytes + known.device_bytes <= self._capacity:
                    break
                if not self._known[other].num_running:
                    self._evict(other, self._known[other])
            known.slot = heappop(self._free_slots)
            self._resident[digest] = None
            self._resident_bytes += known.device_bytes
            self._plan.assigned.append((known.slot, digest))
            self._stats.adapter_swaps += 1
            self._awaiting.pop(digest, None)
            self._reserve()
            self._read()
        self._resident.move_to_end(digest)
        known.num_running += 1

    def stop(self, request: Request) -> None:
        """Note that a request no longer runs, or its item is encoded."""
        if (adapter := request.core_request.adapter) is not None:
            self._known[adapter.digest].num_running -= 1

    def slot_of(self, request: Request) -> int:
        """The device slot that the adapter of a request has after `start`."""
        adapter = request.core_request.adapter
        slot = NO_SLOT if adapter is None else self._known[adapter.digest].slot
        assert slot is not None
        return slot

    def _evict(self, digest: bytes, known: KnownAdapter) -> None:
        assert known.slot is not None
        assert not known.num_running
        del self._resident[digest]
        self._reserved.discard(digest)
        self._resident_bytes -= known.device_bytes
        heappush(self._free_slots, known.slot)
        self._plan.freed.append(known.slot)
        known.slot = None
        if known.unqueued:
            self._awaiting[digest] = None

    # --- plans ------------------------------------------------------------------------------------------------

    @property
    def has_changes(self) -> bool:
        """Whether the ranks have to learn of something."""
        plan = self._plan
        return bool(plan.prepared or plan.dropped or plan.assigned or plan.freed)

    @property
    def has_startable(self) -> bool:
        """Whether requests wait that are in no queue, for others that run."""
        return bool(self._unqueued)

    def take_plan(self) -> AdapterPlan | None:
        """Return the changes for the current plan; None: there are none."""
        if not self.has_changes:
            return None
        plan, self._plan = self._plan, AdapterPlan()
        return plan

    def on_failed(self, digest: bytes) -> None:
        """Free the slot of an adapter that could not be placed, whose requests have ended."""
        if (known := self._known.get(digest)) is not None and known.slot is not None:
            self._evict(digest, known)

    def count(self) -> None:
        """Set the gauges."""
        self._stats.adapters_prepared = len(self._known) - len(self._unread) - len(self._reading)
        self._stats.adapters_on_device = len(self._resident)

    def check_integrity(
        self, running: Collection[Request], requests: Iterable[Request], encoding: Request | None
    ) -> set[Request]:
        """Assert the invariants between two plans; returns the requests that are not in the queue. One of the items of
        `encoding` is encoded in parts with its adapter."""
        found, num_running, unqueued = dict[bytes, set[Request]](), Counter[bytes](), set[Request]()
        for request in requests:
            if (adapter := request.core_request.adapter) is not None:
                found.setdefault(adapter.digest, set()).add(request)
        for request in [*running] if encoding is None else [*running, encoding]:
            if (adapter := request.core_request.adapter) is not None:
                num_running[adapter.digest] += 1
        for digest, known in self._known.items():
            assert known.requests.keys() == found.pop(digest, set())
            assert known.num_running == num_running[digest]
            assert not known.num_running or known.slot is not None
            assert (digest in self._unread) + (digest in self._reading) + known.is_prepared == 1
            assert known.is_prepared == (known.num_answers == self._world_size)
            assert (digest in self._idle) == (known.is_prepared and not known.requests and not known.is_pinned)
            assert known.is_prepared or not known.is_pinned
            assert (digest in self._resident) == (known.slot is not None)
            assert (digest in self._unqueued) == bool(known.unqueued)
            assert known.unqueued.keys() <= known.requests.keys() - set(running)
            assert known.requests or known.is_prepared or known.is_called or digest in self._reading
            unqueued |= known.unqueued.keys() if known.is_prepared else known.requests.keys()
        assert not found
        slots = [known.slot for known in self._known.values() if known.slot is not None]
        assert sorted(slots + self._free_slots) == [*range(self._num_slots)]
        assert self._awaiting.keys() <= self._known.keys() - self._resident.keys()
        assert all(self._known[digest].requests for digest in self._awaiting)
        assert self._unqueued.keys() <= self._awaiting.keys() | self._resident.keys()
        assert self._reserved <= self._resident.keys()
        assert self._awaiting or not self._reserved
        assert self._resident_bytes == sum(self._known[digest].device_bytes for digest in self._resident)
        assert self._resident_bytes <= self._capacity
        assert self._host_bytes == sum(known.host_bytes for known in self._known.values() if known.is_prepared)
        assert self._host_bytes <= self._max_host_bytes or not self._idle
        assert self._pinned_bytes == sum(known.host_bytes for known in self._known.values() if known.is_pinned)
        assert self._pinned_bytes <= self._max_host_bytes
        return unqueued
