"""The followers' side of the control plane; see `quire.engine.cluster.control_plane`."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import Empty

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
    LinkEnded,
    Redirected,
    WakeQueue,
    WeightDigests,
)
from quire.engine.cluster.handshake import Hello
from quire.engine.cluster.network import LOOPBACK, tcp_url
from quire.engine.cluster.reachability import Prober, Request
from quire.engine.cluster.security import join, split
from quire.engine.process.log import printable
from quire.engine.protocol.errors import ConfigError
from quire.engine.protocol.profile import Clock
from quire.engine.protocol.supervision import LogLevel

_MAX_FAILED_HANDSHAKES = 10
"""Failed handshakes after which a follower that has not joined gives up: the leader has another token."""
_NUM_CLOCKS = 10
"""Number of measurements of the leader's clock; the one with the shortest round trip counts."""
_RECONNECT_MS = 200
"""Interval between attempts to connect."""
logger = logging.getLogger(__name__)


class Follower(ControlLink):
    """The side that joins a leader."""

    def __init__(
        self,
        address: str,
        port: int,
        hello: Hello,
        *,
        seconds: float,
        on_end: Callable[[LinkEnded], None] | None = None,
        on_compared: Callable[[], None] = lambda: None,
        on_log_level: Callable[[LogLevel], None] = lambda level: None,
        leader: str | None = None,
        flags: tuple[str, str] = ("--master-addr", "--master-port"),
        token: str = "",
        lost_seconds: float = LOST_SECONDS,
    ) -> None:
        """Join the leader, retrying for up to `seconds`. `token` and `lost_seconds` are as in `Leader`.

        `on_end` is called, from its thread, when the leader ends or is lost, `on_compared` when it has the same
        weights, and `on_log_level` when the level of log messages is to change; they must not block. `leader` is its
        name in errors, `flags` are the flags for its address and port. Raises `ConfigError` if it does not answer in
        time, `LinkEnded` if it rejects this follower or has another token, and `Redirected` if another leader is to be
        joined.
        """
        super().__init__(zmq.DEALER, "cluster-follower", token, lost_seconds)
        self._leader, self._on_end = leader or f"the host at {address}:{port}", on_end
        self._on_compared, self._on_log_level = on_compared, on_log_level
        self._hello = msgspec.msgpack.encode(hello)
        self._prober = Prober(hello.address or LOOPBACK)
        self.has_same_weights = False
        """Whether the leader has found that all bytes of the weights are the same there."""
        self.inbox: WakeQueue[bytes | LinkEnded] = WakeQueue()
        """Messages, for one reader; the last one is a `LinkEnded`."""
        self._answered = threading.Event()
        self._is_accepted = False
        self._redirected: Redirected | None = None
        self.ended: LinkEnded | None = None
        """The exception that `receive` raises after the remaining messages."""
        self._last_heard = 0.0
        self._clocks: deque[Clock] = deque(maxlen=_NUM_CLOCKS)
        """The latest measurements, from heartbeats."""
        self._socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self._security.connect(self._socket, tcp_url(address, port), monitor=False)
        self._thread.start()
        logger.info("%s: trying to join %s at %s:%d for up to %.0f s", hello.name, self._leader, address, port, seconds)
        try:
            if not self._answered.wait(seconds):
                raise ConfigError(
                    f"{self._leader} did not answer at {address}:{port} within {seconds:.0f} s; check that it is "
                    f"running, and that {flags[0]} and {flags[1]} match its own"
                )
            if self._redirected is not None:
                raise self._redirected
            if not self._is_accepted:
                self.receive(None)
        except BaseException:
            self.close()
            raise
        logger.info("%s has joined %s", hello.name, self._leader)

    @property
    def clock(self) -> Clock:
        """This host's clock relative to the leader's."""
        return min(tuple(self._clocks), key=lambda each: each.error, default=Clock())

    def receive(self, timeout: float | None) -> bytes:
        """Return the next message; raises `TimeoutError`, and `LinkEnded` after the connection has ended."""
        try:
            message = self.inbox.get(timeout)
        except Empty:
            raise TimeoutError from None
        if isinstance(message, LinkEnded):
            self.inbox.put(message)
            raise message
        return message

    def send(self, body: bytes) -> None:
        """Send a message to the leader; dropped if the connection has ended."""
        self._commands.put((BODY, body))

    def set_digests(self, found: WeightDigests) -> None:
        self._commands.put((FILES, msgspec.msgpack.encode(found)))

    def close(self, reason: str = "", *, is_final: bool = False) -> None:
        """Leave; `reason` is sent to the leader after a failure, `is_final` as in `LinkEnded`."""
        self._close((REJECT if is_final else END, reason.encode()))
        self._prober.close()
        self.inbox.put(self.ended or LinkEnded(""))
        self.inbox.close()

    def _on_command(self, command: tuple[bytes, bytes]) -> bool:
        is_last = command[0] in (END, REJECT)
        if self.ended is None and (self._is_accepted or not is_last):
            self._socket.send_multipart((command[0], *split(command[1])))
        if is_last and not self._is_accepted:
            self._socket.setsockopt(zmq.LINGER, 0)
        return is_last

    def _send_heartbeats(self) -> None:
        if self.ended is not None:
            return
        if self._is_accepted:
            self._socket.send_multipart((HEARTBEAT, msgspec.msgpack.encode(time.time_ns())))
        else:
            with contextlib.suppress(zmq.Again):  # its peer has another security mechanism
                self._socket.send_multipart((HELLO, self._hello), zmq.DONTWAIT)

    def _on_frames(self, frames: list[zmq.Frame]) -> None:
        if len(frames) < 2 or self.ended is not None:
            return
        self._last_heard = time.monotonic()
        kind, *parts = (frame.bytes for frame in frames)
        body = join(parts)
        if kind == BODY:
            self.inbox.put(body)
        elif kind == HEARTBEAT and body:
            sent, answered = msgspec.msgpack.decode(body, type=tuple[int, int])
            self._clocks.append(Clock.measured(sent, answered, time.time_ns()))
        elif kind == WELCOME:
            self._is_accepted = True
            self._answered.set()
        elif kind == REDIRECT:
            self._redirected = Redirected(*msgspec.msgpack.decode(body, type=tuple[str, int]))
            self._answered.set()
        elif kind == FILES:
            self.has_same_weights = True
            self._on_compared()
        elif kind == LOG_LEVEL:
            self._on_log_level(msgspec.msgpack.decode(body, type=LogLevel))
        elif kind == PROBE:
            request = msgspec.msgpack.decode(body, type=Request)
            threading.Thread(target=self._probe, args=(request,), daemon=True, name="cluster-probe").start()
        elif kind in (END, REJECT):
            self._end(printable(body.decode(errors="replace")), is_final=kind == REJECT)

    def _find_lost(self) -> None:
        if self.ended is not None:
            return
        if not self._is_accepted:
            if self._has_other_mechanism or self._num_failed_handshakes >= _MAX_FAILED_HANDSHAKES:
                self._end(f"{self._leader} has another --cluster-token than this host, or none; use the same on all")
        elif self._closed:
            self._end(f"{self._leader} was lost: its connection has closed")
        elif time.monotonic() - self._last_heard > self._lost_seconds:
            self._end(f"{self._leader} was lost: nothing was received from it for {self._lost_seconds:g} s")

    def _on_error(self, error: Exception) -> None:
        self._end(f"{self._leader} was lost: {type(error).__name__}: {error}")

    def _probe(self, request: Request) -> None:
        """Try connections to other hosts, which takes seconds."""
        self._commands.put((PROBE, msgspec.msgpack.encode(self._prober.answer(request))))

    def _end(self, reason: str, *, is_final: bool = False) -> None:
        self.ended = LinkEnded(reason, is_final=is_final)
        self.inbox.put(self.ended)
        self._answered.set()
        if self._is_accepted and self._on_end is not None:
            self._on_end(self.ended)
