"""All-reduces through torch's symmetric memory, which GPUs share: kernels read what the other ranks have written.

torch's CUDASymmetricMemoryOps.cu defines the kernels, and the types, sizes and numbers of ranks that they support;
`CudaParallel.finalize` verifies them on this machine. They run on the current stream and never wait on the host, so
CUDA graphs can capture them. They have no time-out: if a rank is missing, the others' streams keep waiting.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

MAX_BYTES = 8 << 20
"""Maximum size of an all-reduce; NCCL is as fast for larger ones."""
UNIT = 16
"""Bytes: the granularity and alignment of an all-reduce."""
_SET_UP_SECONDS = 60.0
_TRIES, _REPEATS, _DELAY_CYCLES = 3, 10, 2_000_000
"""Measurements, all-reduces in each, and clock cycles for which the device is delayed until all are launched."""


@dataclass(frozen=True)
class AllReduceAlgorithm:
    """An all-reduce. `run` takes a contiguous 1-D tensor of at most `MAX_BYTES` and returns a new one."""

    name: str
    run: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class SymmetricBuffer:
    """The location of a rank."""

    host: tuple[str, str] | None
    """Identity of the running kernel and the process ID namespace; None: unknown."""
    device: int
    peers: tuple[int, ...]
    """Devices whose memory this device can read."""


def local_buffer(device: torch.device) -> SymmetricBuffer:
    """This rank's location."""
    assert device.index is not None
    others = (other for other in range(torch.cuda.device_count()) if other != device.index)
    peers = (other for other in others if torch.cuda.can_device_access_peer(device.index, other))
    return SymmetricBuffer(host(), device.index, (device.index, *peers))


def host() -> tuple[str, str] | None:
    """Identity of the running kernel and the process ID namespace; None if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid")
    except OSError:
        return None


def unavailable_reason(places: Sequence[SymmetricBuffer]) -> str:
    """Why these ranks cannot share memory; "" if nothing prevents it."""
    devices = {place.device for place in places}
    if len({place.host for place in places}) > 1 or places[0].host is None:
        return "the ranks are not all on one host"
    if len(devices) < len(places):
        return "ranks have the same GPU, or each sees only its own"
    for place in places:
        if unreachable := devices.difference(place.peers):
            return f"GPU {place.device} cannot read the memory of GPU {min(unreachable)}"
    return ""


def allocate(device: torch.device) -> Tensor:
    """Allocate the memory that this rank shares, `[bytes]`."""
    import torch.distributed._symmetric_memory as symmetric_memory

    return symmetric_memory.empty(MAX_BYTES, dtype=torch.uint8, device=device)


def share(memory: Tensor, group: dist.ProcessGroup) -> list[AllReduceAlgorithm]:
    """The algorithms that are available, once every rank of the group has called this with its memory."""
    import torch.distributed._symmetric_memory as symmetric_memory

    with _short_timeout(group):
        symmetric_memory.rendezvous(memory, group)
    ops, name, size = torch.ops.symm_mem, group.group_name, group.size()

    def buffer(x: Tensor) -> Tensor:
        return memory[: x.nbytes].view(x.dtype)

    def copied(x: Tensor) -> Tensor:
        return buffer(x).copy_(x)

    def two_shot(x: Tensor) -> Tensor:
        if size in (2, 4, 8):
            out: Tensor = ops.two_shot_all_reduce_out(copied(x), "sum", name, torch.empty_like(x))
            return out
        return ops.two_shot_all_reduce_(copied(x), "sum", name).clone()  # type: ignore[no-any-return]

    algorithms = [
        AllReduceAlgorithm("one-shot", lambda x: ops.one_shot_all_reduce_copy(buffer(x), x, "sum", name)),
        AllReduceAlgorithm("two-shot", two_shot),
    ]
    if _is_multicast(memory.device):
        algorithms.append(
            AllReduceAlgorithm("multicast one-shot", lambda x: ops.multimem_one_shot_all_reduce(copied(x), "sum", name))
        )
        algorithms.append(
            AllReduceAlgorithm("multicast two-shot", lambda x: ops.multimem_all_reduce_(copied(x), "sum", name).clone())
        )
    return algorithms


def _is_multicast(device: torch.device) -> bool:
    """Whether one instruction can write to all other GPUs, and sum their values (NVSwitch)."""
    from torch._C._autograd import DeviceType
    from torch._C._distributed_c10d import _SymmetricMemory

    assert device.index is not None
    return _SymmetricMemory.has_multicast_support(DeviceType.CUDA, device.index)


@contextmanager
def _short_timeout(group: dist.ProcessGroup) -> Iterator[None]:
    """Shorten the wait for other ranks' keys in the group's store: a rank may have failed."""
    store = dist.distributed_c10d._get_process_group_store(group)
    before: timedelta = store.timeout  # type: ignore[attr-defined]
    store.set_timeout(min(before, timedelta(seconds=_SET_UP_SECONDS)))
    try:
        yield
    finally:
        store.set_timeout(before)


def wait(what: str, seconds: float) -> None:
    """Wait until the GPU has completed all launched work. Raises `RuntimeError` if that takes longer than `seconds`."""
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()
    deadline = time.monotonic() + seconds
    while not done.query():  # type: ignore[no-untyped-call]
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"{what} did not end within {seconds:.0f} s; --disable-custom-all-reduce uses NCCL for all of them"
            )
        time.sleep(0.0002)


def measure(run: Callable[[], object]) -> float:
    """Seconds per run, the best of several measurements of repeated runs, without Python's launch overhead."""
    return min(_measured(run) for _ in range(_TRIES))


def _measured(run: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda._sleep(_DELAY_CYCLES)  # type: ignore[no-untyped-call]
    run()  # synchronizes the ranks
    begin.record()
    for _ in range(_REPEATS):
        run()
    end.record()
    end.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds / 1000 / _REPEATS
