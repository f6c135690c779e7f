"""The process that checks a device with torch: versions, every kernel, and an all-reduce with other ranks.

It prints a `Check` per line, as JSON, each when it is known: a crash in a later one loses none of them.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from types import ModuleType
from typing import Any

import msgspec
import torch

from quire import kernels
from quire.engine.config.engine_config import ParallelConfig
from quire.engine.distributed import parallel_state
from quire.engine.distributed.communicator import Parallel
from quire.engine.distributed.cpu_communicator import CpuParallel
from quire.engine.distributed.cuda_communicator import CudaParallel, describe_algorithms
from quire.engine.doctor import gpus, versions
from quire.engine.doctor.check import Check, fault, not_applicable, ok, warning
from quire.engine.doctor.ranks import RankTask
from quire.engine.process import current_process
from quire.kernels import check, cpu, disk, isa
from quire.kernels.cpu import compiler
from quire.kernels.flashinfer import FlashInferMissing, FlashInferWrong

_NUM_BYTES = {"cpu": 1 << 24, "cuda": 1 << 26}
"""Bytes of the all-reduce."""
_DTYPES = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.bfloat16, torch.float16)}
"""Types in which kernels are checked: a server's default, and another."""


def main() -> int:
    """Do the task that standard input gives."""
    task = msgspec.json.decode(sys.stdin.buffer.readline(), type=RankTask)
    current_process.watch_stdin(lambda: os._exit(1))
    current_process.set_name(f"quire-doctor-{task.rank}")
    device = _select(task)
    if device is None:
        for found in _unusable(task):
            _print(found)
        return 0
    if task.checks_kernels:
        for found in (_check_cuda if task.device == "cuda" else _check_cpu)(device, task):
            _print(found)
    elif task.device == "cpu":
        kernels.prepare(device)()
    _print_all_reduce(task, device)
    return 0


def _print(found: Check) -> None:
    print(msgspec.json.encode(found).decode(), flush=True)


def _select(task: RankTask) -> torch.device | None:
    """The device of the rank; None if torch cannot use it."""
    if task.device == "cpu":
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // task.local_size))
        return torch.device("cpu")
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # NVML's order
    if not torch.cuda.is_available():
        return None
    torch.cuda.set_device(task.index)
    return torch.device("cuda", task.index)


def _unusable(task: RankTask) -> Iterator[Check]:
    """Why torch cannot use the GPUs, although NVML lists them. The first rank of a host says it for all."""
    if task.index:
        return
    name, rank = task.subject, f"rank {task.rank}: "
    if task.checks_kernels:
        name, rank = "torch.cuda", ""
        yield (found := versions.cuda(torch.version.cuda, *gpus.driver_version()))
        if found.status == "fault":
            return
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        problem = "torch.cuda.is_available() is False"
    except (AssertionError, RuntimeError) as error:
        problem = " ".join(str(error).split())[:500]
    remedy = (
        "start the fabric manager if there are NVSwitches (systemctl start nvidia-fabricmanager), set "
        "NVIDIA_DRIVER_CAPABILITIES=compute,utility in a container, or reinstall the driver (dmesg has its errors)"
    )
    yield fault(name, f"{rank}torch cannot use the GPUs: {problem}", remedy)


def _check_cpu(device: torch.device, task: RankTask) -> Iterator[Check]:
    """The instruction set, the folder of compiled kernels, and the kernels."""
    try:
        chosen = isa.chosen()
    except ValueError as error:
        yield fault("instruction set", str(error), "the kernels are built for that of the processor by default")
        return
    extra = ", AMX by oneDNN" * isa.has("amx_tile")
    if chosen.name == "native":
        remedy = "expect the speed of plain torch: there are kernels for AVX2, AVX-512 and ARM with dot products"
        yield warning("instruction set", f"none of those that kernels are written for ({chosen.machine})", remedy)
    else:
        yield ok("instruction set", f"{chosen.name} ({', '.join(sorted(chosen.requires))}){extra}")
    prebuilt = compiler.SOURCES / compiler.PREBUILT / compiler.library_name(chosen.name)
    found = compiler.find_compiler()
    begun = time.perf_counter()
    try:
        cpu.load()
    except cpu.CannotBuild as error:
        remedy = "install g++ 12 or newer, or the wheel: plain torch is used instead, which is slow"
        yield warning("CPU kernels", str(error), remedy)
        yield not_applicable("kernels on cpu", "there are none to check")
        return
    origin = "those of the wheel" if prebuilt.exists() else f"compiled by {found}, kept in {disk.folder()}"
    yield ok("CPU kernels", f"{origin}, loaded in {time.perf_counter() - begun:.1f} s")
    kernels.prepare(device)()
    yield from _compare(cpu, device)


def _check_cuda(device: torch.device, task: RankTask) -> Iterator[Check]:
    """Versions that only torch knows, the Triton kernels and, if it is installed, FlashInfer."""
    if not task.index:
        yield versions.cuda(torch.version.cuda, *gpus.driver_version())
        nccl: Any = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        yield ok("NCCL", ".".join(map(str, nccl)))
    major, minor = torch.cuda.get_device_capability(device)
    oldest = min(int(name[3:].rstrip("af")) for name in torch.cuda.get_arch_list() if name.startswith("sm_"))
    if 10 * major + minor < oldest:
        text = f"compute capability {major}.{minor}, and torch is built for {oldest / 10} and newer"
        yield fault(f"GPU {task.index}", text, "install an older torch that Quire supports, or use --device cpu")
        return
    try:
        from quire.kernels import triton
    except ImportError as error:
        yield warning(
            "Triton", f"cannot be imported: {error}", "pip install triton: plain torch is used, which is slow"
        )
    else:
        if not task.index:
            yield ok("Triton", versions.installed("triton") or "of unknown version")
        yield from _compare(triton, device)
    name = f"FlashInfer on {device}"
    try:
        difference = check.flashinfer_difference(device, torch.bfloat16)
    except FlashInferWrong as error:
        yield warning(name, str(error), "Triton's attention is used; install another version")
    except FlashInferMissing as error:
        yield not_applicable(name, str(error))
    else:
        remedy = "Triton's attention is used; install another version"
        yield warning(name, difference, remedy) if difference else ok(name, "agrees with the reference")


def _compare(module: ModuleType, device: torch.device) -> Iterator[Check]:
    """Compare every kernel with the reference."""
    names, wrong = set[str](), set[str]()
    for dtype in _DTYPES[device.type]:
        kind = str(dtype).removeprefix("torch.")
        for name, problem in check.differences(module, device, dtype, kernels.AttentionConfig()).items():
            names.add(name)
            if problem:
                wrong.add(name)
                used = device.type == "cpu"
                remedy = "report it; QUIRE_CPU_ISA selects older kernels" if used else "report it; plain torch is used"
                yield fault(f"kernel {name} on {device}", f"differs from the reference in {kind}: {problem}", remedy)
    kinds = " and ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES[device.type])
    if right := sorted(names - wrong):
        text = f"{len(right)} of {len(names)} agree with the reference in {kinds}: {', '.join(right)}"
        yield ok(f"kernels on {device}", text, right=len(right), wrong=len(wrong))


def _print_all_reduce(task: RankTask, device: torch.device) -> None:
    """Print rank 0's findings, and the problems of any rank."""
    if task.size == 1:
        return _print(not_applicable(task.subject, "there is one device"))
    config = ParallelConfig(
        tensor_parallel_size=task.size,
        pipeline_parallel_size=1,
        stages=(range(1),),
        executor="mp",
        device=task.device,
        cluster_token=task.token,
        timeout=task.seconds,
    )
    try:
        state = parallel_state.connect(config, task.rank, task.init_method, device, timedelta(seconds=task.seconds))
        state.tp.finalize()
        found = _all_reduce(task, device, state.tp)
        state.close()
    except RuntimeError as error:
        text = " ".join(str(error).split())[:500]
        remedy = "see the other lines about ports, interfaces, MTUs and links; NCCL_DEBUG=INFO shows NCCL's connections"
        return _print(fault(task.subject, f"rank {task.rank}: {text}", remedy))
    if task.rank == 0 or found.status == "fault":
        _print(found)


def _all_reduce(task: RankTask, device: torch.device, group: Parallel) -> Check:
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    x = (torch.arange(_NUM_BYTES[device.type] // dtype.itemsize) % task.size == task.rank).to(device, dtype)
    # Each element is 1 on one rank.
    total = group.all_reduce(x)
    if not bool((total == 1).all()):
        remedy = "see the lines about memory errors and peer access; --disable-custom-all-reduce uses NCCL only"
        return fault(task.subject, f"rank {task.rank}: a sum over {task.size} ranks is wrong", remedy)
    where = f"{task.size} {'GPUs' if device.type == 'cuda' else 'processes'}"
    return ok(task.subject, f"{where} by {_transport(group, dtype)}", ranks=task.size)


def _transport(group: Parallel, dtype: torch.dtype) -> str:
    if isinstance(group, CudaParallel):
        return f"NCCL ({describe_algorithms(group.table[dtype])})" if dtype in group.table else "NCCL"
    return "shared memory" if isinstance(group, CpuParallel) and group.memory is not None else "gloo"


if __name__ == "__main__":
    sys.exit(main())
