"""Starts the processes that check devices (`quire.engine.doctor.device_checks`), one for each, as ranks of a group."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Literal

import msgspec

from quire.engine.cluster.network import LOOPBACK, address_towards, interface_of
from quire.engine.doctor.check import Check, fault

Device = Literal["cpu", "cuda"]

SECONDS = 300.0
"""Time for all checks of a device; the CPU kernels may have to be compiled, which takes a minute."""
_CPU_RANKS = 2
_CAUSE_SECONDS = 3.0
"""Time in which the others may still fail for the same reason."""
_POLL_SECONDS = 0.05


class RankTask(msgspec.Struct):
    """The task of a process. It reads this from standard input, and ends when that closes."""

    rank: int
    size: int
    """Number of ranks in the group; they all-reduce if there are several."""
    device: Device
    index: int
    """The device's index or, on CPUs, the number of the rank among this host's ranks."""
    local_size: int
    """Number of ranks on this host."""
    init_method: str
    """As in `parallel_state.connect`."""
    token: str = ""
    seconds: float = SECONDS
    """Timeout of the communication."""
    checks_kernels: bool = True
    subject: str = "all-reduce"
    """Name of the check of the group."""


def check_devices(device: Device, count: int) -> Iterator[Check]:
    """Check the kernels on each device of this host, and an all-reduce among them; on a CPU among two processes."""
    size = _CPU_RANKS if device == "cpu" else count
    with tempfile.TemporaryDirectory(prefix="quire-doctor-") as folder:
        init_method = (Path(folder) / "rendezvous").as_uri()
        tasks = [
            RankTask(
                rank=rank,
                size=size,
                device=device,
                index=rank,
                local_size=size,
                init_method=init_method,
                checks_kernels=device == "cuda" or not rank,
            )
            for rank in range(size)
        ]
        yield from run(tasks, LOOPBACK)


def run(tasks: Sequence[RankTask], towards: str) -> Iterator[Check]:
    """Run the processes of this host's ranks, and yield what they report, in the order of ranks. A process that crashes
    or hangs is a fault. gloo and NCCL use the interface that reaches `towards`, unless variables say another one.
    """
    interface = interface_of(address_towards(towards))
    environment = {"OMP_WAIT_POLICY": "passive"}  # as `current_process.share_cores` sets it
    if interface is not None:
        environment["GLOO_SOCKET_IFNAME"] = interface
    if interface not in (None, "lo"):
        environment["NCCL_SOCKET_IFNAME"] = interface
    with contextlib.ExitStack() as stack:
        outputs = [tuple(stack.enter_context(tempfile.TemporaryFile()) for _ in range(2)) for _ in tasks]
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-P", "-m", "quire.engine.doctor.device_checks"],
                    stdin=subprocess.PIPE,
                    stdout=out,
                    stderr=errors,
                    bufsize=0,  # else closing the pipe of a process that has ended would raise
                    env={**environment, **os.environ},
                )
            )
            for out, errors in outputs
        ]
        try:
            for process, task in zip(processes, tasks, strict=True):
                assert process.stdin is not None
                with contextlib.suppress(BrokenPipeError):  # its exit is reported below
                    process.stdin.write(msgspec.json.encode(task) + b"\n")
            _wait(processes, tasks[0].seconds + SECONDS)
            codes = [process.poll() for process in processes]
            for code, task, (out, errors) in zip(codes, tasks, outputs, strict=True):
                yield from _reported(out)
                if code is None and any(codes):
                    continue  # it waits for one that has failed
                if problem := _problem(code):
                    name = f"rank {task.rank} on {'the CPU' if task.device == 'cpu' else f'GPU {task.index}'}"
                    yield fault(name, f"its process {problem}{_last_line(errors)}", _remedy(code, task.device))
        finally:
            for process in processes:
                process.kill()


def _wait(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    """Wait until all have ended, at most for `seconds`, and after a failure of one only a little longer."""
    deadline, has_failed = time.monotonic() + seconds, False
    while None in (codes := [process.poll() for process in processes]) and time.monotonic() < deadline:
        if any(codes) and not has_failed:
            has_failed, deadline = True, min(deadline, time.monotonic() + _CAUSE_SECONDS)
        time.sleep(_POLL_SECONDS)


def _problem(code: int | None) -> str:
    """The problem that an exit code shows; "" if there is none. The code is None if the process has not ended."""
    if code is None:
        return "hangs"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"failed (exit code {code})" if code else ""


def _remedy(code: int | None, device: Device) -> str:
    if code is not None and code > 0:
        return "correct what its message names; if that is a module or a library, reinstall Quire and torch"
    if device == "cpu":
        return "run dmesg: it says if memory ran out; if not, set QUIRE_CPU_ISA to an older instruction set"
    return (
        "run dmesg: it says if memory ran out, and lists Xid errors of GPUs; after one, reset the GPU "
        "(nvidia-smi --gpu-reset) or restart the host"
    )


def _reported(out: IO[bytes]) -> Iterator[Check]:
    out.seek(0)
    for line in out:
        with contextlib.suppress(msgspec.DecodeError):  # a library's own output
            yield msgspec.json.decode(line, type=Check)


def _last_line(errors: IO[bytes]) -> str:
    errors.seek(0)
    lines = errors.read().decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f": {last[:500]}" if last else ", without a message"
