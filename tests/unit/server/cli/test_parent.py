"""The parent process: the API processes that it starts again, the effects of signals, and its exit codes."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire.engine.process import log, supervisor
from quire.engine.process.service_manager import ServiceManager
from quire.engine.process.supervisor import Supervisor
from quire.engine.protocol.supervision import (
    Drain,
    EngineFailed,
    EngineState,
    Failed,
    NamedAdapter,
    Ready,
    Reload,
    ReplicaLost,
    ReplicaUp,
    SetLogLevel,
    Shutdown,
    ToProcess,
)
from quire.server.cli import parent
from quire.server.cli.adapters import AdapterDirectory
from quire.server.cli.takeover import Predecessor
from quire.server.client.dp_coordinator import DPCoordinator
from quire.server.client.metrics import Metrics
from quire.server.config.server_options import ServerOptions
from quire.server.media.types import MediaSettings
from tests.fakes.configs import engine_config
from tests.fakes.supervised import FakeProcess

DRAIN_SECONDS = 30.0
"""Default after SIGTERM."""
UP = ReplicaUp(0, incarnation=1)


class Clock:
    """Replaces the monotonic clock; waiting for messages takes no time."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        self.now += 0.01
        return self.now


class Engine:
    """Replaces the engine manager: an engine that is up, and has no processes."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.supervisor = Supervisor(watchdog_seconds=1e9)
        self.run = self.supervisor.run
        self.states: dict[int, ReplicaUp | ReplicaLost] = {0: UP}
        self.metrics = Metrics("demo", count=2)
        self.levels: list[str] = []
        self.reloads: list[Reload] = []
        self.failure: EngineFailed | None = None
        self.is_started = False
        self.is_settled, self.is_user_error = True, False
        self.on_change: Callable[[EngineState], None] = lambda state: None
        self.closed_with: list[str] = []
        self.draining = [3]
        self.drained_by: list[tuple[int, int]] = []

    def process_info(self, index: int) -> int:
        return index

    def drained(self, client: int, replica: int) -> None:
        self.drained_by.append((client, replica))

    def set_log_level(self, level: str) -> None:
        self.levels.append(level)

    def reload(self, message: Reload) -> None:
        self.reloads.append(message)

    def close(self, reason: str) -> None:
        self.closed_with.append(reason)

    def lose(self, replica: int, reason: str) -> None:
        self.states[replica] = ReplicaLost(replica, reason, returns=True)
        self.on_change(self.states[replica])

    def fail(self) -> None:
        self.failure = EngineFailed("rank 1 was killed by SIGKILL")
        self.on_change(self.failure)


class ApiProcess(FakeProcess):
    """An API process that serves at once and obeys, unless the test says otherwise."""

    def __init__(self, args: parent.ApiProcessArgs, started_at: float) -> None:
        super().__init__()
        self.index: Any = args.process_info
        self.states, self.started_at, self.options = args.states, started_at, args.options
        self.messages: list[ToProcess] = []
        self.is_ready = False
        self.on_poll = self.serve

    def serve(self) -> None:
        self.get_ready()
        self.messages += self.heard()
        if any(isinstance(message, Drain | Shutdown) for message in self.messages):
            self.exit(0)

    def get_ready(self) -> None:
        if not self.is_ready:
            self.is_ready = True
            self.say(Ready({}))

    def fail(self, *, user_error: bool = False) -> None:
        self.say(Failed("the tokenizer cannot be read", user_error))
        self.exit(1)


class Play:
    """A server with API processes that the test plays."""

    def __init__(self, listener: socket.socket, clock: Clock) -> None:
        self.started: list[ApiProcess] = []
        self.on_start: Callable[[ApiProcess], None] = lambda process: None
        """Called with every started API process."""
        self._listener, self._clock = listener, clock

    def start_process(self, module: str, args: parent.ApiProcessArgs, *, pass_fds: Sequence[int]) -> ApiProcess:
        assert module == "quire.server.cli.api_process"
        assert pass_fds == (args.listener,)
        self.started.append(process := ApiProcess(args, self._clock.now))
        self.on_start(process)
        return process

    def server(self, predecessor: Any = None, media: MediaSettings | None = None, **options: Any) -> parent.Server:
        config, settings = engine_config(), ServerOptions(**options)
        return parent.Server(config, settings, media, ("demo",), self._listener, {}, DPCoordinator(), predecessor)


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Iterator[Play]:
    clock = Clock()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        play = Play(listener, clock)
        monkeypatch.setattr(parent, "EngineManager", Engine)
        monkeypatch.setattr(parent, "start_process", play.start_process)
        monkeypatch.setattr(parent, "time", clock)
        monkeypatch.setattr(supervisor, "time", clock)
        monkeypatch.setattr(supervisor, "_TICK_SECONDS", 0.0)
        yield play
    for number, handler in handlers.items():
        signal.signal(number, handler)


def engine_of(server: parent.Server) -> Engine:
    engine: Any = server.manager
    assert isinstance(engine, Engine)
    return engine


def after(looks: int, then: Callable[[], object], process: ApiProcess) -> Callable[[], None]:
    """The behaviour of a process that serves, and calls `then` after so many checks by the parent."""
    left = itertools.count(looks, -1)

    def behave() -> None:
        process.serve()
        if process.code is None and next(left) == 0:
            then()

    return behave


@pytest.mark.parametrize(
    ("number", "given", "seconds"),
    [
        (signal.SIGTERM, None, DRAIN_SECONDS),
        (signal.SIGINT, None, 0.0),
        (signal.SIGINT, 7.0, 7.0),
        (signal.SIGTERM, 7.0, 7.0),
    ],
)
def test_a_signal_lets_requests_finish(play: Play, number: int, given: float | None, seconds: float) -> None:
    def on_start(process: ApiProcess) -> None:
        if process.index == 1:
            process.on_poll = after(5, lambda: signal.raise_signal(number), process)

    play.on_start = on_start
    server = play.server(api_server_count=2, shutdown_timeout=given)
    assert server.run() == 0
    assert [process.messages for process in play.started] == [[Drain(seconds)]] * 2
    assert engine_of(server).closed_with == [""]


def test_the_log_level_is_passed_on_to_every_process(play: Play) -> None:
    def on_start(process: ApiProcess) -> None:
        if process.index == 1:
            process.on_poll = after(5, lambda: process.say(SetLogLevel("debug")), process)
        elif len(play.started) == 1:
            process.on_poll = after(9, process.kill, process)
        else:
            process.on_poll = after(5, lambda: signal.raise_signal(signal.SIGTERM), process)

    logger = logging.getLogger("quire")
    level, play.on_start = logger.level, on_start
    try:
        assert (server := play.server(api_server_count=2)).run() == 0
        assert logger.level == logging.DEBUG
    finally:
        logger.setLevel(level)
    first, second, successor = play.started
    assert SetLogLevel("debug") in first.messages
    assert SetLogLevel("debug") in second.messages
    assert [process.options.log_level for process in (first, successor)] == ["info", "debug"]
    assert engine_of(server).levels == ["debug"]


def test_sighup_lets_every_process_read_its_files_again(
    play: Play, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "logging.json"
    file.write_text("{")  # the configuration of the start stays
    monkeypatch.setenv(log.CONFIG, '{"version": 1}')
    monkeypatch.setattr(log, "setup", lambda level, name: None)

    def on_start(process: ApiProcess) -> None:
        if process.index == 0:
            process.on_poll = after(5, lambda: signal.raise_signal(signal.SIGHUP), process)
        else:
            process.on_poll = after(9, lambda: signal.raise_signal(signal.SIGTERM), process)

    play.on_start = on_start
    assert (server := play.server(api_server_count=2, log_config_file=str(file))).run() == 0
    reload = Reload('{"version": 1}', "info")
    assert [process.messages for process in play.started] == [[reload, Drain(DRAIN_SECONDS)]] * 2
    assert engine_of(server).reloads == [reload]
    (error,) = (record.getMessage() for record in caplog.records if record.levelname == "ERROR")
    assert error.startswith(f"--log-config-file {file}: cannot read the file")


def test_a_service_manager_hears_how_the_server_is(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    monkeypatch.setattr(ServiceManager, "notify", lambda service, *assignments: sent.extend(assignments))
    monkeypatch.setattr(ServiceManager, "beat", lambda service: sent.append("WATCHDOG=1"))

    def on_start(process: ApiProcess) -> None:
        polls = itertools.count()

        def behave() -> None:
            process.serve()
            match next(polls):
                case 5:
                    signal.raise_signal(signal.SIGHUP)
                case 10:
                    server.adapters = AdapterDirectory([pirate, NamedAdapter("sql", "/sql", 0)])
                    engine_of(server).lose(0, "rank 1 was killed by SIGKILL")
                case 15:
                    signal.raise_signal(signal.SIGTERM)

        process.on_poll = behave

    play.on_start = on_start
    server, pirate = play.server(), NamedAdapter("pirate", "/pirate", 0)
    server.adapters = AdapterDirectory([pirate])
    assert server.run() == 0
    url = f"http://127.0.0.1:{play._listener.getsockname()[1]}"
    started = ("READY=1", f"STATUS=serving demo and the adapter pirate on {url}")
    lost = f"STATUS=serving demo and 2 adapters on {url}; replica 0: rank 1 was killed by SIGKILL"
    again, stopping = ("RELOADING=1", "READY=1"), "EXTEND_TIMEOUT_USEC=60000000"
    told = [each for each in sent if each != "WATCHDOG=1" and not each.startswith("MONOTONIC_USEC=")]
    assert told[:-1] == [
        *("STATUS=loading demo", *started, *again, lost),
        *("STOPPING=1", stopping),
    ]
    assert told[-1].startswith("STATUS=shutting down")
    assert sent[-1] == "WATCHDOG=1", "while it drains, too"


def test_it_drains_for_a_successor(play: Play) -> None:
    def take_over() -> None:
        predecessor = Predecessor.find(play._listener.getsockname())
        assert predecessor is not None
        predecessor.end()
        predecessor.listener.close()

    play.on_start = lambda process: setattr(process, "on_poll", after(5, take_over, process))
    assert play.server().run() == 0
    (process,) = play.started
    assert process.messages == [Drain(DRAIN_SECONDS, has_successor=True)]


def test_a_second_signal_kills_what_does_not_end(play: Play) -> None:
    signals = iter([signal.SIGTERM, signal.SIGINT])

    def drain_for_ever(process: ApiProcess) -> None:
        process.get_ready()
        process.messages += process.heard()
        if (number := next(signals, None)) is not None:
            signal.raise_signal(number)

    play.on_start = lambda process: setattr(process, "on_poll", lambda: drain_for_ever(process))
    assert play.server().run() == 0
    (process,) = play.started
    assert process.messages == [Drain(DRAIN_SECONDS), Shutdown()]
    assert process.code == -signal.SIGKILL
    assert play._clock.now - process.started_at < DRAIN_SECONDS


def test_a_third_signal_ends_the_parent_itself(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    exits: list[int] = []
    monkeypatch.setattr(os, "_exit", exits.append)
    server = play.server()
    for _ in range(2):
        signal.raise_signal(signal.SIGTERM)
    assert not exits
    signal.raise_signal(signal.SIGTERM)
    assert exits == [130]
    assert server.run() == 0


def test_an_api_process_that_dies_is_replaced(play: Play, caplog: pytest.LogCaptureFixture) -> None:
    """With any number of failed starts, and any error, as long as another one serves."""

    def on_start(process: ApiProcess) -> None:
        if len(play.started) == 2:
            process.on_poll = after(5, process.kill, process)
        elif len(play.started) == 12:
            process.on_poll = after(5, lambda: signal.raise_signal(signal.SIGTERM), process)
        elif process.index == 1:
            process.fail(user_error=True)

    play.on_start = on_start
    with caplog.at_level("INFO", "quire"):
        server = play.server(api_server_count=2)
        for _ in range(2):  # requests of API process 1
            counts = engine_of(server).metrics._http[1]
            counts.begin(counts.row("POST /v1/completions"))
        assert server.run() == 0
    assert set(engine_of(server).drained_by) == {(1, 3)}, "its requests have ended with it"
    assert [process.index for process in play.started] == [0] + [1] * 11
    assert all(process.states == (UP,) for process in play.started)
    assert (
        "API process 1 was killed by SIGKILL; its connections are lost (requests cut: 2); restarting it" in caplog.text
    )
    assert "the tokenizer cannot be read; restarting it" in caplog.text
    assert "API process 1 is ready again" in caplog.text


@pytest.mark.parametrize(("user_error", "starts", "code"), [(True, 1, 2), (False, 6, 1)])
def test_a_server_whose_api_process_cannot_start_ends(
    play: Play, capsys: pytest.CaptureFixture[str], user_error: bool, starts: int, code: int
) -> None:
    play.on_start = lambda process: process.fail(user_error=user_error)
    server = play.server()
    assert server.run() == code
    assert capsys.readouterr().err == "quire: error: the tokenizer cannot be read\n"
    times = [process.started_at for process in play.started]
    delays = [late - early for early, late in itertools.pairwise(times)]
    assert [round(delay) for delay in delays] == [1, 3, 7, 10, 10][: starts - 1]
    assert engine_of(server).closed_with == ["the tokenizer cannot be read"]


def test_a_file_that_is_invalid_by_now_does_not_end_the_server(play: Play, caplog: pytest.LogCaptureFixture) -> None:
    """Such as a certificate: the API process that has served before is started until the file is mended."""

    def on_start(process: ApiProcess) -> None:
        if len(play.started) == 1:
            process.on_poll = after(5, process.kill, process)
        elif len(play.started) <= 10:
            process.fail(user_error=True)
        else:
            process.on_poll = after(5, lambda: signal.raise_signal(signal.SIGTERM), process)

    play.on_start = on_start
    with caplog.at_level("INFO", "quire"):
        assert play.server().run() == 0
    assert caplog.text.count("the tokenizer cannot be read; restarting it") == 9
    assert "is ready again" in caplog.text
    times = [process.started_at for process in play.started]
    assert [round(late - early) for early, late in itertools.pairwise(times)] == [0, 1, 3, 7, *[10] * 6]


def test_a_failed_engine_is_reported_for_a_while(play: Play, capsys: pytest.CaptureFixture[str]) -> None:
    def on_start(process: ApiProcess) -> None:
        process.on_poll = after(5, lambda: engine_of(server).fail(), process)

    play.on_start = on_start
    server = play.server()
    assert server.run() == 1
    (process,) = play.started
    assert process.messages == [EngineFailed("rank 1 was killed by SIGKILL"), Shutdown()]
    assert play._clock.now - process.started_at > parent._FAILURE_SECONDS
    assert capsys.readouterr().err == "quire: error: rank 1 was killed by SIGKILL\n"


@pytest.mark.parametrize("has_predecessor", [False, True])
def test_only_a_predecessor_waits_for_the_media_process(
    play: Play, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, has_predecessor: bool
) -> None:
    """Texts are answered without it; but the predecessor can do everything."""
    media = SimpleNamespace(path="/media", has_been_ready=False)
    monkeypatch.setattr(parent, "MediaService", lambda *given: media)
    begun: list[tuple[bool, bool]] = []

    def on_start(process: ApiProcess) -> None:
        polls = itertools.count()

        def behave() -> None:
            process.serve()
            match next(polls):
                case 5:
                    begun.append(("serving demo" in caplog.text, engine_of(server).is_started))
                    media.has_been_ready = True
                case 10:
                    begun.append(("serving demo" in caplog.text, engine_of(server).is_started))
                    signal.raise_signal(signal.SIGTERM)

        process.on_poll = behave

    play.on_start = on_start
    ended: list[bool] = []
    predecessor = SimpleNamespace(end=lambda: ended.append(media.has_been_ready)) if has_predecessor else None
    server = play.server(predecessor, MediaSettings(model="folder"))
    with caplog.at_level("INFO", "quire"):
        assert server.run() == 0
    assert begun == [(not has_predecessor,) * 2, (True, True)], "from then on, media may fail"
    assert ended == [True] * has_predecessor
