"""A replica on several hosts: the agreement of its nodes, and the nodes that errors name. Ranks are fakes, connections
are real."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import msgspec
import pytest

from quire.engine.cluster import follower, network
from quire.engine.cluster.control_plane import LinkEnded, WeightDigests, compare_weights
from quire.engine.cluster.follower import Follower
from quire.engine.cluster.handshake import Hello
from quire.engine.cluster.leader import Leader
from quire.engine.config.engine_config import EngineConfig
from quire.engine.config.options import EngineOptions
from quire.engine.config.resolve import resolve
from quire.engine.executor import factory, nodes
from quire.engine.executor.base import WorkerError
from quire.engine.executor.local_ranks import RankFailed
from quire.engine.executor.nodes import FromNode, MultiNodeExecutor, Node, NodeProgress, NodeStart
from quire.engine.process import log
from quire.engine.protocol.adapters import AdapterPrepared
from quire.engine.protocol.errors import ConfigError
from quire.engine.protocol.rank_report import RankReport
from quire.engine.protocol.runner_output import ModelRunnerOutput, WorkerFailed, WorkerReady
from quire.engine.protocol.scheduler_output import SchedulerOutput
from quire.engine.protocol.stats import LogRecord, RankStats

encode = msgspec.msgpack.encode


class FakeRanks:
    """Ranks of a host, as `LocalRanks`, controlled by the test."""

    made: SimpleQueue[FakeRanks] = SimpleQueue()

    def __init__(
        self, config: EngineConfig, ranks: range, init_method: str, log_level: str, on_end: Callable[[], None]
    ) -> None:
        self.config, self.ranks, self.init_method, self.on_end = config, ranks, init_method, on_end
        self.is_ready, self.seconds, self.num_blocks = True, {"load weights": 1.0}, 0
        self.arrived: deque[ModelRunnerOutput] = deque()
        self.progress = [-1] * len(ranks)
        self.waiting: list[int] = []
        self.stats = [RankStats(1, 0.5, 0.25) for _ in ranks]
        self.plans: SimpleQueue[bytes] = SimpleQueue()
        self.levels: SimpleQueue[str] = SimpleQueue()
        self.problem: Exception | None = None
        self.was_killed: RankFailed | None = None
        self.selector = selectors.DefaultSelector()
        self.bell = os.eventfd(0, os.EFD_NONBLOCK)
        self.listen(self.bell, self._hear)
        self.end: SimpleQueue[str] = SimpleQueue()
        self.on_report: Callable[[RankReport], None] = lambda report: None
        FakeRanks.made.put(self)

    def _hear(self) -> None:
        os.eventfd_read(self.bell)

    def say(self, *, problem: Exception | None = None, result: ModelRunnerOutput | None = None) -> None:
        """In the middle of a wait, if there is one."""
        self.problem = problem
        if result is not None:
            self.arrived.append(result)
        os.eventfd_write(self.bell, 1)

    def listen(self, fd: int, callback: Callable[[], None]) -> None:
        self.selector.register(fd, selectors.EVENT_READ, callback)

    def write(self, plan: bytes, while_waiting: Callable[[], object]) -> None:
        while_waiting()
        self.plans.put(plan)

    def poll(self, timeout: float | None) -> bool:
        events = self.selector.select(timeout)
        for key, _ in events:
            key.data()
        if self.problem is not None:
            raise self.problem
        return bool(events)

    def set_log_level(self, level: str) -> None:
        self.levels.put(level)

    def killed(self, seconds: float) -> RankFailed | None:
        return self.was_killed

    def close(self) -> None:
        self.end.put("closed")
        self._release()

    def kill(self) -> None:
        self.end.put("killed")
        self._release()

    def _release(self) -> None:
        self.selector.close()
        os.close(self.bell)


class Hosts:
    """Node 0 with its executor, and node 1 as the test plays it."""

    def __init__(self, options: EngineOptions) -> None:
        self.options = options
        self.other = replace(options, node_rank=1)
        self.config = resolve(options)
        self.measured = 0
        """KV blocks of the ranks of node 1; 0: they measure nothing."""
        self.ends: SimpleQueue[None] = SimpleQueue()
        self.follower: Follower | None = None
        self.executor: MultiNodeExecutor | None = None
        self._error: Exception | None = None

    def start(self, weights: WeightDigests | None = None, **changes: Any) -> None:
        """Start both, with changes of the other's `Hello`, and other weights; raises node 0's errors."""
        hello = msgspec.structs.replace(nodes._describe_node(resolve(self.other)), **changes)

        def lead() -> None:
            try:
                self.executor = MultiNodeExecutor(self.config, "info", lambda: self.ends.put(None))
            except Exception as error:
                self._error = error

        leading = threading.Thread(target=lead)
        leading.start()
        try:
            self.follower = Follower("127.0.0.1", self.options.master_port, hello, seconds=60, leader="node 0")
            self.begin = msgspec.msgpack.decode(self.follower.receive(60), type=NodeStart)
            if weights is None:
                compare_weights(self.config, [self.follower])
            else:
                self.follower.set_digests(weights)
        except LinkEnded as ended:
            leading.join()
            if self._error is None or ended.reason != str(self._error):
                raise
            raise self._error from None
        self.say(WorkerReady({"load weights": 2.0}, self.measured))
        leading.join()
        if self._error is not None:
            raise self._error
        self.ranks = FakeRanks.made.get(timeout=30)

    def say(self, message: FromNode) -> None:
        """Send a message from node 1."""
        assert self.follower is not None
        self.follower.send(encode(message))

    def problem(self, limit: float = 60.0) -> str:
        """Node 0's error about a step that does not come back."""
        assert self.executor is not None
        with pytest.raises(WorkerError) as error:
            self.executor.submit(SchedulerOutput(1, [], [], []), limit).result()
        return str(error.value)

    def close(self) -> None:
        if self.executor is not None:
            self.executor.close()
        if self.follower is not None:
            self.follower.close()
        while not FakeRanks.made.empty():
            FakeRanks.made.get()


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch, free_port: int) -> Iterator[Hosts]:
    monkeypatch.setattr(nodes, "LocalRanks", FakeRanks)
    monkeypatch.setattr(follower, "_RECONNECT_MS", 5)  # node 1 is there before node 0 listens
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "chosen")
    monkeypatch.delenv("QUIRE_HOST_IP", raising=False)
    hosts = Hosts(
        EngineOptions(
            device="cpu",
            tensor_parallel_size=2,
            pipeline_parallel_size=2,
            nnodes=2,
            master_port=free_port,
            max_model_len=256,
            distributed_timeout_seconds=30.0,
        )
    )
    yield hosts
    hosts.close()


def test_plans_results_and_shutdown_reach_the_nodes(hosts: Hosts) -> None:
    hosts.start()
    executor, follower = hosts.executor, hosts.follower
    assert executor is not None
    assert follower is not None
    assert (hosts.ranks.ranks, hosts.ranks.init_method) == (range(2), hosts.begin.init_method)
    assert hosts.begin.init_method.startswith("tcp://127.0.0.1:")
    assert executor.seconds["load weights"] == 2.0
    pending = [executor.submit(SchedulerOutput(step, [], [], []), 60.0) for step in range(3)]
    for step in range(3):
        assert hosts.ranks.plans.get(timeout=30) == follower.receive(30) == encode(SchedulerOutput(step, [], [], []))
        hosts.say(ModelRunnerOutput(step, [step + 7]))
    assert [each.result().token_ids for each in pending] == [[7], [8], [9]]
    answers = SimpleQueue[RankReport]()
    executor.on_report = answers.put
    hosts.say(of_other := AdapterPrepared(b"an adapter", 3))
    assert answers.get(timeout=30) == of_other  # although nothing waits for a result
    hosts.ranks.on_report(of_own := AdapterPrepared(b"an adapter", 0))
    assert answers.get(timeout=30) == of_own
    executor.set_log_level("error")
    assert hosts.ranks.levels.get(timeout=30) == "error"
    executor.close()
    assert hosts.ranks.end.get(timeout=30) == "closed"
    hosts.executor = None
    with pytest.raises(LinkEnded) as ended:
        follower.receive(30)
    assert ended.value.reason == ""


def test_results_of_the_ranks_of_node_0_come_back_too(hosts: Hosts) -> None:
    hosts.start()
    assert hosts.executor is not None
    pending = hosts.executor.submit(SchedulerOutput(0, [], [], []), 60.0)
    hosts.ranks.say(result=ModelRunnerOutput(0, [5]))
    assert pending.result().token_ids == [5]


def test_the_kv_cache_is_that_of_the_smallest_node(hosts: Hosts) -> None:
    own = hosts.config.cache.num_blocks
    hosts.start(body=encode(own - 5))
    assert hosts.executor is not None
    assert hosts.executor.config.cache.num_blocks == hosts.ranks.config.cache.num_blocks == own - 5
    assert hosts.begin.num_blocks == own - 5


def test_the_kv_cache_is_as_large_as_ranks_have_measured(hosts: Hosts) -> None:
    hosts.measured = hosts.config.cache.num_blocks + 7
    hosts.start()
    assert hosts.executor is not None
    assert hosts.executor.config.cache.num_blocks == hosts.measured


def test_a_larger_node_changes_nothing(hosts: Hosts) -> None:
    own = hosts.config.cache.num_blocks
    hosts.start(body=encode(own + 5))
    assert hosts.executor is not None
    assert hosts.executor.config.cache.num_blocks == own


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_model_len": 128}, r"node 1 \(127.0.0.1\) has --max-model-len 128, and node 0 .* has 256;"),
        ({"dtype": "bfloat16"}, "has --dtype bfloat16, and node 0 .* has float32; start every host with the same"),
        ({"pipeline_layer_partition": "2,4"}, "has --pipeline-layer-partition 2,4, and .* has 3,3"),
        ({"enable_prefix_caching": False}, "has --enable-prefix-caching False, and .* has True"),
    ],
)
def test_options_that_differ_are_named(hosts: Hosts, changes: dict[str, Any], message: str) -> None:
    hosts.other = replace(hosts.other, **changes)
    with pytest.raises(ConfigError, match=message):
        hosts.start()


@pytest.mark.parametrize(
    "changes", [{"gpu_memory_utilization": 0.5}, {"master_addr": "localhost"}, {"distributed_timeout_seconds": 7.0}]
)
def test_what_is_a_nodes_own_may_differ(hosts: Hosts, changes: dict[str, Any]) -> None:
    hosts.other = replace(hosts.other, **changes)
    hosts.start()


def test_nodes_that_cannot_serve_are_named(hosts: Hosts) -> None:
    with pytest.raises(ConfigError, match=r"^node 1 \(127.0.0.1\): /m: no such model folder$"):
        hosts.start(error="/m: no such model folder")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"versions": {"torch": "1.0"}}, r"node 1 \(127.0.0.1\) has no python, and node 0"),
        ({"model": {}}, r"node 1 \(127.0.0.1\) has no chat_template.jinja, unlike node 0 \(127.0.0.1\)"),
        (
            {"name": "node 1 (10.1.1.1)", "address": "10.1.1.1"},
            r"--master-addr 127.0.0.1: node 1 \(10.1.1.1\) cannot reach that address",
        ),
    ],
)
def test_other_versions_files_and_addresses_are_named(hosts: Hosts, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        hosts.start(**changes)


def test_a_node_that_is_lost_while_all_is_idle_is_named(hosts: Hosts) -> None:
    hosts.start()
    assert hosts.executor is not None
    hosts.executor.check()
    assert hosts.follower is not None
    hosts.follower.close()
    hosts.ends.get(timeout=30)
    with pytest.raises(WorkerError, match=r"node 1 \(127.0.0.1\) has left"):
        hosts.executor.check()
    hosts.executor.close("node 1 has left")
    assert hosts.ranks.end.get(timeout=30) == "killed"
    hosts.executor = None


def test_a_rank_that_was_killed_elsewhere_is_named_with_its_node(hosts: Hosts) -> None:
    hosts.start()
    hosts.say(WorkerFailed("rank 3 was killed by SIGKILL", is_certain=True))
    assert hosts.problem() == "rank 3 was killed by SIGKILL on node 1 (127.0.0.1)"


def test_a_rank_that_was_killed_here_is_named_although_others_complain_first(hosts: Hosts) -> None:
    hosts.start()
    hosts.ranks.was_killed = RankFailed("rank 1 was killed by SIGKILL", is_certain=True)
    hosts.say(WorkerFailed("rank 3 failed: connection closed by peer", is_certain=False))
    assert hosts.problem() == "rank 1 was killed by SIGKILL on node 0 (127.0.0.1)"


def test_a_lost_node_is_named_although_ranks_complain_first(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts.start()
    hosts.ranks.say(problem=RankFailed("rank 0 failed: connection closed by peer", is_certain=False))
    assert hosts.follower is not None
    monkeypatch.setattr(nodes, "_CAUSE_TIMEOUT", 60.0)
    threading.Timer(0.3, hosts.follower.close).start()
    assert hosts.problem() == "node 1 (127.0.0.1) has left"


def test_a_rank_that_failed_by_itself_is_named_without_a_wait_once_all_complain(hosts: Hosts) -> None:
    hosts.start()
    hosts.ranks.say(problem=RankFailed("rank 0 failed: out of memory", is_certain=False))
    hosts.say(WorkerFailed("rank 3 failed: connection closed by peer", is_certain=False))
    assert hosts.problem() in (  # depending on which was heard first
        "rank 0 failed: out of memory on node 0 (127.0.0.1)",
        "rank 3 failed: connection closed by peer on node 1 (127.0.0.1)",
    )


def test_a_model_that_cannot_be_loaded_elsewhere_is_the_users_error(hosts: Hosts) -> None:
    hosts.start()
    assert hosts.executor is not None
    hosts.say(WorkerFailed("tensor a is missing", is_certain=True, user_error=True))
    with pytest.raises(ConfigError, match=r"^node 1 \(127.0.0.1\): tensor a is missing$"):
        hosts.executor.receive(0, 60.0)


def test_other_weights_are_the_users_error(hosts: Hosts) -> None:
    """Before the first answer; no node tries again."""
    with pytest.raises(ConfigError) as error:
        hosts.start(weights=WeightDigests({"model.safetensors": "another"}))
    what = "has other bytes in model.safetensors, unlike node 0 (127.0.0.1)"
    assert str(error.value) == f"node 1 (127.0.0.1) {what}; copy the same model files to every host"
    assert hosts.follower is not None
    with pytest.raises(LinkEnded) as ended:
        hosts.follower.receive(30)
    assert (ended.value.reason, ended.value.is_final) == (str(error.value), True)


def test_ranks_that_hang_are_named_with_their_nodes(hosts: Hosts) -> None:
    hosts.start()

    def heard(progress: NodeProgress) -> None:
        assert hosts.executor is not None
        hosts.say(progress)
        while not hosts.executor._poll(5.0):
            pass

    hosts.ranks.progress = [3, 3]
    heard(NodeProgress([3, 2]))
    assert hosts.problem(0.1) == "rank 3 on node 1 (127.0.0.1) did not answer within 0 s"
    hosts.ranks.progress, hosts.ranks.waiting = [2, 2], [0]
    heard(NodeProgress([2, 2], [3]))
    assert "rank 1 on node 0 (127.0.0.1) and rank 2 on node 1 (127.0.0.1) did not" in hosts.problem(0.1)
    hosts.ranks.progress, hosts.ranks.waiting = [-1, 3], []
    heard(NodeProgress([-1, -1]))
    assert "rank 0 on node 0 (127.0.0.1) and ranks 2, 3 on node 1 (127.0.0.1) did not" in hosts.problem(0.1)


def test_a_straggler_is_named_with_its_node(hosts: Hosts, caplog: pytest.LogCaptureFixture) -> None:
    hosts.start()
    executor = hosts.executor
    assert executor is not None
    for second in range(0, 60, 5):
        hosts.ranks.stats = [RankStats(second, second), RankStats(second, second)]
        hosts.say(NodeProgress([0, 0], [], [RankStats(second, second, second / 2), RankStats(second, second)]))
        while not executor._poll(5.0):
            pass
        times = executor.rank_stats()
    assert [each.is_straggler for each in times] == [False, False, False, True]
    assert [each.busy for each in times] == [55, 55, 27.5, 55]
    (record,) = caplog.records
    assert record.getMessage().startswith("rank 3 on node 1 (127.0.0.1) is slower than the other ranks of its stage")


def test_the_first_node_keeps_the_warnings_of_the_others(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "RECENT", recent := log.RecentWarnings())
    hosts.start()
    record = LogRecord(1.0, "warning", "slow", "rank 3")
    hosts.say(NodeProgress([0, 0], warnings=[record]))
    assert hosts.executor is not None
    while not hosts.executor._poll(5.0):
        pass
    assert recent.take() == [record]


class Follows:
    """Node 1 for real, but for its ranks; and node 0 as the test plays it."""

    def __init__(self, options: EngineOptions) -> None:
        self.messages: SimpleQueue[FromNode] = SimpleQueue()
        self.lost: SimpleQueue[str] = SimpleQueue()
        decode = msgspec.msgpack.Decoder[FromNode](FromNode).decode
        self.leader = Leader(
            nodes._describe_node(resolve(options)),
            "127.0.0.1",
            options.master_port,
            [1],
            on_lost=lambda number, end: self.lost.put(end.reason),
            on_message=lambda number, body: self.messages.put(decode(body)),
        )
        self.ended: LinkEnded | None = None
        self._thread = threading.Thread(target=self._serve, args=(resolve(replace(options, node_rank=1)),))
        self._thread.start()
        self.hello: Hello = self.leader.wait(60)[1]
        self.leader.start(encode(NodeStart(40, "tcp://127.0.0.1:1")))
        self.ranks = FakeRanks.made.get(timeout=60)
        self.ranks.say()

    def _serve(self, config: EngineConfig) -> None:
        with contextlib.closing(Node(config, "info")) as node:
            self.ended = node.run()

    def end(self) -> LinkEnded:
        self._thread.join(60)
        assert self.ended is not None
        assert self.ranks.end.get(timeout=30) == "killed"
        return self.ended

    def reason(self) -> str:
        return self.end().reason


@pytest.fixture
def follows(hosts: Hosts) -> Iterator[Follows]:
    log.RECENT.take()  # of other tests
    follows = Follows(hosts.options)
    yield follows
    follows.leader.close()
    follows._thread.join()


def test_a_node_sends_its_warnings(follows: Follows) -> None:
    assert isinstance(follows.messages.get(timeout=30), WorkerReady)
    log.RECENT.keep(record := LogRecord(1.0, "warning", "slow", "rank 3"))
    progress: list[NodeProgress] = []
    while not progress or not progress[-1].warnings:
        message = follows.messages.get(timeout=30)
        assert isinstance(message, NodeProgress)
        progress.append(message)
    assert progress[-1].warnings == [record]


def test_a_node_takes_over_the_log_level(follows: Follows) -> None:
    level = log._logger.level
    try:
        follows.leader.set_log_level("error")
        assert follows.ranks.levels.get(timeout=30) == "error"  # and none before, as --log-config-file may have one
        assert log._logger.level == logging.ERROR
    finally:
        log._logger.setLevel(level)


def test_a_node_runs_its_ranks_until_node_0_ends(follows: Follows) -> None:
    assert follows.hello.name == "node 1 (127.0.0.1)"
    assert follows.ranks.ranks == range(2, 4)
    assert (follows.ranks.config.cache.num_blocks, follows.ranks.init_method) == (40, "tcp://127.0.0.1:1")
    assert follows.messages.get(timeout=30) == WorkerReady({"load weights": 1.0})
    assert follows.messages.get(timeout=30) == NodeProgress([-1, -1], [], [RankStats(1, 0.5, 0.25)] * 2)
    follows.leader.send(1, b"a plan")
    assert follows.ranks.plans.get(timeout=30) == b"a plan"
    follows.ranks.say(result=ModelRunnerOutput(0, [4]))
    assert follows.messages.get(timeout=30) == ModelRunnerOutput(0, [4])
    follows.ranks.on_report(prepared := AdapterPrepared(b"an adapter", 2))
    assert follows.messages.get(timeout=30) == prepared
    follows.leader.close()
    assert follows.reason() == ""


@pytest.mark.parametrize(
    ("problem", "reported"),
    [
        (
            RankFailed("rank 3 failed: closed", is_certain=False),
            WorkerFailed("rank 3 failed: closed"),
        ),
        (
            RankFailed("rank 3 was killed by SIGKILL", is_certain=True),
            WorkerFailed("rank 3 was killed by SIGKILL", is_certain=True),
        ),
        (ConfigError("no tensor"), WorkerFailed("no tensor", is_certain=True, user_error=True)),
    ],
)
def test_a_node_reports_its_failure_and_gets_the_root_cause(
    follows: Follows, problem: Exception, reported: WorkerFailed
) -> None:
    for _ in range(2):
        follows.messages.get(timeout=30)  # ready, and its progress
    follows.ranks.say(problem=problem)
    assert follows.messages.get(timeout=30) == reported
    follows.leader.close("rank 0 was killed by SIGKILL on node 0")
    assert follows.reason() == "rank 0 was killed by SIGKILL on node 0"


def test_a_failure_that_cannot_heal_is_not_retried(follows: Follows) -> None:
    follows.leader.reject(1, "other weights")
    end = follows.end()
    assert (end.reason, end.is_final) == ("other weights", True)


def test_a_node_without_an_answer_ends_with_its_own_failure(follows: Follows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "_REASON_TIMEOUT", 0.2)
    follows.ranks.say(problem=RankFailed("rank 3 failed: closed", is_certain=False))
    assert follows.reason() == "rank 3 failed: closed"
    assert follows.lost.get(timeout=30) == "node 1 (127.0.0.1) has ended: rank 3 failed: closed"


def test_interfaces_follow_the_address_and_the_users_choice(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    network.set_interfaces("127.0.0.1")
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == ("lo", "chosen")
    monkeypatch.setenv("QUIRE_HOST_IP", "192.0.2.9")
    with pytest.raises(ConfigError, match=r"QUIRE_HOST_IP=192.0.2.9: no network interface of this host has that"):
        network.set_interfaces("127.0.0.1")


def test_node_0_reports_a_node_with_a_wrong_address(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_HOST_IP", "192.0.2.9")
    own = Hello(name="node 0 (127.0.0.1)", number=0)
    leader = Leader(own, "127.0.0.1", hosts.options.master_port, [1], on_lost=ignore, on_message=ignore)
    error: list[str] = []

    def follow() -> None:
        try:
            nodes.serve_node(hosts.other, "info")
        except ConfigError as refusal:
            error.append(str(refusal))

    following = threading.Thread(target=follow)
    following.start()
    with pytest.raises(ConfigError) as reported:
        leader.wait(60)
    leader.close()
    following.join(60)
    assert [f"node 1 (192.0.2.9): {each}" for each in error] == [str(reported.value)]
    assert error[0].startswith("QUIRE_HOST_IP=192.0.2.9: no network interface")


def ignore(*_: object) -> None:
    """A callback."""


def test_only_node_0_has_a_core(hosts: Hosts) -> None:
    config = replace(hosts.config, parallel=replace(hosts.config.parallel, node=1))
    with pytest.raises(ConfigError, match=r"--node-rank 1: node 0 has the API; .* with quire serve --headless"):
        factory.start(config, "info", lambda: None)


def test_devices_are_counted_on_each_host(hosts: Hosts) -> None:
    parallel = hosts.config.parallel
    for node in range(2):
        there = replace(parallel, node=node)
        assert [there.device_of(rank) for rank in there.ranks_of(node)] == [0, 1]
        assert [replace(there, devices=(5, 3)).device_of(rank) for rank in there.ranks_of(node)] == [5, 3]
    second = replace(parallel, nodes=1, replicas=2, replica=1, local_replicas=range(2))
    assert [second.device_of(rank) for rank in range(4)] == [4, 5, 6, 7]
    assert (parallel.num_local_ranks, second.num_local_ranks) == (2, 8)
