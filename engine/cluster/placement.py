"""Placement of ranks on the hosts of a cluster: each stage on a single host if possible. Pure functions; no Ray."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from quire.engine.protocol.errors import ConfigError


@dataclass(frozen=True)
class ClusterNode:
    """A host with `total` devices of one kind; `free` of them are unused."""

    id: str
    address: str
    free: int
    total: int


@dataclass(frozen=True)
class NodeShare:
    """The ranks of one host."""

    node: ClusterNode
    ranks: range


def place(
    nodes: Sequence[ClusterNode], tp: int, pp: int, unit: str, owner: str = "the Ray cluster", replicas: int = 1
) -> list[list[NodeShare]]:
    """Assign the `tp × pp` ranks of each replica to as few hosts as possible, in order, with each stage on one host.

    A stage is split over hosts only if no host, even an unused one, has `tp` devices. Raises `ConfigError` with the
    devices of each host; `unit` names a rank's device (GPU, CPU), and `owner` the provider of the hosts.
    """
    ranks, needed = tp * pp, tp * pp * replicas
    flags = f"--tensor-parallel-size {tp} × --pipeline-parallel-size {pp}"
    flags += f" × --data-parallel-size {replicas}" * (replicas > 1)
    total, free = sum(node.total for node in nodes), sum(node.free for node in nodes)
    if total < needed:
        raise ConfigError(
            f"{flags} needs {_count(needed, unit)}; {owner} has {total}: {_nodes_text(nodes, unit)}; "
            "use fewer ranks, or add nodes"
        )
    if free < needed:
        raise ConfigError(
            f"{flags} needs {_count(needed, unit)}; {owner} has {total}, but only {free} are free: "
            f"{_nodes_text(nodes, unit)}; end what uses them (ray status)"
        )
    left = sorted(nodes, key=lambda node: -node.free)  # stable: the given order decides among equals
    is_whole = max(node.total for node in nodes) >= tp
    piece = tp if is_whole else 1
    placed: list[list[NodeShare]] = []
    for _ in range(replicas):
        shares: list[NodeShare] = []
        start = 0
        while start < ranks:
            candidates = [node for node in left if node.free >= piece and node not in [each.node for each in shares]]
            if not candidates:
                raise ConfigError(_misplaced_text(nodes, tp, pp, replicas, start // tp, unit, owner))
            # The last host is the smallest one that suffices, so that larger ones stay free.
            enough = [node for node in candidates if node.free >= ranks - start]
            node = min(enough, key=lambda node: node.free) if enough else candidates[0]
            count = min(node.free // piece * piece, ranks - start)
            shares.append(NodeShare(node, range(start, start + count)))
            start += count
        placed.append(shares)
        used = {share.node.id: len(share.ranks) for share in shares}
        left = [replace(node, free=node.free - used.get(node.id, 0)) for node in left]
        left.sort(key=lambda node: -node.free)
    return placed


def split_stages(shares: Sequence[NodeShare], tp: int) -> list[int]:
    """Return the stages whose ranks are on several hosts."""
    return sorted(
        {share.ranks.start // tp for share in shares if share.ranks.start % tp}
        | {share.ranks.stop // tp for share in shares if share.ranks.stop % tp}
    )


def _misplaced_text(
    nodes: Sequence[ClusterNode], tp: int, pp: int, replicas: int, stage: int, unit: str, owner: str
) -> str:
    """Return the error for a stage that fits on no host although there are enough devices in total."""
    needed = tp * pp * replicas
    fitting = [
        size for size in range(tp - 1, 0, -1) if tp % size == 0 and sum(n.free // size for n in nodes) * size >= needed
    ]
    return (
        f"--tensor-parallel-size {tp} keeps the {tp} ranks of a stage on one node, and stage {stage} of {pp} finds "
        f"none with {_count(tp, unit)} left; {owner} has {_nodes_text(nodes, unit)}; use "
        f"--tensor-parallel-size {fitting[0]} --pipeline-parallel-size {tp * pp // fitting[0]}, or free {unit}s on "
        "one node"
    )


def _nodes_text(nodes: Sequence[ClusterNode], unit: str) -> str:
    if not nodes:
        return "no node is alive"
    return ", ".join(
        f"{_count(node.total, unit)} on {node.address}"
        if node.free == node.total
        else f"{node.free} of {_count(node.total, unit)} on {node.address}"
        for node in nodes
    )


def _count(number: int, unit: str) -> str:
    return f"{number} {unit}{'s' * (number != 1)}"
