"""The devices of this host and their free memory. No torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from quire.engine.config import topology
from quire.engine.protocol.errors import ConfigError

FP8_CAPABILITY = (8, 9)
"""First compute capability of NVIDIA GPUs with instructions for 8-bit floats."""
FP4_CAPABILITY = (10, 0)
"""First compute capability of NVIDIA GPUs that multiply 4-bit floats."""
SHARE = "QUIRE_SHARE_GPU"
"""Environment variable: 1 lets several ranks share a GPU, to test a layout."""


@dataclass(frozen=True)
class Devices:
    """The devices of one kind. `memory` is the least free memory of the devices in use, in bytes (CPU: of the host)."""

    kind: Literal["cpu", "cuda"]
    count: int
    memory: int
    order: tuple[int, ...] = ()
    """CUDA: the device of each rank of this host, shared round-robin if that is allowed; empty: there are too few."""
    links: topology.Links = ()
    """Links between all `count` devices; empty on CPU."""
    capability: tuple[int, ...] | None = None
    """Compute capability of GPUs that are described, empty if it is not known; None: NVML reports it."""

    def capabilities(self) -> dict[int, tuple[int, ...]]:
        """The compute capabilities of the GPUs in use, by number, as far as they are known."""
        found = gpu_capabilities() if self.capability is None else [*filter(None, [self.capability])]
        return {number: each for number, each in enumerate(found) if not self.order or number in self.order}


def find(kind: Literal["auto", "cpu", "cuda"], groups: Sequence[int]) -> Devices:
    """Return the devices for groups of ranks of these sizes; the ranks of a group share layers.

    Raises `ConfigError` if `kind` is cuda and no GPU is visible.
    """
    ranks, may_share = sum(groups), may_share_gpus()
    gpus = free_gpu_memory() if kind != "cpu" else []
    if gpus:
        links = _gpu_links(len(gpus))
        order = topology.assign_devices(links, groups) if ranks <= len(gpus) else ()
        if ranks > len(gpus) and may_share:
            order = tuple(rank % len(gpus) for rank in range(ranks))
        return Devices("cuda", len(gpus), min(gpus[device] for device in order or range(len(gpus))), order, links)
    if kind == "cuda":
        raise ConfigError("--device cuda: no NVIDIA GPU is visible; check the driver and CUDA_VISIBLE_DEVICES")
    return Devices("cpu", os.cpu_count() or 1, free_host_memory())


def may_share_gpus() -> bool:
    """Whether several ranks may share a GPU. Raises `ConfigError` if the variable has an invalid value."""
    value = os.environ.get(SHARE, "")
    if value not in ("", "0", "1"):
        raise ConfigError(f"{SHARE}={value} is invalid: expected 1 (ranks may share a GPU) or 0")
    return value == "1"


def count_gpus() -> int:
    """Number of GPUs that CUDA_VISIBLE_DEVICES leaves visible."""
    return len(free_gpu_memory())


def free_gpu_memory() -> list[int]:
    """Free bytes of each visible GPU; empty without a driver."""
    import pynvml

    with visible_gpus() as handles:
        return [int(pynvml.nvmlDeviceGetMemoryInfo(handle).free) for handle in handles]


def gpu_names() -> list[str]:
    """NVML's name of each visible GPU; empty without a driver."""
    import pynvml

    with visible_gpus() as handles:
        return [str(pynvml.nvmlDeviceGetName(handle)) for handle in handles]


def gpu_capabilities() -> list[tuple[int, int]]:
    """Compute capability of each visible GPU, e.g. (9, 0); empty without a driver or if it is not reported."""
    import pynvml

    with visible_gpus() as handles:
        try:
            capabilities = [pynvml.nvmlDeviceGetCudaComputeCapability(handle) for handle in handles]
        except pynvml.NVMLError:
            return []
    return [(int(major), int(minor)) for major, minor in capabilities]


def _gpu_links(count: int) -> topology.Links:
    """Links between the `count` visible GPUs."""
    with visible_gpus() as handles:
        if len(handles) == count:
            return topology.read(handles)
    return ((topology.LinkType.UNKNOWN,) * count,) * count


@contextmanager
def visible_gpus() -> Iterator[list[Any]]:
    """NVML handles of the GPUs in CUDA_VISIBLE_DEVICES, in its order; empty without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield []
        return
    try:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = map(str, range(pynvml.nvmlDeviceGetCount())) if visible is None else visible.split(",")
        handles = []
        for name in filter(None, (n.strip() for n in names)):
            by_index = name.lstrip("-").isdigit()
            if by_index and int(name) < 0:
                break
            handles.append(
                pynvml.nvmlDeviceGetHandleByIndex(int(name)) if by_index else pynvml.nvmlDeviceGetHandleByUUID(name)
            )
        yield handles
    except pynvml.NVMLError as error:
        raise ConfigError(f"cannot read the GPUs in CUDA_VISIBLE_DEVICES={visible}: {error}") from None
    finally:
        pynvml.nvmlShutdown()


def free_host_memory(root: Path = Path("/")) -> int:
    """Bytes that can be allocated without swapping, within the container's limit. `root`: where /proc and /sys are."""
    with open(root / "proc/meminfo") as lines:
        sizes = {key: int(value.split()[0]) * 1024 for key, value in (line.split(":") for line in lines)}
    free = sizes["MemAvailable"]
    group = root / "sys/fs/cgroup"
    if (group / "memory.max").exists() and (limit := (group / "memory.max").read_text().strip()).isdigit():
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used = int((group / "memory.current").read_text()) - int(stat["inactive_file"])  # the file cache can be dropped
        free = min(free, int(limit) - used)
    return free
