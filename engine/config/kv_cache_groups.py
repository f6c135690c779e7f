"""Groups of layers that share a block table, and the size of a block on a rank. No torch.

Layers with full attention keep other blocks than layers with a sliding window. The layers of each kind are divided into
groups, and each request has one block table per group. All groups use one pool of equal blocks: a block holds
`block_size` tokens for the layers of *one* group. In memory each layer of a group uses a plane; the groups share the
planes, because no two groups have a block in common.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from quire.engine.config.engine_config import KVCacheGroup
from quire.engine.models.model_spec import ModelSpec

_MAX_OVERHEAD = 1.1
"""Factor by which memory may exceed the minimum to have fewer groups, because each group needs a block table."""


class KVCacheShape(NamedTuple):
    """Shape of the cached state of one token in one layer, on a rank."""

    num_tensors: int
    """2: keys and values; 1: a single tensor for both."""
    num_heads: int
    head_dim: int
    """Values per head and tensor."""


class KVCacheSpec(NamedTuple):
    """Cache shape and window of a layer."""

    shape: KVCacheShape
    window: int | None
    """Number of keys that a query sees, including its own; None: all."""


class LayerPlacement(NamedTuple):
    """Location of a layer's cache: its group, and the index among the planes of its shape."""

    group: int
    plane: int


def cache_specs(arch: ModelSpec, tp: int, max_model_len: int) -> list[KVCacheSpec]:
    """Return the spec of each layer on one of `tp` ranks. A window of at least `max_model_len` becomes None."""
    layers = [(KVCacheShape(*layer.attention.kv_shape(tp)), layer.attention.window) for layer in arch.layers]
    return [KVCacheSpec(shape, window if window and window < max_model_len else None) for shape, window in layers]


def group_layers(
    specs: Sequence[KVCacheSpec], stages: Sequence[range], max_blocks: Callable[[KVCacheGroup], int]
) -> tuple[KVCacheGroup, ...]:
    """Divide the layers of each kind into groups. All stages have the same groups, each with its own layers.

    `max_blocks` returns the number of blocks of a request in a group. Of the divisions with nearly minimal memory per
    request, the one with the fewest groups is chosen.
    """
    windows = sorted({spec.window for spec in specs}, key=lambda window: window or 0)
    counts = [sum(spec.window == window for spec in specs) for window in windows]
    candidates, costs = [], []
    least = 1 if len(windows) > 1 else max(counts)  # layers of one kind need no more than one group
    for size in range(max(counts), least - 1, -1):
        numbers = [-(-count // size) for count in counts]
        groups = tuple(
            KVCacheGroup(
                window=window, layers=tuple(_group_slice(specs, stage, window, index, number) for stage in stages)
            )
            for window, number in zip(windows, numbers, strict=True)
            for index in range(number)
        )
        candidates.append(groups)
        block = max(
            sum(math.prod(shape) * planes for shape, planes in count_planes(specs, groups, stage).items())
            for stage in range(len(stages))
        )
        costs.append(block * sum(map(max_blocks, groups)))
    return next(groups for groups, cost in zip(candidates, costs, strict=True) if cost <= _MAX_OVERHEAD * min(costs))


def _group_slice(
    specs: Sequence[KVCacheSpec], stage: range, window: int | None, index: int, number: int
) -> tuple[int, ...]:
    """Return the layers of group `index` of the `number` groups of the stage's layers with this window."""
    layers = [layer for layer in stage if specs[layer].window == window]
    return tuple(layers[len(layers) * index // number : len(layers) * (index + 1) // number])


def count_planes(specs: Sequence[KVCacheSpec], groups: Iterable[KVCacheGroup], stage: int) -> Counter[KVCacheShape]:
    """Count the planes of each shape on the ranks of a stage: the maximum over the groups."""
    planes: Counter[KVCacheShape] = Counter()
    for group in groups:
        planes |= Counter(specs[layer].shape for layer in group.layers[stage])
    return planes


def place_layers(specs: Sequence[KVCacheSpec], groups: Iterable[KVCacheGroup], stage: int) -> dict[int, LayerPlacement]:
    """Return the cache location of each layer of a stage."""
    placements = {}
    for number, group in enumerate(groups):
        used: Counter[KVCacheShape] = Counter()
        for layer in group.layers[stage]:
            shape = specs[layer].shape
            placements[layer] = LayerPlacement(number, used[shape])
            used[shape] += 1
    return placements
