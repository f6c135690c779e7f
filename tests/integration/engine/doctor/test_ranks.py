"""The processes that check devices, and the reports on failed ones."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec
import pytest

from quire.engine.doctor import ranks
from quire.engine.doctor.ranks import RankTask


def task(folder: Path, size: int = 2, seconds: float = 0.5) -> RankTask:
    url = (folder / "rendezvous").as_uri()
    return RankTask(0, size, "cpu", 0, 1, url, seconds=seconds, checks_kernels=False)


class Clock:
    """Time passes only in a sleep during which a file exists."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._now = 0.0

    def monotonic(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        time.sleep(0.01)
        if self._file.exists():
            self._now = 1e6


def test_a_rank_that_waits_for_nothing_names_itself(tmp_path: Path) -> None:
    (found,) = ranks.run([task(tmp_path)], "127.0.0.1")
    assert (found.name, found.status) == ("all-reduce", "fault")
    assert found.found.startswith("rank 0: ")


def test_a_rank_alone_has_no_all_reduce(tmp_path: Path) -> None:
    (found,) = ranks.run([task(tmp_path, size=1)], "127.0.0.1")
    assert (found.name, found.status) == ("all-reduce", "not applicable")


@pytest.mark.parametrize(
    ("script", "found", "remedy"),
    [
        ("kill -SEGV $$", "its process was killed by SIGSEGV, without a message", "run dmesg"),
        ("echo no module >&2; exit 3", "its process failed (exit code 3): no module", "correct what its message names"),
        ("touch over; exec sleep 60", "its process hangs, without a message", "QUIRE_CPU_ISA"),
    ],
)
def test_a_process_that_does_not_end_well(
    script: str, found: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text(f"""#!/bin/sh
echo '{{"name": "memory", "status": "ok", "found": "before"}}'
{script}
""")
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(ranks, "time", Clock(tmp_path / "over"))
    first, last = ranks.run([task(tmp_path, seconds=0.0)], "127.0.0.1")
    assert first.found == "before"
    assert (last.name, last.status, last.found) == ("rank 0 on the CPU", "fault", found)
    assert remedy in last.remedy


def test_a_rank_does_not_wait_for_one_that_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does the test, which would take longer than it may."""
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nread task\ncase $task in *'\"rank\":1'*) exit 5;; esac\nexec sleep 1000\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(ranks, "_CAUSE_SECONDS", 0.2)
    both = [task(tmp_path, seconds=200.0), msgspec.structs.replace(task(tmp_path, seconds=200.0), rank=1, index=1)]
    (found,) = ranks.run(both, "127.0.0.1")
    assert (found.name, found.found) == ("rank 1 on the CPU", "its process failed (exit code 5), without a message")
