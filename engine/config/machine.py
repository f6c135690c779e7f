"""A machine that a model may be served on: this one, or one that is described. No torch.

The lower bounds of `quire.engine.config.floors` are computed from these figures.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from quire.engine.config import achieved, devices, parallel_config
from quire.engine.config.achieved import Achieved, Latency
from quire.engine.config.devices import FP8_CAPABILITY, Devices
from quire.engine.config.options import EngineOptions
from quire.engine.config.topology import LinkType
from quire.engine.protocol.errors import ConfigError

GIGA, TERA = 10**9, 10**12

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Link:
    """A link that ranks communicate over: bytes per second that a device sends, and the latency of an operation."""

    name: str
    bandwidth: float
    latency: Latency

    def seconds(self, ranks: int) -> float:
        """Seconds of a collective of so many ranks, or of hosts, without data."""
        return self.latency.base + self.latency.each * (ranks - 1)


def nvlink(gigabytes: float) -> Link:
    """NVLink with this many GB/s in each direction: half of the figure in data sheets."""
    return Link("NVLink", gigabytes * GIGA, achieved.NVLINK)


def pcie(gigabytes: float) -> Link:
    """PCIe with this many GB/s in each direction."""
    return Link("PCIe", gigabytes * GIGA, achieved.PCIE)


def network(gigabytes: float) -> Link:
    """The network between hosts, with this many GB/s for each device in each direction."""
    return Link("network", gigabytes * GIGA, achieved.NETWORK)


@dataclass(frozen=True, kw_only=True)
class Device:
    """A GPU, or all processors of a host."""

    name: str
    memory: int
    """Bytes."""
    bandwidth: float
    """Bytes per second that it reads from its memory."""
    flops: Mapping[int, float]
    """Peak operations per second, dense, by the bits of the numbers that it multiplies: 32, 16, and 8 and 4 if it
    multiplies such."""
    link: Link
    """The link between the devices of a host."""
    capability: tuple[int, int] | None = None
    """NVIDIA's compute capability."""
    bridged: int = 0
    """Number of GPUs that an NVLink bridge joins; 0: NVLink, if any, joins all."""
    cache: int = 0
    """Bytes of the last level of cache, where weights may stay from step to step; 0: not considered."""
    cache_bandwidth: float = 0.0

    @property
    def has_multicast(self) -> bool:
        """Whether NVSwitch sums the data that GPUs send, and copies the sum to all of them."""
        return self.link.name == "NVLink" and not self.bridged and (self.capability or (0, 0)) >= (9, 0)


_DRIVER_MIB = 512
"""Approximate memory of a GPU that is not free before a server starts."""


def _flops(tflops32: float, tflops: float, capability: tuple[int, int], fp4: float) -> dict[int, float]:
    """Peak operations per second by bits. 8-bit numbers (int8 from Turing on, FP8 from Ada on) have twice the rate of
    16 bits in all data sheets; 4-bit floats have `fp4` TFLOPS."""
    rates = {32: tflops32, 16: tflops}
    rates |= {8: 2 * tflops} if capability >= (7, 5) else {}
    rates |= {4: fp4} if fp4 else {}
    return {bits: rate * TERA for bits, rate in rates.items()}


def _gpu(
    name: str,
    memory: int,
    bandwidth: float,
    tflops: float,
    tflops32: float,
    link: Link,
    capability: tuple[int, int],
    bridged: int = 0,
    fp4: float = 0.0,
) -> Device:
    return Device(
        name=name,
        memory=(memory - _DRIVER_MIB) << 20,
        bandwidth=bandwidth * GIGA,
        flops=_flops(tflops32, tflops, capability, fp4),
        link=link,
        capability=capability,
        bridged=bridged,
    )


GPUS = (
    _gpu("V100-16G", 16384, 900, 125, 15.7, nvlink(150), (7, 0)),
    _gpu("V100-32G", 32768, 900, 125, 15.7, nvlink(150), (7, 0)),
    _gpu("V100-PCIe-16G", 16384, 900, 112, 14, pcie(16), (7, 0)),
    _gpu("V100-PCIe-32G", 32768, 900, 112, 14, pcie(16), (7, 0)),
    _gpu("T4-16G", 15360, 320, 65, 8.1, pcie(16), (7, 5)),
    _gpu("A100-40G", 40960, 1555, 312, 19.5, nvlink(300), (8, 0)),
    _gpu("A100-80G", 81920, 2039, 312, 19.5, nvlink(300), (8, 0)),
    _gpu("A100-PCIe-40G", 40960, 1555, 312, 19.5, pcie(32), (8, 0)),
    _gpu("A100-PCIe-80G", 81920, 1935, 312, 19.5, pcie(32), (8, 0)),
    _gpu("H100-80G", 81559, 3350, 989, 67, nvlink(450), (9, 0)),
    _gpu("H100-PCIe-80G", 81559, 2000, 756, 51, pcie(64), (9, 0)),
    _gpu("H100-NVL-94G", 95830, 3900, 835, 60, nvlink(300), (9, 0), bridged=2),
    _gpu("H20-96G", 97871, 4000, 148, 44, nvlink(450), (9, 0)),
    _gpu("H200-141G", 143771, 4800, 989, 67, nvlink(450), (9, 0)),
    _gpu("H200-NVL-141G", 143771, 4800, 835, 60, nvlink(450), (9, 0), bridged=4),
    _gpu("GH200-96G", 97871, 4000, 989, 67, nvlink(450), (9, 0)),
    _gpu("B200-180G", 183359, 8000, 2250, 80, nvlink(900), (10, 0), fp4=9000),
    _gpu("GB200-186G", 189471, 8000, 2500, 80, nvlink(900), (10, 0), fp4=10000),
    _gpu("B300-270G", 275040, 8000, 2250, 75, nvlink(900), (10, 3), fp4=14000),
    _gpu("L4-24G", 23034, 300, 121, 30.3, pcie(32), (8, 9)),
    _gpu("L20-48G", 46068, 864, 119.5, 59.8, pcie(32), (8, 9)),
    _gpu("L40S-48G", 46068, 864, 362, 91.6, pcie(32), (8, 9)),
    _gpu("L40-48G", 46068, 864, 181, 90.5, pcie(32), (8, 9)),
    _gpu("A10G-24G", 23028, 600, 70, 35, pcie(32), (8, 6)),
    _gpu("A10-24G", 23028, 600, 125, 31.2, pcie(32), (8, 6)),
    _gpu("A40-48G", 46068, 696, 149.7, 37.4, pcie(32), (8, 6)),
    _gpu("RTX-A6000-48G", 49140, 768, 154.8, 38.7, pcie(32), (8, 6)),
    _gpu("RTX-6000-Ada-48G", 49140, 960, 364, 91.1, pcie(32), (8, 9)),
    _gpu("RTX-3090-24G", 24576, 936, 71, 35.6, pcie(32), (8, 6)),
    _gpu("RTX-4090-24G", 24564, 1008, 165, 82.6, pcie(32), (8, 9)),
    _gpu("RTX-5090-32G", 32607, 1792, 209.5, 104.8, pcie(64), (12, 0), fp4=1676),
    _gpu("RTX-PRO-6000-Blackwell-96G", 97887, 1792, 503.8, 126, pcie(64), (12, 0), fp4=2015),
)
"""Figures of NVIDIA's data sheets (RTX 3090, 4090, 5090 and PRO 6000 Workstation Edition: of the white papers of their
architectures): bandwidth in GB/s, dense TFLOPS in 16 bits with float32 accumulation, in float32 and in 4-bit floats,
and the link in GB/s in one direction. The memory is in MiB, as nvidia-smi shows it. A name without its memory means the
last of that name."""

NETWORK_GIGABYTES = 50.0
"""GB/s of the network for each device, unless it is given: 400 Gb/s InfiniBand."""
_PCIE_GIGABYTES = 32.0, 64.0
"""PCIe 4.0 x16, and 5.0 x16, which GPUs have from compute capability 9.0 on."""
_NOT_KNOWN = "A100"
"""GPU whose figures stand in for an unknown GPU's."""
_COMMON_WORDS = r"NVIDIA|TESLA|GEFORCE|RTX|SXM\d*|HBM\w*|GENERATION|WORKSTATION|EDITION|AC"
"""Words of a GPU's name that do not distinguish it from others in `GPUS`."""
_MEASURED_BYTES = 256 << 20, 32 << 20
"""Bytes of memory that are read to measure its bandwidth: the minimum, and the number for each core. Caches are
smaller."""
_SLICES, _ROUNDS = 16, 4
_CLOCK = 5e9
"""Maximum clock of processors in Hz, unless the host reports more: /proc/cpuinfo has the present or base clock."""
_CYCLE_BYTES = 64
"""Maximum bytes that a core reads from its caches in a cycle: a cache line."""
_SYNTAX = "[COUNTx]NAME, as in 8xH100-80G, or [COUNTx]NAME:GB,GB/s,TFLOPS[,LINK GB/s] for another NVIDIA GPU"


@dataclass(frozen=True, kw_only=True)
class Machine:
    """`nodes` equal hosts with `count` equal devices each."""

    device: Device
    count: int
    kind: Literal["cpu", "cuda"]
    nodes: int = 1
    network: Link = field(default_factory=lambda: network(NETWORK_GIGABYTES))
    is_described: bool = False
    """It need not be this machine."""

    def devices(self, options: EngineOptions) -> Devices:
        """Return a host's devices for the ranks of a layout. Raises `ConfigError` if the layout is not possible."""
        groups = parallel_config.local_group_sizes(options)
        if not self.is_described:
            return devices.find(self.kind, groups)
        order = tuple(range(sum(groups))) if sum(groups) <= self.count else ()
        link = LinkType.NVLINK if self.device.link.name == "NVLink" else LinkType.PCIE
        links = ((link,) * self.count,) * self.count
        return Devices(
            kind=self.kind,
            count=self.count,
            memory=self.device.memory,
            order=order,
            links=links,
            capability=self.device.capability or (),
        )

    @property
    def achieved(self) -> Achieved:
        """What engines reach of the peak figures."""
        return achieved.GPU if self.kind == "cuda" else achieved.CPU

    @property
    def text(self) -> str:
        """One line about the machine."""
        device = self.device
        name = device.name if self.count == 1 else f"{self.count} × {device.name}"
        parts = [
            f"{name}{f' on each of {self.nodes} hosts' * (self.nodes > 1)}: {device.memory / (1 << 30):.1f} GiB free "
            f"at {device.bandwidth / GIGA:,.0f} GB/s{' (measured now)' * (self.kind == 'cpu')}",
            "at most " * (self.kind == "cpu")
            + " / ".join(f"{flops / TERA:,.4g}" for flops in device.flops.values())
            + f" TFLOPS in {' / '.join(map(str, device.flops))} bits",
        ]
        if self.kind == "cuda" and self.count > 1:
            parts.append(f"{device.link.name} {device.link.bandwidth / GIGA:,.0f} GB/s")
        if self.nodes > 1:
            parts.append(f"network {self.network.bandwidth / GIGA:,.4g} GB/s for each device")
        return ", ".join(parts)


def describe(gpus: str, nodes: int, network_gigabytes: float) -> Machine:
    """Return the machine that --gpus and --nodes describe. Raises `ConfigError`."""
    match = re.fullmatch(r"(?:(\d+)\s*[xX×*])?\s*([A-Za-z][\w .-]*?)(?::([\d.,]+))?", gpus.strip())
    if match is None or match[1] == "0":
        raise ConfigError(f"--gpus {gpus}: expected {_SYNTAX}")
    count, name, figures = int(match[1] or 1), match[2], match[3]
    if figures is None:
        if (device := _find(name)) is None:
            raise ConfigError(
                f"--gpus {gpus}: {name} is not known; use {_SYNTAX}; known are {', '.join(each.name for each in GPUS)}"
            )
    else:
        try:
            memory, bandwidth, tflops, *link = map(float, figures.split(","))
            if min(memory, bandwidth, tflops, *link) <= 0 or len(link) > 1:
                raise ValueError
        except ValueError:
            raise ConfigError(f"--gpus {gpus}: expected {_SYNTAX}, with numbers above 0") from None
        device = Device(
            name=name,
            memory=int(memory * GIGA),
            bandwidth=bandwidth * GIGA,
            flops=_flops(tflops, tflops, FP8_CAPABILITY, 4 * tflops),
            link=pcie(*link or _PCIE_GIGABYTES[:1]),
        )
    if count > device.bridged > 0:
        device = _without_nvlink(device)
    return Machine(
        device=device,
        count=count,
        kind="cuda",
        nodes=nodes,
        network=network(network_gigabytes),
        is_described=True,
    )


def _find(name: str) -> Device | None:
    """Return a GPU by its name in `GPUS`, with or without its memory, or by NVML's name for it.

    NVML's names are such as NVIDIA H100 80GB HBM3, NVIDIA A100-SXM4-40GB and NVIDIA GeForce RTX 4090. Any other word
    means another GPU, or a part of one: NVIDIA H20-3e, NVIDIA GeForce RTX 3090 Ti, NVIDIA H100 80GB HBM3 MIG 1g.10gb.
    """
    words, memory = _words(name)
    fits = [(each, *_words(each.name)) for each in GPUS]
    found = [each for each, its_words, its_memory in fits if its_words == words and memory in (None, its_memory)]
    return found[-1] if found else None


def _words(name: str) -> tuple[frozenset[str], str | None]:
    """The words that distinguish a GPU, and its memory, as in 80G, if the name has it."""
    text = re.sub(r"\bRTX(?=\d)", "", re.sub(r"GH200[\s_-]480GB", "GH200", name.upper()))  # 480 GB of Grace
    words = [word for word in re.split(r"[\s_-]+", text) if not re.fullmatch(_COMMON_WORDS, word)]
    memory = [word for word in words if re.fullmatch(r"\d+GB?", word)]
    return frozenset(words) - {*memory}, memory[0].removesuffix("B") if memory else None


def _without_nvlink(device: Device) -> Device:
    return replace(device, link=pcie(_PCIE_GIGABYTES[(device.capability or (0, 0)) >= (9, 0)]))


def this_machine(options: EngineOptions, nodes: int, network_gigabytes: float) -> Machine:
    """Return this host's visible GPUs, or its processors; other hosts are like it.

    Logs a warning for a GPU whose figures are not known, and uses the figures of `_NOT_KNOWN` for it.
    """
    between = network(network_gigabytes)
    if options.device != "cpu" and (memory := devices.free_gpu_memory()):
        slowest = min(map(_gpu_of, {*devices.gpu_names()}), key=lambda each: each.bandwidth)
        links = devices.find("cuda", ()).links
        pairs = [link for number, row in enumerate(links) for link in row[:number]]
        if min(pairs, default=LinkType.NVLINK) < LinkType.NVLINK and slowest.link.name == "NVLink":
            slowest = _without_nvlink(slowest)
        device = replace(slowest, memory=min(memory))
        return Machine(device=device, count=len(memory), kind="cuda", nodes=nodes, network=between)
    if options.device == "cuda":
        devices.find("cuda", ())  # raises
    return Machine(device=_processors(), count=1, kind="cpu", nodes=nodes, network=between)


def _gpu_of(name: str) -> Device:
    if (device := _find(name)) is not None:
        return device
    device = _find(_NOT_KNOWN)
    assert device is not None
    logger.warning(
        "the bandwidth and FLOPS of the GPU %s are not known: layouts are compared with those of %s, and the tokens/s "
        "and TTFT are not bounds; quire plan --gpus takes the figures of its data sheet",
        name,
        device.name,
    )
    return replace(device, name=f"{name} (with the figures of {device.name})", capability=None)


def _processors() -> Device:
    """The processors of this host. Ranks are not bound to cores, so that they share all of them.

    The bandwidth is measured. Peak FLOPS, and the bandwidth of caches, follow from the highest clock and the
    instruction set.
    """
    lines = [line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines()]
    facts = {name.strip(): value.strip() for name, _, value in lines}
    flags = {*facts.get("flags", facts.get("Features", "")).split()}
    cores, memory = len(os.sched_getaffinity(0)), devices.free_host_memory()
    maximum = Path("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq")
    clock = max(_CLOCK, float(maximum.read_text()) * 1e3 if maximum.exists() else 0.0)
    # Two fused multiply-adds a cycle, of 16, 8 or 4 float32.
    vector = 64 if "avx512f" in flags else 32 if "avx2" in flags else 16
    peak = cores * clock * vector
    half = 16 if "amx_bf16" in flags else 2 if flags & {"avx512_bf16", "bf16"} else 1
    byte = 32 if "amx_int8" in flags else 4 if flags & {"avx512_vnni", "avx_vnni", "asimddp"} else 2
    bandwidth = _measure_bandwidth(cores, min(max(_MEASURED_BYTES[0], cores * _MEASURED_BYTES[1]), memory // 4))
    return Device(
        name=f"{facts.get('model name', os.uname().machine)}, {cores} cores",
        memory=memory,
        bandwidth=bandwidth,
        flops={32: peak, 16: peak * half, 8: peak * byte},
        link=Link("shared memory", bandwidth, Latency(2e-6, 0.0)),
        cache=_cache_bytes(),
        cache_bandwidth=cores * clock * _CYCLE_BYTES,
    )


def _cache_bytes() -> int:
    """Bytes of the largest cache of the first processor; 0 if it is not reported."""
    found = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    units = {"K": 1 << 10, "M": 1 << 20}
    return max((int(text[:-1]) * units[text[-1]] for text in (each.read_text().strip() for each in found)), default=0)


def _measure_bandwidth(cores: int, size: int) -> float:
    """Return the bytes per second at which all cores together read a slice of `size` bytes, at best.

    Slices are short, so that other processes do not run during all of them.
    """
    import numpy as np  # slow to import

    values = max(1, size // cores // _SLICES // 8)
    best = 0.0
    with ThreadPoolExecutor(cores) as pool:
        parts = list(pool.map(np.ones, [(_SLICES, values)] * cores))
        for number in [*range(_SLICES)] * _ROUNDS:
            begun = time.perf_counter()
            list(pool.map(np.max, [part[number] for part in parts]))
            best = max(best, 8 * values * cores / (time.perf_counter() - begun))
    return best
