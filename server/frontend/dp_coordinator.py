"""Connects replicas on several hosts: one host leads, and each replica of the other hosts joins it.

The leader runs the API for all replicas or, if each host has its own API, replica 0. In the second case only replicas
that share experts are connected. A joining replica sends the address at which it receives requests. When all have
joined, the leader sends all addresses to every replica. See `quire.engine.cluster.control_plane` for how hosts are
compared, and how the loss of a host is detected.
"""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import threading
from collections.abc import Callable
from typing import Literal, Protocol

import msgspec

from quire.engine.cluster import control_plane
from quire.engine.cluster.control_plane import Follower, Hello, Leader, LinkEnded
from quire.engine.config.options import EngineConfig, EngineOptions
from quire.engine.core.launch import reserve_ports, socket_port
from quire.engine.protocol.errors import ConfigError

_OF_A_HOST = {
    *("model", "tokenizer", "revision", "node_rank", "master_addr", "master_port", "device", "dtype"),
    *("data_parallel_size_local", "data_parallel_start_rank", "data_parallel_address", "data_parallel_rpc_port"),
    *("gpu_memory_utilization", "kv_cache_memory_bytes", "distributed_timeout_seconds"),
}
"""Options that may differ between hosts."""


class CoordinatedClient(Protocol):
    """Receives the news of other hosts (`EngineClient`)."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...

    def replica_died(self, replica: int, reason: str) -> None: ...

    def fail(self, reason: str) -> None: ...


class DPCoordinator(Protocol):
    """The connection to the other hosts after all have joined."""

    requests: tuple[str, ...]
    """The address of each replica."""
    responses: tuple[str, ...]
    """The address of each API process; empty if no other host needs them."""
    master: tuple[str, int]
    """Where the ranks of coupled replicas meet."""

    def watch(self, client: CoordinatedClient) -> None:
        """Report lost replicas to `client`, including those lost before this call."""

    def request_shutdown(self) -> None:
        """Announce that this host has no more work."""

    @property
    def can_shut_down(self) -> bool:
        """After `request_shutdown`: whether no other host needs this one: all have requested it, or one was lost."""

    def close(self, reason: str = "") -> None:
        """Tell the other hosts that this one exits, with the reason if it is an error."""


class JoinRequest(msgspec.Struct):
    """What a replica sends in its `Hello`."""

    requests: str
    """The address at which it receives requests."""
    master: tuple[str, int]
    """Where the ranks of all replicas meet if this replica is the first."""
    settings: dict[str, str]
    """Flags that must be equal on all hosts."""
    is_headless: bool
    """Whether the leader's API serves this replica."""
    found: dict[str, str]
    """Settings determined on its host, which must be equal on all hosts with replicas."""


class JoinReply(msgspec.Struct):
    """The leader's reply to each replica after all have joined."""

    requests: tuple[str, ...]
    responses: tuple[str, ...]
    master: tuple[str, int]


class ReplicaDied(msgspec.Struct, tag=True):
    """Sent by the host of a replica: its core has died, and why."""

    reason: str


class LeaderDone(msgspec.Struct, tag=True):
    """Sent by the host of a replica: it leaves as soon as all others want to leave."""


_decode_news = msgspec.msgpack.Decoder(ReplicaDied | LeaderDone).decode


def served(config: EngineConfig) -> tuple[int, ...]:
    """The replicas that this host's API serves."""
    return tuple(config.parallel.local_replicas if _is_balanced_outside(config) else range(config.parallel.replicas))


def _is_balanced_outside(config: EngineConfig) -> bool:
    return config.options.data_parallel_start_rank is not None


def role(config: EngineConfig, *, is_headless: bool = False) -> Literal["alone", "leader", "follower"]:
    """The role of this host."""
    parallel = config.parallel
    if is_headless:
        return "follower"
    if len(parallel.local_replicas) == parallel.replicas or (_is_balanced_outside(config) and not parallel.is_coupled):
        return "alone"
    return "leader" if parallel.local_replicas.start == 0 or not _is_balanced_outside(config) else "follower"


def connect_hosts(config: EngineConfig, count: int = 1) -> DPCoordinator | None:
    """Wait for the other hosts that this API needs; None if it needs none. `count` is the number of API processes.

    Blocks for up to `--distributed-timeout-seconds`. Raises `ConfigError` if a host does not join, has different
    settings, or rejects this one.
    """
    match role(config):
        case "alone":
            return None
        case "leader":
            return DPLeader(config, count)
        case "follower":
            return DPMember(config)


class DPLeader:
    """The leader's side."""

    def __init__(self, config: EngineConfig, count: int) -> None:
        options, parallel = config.options, config.parallel
        self._is_coupled = parallel.is_coupled
        self._lock = threading.Lock()
        self._client: CoordinatedClient | None = None
        self._lost: list[tuple[int, str]] = []
        """Losses from before there was a client to notify."""
        self._meeting: JoinReply | None = None
        self._waits_for: set[int] = set()
        """Replicas whose hosts have requests of their own, which require the steps of this host's replicas."""
        own = _address(options.data_parallel_address)
        if not options.data_parallel_rpc_port:
            raise ConfigError("--data-parallel-rpc-port 0: the other hosts need a fixed port; choose one")
        shared = 0 if _is_balanced_outside(config) else count
        self._ports = _reserve(own, shared + len(parallel.local_replicas) + 1)
        responses, requests, master = (
            self._ports[:shared],
            self._ports[shared:-1],
            (own, socket_port(self._ports[-1])),
        )
        self.responses = tuple(_url(own, port) for port in responses)
        addresses = {r: _url(own, port) for r, port in zip(parallel.local_replicas, requests, strict=True)}
        self._mine = _hello(
            f"the host with the {'API' if shared else 'first replica'} ({own})",
            0,
            control_plane.fingerprint(config.model.path),
            _joining_of(config, "", master, bool(shared)),
        )
        others = [replica for replica in range(parallel.replicas) if replica not in parallel.local_replicas]
        ours = [self._mine] if parallel.local_replicas else []
        try:
            self._leader = Leader(
                options.data_parallel_rpc_port,
                others,
                on_lost=self._on_lost,
                on_message=self._on_message,
                on_join=None if self._is_coupled else self._on_join,
                noun="replica",
                flag="--data-parallel-rpc-port",
            )
        except ConfigError:
            self._free_ports()
            raise
        try:
            hellos = self._leader.wait(options.distributed_timeout_seconds)
            for _, hello in sorted(hellos.items()):
                _compare(self._mine, hello, ours[:1])
                ours.append(hello)
        except ConfigError as error:
            self.close(str(error))
            raise
        self._first = ours[0]
        self._waits_for = set() if shared else set(others)
        joined = {number: _joining(hello) for number, hello in hellos.items()}
        self.master = joined[0].master if 0 in joined else master
        addresses |= {number: joining.requests for number, joining in joined.items()}
        self.requests = tuple(addresses[replica] for replica in range(parallel.replicas))
        with self._lock:
            self._meeting = JoinReply(self.requests, self.responses, self.master)
            for number in others:
                self._leader.send(number, msgspec.msgpack.encode(self._meeting))

    def watch(self, client: CoordinatedClient) -> None:
        with self._lock:
            self._client = client
        for replica, reason in self._lost:
            self._notify(client, replica, reason)

    def request_shutdown(self) -> None:
        """No message: `close` informs the others."""

    @property
    def can_shut_down(self) -> bool:
        with self._lock:
            return not self._waits_for

    def close(self, reason: str = "") -> None:
        with self._lock:
            self._client = None
        self._leader.close(reason)
        self._free_ports()

    def _free_ports(self) -> None:
        for port in self._ports:
            port.close()

    def _on_join(self, hello: Hello) -> None:
        """Handle a host that joins again after it was lost. Before all have joined, it counts as awaited."""
        with self._lock:
            if self._meeting is None:
                return
            try:
                _compare(self._mine, hello, [self._first])
                here, before = _host_of(_joining(hello).requests), _host_of(self.requests[hello.number])
                if here != before:
                    raise ConfigError(f"{hello.name} was at {before} before; start it there, or restart all hosts")
            except ConfigError as error:
                self._leader.reject(hello.number, str(error))
            else:
                self._leader.send(hello.number, msgspec.msgpack.encode(self._meeting))

    def _on_message(self, replica: int, body: bytes) -> None:
        match _decode_news(body):
            case ReplicaDied(reason):
                self._on_lost(replica, reason)
            case LeaderDone():
                with self._lock:
                    self._waits_for.discard(replica)

    def _on_lost(self, replica: int, reason: str) -> None:
        with self._lock:
            self._waits_for.clear()
            if self._client is None:
                self._lost.append((replica, reason))
            else:
                self._notify(self._client, replica, reason)

    def _notify(self, client: CoordinatedClient, replica: int, reason: str) -> None:
        if self._is_coupled:
            client.loop.call_soon_threadsafe(client.fail, reason)
        else:
            client.loop.call_soon_threadsafe(client.replica_died, replica, reason)


class DPMember:
    """The side of a host whose replicas join. Each replica has its own connection."""

    def __init__(self, config: EngineConfig, *, is_headless: bool = False) -> None:
        """Join, and wait until all have joined; raises `ConfigError` if that fails."""
        options, parallel = config.options, config.parallel
        seconds, what = options.distributed_timeout_seconds, "API" if is_headless else "first replica"
        self.leader = f"the host with the {what} ({options.data_parallel_address})"
        own = control_plane.address_towards(options.data_parallel_address, seconds)
        address = _address(options.data_parallel_address)
        self._ports = _reserve(own, len(parallel.local_replicas) + 1)
        self._followers: dict[int, Follower] = {}
        self._is_closed = False
        self._has_leader_ended = False
        model = control_plane.fingerprint(config.model.path)
        try:
            for replica, port in zip(parallel.local_replicas, self._ports, strict=False):
                joining = _joining_of(config, _url(own, port), (own, socket_port(self._ports[-1])), is_headless)
                self._followers[replica] = Follower(
                    address,
                    options.data_parallel_rpc_port,
                    _hello(f"replica {replica} ({own})", replica, model, joining),
                    seconds=seconds,
                    on_lost=lambda reason: None,  # `receive` reports it too
                    leader=self.leader,
                    remedy="check that it is running, and that --data-parallel-address and --data-parallel-rpc-port "
                    "match its own",
                )
            for follower in self._followers.values():
                meeting = msgspec.msgpack.decode(follower.receive(None), type=JoinReply)
        except BaseException as error:
            self.close()
            if isinstance(error, LinkEnded):
                raise ConfigError(str(error) or f"{self.leader} has exited") from None
            raise
        self.requests, self.responses, self.master = meeting.requests, meeting.responses, meeting.master

    def watch(self, client: CoordinatedClient) -> None:
        """End this host's API with the leader, as their replicas are coupled."""

        def on_end(end: LinkEnded) -> None:
            self._has_leader_ended = True
            client.loop.call_soon_threadsafe(client.fail, str(end) or "the host with the first replica has exited")

        self.listen(on_end)

    def listen(self, on_end: Callable[[LinkEnded], None]) -> None:
        """Call `on_end` when the leader exits, in another thread and possibly once per replica."""
        for follower in self._followers.values():
            threading.Thread(target=self._listen, args=(follower, on_end), daemon=True, name="leader-watch").start()

    def report_death(self, replica: int, reason: str) -> None:
        """Report that a core has died."""
        self._followers[replica].send(msgspec.msgpack.encode(ReplicaDied(reason)))

    def request_shutdown(self) -> None:
        for follower in self._followers.values():
            follower.send(msgspec.msgpack.encode(LeaderDone()))

    @property
    def can_shut_down(self) -> bool:
        return self._has_leader_ended

    def close(self, reason: str = "") -> None:
        """Close the connections, whatever the others do."""
        self._is_closed = True
        for follower in self._followers.values():
            follower.close(reason)
        for port in self._ports:
            port.close()

    def _listen(self, follower: Follower, on_end: Callable[[LinkEnded], None]) -> None:
        while not self._is_closed:
            try:
                follower.receive(1.0)
            except TimeoutError:
                continue
            except LinkEnded as end:
                return None if self._is_closed else on_end(end)


def _joining_of(config: EngineConfig, requests: str, master: tuple[str, int], is_headless: bool) -> JoinRequest:
    options, model = config.options, config.model
    settings = {
        f"--{field.name.replace('_', '-')}": str(getattr(options, field.name))
        for field in dataclasses.fields(EngineOptions)
        if field.name not in _OF_A_HOST
    }
    found = {
        "--dtype": model.dtype,
        "--device": config.parallel.device,
        "--max-model-len": str(model.max_model_len),
        "--kv-cache-dtype": config.cache.dtype,
    }
    return JoinRequest(requests, master, settings, is_headless, found)


def _hello(name: str, number: int, model: dict[str, str], joining: JoinRequest) -> Hello:
    return Hello(
        name=name, number=number, versions=control_plane.versions(), model=model, body=msgspec.msgpack.encode(joining)
    )


def _joining(hello: Hello) -> JoinRequest:
    return msgspec.msgpack.decode(hello.body, type=JoinRequest)


def _compare(mine: Hello, theirs: Hello, others: list[Hello]) -> None:
    """Raise `ConfigError` for a host whose settings differ from the leader's, or from the `others` with replicas."""
    Leader.check(mine, theirs)
    ours, joined = _joining(mine), _joining(theirs)
    if ours.is_headless != joined.is_headless:
        raise ConfigError(
            f"{theirs.name} is started --headless, and {mine.name} serves its own replicas only; start that without "
            "--data-parallel-start-rank, or this without --headless"
            if joined.is_headless
            else f"{theirs.name} has an API of its own, and {mine.name} serves all replicas; start it with --headless"
        )
    if (own := ours.master[0]).startswith("127.") and not _host_of(joined.requests).startswith("127."):
        raise ConfigError(
            f"--data-parallel-address {own}: {theirs.name} cannot reach that address of {mine.name}; start every host "
            "with one that it can"
        )
    for known, here, there in [
        (mine, ours.settings, joined.settings),
        *((other, _joining(other).found, joined.found) for other in others),
    ]:
        for flag, value in here.items():
            if there.get(flag) != value:
                raise ConfigError(
                    f"{theirs.name} has {flag} {there.get(flag)}, and {known.name} has {value}; start every host with "
                    "the same"
                )


def _reserve(address: str, count: int) -> list[socket.socket]:
    try:
        return reserve_ports(address, count)
    except OSError as error:
        raise ConfigError(
            f"no port can be had at {address}: {(error.strerror or str(error)).lower()}; --data-parallel-address is "
            "the address of the host with the API or with replica 0, and QUIRE_HOST_IP, where set, this host's own"
        ) from None


def _address(host: str) -> str:
    """Resolve a host name to an IPv4 address."""
    try:
        return str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigError(
            f"--data-parallel-address {host}: {(error.strerror or str(error)).lower()}; expected an IPv4 "
            "address or a name that has one"
        ) from None


def _url(address: str, port: socket.socket) -> str:
    return f"tcp://{address}:{socket_port(port)}"


def _host_of(url: str) -> str:
    return url.removeprefix("tcp://").rpartition(":")[0]
