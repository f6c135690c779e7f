"""The core's loop with an executor and a wire that live in the test."""

from __future__ import annotations

import contextlib
import math
import resource
from collections import deque
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from quire.engine.config.engine_config import KVStoreConfig, LoraConfig
from quire.engine.core import engine_core, media_files
from quire.engine.core.engine_core import EngineCore, GrammarCompiled, Inbound, RankEnded
from quire.engine.core.media_files import keep_open
from quire.engine.executor.base import WorkerError
from quire.engine.process import log
from quire.engine.process.supervisor import HEARTBEAT_SECONDS
from quire.engine.protocol.adapters import AdapterPlan, AdapterPrepared, AdapterRef
from quire.engine.protocol.engine_core import (
    AbortRequests,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    Join,
    ListRequests,
    Phase,
    PinAdapters,
    PrefixCacheReset,
    PrepareAdapter,
    PreparedAdapter,
    Probe,
    ProbeReply,
    RequestInfo,
    RequestList,
    ResetPrefixCache,
    ToCore,
    ToServer,
)
from quire.engine.protocol.kv_store import ClearKV, KVCleared, KVCopied, KVStoreOpened, OfferKV, ToStore
from quire.engine.protocol.media import MediaData, MediaItem, MediaRun
from quire.engine.protocol.profile import ProfileOptions, StartProfile
from quire.engine.protocol.runner_output import ModelRunnerOutput
from quire.engine.protocol.sampling_params import SamplingParams, StructuredOutputs
from quire.engine.protocol.scheduler_output import MediaPlan, SchedulerOutput
from quire.engine.protocol.stats import ExpertLoad, LogRecord, RankStats
from quire.engine.protocol.supervision import LogLevel, Reload, SetLogLevel, Shutdown
from quire.engine.scheduler import adapters, kv_transfers
from quire.engine.scheduler.grammar import GrammarError
from quire.engine.scheduler.scheduler import Scheduler
from quire.engine.scheduler.step_time import StepTimeModel
from tests.fakes.configs import engine_config
from tests.fakes.kv_transfers import FakeStore, layout
from tests.fakes.model import FakeModel
from tests.fakes.outputs import each
from tests.unit.engine.scheduler.test_scheduler import continuation

Script = dict[int, list[Inbound]]
"""Messages to the core, by the number of the step that they arrive with."""


class Step:
    def __init__(self, step_result: ModelRunnerOutput | WorkerError) -> None:
        self.step_result = step_result

    def result(self) -> ModelRunnerOutput:
        if isinstance(self.step_result, WorkerError):
            raise self.step_result
        return self.step_result


class FakeExecutor:
    """Feeds a script of messages to the core as the steps go by; ends it after the last."""

    def __init__(self, core_wire: FakeWire, model: FakeModel, script: dict[int, list[Inbound]], dies_at: int = -1):
        self.seconds: dict[str, float] = {}
        self.levels: list[LogLevel] = []
        self.reloads: list[Reload] = []
        self.wire, self.model, self.script, self.dies_at = core_wire, model, script, dies_at
        self.failure: WorkerError | None = None
        """What `check` finds."""

    def submit(self, plan: SchedulerOutput, limit: float) -> Step:
        for message in self.script.get(plan.step, []):
            self.wire.inbox.put(message)
        if plan.step == self.dies_at:
            return Step(WorkerError("rank 1 was killed by SIGKILL"))
        return Step(self.model.execute(plan))

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def set_log_level(self, level: LogLevel) -> None:
        self.levels.append(level)

    def reload_logs(self, message: Reload) -> None:
        self.reloads.append(message)

    def rank_stats(self) -> list[RankStats]:
        return [RankStats(3, 0.5, 0.25), RankStats(3, 0.5, 0.0, is_straggler=True)]

    def close(self) -> None:
        pass


class FakeWire:
    def __init__(self) -> None:
        self.inbox: SimpleQueue[Inbound] = SimpleQueue()
        self.num_clients = 2
        self.sent: deque[tuple[int, ToServer]] = deque()

    def send(self, client: int, message: ToServer) -> None:
        self.sent.append((client, message))

    def outputs(self, client: int, request_id: str) -> list[EngineCoreOutput]:
        messages = [m for c, m in self.sent if c == client and isinstance(m, EngineCoreOutputs)]
        return [o for m in messages for o in each(m) if o.request_id == request_id]


def core_with(
    script: dict[int, list[Inbound]],
    first: list[ToCore],
    stages: int = 1,
    dies_at: int = -1,
    depth: int | None = None,
) -> EngineCore:
    config = engine_config(stages=stages, depth=depth)
    wire = FakeWire()
    for message in first:
        wire.inbox.put(message)
    cache, scheduler = config.cache, config.scheduler
    model = FakeModel(cache.block_size, cache.num_blocks, scheduler.max_num_batched_tokens, keeps=stages == 1)
    return EngineCore(config, FakeExecutor(wire, model, script, dies_at), wire)  # type: ignore[arg-type]


def wire_of(core: EngineCore) -> FakeWire:
    assert isinstance(core.io, FakeWire)
    return core.io


def submit(client: int, request_id: str, prompt: list[int], max_tokens: int = 4) -> EngineCoreRequest:
    return EngineCoreRequest(client, request_id, prompt, SamplingParams(max_tokens=max_tokens))


def with_adapter(request: EngineCoreRequest, adapter: AdapterRef) -> EngineCoreRequest:
    return msgspec.structs.replace(request, adapter=adapter)


@pytest.mark.parametrize(("stages", "depth"), [(1, 1), (1, 2), (2, 2), (3, 3)])
def test_each_api_process_gets_its_own_outputs_once_a_step(stages: int, depth: int) -> None:
    first: list[ToCore] = [submit(0, "a", [1]), submit(1, "b", [2]), submit(0, "c", [3])]
    core = core_with({20: [Shutdown()]}, [*first, submit(0, "long", [4], max_tokens=100)], stages, depth=depth)
    core.run()
    wire = wire_of(core)
    for client, request_id, prompt in ((0, "a", [1]), (1, "b", [2]), (0, "c", [3])):
        outputs = wire.outputs(client, request_id)
        assert [t for o in outputs for t in o.token_ids] == continuation(prompt, 4)
        assert [o.finish_reason for o in outputs] == [None, None, None, "length"]
        assert not wire.outputs(1 - client, request_id)
    core.close()
    assert wire.outputs(0, "long")[-1].finish_reason is None, "it may go on elsewhere"


def test_why_it_stops_is_kept_for_other_hosts() -> None:
    for reason in ("", "the host with the API was lost"):
        core = core_with({0: [Shutdown(reason)]}, [Probe(0, 7)])
        core.run()
        core.close()
        assert core.stop_reason == reason


@pytest.mark.parametrize(("stages", "depth"), [(1, 1), (1, 2), (2, 2)])
def test_nothing_is_kept_of_plans_whose_time_does_not_show(stages: int, depth: int) -> None:
    """One request alone never fills a pipeline."""
    core = core_with({40: [Shutdown()]}, [submit(0, "a", [1], 100)], stages, depth=depth)
    core.scheduler.token_budget.step_time = StepTimeModel()
    core.run()
    assert len(core.scheduler.token_budget._loads) <= depth


def test_an_abort_is_answered_and_frees_the_blocks() -> None:
    core = core_with(
        {3: [AbortRequests(["a", "unknown"])], 6: [Shutdown()]}, [submit(0, "a", [1], 50), submit(0, "b", [2], 50)]
    )
    core.run()
    assert [o.finish_reason for o in wire_of(core).outputs(0, "a")][-1] == "abort"
    assert len(core.scheduler.requests) == 1
    core.scheduler.check_integrity()


def test_nothing_runs_on_for_the_predecessor_of_an_api_process_that_joins() -> None:
    core = core_with(
        {3: [Join(1)], 6: [Shutdown()]},
        [submit(0, "a", [1], 50), submit(1, "b", [2], 50), submit(1, "c", [3], 50)],
    )
    core.run()
    assert list(core.scheduler.requests) == ["a"]
    core.scheduler.check_integrity()


def test_an_expected_request_is_silent_until_it_comes_or_is_aborted() -> None:
    core = core_with({}, [])

    def expect(client: int, request_id: str, prompt: list[int]) -> None:
        core.handle(msgspec.structs.replace(submit(client, request_id, prompt), is_expected=True))

    for request_id in ("comes", "aborted", "invalid"):
        expect(0, request_id, [] if request_id == "invalid" else [*range(9)])
    expect(1, "of an ended process", [1])
    core.handle(submit(0, "runs", [1]))
    expect(0, "runs", [1])
    assert core.schedule() is not None
    core.handle(ListRequests(0, 7, 9))
    listed = wire_of(core).sent.pop()[1]
    assert isinstance(listed, RequestList)
    assert [each.request_id for each in listed.requests] == ["runs"]
    core.handle(Join(1))
    assert {*core.scheduler.expected} == {"comes", "aborted", "invalid"}
    core.handle(AbortRequests(["aborted", "aborted"]))
    core.handle(submit(0, "invalid", []))
    core.handle(submit(0, "comes", [*range(9)]))
    ended = [(output.request_id, output.finish_reason) for output in core.outputs.pop(0).outputs]
    assert ended == [("aborted", "abort"), ("invalid", "error")]
    assert {*core.scheduler.requests} == {"runs", "comes"}
    assert not core.scheduler.expected
    core.scheduler.check_integrity()


def test_the_log_level_and_the_configuration_of_the_logs_reach_the_ranks() -> None:
    reload = Reload('{"version": 1}', "info")
    core = core_with({0: [SetLogLevel("error"), reload, Shutdown()]}, [Probe(0, 7)])
    core.run()
    assert isinstance(core.executor, FakeExecutor)
    assert (core.executor.levels, core.executor.reloads) == (["error"], [reload])


def test_an_idle_engine_proves_that_it_lives_by_a_step() -> None:
    core = core_with({0: [Shutdown()]}, [Probe(0, 7), Probe(1, 8)])
    core.run()
    assert [(client, m.call_id) for client, m in wire_of(core).sent if isinstance(m, ProbeReply)] == [
        (0, 7),
        (1, 8),
    ]
    assert core.scheduler.stats.steps == 1


def test_a_probe_wakes_an_idle_engine() -> None:
    core = core_with({}, [])
    assert core.schedule() is None
    wire_of(core).inbox.put(Probe(0, 7))
    core.receive()
    plan = core.schedule()
    assert plan is not None
    assert plan.num_rows == 0


@pytest.mark.parametrize("stages", [1, 2])
def test_a_busy_engine_answers_a_probe_after_its_next_step(stages: int) -> None:
    core = core_with({2: [Probe(0, 7)], 5: [Shutdown()]}, [submit(0, "a", [1], 50)], stages, depth=2)
    core.run()
    assert [m.call_id for _, m in wire_of(core).sent if isinstance(m, ProbeReply)] == [7]


def test_a_call_to_prepare_an_adapter_is_answered_when_all_ranks_have_answered() -> None:
    core = core_with({}, [])
    lora = LoraConfig(num_slots=2, device_bytes=2, host_bytes=9)
    parallel = replace(core.config.parallel, tensor_parallel_size=2)
    core.scheduler = Scheduler(replace(core.config, lora=lora, parallel=parallel))
    wire, one, other = wire_of(core), AdapterRef(b"1" * 32, ("a",)), AdapterRef(b"2" * 32, ("b",))
    large = AdapterRef(b"3" * 32, ("c",))

    def answers() -> list[tuple[int, int, str]]:
        sent = [(client, message) for client, message in wire.sent if isinstance(message, PreparedAdapter)]
        wire.sent.clear()
        return [(client, message.call_id, message.error) for client, message in sent]

    core.handle(with_adapter(submit(1, "aborted", [1]), one))
    for client, call_id, adapter in ((0, 7, one), (1, 8, one), (1, 9, other)):
        wire.inbox.put(PrepareAdapter(client, call_id, adapter))
    core.receive()
    plan = core.schedule()
    assert plan is not None
    assert (plan.num_rows, plan.adapters) == (0, AdapterPlan(prepared=[one, other]))
    assert not core.scheduler.has_work
    core.handle(AbortRequests(["aborted"]))
    core.handle(AdapterPrepared(one.digest, 0, 1, 1))
    core.handle(Join(1))  # its predecessor has asked
    assert answers() == []
    core.handle(AdapterPrepared(one.digest, 1, 1, 1))
    assert answers() == [(0, 7, "")]
    core.handle(PrepareAdapter(1, 10, one))
    assert answers() == [(1, 10, "")]
    core.handle(PrepareAdapter(0, 11, other))
    core.handle(with_adapter(submit(1, "a", [1]), other))
    core.handle(AdapterPrepared(other.digest, 1, error="NaN in q_proj"))
    assert answers() == [(0, 11, "NaN in q_proj")]
    (output,) = core.outputs[1].outputs
    assert (output.request_id, output.finish_reason, output.error) == ("a", "error", "NaN in q_proj")
    core.handle(PrepareAdapter(0, 12, AdapterRef(b"", ())))
    assert answers() == [(0, 12, "the adapter has no digest of 32 bytes, or no path")]
    core.handle(AdapterPrepared(other.digest, 0, error="no disk", is_invalid=False))
    core.handle(PrepareAdapter(0, 13, other))
    core.handle(AdapterPrepared(other.digest, 0, error="no disk", is_invalid=False))
    (answer,) = [message for _, message in wire.sent if isinstance(message, PreparedAdapter)]
    assert (answer.call_id, answer.error, answer.is_invalid) == (13, "no disk", False)
    core.handle(AdapterPrepared(other.digest, 1, 9, 1))
    wire.sent.clear()
    core.handle(PinAdapters(0, [one.digest]))
    core.handle(PrepareAdapter(0, 14, one, pins=True))
    assert answers() == [(0, 14, "")]
    core.handle(PinAdapters(1, [large.digest]))
    core.handle(PrepareAdapter(1, 15, large, pins=True))
    for rank in range(2):
        core.handle(AdapterPrepared(large.digest, rank, 9, 1))
    ((_, call_id, error),) = answers()
    assert (call_id, "of which 1 B are pinned" in error, "--lora-memory" in error) == (15, True, True)
    core.handle(PinAdapters(0, []))
    core.handle(Join(1))
    core.handle(PinAdapters(0, [large.digest]))
    core.handle(PrepareAdapter(0, 16, large, pins=True))
    for rank in range(2):
        core.handle(AdapterPrepared(large.digest, rank, 9, 1))
    assert answers() == [(0, 16, "")]


def test_a_call_to_clear_the_store_is_answered_when_it_has_been() -> None:
    core = core_with({}, [])
    wire, asked = wire_of(core), list[ToStore]()

    def answers() -> list[tuple[int, int, str]]:
        sent = [(client, message) for client, message in wire.sent if isinstance(message, PrefixCacheReset)]
        wire.sent.clear()
        return [(client, message.call_id, message.error) for client, message in sent if message.call_id >= 0]

    core.handle(ResetPrefixCache(0, 0))
    told = [(client, message.call_id) for client, message in wire.sent if isinstance(message, PrefixCacheReset)]
    assert told == [(1, -1), (0, 0)], "every router forgets the cache"
    wire.sent.clear()
    core.handle(ResetPrefixCache(0, 0, clears_store=True))
    assert answers() == [(0, 0, "")], "this host has none"
    core.config = replace(core.config, kv_store=KVStoreConfig(memory_bytes=1 << 20))
    core.scheduler = Scheduler(core.config)
    core.scheduler.kv_transfers.connect(asked.append, 0, 1)
    core.handle(ResetPrefixCache(0, 1))
    core.handle(ResetPrefixCache(0, 2, clears_store=True))
    assert answers() == [(0, 1, ""), (0, 2, "the KV store is not up")]
    for _ in range(2):
        core.handle(KVStoreOpened("/arena", 1 << 20))
    for client in (0, 1, 0):
        core.handle(ResetPrefixCache(client, 3, clears_store=True))
    first, second, third = (message.call_id for message in asked if isinstance(message, ClearKV))
    core.handle(Join(1))  # its predecessor has asked
    assert answers() == []
    core.handle(KVCleared(second, 0))
    core.handle(KVCleared(first, 9, "not all"))
    assert answers() == [(0, 3, "not all")]
    core.handle(KVStoreOpened("/arena", 1 << 20))  # it was silent for some time
    assert answers() == []
    core.handle(KVStoreOpened("/another", 1 << 20))
    core.handle(KVCleared(third, 0))
    assert answers() == [(0, 3, "the KV store was started again meanwhile")]


@pytest.mark.parametrize("answers", [True, False])
def test_a_stopping_core_stores_what_has_been_computed(monkeypatch: pytest.MonkeyPatch, answers: bool) -> None:
    """If the store answers in time."""
    monkeypatch.setattr(kv_transfers, "kv_layout", lambda config: layout(config.cache.groups))
    monkeypatch.setattr(engine_core, "_STORE_TIMEOUT", 60.0 if answers else 0.1)
    core = core_with({0: [Shutdown()]}, [])
    core.config = replace(core.config, kv_store=KVStoreConfig(memory_bytes=1 << 20, min_tokens=8))
    core.scheduler, store, inbox = Scheduler(core.config), FakeStore(1), wire_of(core).inbox
    submit_plan = core.executor.submit

    def send(message: ToStore) -> None:
        for reply in store.handle(message) if answers or not isinstance(message, OfferKV) else ():
            inbox.put(reply)

    def with_copies(plan: SchedulerOutput, limit: float) -> Any:
        for copy in () if plan.kv_copies is None else plan.kv_copies.stores:
            inbox.put(KVCopied(0, [copy.number]))
        return submit_plan(plan, limit)

    monkeypatch.setattr(core.executor, "submit", with_copies)
    core.scheduler.kv_transfers.connect(send, 0, 1)
    core.scheduler.kv_transfers.poll()
    while not core.scheduler.kv_transfers.is_open:
        core.handle(inbox.get_nowait())
    inbox.put(submit(0, "a", [*range(20)], 1))
    core.run()
    assert len(store.entries) == (5 if answers else 0)


def test_an_answer_about_an_adapter_wakes_an_idle_engine() -> None:
    core = core_with({}, [])
    core.scheduler = Scheduler(replace(core.config, lora=LoraConfig(num_slots=2, device_bytes=2, host_bytes=9)))
    adapter = AdapterRef(b"1" * 32, ("a",))
    core.handle(with_adapter(submit(0, "a", [1]), adapter))
    assert core.schedule() is not None
    assert core.schedule() is None
    core.handle(ListRequests(0, 7, 9))
    listed = wire_of(core).sent.pop()[1]
    assert isinstance(listed, RequestList)
    assert [(each.phase, each.adapter) for each in listed.requests] == [("waiting", adapter.digest)]
    wire_of(core).inbox.put(AdapterPrepared(adapter.digest, 0, 1, 1))
    core.receive()  # which waits for it
    plan = core.schedule()
    assert plan is not None
    assert plan.adapters == AdapterPlan(assigned=[(0, adapter.digest)])
    assert plan.new[0].adapter_slot == 0


def test_nobody_waits_forever_for_an_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk does not answer. Others are read, and this one can be used as soon as all ranks have read it."""
    core, now = core_with({}, []), 0.0
    core.scheduler = Scheduler(replace(core.config, lora=LoraConfig(num_slots=2, device_bytes=2, host_bytes=9)))
    monkeypatch.setattr(adapters, "time", SimpleNamespace(monotonic=lambda: now))
    known = [AdapterRef(bytes([name]) * 32, (f"/nfs/{name}",)) for name in range(4)]

    def asked() -> list[AdapterRef]:
        plan = core.schedule()
        return [] if plan is None or plan.adapters is None else plan.adapters.prepared

    for adapter in known:
        core.handle(with_adapter(submit(0, f"{adapter.digest[0]}", [1]), adapter))
    core.handle(PrepareAdapter(0, 7, known[0]))
    assert asked() == known[:2]
    now = 530.0
    core.handle(AdapterPrepared(known[1].digest, 0, 1, 1))
    core.receive()
    assert 0 not in core.outputs
    now = 541.0
    core.receive()  # which would wait for a message
    (output,) = core.outputs.pop(0).outputs
    assert (output.request_id, output.finish_reason, output.is_invalid) == ("0", "error", False)
    assert (output.error or "").startswith("/nfs/0 has not been read within 540 s")
    (answer,) = [message for _, message in wire_of(core).sent if isinstance(message, PreparedAdapter)]
    assert (answer.call_id, answer.error) == (7, output.error)
    assert asked() == known[2:]
    core.handle(with_adapter(submit(0, "early", [1]), known[0]))
    assert core.outputs.pop(0).outputs[0].error == output.error
    core.handle(AdapterPrepared(known[0].digest, 0, 1, 1))
    core.handle(with_adapter(submit(0, "again", [1]), known[0]))
    assert 0 not in core.outputs
    core.scheduler.check_integrity()


def test_a_refused_request_gets_its_terminal_message() -> None:
    core = core_with({0: [Shutdown()]}, [submit(0, "empty", []), Probe(0, 1)])
    core.run()
    (output,) = wire_of(core).outputs(0, "empty")
    assert (output.finish_reason, output.error) == ("error", "the prompt is empty")


def test_when_a_rank_dies_no_request_is_ended_as_all_go_on_elsewhere() -> None:
    core = core_with({}, [submit(0, "a", [1], 50), submit(1, "b", [2], 50)], dies_at=3)
    with pytest.raises(WorkerError, match="rank 1 was killed"):
        core.run()
    core.close()
    for client, request_id in ((0, "a"), (1, "b")):
        assert not [o for o in wire_of(core).outputs(client, request_id) if o.finish_reason]


def test_a_rank_that_stops_copying_kv_ends_the_core_while_steps_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    core = core_with({}, [submit(0, "a", [1], 50)])
    limits: list[float] = []

    def hung_ranks(seconds: float) -> list[int]:
        limits.append(seconds)
        return [1] * (len(limits) > 5)

    monkeypatch.setattr(core.scheduler.kv_transfers, "hung_ranks", hung_ranks)
    with pytest.raises(WorkerError, match="rank 1 did not copy KV for 10 s"):
        core.run()
    assert limits == [core.config.parallel.watchdog_seconds] * 6


def test_a_rank_that_dies_while_nothing_runs_is_noticed() -> None:
    core = core_with({}, [])
    core.executor.failure = WorkerError("rank 1 was killed by SIGKILL")  # type: ignore[attr-defined]
    with pytest.raises(WorkerError, match="rank 1 was killed"):
        core.handle(RankEnded())


def test_a_rank_that_hangs_while_nothing_runs_is_noticed_beside_messages() -> None:
    """The KV store tells its state every second, so that waiting for a message may never time out."""
    core = core_with({}, [])
    messages = iter([AbortRequests([])] * 3 + [Shutdown()])

    class Inbox(SimpleQueue[Inbound]):
        def get(self, block: bool = True, timeout: float | None = None) -> Inbound:
            if not block:
                raise Empty
            core.executor.failure = WorkerError("rank 1 did not respond for 10 s")  # type: ignore[attr-defined]
            return next(messages)

    wire_of(core).inbox = Inbox()
    with pytest.raises(WorkerError, match="rank 1 did not respond"):
        core.run()


def test_a_frame_that_cannot_be_read_ends_the_core_instead_of_leaving_somebody_waiting() -> None:
    core = core_with({}, [submit(0, "a", [1], 50)])
    wire_of(core).inbox.put(msgspec.DecodeError("garbage"))
    with pytest.raises(msgspec.DecodeError, match="garbage"):
        core.run()


def test_stats_travel_without_outputs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine.core.engine_core._STATS_SECONDS", 0.0)
    core = core_with({3: [Shutdown()]}, [submit(0, "a", [1], 50)])
    core.run()
    last = [m for c, m in wire_of(core).sent if c == 1 and isinstance(m, EngineCoreOutputs)][-1]
    assert last.stats is not None
    assert last.stats.running == 1
    assert last.rank_stats == core.executor.rank_stats()


def test_warnings_travel_with_the_stats_once_to_every_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine.core.engine_core._STATS_SECONDS", 0.0)
    record = LogRecord(1.0, "warning", "rank 1 is slow", "core")
    monkeypatch.setattr(log, "RECENT", recent := log.RecentWarnings())
    recent.keep(record)
    core = core_with({3: [Shutdown()]}, [submit(0, "a", [1], 50)])
    core.run()
    for client in range(2):
        sent = [m.warnings for c, m in wire_of(core).sent if c == client and isinstance(m, EngineCoreOutputs)]
        assert [each for each in sent if each] == [[record]]


def test_stats_travel_while_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the ranks' usage is known then, too."""
    monkeypatch.setattr("quire.engine.core.engine_core.HEARTBEAT_SECONDS", 0.001)
    monkeypatch.setattr("quire.engine.core.engine_core._STATS_SECONDS", 0.0)
    core = core_with({}, [])
    wire = wire_of(core)
    num_checks = 0

    def check() -> None:
        nonlocal num_checks
        num_checks += 1
        if num_checks == 3:
            wire.inbox.put(Shutdown())

    monkeypatch.setattr(core.executor, "check", check)
    core.run()
    sent = [message for client, message in wire.sent if client == 1]
    assert len(sent) >= 3
    assert all(isinstance(each, EngineCoreOutputs) and each.rank_stats and each.stats for each in sent[:3])


def test_the_newest_expert_load_travels_with_the_stats_once(monkeypatch: pytest.MonkeyPatch) -> None:
    core = core_with({8: [Shutdown()]}, [submit(0, "a", [1], 50)])
    monkeypatch.setattr("quire.engine.core.engine_core._STATS_SECONDS", 1e9)
    execute = core.executor.model.execute  # type: ignore[attr-defined]

    def with_load(plan: SchedulerOutput) -> ModelRunnerOutput:
        result: ModelRunnerOutput = execute(plan)
        if plan.step in (1, 3):
            result.expert_load = ExpertLoad({0: 1}, bytes(8), float(plan.step), 0)
        if plan.step == 5:
            monkeypatch.setattr("quire.engine.core.engine_core._STATS_SECONDS", 0.0)
        return result

    monkeypatch.setattr(core.executor.model, "execute", with_load)  # type: ignore[attr-defined]
    core.run()
    for client in (0, 1):
        reported = [m.expert_load for c, m in wire_of(core).sent if c == client and isinstance(m, EngineCoreOutputs)]
        assert [load.imbalance for load in reported if load is not None] == [3.0]


def structured(request_id: str) -> EngineCoreRequest:
    params = SamplingParams(max_tokens=4, structured_outputs=StructuredOutputs(regex="a"))
    return EngineCoreRequest(0, request_id, [1], params)


def test_a_grammar_that_does_not_compile_ends_its_request_alone() -> None:
    core = core_with({}, [])
    core.handle(submit(0, "good", [2]))
    core.handle(structured("bad"))
    core.handle(core.io.inbox.get(timeout=30))
    core.send()
    (output,) = wire_of(core).outputs(0, "bad")
    assert output.finish_reason == "error"
    assert "needs a tokenizer.json" in (output.error or "")
    assert core.scheduler.requests.keys() == {"good"}


def is_open(file: Path) -> bool:
    """Whether this process has a file open, which may have been deleted."""
    opened = list[str]()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            opened.append(str(descriptor.readlink()))
    return any(each.removesuffix(" (deleted)") == str(file) for each in opened)


def test_a_request_whose_images_cannot_be_opened_may_come_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose images have been deleted may come from a replica that has died of it."""
    core, file = core_with({}, []), tmp_path / "item"
    item = MediaItem(bytes(16), "image", 0, 1, (MediaRun(0, 1),), data=MediaData((), 0, path=str(file)))
    request = EngineCoreRequest(0, "a", [1], SamplingParams(), media=[item])

    def answer() -> tuple[str | None, bool]:
        core.handle(request)
        core.send()
        output = wire_of(core).outputs(0, "a")[-1]
        return output.error, output.is_unavailable

    assert answer() == (engine_core._LOST_MEDIA, True)
    file.touch()
    with monkeypatch.context() as patch:
        patch.setattr(media_files, "_RESERVE", resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        assert answer() == (f"{engine_core._UNREADABLE}: Too many open files", True)
    assert not is_open(file)
    error, is_unavailable = answer()
    assert "the model takes no images" in str(error)
    assert not is_unavailable


def test_files_of_images_stay_until_the_last_step_that_reads_them(tmp_path: Path) -> None:
    """They may be deleted as soon as a request is aborted; its step may be in flight."""
    file = tmp_path / "item"
    file.write_bytes(b"pixels")
    asked = MediaItem(bytes(16), "image", 0, 1, (MediaRun(0, 1),), data=MediaData((), 6, path=str(file)))
    plan = SchedulerOutput(0, [], [], [], media=MediaPlan([keep_open(asked)]))
    file.unlink()
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=SchedulerOutput).media  # a rank's
    assert received is not None
    (item,) = received.encoded
    assert item.data is not None
    assert Path(item.data.path).read_bytes() == b"pixels"
    assert is_open(file)
    del plan
    assert not is_open(file)
    with pytest.raises(FileNotFoundError):
        keep_open(asked)


@pytest.mark.parametrize("failure", [None, GrammarError("too large"), MemoryError("none left")])
def test_requests_that_are_compiling_can_be_aborted(monkeypatch: pytest.MonkeyPatch, failure: Exception | None) -> None:
    core, go_on = core_with({}, []), Event()

    def compile(outputs: StructuredOutputs) -> object:
        go_on.wait(30)
        if failure is not None:
            raise failure
        return object()

    monkeypatch.setattr(core.scheduler.grammars, "compile", compile)
    core.handle(structured("a"))
    core.handle(structured("a"))  # its id is in use
    core.handle(structured("b"))
    assert not core.scheduler.requests
    core.handle(AbortRequests(["a"]))
    core.handle(AbortRequests(["a"]))
    go_on.set()
    for _ in range(2):
        message = core.io.inbox.get(timeout=30)
        if failure is not None or message.request.request_id == "a":  # type: ignore[union-attr]
            core.handle(message)
    core.send()
    ends = [(o.finish_reason, o.error) for o in wire_of(core).outputs(0, "a")]
    assert ends == [("error", "request id 'a' is in use"), ("abort", None)]
    reported = [(o.finish_reason, str(failure) in str(o.error)) for o in wire_of(core).outputs(0, "b")]
    assert reported == ([] if failure is None else [("error", True)])


def test_unfinished_requests_are_listed_the_oldest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    core, go_on = core_with({}, []), Event()
    monkeypatch.setattr(core.scheduler.grammars, "compile", lambda outputs: go_on.wait(30))

    def listed(limit: int = 9, part: str = "", label: str | None = None) -> tuple[int, list[tuple[str, Phase]]]:
        core.handle(ListRequests(1, 7, limit, part, label))
        client, answer = wire_of(core).sent.pop()
        assert isinstance(answer, RequestList)
        assert (client, answer.call_id, answer.incarnation) == (1, 7, core.incarnation)
        return answer.total, [(each.request_id, each.phase) for each in answer.requests]

    def add(request: EngineCoreRequest, arrived: float) -> None:
        request.arrived, request.label = arrived, f"key of {request.request_id}"
        core.handle(request)

    def step() -> None:
        plan = core.schedule()
        assert plan is not None
        core.in_flight.append((plan, core.executor.submit(plan, 1.0), 0.0, 1.0))
        core.process_result()

    assert listed() == (0, [])
    add(submit(0, "a", [1, 2], max_tokens=100), arrived=2.0)
    assert listed() == (1, [("a", "waiting")])
    step()
    step()
    add(submit(1, "ab", list(range(1, 100))), arrived=1.0)
    step()
    add(structured("c"), arrived=3.0)
    assert listed() == (3, [("ab", "prefill"), ("a", "decode"), ("c", "waiting")])
    assert listed(limit=1) == (3, [("ab", "prefill")])
    assert listed(part="b") == (1, [("ab", "prefill")])
    assert listed(label="key of c") == (1, [("c", "waiting")])
    core.handle(ListRequests(0, 7, 9))
    answer = wire_of(core).sent.pop()[1]
    assert isinstance(answer, RequestList)
    assert answer.requests[1] == RequestInfo("a", "key of a", 2.0, "decode", 2, 0, 3, 100)
    assert core.scheduler._preempt([core.scheduler.requests["a"]])
    assert listed(part="a") == (2, [("ab", "prefill"), ("a", "preempted")])
    go_on.set()
    core.close()


def test_grammars_that_take_long_leave_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    core, go_on = core_with({}, []), Event()

    def compile(outputs: StructuredOutputs) -> object:
        assert outputs.regex == "quick" or go_on.wait(30)
        return object()

    monkeypatch.setattr(core.scheduler.grammars, "compile", compile)
    for request_id in "abcd":
        core.handle(structured(request_id))
    quick = structured("quick")
    quick.params.structured_outputs = StructuredOutputs(regex="quick")
    core.handle(quick)
    message = core.io.inbox.get(timeout=30)
    go_on.set()
    assert isinstance(message, GrammarCompiled)
    assert message.request is quick


@pytest.mark.parametrize(
    ("error", "text", "is_invalid"),
    [
        (GrammarError("it allows no first token"), "structured output: it allows no first token", True),
        (OSError("no file"), "structured output: OSError: no file", False),
    ],
)
def test_a_grammar_that_cannot_be_compiled_ends_its_request(
    monkeypatch: pytest.MonkeyPatch, error: Exception, text: str, is_invalid: bool
) -> None:
    core = core_with({}, [])

    def compile(outputs: StructuredOutputs) -> object:
        raise error

    monkeypatch.setattr(core.scheduler.grammars, "compile", compile)
    monkeypatch.setattr(core._compile_pool, "submit", lambda work: work())
    core.handle(structured("a"))
    core.handle(core.io.inbox.get(timeout=30))
    core.send()
    (output,) = wire_of(core).outputs(0, "a")
    assert (output.finish_reason, output.error, output.is_invalid) == ("error", text, is_invalid)


def test_a_client_that_joins_again_cancels_its_compilations(monkeypatch: pytest.MonkeyPatch) -> None:
    core = core_with({}, [])
    monkeypatch.setattr(core._compile_pool, "submit", lambda work: None)
    core.handle(structured("a"))
    core.handle(Join(0))
    core.send()
    assert not core.compiling
    assert not wire_of(core).outputs(0, "a"), "nobody is there to hear it"


def test_the_loop_promises_the_time_of_all_steps_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short step that is submitted behind a long one does not shorten the promise for both."""
    core = core_with({3: [Shutdown()]}, [submit(0, "a", [1], 100)], depth=2)
    predicted = {0: 10.0, 1: 0.25, 2: 0.5}
    monkeypatch.setattr(core.scheduler.token_budget, "predict", lambda plan: predicted.get(plan.step, 0.25))
    promises: list[float] = []

    def expect(seconds: float, usually: float) -> None:
        assert usually < seconds
        promises.append(usually)

    core.expect = expect
    core.run()
    idle = 2 * HEARTBEAT_SECONDS
    assert promises[:5] == [idle, 30.25, 31.0, 2.5, 2.5]


def test_a_step_that_captures_one_teaches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    core = core_with({4: [Shutdown()]}, [submit(0, "a", [1], 100)])
    learned, execute = dict[int, bool](), core.executor.model.execute  # type: ignore[attr-defined]

    def capture(plan: SchedulerOutput) -> ModelRunnerOutput:
        result: ModelRunnerOutput = execute(plan)
        result.has_captured = plan.step == 3
        return result

    def learn(plan: SchedulerOutput, seconds: float | None) -> None:
        learned[plan.step] = seconds is not None

    monkeypatch.setattr(core.executor.model, "execute", capture)  # type: ignore[attr-defined]
    monkeypatch.setattr(core.scheduler.token_budget, "learn", learn)
    core.run()
    assert [learned[step] for step in (2, 3, 4)] == [True, False, True]


def test_a_step_that_cannot_be_predicted_takes_as_long_as_recent_ones() -> None:
    core = core_with({}, [])
    plan = core.scheduler.heartbeat()
    assert core.usual_seconds(plan, None) == core.config.parallel.watchdog_seconds  # none has been measured
    core.longest_step = 0.01
    assert core.usual_seconds(plan, None) == 3.0
    core.longest_step = 5.0
    assert core.usual_seconds(plan, None) == 15.0
    item = MediaItem(bytes(16), "image", 0, 1, (MediaRun(0, 1),))
    images = SchedulerOutput(0, [], [], [], media=MediaPlan([item]))
    assert core.usual_seconds(images, None) == math.inf
    assert core.usual_seconds(images, 1.0) == 3.0
    assert core.usual_seconds(SchedulerOutput(0, [], [], [], adapters=AdapterPlan(freed=[0])), None) == 15.0
    copies = SchedulerOutput(0, [], [], [], adapters=AdapterPlan(assigned=[(0, bytes(32))]))
    assert core.usual_seconds(copies, None) == math.inf
    plan.profile = StartProfile(0, 1, ProfileOptions(1.0, 0))
    assert core.usual_seconds(plan, None) == math.inf
