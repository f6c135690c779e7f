"""The parameters of a quantized weight: codes and factors in place of the weight itself, sharded like it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.engine.architecture.quantization.form import ORDERED_GROUP, Form
from quire.engine.config.engine_config import EngineConfig
from quire.engine.config.memory_plan import matrix_forms
from quire.engine.layers.weight import Shard, Weight
from quire.kernels.quantized import QuantizedFormat, QuantizedWeight

Part = Literal["codes", "scales", "offsets"]


class QuantizedParameters(nn.Module):
    """A rank's part of the quantized weight `like`. Once it is packed, the parameters are empty."""

    def __init__(
        self, like: Weight, form: Form, order: Tensor | None, rounding: Tensor | None, global_scale: Tensor | None
    ) -> None:
        """`order` is the group of each of the rank's columns, `[columns]` or `[experts, columns]`; `rounding` and
        `global_scale` are as in `QuantizedWeight`."""
        super().__init__()
        self._form, self._dtype, self._order = form, like.dtype, order
        self._of_inputs = rounding, global_scale
        self.codes = Weight(tuple(like.shape), *like.shards, dtype=torch.uint8)
        shards = [self._factors_of(shard) for shard in like.shards]
        columns = shards[0].length if shards[0].dim == 1 else shards[0].shape[1]
        self.scales = Weight((*like.shape[:-1], columns), *shards, dtype=torch.float32)
        self.offsets = None
        if form.has_offsets:
            self.offsets = Weight((*like.shape[:-1], columns), *shards, dtype=torch.float32)

    @property
    def group(self) -> int:
        """Columns that share factors, as they are read."""
        return self._form.group

    def parts(self) -> Iterator[tuple[Part, Weight]]:
        """The parameters to be loaded."""
        yield "codes", self.codes
        yield "scales", self.scales
        if self.offsets is not None:
            yield "offsets", self.offsets

    def _factors_of(self, shard: Shard) -> Shard:
        """The shard of the factors that belong to a shard of the weight."""
        rows, columns = shard.shape
        if shard.dim == 0:
            return replace(shard, shape=(rows, -(-columns // self.group)))
        if self._form.has_order:  # any rank may have columns of any group
            groups = -(-columns // self.group)
            return replace(shard, shape=(rows, groups), start=0, length=groups, offset=0)
        start, length, offset = (each // self.group for each in (shard.start, shard.length, shard.offset))
        return replace(shard, shape=(rows, columns // self.group), start=start, length=length, offset=offset)

    def weight(self) -> QuantizedWeight:
        """The loaded weight; the parameters become empty."""
        codes, scales = self.codes.data, self.scales.data
        offsets = None if self.offsets is None else self.offsets.data
        for parameter in self.parameters():
            parameter.data = parameter.data.new_empty(0)
        rounding, global_scale = (None if each is None else each.to(codes.device) for each in self._of_inputs)
        weight = QuantizedWeight(
            self._form.values,
            self._dtype,
            codes,
            scales,
            offsets,
            activations=self._form.activations,
            wide=self._form.wide,
            rounding=rounding,
            global_scale=global_scale,
        )
        return weight if self._order is None else _ordered(weight, self._order, self._form.group)


def quantized_formats(config: EngineConfig) -> tuple[QuantizedFormat, ...]:
    """The formats of quantized weights that a rank multiplies by, of the model and of a drafter."""
    found: dict[QuantizedFormat, None] = {}
    for each in config.with_drafter:
        found |= dict.fromkeys(_formats(each))
    return tuple(found)


def _formats(config: EngineConfig) -> Iterator[QuantizedFormat]:
    embedding, head = config.model.architecture.outer_matrices(1)
    only_looked_up = {embedding.module} - {head.module}
    for _, matrix, form in matrix_forms(config):
        if form is not None and matrix.module not in only_looked_up:
            group = 0 if form.group == matrix.columns and not form.has_offsets else form.group
            if form.has_order and matrix.columns < form.inputs:
                group = ORDERED_GROUP
            rounds = form.rounds_inputs(matrix.columns, config.parallel.device)
            kind = form.values, group, form.has_offsets, form.wide, rounds
            yield QuantizedFormat(*kind, has_order=form.has_order, has_rounding=form.has_rounding)


class Quantizable(Protocol):
    """A layer with a weight that may be quantized."""

    weight: Weight
    quantized: QuantizedParameters | None


def loaded_weight(layer: Quantizable) -> Tensor | QuantizedWeight:
    """The weight to be packed."""
    return layer.weight if layer.quantized is None else layer.quantized.weight()


def keep_quantized(
    layer: Quantizable, form: Form, order: Tensor | None, rounding: Tensor | None, global_scale: Tensor | None = None
) -> QuantizedParameters:
    """Let a layer load its weight in this form; the others are as in `QuantizedParameters`."""
    with layer.weight.device:
        layer.quantized = QuantizedParameters(layer.weight, form, order, rounding, global_scale)
    layer.weight.data = layer.weight.data.new_empty(0)
    return layer.quantized


def _ordered(weight: QuantizedWeight, order: Tensor, group: int) -> QuantizedWeight:
    """The weight with its columns in the order of their groups, of each expert if `order` is `[experts, columns]`.
    Groups of which the rank does not have all columns are divided, and padded with columns that no input belongs to."""
    orders = order.view(-1, order.shape[-1])
    counts = torch.stack([torch.bincount(each, minlength=weight.scales.shape[-1]) for each in orders])
    size = group if (counts == group).all() else ORDERED_GROUP
    pieces = -(-counts // size)
    most, inputs = int(pieces.sum(1).max()), order.shape[-1]
    groups = torch.zeros(len(orders), most, dtype=torch.int64)
    columns = torch.full((len(orders), most * size), inputs)
    for expert, (own, count, number) in enumerate(zip(orders, counts, pieces, strict=True)):
        groups[expert, : int(number.sum())] = torch.arange(len(number)).repeat_interleave(number)
        starts = (number.cumsum(0) - number) * size - (count.cumsum(0) - count)
        by_group = own.argsort(stable=True)
        columns[expert, torch.arange(inputs) + starts[own[by_group]]] = by_group
    if order.ndim == 1:
        groups, columns = groups[0], columns[0]
    groups, columns = (each.to(weight.codes.device) for each in (groups, columns))

    def gathered(tensor: Tensor, places: Tensor) -> Tensor:
        return tensor.gather(-1, places.unsqueeze(-2).expand(*tensor.shape[:-1], -1))

    codes = F.pad(weight.codes, (0, 1)) if columns.shape[-1] > inputs else weight.codes
    offsets = None if weight.offsets is None else gathered(weight.offsets, groups)
    return replace(
        weight, codes=gathered(codes, columns), scales=gathered(weight.scales, groups), offsets=offsets, columns=columns
    )
