"""Measures the resources that the ranks of this host use: processor time, memory, and their GPUs."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from quire.engine.config.devices import visible_gpus
from quire.engine.protocol.errors import ConfigError
from quire.engine.protocol.stats import GpuUsage, RankUsage

logger = logging.getLogger("quire.engine.executor.usage")

_SECONDS = 2.0
"""Interval between two samples."""
_TICKS = os.sysconf("SC_CLK_TCK")
_ALL_LINKS = 2**32 - 1
"""NVML's scope of a field that is summed over all NVLinks."""


class UsageSampler:
    """Samples the usage of processes in a thread, because NVML takes milliseconds."""

    def __init__(self, pids: Sequence[int], gpus: Sequence[int] | None) -> None:
        """`gpus` are the device indices of the processes; None: they run on the CPU."""
        self.usage: list[RankUsage | None] = [None] * len(pids)
        """The newest sample of each process; None until the first one."""
        self._pids, self._gpus = pids, gpus
        self._stopping = threading.Event()
        threading.Thread(target=self._run, daemon=True, name="usage").start()

    def close(self) -> None:
        """Let the thread end."""
        self._stopping.set()

    def _run(self) -> None:
        try:
            with contextlib.ExitStack() as stack:
                gpus = [None] * len(self._pids) if self._gpus is None else _handles(self._gpus, stack)
                while True:
                    for place, (pid, gpu) in enumerate(zip(self._pids, gpus, strict=True)):
                        try:
                            self.usage[place] = read_usage(pid, gpu)
                        except OSError:  # it has ended
                            self.usage[place] = None
                    if self._stopping.wait(_SECONDS):
                        return
        except Exception:  # a bug here must not leave old samples that look current
            logger.exception("the usage of ranks is not sampled any more")
            self.usage = [None] * len(self._pids)


def _handles(indices: Sequence[int], stack: contextlib.ExitStack) -> list[Any | None]:
    """NVML handles of the GPUs with these device indices, until `stack` is closed; None: not available."""
    try:
        visible = stack.enter_context(visible_gpus())
    except ConfigError as error:
        visible, missing = [], [str(error)]
    else:
        missing = [f"GPU {index} is not visible" for index in indices if index >= len(visible)]
        if not visible:
            missing = ["no NVIDIA driver"]
    for reason in missing:
        logger.warning("GPU metrics are not available: %s", reason)
    return [visible[index] if index < len(visible) else None for index in indices]


def read_usage(pid: int, gpu: Any | None) -> RankUsage:
    """Return the usage of a process and of the GPU of this NVML handle; raises `OSError` if the process has ended."""
    proc = Path(f"/proc/{pid}")
    after_name = (proc / "stat").read_text().rpartition(")")[2].split()  # proc(5): the state is field 3
    user, system = map(int, after_name[11:13])
    lines = (line.partition(":") for line in (proc / "status").read_text().splitlines())
    sizes = {name: int(value.split()[0]) * 1024 for name, _, value in lines if name in ("VmRSS", "RssShmem")}
    return RankUsage(
        cpu_seconds=(user + system) / _TICKS,
        resident_bytes=sizes.get("VmRSS", 0),  # a process that is ending has none
        shared_bytes=sizes.get("RssShmem", 0),
        gpu=None if gpu is None else read_gpu(gpu),
    )


def read_gpu(gpu: Any) -> GpuUsage | None:
    """Return the usage of the GPU of this NVML handle; None if it cannot be read."""
    import pynvml

    def optional(read: Callable[[], float]) -> float | None:
        try:
            return read()
        except pynvml.NVMLError:  # this GPU or driver does not report it
            return None

    def link_bytes(field: int) -> int:
        (value,) = pynvml.nvmlDeviceGetFieldValues(gpu, [(field, _ALL_LINKS)])
        pynvml._nvmlCheckReturn(value.nvmlReturn)
        return int(value.value.ullVal) * 1024

    def numbers() -> Iterator[float | None]:
        yield optional(lambda: pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100)
        yield optional(lambda: pynvml.nvmlDeviceGetPowerUsage(gpu) / 1000)
        for counter in (pynvml.NVML_PCIE_UTIL_RX_BYTES, pynvml.NVML_PCIE_UTIL_TX_BYTES):
            yield optional(lambda counter=counter: pynvml.nvmlDeviceGetPcieThroughput(gpu, counter) * 1000)  # type: ignore[misc]
        for field in (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX):
            yield optional(lambda field=field: link_bytes(field))  # type: ignore[misc]

    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(gpu)
    except pynvml.NVMLError:
        return None
    return GpuUsage(int(memory.used), int(memory.total), *numbers())  # type: ignore[arg-type]
