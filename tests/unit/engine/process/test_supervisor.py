"""The supervisor, with processes controlled by the test: its starts, kills, restarts and reports."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection, Pipe

import msgspec
import pytest
import uvloop

from quire.engine.process import supervisor as module
from quire.engine.process.supervisor import Process, SupervisedProcess, Supervisor
from quire.engine.protocol.supervision import (
    AdapterChanged,
    ChangeAdapter,
    Drain,
    Failed,
    FromProcess,
    Heartbeat,
    NamedAdapter,
    Ready,
    Shutdown,
    ToProcess,
)
from tests.fakes.supervised import FakeProcess


class Recorder(SupervisedProcess):
    def __init__(self, name: str = "the engine core", delay: float | None = 0.0) -> None:
        super().__init__(name)
        self.started: list[FakeProcess] = []
        self.ready: list[Ready] = []
        self.exits: list[Failed] = []
        self.delay = delay

    @property
    def current(self) -> FakeProcess:
        return self.started[-1]

    def start(self) -> Process:
        self.started.append(FakeProcess())
        return self.current

    def on_ready(self, ready: Ready) -> None:
        self.ready.append(ready)

    def on_exit(self, failure: Failed) -> float | None:
        self.exits.append(failure)
        return self.delay


class Clock:
    """Replaces the monotonic clock; waiting for messages takes no time."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(module, "time", found)
    monkeypatch.setattr(module, "_TICK_SECONDS", 0.0)
    return found


@pytest.fixture
def supervisor(clock: Clock) -> Supervisor:
    return Supervisor(watchdog_seconds=10.0)


def steps(supervisor: Supervisor, count: int = 3) -> None:
    """A few rounds: each reads at most one message of a process."""
    left = iter(range(count))
    supervisor.run(lambda: next(left, None) is None)


def pass_time(supervisor: Supervisor, clock: Clock, seconds: int, beating: Callable[[], object] = lambda: None) -> None:
    """The time passes second by second."""
    for _ in range(seconds):
        clock.now += 1.0
        beating()
        steps(supervisor)


def test_a_process_that_dies_is_reported_and_started_again(supervisor: Supervisor, clock: Clock) -> None:
    core = Recorder(delay=2.0)
    supervisor.add(core)
    core.current.say(Ready({"load": 1.0}))
    steps(supervisor)
    assert (core.is_ready, core.ready) == (True, [Ready({"load": 1.0})])
    core.current.exit(-signal.SIGKILL)
    steps(supervisor)
    assert core.exits == [Failed("the engine core was killed by SIGKILL")]
    assert core.current.is_session_killed
    pass_time(supervisor, clock, 1)
    assert len(core.started) == 1
    pass_time(supervisor, clock, 2)
    assert len(core.started) == 2
    assert not core.is_ready


@pytest.mark.parametrize("order", ["message first", "exit first"])
def test_the_last_message_of_a_process_is_the_reason_of_its_exit(supervisor: Supervisor, order: str) -> None:
    """Even if its exit is noticed first."""
    core = Recorder(delay=None)
    supervisor.add(core)
    core.current.say(Heartbeat())
    core.current.say(Failed("rank 1 was killed by SIGKILL", user_error=True))
    if order == "message first":
        steps(supervisor)
        assert not core.exits
    core.current.exit(1)
    steps(supervisor)
    assert core.exits == [Failed("rank 1 was killed by SIGKILL", user_error=True)]
    assert core.process is None
    assert len(core.started) == 1


def test_a_silent_process_is_killed(supervisor: Supervisor, clock: Clock) -> None:
    silent, beating = Recorder("API process 0"), Recorder("API process 1")
    for each in (silent, beating):
        supervisor.add(each)
        each.current.say(Ready({}))
    steps(supervisor)
    pass_time(supervisor, clock, 10, lambda: beating.current.say(Heartbeat()))
    assert not silent.exits
    pass_time(supervisor, clock, 1, lambda: beating.current.say(Heartbeat()))
    assert silent.exits == [Failed("API process 0 did not respond for 10 s and was killed (--watchdog-seconds)")]
    assert silent.started[0].code == -signal.SIGKILL
    assert len(silent.started) == 2
    assert (len(beating.started), beating.exits) == (1, [])


def test_a_process_that_starts_may_be_silent_for_longer(supervisor: Supervisor, clock: Clock) -> None:
    core = Recorder()
    supervisor.add(core)
    pass_time(supervisor, clock, 100)
    assert not core.exits
    pass_time(supervisor, clock, 30)
    assert len(core.exits) == 1


def test_nobody_is_killed_because_the_supervisor_itself_was_stopped(supervisor: Supervisor, clock: Clock) -> None:
    core = Recorder()
    supervisor.add(core)
    core.current.say(Ready({}))
    steps(supervisor)
    clock.now += 3600.0
    steps(supervisor)
    pass_time(supervisor, clock, 9)
    assert not core.exits


def test_a_process_that_has_failed_but_does_not_exit_is_killed(supervisor: Supervisor, clock: Clock) -> None:
    core = Recorder()
    supervisor.add(core)
    core.current.say(Failed("rank 0 hangs"))
    steps(supervisor)
    pass_time(supervisor, clock, 13)
    assert core.exits == [Failed("rank 0 hangs")]
    assert core.started[0].code == -signal.SIGKILL


def test_processes_are_stopped_while_the_others_are_watched(supervisor: Supervisor) -> None:
    leaving, staying = Recorder("API process 0"), Recorder("the engine core")
    for each in (leaving, staying):
        supervisor.add(each)
        each.current.say(Ready({}))
    steps(supervisor)
    died = staying.current

    def play() -> None:
        if leaving.current.heard() == [Drain(30.0)]:
            died.exit(1)  # a replica dies during the drain
        elif len(staying.started) == 2:
            leaving.current.exit(0)

    leaving.current.on_poll = play
    supervisor.stop([leaving], Drain(30.0), 40.0)
    assert (leaving.exits, leaving.process) == ([], None)
    assert (len(leaving.started), len(staying.started)) == (1, 2)


def test_a_process_that_does_not_stop_is_killed_in_time(supervisor: Supervisor, clock: Clock) -> None:
    stubborn = Recorder()
    supervisor.add(stubborn)
    stubborn.current.say(Ready({}))
    steps(supervisor)

    def wait() -> None:
        clock.now += 1.0
        stubborn.current.say(Heartbeat())

    stubborn.current.on_poll = wait
    supervisor.stop([stubborn], Shutdown(), 30.0)
    assert stubborn.current.code == -signal.SIGKILL
    assert 30.0 <= clock.now - 1000.0 <= 35.0
    assert not stubborn.exits


def test_a_process_that_is_ended_alone_is_forgotten(supervisor: Supervisor, clock: Clock) -> None:
    """It is not waited for, nor started again; the others run on."""
    one, other = Recorder(), Recorder()
    for each in (one, other):
        supervisor.add(each)
        each.current.say(Ready({}))
    steps(supervisor)
    supervisor.end(one, Shutdown(), 30.0)
    steps(supervisor)
    assert (one.current.heard(), one.process is not None) == ([Shutdown()], True)
    one.current.exit(0)
    pass_time(supervisor, clock, 3, lambda: other.current.say(Heartbeat()))
    assert (one.process, len(one.started), one.exits) == (None, 1, [])
    assert supervisor._all == [other]


def test_a_second_signal_shortens_the_wait(supervisor: Supervisor, clock: Clock) -> None:
    stubborn = Recorder()
    supervisor.add(stubborn)
    stubborn.current.say(Ready({}))
    steps(supervisor)

    def wait() -> None:
        clock.now += 1.0
        if clock.now == 1005.0:
            supervisor.call(lambda: supervisor.hurry(1.0))

    stubborn.current.on_poll = wait
    supervisor.stop([stubborn], Shutdown(), 600.0)
    assert clock.now < 1010.0


def test_a_process_that_cannot_be_started_is_tried_again(
    supervisor: Supervisor, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = Recorder(delay=5.0)
    start, full = core.start, True

    def fail() -> Process:
        if full:
            raise OSError(24, "Too many open files")
        return start()

    monkeypatch.setattr(core, "start", fail)
    supervisor.add(core)
    assert core.exits == [Failed("the engine core cannot start: [Errno 24] Too many open files")]
    full = False
    pass_time(supervisor, clock, 6)
    assert len(core.started) == 1


def test_a_call_wakes_the_supervisor_once(supervisor: Supervisor) -> None:
    """It sleeps again after that."""
    called = list[int]()
    for number in range(3):
        supervisor.call(partial(called.append, number))
    assert supervisor._selector.select(0)
    steps(supervisor, 1)
    assert called == [0, 1, 2]
    assert not supervisor._selector.select(0)


def test_messages_to_the_dead_are_dropped(supervisor: Supervisor) -> None:
    core = Recorder()
    core.send(Shutdown())
    supervisor.add(core)
    core.current.theirs.close()
    core.send(Shutdown())
    steps(supervisor)
    core.send(Shutdown())


class Echo(Recorder):
    """A process that sends back the adapters that it is told of, on an event loop."""

    def __init__(self, connection: module.SupervisorConnection, others: Connection[bytes, bytes]) -> None:
        super().__init__()
        self.back: list[ChangeAdapter] = []
        self._connection, self._others = connection, others

    def start(self) -> Process:
        process = FakeProcess()
        process.connection = self._others
        self.started.append(process)
        return process

    def on_message(self, message: object) -> None:
        assert isinstance(message, ChangeAdapter)
        self.back.append(message)

    async def run(self) -> None:
        ended = asyncio.Event()

        def receive(message: ToProcess) -> None:
            if isinstance(message, Shutdown):
                ended.set()
            elif isinstance(message, AdapterChanged):
                self._connection.send(ChangeAdapter(message.version, message.name, message.adapter, None))

        self._connection.listen(receive)
        await ended.wait()


def test_messages_of_any_size_go_both_ways_at_once(monkeypatch: pytest.MonkeyPatch, supervisor: Supervisor) -> None:
    """More than a socket holds. The supervisor waits for no process, even if that reads nothing."""
    mine, theirs = Pipe()
    monkeypatch.setattr("os.dup", lambda fd: theirs.fileno())
    monkeypatch.setattr("os.dup2", lambda *fds: None)
    monkeypatch.setattr(module, "Connection", lambda fd: theirs)
    echo = Echo(module.SupervisorConnection(), mine)
    supervisor.add(echo)
    adapters = [NamedAdapter(f"adapter {n}", "x" * 300_000 * (n % 3), 0) for n in range(12)]
    for number, adapter in enumerate(adapters):
        echo.send(AdapterChanged(number, adapter.name, adapter))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        process = threading.Thread(target=runner.run, args=(echo.run(),))
        process.start()
        until = time.monotonic() + 30
        supervisor.run(lambda: len(echo.back) == len(adapters) or time.monotonic() > until)
        echo.send(Shutdown())
        process.join()
    assert [each.old for each in echo.back] == adapters


def test_a_heartbeat_never_waits_for_the_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even if that is stopped, and the socket full."""
    mine, theirs = Pipe()
    monkeypatch.setattr("os.dup", lambda fd: theirs.fileno())
    monkeypatch.setattr("os.dup2", lambda *fds: None)
    monkeypatch.setattr(module, "Connection", lambda fd: theirs)
    connection = module.SupervisorConnection()
    for _ in range(10_000):
        connection.beat()
    count = 0
    while mine.poll(0):
        assert msgspec.msgpack.decode(mine.recv_bytes(), type=FromProcess) == Heartbeat()
        count += 1
    assert 10 < count < 10_000
    mine.close()
    connection.send(Ready({}))
    with pytest.raises(EOFError):
        connection.receive()
    assert isinstance(theirs, Connection)
