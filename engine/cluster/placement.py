"""Which host of a cluster has which ranks: the stages whole on a host each, where they can be. Pure; no Ray here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.engine.protocol.errors import ConfigError


@dataclass(frozen=True)
class ClusterNode:
    """A host with devices of one kind; `free` of its `total` are nobody's yet."""

    id: str
    address: str
    free: int
    total: int


@dataclass(frozen=True)
class NodeShare:
    """The ranks of one host."""

    node: ClusterNode
    ranks: range


def place(nodes: Sequence[ClusterNode], tp: int, pp: int, unit: str, owner: str = "the Ray cluster") -> list[NodeShare]:
    """Share `tp × pp` ranks out to few hosts, in order: each stage of `tp` ranks is whole on one of them.

    A stage is cut only where no host, even an empty one, could hold it. Raises `ConfigError`, with what there is on
    each host; `unit` says what a rank takes (GPU, CPU), `owner` who has it.
    """
    needed = tp * pp
    asked = f"--tensor-parallel-size {tp} × --pipeline-parallel-size {pp}"
    total, free = sum(node.total for node in nodes), sum(node.free for node in nodes)
    if total < needed:
        raise ConfigError(
            f"{asked} needs {_count(needed, unit)}; {owner} has {total}: {_each(nodes, unit)}; "
            "use fewer ranks, or add nodes"
        )
    if free < needed:
        raise ConfigError(
            f"{asked} needs {_count(needed, unit)}; {owner} has {total}, but only {free} are free: "
            f"{_each(nodes, unit)}; end what uses them (ray status)"
        )
    largest = sorted(nodes, key=lambda node: -node.free)  # stable: their order decides among equals
    held = max(node.total for node in nodes) >= tp
    piece = tp if held else 1
    shares: list[NodeShare] = []
    start = 0
    while start < needed:
        left = [node for node in largest if node.free >= piece and node not in [share.node for share in shares]]
        if not left:
            raise ConfigError(_misplaced(nodes, tp, pp, start // tp, unit, owner))
        # The last hosts are the smallest that will do, so that large ones are left to others.
        enough = [node for node in left if node.free >= needed - start]
        node = min(enough, key=lambda node: node.free) if enough else left[0]
        count = min(node.free // piece * piece, needed - start)
        shares.append(NodeShare(node, range(start, start + count)))
        start += count
    return shares


def cut_stages(shares: Sequence[NodeShare], tp: int) -> list[int]:
    """Stages whose ranks are on several hosts."""
    return sorted(
        {share.ranks.start // tp for share in shares if share.ranks.start % tp}
        | {share.ranks.stop // tp for share in shares if share.ranks.stop % tp}
    )


def _misplaced(nodes: Sequence[ClusterNode], tp: int, pp: int, stage: int, unit: str, owner: str) -> str:
    """Enough devices, and a stage that finds no host. A smaller --tensor-parallel-size that fits is the remedy."""
    fitting = [
        size for size in range(tp - 1, 0, -1) if tp % size == 0 and sum(n.free // size for n in nodes) * size >= tp * pp
    ]
    return (
        f"--tensor-parallel-size {tp} keeps the {tp} ranks of a stage on one node, and stage {stage} of {pp} finds "
        f"none with {_count(tp, unit)} left; {owner} has {_each(nodes, unit)}; use --tensor-parallel-size {fitting[0]} "
        f"--pipeline-parallel-size {tp * pp // fitting[0]}, or free {unit}s on one node"
    )


def _each(nodes: Sequence[ClusterNode], unit: str) -> str:
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
