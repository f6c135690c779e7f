"""The NVIDIA GPUs of this host, as NVML (nvidia-ml-py) reports them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from quire.engine.config import topology
from quire.engine.config.devices import visible_gpus
from quire.engine.config.topology import LinkType
from quire.engine.doctor.check import Check, fault, gib, not_applicable, ok, warning
from quire.engine.protocol.errors import ConfigError

_NVIDIA = "0x10de"
"""The vendor's number on PCI."""
_DISPLAY = "0x03"
"""The beginning of the PCI class of GPUs."""
_FOREIGN_BYTES = 1 << 30
"""More memory in use than a driver takes for itself."""
_P2P_READ = 0
"""NVML_P2P_CAPS_INDEX_READ, which nvidia-ml-py has as a tuple."""


def check_gpus(root: Path = Path("/")) -> Iterator[Check]:
    """Every check of the GPUs that CUDA_VISIBLE_DEVICES leaves visible."""
    import pynvml

    try:
        with visible_gpus() as handles:
            if not handles:
                yield _missing(root)
                return
            names = [_text(pynvml.nvmlDeviceGetName(handle)) for handle in handles]
            sizes = [int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) for handle in handles]
            kinds = {f"{name} with {gib(size)}": None for name, size in zip(names, sizes, strict=True)}
            driver = _text(pynvml.nvmlSystemGetDriverVersion())
            yield ok("GPUs", f"{len(handles)} × {' and '.join(kinds)}, driver {driver}", count=len(handles))
            yield _errors(handles)
            yield _mig(handles)
            yield from _links(handles)
            yield _others(handles)
    except (ConfigError, pynvml.NVMLError) as error:
        yield fault("GPUs", str(error), "check the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES")


def driver_version() -> tuple[int | None, str]:
    """The newest CUDA version that the driver supports, as 12040, and the driver's own; None without a driver."""
    import pynvml

    try:
        with visible_gpus() as handles:
            if not handles:
                return None, ""
            cuda = int(pynvml.nvmlSystemGetCudaDriverVersion_v2())
            return cuda, _text(pynvml.nvmlSystemGetDriverVersion())
    except (ConfigError, pynvml.NVMLError):
        return None, ""


def _missing(root: Path) -> Check:
    cards = [
        path.parent.name
        for path in root.glob("sys/bus/pci/devices/*/vendor")
        if path.read_text().strip() == _NVIDIA and (path.parent / "class").read_text().startswith(_DISPLAY)
    ]
    if cards and os.environ.get("CUDA_VISIBLE_DEVICES") is None:
        remedy = "install NVIDIA's driver (nvidia-smi must list them); a container needs --gpus all"
        return fault("GPUs", f"NVIDIA cards without a driver: {', '.join(cards)}", remedy)
    return not_applicable("GPUs", "no NVIDIA GPU is visible")


def _read(function: Callable[..., Any], *arguments: Any) -> Any | None:
    """None: this GPU or driver does not report it."""
    import pynvml

    try:
        return function(*arguments)
    except pynvml.NVMLError:
        return None


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name


def _numbers(indices: Sequence[int]) -> str:
    return f"GPU{'s' * (len(indices) > 1)} {', '.join(map(str, indices))}"


def _errors(handles: Sequence[Any]) -> Check:
    """ECC errors since the driver was loaded, and rows that are to be replaced or could not be."""
    import pynvml

    kinds = (pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED)
    pending, corrected, is_known = list[str](), 0, False
    for index, handle in enumerate(handles):
        ours, lost = (
            _read(pynvml.nvmlDeviceGetTotalEccErrors, handle, kind, pynvml.NVML_VOLATILE_ECC) for kind in kinds
        )
        rows = _read(pynvml.nvmlDeviceGetRemappedRows, handle)
        _, _, is_pending, has_failed = rows or (0, 0, 0, 0)
        is_known |= lost is not None or rows is not None
        corrected += ours or 0
        if lost or has_failed:
            remedy = "do not use the GPU: run its diagnosis (dcgmi diag -r 3), and have it replaced if that fails"
            what = f"{lost} uncorrected ECC errors" if lost else "rows of its memory cannot be replaced"
            return fault("GPU memory errors", f"GPU {index}: {what}", remedy)
        pending += [f"GPU {index}"] if is_pending else []
    if pending:
        remedy = "reset it when it is idle (nvidia-smi --gpu-reset), or restart the host"
        return warning("GPU memory errors", f"rows of {', '.join(pending)} are to be replaced", remedy)
    if not is_known:
        return not_applicable("GPU memory errors", "ECC is off or not supported")
    return ok("GPU memory errors", f"none uncorrected ({corrected} corrected)")


def _mig(handles: Sequence[Any]) -> Check:
    import pynvml

    modes = [_read(pynvml.nvmlDeviceGetMigMode, handle) for handle in handles]
    on = [index for index, mode in enumerate(modes) if mode is not None and mode[0]]
    if on:
        remedy = "nvidia-smi -i N -mig 0, or serve on one instance: CUDA_VISIBLE_DEVICES=MIG-… (nvidia-smi -L)"
        return warning("MIG", f"on for {_numbers(on)}: a process sees one instance, and NCCL needs whole GPUs", remedy)
    if all(mode is None for mode in modes):
        return not_applicable("MIG", "these GPUs have none")
    return ok("MIG", "off")


def _links(handles: Sequence[Any]) -> Iterator[Check]:
    import pynvml

    if len(handles) == 1:
        yield not_applicable("GPU links", "one GPU")
        return
    links, pairs = topology.read(handles), list(combinations(range(len(handles)), 2))
    kinds = sorted({links[one][other] for one, other in pairs}, reverse=True)
    text, down = f"between {len(handles)} GPUs: {', '.join(kind.text for kind in kinds)}", list[str]()
    for index, handle in enumerate(handles):
        ports = range(pynvml.NVML_NVLINK_MAX_LINKS)
        states = [_read(pynvml.nvmlDeviceGetNvLinkState, handle, port) for port in ports]
        if 0 in states and 1 in states:
            down.append(f"GPU {index}: {states.count(0)} of {states.count(0) + states.count(1)} NVLinks are down")
    if down:
        remedy = "check bridges, and the fabric manager (nvidia-smi nvlink -s)"
        yield warning("GPU links", f"{text}; {'; '.join(down)}", remedy)
    elif LinkType.UNKNOWN in kinds:
        yield not_applicable("GPU links", "the driver does not report them")
    elif LinkType.SOCKETS in kinds:
        remedy = "-tp inside a group with fast links, -pp between groups; Quire assigns GPUs to ranks by their links"
        yield warning("GPU links", text, remedy)
    else:
        yield ok("GPU links", text)
    states = [_read(pynvml.nvmlDeviceGetP2PStatus, handles[one], handles[other], _P2P_READ) for one, other in pairs]
    blocked = [
        f"{one}-{other}"
        for (one, other), state in zip(pairs, states, strict=True)
        if state not in (None, pynvml.NVML_P2P_STATUS_OK)
    ]
    if blocked:
        remedy = "turn off ACS and the IOMMU, or let NCCL copy through the host (slower; it does so by itself)"
        yield warning("GPU peer access", f"not possible between GPUs {', '.join(blocked)}", remedy)
    elif None in states:
        yield not_applicable("GPU peer access", "the driver does not report it")
    else:
        yield ok("GPU peer access", "possible between all GPUs")


def _others(handles: Sequence[Any]) -> Check:
    """Processes that use the GPUs now. In a container, processes outside it are not listed, but their memory counts."""
    import pynvml

    found = list[str]()
    for index, handle in enumerate(handles):
        processes = _read(pynvml.nvmlDeviceGetComputeRunningProcesses, handle) or []
        used = int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
        sizes = [f" ({gib(each.usedGpuMemory)})" if each.usedGpuMemory else "" for each in processes]
        if processes:
            owners = (f"process {each.pid}{size}" for each, size in zip(processes, sizes, strict=True))
            found.append(f"GPU {index}: {', '.join(owners)}")
        elif used > _FOREIGN_BYTES:
            found.append(f"GPU {index}: {gib(used)} in use by processes that are not listed")
    if found:
        remedy = "end them, or lower --gpu-memory-utilization: a server gets a part of the memory that is free"
        return warning("GPU processes", "; ".join(found), remedy)
    return ok("GPU processes", "none")
