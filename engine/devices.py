"""What this host has to run on, asked without torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from quire.engine.errors import ConfigError


@dataclass(frozen=True)
class Devices:
    """The devices of one kind. `memory` is the bytes free on the smallest that is used (on CPU: of the host)."""

    kind: Literal["cpu", "cuda"]
    count: int
    memory: int


def find(kind: Literal["auto", "cpu", "cuda"], ranks: int) -> Devices:
    """The devices for so many ranks; raises `ConfigError` when CUDA is asked for and there is none."""
    gpus = _free_gpu_memory() if kind != "cpu" else []
    if gpus:
        return Devices("cuda", len(gpus), min(gpus[:ranks]))
    if kind == "cuda":
        raise ConfigError("--device cuda: no NVIDIA GPU is visible; check the driver and CUDA_VISIBLE_DEVICES")
    return Devices("cpu", os.cpu_count() or 1, _free_host_memory())


def _free_gpu_memory() -> list[int]:
    """Free bytes of each GPU that CUDA_VISIBLE_DEVICES leaves visible; empty without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = map(str, range(pynvml.nvmlDeviceGetCount())) if visible is None else visible.split(",")
        free = []
        for name in filter(None, (n.strip() for n in names)):
            by_index = name.lstrip("-").isdigit()
            if by_index and int(name) < 0:
                break
            handle = (
                pynvml.nvmlDeviceGetHandleByIndex(int(name)) if by_index else pynvml.nvmlDeviceGetHandleByUUID(name)
            )
            free.append(int(pynvml.nvmlDeviceGetMemoryInfo(handle).free))
        return free
    except pynvml.NVMLError as error:
        raise ConfigError(f"cannot read the GPUs in CUDA_VISIBLE_DEVICES={visible}: {error}") from None
    finally:
        pynvml.nvmlShutdown()


def _free_host_memory() -> int:
    """Bytes that can be taken without swapping, within the container's limit."""
    with open("/proc/meminfo") as lines:
        sizes = {key: int(value.split()[0]) * 1024 for key, value in (line.split(":") for line in lines)}
    free = sizes["MemAvailable"]
    group = Path("/sys/fs/cgroup")
    if (group / "memory.max").exists() and (limit := (group / "memory.max").read_text().strip()).isdigit():
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used = int((group / "memory.current").read_text()) - int(stat["inactive_file"])  # file cache that can go
        free = min(free, int(limit) - used)
    return free
