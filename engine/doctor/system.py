"""Memory, limits, file systems and the processor of this host."""

from __future__ import annotations

import os
import re
import resource
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from quire.engine.config.devices import free_host_memory
from quire.engine.doctor.check import Check, fault, gib, not_applicable, ok, warning
from quire.engine.process.runtime_folder import MAX_TMPDIR_BYTES

ROOT = Path("/")
_LEAST_MEMORY = 1 << 30
"""Bytes; a rank takes half of it before it has loaded anything."""
_LEAST_SHM = {False: 16 << 20, True: 1 << 30}
"""Bytes of /dev/shm: plans are sent through it, and NCCL uses it between several GPUs."""
_LEAST_FILES = 4096
_LEAST_PROCESSES = 1024
_LEAST_DISK, _USUAL_DISK = 1 << 30, 20 << 30
_NETWORK_FILE_SYSTEMS = re.compile(r"nfs\d?|cifs|smb3|9p|afs|fuse\..*|ceph|glusterfs")


def memory(root: Path = ROOT) -> Iterator[Check]:
    """Free memory within the container's limit, and strict overcommit."""
    sizes = _meminfo(root)
    total, free = sizes["MemTotal"], free_host_memory(root)
    limit = _cgroup(root, "memory.max", "memory/memory.limit_in_bytes")
    text = f"{gib(free)} of {gib(total)} free"
    if limit is not None and limit.isdigit() and int(limit) < total:
        text += f" (limit of the container: {gib(int(limit))})"
        total = int(limit)
    if free < _LEAST_MEMORY:
        yield fault("memory", text, "end other processes, or raise the memory limit of the container")
    elif free < total / 10:
        yield warning("memory", text, "end other processes: the KV cache gets a part of what is free at the start")
    else:
        yield ok("memory", text, free_bytes=free)
    mode = (root / "proc/sys/vm/overcommit_memory").read_text().strip()
    if mode == "2":
        remedy = "set vm.overcommit_memory to 0 (sysctl): libraries reserve more memory than they use"
        yield warning("memory overcommit", "strict (vm.overcommit_memory is 2)", remedy)
    else:
        yield ok("memory overcommit", f"allowed (vm.overcommit_memory is {mode})")


def limits(
    has_infiniband: bool,
    getrlimit: Callable[[int], tuple[int, int]] = resource.getrlimit,
    root: Path = ROOT,
) -> Iterator[Check]:
    """Limits of this process that servers reach: open files, locked memory, processes."""
    _, files = getrlimit(resource.RLIMIT_NOFILE)
    text = "unlimited" if files == resource.RLIM_INFINITY else f"{files:,}"
    if files != resource.RLIM_INFINITY and files < _LEAST_FILES:
        remedy = f"raise it to {_LEAST_FILES} or more (ulimit -n, LimitNOFILE=): each connection takes one"
        yield warning("open files", f"at most {text}", remedy)
    else:
        yield ok("open files", f"at most {text}")
    locked, _ = getrlimit(resource.RLIMIT_MEMLOCK)
    text = "unlimited" if locked == resource.RLIM_INFINITY else f"at most {gib(locked)}"
    if has_infiniband and locked != resource.RLIM_INFINITY:
        remedy = "ulimit -l unlimited (LimitMEMLOCK=infinity, docker run --ulimit memlock=-1): InfiniBand locks memory"
        yield warning("locked memory", text, remedy)
    else:
        yield ok("locked memory", text)
    of_container = _cgroup(root, "pids.max", "pids/pids.max")
    _, processes = getrlimit(resource.RLIMIT_NPROC)
    count = min(
        processes if processes != resource.RLIM_INFINITY else 1 << 62,
        int(of_container) if of_container and of_container.isdigit() else 1 << 62,
    )
    if count < _LEAST_PROCESSES:
        remedy = "raise it (ulimit -u, TasksMax=, docker run --pids-limit): each rank has a thread per core and more"
        yield warning("processes and threads", f"at most {count}", remedy)
    else:
        yield ok("processes and threads", "unlimited" if count == 1 << 62 else f"at most {count}")


def shared_memory(
    num_gpus: int, path: str = "/dev/shm", statvfs: Callable[[str], os.statvfs_result] = os.statvfs
) -> Check:
    """The size of /dev/shm, compared with the needs of a group of workers."""
    try:
        status = statvfs(path)
    except OSError as error:
        remedy = f"mount it: mkdir -p {path} && mount -t tmpfs -o size=8g tmpfs {path}, or docker run --shm-size 8g"
        return fault("shared memory", f"{path}: {error.strerror}", remedy)
    size, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    needed = _LEAST_SHM[num_gpus > 1]
    text = f"{gib(free)} of {gib(size)} free in {path}"
    if free < needed:
        remedy = f"{gib(needed)} is needed: docker run --shm-size 8g (or --ipc=host), mount -o remount,size=8g {path}"
        return fault("shared memory", text, remedy)
    return ok("shared memory", text, free_bytes=free)


def model_cache(
    folder: Path, root: Path = ROOT, statvfs: Callable[[Path], os.statvfs_result] = os.statvfs
) -> Iterator[Check]:
    """The file system of downloaded models: its kind and its free space."""
    existing = _existing(folder)
    kind, status = file_system(existing, root), statvfs(existing)
    free = status.f_bavail * status.f_frsize
    text = f"{gib(free)} free in {folder} ({kind})"
    elsewhere = "set HF_HOME or --download-dir to a folder on a larger disk"
    if not os.access(existing, os.W_OK):
        remedy = (
            "models cannot be downloaded there: set HF_HOME or --download-dir, or HF_HUB_OFFLINE=1 if all are there"
        )
        yield warning("model cache", f"{text}, not writable", remedy)
    elif free < _LEAST_DISK:
        yield fault("model cache", text, elsewhere)
    elif free < _USUAL_DISK:
        yield warning("model cache", text, f"models of more than {gib(free)} do not fit: {elsewhere}")
    elif kind == "overlay":
        remedy = "it is lost with the container: mount a volume there, or set HF_HOME to one"
        yield warning("model cache", text, remedy)
    elif kind in ("tmpfs", "ramfs"):
        yield warning("model cache", text, "it takes memory, and is lost at a restart: set HF_HOME to a disk")
    elif _NETWORK_FILE_SYSTEMS.fullmatch(kind):
        remedy = "each start reads the weights through the network: copy models to a local disk if starts are slow"
        yield warning("model cache", text, remedy)
    else:
        yield ok("model cache", text, free_bytes=free)


def temporary_folder(statvfs: Callable[[str], os.statvfs_result] = os.statvfs) -> Check:
    """The folder of sockets and temporary files."""
    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError as error:
        return fault("temporary folder", str(error), "set TMPDIR to a folder that can be written to")
    status = statvfs(folder)
    free = status.f_bavail * status.f_frsize
    if free < 16 << 20 or not status.f_favail:
        return fault("temporary folder", f"{gib(free)} free in {folder}", "free space there, or set TMPDIR")
    if len(os.fsencode(folder)) > MAX_TMPDIR_BYTES:
        remedy = f"set TMPDIR to a path of at most {MAX_TMPDIR_BYTES} bytes"
        return fault("temporary folder", f"{folder} is too long for Unix sockets", remedy)
    return ok("temporary folder", f"{gib(free)} free in {folder}")


def processor(
    root: Path = ROOT, cores: int | None = None, environment: Mapping[str, str] = os.environ
) -> Iterator[Check]:
    """The processor, and the part of it that the container may use."""
    text = (root / "proc/cpuinfo").read_text()
    cores = len(os.sched_getaffinity(0)) if cores is None else cores
    name = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    smt = root / "sys/devices/system/cpu/smt/active"
    threads = {"1": ", SMT on", "0": ", SMT off"}.get(smt.read_text().strip(), "") if smt.exists() else ""
    count = len(re.findall(r"^processor\s*:", text, re.MULTILINE))
    yield ok("processor", f"{name[1] if name else 'unknown model'}, {cores} of {count} logical cores{threads}")
    yield _quota(root, cores, environment)


def _quota(root: Path, cores: int, environment: Mapping[str, str]) -> Check:
    limit = _cgroup(root, "cpu.max", "cpu/cpu.cfs_quota_us")
    if limit is None:
        return not_applicable("CPU quota", "no cgroup is mounted")
    quota, _, period = limit.partition(" ")
    if not quota.isdigit():
        return ok("CPU quota", "none")
    allowed = int(quota) / int(period or (root / "sys/fs/cgroup/cpu/cpu.cfs_period_us").read_text())
    text, threads = f"{allowed:g} of {cores} cores", environment.get("OMP_NUM_THREADS", "")
    if allowed >= (int(threads) if threads.isdigit() else cores):
        return ok("CPU quota", text)
    remedy = (
        "threads beyond it are stopped until the next period: give the container whole cores "
        f"(docker run --cpuset-cpus), or set OMP_NUM_THREADS={max(1, int(allowed))}"
    )
    return warning("CPU quota", text, remedy)


def file_system(path: Path, root: Path = ROOT) -> str:
    """The kind of file system that a path is on, as /proc/self/mounts names it."""
    best, kind = "", "unknown"
    for line in (root / "proc/self/mounts").read_text().splitlines():
        _, at, name, *_ = line.split()
        at = at.encode().decode("unicode_escape")  # spaces are written \040
        if len(at) >= len(best) and path.resolve().is_relative_to(at):
            best, kind = at, name
    return kind


def _existing(path: Path) -> Path:
    return path if path.exists() else _existing(path.parent)


def _cgroup(root: Path, name: str, older: str) -> str | None:
    """A value of this process's control group, also in version 1; None: there is none."""
    for path in (root / "sys/fs/cgroup" / name, root / "sys/fs/cgroup" / older):
        if path.exists():
            return path.read_text().strip()
    return None


def _meminfo(root: Path) -> dict[str, int]:
    lines = (line.split(":") for line in (root / "proc/meminfo").read_text().splitlines())
    return {name: int(value.split()[0]) * 1024 for name, value in lines}
