"""Reads adapters for the linear layers of a rank: the slices of their changes, in the layout of the layers' pools.

Embedding and head also have changes of rows (`RowChanges`); a classifier's layers, and norms of a tower, whole weights
(`DenseWeights`). Where a whole matrix is replaced, its difference from the base's is a change of full rank.

A rank's rows and columns of a change are those that it has of the checkpoint's tensor, which `checkpoint.find` knows
for every parameter of every family: so an adapter is sliced, permuted and divided into parts as the weights are.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from quire.engine.architecture.adapter_spec import AdapterSpec, LowRank, Piece, TensorChange
from quire.engine.architecture.adapters.base import Base
from quire.engine.architecture.families import family_of
from quire.engine.architecture.families.tensors import (
    NeededTensor,
    checkpoint_tensors,
    expert_numbers,
    model_parameters,
    stored_tensor,
)
from quire.engine.checkpoints.adapter_tensors import AdapterTensors, changed, indices, open_tensors
from quire.engine.checkpoints.checkpoint import StoredSlice, find
from quire.engine.checkpoints.checkpoint_files import Checkpoint
from quire.engine.checkpoints.loader import load_dense
from quire.engine.checkpoints.quantized_tensors.reader import Sliceable
from quire.engine.config.adapter_base import adapter_base
from quire.engine.config.checkpoint_tensors import classifier_tensors
from quire.engine.config.engine_config import ModelConfig
from quire.engine.config.lora_config import too_large
from quire.engine.config.pooling import Dense, Norm
from quire.engine.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from quire.engine.layers.linear import Linear, ReplicatedLinear
from quire.engine.layers.moe import ExpertMatrices
from quire.engine.layers.norm import AdaptedNorm
from quire.engine.layers.row_changes import RowChanges
from quire.engine.layers.weight import DenseWeights, Shard, Weight
from quire.engine.protocol.adapters import AdapterRef
from quire.engine.protocol.errors import ConfigError
from quire.engine.repository.adapter_folder import AdapterFolder, open_adapter

EMBEDDING, TOWER, _HEAD = "embedding", "tower.", "head"
"""Paths in all models, and the start of those in towers."""
_AT_ONCE = 1 << 22
"""Weights that are widened to float32 at once."""
_BLOCK, _ALIGNMENT = 1 << 24, 256
"""Bytes of a block of pinned memory, unless a tensor is larger, and of which the addresses in it are multiples."""


@dataclass(frozen=True)
class LayerChange:
    """What an adapter does to a rank's linear layer, in the host's memory, which is pinned if there is a device."""

    spans: Tensor
    """int64 `[experts, parts, 2]`: the part's first rank row in `a` and `b`, and its rank; 0: it does not change. A
    layer without experts has one."""
    a: Tensor
    """`[rank rows, in]`, of the type that the layer multiplies; if this is float32, of 16 bits that are as exact."""
    b: Tensor
    """`[rank rows, features of the widest part]`, of the type of `a`, with the scaling; zero behind the features of the
    row's part."""
    scale: Tensor | None = None
    """float32 `[experts, out]`; see `LowRankPool`. None: there is no bias, either."""
    bias: Tensor | None = None
    """float32 `[experts, out]`"""

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in vars(self).values() if each is not None)


Change: TypeAlias = LayerChange | RowChanges | DenseWeights


class AdaptedLayer(NamedTuple):
    """A linear layer that adapters may change, or one of all experts, on this rank."""

    linear: Linear | ExpertMatrices
    num_experts: int
    """1: the layer has none."""
    widths: tuple[int, ...]
    """Output features of each part of its pool: of each of the checkpoint's tensors, one after another."""
    in_features: int
    dtype: torch.dtype
    """Of its inputs, and the widest one of its pool."""
    bias: Tensor | None
    """The base's, float32 `[experts, out]`; None: there is none, or another rank adds it."""

    def nbytes(self, rank_rows: int, vector_rows: int, dtype: torch.dtype | None = None) -> int:
        """Of so many rows of a pool, of this type or the widest one; each row of vectors is one of scales and one of
        biases."""
        matrices = (self.in_features + max(self.widths)) * (dtype or self.dtype).itemsize
        return rank_rows * matrices + vector_rows * 2 * sum(self.widths) * 4

    @staticmethod
    def of(linear: Linear | ExpertMatrices) -> AdaptedLayer:
        """The layer may be packed."""
        dtype = torch.float32 if isinstance(linear, ReplicatedLinear) else linear.weight.input_dtype
        if isinstance(linear, ParallelLMHead):  # the last ranks' rows are padded
            own = None if linear.bias is None else linear.bias.detach().float().cpu()[None]
            return AdaptedLayer(linear, 1, (linear.num_rows,), linear.width, dtype, own)
        experts = [each.local_expert for each in linear.weight.shards]
        shards = [each for each in linear.weight.shards if each.length and each.local_expert == experts[0]]
        widths: tuple[int, ...] = (shards[0].shape[0],)
        if shards[0].dim:
            columns = max(each.offset + each.length for each in shards)
        else:
            widths, columns = tuple(each.length for each in shards), math.prod(shards[0].shape[1:])
            assert [each.offset for each in shards] == [sum(widths[:number]) for number in range(len(widths))]
        bias = getattr(linear, "bias", None) if linear.adds_bias else None
        own = None if bias is None else bias.detach().float().cpu().view(-1, sum(widths))
        return AdaptedLayer(linear, max(experts) + 1, widths, columns, dtype, own)


class _Slice(NamedTuple):
    """Where a layer has a part of a tensor of the checkpoint."""

    path: str
    shard: Shard
    stored: StoredSlice

    @property
    def rows(self) -> Tensor:
        """The row in the checkpoint's matrix of each of the rank's rows."""
        rows = torch.arange(self.shard.shape[0]) if self.stored.rows is None else torch.from_numpy(self.stored.rows)
        return rows[self.shard.source[0]]

    def numbers(self, change: LowRank) -> Tensor:
        """The row in B of each of the rank's rows; -1: it does not change."""
        numbers = torch.full((self.num_rows,), -1)
        numbers[indices(change.rows)] = torch.arange(change.up.shape[0])
        return numbers[self.rows]

    @property
    def size(self) -> tuple[int, int]:
        """Rows and columns of the rank's matrix."""
        (rows, *columns), length = self.shard.shape, self.shard.length
        return (rows, length) if self.shard.dim else (length, math.prod(columns))

    @property
    def num_rows(self) -> int:
        """Of the checkpoint's matrix, which may have other parts, too."""
        return self.stored.shape[-1 if self.stored.is_transposed else 0 if self.stored.expert is None else 1]


@dataclass
class _Planned:
    """A layer's changes, before their tensors are read."""

    low_rank: defaultdict[tuple[int, int], list[tuple[_Slice, LowRank]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """By expert and part."""
    whole: dict[tuple[int, int], tuple[_Slice, Piece]] = field(default_factory=dict)
    """By expert and part: what replaces it, as a change of full rank."""
    biases: list[tuple[_Slice, Piece]] = field(default_factory=list)

    @property
    def num_rank_rows(self) -> int:
        low_rank = sum(each.rank for own in self.low_rank.values() for _, each in own)
        return low_rank + sum(min(place.size) for place, _ in self.whole.values())

    @property
    def has_vectors(self) -> bool:
        """Whether there are scales and biases; alike on all ranks, also on those that add no biases."""
        every = (each for own in self.low_rank.values() for _, each in own)
        return bool(self.biases) or any(each.magnitude is not None or each.bias is not None for each in every)


class AdapterLoader:
    """Reads adapters for a stage of a model. One thread calls `load`."""

    def __init__(
        self, module: nn.Module, model: ModelConfig, stage: range, device_bytes: int, *, pins_memory: bool
    ) -> None:
        """`stage` are the numbers of its layers; `device_bytes` is the most that an adapter may need on the device."""
        self._model, self._stage, self._device_bytes, self._pins_memory = model, stage, device_bytes, pins_memory
        self._is_last = stage.stop == model.architecture.num_layers
        linears = {
            path: layer
            for path, layer in module.named_modules()
            if isinstance(layer, Linear | ExpertMatrices) and (path.startswith(("layers.", TOWER)) or path == _HEAD)
        }
        self.layers = {path: AdaptedLayer.of(layer) for path, layer in linears.items() if layer.may_have_pool}
        """Those that adapters may change, by path."""
        self._fixed = {path: layer for path, layer in linears.items() if not layer.may_have_pool}
        self._fixed_by = dict[str, str]()
        """Tensors of layers that adapters may not change, and the flags that are why; empty: it is what they are."""
        self._weights, self._biases = (
            defaultdict[str, list[_Slice]](list),
            defaultdict[str, list[_Slice]](list),
        )
        self.outer = {
            path: layer
            for path, layer in module.named_children()
            if isinstance(layer, VocabParallelEmbedding | ParallelLMHead) and path in (EMBEDDING, _HEAD)
        }
        self._rows = defaultdict[str, list[_Slice]](list)
        """Of embedding and head."""
        self.norms = {
            path: layer
            for path, layer in module.named_modules()
            if isinstance(layer, AdaptedNorm) and layer.may_change and path.startswith(TOWER)
        }
        """Norms that adapters may replace, by path."""
        self._of_norms = defaultdict[str, list[_Slice]](list)
        """With the path of the weight or the bias."""
        modules = list[Dense | Norm]() if model.pooling is None else model.pooling.weighted
        self.dense = {f"pooling.{number}": each for number, each in enumerate(modules) if _is_own(each)}
        """Modules after the pooling that adapters may change, by their number among those with weights."""
        self._elsewhere = set[str]()
        """Tensors of layers of other stages, of their tower, and of experts of other ranks; and those of the checkpoint
        that no answer depends on, such as layers of a tower behind its last output."""
        self._base: Base | None = None
        self._checkpoint: Checkpoint | None = None

    def load(self, adapter: AdapterRef) -> dict[str, Change]:
        """The changes of an adapter, by the path of the layer, of the weight whose rows change, or as in `dense`.
        Raises `ConfigError` that says what it cannot use."""
        folder = _find(adapter)
        if self._base is None:
            self._base = self._find_tensors()
        spec = folder.spec(self._base, self._model.architecture.name)
        self._check(folder, spec, self._base)
        planned, found = self._plan(spec), dict[str, Change]()
        sizes = (
            self.layers[path].nbytes(each.num_rank_rows, self.layers[path].num_experts * each.has_vectors)
            for path, each in planned.items()
        )
        rows = ((place, each) for name, each in spec.changes.items() for place in self._rows.get(name, ()))
        needed = sum(sizes) + sum(self._row_bytes(place, each) for place, each in rows)
        if needed > self._device_bytes:
            raise ConfigError(f"{folder.path}: {too_large(needed, self._device_bytes)}")
        with open_tensors(folder) as tensors:
            for path, own in planned.items():
                found[path] = self._low_rank(self.layers[path], own, tensors)
            for name, change in spec.changes.items():
                for place in self._rows.get(name, ()):
                    if place.path == EMBEDDING or change.replacement is not None or change.new_rows is not None:
                        found[f"{place.path}.weight"] = self._row_changes(place, change, tensors)
            found |= self._replaced_norms(spec, tensors)
            for path, module in self.dense.items() if self._is_last else ():
                if spec.changes.keys() & module.tensors.keys():
                    found[path] = self._dense(module, spec, tensors)
        for path, complete in found.items():
            if not all(tensor.abs().amax().isfinite() for tensor in _tensors(complete).values() if tensor.numel()):
                dtype = next(each.dtype for each in vars(complete).values() if each.is_floating_point())
                raise ConfigError(f"{folder.path}: the change of {path} has values that are NaN or infinite in {dtype}")
        if self._pins_memory:
            in_blocks(found, lambda size: torch.empty(size, dtype=torch.uint8, pin_memory=True))
        return found

    def _plan(self, spec: AdapterSpec) -> dict[str, _Planned]:
        """The rank's slices of changes of linear layers, by the path of the layer. Reads no tensors."""
        planned = defaultdict[str, _Planned](_Planned)
        for name, change in spec.changes.items():
            by_expert = defaultdict[int | None, list[LowRank]](list)
            for each in change.low_rank:
                by_expert[each.expert].append(each)
            for place in self._weights.get(name, ()):
                layer, shard = self.layers[place.path], place.shard
                starts = [0, *itertools.accumulate(layer.widths)]
                part = 0 if shard.dim else starts.index(shard.offset)
                for each in by_expert[place.stored.expert]:
                    if (place.numbers(each) >= 0).any():
                        planned[place.path].low_rank[shard.local_expert, part].append((place, each))
                if change.replacement is not None and name not in self._rows:
                    planned[place.path].whole[shard.local_expert, part] = place, change.replacement
            if change.replacement is not None:
                for place in self._biases.get(name, ()):
                    planned[place.path].biases.append((place, change.replacement))
        return planned

    def _find_tensors(self) -> Base:
        """Find the rank's slices of all tensors that adapters may change."""
        arch = self._model.architecture
        base, others = adapter_base(self._model), classifier_tensors(self._model)
        for path, outer in self.outer.items():
            name, weight = base.head if path == _HEAD else base.embedding, outer.weight
            shard, stored = next(iter(find(f"{path}.weight", weight, arch)))
            self._rows[name].append(_Slice(path, shard, stored))
        self._elsewhere = {base.embedding} - self._rows.keys()
        if base.head and base.head not in self._rows:
            self._elsewhere |= {base.head, f"{base.head.removesuffix('weight')}bias"}
        for path, layer in self.layers.items():
            for kind, places in (("weight", self._weights), ("bias", self._biases)):
                if (own := getattr(layer.linear, kind, None)) is not None:
                    for shard, stored in find(f"{path}.{kind}", own, arch):
                        if shard.length:
                            name = base.head if (path, kind) == (_HEAD, "weight") else stored.name
                            places[name].append(_Slice(path, shard, stored))  # a tied head has a name of its own
        for path, norm in self.norms.items():
            for kind, own in norm.named_parameters():
                assert isinstance(own, Weight)
                for shard, stored in find(f"{path}.{kind}", own, arch):
                    self._of_norms[stored.name].append(_Slice(f"{path}.{kind}", shard, stored))
        self._fixed_by |= dict.fromkeys(
            others.keys() - {name for each in self.dense.values() for name in each.tensors}, ""
        )
        for path, fixed in self._fixed.items():
            reason = fixed.fixed_by if isinstance(fixed, ExpertMatrices) else ""
            self._fixed_by |= {stored.name: reason for _, stored in find(f"{path}.weight", fixed.weight, arch)}
        family = family_of(arch)
        for number, layer_spec, module, kind, parts in model_parameters(arch, has_head=True):
            path = f"layers.{number}.{module.removeprefix('layers.')}"
            if layer_spec is None:
                is_elsewhere = module.startswith(TOWER) and self._stage.start > 0
            else:
                is_elsewhere = number not in self._stage or path in self.layers
            if is_elsewhere:
                for part in parts:
                    stored_part = stored_tensor(family, arch, layer_spec, module, kind, part, parts)
                    experts = expert_numbers(layer_spec, module) or (None,)
                    self._elsewhere.update(stored_part.named(arch, number, each) for each in experts)
        self._elsewhere -= self._weights.keys() | self._biases.keys()
        needed = checkpoint_tensors(arch, has_head=True)
        self._elsewhere |= {
            name for name in base.shapes if name not in needed and re.search(family.ignored_pattern, name)
        }
        return base

    def _check(self, folder: AdapterFolder, spec: AdapterSpec, base: Base) -> None:
        """Refuse changes that no layer can have."""
        for name, change in spec.changes.items():
            if change.replacement is not None and spec.vocab_size is not None and name in (base.embedding, base.head):
                raise ConfigError(
                    f"{folder.path}: {change.replacement.tensor} has {spec.vocab_size} tokens, and the base "
                    f"{base.shapes[base.embedding][0]}: adapters of requests cannot add tokens; use `quire merge`"
                )
            is_low_rank = change.replacement is None and change.new_rows is None
            for each in change.low_rank:
                if each.magnitude is not None and name == base.head and not is_low_rank:
                    raise ConfigError(
                        f"{folder.path}: {each.magnitude.tensor} changes {name}: adapters of requests cannot have DoRA "
                        "of a head with trained rows; use `quire merge`"
                    )
            paths = [part.path for part in self._weights.get(name, ())]
            layers = [self.layers[path].linear for path in paths]
            is_of_tower = any(path.startswith(TOWER) for path in paths)
            is_whole = change.replacement is not None and name in self._weights and name not in self._rows
            is_supported = name in self._elsewhere or (is_whole and not change.low_rank)
            is_supported |= name in self._weights if is_low_rank else name in self._biases or name in self._of_norms
            is_supported |= name in self._rows or any(name in each.tensors for each in self.dense.values())
            if not is_supported or name in self._fixed_by:
                flag = f" with {self._fixed_by[name]}" if self._fixed_by.get(name) else ""
                raise ConfigError(
                    f"{folder.path}: {_tensor_of(change)} changes {name}, which adapters of requests cannot change"
                    f"{flag}; use `quire merge`"
                )
            if spec.invocation_tokens and (
                is_of_tower or any(getattr(layer, "has_earlier_rows", False) for layer in layers)
            ):
                rows = "images" if is_of_tower else "earlier tokens"
                raise ConfigError(
                    f"{folder.path}: {_tensor_of(change)} changes {name}, which {rows} are multiplied by, too: "
                    "alora_invocation_tokens is not supported for it"
                )
            biases = [each.bias.tensor for each in change.low_rank if each.bias is not None]
            if biases and not all(getattr(layer, "may_have_new_bias", True) for layer in layers):
                raise ConfigError(f"{folder.path}: {biases[0]}: lora_bias is not supported for {name}")
            has_magnitude = any(each.magnitude is not None for each in change.low_rank)
            if self._model.load_format == "dummy" and (has_magnitude or is_whole):
                what = "use_dora" if has_magnitude else "modules_to_save"
                raise ConfigError(f"{folder.path}: {what} needs the base's weights, which --load-format dummy lacks")

    def _dense(self, module: Dense | Norm, spec: AdapterSpec, tensors: AdapterTensors) -> DenseWeights:
        """A module with its changes."""
        weight, bias = load_dense(self._model, module, torch.device("cpu"))
        name, *of_bias = module.tensors
        if (change := spec.changes.get(name)) is not None:
            weight = changed(weight, change, tensors)
            for each in change.low_rank:
                if each.bias is not None:
                    bias = torch.zeros(len(weight)) if bias is None else bias
                    bias[indices(each.rows)] += each.scaling * tensors[each.bias].float()[:, 0]
        if bias is not None and of_bias and of_bias[0] in spec.changes:
            bias = changed(bias, spec.changes[of_bias[0]], tensors)
        return DenseWeights(weight, bias)

    def _replaced_norms(self, spec: AdapterSpec, tensors: AdapterTensors) -> dict[str, DenseWeights]:
        """The rank's slices of norms, by path, of which a weight or a bias is replaced."""
        found = dict[str, dict[str, Tensor]]()
        for name, change in spec.changes.items():
            for place in self._of_norms.get(name, ()):
                assert change.replacement is not None
                path, _, kind = place.path.rpartition(".")
                before = self.norms[path].named_parameters()
                own = found.setdefault(path, {kind: each.detach().cpu().clone() for kind, each in before})
                whole = tensors[change.replacement].reshape(place.stored.shape)
                own[kind][place.shard.target] = place.stored.arranged(
                    place.shard, whole[place.stored.slice(place.shard)]
                ).to(own[kind].dtype)
        return {path: DenseWeights(own["weight"], own.get("bias")) for path, own in found.items()}

    def _row_changes(self, place: _Slice, change: TensorChange, tensors: AdapterTensors) -> RowChanges:
        """The rank's slice of trained rows, and of an embedding also of low-rank changes."""
        weight, rows = self.outer[place.path].weight, place.rows
        dtype, width = weight.input_dtype, place.stored.shape[1]
        numbers, values = torch.arange(len(rows))[:0], torch.empty(0, width, dtype=dtype)
        if change.replacement is not None:
            numbers, values = torch.arange(len(rows)), tensors[change.replacement][rows].to(dtype)
        if place.path == EMBEDDING and any(each.magnitude is not None for each in change.low_rank):
            matrix, stored = self._stored(place.stored)
            whole = matrix[tuple(slice(0, size) for size in stored.shape)]
            values = changed(whole, change, tensors)[rows].to(dtype)  # the norms of columns depend on all rows
            return RowChanges(torch.arange(len(rows)), values, torch.zeros(len(rows), 0), torch.zeros(0, width))
        if change.new_rows is not None:
            tokens = torch.tensor(change.new_rows[0]) - place.shard.start
            own = tokens.argsort()
            own = own[(tokens[own] >= 0) & (tokens[own] < len(rows))]
            numbers, values = tokens[own], tensors[change.new_rows[1]][own].to(dtype)
        low_rank = change.low_rank if place.path == EMBEDDING else ()
        up, down = torch.zeros(len(rows), 0), torch.zeros(0, width)
        for each in low_rank:
            whole = torch.zeros(place.num_rows, each.rank)
            whole[indices(each.rows)] = tensors[each.up].float()
            up = torch.cat((up, whole[rows]), dim=1)
            down = torch.cat((down, each.scaling * tensors[each.down].float()))
        return RowChanges(numbers, values, up.to(dtype), down.to(dtype))

    def _row_bytes(self, place: _Slice, change: TensorChange) -> int:
        """Of what `_row_changes` returns."""
        count, width = place.shard.shape[0], place.stored.shape[1]
        is_whole, num_rows, rank = change.replacement is not None, 0, 0
        if place.path == EMBEDDING:
            is_whole = is_whole or any(each.magnitude is not None for each in change.low_rank)
            rank = 0 if is_whole else sum(each.rank for each in change.low_rank)
        if is_whole:
            num_rows = count
        elif change.new_rows is not None:
            num_rows = sum(0 <= token - place.shard.start < count for token in change.new_rows[0])
        values = num_rows * width + rank * (count + width)
        return num_rows * 8 + values * self.outer[place.path].weight.input_dtype.itemsize

    def _low_rank(self, layer: AdaptedLayer, planned: _Planned, tensors: AdapterTensors) -> LayerChange:
        """The rank's slices of the changes of a linear layer."""
        count, out, at = planned.num_rank_rows, sum(layer.widths), 0
        a = torch.zeros(count, layer.in_features, dtype=layer.dtype)
        b = torch.zeros(count, max(layer.widths), dtype=layer.dtype)
        spans = torch.zeros(layer.num_experts, len(layer.widths), 2, dtype=torch.int64)
        scale = bias = None
        if planned.has_vectors:
            scale = torch.ones(layer.num_experts, out)
            # At first what is added to the scaled product without the base's bias.
            bias = torch.zeros(layer.num_experts, out) if layer.bias is None else layer.bias.clone()
        for place, replacement in planned.biases if layer.linear.adds_bias else ():
            shard, values = place.shard, tensors[replacement].float()
            values = values[:, 0] if place.stored.expert is None else values[place.stored.expert]
            assert bias is not None
            bias[shard.local_expert, shard.offset : shard.offset + shard.length] = values[place.rows]
        for (expert, part), (place, replacement) in planned.whole.items():
            (rows, inputs), first, rank = place.size, place.shard.offset if place.shard.dim else 0, min(place.size)
            difference = self._difference(place, tensors[replacement])
            a[at : at + rank, first : first + inputs] = difference if rows <= inputs else torch.eye(inputs)
            b[at : at + rank, :rows] = torch.eye(rows) if rows <= inputs else difference.T
            spans[expert, part] = torch.tensor((at, rank))
            at += rank
        for (expert, part), every in planned.low_rank.items():
            spans[expert, part] = torch.tensor((at, sum(change.rank for _, change in every)))
            for place, change in every:
                shard, numbers = place.shard, place.numbers(change)
                features = (numbers >= 0).nonzero()[:, 0]
                numbers, rank_rows = numbers[features], slice(at, at + change.rank)
                up, down = change.scaling * tensors[change.up].float()[numbers], tensors[change.down]
                b[rank_rows, features] = up.T.to(b.dtype)
                if shard.dim:
                    columns = slice(shard.start, shard.start + shard.length)
                    a[rank_rows, shard.offset : shard.offset + shard.length] = down[:, columns]
                else:
                    a[rank_rows] = down
                at += change.rank
                if scale is None or bias is None:
                    continue
                own = features if shard.dim else shard.offset + features
                if change.magnitude is not None:
                    norms = self._norms(place, features, up, down.float())
                    scale[expert, own] = tensors[change.magnitude].float()[numbers, 0] / norms
                if change.bias is not None and layer.linear.adds_bias:
                    bias[expert, own] += change.scaling * tensors[change.bias].float()[numbers, 0]
        if layer.bias is not None and scale is not None and bias is not None:
            bias -= layer.bias * scale  # which the scaled product includes
        return LayerChange(spans, *_narrowed(a, b), scale, bias)

    def _stored(self, stored: StoredSlice) -> tuple[Sliceable, StoredSlice]:
        """A tensor of the checkpoint as the numbers that it represents, and how it is laid out."""
        if self._checkpoint is None:
            places = [own[0].stored for own in (*self._weights.values(), *self._rows.values())]
            needed = {each.name: NeededTensor(each.shape, each.is_transposed) for each in places}
            self._checkpoint = Checkpoint(self._model, family_of(self._model.architecture).prefix, needed)
        stored = stored if self._checkpoint.scheme(stored.name) is None else stored.quantized()
        return self._checkpoint[stored], stored

    def _difference(self, place: _Slice, replacement: Tensor) -> Tensor:
        """The rank's slice of a tensor that replaces one of the base's, less that slice, float32 `[rows, columns]`."""
        (matrix, stored), shard = self._stored(place.stored), place.shard
        before = stored.arranged(shard, matrix[stored.slice(shard)])
        after = replacement.reshape(place.stored.shape)[place.stored.slice(shard)]
        return (place.stored.arranged(shard, after).float() - before.float()).flatten(1)

    def _norms(self, place: _Slice, rows: Tensor, up: Tensor, down: Tensor) -> Tensor:
        """The norms of these of the rank's rows, whole as the checkpoint has them, after `up @ down` is added."""
        (matrix, stored), shard = self._stored(place.stored), place.shard
        first, step, norms = 0 if shard.dim else shard.start, max(1, _AT_ONCE // shard.shape[1]), []
        for at in range(0, len(rows), step):
            own = rows[at : at + step]
            begin, end = int(own[0]), int(own[-1]) + 1
            cut = Shard(shard.shape, first + begin, end - begin)
            weight = stored.arranged(cut, matrix[stored.slice(cut)])[own - begin].flatten(1).float()
            norms.append((weight + up[at : at + step] @ down).norm(dim=1))
        return torch.cat(norms)


def _narrowed(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Float32 matrices in 16 bits if that changes no number: products read half of the bytes, and are the same."""
    for dtype in (torch.bfloat16, torch.float16) if a.dtype == torch.float32 else ():
        narrow = a.to(dtype), b.to(dtype)
        if all(torch.equal(each, whole) for each, whole in zip(narrow, (a, b), strict=True)):
            return narrow
    return a, b


def _is_own(module: Dense | Norm) -> bool:
    """Whether a module after the pooling has tensors of its own in the model's checkpoint."""
    return isinstance(module, Norm) or not (module.folder or module.rows)


def in_blocks(changes: dict[str, Change], allocate: Callable[[int], Tensor]) -> None:
    """Move tensors to a few blocks, uint8, which `allocate` makes. PyTorch rounds pinned memory up to powers of two and
    keeps what was freed for blocks of the same size, so that a block for each tensor would waste half of it."""
    block, at = torch.empty(0, dtype=torch.uint8), 0
    sizes = (each.nbytes for own in changes.values() for each in _tensors(own).values())
    left = sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)
    for path, change in changes.items():
        own: dict[str, Any] = {}
        for name, tensor in _tensors(change).items():
            size = -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
            if size > len(block) - at:
                block, at = allocate(max(size, min(left, _BLOCK))), 0
            own[name] = block[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            at, left = at + size, left - size
        changes[path] = replace(change, **own)


def _tensors(change: Change) -> dict[str, Tensor]:
    return {name: each for name, each in vars(change).items() if each is not None}


def _find(adapter: AdapterRef) -> AdapterFolder:
    """The first of the adapter's paths that has it. If none does, the cause of the `ConfigError` is an `OSError`."""
    problems = []
    for path in adapter.paths:
        try:
            found = open_adapter(Path(path))
        except ConfigError as error:
            problems.append(str(error))
            continue
        if found.digest == adapter.digest:
            return found
        problems.append(f"{path} has changed since the adapter was opened; load it again")
    raise ConfigError("; ".join(problems) or "the adapter has no path") from FileNotFoundError(*adapter.paths)


def _tensor_of(change: TensorChange) -> str:
    """A tensor in the adapter's file."""
    if change.replacement is not None:
        return change.replacement.tensor
    return change.new_rows[1].tensor if change.new_rows is not None else change.low_rank[0].down.tensor
