"""Every way to end a script with `LLM` is quiet, and leaves no process and no file."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

_SECONDS = 15.0
"""Time for the processes of a script that was killed to end."""
_SCRIPT = """
import asyncio, multiprocessing, os, signal, sys, threading, time
import psutil
from quire import LLM, AsyncLLM, SamplingParams

SIZE = int(sys.argv[1])

def answer():
    llm = LLM(tensor_parallel_size=SIZE)
    assert llm.generate("Hello", SamplingParams(max_tokens=2), use_tqdm=False)[0].outputs[0].token_ids
    return llm

async def answer_async():
    llm = AsyncLLM(tensor_parallel_size=SIZE)
    async for _ in llm.generate("Hello", SamplingParams(max_tokens=2)):
        pass
    return llm

async def run_cells(*cells):
    names = {"answer": answer}
    for cell in cells:
        exec(cell, names)

def interrupt_later(*delays):
    def work():
        for delay in delays:
            time.sleep(delay)
            os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=work, daemon=True).start()

if __name__ == "__main__":
"""
_INTERRUPTED = -signal.SIGINT


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder whose path is short enough for sockets."""
    path = Path(tempfile.mkdtemp(prefix="exits-", dir="/tmp"))
    yield path
    shutil.rmtree(path)


def _processes(mark: str) -> list[psutil.Process]:
    """The processes that have this in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if mark in process.environ().values() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def _unused_shared_memory() -> set[str]:
    """The files and folders of Quire and multiprocessing in shared memory that no process has open or mapped: other
    programs on this machine have some, too."""
    found = set()
    for prefix in ("psm_", "pym-", "quire"):
        for path in Path("/dev/shm").glob(f"{prefix}*"):
            with contextlib.suppress(FileNotFoundError):
                if path.lstat().st_uid == os.getuid():
                    found.add(path.name)
    for process in psutil.process_iter() if found else ():
        with contextlib.suppress(OSError):  # first what is open: it may be mapped and closed meanwhile
            used = [os.readlink(each) for each in Path(f"/proc/{process.pid}/fd").iterdir()]
            used += Path(f"/proc/{process.pid}/maps").read_text().splitlines()
            found -= {match[1] for each in used if (match := re.search(r"/dev/shm/([^/ ]+)", each))}
    return found & {*os.listdir("/dev/shm")}


def ended(temporary: Path, end: str, size: int) -> tuple[int, str]:
    """Run a script to its end; returns its exit code and its errors. Fails if it leaves anything behind."""
    script, folder, mark = temporary / "script.py", temporary / "tmp", str(uuid.uuid4())
    script.write_text(_SCRIPT + "".join(f"    {line}\n" for line in end.splitlines()))
    folder.mkdir()
    before = {*os.listdir("/dev/shm")}
    environment = {**os.environ, "TMPDIR": str(folder), "QUIRE_TEST_MARK": mark}
    command = [sys.executable, str(script), str(size)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    deadline = time.monotonic() + _SECONDS
    while (left := _processes(mark)) and time.monotonic() < deadline:
        psutil.wait_procs(left, timeout=0.1)
    assert not left, done.stderr
    assert not list(folder.iterdir()), done.stderr
    while (unused := _unused_shared_memory() - before) and time.monotonic() < deadline:
        time.sleep(0.1)  # others may be making or removing theirs
    assert not unused
    lines = re.split(r"[\r\n]+", done.stderr)  # some are progress bars
    return done.returncode, "\n".join(line for line in lines if line and not line.startswith("weights:"))


def test_end_of_file(temporary: Path) -> None:
    assert ended(temporary, "llm = answer()", 2) == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "code", "error", "size"),
    [
        ("llm = answer()\nsys.exit(3)", 3, "", 2),
        ("llm = answer()\nraise ValueError('mine')", 1, "ValueError: mine", 1),
        ("llm = answer()\nraise ValueError('mine')", 1, "ValueError: mine", 2),
        ("llm = answer()\nos._exit(4)", 4, "", 1),
        ("llm = answer()\nos._exit(4)", 4, "", 2),
        ("llm = answer()\nos.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(60)", -signal.SIGTERM, "", 2),
        ("llm = answer()\ninterrupt_later(0.1)\ntime.sleep(60)", _INTERRUPTED, "KeyboardInterrupt", 2),
        # while the engine ends
        ("llm = answer()\ninterrupt_later(0.1, 0.01)\ntime.sleep(60)", _INTERRUPTED, "KeyboardInterrupt", 2),
        # while it loads the model
        ("interrupt_later(1.5)\nLLM(tensor_parallel_size=2)", _INTERRUPTED, "KeyboardInterrupt", 2),
        ("asyncio.run(run_cells('llm = answer()', 'import os; os._exit(5)'))", 5, "", 2),
        ("asyncio.run(run_cells('llm = answer()', 'import sys; sys.exit(5)'))", 5, "", 2),
        ("llm = asyncio.run(answer_async())", 0, "", 2),
        # in a child of multiprocessing, which has no atexit
        (
            "child = multiprocessing.get_context('spawn').Process(target=answer)\nchild.start()\nchild.join()\n"
            "sys.exit(child.exitcode)",
            0,
            "",
            2,
        ),
        # a fork is not the owner of the engine
        (
            "llm = answer()\nif not os.fork():\n    sys.exit(0)\nos.wait()\n"
            "llm.generate('Hello', SamplingParams(max_tokens=2), use_tqdm=False)",
            0,
            "",
            1,
        ),
        (
            "llm = answer()\nfor each in psutil.Process().children(recursive=True):\n"
            "    if 'multiprocessing.forkserver' in ' '.join(each.cmdline()) and not each.name().startswith('quire'):\n"
            "        each.kill()",
            0,
            "",
            2,
        ),
    ],
)
def test_other_ends(temporary: Path, end: str, code: int, error: str, size: int) -> None:
    found, errors = ended(temporary, end, size)
    assert found == code, errors
    assert errors.count("Traceback") == (error != ""), errors
    assert errors.rpartition("\n")[2] == error, errors
