"""The bytes of an entry of the KV store, whatever the division of layers and heads between ranks. No torch.

An entry is what one block of tokens has in the layers of one kind, layer after layer in the order of the model, a
drafter's after the target's. All groups of a kind have different layers of it, so that an entry is complete when the
blocks of all its groups are.

In an entry, a layer has one or several tensors, one after another: keys and values, an indexer's keys, or a state's
matrices and inputs. Each is as in the memory of a rank that has all heads and tokens. Ranks that divide the heads, or
the tokens of blocks, copy their slices of it (`rank_copies`). What several ranks have, one of them stores: they take
turns by layer.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from quire.engine.architecture.attention_spec import AnyAttentionSpec, AttentionSpec, CompressedAttentionSpec
from quire.engine.architecture.media_spec import TransformersTowerSpec
from quire.engine.architecture.model_spec import TransformersModelSpec
from quire.engine.architecture.recurrent_spec import RecurrentSpec, TransformersStateSpec
from quire.engine.architecture.spec_parts import Units
from quire.engine.config.engine_config import DTYPE_BYTES, EngineConfig, KVCacheGroup
from quire.engine.config.kv_cache_groups import (
    SCALE_BYTES,
    KVCacheShape,
    block_bytes,
    cached_layers,
    place_layers,
    tokens_per_row,
)

_VERSION = 1
"""Changed with anything here that changes the bytes of entries."""
_LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Kinds of rotary positions that depend on the model's length."""
_PAGE, _LINE = 4096, 64
"""Alignment of entries in memory: of large ones for direct reads from a disk."""
_LARGE = 2**16


@dataclass(frozen=True)
class KVKind:
    """Layers whose blocks are kept and dropped together: the groups of one window, of states, or of all tokens."""

    groups: tuple[int, ...]
    """Numbers of the KV cache groups."""
    size: int
    """Bytes of an entry."""
    window: int | None = None
    """As in `quire.engine.scheduler.kv_cache_manager.KVCacheManager.windows`: tokens that a query needs; 2: only the
    last state; None: all."""


@dataclass(frozen=True)
class KVLayout:
    """The entries of a model's cache."""

    kinds: tuple[KVKind, ...]
    signature: bytes
    """Digest of what an entry's bytes depend on, except the contents of the model's files: the layers' shapes, types,
    block size, and options that change what the model computes."""


class Steps(NamedTuple):
    """So many equal pieces, and the distance from one to the next in bytes."""

    number: int
    memory: int
    entry: int


class KVSlices(NamedTuple):
    """Equal slices of a rank's memory that are slices of an entry: of several layers, and of several rows of each."""

    shape: KVCacheShape
    """Of the planes that they are in."""
    group: int
    """Index in `KVKind.groups`: which block of the entry."""
    memory_start: int
    """Where they begin in the memory of all planes of the shape, for block 0."""
    block_stride: int
    """Bytes from a block to the next one."""
    entry_start: int
    numbers: tuple[int, ...]
    """Of the layers, in the order of the model; a drafter's follow the target's."""
    layers: Steps
    rows: Steps
    size: int
    """Bytes of a row's slice."""


class RankCopies(NamedTuple):
    """What a rank copies of the entries of one kind."""

    loads: list[KVSlices]
    """From the entry to the device."""
    stores: list[KVSlices]
    """From the device to the entry: a part of the same bytes."""

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(each.layers.number * each.rows.number * each.size for each in self.loads)


def kv_layout(config: EngineConfig) -> KVLayout:
    """Return the entries of the cache. The number of blocks need not be known."""
    layers, kinds = _Layers(config), []
    digest = hashlib.sha256(repr((_VERSION, sys.byteorder, config.cache.block_size, config.cache.dtype)).encode())
    for each in config.with_drafter:
        digest.update(repr(_computation(each)).encode())
    for key, groups in _kinds(config.cache.groups).items():
        tensors = [(number, layers.tensors(number, key)) for number in layers.of(groups)]
        digest.update(repr((key, [(number, [each.form for each in own]) for number, own in tensors])).encode())
        size = sum(each.size for _, own in tensors for each in own)
        kinds.append(KVKind(tuple(groups), size, 2 if key.is_state else key.window or None))
    return KVLayout(tuple(kinds), digest.digest())


def place_bytes(size: int) -> int:
    """Bytes that an entry of `size` bytes takes in memory."""
    unit = _PAGE if size >= _LARGE else _LINE
    return -(-size // unit) * unit


def least_memory(sizes: Sequence[int]) -> int:
    """Bytes of the smallest memory for entries of these sizes, by kind: one of each, and one more."""
    return (len(sizes) + 1) * max(map(place_bytes, sizes))


def rank_copies(config: EngineConfig, rank: int) -> list[RankCopies]:
    """Return what a rank copies of the entries of each kind, with the final number of blocks."""
    parallel, cache, layers = config.parallel, config.cache, _Layers(config)
    stage, tp_rank = parallel.stage_of(rank), parallel.tp_rank_of(rank)
    pcp, pcp_rank = parallel.prefill_context_parallel_size, parallel.pcp_rank_of(rank)
    specs, _ = cached_layers(config.model, parallel, config.scheduler.speculative, cache.block_size)
    places, found = place_layers(specs, cache.groups, stage), []
    for key, groups in _kinds(cache.groups).items():
        loads, stores, start = _Series(), _Series(), 0
        takes_pages = key.is_state or key.fills_pages
        for turn, number in enumerate(layers.of(groups)):
            ranks, in_page = layers.ranks(number), 0
            place = places.get((number, takes_pages)) if tp_rank < ranks else None  # None: this rank does not have it
            for index, tensor in enumerate(layers.tensors(number, key)):
                if place is not None:
                    shape, plane = place.shape, place.plane
                    if index and not takes_pages:
                        assert place.index_shape is not None
                        assert place.index_plane is not None
                        shape, plane = place.index_shape, place.index_plane
                    block = block_bytes(shape, cache.block_size, cache.dtype)
                    memory = plane * cache.num_blocks * block + (in_page if takes_pages else 0)
                    for part in tensor.slices(tp_rank, ranks):
                        own = KVSlices(
                            shape=shape,
                            group=groups.index(place.group),
                            memory_start=memory + part.memory_start,
                            block_stride=block,
                            entry_start=start + part.entry_start,
                            numbers=(number,),
                            layers=Steps(1, 0, 0),
                            rows=part.rows,
                            size=part.size,
                        )
                        loads.add(own)
                        if turn % (pcp * part.num_copies) == pcp_rank * part.num_copies + part.copy:
                            stores.add(own)
                in_page += tensor.rank_size(tp_rank, ranks)
                start += tensor.size
        found.append(RankCopies(loads.all(), stores.all()))
    return found


class _Kind(NamedTuple):
    """See `KVCacheGroup`. The order of kinds is that of these."""

    is_state: bool
    fills_pages: bool
    window: int
    """0: all tokens."""


def _kinds(groups: Sequence[KVCacheGroup]) -> dict[_Kind, list[int]]:
    """The groups of each kind, in an order that does not depend on the division into groups."""
    found: defaultdict[_Kind, list[int]] = defaultdict(list)
    for number, group in enumerate(groups):
        found[_Kind(group.is_state, group.fills_pages, group.window or 0)].append(number)
    return dict(sorted(found.items()))


class _Part(NamedTuple):
    """A part of a tensor's divided dimension."""

    size: int
    units: Units | None
    """None: every rank has all."""

    def share(self, rank: int, ranks: int) -> range:
        """Where a rank's share is."""
        if self.units is None:
            return range(self.size)
        start = self.units.start(self.size, rank, ranks)
        return range(start, start + self.units.share(self.size, ranks))


class _TensorSlice(NamedTuple):
    """A rank's slice of a part of a tensor. Bytes are counted from the tensor's beginning."""

    memory_start: int
    entry_start: int
    rows: Steps
    size: int
    copy: int
    """This rank's number among the `num_copies` ranks that have the same slice."""
    num_copies: int


class _Tensor(NamedTuple):
    """A tensor of a layer, `[rows, sum of the parts' sizes, bytes]`. Ranks divide its second dimension."""

    rows: int
    parts: Sequence[_Part]
    bytes: int
    unused: int = 0
    """Bytes before each row in memory, which are not in the entry."""
    context: int = 1
    """Number of successive ranks that divide the tokens of their only part: each has one run of each of `runs`."""
    runs: tuple[int, ...] = ()
    """Then the `bytes`, by what follows what: the numbers of all tokens, and the scales of all tokens."""

    @property
    def size(self) -> int:
        """Bytes in an entry."""
        return self.rows * self.bytes * sum(part.size for part in self.parts)

    @property
    def form(self) -> tuple[int, list[int], int]:
        return self.rows, [part.size for part in self.parts], self.bytes

    def rank_size(self, rank: int, ranks: int) -> int:
        """Bytes in the memory of a rank."""
        return self.rows * self.bytes // self.context * sum(len(part.share(rank, ranks)) for part in self.parts)

    def slices(self, rank: int, ranks: int) -> Iterator[_TensorSlice]:
        """The slices that a rank has."""
        own_row, whole_row = self.rank_size(rank, ranks) // (self.rows or 1), self.size // (self.rows or 1)
        own, whole, number = self.unused, 0, rank % self.context
        for part in self.parts:
            share = part.share(rank, ranks)
            assert len(share) == 1 or self.context == 1
            like = [other for other in range(ranks) if other % self.context == number]
            same = [other for other in like if part.share(other, ranks) == share]
            start = whole + share.start * self.bytes
            for run in self.runs or (len(share) * self.bytes,):
                size, rows = run // self.context, Steps(self.rows, self.unused + own_row, whole_row)
                first = start + number * size
                if size == rows.memory == rows.entry:  # the rows follow each other on both sides
                    size, rows = size * self.rows, Steps(1, 0, 0)
                if size and self.rows:
                    yield _TensorSlice(own, first, rows, size, same.index(rank), len(same))
                own, start = own + run // self.context, start + run
            whole += part.size * self.bytes


class _Series:
    """Joins the slices of layers that are at equal distances."""

    def __init__(self) -> None:
        self._joined: list[KVSlices] = []
        self._open: dict[object, int] = {}
        """By what slices must have in common: the last ones of `_joined`."""

    def add(self, own: KVSlices) -> None:
        """Add the slices of a layer."""
        common = own.shape, own.group, own.rows, own.size, own.memory_start % own.block_stride
        last = self._open.get(common)
        if last is not None:
            before = self._joined[last]
            number, memory, entry = before.layers
            step = own.memory_start - before.memory_start, own.entry_start - before.entry_start
            if number == 1:
                memory, entry = step
            if step == (number * memory, number * entry) and memory > 0:
                layers, numbers = Steps(number + 1, memory, entry), before.numbers + own.numbers
                self._joined[last] = before._replace(layers=layers, numbers=numbers)
                return
        self._open[common] = len(self._joined)
        self._joined.append(own)

    def all(self) -> list[KVSlices]:
        """All slices, in the order of their first layers."""
        return self._joined


class _Layers:
    """The layers of a model and its drafter, by number."""

    def __init__(self, config: EngineConfig) -> None:
        self._cache, self._dtype = config.cache, config.model.dtype
        configs = config.with_drafter
        self._layers = [(layer, each.parallel) for each in configs for layer in each.model.architecture.layers]
        self._tokens_per_row = tokens_per_row([each.model.architecture for each in configs], config.cache.block_size)

    def of(self, groups: Sequence[int]) -> list[int]:
        """The layers of all stages in some groups."""
        return sorted(number for group in groups for stage in self._cache.groups[group].layers for number in stage)

    def ranks(self, number: int) -> int:
        """The ranks of a stage that divide a layer; any others do not have it."""
        return self._layers[number][1].tensor_parallel_size

    def tensors(self, number: int, kind: _Kind) -> list[_Tensor]:
        """What a layer has in entries of a kind. In pages one follows the other; else the second is an indexer's."""
        layer, parallel = self._layers[number]
        if kind.is_state:
            assert layer.state is not None
            return list(self._state(layer.state, parallel.tensor_parallel_size))
        assert layer.attention is not None
        if kind.fills_pages:
            assert isinstance(layer.attention, CompressedAttentionSpec)
            row = layer.attention.head_dim + layer.attention.inputs_width
            return [_whole(self._cache.block_size * row * DTYPE_BYTES[self._cache.dtype])]
        return list(self._attention(layer.attention, parallel.decode_context_parallel_size))

    def _attention(self, attention: AnyAttentionSpec, context: int) -> Iterator[_Tensor]:
        index, size = attention.index_shape(), self._cache.block_size
        if isinstance(attention, CompressedAttentionSpec):
            # Entries have the last of the rows of their tokens. Those of large ratios may be anywhere in a block.
            ratio, row = attention.compressor_ratio, attention.head_dim * DTYPE_BYTES[self._cache.dtype]
            apart = math.gcd(ratio, size)
            if apart not in (ratio, size):
                apart = self._tokens_per_row
            yield _Tensor(size // apart, [_Part(1, None)], row, (apart // self._tokens_per_row - 1) * row)
            if index is not None:
                yield _whole(self._block_bytes(KVCacheShape(*index, ratio)))
            return
        sides, heads, width = attention.kv_shape(1)
        units = Units(heads, "KV heads", "copies") if isinstance(attention, AttentionSpec) else None
        if self._cache.dtype == "int4":  # a head's values follow its keys
            yield _Tensor(1, [_Part(heads, units)], self._block_bytes(KVCacheShape(sides, 1, width)))
            return
        block = self._block_bytes(KVCacheShape(1, 1, width))
        runs: tuple[int, ...] = ()
        if context > 1:
            scales = 0 if self._cache.dtype in DTYPE_BYTES else size * SCALE_BYTES
            runs = (block - scales, scales)
        yield _Tensor(sides, [_Part(heads, units)], block, 0, context, runs)
        if index is not None:
            yield _whole(self._block_bytes(KVCacheShape(*index)))

    def _state(self, spec: RecurrentSpec, ranks: int) -> Iterator[_Tensor]:
        width = DTYPE_BYTES[self._dtype]
        if isinstance(spec, TransformersStateSpec):  # not known how ranks divide it: one rank's follows the other's
            yield _Tensor(1, [_Part(ranks, Units(ranks, "ranks"))], spec.state_bytes(ranks, width))
            return
        whole, smallest = spec.state_shape(1), spec.state_shape(spec.num_heads)
        (divided,) = [dim for dim in range(3) if whole[dim] != smallest[dim]] or [0]
        part = _Part(whole[divided], Units(whole[divided], "heads") if whole != smallest else None)
        yield _Tensor(math.prod(whole[:divided]), [part], 4 * math.prod(whole[divided + 1 :]))
        tokens, channels = spec.input_shape(1)
        convolved = [each for each in spec.parameters(1) if (each.module, each.kind) == ("state.conv", "weight")]
        parts = [_Part(shape[0], each.units.get(name)) for each in convolved for name, shape in each.parts.items()]
        yield _Tensor(tokens, parts or [_Part(channels, None)], width)
        for shape in spec.other_inputs:
            yield _whole(math.prod(shape) * width)

    def _block_bytes(self, shape: KVCacheShape) -> int:
        return block_bytes(shape, self._cache.block_size, self._cache.dtype)


def _whole(size: int) -> _Tensor:
    """A tensor that every rank has."""
    return _Tensor(1, [_Part(1, None)], size)


def _computation(config: EngineConfig) -> tuple[object, ...]:
    """What a model computes from the same bytes of weights depends on."""
    model, arch = config.model, config.model.architecture
    ropes = (layer.attention.rope for layer in arch.layers if layer.attention is not None)
    is_of_transformers = isinstance(arch, TransformersModelSpec)
    depends_on_length = is_of_transformers or any(rope is not None and rope.kind in _LENGTH_DEPENDENT for rope in ropes)
    code: tuple[object, ...] = ()
    if is_of_transformers or (arch.media is not None and isinstance(arch.media.tower, TransformersTowerSpec)):
        code = importlib.metadata.version("transformers"), model.trust_remote_code
    return (
        arch.name,
        type(arch).__name__,
        code,
        config.parallel.device,
        model.dtype,
        model.stored_dtype,
        model.quantization,
        model.tower_quantization,
        model.quantized,
        sorted(model.quantized_outer),
        model.rounded_types,
        sorted(model.hf_overrides.items(), key=repr),
        model.position_len if depends_on_length else 0,
        model.seed if model.load_format == "dummy" else None,
    )
