"""The executor that runs the ranks of one replica on several hosts, and the process of each node.

The first node of a replica runs its engine core. The others join it (`quire.engine.cluster.control_plane`), and
`serve_node` runs their ranks. Plans and results use that connection, hidden states torch.distributed. Every node
resolves the options itself, because its model folder and its memory may differ. The results must be equal except for
the number of KV blocks, of which all nodes use the minimum.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from queue import Empty
from typing import TYPE_CHECKING

import msgspec

from quire.engine.cluster.control_plane import (
    HostsMissing,
    LinkEnded,
    Redirected,
    WakeQueue,
    compare_weights,
    compares_weights,
)
from quire.engine.cluster.follower import Follower
from quire.engine.cluster.handshake import Hello, describe_host
from quire.engine.cluster.leader import Leader
from quire.engine.cluster.network import address_towards, set_interfaces, tcp_url
from quire.engine.config.engine_config import EngineConfig, ParallelConfig, RayPlacement
from quire.engine.config.options import EngineOptions
from quire.engine.config.parallel_config import local_replicas
from quire.engine.config.resolve import fetch_weights, resolve
from quire.engine.executor.base import POLL_SECONDS, WorkerError
from quire.engine.executor.local_ranks import LocalRanks, RankFailed, find_late_ranks, ranks_text, slowest
from quire.engine.executor.mp import ProcessExecutor
from quire.engine.executor.traces import send_trace
from quire.engine.process import current_process, log, native_output
from quire.engine.process.runtime_folder import RuntimeFolder
from quire.engine.protocol.errors import ConfigError
from quire.engine.protocol.profile import RankTrace, TracePiece
from quire.engine.protocol.rank_report import RankReport
from quire.engine.protocol.runner_output import ModelRunnerOutput, WorkerFailed, WorkerReady
from quire.engine.protocol.stats import LogRecord, RankStats
from quire.engine.protocol.supervision import LogLevel

if TYPE_CHECKING:
    from quire.engine.cluster.ray_launcher import RayLauncher

_CAUSE_TIMEOUT = 2.0
"""Seconds to find the first failure after one is reported: a node needs a second to check its own ranks."""
_REASON_TIMEOUT = 10.0
"""Seconds for which a node whose ranks have failed waits for the first node to send the cause."""
_REPORT_TIMEOUT = 5.0
"""Seconds for which a node that cannot start tries to report it to the first one."""
_REJOIN_SECONDS = 1.0
"""Interval at which a node tries to join again."""
_PROGRESS_SECONDS = 1.0

logger = logging.getLogger("quire.engine.executor.nodes")


class NodeStart(msgspec.Struct):
    """The first message to a node; plans follow."""

    num_blocks: int
    init_method: str


class NodeProgress(msgspec.Struct, tag=True, array_like=True):
    """Progress and stats of the node's ranks (see `LocalRanks`)."""

    progress: list[int]
    waiting: list[int] = []
    """Ranks that wait for others in a collective."""
    stats: list[RankStats] = []
    warnings: list[LogRecord] = []
    """New ones of the node and its ranks."""


class WeightsCompared(msgspec.Struct):
    """A node has the same weights as this one; wakes the loop that waits for it."""


class NodeLost(msgspec.Struct):
    """The connection to the node is lost."""

    reason: str
    user_error: bool = False


FromNode = WorkerReady | NodeProgress | WorkerFailed | ModelRunnerOutput | TracePiece | RankReport


class MultiNodeExecutor(ProcessExecutor):
    """Runs the ranks of the first node directly, and the others through their nodes.

    Without a launcher, the user starts the nodes.
    """

    def __init__(
        self,
        config: EngineConfig,
        log_level: str,
        on_end: Callable[[], None],
        launcher: RayLauncher | None = None,
    ) -> None:
        super().__init__(config.parallel)
        self.config, parallel, started = config, config.parallel, time.monotonic()
        address, port = parallel.master
        self._hello = _describe_node(config)
        set_interfaces(address)
        self._on_end, self._launcher = on_end, launcher
        self._decode = msgspec.msgpack.Decoder[FromNode](FromNode).decode
        self._inbox: WakeQueue[tuple[int, FromNode | NodeLost | WeightsCompared]] = WakeQueue()
        self._progress = dict.fromkeys(range(parallel.world_size), -1)
        self._waiting: dict[int, list[int]] = {}
        """The ranks that wait for others, by node."""
        self._other_stats: dict[int, RankStats] = {}
        """Stats of each rank of another node, by rank."""
        self._names = {parallel.node: self._hello.name}
        self._is_started = False
        self._leader = Leader(
            self._hello,
            address,
            port,
            parallel.hosts[1:],
            on_message=lambda number, body: self._put(number, self._decode(body)),
            on_lost=lambda number, end: self._put(number, NodeLost(end.reason, end.is_final)),
            on_compared=lambda number: self._put(number, WeightsCompared()),
            token=parallel.cluster_token,
            lost_seconds=parallel.cluster_timeout,
        )
        try:
            if launcher is not None:
                launcher.start(self._leader.port, self._leader.fail)
            hellos = self._leader.wait(parallel.timeout)
            self._names |= {number: hello.name for number, hello in hellos.items()}
            self.config = config.with_blocks(self._min_blocks(hellos))
            with_ranks = [number for number in parallel.hosts if parallel.ranks_of(number)]
            self._leader.check_links(
                itertools.permutations([None if number == parallel.node else number for number in with_ranks], 2),
                "NCCL_SOCKET_IFNAME" if parallel.device == "cuda" else "GLOO_SOCKET_IFNAME",
            )
            joined = time.monotonic()
            init_method = tcp_url(address, self._leader.port)
            self._leader.start(msgspec.msgpack.encode(NodeStart(self.config.cache.num_blocks, init_method)))
            compare_weights(config, [self._leader])
            self._ranks = LocalRanks(self.config, parallel.ranks_of(parallel.node), init_method, log_level, on_end)
            self._is_started = True
            self._ranks.on_trace = self._on_rank_trace
            self._ranks.on_report = lambda report: self.on_report(report)
            self._ranks.listen(self._inbox.fd, self._handle_inbox)
            self._loading = set(hellos)
            self.seconds: dict[str, float] = {}
            while self._loading or not self._ranks.is_ready:
                self._poll(POLL_SECONDS)
            loaded = time.monotonic()
            if is_comparing := compares_weights(config) and not all(map(self._leader.has_same_weights, hellos)):
                logger.info("loaded; waiting for the comparison of all bytes of the weights (--trust-weights omits it)")
                while not all(map(self._leader.has_same_weights, hellos)):
                    self._poll(POLL_SECONDS)
        except BaseException as error:
            reason = str(error) or type(error).__name__
            is_final = isinstance(error, ConfigError) and not isinstance(error, HostsMissing)
            self._leader.close(reason, is_final=is_final)
            self.close(reason)
            raise
        self.config = self.config.with_blocks(self._ranks.num_blocks)
        self.seconds = {"join nodes": joined - started, **slowest(self.seconds, self._ranks.seconds)}
        if is_comparing:
            self.seconds["compare weights"] = time.monotonic() - loaded

    def _min_blocks(self, hellos: dict[int, Hello]) -> int:
        """Return the number of KV blocks that all nodes have."""
        blocks = {number: msgspec.msgpack.decode(hello.body, type=int) for number, hello in hellos.items()}
        blocks[self.config.parallel.node] = own = msgspec.msgpack.decode(self._hello.body, type=int)
        smallest = min(sorted(blocks), key=lambda number: blocks[number])
        if blocks[smallest] < own:
            logger.warning(
                "the KV cache has %s blocks on every node instead of %s: no more fit on %s",
                f"{blocks[smallest]:,}",
                f"{own:,}",
                self._names[smallest],
            )
        return blocks[smallest]

    def set_log_level(self, level: LogLevel) -> None:
        super().set_log_level(level)
        self._leader.set_log_level(level)

    def close(self, reason: str = "") -> None:
        """Stop every rank on every node."""
        self._leader.close(reason)
        if self._is_started:
            super().close(reason)
            self._is_started = False
        self._inbox.close()
        if self._launcher is not None:
            self._launcher.close()

    def _send(self, plan: bytes) -> None:
        self._leader.send(None, plan)

    def _put(self, number: int, message: FromNode | NodeLost | WeightsCompared) -> None:
        """Queue a message, from the leader's thread. Failures also wake an idle core; traces and reports
        beside the steps bypass the loop."""
        if isinstance(message, TracePiece):
            return self.on_trace(message)
        if isinstance(message, RankReport):
            return self.on_report(message)
        self._inbox.put((number, message))
        if isinstance(message, WorkerFailed | NodeLost):
            self._on_end()

    def _poll(self, timeout: float | None) -> bool:
        try:
            return super()._poll(timeout)
        except RankFailed as failure:
            raise WorkerError(self._root_cause(self.config.parallel.node, failure)) from None

    def _handle_inbox(self) -> None:
        """Handle the messages of other nodes; raises `WorkerError` or `ConfigError` if one has failed."""
        for number, message in self._inbox.drain():
            match message:
                case ModelRunnerOutput():
                    self._ranks.arrived.append(message)
                case WorkerReady(seconds, num_blocks):
                    self._loading.discard(number)
                    self.config = self.config.with_blocks(num_blocks)  # the same for all ranks of a replica
                    self.seconds = slowest(self.seconds, seconds)
                case NodeProgress(progress, waiting, stats, warnings):
                    self._progress |= zip(self.config.parallel.ranks_of(number), progress, strict=True)
                    self._waiting[number] = waiting
                    self._other_stats |= zip(self.config.parallel.ranks_of(number), stats, strict=False)
                    log.RECENT.records.extend(warnings)
                case WorkerFailed(reason, user_error=True):
                    raise ConfigError(f"{self._names[number]}: {reason}")
                case WorkerFailed(reason, is_certain=is_certain):
                    raise WorkerError(self._root_cause(number, RankFailed(reason, is_certain=is_certain)))
                case NodeLost(reason, user_error):
                    raise ConfigError(reason) if user_error else WorkerError(reason)

    def _root_cause(self, number: int, failure: RankFailed) -> str:
        """Return the error text for a failed rank, or for the failure that caused it.

        If a rank or a node dies, the ranks that communicate with it fail on every node.
        """
        deadline = time.monotonic() + _CAUSE_TIMEOUT
        own, pending_nodes = self.config.parallel.node, set(self.config.parallel.hosts) - {number}
        while not failure.is_certain and pending_nodes and time.monotonic() < deadline:
            if own in pending_nodes and (killed := self._ranks.killed(0.0)) is not None:
                number, failure = own, killed
                break
            with contextlib.suppress(Empty):
                match self._inbox.get(0.05):
                    case other, NodeLost(reason):
                        return reason
                    case other, WorkerFailed(reason, is_certain=is_certain):
                        pending_nodes.discard(other)
                        if is_certain:
                            number, failure = other, RankFailed(reason, is_certain=True)
        return f"{failure} on {self._names[number]}"

    def _position(self) -> object:
        return dict(self._progress), self._ranks.progress

    def _late_ranks(self, step: int) -> list[int]:
        self._progress |= zip(self._ranks.ranks, self._ranks.progress, strict=True)
        waiting = {*self._ranks.waiting, *itertools.chain.from_iterable(self._waiting.values())}
        return find_late_ranks(self._progress, step, waiting)

    def _stats(self) -> list[RankStats]:
        stats = self._other_stats | dict(zip(self._ranks.ranks, self._ranks.stats, strict=True))
        return [stats.get(rank, RankStats()) for rank in range(self.config.parallel.world_size)]

    def _name(self, ranks: list[int]) -> str:
        texts = []
        for number, name in sorted(self._names.items()):
            if theirs := [rank for rank in ranks if rank in self.config.parallel.ranks_of(number)]:
                texts.append(f"{ranks_text(theirs)} on {name}")
        return " and ".join(texts)


def serve_node(
    options: EngineOptions, log_level: LogLevel, placement: RayPlacement | None = None, *, may_rejoin: bool = False
) -> int:
    """Run the ranks of node `options.node_rank` until its replica ends; returns the exit code: 1 after a failure, 2
    after one that another start does not mend.

    With `may_rejoin`, after a failure the node joins the replica's first node again, which restarts its engine.
    `placement` is Ray's placement of the ranks. If they cannot start, reports it to that node and raises `ConfigError`.
    """
    try:
        config = resolve(options, placement)
        fetch_weights(options, config)
        set_interfaces(config.parallel.master[0])
    except ConfigError as error:
        _report_error(options, str(error))
        raise
    deadline, has_run = 0.0, False
    while True:
        try:
            node = Node(config, log_level)
        except LinkEnded as rejection:
            if (rejection.is_final and not has_run) or time.monotonic() >= deadline:
                raise ConfigError(rejection.reason) from None
            time.sleep(_REJOIN_SECONDS)  # the loss has not been noticed yet, or the engine is still ending
            continue
        with contextlib.closing(node):
            end = node.run()
        has_run |= node.is_ready
        log_level = node.log_level
        if not end.reason:
            logger.info("node %d has ended", config.parallel.first_node)
            return 0
        if end.is_final and not has_run:  # what has run may heal: memory that is not free yet, a cut of the network
            raise ConfigError(end.reason)
        logger.error("%s", end.reason)
        if not may_rejoin:
            return 1
        logger.info("joining node %d again (--no-restart: exit instead)", config.parallel.first_node)
        deadline = time.monotonic() + config.parallel.timeout


class Node:
    """Runs the ranks of a host other than the replica's first: carries plans to them, and their messages to the first
    host."""

    def __init__(self, config: EngineConfig, log_level: LogLevel) -> None:
        """Join the first node; raises `ConfigError` if it does not answer, and `LinkEnded` if it rejects this one."""
        self._config = config
        self.log_level = log_level
        """The lowest level of log messages that are shown here, unless the configuration of the logs says otherwise."""
        self._is_level_changed = False
        """Whether the first node has asked for another level."""
        self._ranks: LocalRanks | None = None
        self._encode = msgspec.msgpack.Encoder().encode
        self.is_ready = False
        """Whether the ranks have been ready."""
        self._progress: NodeProgress | None = None
        self._progress_at = 0.0
        """When `_progress` was sent, on the monotonic clock."""
        self._close_reason = "it was stopped"
        self._follower = _join(config.parallel, _describe_node(config), self._set_log_level)

    def run(self) -> LinkEnded:
        """Run until the first node ends or the ranks fail; returns the reason, which is empty after a normal
        shutdown."""
        try:
            start = msgspec.msgpack.decode(self._follower.receive(None), type=NodeStart)
            compare_weights(self._config, [self._follower])
            config, parallel = self._config.with_blocks(start.num_blocks), self._config.parallel
            ranks = self._ranks = LocalRanks(
                config, parallel.ranks_of(parallel.node), start.init_method, self.log_level, on_end=lambda: None
            )
            if self._is_level_changed:  # perhaps meanwhile, and whatever the configuration of the logs says
                ranks.set_log_level(self.log_level)
            ranks.on_trace = self._on_rank_trace
            ranks.on_report = lambda report: self._follower.send(self._encode(report))
            ranks.listen(self._follower.inbox.fd, lambda: None)
            while True:
                self._forward(ranks, _PROGRESS_SECONDS)
                for plan in self._follower.inbox.drain():
                    if isinstance(plan, LinkEnded):
                        raise plan
                    ranks.write(plan, while_waiting=lambda: self._forward(ranks, 0.0))
        except LinkEnded as end:
            return end
        except ConfigError as error:
            failure = WorkerFailed(str(error), user_error=True, is_certain=True)
        except RankFailed as error:
            failure = WorkerFailed(str(error), is_certain=error.is_certain)
        except Exception as error:
            logger.exception("this node failed")
            failure = WorkerFailed(f"{type(error).__name__}: {error}", is_certain=True)
        self._follower.send(self._encode(failure))
        self._close_reason = failure.reason
        return self._await_cause() or LinkEnded(failure.reason, is_final=failure.user_error)

    def _set_log_level(self, level: LogLevel) -> None:
        self.log_level, self._is_level_changed = level, True
        log.set_level(level)
        if self._ranks is not None:
            self._ranks.set_log_level(level)

    def _on_rank_trace(self, trace: RankTrace) -> None:
        send, encode = self._follower.send, self._encode
        send_trace(trace, self._config.parallel, lambda piece: send(encode(piece)), self._follower.clock)

    def _forward(self, ranks: LocalRanks, timeout: float) -> None:
        """Wait for messages of the ranks, and send them to the first node; raises `LinkEnded` if that has ended."""
        ranks.poll(timeout)
        send, encode = self._follower.send, self._encode
        while ranks.arrived:
            send(encode(ranks.arrived.popleft()))
        if ranks.is_ready and not self.is_ready:
            self.is_ready = True
            send(encode(WorkerReady(ranks.seconds, ranks.num_blocks)))
        if (now := time.monotonic()) >= self._progress_at + _PROGRESS_SECONDS:
            progress = NodeProgress(ranks.progress, ranks.waiting, ranks.stats, log.RECENT.take())
            if progress != self._progress:
                self._progress, self._progress_at = progress, now
                send(encode(progress))
        if self._follower.ended is not None:
            raise self._follower.ended

    def _await_cause(self) -> LinkEnded | None:
        """Return the cause that the first node ends with; None if it does not end, or without one."""
        deadline = time.monotonic() + _REASON_TIMEOUT
        try:
            while (left := deadline - time.monotonic()) > 0:
                self._follower.receive(left)
        except LinkEnded as end:
            return end if end.reason else None
        except TimeoutError:
            pass
        return None

    def close(self) -> None:
        """Stop the ranks, and disconnect."""
        if self._ranks is not None:
            self._ranks.kill()
        self._follower.close(self._close_reason)


def _describe_node(config: EngineConfig) -> Hello:
    """Return this node's `Hello`; its body is the number of KV blocks. Raises like `address_towards`."""
    parallel, body = config.parallel, msgspec.msgpack.encode(config.cache.num_blocks)
    hello = describe_host(
        f"node {parallel.node}", parallel.node, address_towards(parallel.master[0]), config, body=body
    )
    hello.replica = parallel.replica if parallel.replicas > 1 else None
    return hello


def _join(
    parallel: ParallelConfig, hello: Hello, on_log_level: Callable[[LogLevel], None] = lambda level: None
) -> Follower:
    """Join the first node of the replica. Node 0 gives its address, unless node 0 is the first node."""
    deadline = time.monotonic() + parallel.timeout
    token, lost_seconds = parallel.cluster_token, parallel.cluster_timeout

    def join(node: int, address: str, port: int, seconds: float) -> Follower:
        leader = f"node {node}" if address == hello.address else f"node {node} ({address})"
        return Follower(
            address,
            port,
            hello,
            seconds=seconds,
            on_log_level=on_log_level,
            leader=leader,
            token=token,
            lost_seconds=lost_seconds,
        )

    while True:
        try:
            return join(0, *parallel.master, deadline - time.monotonic())
        except Redirected as first:
            seconds = max(0.0, min(lost_seconds, deadline - time.monotonic()))
            try:
                return join(parallel.first_node, first.address, first.port, seconds)
            except ConfigError:  # it may come back elsewhere
                if time.monotonic() >= deadline:
                    raise


def _report_error(options: EngineOptions, error: str) -> None:
    """Report to node 0 why this node cannot start, if node 0 can be reached."""
    with contextlib.suppress(ConfigError, LinkEnded, Redirected):
        address, own = options.master_addr, address_towards(options.master_addr)
        hello = describe_host(f"node {options.node_rank}", options.node_rank, own, None, error=error)
        hello.replica = local_replicas(options).start if options.data_parallel_size > 1 else None
        token = options.cluster_token or ""
        Follower(address, options.master_port, hello, seconds=_REPORT_TIMEOUT, leader="node 0", token=token).close(
            error
        )


def main() -> int:
    """Run the process of a node other than a replica's first, which the user (`exec_node`) or Ray has started.

    Standard input has the options, the log level, the placement if Ray has started it, and whether it joins again after
    a failure. A process of Ray's ends when its standard input closes, as it does with the actor that started it.
    """
    current_process.share_cores()
    options, log_level, placement, may_rejoin = pickle.load(sys.stdin.buffer)
    if placement is not None and log.is_json():  # or else `quire serve` has done it
        native_output.wrap()
    log.setup(log_level, f"node {options.node_rank}")
    current_process.set_name(f"quire-node-{options.node_rank}")
    if placement is not None:
        current_process.watch_stdin(lambda: os._exit(1))

    def on_signal(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    try:
        # For the ranks' fork server, which removes nothing when it is killed.
        os.environ["TMPDIR"] = tempfile.tempdir = RuntimeFolder().path
        return serve_node(options, log_level, placement, may_rejoin=may_rejoin)
    except ConfigError as error:
        log.print_error(str(error))
        return 2
    except KeyboardInterrupt:
        logger.info("stopped")
        return 0


if __name__ == "__main__":
    sys.exit(main())
