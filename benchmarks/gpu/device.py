"""The machine, the installed software, and the measured ceilings."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import platform
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import machine

from gpu.lab import Lab
from gpu.records import Check, Note, Record
from quire.engine.config import devices

_PACKAGES = ("torch", "triton", "transformers", "flashinfer-python", "nvidia-nccl-cu13", "nvidia-nccl-cu12", "numpy")


def identify(lab: Lab) -> Iterator[Record]:
    """Device, driver, versions."""
    torch: Any = importlib.import_module("torch")
    facts: dict[str, Any] = {"python": platform.python_version(), "cores": len(os.sched_getaffinity(0))}
    for name in _PACKAGES:
        try:
            facts[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    data: dict[str, Any] = {"device": facts}
    if lab.device == "cuda":
        data["free memory"] = devices.find("cuda", (1,)).memory  # before this process allocates any
        facts |= _card(torch)
    else:
        facts["name"] = machine.cpu_name()
    yield Note(", ".join(f"{name} {value}" for name, value in facts.items()), data)
    if lab.device == "cuda":
        usable = bool((torch.ones(8, device="cuda").sum() == 8).item())
        yield Check("the card computes", usable, "a sum of eight ones")


def _card(torch: Any) -> dict[str, Any]:
    import pynvml

    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    facts = {
        "name": properties.name,
        "CUDA of torch": torch.version.cuda,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory": f"{total / 2**30:.1f} GiB, {free / 2**30:.1f} free",
        "cards": torch.cuda.device_count(),
    }
    with contextlib.suppress(pynvml.NVMLError):  # may not be available in a virtual machine
        pynvml.nvmlInit()
        facts["driver"] = str(pynvml.nvmlSystemGetDriverVersion())
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{properties.uuid}")
        facts["power limit"] = f"{pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3:.0f} W"
    return facts


def ceilings(lab: Lab) -> Iterator[Record]:
    """Copy and read bandwidth, and matmul rates, from which the floors follow."""
    threads = torch_threads()
    seconds = 0.02 if lab.tiny else 0.3 if lab.quick else 0.6
    found = machine.measure(threads, seconds, lab.device, small=lab.tiny)
    yield Note("; ".join(machine.describe(found)), {"machine": asdict(found)})


def torch_threads() -> int:
    """The name of the CPU."""
    return int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))
