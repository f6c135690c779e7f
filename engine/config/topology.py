"""The links between the GPUs of a host, and the assignment of GPUs to ranks. No torch.

NVML reports the links (`nvmlDeviceGetP2PStatus`, `nvmlDeviceGetTopologyCommonAncestor`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import combinations
from pathlib import Path
from typing import Any


class LinkType(IntEnum):
    """The link between two devices; a greater value is faster."""

    UNKNOWN = 0
    SOCKETS = 1
    PCIE = 2
    SWITCH = 3
    NVLINK = 4

    @property
    def text(self) -> str:
        return _TEXTS[self]


_TEXTS = {
    LinkType.UNKNOWN: "an unknown link",
    LinkType.SOCKETS: "PCIe across CPU sockets",
    LinkType.PCIE: "PCIe through the host bridge",
    LinkType.SWITCH: "PCIe switches",
    LinkType.NVLINK: "NVLink",
}

Links = tuple[tuple[LinkType, ...], ...]
"""`[devices][devices]`; the diagonal is not used."""

_INFINIBAND = Path("/sys/class/infiniband")


@dataclass(frozen=True)
class SlowestLinks:
    """The slowest links between the devices of this host's ranks; None: not used or not known.

    `network` is the fast network between hosts, if this host has one.
    """

    tensor: LinkType | None = None
    pipeline: LinkType | None = None
    network: str | None = None


def read(handles: Sequence[Any]) -> Links:
    """Return the links between the devices of these NVML handles. NVML must be initialized."""
    return tuple(
        tuple(_link(one, other) if one is not other else LinkType.NVLINK for other in handles) for one in handles
    )


def _link(one: Any, other: Any) -> LinkType:
    import pynvml

    try:
        # Also true for pairs that are connected by NVSwitches.
        if pynvml.nvmlDeviceGetP2PStatus(one, other, pynvml.NVML_P2P_CAPS_INDEX_NVLINK) == pynvml.NVML_P2P_STATUS_OK:
            return LinkType.NVLINK
    except pynvml.NVMLError:
        pass
    try:
        ancestor = pynvml.nvmlDeviceGetTopologyCommonAncestor(one, other)
    except pynvml.NVMLError:
        return LinkType.UNKNOWN
    if ancestor <= pynvml.NVML_TOPOLOGY_MULTIPLE:
        return LinkType.SWITCH
    return LinkType.PCIE if ancestor <= pynvml.NVML_TOPOLOGY_NODE else LinkType.SOCKETS


def assign_devices(links: Links, groups: Sequence[int]) -> tuple[int, ...]:
    """Return the device of each rank, for groups of ranks of these sizes.

    Larger groups choose first. A group gets the devices whose slowest link is fastest; among equal choices, the devices
    with the slowest links to the remaining devices. So slow links are between groups. Needs at least `sum(groups)`
    devices.
    """
    remaining = list(range(len(links)))
    chosen: dict[int, tuple[int, ...]] = {}
    for number in sorted(range(len(groups)), key=lambda number: -groups[number]):
        best = min(
            combinations(remaining, groups[number]), key=lambda devices: _assignment_cost(links, devices, remaining)
        )
        chosen[number] = best
        remaining = [device for device in remaining if device not in best]
    return tuple(device for number in range(len(groups)) for device in chosen[number])


def _assignment_cost(
    links: Links, devices: tuple[int, ...], remaining: Sequence[int]
) -> tuple[int, int, int, tuple[int, ...]]:
    inside = [links[one][other] for one, other in combinations(devices, 2)]
    outside = [links[one][other] for one in devices for other in remaining if other not in devices]
    return -min(inside, default=0), -sum(inside), sum(outside), devices


def slowest_links(links: Links, order: Sequence[int], groups: Sequence[int], stages: int) -> SlowestLinks:
    """Return the slowest links between ranks with the devices `order`.

    `groups` are the sizes of the groups of ranks that share layers; `stages` consecutive groups make a replica.
    """
    ends = [sum(groups[: number + 1]) for number in range(len(groups))]
    parts = [order[end - size : end] for size, end in zip(groups, ends, strict=True)]
    inside = [links[one][other] for part in parts for one, other in combinations(part, 2)]
    between = [
        links[one][other]
        for number in range(1, len(parts))
        if number % stages
        for one, other in zip(parts[number - 1], parts[number], strict=False)
    ]
    return SlowestLinks(min(inside, default=None), min(between, default=None))


def fast_network(folder: Path = _INFINIBAND) -> str | None:
    """Return the name and rate of the fastest active RDMA port (InfiniBand, RoCE)."""
    ports: list[tuple[float, str]] = []
    for port in folder.glob("*/ports/*"):
        try:
            state, rate = ((port / name).read_text().strip() for name in ("state", "rate"))
        except OSError:
            continue
        if state.endswith("ACTIVE"):
            ports.append((float(rate.split()[0]), f"{port.parent.parent.name} ({' '.join(rate.split()[:2])})"))
    return max(ports)[1] if ports else None
