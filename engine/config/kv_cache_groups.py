"""Layers in groups that share a block table, and what a block takes on a rank. No torch here.

Layers that keep all tokens need other blocks than those that see only the last ones, a window. So layers of one kind
are cut into groups, each with a block table of its own for every request, and one pool of equal blocks serves them all:
a block holds `block_size` tokens for the layers of *one* group. In memory the layers of a group lie in planes, and the
groups share the planes, as no two have a block in common.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from quire.engine.config.options import CacheGroup
from quire.engine.models.model_spec import ModelSpec

_SLACK = 1.1
"""So much more memory may be taken to have fewer groups, as each is one more block table to keep."""


class KVCacheShape(NamedTuple):
    """What a rank keeps of a token for a layer."""

    sides: int
    """Keys and values, or one that is both."""
    heads: int
    numbers: int
    """Of each head and side."""


class KVCacheSpec(NamedTuple):
    """What a layer keeps, and for how long."""

    shape: KVCacheShape
    window: int | None
    """Keys that a query sees, its own included; None: all."""


class LayerPlacement(NamedTuple):
    """Where a layer's cache is: its group, and which of the planes of its shape."""

    group: int
    plane: int


def cache_specs(arch: ModelSpec, tp: int, max_model_len: int) -> list[KVCacheSpec]:
    """What each layer keeps on one of `tp` ranks. A window that no request outgrows is none."""
    layers = [(KVCacheShape(*layer.attention.kv_shape(tp)), layer.attention.window) for layer in arch.layers]
    return [KVCacheSpec(shape, window if window and window < max_model_len else None) for shape, window in layers]


def group_layers(
    specs: Sequence[KVCacheSpec], stages: Sequence[range], most_blocks: Callable[[CacheGroup], int]
) -> tuple[CacheGroup, ...]:
    """Cut the layers of each kind into groups; the stages have the same groups, each its own layers in them.

    `most_blocks` says how many blocks a request takes in a group. Of the cuts with which it takes hardly more memory
    than it must, the one with the fewest groups.
    """
    windows = sorted({spec.window for spec in specs}, key=lambda window: window or 0)
    counts = [sum(spec.window == window for spec in specs) for window in windows]
    cuts, costs = [], []
    for size in range(max(counts), 0, -1):
        numbers = [-(-count // size) for count in counts]
        groups = tuple(
            CacheGroup(window=window, layers=tuple(_share(specs, stage, window, at, number) for stage in stages))
            for window, number in zip(windows, numbers, strict=True)
            for at in range(number)
        )
        cuts.append(groups)
        block = max(
            sum(math.prod(shape) * planes for shape, planes in count_planes(specs, groups, stage).items())
            for stage in range(len(stages))
        )
        costs.append(block * sum(map(most_blocks, groups)))
    return next(groups for groups, cost in zip(cuts, costs, strict=True) if cost <= _SLACK * min(costs))


def _share(specs: Sequence[KVCacheSpec], stage: range, window: int | None, at: int, number: int) -> tuple[int, ...]:
    """The layers of group `at`, of `number` groups that the stage's layers with this window are cut into."""
    mine = [layer for layer in stage if specs[layer].window == window]
    return tuple(mine[len(mine) * at // number : len(mine) * (at + 1) // number])


def count_planes(specs: Sequence[KVCacheSpec], groups: Iterable[CacheGroup], stage: int) -> Counter[KVCacheShape]:
    """Planes of each shape on the ranks of a stage: as many as the group with most layers of that shape needs."""
    planes: Counter[KVCacheShape] = Counter()
    for group in groups:
        planes |= Counter(specs[layer].shape for layer in group.layers[stage])
    return planes


def place_layers(specs: Sequence[KVCacheSpec], groups: Iterable[CacheGroup], stage: int) -> dict[int, LayerPlacement]:
    """Where each layer of a stage finds its cache."""
    places = {}
    for number, group in enumerate(groups):
        taken: Counter[KVCacheShape] = Counter()
        for layer in group.layers[stage]:
            shape = specs[layer].shape
            places[layer] = LayerPlacement(number, taken[shape])
            taken[shape] += 1
    return places
