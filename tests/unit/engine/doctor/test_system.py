"""The checks of a host against made-up /proc and /sys."""

from __future__ import annotations

import os
import resource
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire.engine.doctor import system
from quire.engine.doctor.check import Check, run
from quire.engine.process.runtime_folder import MAX_TMPDIR_BYTES

GIB = 1 << 30
UNLIMITED = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


class Root:
    """A folder with files of the kernel."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def put(self, **texts: str) -> Path:
        """Names are paths, with __ for a slash and _dot_ for a dot."""
        return self.files({name.replace("__", "/").replace("_dot_", "."): text for name, text in texts.items()})

    def files(self, texts: dict[str, str]) -> Path:
        for name, text in texts.items():
            path = self.path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")
        return self.path


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root(tmp_path)


def by_name(checks: Iterable[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def statuses(checks: Iterable[Check]) -> dict[str, str]:
    return {check.name: check.status for check in checks}


def disk(free: int, size: int = 64 * GIB) -> Callable[[Any], Any]:
    found = SimpleNamespace(f_blocks=size // 4096, f_bavail=free // 4096, f_frsize=4096, f_favail=1000)
    return lambda path: found


def meminfo(total: int, free: int) -> str:
    return f"MemTotal: {total // 1024} kB\nMemAvailable: {free // 1024} kB"


@pytest.mark.parametrize(
    ("total", "free", "status"), [(64, 32, "ok"), (64, 4, "warning"), (64, 0.5, "fault"), (1.5, 0.9, "fault")]
)
def test_memory(root: Root, total: float, free: float, status: str) -> None:
    path = root.put(proc__meminfo=meminfo(int(total * GIB), int(free * GIB)), proc__sys__vm__overcommit_memory="0")
    assert statuses(system.memory(path)) == {"memory": status, "memory overcommit": "ok"}


def test_memory_of_a_container_with_a_limit(root: Root) -> None:
    path = root.files(
        {
            "proc/meminfo": meminfo(64 * GIB, 60 * GIB),
            "proc/sys/vm/overcommit_memory": "2",
            "sys/fs/cgroup/memory.max": str(16 * GIB),
            "sys/fs/cgroup/memory.current": str(15 * GIB),
            "sys/fs/cgroup/memory.stat": f"inactive_file {GIB // 4}",
        }
    )
    found = by_name(system.memory(path))
    assert found["memory"].status == "warning"
    assert found["memory"].found == "1.2 GiB of 64.0 GiB free (limit of the container: 16.0 GiB)"
    assert found["memory overcommit"].status == "warning"
    assert "vm.overcommit_memory to 0" in found["memory overcommit"].remedy


def limits(**given: int) -> Callable[[int], tuple[int, int]]:
    by_number = {getattr(resource, f"RLIMIT_{name}"): (value, value) for name, value in given.items()}
    return lambda number: by_number.get(number, UNLIMITED)


def test_limits(root: Root) -> None:
    path = root.put(sys__fs__cgroup__pids_dot_max="max")
    assert set(statuses(system.limits(True, limits(), path)).values()) == {"ok"}
    low = limits(NOFILE=1024, MEMLOCK=8 << 20, NPROC=500)
    assert set(statuses(system.limits(True, low, path)).values()) == {"warning"}
    assert statuses(system.limits(False, low, path))["locked memory"] == "ok"
    path = root.put(sys__fs__cgroup__pids_dot_max="100")
    found = by_name(system.limits(False, limits(), path))["processes and threads"]
    assert (found.status, found.found) == ("warning", "at most 100")


@pytest.mark.parametrize(
    ("free", "num_gpus", "status"),
    [(64 << 20, 0, "ok"), (64 << 20, 1, "ok"), (64 << 20, 2, "fault"), (1 << 20, 0, "fault")],
)
def test_shared_memory(free: int, num_gpus: int, status: str) -> None:
    found = system.shared_memory(num_gpus, statvfs=disk(free))
    assert found.status == status
    assert ("--shm-size" in found.remedy) == (status == "fault")


def test_shared_memory_that_is_missing(tmp_path: Path) -> None:
    (found,) = run([("shared memory", lambda: system.shared_memory(0, str(tmp_path / "shm")))])
    assert (found.status, found.found) == ("fault", f"{tmp_path}/shm: No such file or directory")
    assert f"mount -t tmpfs -o size=8g tmpfs {tmp_path}/shm" in found.remedy


MOUNTS = "/dev/sda1 {root} {kind} rw 0 0\nproc /proc proc rw 0 0"


@pytest.mark.parametrize(
    ("kind", "free", "status", "remedy"),
    [
        ("ext4", 100 * GIB, "ok", ""),
        ("ext4", 5 * GIB, "warning", "do not fit"),
        ("ext4", GIB // 2, "fault", "larger disk"),
        ("overlay", 100 * GIB, "warning", "mount a volume"),
        ("nfs4", 100 * GIB, "warning", "through the network"),
        ("fuse.sshfs", 100 * GIB, "warning", "through the network"),
        ("tmpfs", 100 * GIB, "warning", "takes memory"),
    ],
)
def test_model_cache(root: Root, kind: str, free: int, status: str, remedy: str) -> None:
    folder = root.path / "cache" / "hub"  # need not exist yet
    path = root.put(proc__self__mounts=MOUNTS.format(root=root.path, kind=kind))
    found = by_name(system.model_cache(folder, path, disk(free)))
    assert (found["model cache"].status, remedy in found["model cache"].remedy) == (status, True)
    assert f"({kind})" in found["model cache"].found


def test_a_model_cache_that_cannot_be_written_to(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    path = root.put(proc__self__mounts=MOUNTS.format(root=root.path, kind="ext4"))
    monkeypatch.setattr(os, "access", lambda *_: False)
    found = by_name(system.model_cache(root.path, path, disk(100 * GIB)))["model cache"]
    assert (found.status, "not writable" in found.found) == ("warning", True)


def test_the_file_system_is_that_of_the_innermost_mount(root: Root) -> None:
    inner = root.path / "a folder"
    inner.mkdir()
    mounts = f"/dev/sda1 / ext4 rw 0 0\nserver:/x {str(inner).replace(' ', chr(92) + '040')} nfs rw 0 0"
    path = root.put(proc__self__mounts=mounts)
    assert system.file_system(inner / "model", path) == "nfs"
    assert system.file_system(root.path, path) == "ext4"


def test_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: "/tmp")
    assert system.temporary_folder(disk(GIB)).status == "ok"
    assert system.temporary_folder(disk(1 << 20)).status == "fault"
    for length, status in ((MAX_TMPDIR_BYTES, "ok"), (MAX_TMPDIR_BYTES + 1, "fault")):
        folder = "/".ljust(length - 2, "l") + "ü"  # two bytes
        monkeypatch.setattr(tempfile, "gettempdir", lambda folder=folder: folder)
        found = system.temporary_folder(disk(GIB))
        assert found.status == status
        assert ("at most 45 bytes" in found.remedy) == (status == "fault")


CPU = "processor\t: 0\nmodel name\t: A fast one\n\nprocessor\t: 1\nmodel name\t: A fast one"


def test_processor(root: Root) -> None:
    path = root.files(
        {
            "proc/cpuinfo": CPU,
            "sys/devices/system/cpu/smt/active": "1",
            "sys/fs/cgroup/cpu.max": "max 100000",
        }
    )
    found = by_name(system.processor(path, 2, {}))
    assert statuses(found.values()) == {"processor": "ok", "CPU quota": "ok"}
    assert found["processor"].found == "A fast one, 2 of 2 logical cores, SMT on"
    root.files({"sys/fs/cgroup/cpu.max": "150000 100000"})
    quota = by_name(system.processor(path, 2, {}))["CPU quota"]
    assert (quota.status, "OMP_NUM_THREADS=1" in quota.remedy) == ("warning", True)
    assert by_name(system.processor(path, 2, {"OMP_NUM_THREADS": "1"}))["CPU quota"].status == "ok"


def test_a_quota_of_the_older_control_groups(root: Root) -> None:
    path = root.files(
        {
            "proc/cpuinfo": CPU,
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "100000",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        }
    )
    assert by_name(system.processor(path, 2, {}))["CPU quota"].found == "1 of 2 cores"


def test_a_host_without_proc_and_sys_has_nothing_that_is_ok(tmp_path: Path) -> None:
    found = list(
        run(
            [
                ("memory", lambda: system.memory(tmp_path)),
                ("processor", lambda: system.processor(tmp_path)),
            ]
        )
    )
    assert {check.status for check in found} == {"not applicable"}
    assert {check.name for check in found} >= {"memory", "processor"}
