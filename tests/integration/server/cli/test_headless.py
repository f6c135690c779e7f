"""Replicas without an API on their host, with fake cores: kept alive, reported, and used by an API elsewhere."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest

from quire.engine.cluster.control_plane import LinkEnded
from quire.engine.config.engine_config import EngineConfig, ExpertParallelConfig
from quire.engine.config.options import EngineOptions
from quire.engine.core.launch import CoreArgs
from quire.engine.process import log
from quire.engine.protocol.errors import ConfigError
from quire.engine.protocol.sampling_params import SamplingParams
from quire.engine.protocol.supervision import Failed, LogLevel, Reload, ReplicaUp
from quire.server.cli import headless
from quire.server.cli.main import main
from quire.server.client import engine_manager
from quire.server.client.dp_coordinator import DPMember, ReplicaDied, connect_hosts
from quire.server.config.server_options import ServerOptions
from quire.server.serving.frontend import Frontend
from quire.server.text.inputs import GenerationInput
from tests.fakes import fake_core
from tests.fakes.waiting import until


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> SimpleQueue[tuple[int, int]]:
    """Replica and process of each core that is started; all are fakes."""
    started: SimpleQueue[tuple[int, int]] = SimpleQueue()

    def start(args: CoreArgs, folder: str) -> Any:
        core: Any = fake_core.start_process(args, folder, MODE[0])
        started.put((args.config.parallel.replica, core.pid))
        return core

    monkeypatch.setattr(engine_manager, "start_core", start)
    MODE[0] = ""
    return started


MODE = [""]


@dataclass
class Alone:
    """Replaces `DPMember`, with nobody at the other end."""

    folder: Path
    reported: SimpleQueue[ReplicaUp | tuple[int, str]] = field(default_factory=SimpleQueue)
    leader: str = "the host with the API"
    responses: tuple[str, ...] = ()
    init_method: str = "tcp://127.0.0.1:1"
    ended: LinkEnded | None = None
    has_run: bool = False
    drain_seconds: float | None = None
    restarts_group: bool = False
    masters: dict[int, tuple[str, int]] = field(default_factory=dict)
    kv_peer: str = ""
    kv_peers: tuple[str, ...] = ()

    @property
    def requests(self) -> dict[int, str]:
        return {replica: f"ipc://{self.folder}/requests-{replica}" for replica in range(2)}

    def report(self, replica: int, state: ReplicaUp | ReplicaDied) -> None:
        self.reported.put((replica, state.reason) if isinstance(state, ReplicaDied) else state)

    def watch(self, listener: object) -> None:
        pass

    def request_shutdown(self, seconds: float) -> None:
        self.drain_seconds = seconds

    @property
    def can_shut_down(self) -> bool:
        return self.drain_seconds is not None

    def may_answer(self, replica: int) -> bool:
        return True

    def close(self, reason: str = "", *, user_error: bool = False) -> None:
        pass


def spread(config: EngineConfig, start: int, local: int, *, is_coupled: bool = False) -> EngineConfig:
    parallel = replace(config.parallel, replicas=2, local_replicas=range(start, start + local))
    return replace(
        config, parallel=replace(parallel, experts=ExpertParallelConfig() if is_coupled else None, replica=start)
    )


@dataclass
class Running:
    """`run_replicas` in a thread."""

    stop: threading.Event
    result: Future[Failed | None]


@pytest.fixture
def run(cores: SimpleQueue[tuple[int, int]]) -> Iterator[Callable[[EngineConfig, Any], Running]]:
    with ExitStack() as stack, ThreadPoolExecutor(4) as pool:

        def begin(config: EngineConfig, membership: Any) -> Running:
            stop = threading.Event()
            stack.callback(stop.set)
            return Running(
                stop, pool.submit(headless.run_replicas, config, ServerOptions(), membership, stop, lambda: 7.0)
            )

        try:
            yield begin
        finally:
            stack.close()  # before the pool waits for them


def test_a_replica_that_dies_is_reported_and_restarted(
    config: EngineConfig,
    cores: SimpleQueue[tuple[int, int]],
    run: Callable[..., Running],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "quire")
    alone = Alone(tmp_path)
    running = run(spread(config, 0, 2), alone)
    first = dict(cores.get(timeout=20) for _ in range(2))
    up = [alone.reported.get(timeout=20) for _ in range(2)]
    os.kill(first[1], signal.SIGKILL)
    assert alone.reported.get(timeout=20) == (1, "the engine core was killed by SIGKILL")
    replica, process = cores.get(timeout=20)
    assert replica == 1
    assert process != first[1]
    again = alone.reported.get(timeout=20)
    assert all(isinstance(state, ReplicaUp) for state in (*up, again))
    running.stop.set()
    assert running.result.result(30) is None
    assert alone.drain_seconds == 7.0  # the API has let its requests end or move
    for each in (first[0], process):
        with pytest.raises(ProcessLookupError):
            os.kill(each, 0)


def test_a_dead_core_that_does_not_end_is_killed(
    config: EngineConfig,
    cores: SimpleQueue[tuple[int, int]],
    run: Callable[..., Running],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("quire.engine.process.supervisor._EXIT_SECONDS", 0.3)
    MODE[0] = "lingering"
    alone = Alone(tmp_path)
    running = run(spread(config, 1, 1), alone)
    first = cores.get(timeout=20)
    assert isinstance(alone.reported.get(timeout=20), ReplicaUp)
    assert alone.reported.get(timeout=20) == (1, "rank 0 hangs")
    assert cores.get(timeout=20) != first
    running.stop.set()
    assert running.result.result(30) is None


def test_what_cannot_be_loaded_ends_the_host(
    config: EngineConfig, cores: SimpleQueue[tuple[int, int]], run: Callable[..., Running], tmp_path: Path
) -> None:
    MODE[0] = "dead"
    alone = Alone(tmp_path)
    assert run(spread(config, 1, 1), alone).result.result(30) == Failed("replica 1: the weights do not fit")


def test_coupled_replicas_end_together(
    config: EngineConfig,
    cores: SimpleQueue[tuple[int, int]],
    run: Callable[..., Running],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "quire")
    running = run(spread(config, 0, 2, is_coupled=True), Alone(tmp_path))
    first = dict(cores.get(timeout=20) for _ in range(2))
    until(lambda: "replica 0 is ready" in caplog.text, seen=lambda: caplog.text)
    os.kill(first[0], signal.SIGKILL)
    reason = "replica 0: the engine core was killed by SIGKILL"
    assert running.result.result(30) == Failed(reason)


@pytest.mark.parametrize("reason", ["", "the engine is gone"])
def test_the_end_of_the_api_ends_them(
    config: EngineConfig,
    cores: SimpleQueue[tuple[int, int]],
    run: Callable[..., Running],
    tmp_path: Path,
    reason: str,
) -> None:
    alone = Alone(tmp_path)
    running = run(spread(config, 0, 1), alone)
    cores.get(timeout=20)
    alone.ended = LinkEnded(reason)
    assert running.result.result(30) == (Failed(reason) if reason else None)


async def test_an_api_serves_replicas_of_other_hosts(
    config: EngineConfig, cores: SimpleQueue[tuple[int, int]], run: Callable[..., Running], free_port: int
) -> None:
    config = replace(config, parallel=replace(config.parallel, coordinator=("127.0.0.1", free_port), timeout=20.0))

    def host(replica: int) -> Running:
        return run(spread(config, replica, 1), DPMember(spread(config, replica, 1), is_headless=True))

    hosts = [asyncio.create_task(asyncio.to_thread(host, replica)) for replica in range(2)]
    here = spread(config, 0, 0)
    frontend = Frontend.start(here, name="x", hosts=await asyncio.to_thread(connect_hosts, here))
    try:
        await asyncio.wait_for(frontend.ready(), 30)
        with frontend.generate(
            "r", GenerationInput(prompts=[[70, 71, 72]] * 8, params=SamplingParams(max_tokens=20))
        ) as generation:
            deltas = [delta async for each in generation for delta in each]
        assert sorted(delta.index for delta in deltas if delta.finish_reason) == list(range(8))
        await frontend.probe()
    finally:
        await frontend.close()
    for each in hosts:
        assert await asyncio.to_thread((await each).result.result, 30) is None


def test_a_headless_host_must_say_which_it_is(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(model_folder), "--headless"]) == 2
    assert "--headless: say which replicas this host has (--data-parallel-start-rank" in capsys.readouterr().err
    with pytest.raises(ConfigError):
        headless.serve_replicas(EngineOptions(), cast(Any, None))


def test_a_signal_while_the_replicas_of_a_lost_leader_end_is_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is joined after it, which could be waited for without end."""
    joined: list[Alone] = []

    def join(config: EngineConfig, *, is_headless: bool) -> Alone:
        assert not joined
        joined.append(Alone(Path()))
        joined[0].ended = LinkEnded("the host with the API was lost")
        return joined[0]

    def run(*arguments: object) -> Failed:
        os.kill(os.getpid(), signal.SIGTERM)
        return Failed("the host with the API was lost")

    monkeypatch.setattr(headless, "DPMember", join)
    monkeypatch.setattr(headless, "run_replicas", run)
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    try:
        options = EngineOptions(data_parallel_size=2, data_parallel_start_rank=1)
        assert headless.serve_replicas(options, ServerOptions()) == 0
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGINT, before[1])
    assert len(joined) == 1


def test_sighup_keeps_a_level_that_was_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Manager:
        changed_log_level: LogLevel | None = None
        supervisor = SimpleNamespace(call=lambda function: function())
        reloads: ClassVar[list[Reload]] = []
        reload = reloads.append

    def run(*arguments: Any) -> None:
        arguments[-1](Manager)
        signal.raise_signal(signal.SIGHUP)
        Manager.changed_log_level = "error"
        signal.raise_signal(signal.SIGHUP)

    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    monkeypatch.setattr(headless, "DPMember", lambda config, *, is_headless: Alone(Path()))
    monkeypatch.setattr(headless, "run_replicas", run)
    monkeypatch.setattr(log, "read_again", lambda path, level: f"{path} at {level}")
    try:
        options = EngineOptions(data_parallel_size=2, data_parallel_start_rank=1)
        server = ServerOptions(log_config_file="logging.json", log_level="warning")
        assert headless.serve_replicas(options, server) == 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert Manager.reloads == [
        Reload("logging.json at warning", "warning"),
        Reload("logging.json at error", "error"),
    ]


@pytest.mark.parametrize(("is_user_error", "code"), [(True, 2), (False, 1)])
def test_a_host_that_cannot_serve_exits_with_the_kind_of_the_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_user_error: bool, code: int
) -> None:
    monkeypatch.setattr(headless, "DPMember", lambda config, *, is_headless: Alone(Path()))
    monkeypatch.setattr(headless, "run_replicas", lambda *_: Failed("replica 1: no such dtype", is_user_error))
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    try:
        options = EngineOptions(data_parallel_size=2, data_parallel_start_rank=1)
        assert headless.serve_replicas(options, ServerOptions()) == code
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGINT, before[1])
    assert capsys.readouterr().err.endswith("quire: error: replica 1: no such dtype\n")
