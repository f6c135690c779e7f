"""Cores of replicas that share experts: each in a thread, with workers that wait for one another at every step."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest

from quire.engine.config.engine_config import EngineConfig, ExpertParallelConfig, KVStoreConfig, LoraConfig
from quire.engine.core import engine_core as cores
from quire.engine.core.engine_core import EngineCore, root_cause
from quire.engine.executor.base import Executor, WorkerError
from quire.engine.protocol.adapters import AdapterPrepared, AdapterRef
from quire.engine.protocol.engine_core import ReplicaFailed, ResetPrefixCache
from quire.engine.protocol.kv_store import ToStore
from quire.engine.protocol.profile import TracePiece
from quire.engine.protocol.rank_report import RankReport
from quire.engine.protocol.runner_output import LOST_REPLICAS, ModelRunnerOutput
from quire.engine.protocol.scheduler_output import SchedulerOutput
from quire.engine.protocol.stats import RankStats
from quire.engine.protocol.supervision import LogLevel, Reload, Shutdown
from quire.engine.scheduler import kv_transfers
from tests.fakes.configs import engine_config
from tests.fakes.coupled import WAIT, LinkedWire, Replicas, serving
from tests.fakes.kv_transfers import FakeCopies, FakeStore, layout
from tests.fakes.model import FakeModel, with_adapter
from tests.unit.engine.scheduler.test_scheduler import continuation


class Meeting:
    """The agreement of the workers of all replicas on each step, once all have come to it."""

    def __init__(self, replicas: int) -> None:
        self._changed = threading.Condition()
        self.plans: list[list[SchedulerOutput]] = [[] for _ in range(replicas)]
        self.has_ended = False

    def join(self, replica: int, plan: SchedulerOutput) -> None:
        with self._changed:
            assert plan.step == len(self.plans[replica]), "a step was left out"
            self.plans[replica].append(plan)
            self._changed.notify_all()

    def agree(self, step: int) -> bool:
        with self._changed:
            everyone = self._changed.wait_for(
                lambda: self.has_ended or all(len(plans) > step for plans in self.plans), WAIT
            )
            if self.has_ended or not everyone:
                raise WorkerError(LOST_REPLICAS)
            return any(plans[step].has_work for plans in self.plans)

    def end(self) -> None:
        with self._changed:
            self.has_ended = True
            self._changed.notify_all()


@dataclass
class Step:
    meeting: Meeting
    step_result: ModelRunnerOutput

    def result(self) -> ModelRunnerOutput:
        self.step_result.is_wave_active = self.meeting.agree(self.step_result.step)
        return self.step_result


@dataclass
class MeetingExecutor:
    config: EngineConfig
    replica: int
    meeting: Meeting
    model: FakeModel
    copies: FakeCopies | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.on_trace: Callable[[TracePiece], None] = lambda piece: None
        self.on_report: Callable[[RankReport], None] = lambda report: None

    def submit(self, plan: SchedulerOutput, limit: float) -> Step:
        self.meeting.join(self.replica, plan)
        for adapter in () if plan.adapters is None else plan.adapters.prepared:
            for rank in range(self.config.parallel.world_size):
                self.on_report(AdapterPrepared(adapter.digest, rank, 1, 1))
        if plan.kv_copies is not None:
            assert self.copies is not None
            self.copies.begin(plan.kv_copies)
            while self.copies.pending:
                for answer in self.copies.end(0):
                    self.on_report(answer)
        return Step(self.meeting, self.model.execute(plan))

    def check(self) -> None:
        pass

    def set_log_level(self, level: LogLevel) -> None:
        pass

    def reload_logs(self, message: Reload) -> None:
        pass

    def rank_stats(self) -> list[RankStats]:
        return []

    def close(self, reason: str = "") -> None:
        pass


@dataclass
class Met(Replicas):
    meeting: Meeting

    def steps(self) -> list[int]:
        return [len(plans) for plans in self.meeting.plans]


@contextmanager
def running(replicas: int, stages: int, depth: int, stores: Sequence[FakeStore] = ()) -> Iterator[Met]:
    """The cores, each with a store, if there are some. They all end by themselves, with nothing under way, once they
    are to stop."""
    config = engine_config(stages=stages, depth=depth)
    config = replace(config, parallel=replace(config.parallel, replicas=replicas, experts=ExpertParallelConfig()))
    config = replace(config, lora=LoraConfig(num_slots=2, device_bytes=2, host_bytes=9))
    kinds = layout(config.cache.groups).kinds
    if stores:
        config = replace(config, kv_store=KVStoreConfig(memory_bytes=1 << 20, min_tokens=8))
    cache, scheduler, meeting = config.cache, config.scheduler, Meeting(replicas)
    models = [
        FakeModel(cache.block_size, cache.num_blocks, scheduler.max_num_batched_tokens, keeps=stages == 1)
        for _ in range(replicas)
    ]
    executors = list[Executor]()
    for replica, model in enumerate(models):
        copies = FakeCopies(model, stores[replica], kinds, config.parallel.world_size) if stores else None
        executors.append(MeetingExecutor(config, replica, meeting, model, copies))

    def connect(core: EngineCore) -> None:
        def send(message: ToStore) -> None:
            for answer in stores[core.replica].handle(message):
                core.io.inbox.put(answer)

        if stores:
            core.scheduler.kv_transfers.connect(send, core.replica, 1)

    with serving(config, executors, meeting.end, connect) as them:
        yield Met(them.wires, them.cores, meeting)
    assert len({len(plans) for plans in meeting.plans}) == 1


@pytest.mark.parametrize(("stages", "depth"), [(1, 1), (1, 2), (2, 2), (3, 3)])
@pytest.mark.parametrize("replicas", [2, 3])
def test_requests_at_any_replica_are_answered_and_then_all_sleep(replicas: int, stages: int, depth: int) -> None:
    rng = random.Random(replicas * 10 + depth)
    with running(replicas, stages, depth) as them:
        for burst in range(4):
            asked = [
                (rng.randrange(replicas), f"{burst}-{n}", rng.randrange(1, 30)) for n in range(rng.randrange(1, 7))
            ]
            for replica, request_id, length in asked:
                them.submit(replica, request_id, [1, 2, length], length)
            for replica in range(replicas):
                for _, request_id, length in (ask for ask in asked if ask[0] == replica):
                    assert them.wires[replica].answer(request_id) == continuation([1, 2, length], length)
        assert all(core.wave is not None and core.wave.number >= 1 for core in them.cores)
        waited = threading.Event()
        while not all(core.wave and core.wave.is_idle for core in them.cores):
            waited.wait(0.005)
        steps = them.steps()
        assert len(set(steps)) == 1
        waited.wait(0.05)
        assert them.steps() == steps, "somebody steps in its sleep"


@pytest.mark.parametrize(("stages", "depth"), [(1, 2), (2, 2)])
def test_each_replica_has_adapters_of_its_own(stages: int, depth: int) -> None:
    """The replica sleeps while its ranks read, and then wakes the others."""
    adapters = [AdapterRef(bytes([name]) * 32, ("a",)) for name in (1, 2)]
    with running(2, stages, depth) as them:
        for number, adapter in enumerate(adapters):
            them.submit(number, "a", [1, 2, 3], 5, adapter)
        for number, adapter in enumerate(adapters):
            assert them.wires[number].answer("a") == continuation(with_adapter([1, 2, 3], adapter.digest, 0), 5)


def test_each_replica_loads_and_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle replica wakes the others for its copies, and one that waits for a silent store does not wait for long
    while others have work."""
    monkeypatch.setattr(kv_transfers, "kv_layout", lambda config: layout(config.cache.groups))
    stores, prompt = [FakeStore(1), FakeStore(1)], [*range(40)]
    with running(2, 1, 2, stores) as them:
        kv_caches = [core.scheduler.kv for core in them.cores]
        waited = threading.Event()
        while not all(core.scheduler.kv_transfers.is_open for core in them.cores):
            waited.wait(0.01)
        for replica in range(2):
            them.submit(replica, "first", prompt, 5)
            assert them.wires[replica].answer("first") == continuation(prompt, 5)
        while not all(len(store.entries) == 11 for store in stores):
            waited.wait(0.01)
        for replica in range(2):
            them.wires[replica].inbox.put(ResetPrefixCache(0, replica))
            them.submit(replica, "loaded", prompt, 5)
            assert them.wires[replica].answer("loaded") == continuation(prompt, 5)
            assert them.cores[replica].scheduler.stats.kv_loaded_memory_tokens == 36
            them.wires[replica].inbox.put(ResetPrefixCache(0, replica))
        stores[1].handle = lambda message, core=0: []  # type: ignore[method-assign]
        them.submit(0, "long", [1, 2, 3], 120)
        them.submit(1, "late", prompt, 5)
        assert them.wires[1].answer("late") == continuation(prompt, 5)
        assert them.wires[0].answer("long") == continuation([1, 2, 3], 120)
    assert all(kv.num_free == kv.num_blocks for kv in kv_caches)


def test_a_probe_runs_a_step_on_all_replicas() -> None:
    with running(2, 1, 1) as them:
        them.probe(1)
        assert [plans[0].num_rows for plans in them.meeting.plans] == [0, 0]
        assert [wire.num_wakes for wire in them.wires] == [0, 1]


def test_an_idle_replica_takes_part_without_rows_and_nobody_is_woken_twice() -> None:
    with running(2, 1, 2) as them:
        them.submit(0, "a", [1], 40)
        assert them.wires[0].answer("a") == continuation([1], 40)
        assert sum(plan.num_rows for plan in them.meeting.plans[0]) >= 40
        assert not any(plan.num_rows for plan in them.meeting.plans[1])
        assert [wire.num_wakes for wire in them.wires] == [1, 0]


def test_a_stopping_replica_steps_until_the_others_are_idle() -> None:
    with running(2, 1, 1) as them:
        them.submit(0, "a", [1], 100)
        them.submit(1, "b", [2], 100)
        them.wires[1].sent.get(timeout=WAIT)  # it is in the wave
        them.wires[1].inbox.put(Shutdown())
        assert them.wires[0].answer("a") == continuation([1], 100)


def test_a_stopping_replica_leaves_after_its_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "_STOP_TIMEOUT", 0.0)
    wire = LinkedWire(0, 2)
    config = engine_config(depth=2)
    parallel = replace(config.parallel, replicas=2, experts=ExpertParallelConfig())
    core = EngineCore(replace(config, parallel=parallel), None, wire)  # type: ignore[arg-type]
    assert core.wave is not None
    core.wave.start(has_work=True)
    wire.inbox.put(Shutdown())
    core.receive()
    assert core.may_stop


# --- the cause of a death -------------------------------------------------------------------------------------


def reported(mine: str, *heard: ReplicaFailed | Shutdown, replicas: int = 3) -> str | None:
    wires = [LinkedWire(replica, replicas) for replica in range(replicas)]
    wires[0].wires = wires
    for message in heard:
        wires[0].inbox.put(message)
    reason = root_cause(mine, wires[0], 0)  # type: ignore[arg-type]
    reported = wires[1].inbox.get_nowait()
    assert isinstance(reported, ReplicaFailed)
    assert (reported.replica, reported.reason) == (0, mine)
    return reason


def test_the_replica_that_failed_first_names_the_root_cause() -> None:
    killed, lost = "rank 1 was killed by SIGKILL", f"rank 0 failed: {LOST_REPLICAS}: Connection closed"
    assert reported(killed) == f"replica 0: {killed}"
    assert reported(lost, ReplicaFailed(2, lost), ReplicaFailed(1, killed)) == f"replica 1: {killed}"


def test_a_silent_replica_is_the_root_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "_CAUSE_TIMEOUT", 0.05)
    lost = f"rank 0 failed: {LOST_REPLICAS}: Connection closed"
    assert reported(lost, ReplicaFailed(2, lost)) == f"replica 1 ended or hung: {lost}"
    assert reported(lost, ReplicaFailed(2, lost), ReplicaFailed(1, lost)) == f"replica 0: {lost}"


def test_a_shutdown_has_no_root_cause() -> None:
    assert reported(LOST_REPLICAS, Shutdown()) is None


def test_a_core_ends_when_another_says_that_it_does() -> None:
    wire = LinkedWire(0, 2)
    wire.wires = [wire, LinkedWire(1, 2)]
    config = engine_config()
    parallel = replace(config.parallel, replicas=2, experts=ExpertParallelConfig())
    ranks = SimpleNamespace(check=lambda: None)
    core = EngineCore(replace(config, parallel=parallel), ranks, wire)  # type: ignore[arg-type]
    wire.inbox.put(ReplicaFailed(1, "rank 0 was killed by SIGKILL"))
    with pytest.raises(WorkerError) as caught:
        core.run()
    assert root_cause(str(caught.value), wire, 0) == "replica 1: rank 0 was killed by SIGKILL"  # type: ignore[arg-type]
