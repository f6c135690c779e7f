"""The stores of other hosts, as a tier below memory and disk: which entries they have, and fetching these.

Everything runs in the thread of the store, and nothing blocks: `receive` takes messages that have arrived, `tick` ends
what is late. Only the server names peers; no message from a peer can add one. Only peers that answer are asked: one
that was late or wrong is not asked for some time, and not until it has been heard from again. Bytes are written where
the caller says, in the order in which they arrive, and never after `done` has been called, so that a late piece cannot
damage a later entry in the same place.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import msgspec

from quire.engine.kv_store.checksum import CHECKSUM_BYTES
from quire.engine.process.log import printable
from quire.engine.protocol.errors import UNDECODABLE
from quire.engine.protocol.kv_peers import (
    FETCH_BYTES,
    LEAST_RATE,
    MAX_FETCHES,
    AskPeer,
    FetchKV,
    FromPeer,
    HelloPeer,
    PeerHas,
    PeerLacks,
    PeerPiece,
    PeerReady,
    ToPeer,
)
from quire.engine.protocol.kv_store import KVEntry

HELLO_SECONDS = 1.0
"""Interval of `HelloPeer`."""
ANSWER_SECONDS = 0.3
"""Time within which a peer must answer a question; less than cores wait for the answer to `LookUpKV`."""
PIECE_SECONDS = 1.0
"""Maximum time between two pieces of a fetch."""
_SILENCE_SECONDS = 3.0
"""Time after which a silent peer is down."""
_UNREACHED_SECONDS = 10.0
"""Time after which the log names a peer that has not been reached since its address was given."""
_MAX_DOUBLINGS = 4
"""A peer that is late or wrong repeatedly is not asked for 1, 2, 4, 8, and then 16 seconds."""
_ASK_SECONDS = (0.05, 0.4)
"""Intervals between questions for entries that a peer has yet to store: the shortest while each answer has more, the
longest while none has."""
_MAX_EXPECTED = 512
"""Maximum links of such a question."""
_MAX_PLACES = 1 << 17
"""Maximum entries for which the store remembers which peer has them."""

_decode = msgspec.msgpack.Decoder[FromPeer](FromPeer).decode

logger = logging.getLogger(__name__)


Answered = Callable[[list[bytes]], None]
"""Called with the entries that peers have: by kind, a byte for each link."""
Fetched = Callable[[str, list[int], list[bytes | None]], None]
"""Called with a peer, the numbers of some entries, and for each the checksum with which it came, or None if it did not.
"""


@dataclass(eq=False)
class _KVPeer:
    """Another store."""

    address: str
    warn_at: float
    """When to warn that it has not been reached; infinite: that has been said."""
    is_self: bool = False
    """Whether it is this store itself, which was given its own address."""
    own_address: str = ""
    """See `PeerReady`."""
    heard_at: float = -math.inf
    num_failed: int = 0
    """How often it has been late or wrong since it last delivered correct data."""
    retry_at: float = -math.inf
    """It is not asked before this time, nor before it has been heard from after `late_at`."""
    late_at: float = -math.inf
    error: str = "not reached yet"
    """Why it is not used; empty: it is."""
    waiting: deque[_Fetch] = field(default_factory=deque)
    """Fetches that have not been sent yet."""
    num_fetching: int = 0
    unfetched: int = 0
    """Bytes of the fetches that have been sent and have not ended."""
    deadline: float = math.inf
    """When it is late with the next piece."""
    end_at: float = math.inf
    """When it is late with all fetches, however many pieces arrive."""


@dataclass(eq=False)
class _Question:
    """A question which entries of a chain peers have."""

    links: list[bytes]
    done: Answered
    deadline: float
    first: str
    """The peer to fetch from, if several have the same entry."""
    asked: dict[str, None]
    """The peers that have not answered."""
    answers: dict[str, list[bytes]] = field(default_factory=dict)


@dataclass(eq=False)
class _Fetch:
    """Entries that are fetched from a peer."""

    peer: _KVPeer
    entries: list[KVEntry]
    views: list[memoryview]
    is_wanted: Callable[[], bool]
    done: Callable[[list[bytes | None]], None]
    come: list[int]
    """Bytes of each entry that have arrived."""
    sums: list[bytes | None]
    unanswered: set[int]


@dataclass(eq=False)
class _Expectation:
    """Entries that the cores of a peer are storing one after another; the peer is asked for them repeatedly."""

    peer: str
    links: Callable[[], list[bytes] | None]
    take: Callable[[], bool]
    interval: float = _ASK_SECONDS[0]
    ask_at: float = -math.inf
    """When to ask; infinite while there is a question."""


class PeerStats(NamedTuple):
    """The state of the tier."""

    up: list[str]
    """Addresses of the peers that answer, as they call themselves."""
    known: int
    failed: int
    """How often peers were late or wrong."""


class PeerTier:
    """The entries of other stores.

    Invariants (`check_integrity`): a fetch waits at its peer, or has a call; a peer has at most `MAX_FETCHES` calls.
    """

    def __init__(
        self,
        signature: bytes,
        sizes: Sequence[int],
        send: Callable[[str, ToPeer], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`send` sends a message to one of the peers, or drops it. `sizes` are those of entries, by kind."""
        self._signature, self._sizes, self._send, self._clock = signature, sizes, send, clock
        self.store = secrets.token_bytes(8)
        """Random bytes by which this store recognizes itself, if its own address is among the peers."""
        self._peers: dict[str, _KVPeer] = {}
        """By address, as given to `use`."""
        self._questions: dict[int, _Question] = {}
        """By call."""
        self._expectations: list[_Expectation] = []
        self._fetches: dict[int, _Fetch] = {}
        self._places: OrderedDict[KVEntry, str] = OrderedDict()
        """Which peer has said to have each entry, the oldest answers first."""
        self._last_call = 0
        self._next_hello = -math.inf
        self._failed = 0

    @property
    def is_usable(self) -> bool:
        """Whether some peer can be asked."""
        return any(map(self._is_up, self._peers.values()))

    def stats(self) -> PeerStats:
        others = [peer for peer in self._peers.values() if not peer.is_self]
        up = [peer.own_address or peer.address for peer in filter(self._is_up, others)]
        return PeerStats(up, len(others), self._failed)

    def use(self, addresses: Sequence[str]) -> None:
        """Read from the peers at these addresses from now on, and from no others."""
        for peer in [peer for address, peer in self._peers.items() if address not in addresses]:
            del self._peers[peer.address]
            self._end_all(peer)
        for address in addresses:
            self._peers.setdefault(address, _KVPeer(address, self._clock() + _UNREACHED_SECONDS))
        self._next_hello = -math.inf

    def _is_up(self, peer: _KVPeer) -> bool:
        now = self._clock()
        is_heard = peer.heard_at >= max(now - _SILENCE_SECONDS, peer.late_at)
        return is_heard and not peer.error and not peer.is_self and now >= peer.retry_at

    # --- questions ----------------------------------------------------------------------------------------------------

    def look_up(self, links: list[bytes], first: str, done: Answered, *, asks_others: bool = True) -> None:
        """Ask which entries of a chain peers have: all peers, or only `first`. If several have an entry, it is fetched
        from `first`, which has just computed the prompt: entries that its cores are still writing count."""
        first = self._find(first)
        others = [peer.address for peer in self._peers.values() if self._is_up(peer)] if asks_others else []
        self._ask(dict.fromkeys(filter(None, (first, *others))), links, first, done, ANSWER_SECONDS)

    def expect(self, peer: str, links: Callable[[], list[bytes] | None], take: Callable[[], bool]) -> None:
        """Ask a peer repeatedly for entries that its cores will store: for the links that `links` returns, until it
        returns None. `take` is called when the peer has some of them, and returns whether it has fetched any."""
        self._expectations.append(_Expectation(peer, links, take))

    def _find(self, name: str) -> str:
        """Return the address of a peer that answers, given its address or what it calls its own; empty: there is
        none."""
        up = (peer for peer in self._peers.values() if self._is_up(peer))
        return next((each.address for each in up if name in (each.address, each.own_address)), "") if name else ""

    def _ask(self, addresses: Iterable[str], links: list[bytes], first: str, done: Answered, seconds: float) -> None:
        """Ask peers, which must answer within `seconds`. Entries that cores of `first` are still writing count."""
        question = _Question(links, done, self._clock() + seconds, first, dict.fromkeys(addresses))
        self._last_call += 1
        self._questions[self._last_call] = question
        for address in addresses:
            self._send(address, AskPeer(self._signature, self._last_call, links, counts_granted=address == first))
        self._check_answered(self._last_call)

    def _ask_again(self, expectation: _Expectation) -> None:
        """Ask for the expected entries, if there are any at present and the peer answers."""
        if (links := expectation.links()) is None:
            return self._expectations.remove(expectation)

        def answered(has: list[bytes]) -> None:
            least, most = _ASK_SECONDS
            has_more = any(map(any, has)) and expectation.take()
            expectation.interval = least if has_more else min(most, 2 * expectation.interval)
            expectation.ask_at = self._clock() + expectation.interval

        expectation.ask_at = math.inf
        address = self._find(expectation.peer)
        self._ask([address] if address and links else [], links[:_MAX_EXPECTED], "", answered, PIECE_SECONDS)

    def __contains__(self, entry: KVEntry) -> bool:
        """Whether a peer that answers has said that it has an entry."""
        peer = self._peers.get(self._places.get(entry, ""))
        return peer is not None and self._is_up(peer)

    def _check_answered(self, call_id: int) -> None:
        """End a question if no more answers are expected."""
        question = self._questions[call_id]
        if question.asked:
            return
        del self._questions[call_id]
        has = [bytearray(len(question.links)) for _ in self._sizes]
        most = sorted(question.answers.items(), key=lambda each: -sum(map(sum, each[1])))
        for address, answer in sorted(most, key=lambda each: each[0] != question.first):
            for kind, found in enumerate(answer):
                for at, is_there in enumerate(found):
                    if is_there and not has[kind][at]:
                        has[kind][at] = 1
                        entry = KVEntry(question.links[at], kind)
                        self._places[entry] = address
                        self._places.move_to_end(entry)
        while len(self._places) > _MAX_PLACES:
            self._places.popitem(last=False)
        question.done([bytes(each) for each in has])

    # --- entries ------------------------------------------------------------------------------------------------------

    def fetch(
        self,
        entries: Sequence[KVEntry],
        views: Sequence[memoryview],
        is_wanted: Callable[[], bool],
        done: Fetched,
    ) -> None:
        """Fetch entries that peers have into `views`, unless `is_wanted` says in the meantime that nobody waits for
        them.

        `done` is called once for each entry. After that, nothing is written to its view. Until then, the view may hold
        any bytes that the peer has sent. The caller verifies the checksums, and reports the result to `checked`.
        """
        by_peer: dict[str, list[int]] = {}
        lost = list[int]()
        for number, entry in enumerate(entries):
            if entry in self:
                by_peer.setdefault(self._places[entry], []).append(number)
            else:
                lost.append(number)
        for address, numbers in by_peer.items():
            peer = self._peers[address]
            for batch in self._batches(entries, numbers):
                fetch = _Fetch(
                    peer,
                    [entries[number] for number in batch],
                    [views[number] for number in batch],
                    is_wanted,
                    partial(done, address, batch),
                    [0] * len(batch),
                    [None] * len(batch),
                    {*range(len(batch))},
                )
                peer.waiting.append(fetch)
            self._fetch_next(peer)
        if lost:
            done("", lost, [None] * len(lost))

    def checked(self, address: str, entries: Sequence[KVEntry], sums: Sequence[bytes | None]) -> None:
        """Note that entries have come from a peer, with these verified checksums; empty: the bytes are damaged."""
        if (peer := self._peers.get(address)) is None:
            return
        for entry, found in zip(entries, sums, strict=True):
            if found == b"" and self._places.get(entry) == address:
                del self._places[entry]
        if b"" in sums:
            self._fail(peer, "has sent damaged entries")
        elif all(sums):
            peer.num_failed = 0

    def _batches(self, entries: Sequence[KVEntry], numbers: Iterable[int]) -> Iterator[list[int]]:
        """Divide entries into batches of at most `FETCH_BYTES`, or of one larger entry."""
        batch, size = list[int](), 0
        for number in numbers:
            own = self._sizes[entries[number].kind]
            if batch and size + own > FETCH_BYTES:
                yield batch
                batch, size = [], 0
            batch.append(number)
            size += own
        if batch:
            yield batch

    def _fetch_next(self, peer: _KVPeer) -> None:
        while peer.waiting and peer.num_fetching < MAX_FETCHES:
            fetch = peer.waiting.popleft()
            if not fetch.is_wanted():
                fetch.done(fetch.sums)
                continue
            if not peer.num_fetching:
                peer.deadline = self._clock() + PIECE_SECONDS
            peer.num_fetching += 1
            peer.unfetched += sum(map(len, fetch.views))
            self._limit(peer)
            self._last_call += 1
            self._fetches[self._last_call] = fetch
            self._send(peer.address, FetchKV(self._signature, self._last_call, fetch.entries))

    def _limit(self, peer: _KVPeer) -> None:
        peer.end_at = self._clock() + PIECE_SECONDS + peer.unfetched / LEAST_RATE

    def _end(self, call_id: int) -> None:
        """End a fetch, with the entries that have arrived."""
        fetch = self._fetches.pop(call_id)
        fetch.peer.num_fetching -= 1
        fetch.peer.unfetched -= sum(map(len, fetch.views))
        self._limit(fetch.peer)
        for number in fetch.unanswered:
            self._places.pop(fetch.entries[number], None)
        fetch.done(fetch.sums)
        self._fetch_next(fetch.peer)

    # --- messages and time --------------------------------------------------------------------------------------------

    def receive(self, address: str, frames: Sequence[memoryview | bytes]) -> None:
        """Take a message of a peer. An invalid one is dropped, or ends everything that the peer was asked for."""
        if (peer := self._peers.get(address)) is None:
            return
        try:
            message, content = _decode(frames[0]), frames[1:]
        except UNDECODABLE:
            self._failed += 1
            return
        peer.heard_at = self._clock()
        match message:
            case PeerReady(store, error, own_address):
                if error != peer.error and store != self.store:
                    state = f"is not in use: {printable(error)}" if error else "is in use"
                    logger.info("the KV store at %s %s", address, state)
                peer.error, peer.is_self, peer.own_address = error, store == self.store, own_address
            case PeerHas(call_id, has):
                question = self._questions.get(call_id)
                if question is None or address not in question.asked:
                    return
                del question.asked[address]
                is_right = [len(each) for each in has] == [len(question.links)] * len(self._sizes)
                if is_right:
                    question.answers[address] = has
                self._check_answered(call_id)
                if not is_right:
                    self._fail(peer, "has sent an answer that does not match the question")
            case PeerPiece(call_id):
                if (fetch := self._fetches.get(call_id)) is not None and fetch.peer is peer:
                    self._take(call_id, fetch, message, content)
            case PeerLacks(call_id, numbers):
                fetch = self._fetches.get(call_id)
                if fetch is None or fetch.peer is not peer:
                    return
                peer.deadline = self._clock() + PIECE_SECONDS
                for number in fetch.unanswered.intersection(numbers):
                    fetch.unanswered.discard(number)
                    self._places.pop(fetch.entries[number], None)
                if not fetch.unanswered:
                    self._end(call_id)

    def _take(self, call_id: int, fetch: _Fetch, piece: PeerPiece, content: Sequence[memoryview | bytes]) -> None:
        """Write a piece of an entry to its place."""
        number, start = piece.number, piece.start
        is_right = number in fetch.unanswered and len(piece.checksum) == CHECKSUM_BYTES and len(content) == 1
        if is_right:
            view, end = fetch.views[number], start + len(content[0])
            is_right = start == fetch.come[number] and start < end <= len(view)
        if not is_right:
            return self._fail(fetch.peer, "has sent data that it was not asked for")
        view[start:end] = content[0]
        fetch.come[number] = end
        fetch.peer.deadline = self._clock() + PIECE_SECONDS
        if end == len(view):
            fetch.sums[number] = piece.checksum
            fetch.unanswered.discard(number)
            if not fetch.unanswered:
                self._end(call_id)

    def seconds_left(self) -> float:
        """Seconds until `tick` has something to do."""
        times = [self._next_hello] if self._peers else []
        times += [question.deadline for question in self._questions.values()]
        times += [expectation.ask_at for expectation in self._expectations]
        times += [min(peer.deadline, peer.end_at) for peer in self._peers.values() if peer.num_fetching]
        return max(0.0, min(times, default=math.inf) - self._clock())

    def tick(self) -> None:
        """Do what is due."""
        now = self._clock()
        if now >= self._next_hello:
            self._next_hello = now + HELLO_SECONDS
            for address, peer in self._peers.items():
                self._send(address, HelloPeer(self._signature))
                if not peer.error and not peer.is_self and now - peer.heard_at > _SILENCE_SECONDS:
                    peer.error = f"it has been silent for {_SILENCE_SECONDS:g} seconds"
                    logger.warning("the KV store at %s is not in use: %s", address, peer.error)
                if now >= peer.warn_at:
                    peer.warn_at = math.inf
                    if peer.heard_at == -math.inf:
                        logger.warning(
                            "the KV store at %s has not been reached yet: is its server up, with the same "
                            "--cluster-token, and is this port open?",
                            address,
                        )
        late = {address for each in self._questions.values() if each.deadline <= now for address in each.asked}
        fetching = [each for each in self._peers.values() if each.num_fetching]
        late |= {each.address for each in fetching if min(each.deadline, each.end_at) <= now}
        for peer in [peer for address, peer in self._peers.items() if address in late]:
            self._fail(peer, "is late")
        for expectation in [each for each in self._expectations if each.ask_at <= now]:
            self._ask_again(expectation)

    def _fail(self, peer: _KVPeer, what: str) -> None:
        """Do not use a peer for some time, and until it has been heard from again."""
        logger.warning("the KV store at %s %s; its KV is computed until it is used again", peer.address, what)
        self._failed += 1
        peer.late_at = self._clock()
        peer.retry_at = peer.late_at + 2.0 ** min(peer.num_failed, _MAX_DOUBLINGS)
        peer.num_failed += 1
        self._end_all(peer)

    def _end_all(self, peer: _KVPeer) -> None:
        """End everything that waits for a peer that is no longer used."""
        waiting, peer.waiting = peer.waiting, deque()
        for fetch in waiting:
            fetch.done(fetch.sums)
        for call_id, fetch in [*self._fetches.items()]:
            if fetch.peer is peer and call_id in self._fetches:  # the end of another one may have ended it
                self._end(call_id)
        for call_id, question in [*self._questions.items()]:
            if peer.address in question.asked:
                del question.asked[peer.address]
                self._check_answered(call_id)

    def check_integrity(self) -> None:
        for peer in self._peers.values():
            own = [each for each in self._fetches.values() if each.peer is peer]
            assert len(own) == peer.num_fetching <= MAX_FETCHES
            assert peer.unfetched == sum(len(view) for each in own for view in each.views)
            assert not peer.waiting or len(own) == MAX_FETCHES
            assert all(each.peer is peer for each in peer.waiting)
        for fetch in (*self._fetches.values(), *(each for peer in self._peers.values() for each in peer.waiting)):
            assert fetch.unanswered
            sizes = [self._sizes[entry.kind] for entry in fetch.entries]
            assert [len(view) for view in fetch.views] == sizes
            assert [each is not None for each in fetch.sums] == [x == y for x, y in zip(fetch.come, sizes, strict=True)]
        assert all(question.asked for question in self._questions.values())
        assert len(self._places) <= _MAX_PLACES
