"""The executor that runs the ranks of one replica on several hosts, without Ray.

Node 0 runs the engine core. The other nodes join it (`quire.engine.cluster.control_plane`), and `serve_node` runs their
ranks. Plans and results use that connection, hidden states torch.distributed. Every node resolves the options itself,
because its model folder and its memory may differ. The results must be equal except for the number of KV blocks, of
which all nodes use the minimum.
"""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import logging
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from queue import Empty, SimpleQueue

import msgspec

from quire.engine import log, process
from quire.engine.cluster import control_plane
from quire.engine.cluster.control_plane import Follower, Hello, Leader, LinkEnded
from quire.engine.cluster.ray_cluster import RayResources
from quire.engine.config.options import EngineConfig, EngineOptions
from quire.engine.config.resolve import fetch_weights, resolve
from quire.engine.executor.base import WorkerError, step_timeout
from quire.engine.executor.local_ranks import LocalRanks, LocalStepFuture, RankFailed, find_stragglers, ranks_text
from quire.engine.protocol.errors import ConfigError
from quire.engine.protocol.messages import ModelRunnerOutput, SchedulerOutput

_CAUSE_TIMEOUT = 2.0
"""Seconds to find the first failure after one is reported: a node needs a second to check its own ranks."""
_REASON_TIMEOUT = 10.0
"""Seconds for which a node whose ranks have failed waits for node 0 to send the cause."""
_REPORT_TIMEOUT = 5.0
"""Seconds for which a node that cannot start tries to report it to node 0."""
_PROGRESS_SECONDS = 1.0

_NODES_OWN = frozenset(
    {
        *("model", "tokenizer", "revision", "node_rank", "master_addr", "master_port"),
        *("distributed_timeout_seconds", "gpu_memory_utilization", "kv_cache_memory_bytes"),
    }
)
"""Options that may differ between nodes."""

logger = logging.getLogger("quire.engine.executor.nodes")


class NodeOffer(msgspec.Struct, kw_only=True):
    """A node's resolved configuration, sent in its `Hello`."""

    terms: dict[str, str] = {}
    """Resolved value of each option; must be the same on all nodes."""
    num_blocks: int = 0
    error: str = ""
    """Why the node cannot start."""


class NodeStart(msgspec.Struct):
    """The first message to a node; plans follow."""

    num_blocks: int
    init_method: str


class NodeReady(msgspec.Struct, tag=True, array_like=True):
    """The node's ranks have loaded the model."""

    seconds: dict[str, float]
    num_blocks: int = 0
    """As `LocalRanks.num_blocks`."""


class NodeProgress(msgspec.Struct, tag=True, array_like=True):
    """Progress of the node's ranks (see `LocalRanks.progress`)."""

    progress: list[int]


class NodeFailed(msgspec.Struct, tag=True, array_like=True):
    """The node's ranks have failed. `is_certain`: they are the cause; `user_error`: the user can fix the cause."""

    reason: str
    is_certain: bool
    user_error: bool = False


class NodeLost(msgspec.Struct):
    """The connection to the node is lost."""

    reason: str


FromNode = NodeReady | NodeProgress | NodeFailed | ModelRunnerOutput


class MultiNodeExecutor:
    """Runs the ranks of node 0 directly, and the others through their nodes."""

    def __init__(self, config: EngineConfig, log_level: str, on_end: Callable[[], None]) -> None:
        parallel, started = config.parallel, time.monotonic()
        self.hello = make_hello(config.options, offer(config), config)
        set_interfaces(config)
        self._on_end = on_end
        self._inbox: SimpleQueue[tuple[int, FromNode | NodeLost]] = SimpleQueue()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._decode = msgspec.msgpack.Decoder[FromNode](FromNode).decode
        self._encode = msgspec.msgpack.Encoder().encode
        self._arrived: deque[ModelRunnerOutput] = deque()
        self._progress = dict.fromkeys(range(parallel.world_size), -1)
        self._names = {0: self.hello.name}
        self._ranks: LocalRanks | None = None
        self._leader = Leader(
            parallel.master[1],
            range(1, parallel.nodes),
            on_lost=lambda number, reason: self._put(number, NodeLost(reason)),
            on_message=lambda number, body: self._put(number, self._decode(body)),
        )
        try:
            self._start_nodes(config, log_level)
            hellos = self._leader.wait(parallel.timeout)
            self._names |= {number: hello.name for number, hello in hellos.items()}
            num_blocks = self._check_offers(config, hellos)
            self.config = replace(config, cache=replace(config.cache, num_blocks=num_blocks))
            joined = time.monotonic()
            init_method = self._init_method(config)
            for number in hellos:
                self._leader.send(number, msgspec.msgpack.encode(NodeStart(num_blocks, init_method)))
            self._ranks = LocalRanks(self.config, parallel.ranks_of(0), init_method, log_level, on_end)
            self._ranks.listen(self._wake_fd, self._handle_inbox)
            self._loading = set(hellos)
            self.seconds: dict[str, float] = {}
            while self._loading or not self._ranks.is_ready:
                self._poll(None)
        except BaseException as error:
            self.close(str(error) or type(error).__name__)
            raise
        self.config = self.config.with_blocks(self._ranks.num_blocks)
        slowest = max(self.seconds, self._ranks.seconds, key=lambda each: sum(each.values()))
        self.seconds = {"join nodes": joined - started, **slowest}

    def _start_nodes(self, config: EngineConfig, log_level: str) -> None:
        """Do nothing: the user starts the nodes, which join by themselves."""

    def _init_method(self, config: EngineConfig) -> str:
        """Return the address of torch.distributed's store, on the host of rank 0."""
        return f"tcp://{_bracketed(config.parallel.master[0])}:{_free_port()}"

    def _check_offers(self, config: EngineConfig, hellos: dict[int, Hello]) -> int:
        """Return the number of KV blocks of every node; raises `ConfigError` if a node cannot start or differs."""
        offers = {0: offer(config)}
        for number, hello in sorted(hellos.items()):
            offers[number] = theirs = msgspec.msgpack.decode(hello.body, type=NodeOffer)
            for name, ours in self.hello.versions.items():
                if hello.versions.get(name) != ours:
                    self._leader.check(self.hello, hello)
            if theirs.error:
                raise ConfigError(f"{hello.name}: {theirs.error}")
            self._leader.check(self.hello, hello)
            for option, here in offers[0].terms.items():
                if (there := theirs.terms.get(option)) != here:
                    flag = f"--{option.replace('_', '-')}"
                    raise ConfigError(
                        f"{hello.name} was started with {flag} {there}, and {self.hello.name} with {here}; give every "
                        "node the same"
                    )
            if _is_loopback(config.parallel.master[0]) and not _is_loopback(_address(hello)):
                raise ConfigError(
                    f"--master-addr {config.parallel.master[0]}: {hello.name} cannot reach that address of "
                    "node 0; start every node with one that it can"
                )
        smallest = min(offers, key=lambda number: offers[number].num_blocks)
        if (num_blocks := offers[smallest].num_blocks) < config.cache.num_blocks:
            logger.warning(
                "the KV cache has %s blocks on every node instead of %s: no more fit on %s",
                f"{num_blocks:,}",
                f"{config.cache.num_blocks:,}",
                self._names[smallest],
            )
        return num_blocks

    def submit(self, plan: SchedulerOutput) -> LocalStepFuture:
        assert self._ranks is not None
        encoded = self._encode(plan)
        for number in range(1, self.config.parallel.nodes):
            self._leader.send(number, encoded)
        # A rank that waits to send a result does not read plans, so results are received while writing.
        self._ranks.write(encoded, while_waiting=self.check)
        return LocalStepFuture(self.receive, plan.step, step_timeout(plan, self.config))

    def receive(self, step: int, timeout: float) -> ModelRunnerOutput:
        """Return the next result; raises `WorkerError` if a rank or a node dies, fails or hangs."""
        deadline = time.monotonic() + timeout
        while not self._arrived:
            if not self._poll(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                raise WorkerError(f"{self._stragglers(step)} did not answer within {timeout:.0f} s")
        return self._arrived.popleft()

    def check(self) -> None:
        """Raise `WorkerError` if a rank or a node has exited."""
        while self._poll(0):
            pass

    def close(self, reason: str = "") -> None:
        """Stop every rank on every node."""
        self._leader.close(reason)
        if self._ranks is not None:
            self._ranks.kill() if reason else self._ranks.close()
            self._ranks = None
            os.close(self._wake_fd)

    def _put(self, number: int, message: FromNode | NodeLost) -> None:
        """Queue a message, from the leader's thread. Failures also wake an idle core."""
        self._inbox.put((number, message))
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake_fd, 1)
        if isinstance(message, NodeFailed | NodeLost):
            self._on_end()

    def _poll(self, timeout: float | None) -> bool:
        assert self._ranks is not None
        try:
            has_news = self._ranks.poll(timeout)
        except RankFailed as failure:
            raise WorkerError(self._root_cause(0, failure)) from None
        self._arrived += self._ranks.arrived
        self._ranks.arrived.clear()
        return has_news

    def _handle_inbox(self) -> None:
        """Handle the messages of other nodes; raises `WorkerError` or `ConfigError` if one has failed."""
        os.eventfd_read(self._wake_fd)
        while True:
            try:
                number, message = self._inbox.get_nowait()
            except Empty:
                return
            match message:
                case ModelRunnerOutput():
                    self._arrived.append(message)
                case NodeReady(seconds, num_blocks):
                    self._loading.discard(number)
                    self.config = self.config.with_blocks(num_blocks)  # the same for all ranks of a replica
                    self.seconds = max(self.seconds, seconds, key=lambda each: sum(each.values()))
                case NodeProgress(progress):
                    self._progress |= zip(self.config.parallel.ranks_of(number), progress, strict=True)
                case NodeFailed(reason, user_error=True):
                    raise ConfigError(f"{self._names[number]}: {reason}")
                case NodeFailed(reason, is_certain):
                    raise WorkerError(self._root_cause(number, RankFailed(reason, is_certain=is_certain)))
                case NodeLost(reason):
                    raise WorkerError(reason)

    def _root_cause(self, number: int, failure: RankFailed) -> str:
        """Return the error text for a failed rank, or for the failure that caused it.

        If a rank or a node dies, the ranks that communicate with it fail on every node.
        """
        assert self._ranks is not None
        deadline = time.monotonic() + _CAUSE_TIMEOUT
        pending_nodes = set(range(self.config.parallel.nodes)) - {number}
        while not failure.is_certain and pending_nodes and time.monotonic() < deadline:
            if 0 in pending_nodes and (killed := self._ranks.killed(0.0)) is not None:
                number, failure = 0, killed
                break
            with contextlib.suppress(Empty):
                match self._inbox.get(timeout=0.05):
                    case other, NodeLost(reason):
                        return reason
                    case other, NodeFailed(reason, is_certain):
                        pending_nodes.discard(other)
                        if is_certain:
                            number, failure = other, RankFailed(reason, is_certain=True)
        return f"{failure} on {self._names[number]}"

    def _stragglers(self, step: int) -> str:
        """Return a text that names the ranks that delay a step, with their nodes."""
        assert self._ranks is not None
        self._progress |= zip(self._ranks.ranks, self._ranks.progress, strict=True)
        late, parallel = find_stragglers(self._progress, step), self.config.parallel
        texts = []
        for number, name in sorted(self._names.items()):
            if theirs := [rank for rank in late if rank in parallel.ranks_of(number)]:
                texts.append(f"{ranks_text(theirs)} on {name}")
        return " and ".join(texts)


def serve_node(options: EngineOptions, log_level: str, placed: RayResources | None = None) -> int:
    """Run the ranks of node `options.node_rank` until node 0 ends; returns the exit code, 1 after a failure.

    `placed` is Ray's placement of the ranks. Raises `ConfigError` if the ranks cannot start, and reports it to node 0.
    """
    try:
        config = resolve(options, placed)
        fetch_weights(options, config)
        set_interfaces(config)
    except ConfigError as error:
        _report_error(options, str(error))
        raise
    try:
        node = Node(config, log_level)
    except LinkEnded as refusal:
        raise ConfigError(refusal.reason) from None
    try:
        node.serve()
    except LinkEnded as end:
        if end.reason:
            logger.error("%s", end.reason)
        else:
            logger.info("node 0 has ended")
        return 1 if end.reason else 0
    finally:
        node.close()
    raise AssertionError


class Node:
    """Runs the ranks of a host other than node 0."""

    def __init__(self, config: EngineConfig, log_level: str) -> None:
        self._config, self._log_level = config, log_level
        self._ranks: LocalRanks | None = None
        self._failure: NodeFailed | None = None
        self._is_over = threading.Event()
        self._results: threading.Thread | None = None
        self._close_reason = "it was stopped"
        self._follower = _join(
            config.options, make_hello(config.options, offer(config), config), config.parallel.timeout
        )

    def serve(self) -> None:
        """Run until `LinkEnded` is raised; never returns."""
        begin = msgspec.msgpack.decode(self._follower.receive(None), type=NodeStart)
        config = replace(self._config, cache=replace(self._config.cache, num_blocks=begin.num_blocks))
        ranks = config.parallel.ranks_of(config.parallel.node)
        self._ranks = LocalRanks(config, ranks, begin.init_method, self._log_level, on_end=lambda: None)
        self._results = threading.Thread(target=self._send_results, args=(self._ranks,), daemon=True, name="results")
        self._results.start()
        while True:
            try:
                plan = self._follower.receive(_PROGRESS_SECONDS)
            except TimeoutError:
                self._check()
            else:
                self._ranks.write(plan, while_waiting=self._check)

    def _check(self) -> None:
        """Raise `LinkEnded` if node 0 has ended, or if the ranks have failed and node 0 does not answer the report."""
        if (ended := self._follower.ended) is not None:
            raise ended
        if self._failure is not None:
            deadline = time.monotonic() + _REASON_TIMEOUT
            with contextlib.suppress(TimeoutError):
                while (left := deadline - time.monotonic()) > 0:
                    self._follower.receive(left)
            self._close_reason = self._failure.reason
            raise LinkEnded(self._failure.reason)

    def _send_results(self, ranks: LocalRanks) -> None:
        """Forward the messages of the ranks to node 0; runs in a thread."""
        encode, send = msgspec.msgpack.Encoder().encode, self._follower.send
        progress, is_ready_sent, next_look = list[int](), False, 0.0
        try:
            while not self._is_over.is_set():
                ranks.poll(_PROGRESS_SECONDS)
                while ranks.arrived:
                    send(encode(ranks.arrived.popleft()))
                if ranks.is_ready and not is_ready_sent:
                    is_ready_sent = True
                    send(encode(NodeReady(ranks.seconds, ranks.num_blocks)))
                if (now := time.monotonic()) >= next_look and ranks.progress != progress:
                    progress, next_look = ranks.progress, now + _PROGRESS_SECONDS
                    send(encode(NodeProgress(progress)))
        except ConfigError as error:
            self._failure = NodeFailed(str(error), is_certain=True, user_error=True)
        except RankFailed as error:
            self._failure = NodeFailed(str(error), is_certain=error.is_certain)
        except Exception as error:
            logger.exception("the results of this node's ranks cannot be sent")
            self._failure = NodeFailed(f"{type(error).__name__}: {error}", is_certain=True)
        if self._failure is not None:
            send(encode(self._failure))

    def close(self) -> None:
        """Stop the ranks, and disconnect."""
        self._is_over.set()
        if self._results is not None:
            self._results.join(2 * _PROGRESS_SECONDS)
        if self._ranks is not None:
            self._ranks.kill()
        self._follower.close(self._close_reason)


def offer(config: EngineConfig) -> NodeOffer:
    """Return this node's resolved configuration."""
    options, model = config.options, config.model
    terms = {
        field.name: getattr(options, field.name)
        for field in dataclasses.fields(EngineOptions)
        if field.name not in _NODES_OWN
    }
    terms |= {
        "runner": "generate" if model.pooling is None else "pooling",
        "device": config.parallel.device,
        "pipeline_layer_partition": ",".join(str(len(layers)) for layers in config.parallel.stages),
        "dtype": model.dtype,
        "quantization": model.quantization,
        "max_model_len": model.max_model_len,
        "load_format": model.load_format,
        "max_num_batched_tokens": config.scheduler.max_num_batched_tokens,
        "kv_cache_dtype": config.cache.dtype,
    }
    return NodeOffer(terms={name: str(value) for name, value in terms.items()}, num_blocks=config.cache.num_blocks)


def make_hello(options: EngineOptions, offered: NodeOffer, config: EngineConfig | None) -> Hello:
    """Return this node's `Hello`; `config` is None if it cannot start. Raises like `address_towards`."""
    return Hello(
        name=f"node {options.node_rank} ({control_plane.address_towards(options.master_addr)})",
        number=options.node_rank,
        versions=control_plane.versions(),
        model={} if config is None else control_plane.fingerprint(config.model.path),
        body=msgspec.msgpack.encode(offered),
    )


def set_interfaces(config: EngineConfig) -> None:
    """Let gloo and NCCL use the interface that reaches node 0, unless the user has set one.

    By default gloo uses the address of the host name, which is often 127.0.0.1. Raises `ConfigError` if this host has
    no such interface. Processes started later inherit the setting.
    """
    own = control_plane.address_towards(config.parallel.master[0])
    interface = control_plane.interface_of(own)
    if interface is None:
        raise ConfigError(f"QUIRE_HOST_IP={own}: no network interface of this host has that address")
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        logger.debug("%s=%s", name, os.environ.setdefault(name, interface))


def _join(options: EngineOptions, hello: Hello, seconds: float) -> Follower:
    address, port = options.master_addr, options.master_port
    leader = "node 0" if address in hello.name else f"node 0 ({address})"
    return Follower(address, port, hello, seconds=seconds, on_lost=lambda reason: None, leader=leader)


def _report_error(options: EngineOptions, error: str) -> None:
    """Report to node 0 why this node cannot start, if node 0 can be reached."""
    with contextlib.suppress(ConfigError, LinkEnded):
        follower = _join(options, make_hello(options, NodeOffer(error=error), None), _REPORT_TIMEOUT)
        try:
            follower.receive(_REPORT_TIMEOUT)
        except TimeoutError:
            pass
        finally:
            follower.close(error)


def _address(hello: Hello) -> str:
    return hello.name.rpartition("(")[2].rstrip(")")


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        return int(free.getsockname()[1])


def main() -> int:
    """Run `quire serve --headless` on a node other than 0; the options are read from standard input."""
    process.share_cores()
    options, log_level = pickle.load(sys.stdin.buffer)
    log.setup(log_level, f"node {options.node_rank}")
    process.set_name(f"quire-node-{options.node_rank}")

    def on_signal(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    try:
        return serve_node(options, log_level)
    except ConfigError as error:
        print(f"quire: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        logger.info("stopped")
        return 0


if __name__ == "__main__":
    sys.exit(main())
