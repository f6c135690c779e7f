"""Questions that are answered in a process of their own, and questions without an answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from quire.engine.process import log
from quire.server.text import sandbox
from quire.server.text.sandbox import Sandbox, SandboxFailed, SandboxStopped
from tests.fakes.waiting import until, until_async

Make = Callable[..., Sandbox[str]]
FOR_EVER = "any(iter(int, 1))"


def _parents(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.parents()
    except psutil.NoSuchProcess:
        return []


@pytest.fixture
def answering() -> Iterator[Make]:
    """Makes one that answers with an expression of `q`, the question."""
    made: list[Sandbox[str]] = []
    others = {*psutil.Process().children(recursive=True)}

    def make(expression: str, seconds: float = 0.2) -> Sandbox[str]:
        # Processor time limits answers, however busy the machine is.
        made.append(Sandbox(eval, f"lambda q: {expression}", seconds, wall_clock_factor=1000.0))
        return made[-1]

    yield make
    # Helpers of earlier tests' servers may fork meanwhile.
    children = {
        child for child in psutil.Process().children(recursive=True) if others.isdisjoint([child, *_parents(child)])
    }
    for one in made:
        one.close()
    alive = [child for child in psutil.wait_procs(children, timeout=10)[1] if child.status() != psutil.STATUS_ZOMBIE]
    assert not alive, "forks whose helper has ended"


def test_questions_are_answered(answering: Make) -> None:
    echo = answering("q + b'!'")
    large = os.urandom(300_000)
    for question in (b"", b".", b"a", large):
        assert echo.ask(question) == question + b"!"
    with ThreadPoolExecutor(32) as pool:
        questions = [str(number).encode() for number in range(200)]
        assert list(pool.map(echo.ask, questions)) == [question + b"!" for question in questions]


@pytest.mark.parametrize("failure", [FOR_EVER, "bytes(2**31)", "__import__('os').abort()"])
def test_what_takes_too_much_is_stopped_alone(answering: Make, failure: str) -> None:
    picky = answering(f"q if q else {failure}")
    with ThreadPoolExecutor(4) as pool:
        stopped = [pool.submit(picky.ask, b"") for _ in range(3)]
        assert picky.ask(b"fine") == b"fine"
        for one in stopped:
            with pytest.raises(SandboxStopped):
                one.result()
    assert picky.ask(b"fine") == b"fine"


async def test_a_mistake_in_the_function_is_not_the_questions(answering: Make) -> None:
    mistaken = answering("q if q else b'' + 1")
    for asked in (mistaken.ask_async(b""), mistaken.ask_kept(b"", 60.0), asyncio.to_thread(mistaken.ask, b"")):
        with pytest.raises(SandboxFailed, match=r"(?s)Traceback.*TypeError: can't concat int to bytes"):
            await asked
    assert await mistaken.ask_kept(b"fine", 60.0) == b"fine"
    mistaken.close()
    await asyncio.sleep(0)  # the connections are closed


async def test_questions_are_answered_on_the_event_loop(answering: Make) -> None:
    picky = answering(f"q + b'!' if q else {FOR_EVER}")
    large = os.urandom(3_000_000)
    assert await picky.ask_async(b"a", memoryview(large)[:2_000_000], b"b") == b"a" + large[:2_000_000] + b"b!"
    with pytest.raises(SandboxStopped):
        await picky.ask_async(b"")
    assert await asyncio.gather(*(picky.ask_async(b"%d" % at) for at in range(50))) == [b"%d!" % at for at in range(50)]


async def test_a_cancelled_question_kills_its_fork(answering: Make, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    busy = answering(f"open({str(begun)!r}, 'w').write(str(__import__('os').getpid())) and {FOR_EVER}", seconds=60)
    asked = asyncio.create_task(busy.ask_async(b""))
    await until_async(lambda: begun.exists() and begun.read_text())
    fork = psutil.Process(int(begun.read_text()))
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert not psutil.wait_procs([fork], 120)[1]


def test_native_code_does_not_write_to_the_log(answering: Make, capfd: pytest.CaptureFixture[str]) -> None:
    write = "__import__('os').write(2, b'a panic') and __import__('sys').stderr.write('a traceback\\n') and q"
    assert answering(write).ask(b"a") == b"a"
    assert capfd.readouterr().err == "a traceback\n"


def test_warnings_have_the_format_of_the_log(
    answering: Make, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(log.FORMAT, "json")
    assert answering("__import__('logging').getLogger('quire.x').warning('beware') or q").ask(b"a") == b"a"
    line = json.loads(capfd.readouterr().err)
    assert (line["level"], line["process"], line["message"]) == ("warning", "helper", "beware")


async def test_forks_for_short_questions_are_kept(answering: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = answering(f"b'%d' % __import__('os').getpid() if q else {FOR_EVER}", seconds=60)
    kept = await pid.ask_kept(b"a", 1.0)
    assert await pid.ask_kept(b"a" * 2**20, 1.0) == kept
    assert len({*await asyncio.gather(*(pid.ask_kept(b"a", 1.0) for _ in range(5)))}) == 5
    with pytest.raises(SandboxStopped):
        await pid.ask_kept(b"", 0.05)
    assert await pid.ask_async(b"a") != kept
    monkeypatch.setattr(sandbox, "_MAX_KEPT_QUESTIONS", 3)
    assert len({*[await pid.ask_kept(b"a", 60.0) for _ in range(12)]}) > 3
    pid.close()
    await asyncio.sleep(0)  # the connections are closed


def test_a_helper_may_give_way_to_others(answering: Make) -> None:
    with contextlib.closing(Sandbox(eval, "lambda q: b'%d' % __import__('os').nice(0)", 1.0, niceness=3)) as nice:
        assert int(nice.ask(b"")) == min(os.nice(0) + 3, 19)


def test_a_helper_that_died_is_replaced(answering: Make) -> None:
    pid = answering("b'%d' % __import__('os').getppid()")
    first = int(pid.ask(b""))
    os.kill(first, signal.SIGKILL)
    status = psutil.Process(first).status
    until(lambda: status() == psutil.STATUS_ZOMBIE, seen=status)  # until then its forks are still its children
    assert int(pid.ask(b"")) not in (first, os.getpid())
    pid.close()
    assert int(pid.ask(b"")) != os.getpid()


def test_close_releases_those_who_wait(answering: Make, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    busy = answering(f"open({str(begun)!r}, 'w').close() or {FOR_EVER}", seconds=60)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(busy.ask, b"")
        until(begun.exists)
        busy.close()
        with pytest.raises(SandboxStopped):
            waiting.result()


def test_where_there_is_no_helper_that_is_said() -> None:
    broken = Sandbox(eval, "1 /", 1.0)
    with pytest.raises(OSError, match="cannot answer"):
        broken.ask(b"")
    broken.close()


def test_nothing_is_left_behind_by_one_who_is_killed() -> None:
    code = """
import os, signal
from quire.server.text.sandbox import Sandbox
print(Sandbox(eval, "lambda q: b'%d' % __import__('os').getppid()", 1.0).ask(b"").decode(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    (helper,) = map(int, done.stdout.split())
    until(lambda: not psutil.pid_exists(helper))


def test_a_slow_answer_gives_way(answering: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    monkeypatch.setattr(os, "setpriority", lambda which, pid, niceness: given.append(niceness))
    monkeypatch.setattr(sandbox, "_NICE_AFTER_SECONDS", 0.05)
    slow = answering(FOR_EVER)
    with pytest.raises(SandboxStopped):
        slow.ask(b"")
    assert given == [sandbox._NICENESS]


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_helper_that_is_stopped_is_replaced(
    answering: Make, is_async: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    echo = answering("q + b'!'")

    async def ask() -> bytes:
        return await (echo.ask_async(b"a") if is_async else asyncio.to_thread(echo.ask, b"a"))

    before = {*psutil.Process().children()}
    assert await ask() == b"a!"
    (helper,) = {*psutil.Process().children()} - before
    replace, usual = Sandbox._replace, sandbox._SILENT_SECONDS

    def replaced(self: Sandbox[str], helper: Any) -> None:
        replace(self, helper)
        sandbox._SILENT_SECONDS = usual  # the next helper works, however busy the machine is

    monkeypatch.setattr(Sandbox, "_replace", replaced)
    monkeypatch.setattr(sandbox, "_SILENT_SECONDS", 0.2)
    monkeypatch.setattr(sandbox, "_GRACE_SECONDS", 0.1)
    os.killpg(helper.pid, signal.SIGSTOP)  # with the fork that waits for the next question
    assert await asyncio.gather(*(ask() for _ in range(5))) == [b"a!"] * 5
    assert caplog.text.count("did not respond for 0.2 s and was killed") == 1


async def test_a_fork_that_is_stopped_is_killed(answering: Make) -> None:
    stopping = answering("q or __import__('os').kill(__import__('os').getpid(), 19)")
    stopping._patience = 0.2 - stopping._seconds * stopping._wall_clock_factor  # 0.2 s in all
    with pytest.raises(SandboxStopped):
        await stopping.ask_async(b"")
    with pytest.raises(SandboxStopped):
        await asyncio.to_thread(stopping.ask, b"")
    stopping._patience = 60.0
    assert stopping.ask(b"fine") == b"fine"
