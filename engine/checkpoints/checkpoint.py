"""Locates parameters' slices in the checkpoint, by the family's names and layouts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.engine.architecture.attention_spec import CompressedAttentionSpec, GroupIndexerSpec, MLASpec
from quire.engine.architecture.families import family_of
from quire.engine.architecture.families.family import Family, Runs
from quire.engine.architecture.families.tensors import StoredTensor, stored_tensor
from quire.engine.architecture.model_spec import LayerSpec, ModelSpec
from quire.engine.architecture.spec_parts import RopeSpec, without_number
from quire.engine.layers.weight import Shard, Weight

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class StoredSlice:
    """The location in the checkpoint of the tensor that a shard is a slice of."""

    name: str
    shape: tuple[int, ...]
    """Shape of the checkpoint's tensor."""
    rows: Rows | None = None
    """The row in the checkpoint for each of the tensor's rows; None: the same."""
    is_transposed: bool = False
    expert: int | None = None
    """Its index in a stack of experts."""
    is_grid: bool = False
    """A small tensor with a dimension for heads, which ours does not have; it is read completely."""
    part: Literal["codes", "scales", "offsets"] | None = None
    """The part of a quantized tensor to read; None: the numbers that it stands for."""
    group: int = 0
    """Columns that share a factor."""

    def quantized(self, part: Literal["codes", "scales", "offsets"] | None = None, group: int = 0) -> StoredSlice:
        """The same location for a quantized tensor, whose reader gives output features before inputs."""
        *lead, rows, columns = self.shape
        shape = (*lead, columns, rows) if self.is_transposed else self.shape
        return replace(self, shape=shape, is_transposed=False, part=part, group=group)

    def slice(self, shard: Shard) -> tuple[slice, ...]:
        """The slice to read: the shard, including rows in between if its rows are scattered."""
        if self.is_grid:
            return (slice(None),)[: len(self.shape)]
        cut = [slice(0, size) for size in shard.shape]
        cut[shard.dim] = slice(shard.start, shard.start + shard.length)
        if self.rows is not None:
            cut[0], _ = _cover(self.rows[cut[0]])
        if self.is_transposed:
            cut[-2:] = cut[-1], cut[-2]
        return tuple(cut) if self.expert is None else (slice(self.expert, self.expert + 1), *cut)

    def arranged(self, shard: Shard, read: Tensor) -> Tensor:
        """The shard's own values, given the tensor that was read with `slice`."""
        if self.is_grid:
            read = read.flatten()
            return read[shard.source] if self.rows is None else read[torch.from_numpy(self.rows[shard.source[0]])]
        if self.expert is not None:
            read = read[0]
        if self.is_transposed:
            read = read.mT
        if self.rows is not None:
            _, indices = _cover(self.rows[shard.source[0]] if shard.dim == 0 else self.rows)
            read = read if indices is None else read[torch.from_numpy(indices)]
        return read


def _cover(rows: Rows) -> tuple[slice, Rows | None]:
    """The slice that contains the rows, and their indices in it, or None if they are all of it."""
    first, last = int(rows.min()), int(rows.max())
    step = int(rows[1] - rows[0]) if len(rows) > 1 else 1
    if step > 0 and np.array_equal(rows, np.arange(first, last + 1, step)):
        return slice(first, last + 1, step), None
    return slice(first, last + 1), rows - first


def find(path: str, weight: Weight, arch: ModelSpec) -> Iterator[tuple[Shard, StoredSlice]]:
    """The checkpoint tensor for each shard of the parameter `path`, such as layers.3.attention.qkv.weight."""
    family = family_of(arch)
    path, _, kind = path.rpartition(".")
    module, number = without_number(path)
    tower = arch.media.tower if arch.media is not None and module.startswith("tower.") else None
    layer = None if number is None or tower is not None else arch.layers[number]
    shapes = {shard.part: shard.shape for shard in weight.shards}
    parts: dict[str, tuple[StoredTensor, Rows | None]] = {}
    """The tensor of a part's first shard, and its rows: others differ in their expert."""
    for shard in weight.shards:
        if shard.part not in parts:
            stored = stored_tensor(family, arch, layer, module, kind, shard.part, shapes)
            joint = {part: shapes[part][0] for part in stored.joint}
            own = None if tower is None else tower.rows(module.removeprefix("tower."), shard.part)
            parts[shard.part] = stored, _rows(family, layer, module, shard, joint, own)
        stored, rows = parts[shard.part]
        yield (
            shard,
            StoredSlice(
                name=stored.named(arch, number, shard.expert),
                shape=stored.shape,
                rows=rows,
                is_transposed=stored.is_transposed,
                expert=shard.expert if stored.is_stacked else None,
                is_grid=stored.is_grid,
            ),
        )


def _rows(
    family: Family, layer: LayerSpec | None, module: str, shard: Shard, joint: dict[str, int], own: Runs | None
) -> Rows | None:
    """The checkpoint's rows of a module's part, which may follow other parts in one tensor; `own` is their order in a
    tower."""
    rows = None if own is None else _listed(own)
    if layer is not None:
        runs = family.rows(layer, module, shard.part)
        if runs is not None:
            return _listed(runs)
        rows = _rotary_first(layer, module, shard)
    if len(joint) == 1:
        return rows
    before = sum(size for part, size in list(joint.items())[: list(joint).index(shard.part)])
    return before + (np.arange(shard.shape[0]) if rows is None else rows)


def _listed(runs: Runs) -> Rows:
    return np.concatenate([np.arange(run.start, run.stop, run.step) for run in runs])


def _rotary_first(layer: LayerSpec, module: str, shard: Shard) -> Rows | None:
    """The rows of queries and keys in our order: rotary features come first, with pairs in halves."""
    attention, name = layer.attention, module.removeprefix("layers.attention.")
    if isinstance(attention, MLASpec):
        if name == "query":
            return _per_head(shard.shape[0], attention.query_dim, attention.qk_nope_head_dim, attention.rope)
        if name == "down" and shard.part == "kv":
            return _per_head(shard.shape[0], shard.shape[0], attention.kv_lora_rank, attention.rope)
        if name == "rotary_norm":
            return _per_head(shard.shape[0], shard.shape[0], 0, attention.rope)
        if (indexer := attention.indexer) is not None and name in ("indexer.query", "indexer.key", "indexer.key_norm"):
            first = indexer.head_dim - indexer.rope.dim if indexer.rotates_last else 0
            return _per_head(shard.shape[0], indexer.head_dim, first, indexer.rope)
        return None
    if isinstance(attention, CompressedAttentionSpec):
        head = attention.head_dim
        if name == "indexer.query" and attention.indexer is not None:
            head = attention.indexer.head_dim
        elif name not in ("query", "key_norm") and (name, shard.part) != ("down", "kv"):
            return None
        return _per_head(shard.shape[0], head, head - attention.rope.dim, attention.rope)
    if attention is None or attention.rope is None:
        return None
    is_key_of_indexer = (name, shard.part) in (("indexer.key_norm", ""), ("indexer.inputs", "k"))
    if is_key_of_indexer and isinstance(attention.indexer, GroupIndexerSpec):
        # Until it is stored, a group's key has its rotary features last, with pairs side by side.
        pairs = np.arange(attention.rope.dim).reshape(2, -1).T.ravel()
        return np.concatenate((np.arange(attention.rope.dim, attention.indexer.head_dim), pairs))
    is_rotary = name in ("query_norm", "key_norm") or (name == "qkv" and shard.part != "v")
    if is_rotary and attention.rope.is_interleaved:
        return _per_head(shard.shape[0], attention.head_dim, 0, attention.rope)
    return None


def _per_head(rows: int, head: int, first: int, rope: RopeSpec) -> Rows:
    """For heads of `head` rows: the rotary rows, from `first` on, in halves, followed by the others."""
    rotary = np.arange(first, first + rope.dim)
    if rope.is_interleaved:
        rotary = np.concatenate((rotary[::2], rotary[1::2]))
    order = np.concatenate((rotary, np.setdiff1d(np.arange(head), rotary)))
    return (np.arange(0, rows, head)[:, None] + order).ravel()
