"""The connection to an engine core, and the state of its replica."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import zmq

from quire.engine.cluster.security import Security, split
from quire.engine.protocol.engine_core import ToCore
from quire.engine.protocol.supervision import ReplicaRole
from quire.server.client.metrics import Death, Metrics
from quire.server.client.replica_roles import host_of

_RECONNECT_MILLISECONDS = 10
"""Interval between attempts to connect to a core that is starting."""

ReplicaState = Literal["loading", "up", "draining", "restarting", "dead"]
"""loading: for the first time; draining: it gets no new requests; restarting: it has died and is expected back; dead:
for good.
"""


@dataclass(frozen=True)
class ReplicaInfo:
    """A replica, as users see it."""

    index: int
    host: str
    role: ReplicaRole
    state: ReplicaState | Literal["unresponsive"]
    """unresponsive: it is up, but has sent nothing for a while, and gets no new requests while there are others."""
    num_requests_running: int
    num_requests_waiting: int
    reason: str | None
    """The cause of its death, if it is not up."""
    last_death: Death | None
    """Its last death, also if it is up again."""
    tensor_parallel_size: int
    """Ranks that share each layer; 0: it has never been up."""
    stages: list[tuple[int, int]]
    """First and last layer of each stage."""
    prefill_context_parallel_size: int = 1
    """So many times the ranks that share layers are in each stage."""


def problem_of(replicas: Sequence[ReplicaInfo], *, is_loading: bool) -> tuple[str, str] | None:
    """Why new requests would not run at once: a state, and its reason; None: a replica is up. `is_loading`: an awaited
    one has never been up."""
    up = [each for each in replicas if each.state == "up"]
    if is_loading:
        count = f": {len(up)} of {len(replicas)} replicas are up" * (len(replicas) > 1)
        return "loading", f"the model is still loading{count}"
    if up:
        return None
    for state in ("unresponsive", "restarting", "loading", "draining", "dead"):
        if found := [each for each in replicas if each.state == state]:
            reasons = (f"replica {each.index} is {state}" + f": {each.reason}" * bool(each.reason) for each in found)
            return state, "; ".join(reasons)
    return "unavailable", "there are no replicas"


class Replica:
    """The connection to one engine core, and its state."""

    def __init__(self, number: int, address: str, context: zmq.Context[zmq.Socket[bytes]], security: Security) -> None:
        self.number, self.address = number, address
        self.role: ReplicaRole = "any"
        self.state: ReplicaState = "loading"
        self.reason: str | None = None
        """The cause of its death, if it is not up."""
        self.move_timer: asyncio.TimerHandle | None = None
        """Moves the requests of a replica that drains."""
        self.is_drained = False
        """Whether `on_drained` was called."""
        self.tensor_parallel_size, self.stages = 0, list[tuple[int, int]]()
        """As in `ReplicaUp`."""
        self.kv_peer = ""
        """The same."""
        self.prefill_context_parallel_size = 1
        """As in `ReplicaUp`."""
        self.incarnation = 0
        """The number that its outputs have; others are late outputs of an earlier start."""
        self.heard_at = 0.0
        """Time of its newest message, on the event loop's clock."""
        self.is_silent = False
        """Nothing has come from it for too long."""
        self.has_failed_probe = False
        """It has not answered a probe in time, and has sent nothing but pulses since."""
        self._context, self._security = context, security
        self._encode = msgspec.msgpack.Encoder().encode
        self._socket: zmq.Socket[bytes] | None = None

    @property
    def host(self) -> str:
        """The host of its core."""
        return host_of(self.address)

    @property
    def store(self) -> str:
        """Identifies the KV store that it uses: hosts of a server may have the same address, each with a store."""
        return self.kv_peer or self.host

    @property
    def is_unresponsive(self) -> bool:
        """Whether it gets new requests only if there is no other replica."""
        return self.is_silent or self.has_failed_probe

    def info(self, metrics: Metrics) -> ReplicaInfo:
        """What users see."""
        stats = metrics.of(self.number)
        return ReplicaInfo(
            index=self.number,
            host=self.host,
            role=self.role,
            state="unresponsive" if self.state == "up" and self.is_unresponsive else self.state,
            num_requests_running=stats.running,
            num_requests_waiting=stats.waiting,
            reason=self.reason,
            last_death=metrics.last_death(self.number),
            tensor_parallel_size=self.tensor_parallel_size,
            stages=self.stages,
            prefill_context_parallel_size=self.prefill_context_parallel_size,
        )

    def cancel_move(self) -> None:
        """Stop the timer, if it runs."""
        if self.move_timer is not None:
            self.move_timer.cancel()

    def open(self) -> None:
        """Connect to a core that is up."""
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MILLISECONDS)
        self._security.connect(self._socket, self.address)

    def send(self, message: ToCore) -> None:
        """Send a message, unless the core is dead: the next core at this address would receive it."""
        if self._socket is not None:
            self._socket.send_multipart(split(self._encode(message)), zmq.NOBLOCK)

    def close(self) -> None:
        """Close the socket and discard unread messages."""
        self.cancel_move()
        if self._socket is not None:
            self._socket.close()
            self._socket = None
