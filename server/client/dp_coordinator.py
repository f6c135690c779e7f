"""Connects replicas on several hosts: one host leads, and each replica of the other hosts joins it.

The leader runs the API for all replicas or, if each host has its own API, replica 0. In the second case only replicas
that share experts are connected. A joining replica sends the address at which it receives requests. When all have
joined, the leader sends all addresses to every replica. Unless the replicas share experts, other hosts can join the API
later, and leave it. See `quire.engine.cluster.control_plane` for how hosts are compared, and how the loss of a host is
detected.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Literal, Protocol

import msgspec

from quire.engine.cluster.control_plane import LinkEnded, Rejected, compare_weights, compares_weights
from quire.engine.cluster.follower import Follower
from quire.engine.cluster.handshake import Hello, describe_host
from quire.engine.cluster.leader import Leader
from quire.engine.cluster.network import address_towards, resolve_address, tcp_url
from quire.engine.config.engine_config import EngineConfig
from quire.engine.core.launch import reserve_ports, socket_port
from quire.engine.protocol.errors import ConfigError
from quire.engine.protocol.supervision import LogLevel, ReplicaUp


class ReplicaListener(Protocol):
    """A listener that `DPCoordinator` notifies of other hosts' replicas, from any thread (`EngineManager`)."""

    def replica_joined(self, replica: int, address: str) -> None: ...

    def replica_died(
        self, replica: int, reason: str, *, is_host_lost: bool = False, user_error: bool = False
    ) -> None: ...

    def replica_leaves(self, replica: int, seconds: float) -> None: ...

    def group_stops(self) -> None: ...

    def group_starts(self, requests: dict[int, str]) -> None: ...

    def replica_up(self, state: ReplicaUp) -> None: ...

    def weights_compared(self) -> None: ...

    def log_level_changed(self, level: LogLevel) -> None: ...

    def kv_peers_changed(self) -> None: ...

    def fail(self, reason: str, *, user_error: bool = False) -> None: ...


class JoinRequest(msgspec.Struct):
    """The contents of a replica's `Hello`."""

    requests: str
    """The address at which it receives requests."""
    is_headless: bool
    """Whether the leader's API serves this replica."""
    master: tuple[str, int] | None = None
    """The address at which the other hosts of the replica join it, if there are any."""
    kv_peer: str = ""
    """Where the KV stores of others read from that of its host; empty: it has none."""


class JoinReply(msgspec.Struct, tag=True):
    """The leader's reply to each replica after all have joined; replicas that share experts also get it when they are
    restarted."""

    requests: dict[int, str]
    responses: tuple[str, ...]
    kv_peers: tuple[str, ...] = ()
    """Where the KV stores of the hosts are read."""


class KVPeersChanged(msgspec.Struct, tag=True):
    """Sent by the leader when a host has joined after the start, or has left for good: where the KV stores of all hosts
    are read."""

    number: int
    """Later messages have higher ones; each replica of a host gets them on its own connection."""
    addresses: tuple[str, ...]


class StopGroup(msgspec.Struct, tag=True):
    """Sent by the leader to the hosts of replicas that share experts: one has died; stop the others, and wait for the
    next `JoinReply`."""


class ReplicaDied(msgspec.Struct, tag=True, array_like=True):
    """Sent by the host of a replica: its core has died, with the reason."""

    reason: str


class ShutdownRequested(msgspec.Struct, tag=True, array_like=True):
    """Sent by the host of a replica: it shuts down as soon as no other host needs it."""

    seconds: float
    """Time for which requests may go on there; independent replicas only."""


_decode = msgspec.msgpack.Decoder(ReplicaDied | ReplicaUp | ShutdownRequested).decode
_decode_reply = msgspec.msgpack.Decoder(JoinReply | KVPeersChanged | StopGroup).decode


def role(config: EngineConfig, *, is_headless: bool = False) -> Literal["alone", "leader", "follower"]:
    """The role of this host; raises `ConfigError` if it cannot have an API."""
    parallel = config.parallel
    if is_headless:
        return "follower"
    if parallel.nnodes > 1 and parallel.node:
        raise ConfigError(
            f"--node-rank {parallel.node}: node 0 has the API; the others are started with quire serve --headless"
        )
    has_all = len(parallel.local_replicas) == parallel.replicas and not parallel.accepts_hosts
    if has_all or (parallel.external_lb and not parallel.is_coupled):
        return "alone"
    return "leader" if parallel.local_replicas.start == 0 or not parallel.external_lb else "follower"


def connect_hosts(config: EngineConfig, count: int = 1) -> DPCoordinator:
    """Wait for the other hosts that this API needs, if it needs any. `count` is the number of API processes.

    Blocks for up to `--distributed-timeout-seconds`. Raises `ConfigError` if a host does not join, has different
    settings, or rejects this one.
    """
    match role(config):
        case "alone":
            return DPCoordinator()
        case "leader":
            return DPLeader(config, count)
        case "follower":
            return DPMember(config)


class DPCoordinator:
    """The hosts of an engine's other replicas: there are none, except for a `DPLeader` and a `DPMember`."""

    leads = True
    """Whether this host decides when replicas that share experts stop and start together."""
    restarts_group = True
    """Whether replicas that share experts are restarted together; not if each host has an API."""
    local_replicas = frozenset[int]()
    """The numbers that no other host may have. The manager changes them."""

    def __init__(self) -> None:
        self.requests: dict[int, str] = {}
        """The address of each replica, when all had joined; empty if there are no other hosts."""
        self.responses: tuple[str, ...] = ()
        """The address of each API process; empty if no other host needs them."""
        self.init_method = ""
        """The address at which the ranks of coupled replicas rendezvous: at the leader; empty if there are no other
        hosts."""
        self.masters: dict[int, tuple[str, int]] = {}
        """The address at which further hosts of a replica join, by replica; the leader has the addresses of all known
        replicas."""
        self.kv_peer = ""
        """Where the KV stores of others read from that of this host (`HOST:PORT`); empty: there are no others."""
        self.kv_peers: tuple[str, ...] = ()
        """Those of all hosts; `ReplicaListener.kv_peers_changed` tells when they change."""
        self._peers_number = 0
        """Of the newest `KVPeersChanged`."""
        self._address = ""
        """That of this host; empty if there are no others."""
        self._ports: list[socket.socket] = []
        self._added: dict[int, str] = {}
        """The addresses of replicas that were added on this host."""
        self._lock = threading.Lock()
        self._listener: ReplicaListener | None = None
        self._notices: list[Callable[[ReplicaListener], None]] = []
        """Notices from before there was a listener."""

    def _reserve_ports(self, config: EngineConfig, address: str, num_responses: int = 0) -> None:
        """Reserve ports at `address`, which belongs to this host: `num_responses`, and the ports of its replicas;
        raises `ConfigError`.
        """
        parallel, self._address = config.parallel, address
        self._flags = ("--data-parallel-address", "--data-parallel-rpc-port")
        if parallel.nnodes > 1:
            self._flags = ("--master-addr", "--master-port")
        local, store = parallel.local_replicas, config.kv_store
        has_store = store is not None
        numbers = self._reserve(num_responses + len(local) * (1 + (parallel.nodes > 1)) + has_store)
        if store is not None:
            own = numbers.pop()
            self.kv_peer = tcp_url(address, store.peer_port or own).removeprefix("tcp://")
        urls = [tcp_url(address, number) for number in numbers]
        self.responses = tuple(urls[:num_responses])
        self.requests = dict(zip(local, urls[num_responses:], strict=False))
        self.masters = {
            replica: (address, number)
            for replica, number in zip(local, numbers[num_responses + len(local) :], strict=False)
        }
        self.init_method = tcp_url(*parallel.coordinator)

    def _reserve(self, count: int) -> list[int]:
        """Reserve ports of this host; returns their numbers."""
        try:
            self._ports += (reserved := reserve_ports(self._address, count))
        except OSError as error:
            raise ConfigError(
                f"no port can be had at {self._address}: {(error.strerror or str(error)).lower()}; {self._flags[0]} "
                "is the address of the host with the API or with replica 0, and QUIRE_HOST_IP, where set, this host's "
                "own"
            ) from None
        return [socket_port(port) for port in reserved]

    def added_address(self, replica: int) -> str:
        """Return where a replica that is added on this host receives requests: by these addresses, the API knows which
        replicas are on one host. Empty if there are no other hosts. Raises `ConfigError`."""
        if self._address and replica not in self._added:
            self._added[replica] = tcp_url(self._address, *self._reserve(1))
        return self._added.get(replica, "")

    def watch(self, listener: ReplicaListener) -> None:
        """Report the states of replicas to `listener`, including states from before this call."""
        with self._lock:
            self._listener = listener
            notices, self._notices = self._notices, []
        for notice in notices:
            notice(listener)

    def start_group(self, requests: dict[int, str]) -> None:
        """Tell all hosts to start their replicas, with the addresses of all; the leader only."""

    def stop_group(self) -> None:
        """Tell all hosts to stop their replicas, which share experts, until `start_group`; the leader only."""

    def is_joined(self, replica: int) -> bool:
        """Whether a replica is on another host that is connected, to the leader."""
        return False

    def set_log_level(self, level: LogLevel) -> None:
        """Show log messages of at least this level on hosts without an API, too; the leader only."""

    def may_answer(self, replica: int) -> bool:
        """Whether the hosts whose weights a replica uses have the same, byte for byte, as far as they compare them;
        `ReplicaListener.weights_compared` tells when this changes."""
        return True

    def dismiss(self, replica: int, reason: str = "") -> None:
        """Let another host's replica shut down; `reason`: because of an error. The leader only."""

    def request_shutdown(self, seconds: float = 0.0) -> None:
        """Announce that this host has no more work of its own. The API's requests may go on here for `seconds`."""

    @property
    def can_shut_down(self) -> bool:
        """After `request_shutdown`: whether no other host needs this one.

        Independent replicas are not needed when the API has no more requests on them; replicas that share experts are
        not needed when all hosts have requested it, or one was lost.
        """
        return True

    def close(self, reason: str = "", *, user_error: bool = False) -> None:
        """Tell the other hosts that this one exits, with the reason if it is an error, and whether it is the user's."""
        for port in self._ports:
            port.close()

    def _notify(self, notice: Callable[[ReplicaListener], None]) -> None:
        """Tell the listener something, from any thread."""
        with self._lock:
            if (listener := self._listener) is None:
                self._notices.append(notice)
        if listener is not None:
            notice(listener)


class DPLeader(DPCoordinator):
    """The leader's side."""

    def __init__(self, config: EngineConfig, count: int) -> None:
        """`count` is the number of API processes. Blocks and raises as `connect_hosts`."""
        super().__init__()
        parallel = config.parallel
        address, port = parallel.coordinator
        own = os.environ.get("QUIRE_HOST_IP") or resolve_address(address)
        self._are_headless, self._is_coupled = not parallel.external_lb, parallel.is_coupled
        self.restarts_group = self._are_headless and self._is_coupled
        is_fixed = self._is_coupled or parallel.nnodes > 1
        self._reserve_ports(config, own, count if self._are_headless else 0)
        if not port:
            super().close()
            raise ConfigError(f"{self._flags[1]} 0: the other hosts need a fixed port; choose one")
        self.local_replicas = frozenset(parallel.local_replicas)
        others = [replica for replica in range(parallel.replicas) if replica not in parallel.local_replicas]
        self._awaited = set[int]() if self._are_headless else set(others)
        """Replicas whose hosts have requests of their own, which require the steps of this host's replicas."""
        role = f"the host with the {'API' if self._are_headless else 'first replica'}"
        self._hello = describe_host(role, 0, own, config)
        self._compares, self._others = compares_weights(config), tuple(others)
        self._is_started = False
        """Whether the hosts that this API waits for have joined."""
        self._peers_of: dict[int, str] = {}
        """Where the KV store of each other replica's host is read, also of one that was lost: it may return."""
        try:
            self._leader = Leader(
                self._hello,
                address,
                port,
                others,
                on_message=self._on_message,
                on_lost=self._on_lost,
                on_joined=self._on_joined,
                on_compared=lambda replica: self._notify(lambda listener: listener.weights_compared()),
                check=self._check,
                redirect=self._master_of,
                admits="anybody" if not is_fixed else "again" if self._are_headless else "once",
                noun="replica",
                flags=self._flags,
                token=parallel.cluster_token,
                lost_seconds=parallel.cluster_timeout,
            )
        except ConfigError:
            super().close()
            raise
        try:
            hellos = self._leader.wait(parallel.timeout)
            self._check_links(hellos.values())
        except ConfigError as error:
            self.close(str(error), user_error=True)
            raise
        self.requests |= {number: _request_of(hello).requests for number, hello in hellos.items()}
        self._change_kv_peers(hellos.values())
        self._is_started = True
        self.start_group(self.requests)
        compare_weights(config, [self._leader])

    def _change_kv_peers(self, joined: Iterable[Hello], left: int | None = None) -> None:
        """Note where the KV stores of hosts are read, some of which have joined, or that a replica has left for good;
        tell all hosts, once this one has started."""
        with self._lock:
            self._peers_of |= (added := {hello.number: _request_of(hello).kv_peer for hello in joined})
            self._peers_of = {number: peer for number, peer in self._peers_of.items() if number != left}
            known, found = self.kv_peers, (self.kv_peer, *self._peers_of.values())
            self.kv_peers = tuple(dict.fromkeys(filter(None, found)))
            has_changed = self.kv_peers != known
            self._peers_number += 1
            message = KVPeersChanged(self._peers_number, self.kv_peers)
        if self._is_started and has_changed:
            self._notify(lambda listener: listener.kv_peers_changed())
        if self._is_started and (has_changed or added):  # one that has joined has been told those of the start
            self._leader.send(None, msgspec.msgpack.encode(message))

    def start_group(self, requests: dict[int, str]) -> None:
        self._leader.start(msgspec.msgpack.encode(JoinReply(requests, self.responses, self.kv_peers)))

    def stop_group(self) -> None:
        self._leader.stop(msgspec.msgpack.encode(StopGroup()))

    def set_log_level(self, level: LogLevel) -> None:
        self._leader.set_log_level(level)

    def is_joined(self, replica: int) -> bool:
        return self._leader.is_joined(replica)

    def may_answer(self, replica: int) -> bool:
        used = self._others if self._is_coupled else (replica,)
        return not self._compares or all(
            self._leader.has_same_weights(each) for each in used if each not in self.local_replicas
        )

    def _check_links(self, hellos: Iterable[Hello]) -> None:
        """Raise `ConfigError` if hosts cannot connect to each other: to this one, and also to each other if their
        replicas share experts. Replicas of a host do so in the same way."""
        numbers = {hello.address: hello.number for hello in hellos if hello.address != self._hello.address}.values()
        links: list[tuple[int | None, int | None]] = [
            link for number in numbers for link in ((None, number), (number, None))
        ]
        if self._is_coupled:
            links.extend(itertools.permutations(numbers, 2))
        self._leader.check_links(links)

    def _check_joined(self, hello: Hello) -> None:
        try:
            self._check_links([hello])
        except ConfigError as error:
            self._leader.reject(hello.number, str(error))

    def dismiss(self, replica: int, reason: str = "") -> None:
        self._change_kv_peers([], left=replica)  # before another host can join in its place
        self._leader.dismiss(replica, reason)

    @property
    def can_shut_down(self) -> bool:
        with self._lock:
            return not self._awaited

    def close(self, reason: str = "", *, user_error: bool = False) -> None:
        with self._lock:
            self._listener = None
        self._leader.close(reason, is_final=user_error)
        super().close()

    def _check(self, hello: Hello) -> None:
        """Raise `ConfigError` if a host has an API and should not, or a replica of this host."""
        is_headless = _request_of(hello).is_headless
        if is_headless and not self._are_headless:
            raise ConfigError(
                f"{hello.name} is started --headless, and {self._hello.name} serves its own replicas only; start that "
                "without --data-parallel-start-rank, or this without --headless"
            )
        if self._are_headless and not is_headless:
            raise ConfigError(
                f"{hello.name} has an API of its own, and {self._hello.name} serves all replicas; start it with "
                "--headless"
            )
        if hello.number in self.local_replicas:
            raise ConfigError(
                f"{hello.name} cannot join: {self._hello.name} has a replica {hello.number}; choose another "
                "--data-parallel-start-rank"
            )

    def _on_joined(self, hello: Hello) -> None:
        request = _request_of(hello)
        if request.master is not None:
            self.masters[hello.number] = request.master
        if self._is_started or hello.number not in self._others:  # in a thread: it takes seconds
            threading.Thread(target=self._check_joined, args=(hello,), daemon=True, name="dp-check").start()
        self._change_kv_peers([hello])
        if self._are_headless:
            self._notify(lambda listener: listener.replica_joined(hello.number, request.requests))

    def _master_of(self, replica: int) -> tuple[str, int] | None:
        """Return the address at which a replica's further hosts join it; None while its first host is not there."""
        is_there = replica in self.local_replicas or self._leader.is_joined(replica)
        return self.masters.get(replica) if is_there else None

    def _on_message(self, replica: int, body: bytes) -> None:
        match _decode(body):
            case ReplicaDied(reason):
                self._on_lost(replica, LinkEnded(reason), is_host_lost=False)
            case ReplicaUp() as state:
                self._notify(lambda listener: listener.replica_up(state))
            case ShutdownRequested() if self._is_coupled:
                with self._lock:
                    self._awaited.discard(replica)
            case ShutdownRequested(seconds):
                self._notify(lambda listener: listener.replica_leaves(replica, seconds))

    def _on_lost(self, replica: int, end: LinkEnded, *, is_host_lost: bool = True) -> None:
        with self._lock:
            self._awaited.clear()
        if self._is_coupled and not self._are_headless:
            self._notify(lambda listener: listener.fail(end.reason, user_error=end.is_final))
        else:
            self._notify(
                lambda listener: listener.replica_died(
                    replica, end.reason, is_host_lost=is_host_lost, user_error=end.is_final
                )
            )


class DPMember(DPCoordinator):
    """The side of a host whose replicas join. Each replica has its own connection."""

    leads = False

    def __init__(self, config: EngineConfig, *, is_headless: bool = False) -> None:
        """Join, and wait until all have joined; raises `ConfigError` if that fails."""
        super().__init__()
        parallel = config.parallel
        host, port = parallel.coordinator
        self.leader = f"the host with the {'API' if is_headless else 'first replica'} ({host})"
        self.ended: LinkEnded | None = None
        """Set when the leader has exited, or no longer needs a replica."""
        self._is_headless, self._compares = is_headless, compares_weights(config)
        self.restarts_group = is_headless and parallel.is_coupled
        self.has_run = False
        """Whether a replica of this host has been up."""
        own = address_towards(host, parallel.timeout)
        self._reserve_ports(config, own)
        self._followers: dict[int, Follower] = {}
        try:
            for replica, url in self.requests.items():
                request = msgspec.msgpack.encode(JoinRequest(url, is_headless, self.masters.get(replica), self.kv_peer))
                self._followers[replica] = Follower(
                    host,
                    port,
                    describe_host(f"replica {replica}", replica, own, config, body=request),
                    seconds=parallel.timeout,
                    on_end=self._on_end,
                    on_compared=lambda: self._notify(lambda listener: listener.weights_compared()),
                    on_log_level=self._on_log_level,
                    leader=self.leader,
                    flags=self._flags,
                    token=parallel.cluster_token,
                    lost_seconds=parallel.cluster_timeout,
                )
            for follower in self._followers.values():
                reply = _decode_reply(follower.receive(None))
                while not isinstance(reply, JoinReply):  # the others are being stopped
                    reply = _decode_reply(follower.receive(None))
        except LinkEnded as error:
            self.close()
            raise (Rejected if error.is_final else ConfigError)(str(error) or f"{self.leader} has exited") from None
        except BaseException:
            self.close()
            raise
        self.requests, self.responses = reply.requests | self.requests, reply.responses
        self.kv_peers = reply.kv_peers
        first = next(iter(self._followers.values()))
        compare_weights(config, self._followers.values())
        for follower in (first,) if self.restarts_group else self._followers.values() if is_headless else ():
            threading.Thread(target=self._follow, args=(follower,), daemon=True, name="dp-member").start()

    def _follow(self, follower: Follower) -> None:
        """Report when the leader stops and starts replicas that share experts, and when the stores of other hosts are
        read elsewhere; it tells each of this host's replicas the same."""
        with contextlib.suppress(LinkEnded):
            while True:
                match _decode_reply(follower.receive(None)):
                    case JoinReply(requests):
                        self._notify(partial(_start_group, requests))
                    case KVPeersChanged(number, addresses):
                        with self._lock:
                            is_newer = number > self._peers_number
                            has_changed = is_newer and addresses != self.kv_peers
                            if is_newer:
                                self._peers_number, self.kv_peers = number, addresses
                        if has_changed:
                            self._notify(lambda listener: listener.kv_peers_changed())
                    case StopGroup():
                        self._notify(lambda listener: listener.group_stops())

    def report(self, replica: int, state: ReplicaUp | ReplicaDied) -> None:
        """Report that a core of this host is up, or has died."""
        self.has_run |= isinstance(state, ReplicaUp)
        self._followers[replica].send(msgspec.msgpack.encode(state))

    def request_shutdown(self, seconds: float = 0.0) -> None:
        for follower in self._followers.values():
            follower.send(msgspec.msgpack.encode(ShutdownRequested(seconds)))

    def may_answer(self, replica: int) -> bool:
        """The leader decides it for its API."""
        is_other = self._is_headless or not self._compares
        return is_other or all(follower.has_same_weights for follower in self._followers.values())

    @property
    def can_shut_down(self) -> bool:
        return all(follower.ended is not None for follower in self._followers.values())

    def close(self, reason: str = "", *, user_error: bool = False) -> None:
        for follower in self._followers.values():
            follower.close(reason, is_final=user_error)
        super().close()

    def _on_log_level(self, level: LogLevel) -> None:
        if self._is_headless:  # or else this host's API decides
            self._notify(lambda listener: listener.log_level_changed(level))

    def _on_end(self, ended: LinkEnded) -> None:
        """End this host's API with the leader, as their replicas are coupled; called once per replica."""
        self.ended = self.ended or ended
        if self._is_headless:
            return
        reason = str(ended) or "the host with the first replica has exited"
        self._notify(lambda listener: listener.fail(reason, user_error=ended.is_final))


def _start_group(requests: dict[int, str], listener: ReplicaListener) -> None:
    listener.group_starts(requests)


def _request_of(hello: Hello) -> JoinRequest:
    return msgspec.msgpack.decode(hello.body, type=JoinRequest)
