"""The leader's side of the control plane; see `quire.engine.cluster.control_plane`."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Literal

import msgspec
import zmq

from quire.engine.cluster.control_plane import (
    BODY,
    END,
    FILES,
    HEARTBEAT,
    HELLO,
    LOG_LEVEL,
    LOST_SECONDS,
    PROBE,
    REDIRECT,
    REJECT,
    WELCOME,
    ControlLink,
    HostsMissing,
    LinkEnded,
    WeightDigests,
)
from quire.engine.cluster.handshake import Hello, compare
from quire.engine.cluster.key_value_store import STORE, KeyValueStore
from quire.engine.cluster.network import LOOPBACK, is_local, is_loopback, tcp_url
from quire.engine.cluster.reachability import Answer, Blocked, Number, Prober, Request, find_blocked
from quire.engine.cluster.security import join, split
from quire.engine.process.log import printable
from quire.engine.protocol.errors import ConfigError
from quire.engine.protocol.supervision import LogLevel

_START, _STOP, _FAIL, _DISMISS, _REFUSE = b"start", b"stop", b"fail", b"dismiss", b"refuse"
"""Commands to the leader's thread, which also takes messages to send."""
_PROBE_SECONDS = 15.0
"""Time for a host to try connections to others."""
logger = logging.getLogger(__name__)


@dataclass
class _Peer:
    """A follower that has joined."""

    identity: bytes
    hello: Hello
    fd: int
    last_heard: float
    """Time of the last message, on the monotonic clock."""
    weights: WeightDigests | None = None
    """Hashes of its weights, once it has sent them."""
    has_same_weights: bool = False


class Leader(ControlLink):
    """The side that followers join. The callbacks are called from its thread and must not block."""

    def __init__(
        self,
        own: Hello,
        address: str,
        port: int,
        expected: Iterable[int],
        *,
        on_message: Callable[[int, bytes], None],
        on_lost: Callable[[int, LinkEnded], None],
        check: Callable[[Hello], None] | None = None,
        on_joined: Callable[[Hello], None] = lambda hello: None,
        on_compared: Callable[[int], None] = lambda number: None,
        redirect: Callable[[int], tuple[str, int] | None] | None = None,
        admits: Literal["once", "again", "anybody"] = "once",
        noun: str = "node",
        flags: tuple[str, str] = ("--master-addr", "--master-port"),
        token: str = "",
        lost_seconds: float = LOST_SECONDS,
    ) -> None:
        """Listen on `port` of `address` (0: any free port, see `port`) for followers with `expected` numbers.

        `token` is the cluster's; "" is for loopback addresses. `lost_seconds`: a follower that sends nothing for so
        long is lost. A follower is rejected if it differs from `own` or the first one that joined (see `compare`), if
        it cannot reach `address`, or if `check` raises `ConfigError`. `redirect` returns the leader of a replica, for
        followers that look for it (`Hello.replica`); they ask again until it is known. `on_compared` is called when a
        follower is found to have the same weights. `admits` lets followers that
        were lost join again after the start, or followers with any number join at any time. The reason passed
        to `on_lost` names the follower. `noun` and `flags` name a follower, the address and the port in
        errors. Raises `ConfigError` if the address is not this host's, or the port is in use.
        """
        assert token or is_loopback(address)
        super().__init__(zmq.ROUTER, "cluster-leader", token, lost_seconds)
        self._expected, self._admits = tuple(expected), admits
        self._on_lost, self._on_message, self._on_joined, self._check = on_lost, on_message, on_joined, check
        self._on_compared = on_compared
        self._redirect = redirect
        self._address, self._noun, self._flags = address, noun, flags
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            if not (os.environ.get("QUIRE_HOST_IP") or is_local(address)):  # set where addresses are translated
                raise ConfigError(
                    f"{flags[0]} {address} is not an address of this host, where the other {noun}s join; give one of "
                    f"its own addresses on every host, or start this host as another {noun}"
                )
            self._security.bind(self._socket, tcp_url(own.address or address, port), monitor=False)
        except ConfigError:
            self._close_socket()
            raise
        except (OSError, zmq.ZMQError) as error:
            self._close_socket()
            raise ConfigError(
                f"{noun}s cannot join at port {port} of {address}: {os.strerror(error.errno or 0).lower()}; "
                f"choose another with {flags[1]}"
            ) from None
        self.port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self._store = KeyValueStore()
        self._references = [own]
        """The hosts that others are compared with."""
        self._peers: dict[int, _Peer] = {}
        """The followers that have joined; only the thread modifies it."""
        self._changed = threading.Condition()
        self._lost: dict[int, LinkEnded] = {}
        """Why a follower was lost or did not join; removed when it joins again."""
        self._start_message: bytes | None = None
        self._log_level: bytes | None = None
        """The encoded level of log messages, if it has been changed."""
        self._own = own
        self._weights: WeightDigests | None = None
        """Hashes of this host's weights, once they are known."""
        self._prober = Prober(own.address or LOOPBACK)
        self._probing = threading.Lock()
        self._probe_answers: SimpleQueue[tuple[int, Answer]] = SimpleQueue()
        self._decode_answer = msgspec.msgpack.Decoder[Answer](Answer).decode
        self._thread.start()

    def wait(self, seconds: float) -> dict[int, Hello]:
        """Wait until all followers have joined; raises `ConfigError` if one is rejected, and `HostsMissing` if one does
        not join or is lost.
        """
        if not self._expected:
            return {}
        names = _numbered(self._noun, self._expected)
        logger.info("waiting up to %.0f s for %s at port %d of %s", seconds, names, self.port, self._address)
        with self._changed:
            expected, lost = set(self._expected), list[int]()

            def is_done() -> bool:
                # Others, which may join at any time, do not concern the start.
                lost[:] = self._lost.keys() & expected if self._admits == "anybody" else self._lost
                return bool(lost) or self._peers.keys() >= expected

            self._changed.wait_for(is_done, seconds)
            if lost:
                end = self._lost[lost[0]]
                raise ConfigError(end.reason) if end.is_final else HostsMissing(end.reason)
            joined = {number: self._peers[number].hello for number in self._expected if number in self._peers}
        missing = [number for number in self._expected if number not in joined]
        if missing:
            names = ", ".join(hello.name for hello in joined.values()) or "none"
            raise HostsMissing(
                f"{_numbered(self._noun, missing)} did not join at port {self.port} within {seconds:.0f} s: "
                f"{len(joined)} of {len(self._expected)} joined ({names})"
            )
        return joined

    def check_links(self, links: Iterable[tuple[Number, Number]], variable: str = "") -> None:
        """Raise `ConfigError` if hosts cannot connect to each other as `find_blocked` is to try it, also when they try
        again.
        """
        links = list(links)
        blocked, _ = self.find_blocked(links, variable)
        if blocked:
            blocked, _ = self.find_blocked(links, variable)
        for each in blocked[1:]:
            logger.error("%s", each)
        if blocked:
            raise ConfigError(str(blocked[0]))

    def find_blocked(
        self,
        links: Iterable[tuple[Number, Number]],
        variable: str = "",
        fixed: dict[Number, list[int]] | None = None,
        on_silent: Callable[[int], None] = lambda number: None,
    ) -> tuple[list[Blocked], int]:
        """Let hosts that have joined connect to each other; see `reachability.find_blocked`.

        `on_silent` is called with each host that does not answer. Must not be called from this object's thread.
        """

        def ask(requests: Mapping[Number, Request]) -> dict[Number, Answer]:
            asked = [number for number in requests if number is not None]
            for number in asked:
                self._commands.put((number, PROBE, msgspec.msgpack.encode(requests[number])))
            found: dict[Number, Answer] = {}
            if None in requests:
                found[None] = self._prober.answer(requests[None])
            deadline = time.monotonic() + _PROBE_SECONDS
            while missing := [number for number in asked if number not in found and number not in self._lost]:
                try:
                    number, answer = self._probe_answers.get(timeout=0.1)
                    if number not in requests or not answer.is_for(requests[number]):
                        continue  # it is late
                except Empty:
                    if time.monotonic() < deadline:
                        continue
                    for number in missing:
                        on_silent(number)
                    break
                found[number] = answer
            return found

        with self._probing:
            try:
                names = {None: self._own.name} | {
                    number: peer.hello.name for number, peer in self._peers.copy().items()
                }
                return find_blocked(ask, names, links, address_flag=self._flags[0], variable=variable, fixed=fixed)
            finally:
                self._prober.close()

    def start(self, body: bytes) -> None:
        """Send the first message to every follower, and to each that joins later; the store is empty then."""
        self._commands.put((None, _START, body))

    def stop(self, body: bytes) -> None:
        """Send a message to every follower, and let followers that join wait for the next `start`."""
        self._commands.put((None, _STOP, body))

    def send(self, number: int | None, body: bytes) -> None:
        """Send a message to a follower (None: to all); dropped if it is lost."""
        self._commands.put((number, BODY, body))

    def set_log_level(self, level: LogLevel) -> None:
        """Tell every follower, and each that joins later, the lowest level of log messages to show."""
        self._commands.put((None, LOG_LEVEL, msgspec.msgpack.encode(level)))

    def fail(self, number: int, reason: str) -> None:
        """Report that a follower's process has ended, as its launcher knows: it counts as lost."""
        self._commands.put((number, _FAIL, reason))

    def is_joined(self, number: int) -> bool:
        """Return whether a follower is connected."""
        return number in self._peers

    def dismiss(self, number: int, reason: str = "") -> None:
        """End the connection of a follower, which is not lost thereby and may join again; `reason`: after a failure."""
        self._commands.put((number, _DISMISS, reason.encode()))

    def reject(self, number: int, reason: str) -> None:
        """End the connection of a follower that cannot take part, and report it as lost; it does not join again."""
        self._commands.put((number, _REFUSE, reason))

    def has_same_weights(self, number: int) -> bool:
        """Return whether a follower that is connected has the same weights, byte for byte."""
        return (peer := self._peers.get(number)) is not None and peer.has_same_weights

    def close(self, reason: str = "", *, is_final: bool = False) -> None:
        """End every follower's connection, with a reason after a failure; `is_final` as in `LinkEnded`."""
        self._close((None, REJECT if is_final else END, reason.encode()))

    def _on_command(self, command: tuple[int | None, bytes, Any]) -> bool:
        number, kind, body = command
        if kind == _FAIL:
            assert number is not None
            if (peer := self._peers.get(number)) is not None:
                self._on_dead(peer, body)
            else:
                self._record_lost(number, LinkEnded(body))
            return False
        if kind == _REFUSE:
            assert number is not None
            if (peer := self._peers.get(number)) is not None:
                self._refuse(peer, body)
            return False
        if kind == _DISMISS:
            assert number is not None
            with self._changed:
                dismissed = self._peers.pop(number, None)
            if dismissed is not None:
                self._send(dismissed.identity, END, body)
            return False
        if kind == FILES:
            self._weights = body
            for peer in list(self._peers.values()):
                self._compare_weights(peer)
            return False
        if kind == _START:
            self._start_message, self._store, kind = body, KeyValueStore(), BODY
        if kind == _STOP:
            self._start_message, kind = None, BODY
        for each in list(self._peers) if number is None else [number]:
            if (peer := self._peers.get(each)) is not None:
                self._send(peer.identity, kind, body)
        if kind == LOG_LEVEL:
            self._log_level = body
        return kind in (END, REJECT)

    def _send_heartbeats(self) -> None:
        for peer in self._peers.values():
            self._send(peer.identity, HEARTBEAT, b"")

    def _on_frames(self, frames: list[zmq.Frame]) -> None:
        if len(frames) < 3:
            return self._dropped.add("it has too few frames")
        identity, kind, *parts = (frame.bytes for frame in frames)
        body = join(parts)
        if kind == HELLO:
            return self._join(identity, body, int(frames[2].get(zmq.SRCFD)))
        if kind == STORE:
            return self._send(identity, STORE, self._store.answer(body))
        peer = next((peer for peer in self._peers.values() if peer.identity == identity), None)
        if peer is None:
            return
        peer.last_heard = time.monotonic()
        if kind == BODY:
            self._on_message(peer.hello.number, body)
        elif kind == HEARTBEAT and body:
            sent = msgspec.msgpack.decode(body, type=int)
            self._send(identity, HEARTBEAT, msgspec.msgpack.encode((sent, time.time_ns())))
        elif kind == FILES:
            peer.weights = msgspec.msgpack.decode(body, type=WeightDigests)
            self._compare_weights(peer)
        elif kind == PROBE:
            self._probe_answers.put((peer.hello.number, self._decode_answer(body)))
        elif kind in (END, REJECT):
            reason = printable(body.decode(errors="replace"))
            text = f"{peer.hello.name} {f'has ended: {reason}' if reason else 'has left'}"
            self._on_dead(peer, text, is_final=kind == REJECT)

    def _join(self, identity: bytes, body: bytes, fd: int) -> None:
        hello = msgspec.msgpack.decode(body, type=Hello)
        number = hello.number
        known = self._peers.get(number)
        if known is not None and known.identity == identity:
            return self._send(identity, WELCOME, b"")  # it repeats its hello until it is answered
        is_redirected = hello.replica is not None and self._redirect is not None
        kind = END  # there may be a place later
        try:
            if not is_redirected:
                self._check_place(hello, known)
            kind = REJECT
            self._check_host(hello)
        except ConfigError as error:
            logger.warning("%s", error)
            return self._send(identity, kind, str(error).encode())
        if is_redirected:
            return self._send_on(identity, hello)
        self._update_closed()
        self._closed.discard(fd)  # of an earlier connection
        with self._changed:
            self._lost.pop(number, None)
            self._peers[number] = _Peer(identity, hello, fd, time.monotonic())
            self._changed.notify_all()
        if len(self._references) == 1:
            self._references.append(hello)
        logger.info("%s has joined", hello.name)
        self._send(identity, WELCOME, b"")
        if self._log_level is not None:
            self._send(identity, LOG_LEVEL, self._log_level)
        if self._start_message is not None:
            self._send(identity, BODY, self._start_message)
        self._on_joined(hello)

    def _send_on(self, identity: bytes, hello: Hello) -> None:
        """Tell a follower which leader it is to join, if that is known; it says hello again until then."""
        assert self._redirect is not None
        assert hello.replica is not None
        if self._start_message is not None and (leader := self._redirect(hello.replica)) is not None:
            self._send(identity, REDIRECT, msgspec.msgpack.encode(leader))

    def _check_place(self, hello: Hello, known: _Peer | None) -> None:
        """Raise `ConfigError` if there is no place for a follower with this number."""
        if known is not None:
            raise ConfigError(f"{hello.name} cannot join: {known.hello.name} is {self._noun} {hello.number} already")
        if self._admits == "anybody":
            return
        if hello.number not in self._expected:
            compare(self._own, hello)  # the numbers depend on the settings
            raise ConfigError(
                f"{hello.name}: {_numbered(self._noun, self._expected)} can join here, not {hello.number}"
            )
        if hello.number in self._lost and self._admits == "once":
            raise ConfigError(f"{hello.name} cannot join again")

    def _check_host(self, hello: Hello) -> None:
        """Raise `ConfigError` if the host cannot start or does not match; before the start, `wait` raises it too."""
        try:
            for reference in self._references:
                compare(reference, hello)
            if is_loopback(self._address) and not is_loopback(hello.address or self._address):
                raise ConfigError(
                    f"{self._flags[0]} {self._address}: {hello.name} cannot reach that address of "
                    f"{self._references[0].name}; start every host with one that it can"
                )
            if self._check is not None and hello.replica is None:
                self._check(hello)
        except ConfigError as error:
            if self._start_message is None:
                self._record_lost(hello.number, LinkEnded(str(error), is_final=True))
            raise

    def set_digests(self, found: WeightDigests) -> None:
        self._commands.put((None, FILES, found))

    def _compare_weights(self, peer: _Peer) -> None:
        """Reject a follower whose weights differ from this host's, once both are known."""
        if peer.weights is None or self._weights is None:
            return
        try:
            if self._weights.error:
                raise ConfigError(f"{self._own.name}: {self._weights.error}")
            compare(
                msgspec.structs.replace(self._own, model=self._weights.digests, settings={}),
                msgspec.structs.replace(peer.hello, model=peer.weights.digests, error=peer.weights.error),
            )
        except ConfigError as error:
            self._refuse(peer, str(error))
        else:
            logger.info("%s has the same weights, byte for byte", peer.hello.name)
            peer.has_same_weights = True
            self._send(peer.identity, FILES, b"")
            self._on_compared(peer.hello.number)

    def _refuse(self, peer: _Peer, reason: str) -> None:
        self._send(peer.identity, REJECT, reason.encode())
        self._on_dead(peer, reason, is_final=True)

    def _find_lost(self) -> None:
        now = time.monotonic()
        for peer in list(self._peers.values()):
            if peer.fd in self._closed:
                self._on_dead(peer, f"{peer.hello.name} was lost: its connection has closed")
            elif now - peer.last_heard > self._lost_seconds:
                self._on_dead(
                    peer, f"{peer.hello.name} was lost: nothing was received from it for {self._lost_seconds:g} s"
                )

    def _on_dead(self, peer: _Peer, reason: str, *, is_final: bool = False) -> None:
        with self._changed:
            del self._peers[peer.hello.number]
        end = LinkEnded(reason, is_final=is_final)
        self._record_lost(peer.hello.number, end)
        self._on_lost(peer.hello.number, end)

    def _record_lost(self, number: int, end: LinkEnded) -> None:
        with self._changed:
            self._lost.setdefault(number, end)
            self._changed.notify_all()

    def _on_error(self, error: Exception) -> None:
        for peer in list(self._peers.values()):
            self._on_dead(peer, f"{peer.hello.name} was lost: {type(error).__name__}: {error}")

    def _send(self, identity: bytes, kind: bytes, body: bytes) -> None:
        try:
            self._socket.send_multipart((identity, kind, *split(body)))
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:  # it has disconnected; `_closed` has its connection
                raise


def _numbered(noun: str, numbers: Iterable[int]) -> str:
    """nodes 1, 2 and 3"""
    *first, last = map(str, sorted(numbers))
    return f"{noun}s {', '.join(first)} and {last}" if first else f"{noun} {last}"
