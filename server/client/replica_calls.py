"""Calls to engine cores that they answer: probes, lists of requests, adapters to read, resets of the prefix cache, KV
events, measurements of clocks, and profiles."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Mapping

import msgspec

from quire.engine.protocol.adapters import AdapterRef
from quire.engine.protocol.engine_core import (
    ListRequests,
    PrefixCacheReset,
    PrepareAdapter,
    PreparedAdapter,
    Probe,
    ProbeReply,
    RequestList,
    ResetPrefixCache,
)
from quire.engine.protocol.errors import InvalidParameter
from quire.engine.protocol.kv_events import GetKVEvents, KVEventsState
from quire.engine.protocol.profile import (
    Clock,
    ClockPing,
    ClockReply,
    ProfileReply,
    StartProfile,
    StopProfile,
    TracePiece,
)
from quire.server.client.output_stream import EngineUnavailable
from quire.server.client.replica import Replica

PROBE_SECONDS = 30.0
"""Timeout of a call. A step can take long, especially on a CPU."""
_PREPARE_SECONDS = 600.0
"""Timeout of reading an adapter, from a disk or a network that may be slow."""
_CLOCK_PINGS = 5
"""Measurements of a replica's clock, of which the one with the shortest round trip counts."""
Reply = ProbeReply | RequestList | PreparedAdapter | PrefixCacheReset | KVEventsState | ClockReply | ProfileReply
logger = logging.getLogger(__name__)


class ReplicaCalls:
    """The calls of an API process, to one replica or to all. All methods run on its event loop."""

    def __init__(
        self, index: int, replicas: Mapping[int, Replica], subject: Callable[[int], str], live: Callable[[], list[int]]
    ) -> None:
        """`index` is the number of the API process; `subject` returns the name of a replica in messages, and `live` the
        replicas that get requests, or raises `EngineUnavailable`."""
        self.index = index
        self.waiting: dict[tuple[int, int], asyncio.Future[Reply]] = {}
        """The calls that wait for a reply, by replica and number."""
        self.parts: dict[tuple[int, int], list[bytes]] = {}
        """Those of the answers to `kv_events` that have come already, in the same way."""
        self.traces: dict[int, asyncio.Queue[TracePiece | int]] = {}
        """The queue for the traces of a `StopProfile`, by its number; it also gets the numbers of lost replicas."""
        self._replicas, self._subject, self._live = replicas, subject, live
        self._numbers = itertools.count()

    def next_number(self) -> int:
        """Return a new number for a call."""
        return next(self._numbers)

    async def probe(self, replica: Replica) -> bool:
        """Return whether the replica has answered in time; False also if it has died."""
        answer = await self._call(replica, Probe(self.index, self.next_number()))
        if not answer.done() and replica.state == "up":
            replica.has_failed_probe = True
            logger.warning("%s has not answered for %g seconds", self._subject(replica.number), PROBE_SECONDS)
        return answer.done() and not answer.cancelled()

    async def list_requests(self, replica: Replica, asked: ListRequests, seconds: float) -> RequestList | None:
        """Return the requests of a replica that `asked` selects; None if it does not answer within `seconds`."""
        message = msgspec.structs.replace(asked, client=self.index, call_id=self.next_number())
        answer = await self._call(replica, message, seconds)
        if not answer.done() or answer.cancelled():
            return None
        reply = answer.result()
        assert isinstance(reply, RequestList)
        return reply

    async def prepare_adapter(self, adapter: AdapterRef, pins: bool) -> str:
        """Let all replicas read an adapter that get requests, and pin it if `pins`; returns why it cannot be used.
        Others will read it when they need it. Raises `EngineUnavailable`, also if a replica has no memory for it, or
        cannot read its files.
        """
        live = [self._replicas[number] for number in self._live()]
        answers = await asyncio.gather(*(self._prepare_adapter(each, adapter, pins) for each in live))
        failed = min((each for each in answers if each.error), key=lambda each: not each.is_invalid, default=None)
        if failed is not None and not failed.is_invalid:
            raise EngineUnavailable(failed.error)
        return "" if failed is None else failed.error

    async def _prepare_adapter(self, replica: Replica, adapter: AdapterRef, pins: bool) -> PreparedAdapter:
        """Let a replica read an adapter into its memory. Of one that has died, nothing is known: it will read the
        adapter with the first request.
        """
        message = PrepareAdapter(self.index, self.next_number(), adapter, pins)
        answer = await self._call(replica, message, _PREPARE_SECONDS)
        if not answer.done():
            error = f"{self._subject(replica.number)} has not read the adapter within {_PREPARE_SECONDS:g} seconds"
            return PreparedAdapter(message.call_id, error, is_invalid=False)
        if answer.cancelled():
            return PreparedAdapter(message.call_id)
        reply = answer.result()
        assert isinstance(reply, PreparedAdapter)
        return reply

    async def kv_events(
        self, replica: int | None = None, *, has_blocks: bool = False
    ) -> list[tuple[KVEventsState, list[bytes]]]:
        """Return where replicas publish their KV events, and with `has_blocks`, the blocks that they have: parts with
        the items of `KVEventsState.events`. This replica, or all that are up and answer. Raises `InvalidParameter` if
        there is no such replica, and `EngineUnavailable`.
        """
        self._live()
        if replica is not None and replica not in self._replicas:
            ranks = ", ".join(map(str, sorted(self._replicas)))
            text = f"data_parallel_rank: there is no replica {replica}; choose one of: {ranks}"
            raise InvalidParameter(text, "data_parallel_rank")
        asked = [each for each in self._replicas.values() if each.state == "up" and replica in (None, each.number)]
        found = await asyncio.gather(*(self._kv_events(each, has_blocks) for each in asked))
        states = [state for state in found if state is not None]
        if replica is not None and not states:
            raise EngineUnavailable(f"replica {replica} is {self._replicas[replica].state}, or does not answer")
        return states

    async def _kv_events(self, replica: Replica, has_blocks: bool) -> tuple[KVEventsState, list[bytes]] | None:
        """As `kv_events`, of one replica; None if it has died or does not answer."""
        call = GetKVEvents(self.index, self.next_number(), has_blocks)
        parts = self.parts[replica.number, call.call_id] = list[bytes]()
        try:
            answer = await self._call(replica, call)
        finally:
            del self.parts[replica.number, call.call_id]
        if not answer.done() or answer.cancelled():
            return None
        reply = answer.result()
        assert isinstance(reply, KVEventsState)
        return reply, [part for part in (*parts, reply.events) if part]

    async def reset_prefix_cache(self, *, clears_stores: bool) -> str:
        """Let all replicas forget their prefix caches, and then the KV stores of their hosts; returns the first error,
        also if a host has no replica that is up. Raises `EngineUnavailable`.
        """
        self._live()
        for clears_store in (False, True) if clears_stores else (False,):  # no replica stores what it has had any more
            present = [each for each in self._replicas.values() if each.state in ("up", "draining")]
            asked = (self._reset_prefix_cache(each, clears_store) for each in present)
            if error := next(filter(None, await asyncio.gather(*asked)), ""):
                return error
        for lost in self._replicas.values() if clears_stores else ():
            if all(each.host != lost.host for each in present):  # nobody could clear its store, which may be up
                return f"{self._subject(lost.number)} is {lost.state}: the KV store of its host was not cleared"
        return ""

    async def _reset_prefix_cache(self, replica: Replica, clears_store: bool) -> str:
        """Let a replica forget its prefix cache, and its host's KV store; returns the error. One that has died comes
        back with an empty cache.
        """
        answer = await self._call(replica, ResetPrefixCache(self.index, self.next_number(), clears_store))
        if not answer.done():
            return f"{self._subject(replica.number)} has not answered for {PROBE_SECONDS:g} seconds"
        if answer.cancelled():
            return f"{self._subject(replica.number)} has died meanwhile" if clears_store else ""
        reply = answer.result()
        assert isinstance(reply, PrefixCacheReset)
        return reply.error

    async def ask(self, number: int, message: StartProfile | StopProfile) -> str:
        """Return a replica's reply to a call: the error; empty if there is none. Raises `EngineUnavailable`."""
        answer = await self._call(self._replica(number), message)
        if not answer.done():
            raise EngineUnavailable(f"{self._subject(number)} has not answered for {PROBE_SECONDS:g} seconds")
        if answer.cancelled():
            raise EngineUnavailable(self.lost_text(number))
        reply = answer.result()
        assert isinstance(reply, ProfileReply)
        return reply.error

    async def measure_clock(self, number: int) -> Clock:
        """Return the clock of a replica's host for this one's. Raises `EngineUnavailable`."""
        measured: list[Clock] = []
        for _ in range(_CLOCK_PINGS):
            replica, sent = self._replica(number), time.time_ns()
            answer = await self._call(replica, ClockPing(self.index, self.next_number(), replica.incarnation))
            if not answer.done() or answer.cancelled():
                raise EngineUnavailable(self.lost_text(number))
            reply = answer.result()
            assert isinstance(reply, ClockReply)
            measured.append(Clock.measured(sent, reply.time, time.time_ns()))
        best = min(measured, key=lambda clock: clock.error)
        return Clock(-best.offset, best.error)

    def lost_text(self, number: int) -> str:
        """Describe the death of a replica."""
        replica = self._replicas.get(number)
        reason = f": {replica.reason}" if replica is not None and replica.reason else ""
        return f"{self._subject(number)} was lost{reason}"

    def on_message(self, message: Reply | TracePiece) -> None:
        """Pass a reply, or a piece of a trace, to the one that waits for it."""
        if isinstance(message, TracePiece):
            if (pieces := self.traces.get(message.call_id)) is not None:
                pieces.put_nowait(message)
        elif (answer := self.waiting.get(key := (message.replica, message.call_id))) is not None and not answer.done():
            if isinstance(message, KVEventsState) and message.has_more:
                self.parts[key].append(message.events)
            else:
                answer.set_result(message)

    def on_lost(self, number: int) -> None:
        """Cancel the calls to a replica that will no longer answer."""
        for (replica, _), answer in self.waiting.items():
            if replica == number:
                answer.cancel()
        for pieces in self.traces.values():
            pieces.put_nowait(number)

    def _replica(self, number: int) -> Replica:
        if (replica := self._replicas.get(number)) is None:
            raise EngineUnavailable(f"replica {number} was removed")
        return replica

    async def _call(
        self,
        replica: Replica,
        message: Probe
        | ListRequests
        | PrepareAdapter
        | ResetPrefixCache
        | GetKVEvents
        | StartProfile
        | StopProfile
        | ClockPing,
        seconds: float | None = None,
    ) -> asyncio.Future[Reply]:
        """Send a message and wait for its reply: the future is done, cancelled if the replica has died, or pending."""
        key = replica.number, message.call_id
        answer = self.waiting[key] = asyncio.get_running_loop().create_future()
        replica.send(message)
        try:
            await asyncio.wait((answer,), timeout=PROBE_SECONDS if seconds is None else seconds)
        finally:
            del self.waiting[key]
        return answer
