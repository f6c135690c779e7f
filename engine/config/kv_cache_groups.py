"""Groups of layers that share a block table, and the size of a block on a rank. No torch.

Layers with full attention keep other blocks than layers with a sliding window. The layers of each kind are divided into
groups, and each request has one block table per group. All groups use one pool of equal blocks: a block holds
`block_size` tokens for the layers of *one* group. In memory each layer of a group uses a plane; the groups share the
planes, because no two groups have a block in common. A layer that reads the keys and values of another keeps none.

A layer with a recurrent state keeps one state for each request, in the memory of several blocks. Where a model has such
layers, blocks are allocated in pages that hold a state each. A layer may have keys and values, a state, both or
neither, and is in as many groups.

A layer with compressed attention is in a group for the tokens of its window, whose blocks take a page each, and in one
for its entries; a block has few of them. Both use the layer's own plane. A plane has room for an entry of every
`tokens_per_row` tokens, which divides the ratios of all layers: for layers with larger ratios, most of the plane is not
used. That way all groups have blocks of as many tokens. In DeepSeek-V4, with ratios 4 and 128, entries take 1.8 times
their own bytes.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import NamedTuple

from quire.engine.architecture.attention_spec import CompressedAttentionSpec
from quire.engine.architecture.draft_head_spec import DraftHeadSpec
from quire.engine.architecture.model_spec import ModelSpec
from quire.engine.config.engine_config import (
    DTYPE_BYTES,
    EngineConfig,
    KVCacheGroup,
    ModelConfig,
    ParallelConfig,
    SpeculativeConfig,
)

SCALE_BYTES = 4
"""Bytes of the scale of a row in a quantized cache."""
_MAX_OVERHEAD = 1.1
"""Factor by which memory may exceed the minimum to have fewer groups, because each group needs a block table."""


class KVCacheShape(NamedTuple):
    """Shape of the cached state of one token in one layer, on a rank."""

    num_tensors: int
    """2: keys and values; 1: a single tensor for both."""
    num_heads: int
    head_dim: int
    """Values per head and tensor."""
    tokens_per_row: int = 1
    """Tokens of a block for each row that it has on a rank. In a plane for entries they share the row; with decode
    context parallelism, other ranks have the rows of the others."""


class KVCacheSpec(NamedTuple):
    """Cache shape and window of a layer's keys and values, or of its state."""

    shape: KVCacheShape
    """For a recurrent state, the shape of the memory that it shares."""
    window: int | None
    """Number of keys that a query sees, including its own; None: all."""
    state_bytes: int = 0
    """Size of a recurrent state; 0: these are keys and values."""
    index_shape: KVCacheShape | None = None
    """Shape of a token's additional entry for sparse attention, in a plane of its own; None: there is none."""
    page_row: int = 0
    """Values of a token whose block takes a page of the plane; 0: it takes a block."""

    @property
    def shapes(self) -> tuple[KVCacheShape, ...]:
        """The shapes of the planes."""
        return (self.shape,) if self.index_shape is None else (self.shape, self.index_shape)

    @property
    def kind(self) -> tuple[bool, bool, int]:
        """The properties that the layers of a group have in common."""
        return self.state_bytes > 0, self.page_row > 0, self.window or 0


class LayerPlacement(NamedTuple):
    """Location of a layer's keys and values, or of its state: its group, and its plane among all planes of its
    shape."""

    group: int
    shape: KVCacheShape
    index_shape: KVCacheShape | None
    plane: int
    index_plane: int | None = None
    """The plane of the layer's indexer, among the planes of `index_shape`."""


LayerSpecs = Sequence[Sequence[KVCacheSpec]]
"""The specs of each layer: none or one for keys and values, and none or one for a state, or for a window in pages."""


def cache_specs(
    arch: ModelSpec,
    tp: int,
    max_model_len: int,
    dtype: str,
    block_size: int,
    beside: Sequence[ModelSpec] = (),
    context: int = 1,
) -> list[list[KVCacheSpec]]:
    """Return the cache specs of each layer on one of `tp` ranks, for a model of type `dtype`. A window of at least
    `max_model_len` becomes None, unless its blocks take pages. The models `beside` it use the same cache. `context`
    ranks divide the tokens."""
    if any(isinstance(layer.attention, CompressedAttentionSpec) for layer in arch.layers):
        return _compressed_specs(arch, (arch, *beside), block_size)
    shapes = [KVCacheShape(*each.attention.kv_shape(tp), context) for each in arch.layers if each.attention is not None]
    states = [each.state.state_bytes(tp, DTYPE_BYTES[dtype]) for each in arch.layers if each.state is not None]
    if shapes:
        ((shared, _),) = Counter(shapes).most_common(1)
    else:  # a block has the size of a state, or a part of it, as blocks have at least one byte for each of 16 tokens
        shared = KVCacheShape(1, 1, -(-max(states, default=1) // 64) * 4)
    # If heads read each other's output, their newest positions are computed again.
    again = arch.num_heads - 1 if isinstance(arch, DraftHeadSpec) and arch.is_chained else 0
    specs = []
    for layer in arch.layers:
        kept = []
        if layer.attention is not None and layer.kv_source is None:
            window = layer.attention.window and layer.attention.window + again
            shape = KVCacheShape(*layer.attention.kv_shape(tp), context)
            index = layer.attention.index_shape()
            window = window if window and window < max_model_len else None
            kept.append(KVCacheSpec(shape, window, index_shape=index and KVCacheShape(*index)))
        if layer.state is not None:
            kept.append(KVCacheSpec(shared, None, layer.state.state_bytes(tp, DTYPE_BYTES[dtype])))
        specs.append(kept)
    return specs


def cached_layers(
    model: ModelConfig, parallel: ParallelConfig, speculative: SpeculativeConfig | None, block_size: int
) -> tuple[list[list[KVCacheSpec]], list[range]]:
    """Return the cache specs of each layer on a rank, and the layers of each stage.

    A draft model's layers follow the target's, on the last stage.
    """
    models = [(model.architecture, parallel.tensor_parallel_size)]
    if speculative is not None and speculative.model is not None:
        models.append((speculative.model.architecture, speculative.tensor_parallel_size))
    architectures = [arch for arch, _ in models]
    specs = [
        kept
        for arch, tp in models
        for kept in cache_specs(
            arch, tp, model.max_model_len, model.dtype, block_size, architectures, parallel.context_size(tp)
        )
    ]
    return specs, [*parallel.stages[:-1], range(parallel.stages[-1].start, len(specs))]


def recent_layers(config: EngineConfig, stage: int) -> list[tuple[KVCacheShape, list[int]]]:
    """Return the layers of a stage that have the same `RecentBlocks.others`, and their shape.

    These are all layers of a shape that no other layer reads; a layer that others read has its own, which they need
    after the next layers have run.
    """
    specs, stages = cached_layers(config.model, config.parallel, config.scheduler.speculative, config.cache.block_size)
    sources, start = set[int](), 0
    for each in config.with_drafter:
        layers = each.model.architecture.layers
        sources |= {start + layer.kv_source for layer in layers if layer.kv_source is not None}
        start += len(layers)
    found = defaultdict[tuple[KVCacheShape, int | None], list[int]](list)
    for number in stages[stage]:
        for spec in specs[number]:
            if not spec.state_bytes:
                found[spec.shape, number if number in sources else None].append(number)
    return [(shape, numbers) for (shape, _), numbers in found.items()]


def _compressed_specs(arch: ModelSpec, models: Sequence[ModelSpec], block_size: int) -> list[list[KVCacheSpec]]:
    """The same for a model whose layers all have compressed attention. All such layers of the `models`, which include
    it, are in the same groups."""
    attentions = _compressed_attentions(arch)
    assert len(attentions) == arch.num_layers
    window, row = max(each.kept_window for each in _compressed_attentions(*models)), tokens_per_row(models, block_size)
    specs = []
    for attention in attentions:
        shape = KVCacheShape(*attention.kv_shape(1), row)
        kept = [KVCacheSpec(shape, window, page_row=attention.head_dim + attention.inputs_width)]
        if attention.compressor is not None:
            index = attention.index_shape()
            index_shape = index and KVCacheShape(*index, attention.compressor.ratio)
            kept.append(KVCacheSpec(shape, None, index_shape=index_shape))
        specs.append(kept)
    return specs


def tokens_per_row(models: Sequence[ModelSpec], block_size: int) -> int:
    """Number of tokens that share a row in the planes of layers with compressed attention, for models that use the same
    cache."""
    return math.gcd(block_size, *(each.compressor_ratio for each in _compressed_attentions(*models)))


def _compressed_attentions(*models: ModelSpec) -> list[CompressedAttentionSpec]:
    layers = (layer for arch in models for layer in arch.layers)
    return [layer.attention for layer in layers if isinstance(layer.attention, CompressedAttentionSpec)]


def count_blocks_per_page(specs: LayerSpecs, block_size: int, dtype: str) -> int:
    """Return the blocks of a cache of type `dtype` that take as much memory as the largest state, or as a block that
    takes a page; 1 if there are none."""
    sizes = (
        (spec.state_bytes or block_size * spec.page_row * DTYPE_BYTES[dtype], spec.shape)
        for kept in specs
        for spec in kept
        if spec.state_bytes or spec.page_row
    )
    return max((-(-size // block_bytes(shape, block_size, dtype)) for size, shape in sizes), default=1)


def block_bytes(shape: KVCacheShape, block_size: int, dtype: str) -> int:
    """Return the bytes of a block in a plane. Quantized rows have a scale each (int4: `quire.kernels.int4_kv`)."""
    if dtype == "int4":
        assert shape.num_tensors == 2
        return shape.num_heads * (block_size * shape.head_dim + 4 * shape.head_dim + 4 * block_size)
    row = shape.head_dim * DTYPE_BYTES[dtype] if dtype in DTYPE_BYTES else shape.head_dim + SCALE_BYTES
    return shape.num_tensors * shape.num_heads * (block_size // shape.tokens_per_row) * row


def group_layers(
    specs: LayerSpecs, stages: Sequence[range], max_blocks: Callable[[KVCacheGroup], int]
) -> tuple[KVCacheGroup, ...]:
    """Divide the layers of each kind into groups. All stages have the same groups, each with its own layers.

    `max_blocks` returns the number of blocks of a request in a group. Of the divisions with nearly minimal memory per
    request, the one with the fewest groups is chosen.
    """
    kinds = sorted({spec.kind for kept in specs for spec in kept})
    counts = [sum(spec.kind == kind for kept in specs for spec in kept) for kind in kinds]
    candidates, costs = [], []
    # Layers of one kind need at most one group; layers whose blocks take pages use one plane in both groups.
    least = max(counts) if len(kinds) == 1 or any(fills_pages for _, fills_pages, _ in kinds) else 1
    for size in range(max(counts), least - 1, -1):
        numbers = [-(-count // size) for count in counts]
        groups = tuple(
            KVCacheGroup(
                window=kind[2] or None,
                is_state=kind[0],
                fills_pages=kind[1],
                layers=tuple(_group_slice(specs, stage, kind, index, number) for stage in stages),
            )
            for kind, number in zip(kinds, numbers, strict=True)
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
    specs: LayerSpecs, stage: range, kind: tuple[bool, bool, int], index: int, number: int
) -> tuple[int, ...]:
    """Return the layers of group `index` of the `number` groups of the stage's layers of this kind."""
    layers = [layer for layer in stage if any(spec.kind == kind for spec in specs[layer])]
    return tuple(layers[len(layers) * index // number : len(layers) * (index + 1) // number])


def _kept(specs: LayerSpecs, group: KVCacheGroup, stage: int) -> Iterator[tuple[int, KVCacheSpec]]:
    """Each of the group's layers, and its cache spec there."""
    for layer in group.layers[stage]:
        of_group = group.is_state, group.fills_pages
        yield layer, next(spec for spec in specs[layer] if spec.kind[:2] == of_group)


def count_planes(specs: LayerSpecs, groups: Iterable[KVCacheGroup], stage: int) -> Counter[KVCacheShape]:
    """Count the planes of each shape on the ranks of a stage: the maximum over the groups."""
    planes: Counter[KVCacheShape] = Counter()
    for group in groups:
        planes |= Counter(shape for _, spec in _kept(specs, group, stage) for shape in spec.shapes)
    return planes


def place_layers(
    specs: LayerSpecs, groups: Iterable[KVCacheGroup], stage: int
) -> dict[tuple[int, bool], LayerPlacement]:
    """Return where the cache of each layer of a stage is, by the layer's number and whether it takes pages."""
    placements: dict[tuple[int, bool], LayerPlacement] = {}
    for number, group in sorted(enumerate(groups), key=lambda each: not each[1].fills_pages):
        used: defaultdict[KVCacheShape, set[int]] = defaultdict(set)
        windows = {} if group.is_state else {layer: placements.get((layer, True)) for layer in group.layers[stage]}
        # Entries are in the planes of their layers' windows, and other layers in the remaining planes.
        for layer, spec in sorted(_kept(specs, group, stage), key=lambda each: windows.get(each[0]) is None):
            planes: list[int] = []
            for shape in spec.shapes:
                window = None if planes else windows.get(layer)
                free = (plane for plane in count() if plane not in used[shape])
                planes.append(next(free) if window is None else window.plane)
                used[shape].add(planes[-1])
            takes_pages = group.is_state or group.fills_pages
            placements[layer, takes_pages] = LayerPlacement(number, spec.shape, spec.index_shape, *planes)
    return placements
