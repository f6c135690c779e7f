"""The feed-forward layers of a mixture of experts in one operation, packed once as in `quire.kernels.linear`.

With Quire's own kernels, all experts are computed in one call: rows are sorted by expert, experts without rows cost
nothing, and a token's result depends only on the token (kernels/cpu/experts.cpp). Elsewhere the packed linear layers of
the experts that have rows are called one by one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels import coded_words, fp4, linear, packed, packed_state, quantized, reference
from quire.kernels.coded_words import RoundedRows, RowRounding
from quire.kernels.dispatch import by_device
from quire.kernels.low_rank import ExpertChanges
from quire.kernels.packed_state import Packed
from quire.kernels.quantized import QuantizedWeight

fused_experts = by_device(reference.fused_experts)
_act_mul = by_device(reference.act_mul)
_add_low_rank = by_device(reference.add_low_rank)
_packed_experts = by_device(packed.packed_experts)
_pack_tiles = by_device(packed.pack_tiles)
_pack_coded_tiles = by_device(quantized.pack_coded_tiles)
_coded_experts = by_device(quantized.coded_experts)
_coded_fused_experts = by_device(coded_words.coded_fused_experts)
_rounded_fused_experts = by_device(coded_words.rounded_fused_experts)
_fp4_fused_experts = by_device(fp4.fp4_fused_experts)


class PackedExperts(Packed, ABC):
    """Experts in the layout that the device multiplies fastest."""

    @abstractmethod
    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor, changes: ExpertChanges | None = None) -> Tensor:
        """The weighted sums `[tokens, hidden]`; see `fused_experts`."""

    @property
    def row_rounding(self) -> RowRounding | None:
        """As in `linear.PackedLinear`."""
        return None

    def of_rounded(self, x: RoundedRows, weights: Tensor, ids: Tensor, changes: ExpertChanges | None = None) -> Tensor:
        """As in `linear.PackedLinear`."""
        raise AssertionError(f"{type(self).__name__} does not take rounded inputs")

    @abstractmethod
    def state(self, index: int) -> list[Tensor]:
        """The packed tensors of the expert at `index`: `restore` copies them to any index on any rank.

        They are contiguous, have the same size in bytes for every expert, and may be views or copies.
        """

    @property
    def layout(self) -> str:
        """A description of the layout; experts can only be moved between objects of equal `layout`."""
        return f"{type(self).__name__} {[(part.dtype, *part.shape) for part in self.state(0)]}"

    def restore(self, index: int, state: Sequence[Tensor]) -> None:
        """Overwrite the expert at `index` with the `state` of another one."""
        for target, source in zip(self.state(index), state, strict=True):
            target.copy_(source)


def pack_experts(
    gate_up: Tensor | QuantizedWeight,
    down: Tensor | QuantizedWeight,
    activation: str,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    quantization: linear.Quantization | None = None,
    gated: bool = True,
    inputs: torch.dtype | None = None,
) -> PackedExperts:
    """Pack `gate_up` `[experts, 2 * size, hidden]`, or if not `gated` `[experts, size, hidden]`, and `down` `[experts,
    hidden, size]`; see `fused_experts`. Columns in another order may be more than the inputs.

    Both may be overwritten: experts are most of a model, so the packed weights reuse their memory if they fit. Kernels
    and quantization are selected as in `pack_linear`, which has `inputs`, too.
    """
    biases = (gate_up_bias, down_bias)
    if isinstance(gate_up, QuantizedWeight) or isinstance(down, QuantizedWeight):
        return _pack_quantized(gate_up, down, activation, *biases, gated, inputs)
    packing = linear.packing(gate_up[0], quantization, inputs)
    if packing is linear.PlainLinear:
        return PlainExperts(gate_up, down, activation, *biases)
    if issubclass(packing, linear.FusedLinear):
        return TiledExperts(gate_up, down, activation, *biases, gated, quantization)
    products = [[linear.pack_linear(weight, quantization) for weight in weights] for weights in (gate_up, down)]
    return ExpertByExpert(products[0], products[1], activation, *biases, gated)


def _pack_quantized(
    gate_up: Tensor | QuantizedWeight,
    down: Tensor | QuantizedWeight,
    activation: str,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    gated: bool,
    inputs: torch.dtype | None,
) -> PackedExperts:
    biases = (gate_up_bias, down_bias)
    if isinstance(gate_up, QuantizedWeight) and isinstance(down, QuantizedWeight):
        both = gate_up, down
        is_plain = all(each.columns is None and each.rounding is None for each in both)
        rounds = is_plain and all(linear.rounds_inputs(each) for each in both)
        if linear.gpu_capability(gate_up.codes.device) is not None:
            are_of_4_bits = [each.values == "e2m1" for each in both]
            if rounds and all(are_of_4_bits):
                return Fp4Experts(gate_up, down, activation, *biases)
            if rounds and not any(are_of_4_bits):
                return RoundedExperts(gate_up, down, activation, *biases)
            return CodedWordsExperts(gate_up, down, activation, *biases, gated)
        if rounds and gate_up.values == down.values:
            if issubclass(linear.packing(gate_up.at(0)), linear.FusedLinear):
                return TiledExperts(gate_up, down, activation, *biases, gated)
        elif is_plain and gate_up.values == down.values and _fits_tiles(down, gated):
            return CodedExperts(gate_up, down, activation, *biases, gated)
    products = [
        [linear.pack_linear(weights.at(expert)) for expert in range(len(weights.codes))]
        if isinstance(weights, QuantizedWeight)
        else [linear.pack_linear(weight, inputs=inputs) for weight in weights]
        for weights in (gate_up, down)
    ]
    return ExpertByExpert(products[0], products[1], activation, *biases, gated)


def _fits_tiles(down: QuantizedWeight, gated: bool) -> bool:
    """Whether the inputs can fill whole tiles of gates: groups cannot be padded."""
    return down.scales.shape[-1] == 1 or _padding(down.codes, gated) == 0


class PlainExperts(PackedExperts):
    """Unpacked weights."""

    def __init__(
        self, gate_up: Tensor, down: Tensor, activation: str, gate_up_bias: Tensor | None, down_bias: Tensor | None
    ) -> None:
        self._weights = gate_up.detach(), down.detach(), activation, *_detached(gate_up_bias, down_bias)

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor, changes: ExpertChanges | None = None) -> Tensor:
        return fused_experts(x, weights, ids, *self._weights, changes=changes)

    def state(self, index: int) -> list[Tensor]:
        return _tensors_at(self._weights, index)


class TiledExperts(PackedExperts):
    """The packed tiles of all experts in one tensor."""

    def __init__(
        self,
        gate_up: Tensor | QuantizedWeight,
        down: Tensor | QuantizedWeight,
        activation: str,
        gate_up_bias: Tensor | None,
        down_bias: Tensor | None,
        gated: bool,
        quantization: linear.Quantization | None = None,
    ) -> None:
        """Quantized weights, which `linear.rounds_inputs`, keep their integers."""
        first: tuple[Tensor, Tensor | None]
        second: tuple[Tensor, Tensor | None]
        if isinstance(gate_up, QuantizedWeight) and isinstance(down, QuantizedWeight):
            of_codes = _int4_stack if gate_up.values == "int4" else _int8_stack
            first, second = of_codes(gate_up, gated=gated), of_codes(down, padding=_padding(down.codes, gated))
        else:
            assert isinstance(gate_up, Tensor)
            assert isinstance(down, Tensor)
            stacked = {"int8": _int8_stack, "int4": _int4_stack, None: _stack}[quantization]
            first = stacked(gate_up.detach(), gated=gated)
            second = stacked(down.detach(), padding=_padding(down, gated))
        first_bias, second_bias = _tiled_biases(gate_up_bias, down_bias, gated)
        self._weights, self._gated = (*first, first_bias, *second, second_bias, activation), gated

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor, changes: ExpertChanges | None = None) -> Tensor:
        return _packed_experts(x, weights, ids, *self._weights, self._gated, changes)

    def state(self, index: int) -> list[Tensor]:
        return _tensors_at(self._weights, index)


class CodedExperts(PackedExperts):
    """The `CodedTiles` of all experts in one tensor: weights in few bits as they are published."""

    def __init__(
        self,
        gate_up: QuantizedWeight,
        down: QuantizedWeight,
        activation: str,
        gate_up_bias: Tensor | None,
        down_bias: Tensor | None,
        gated: bool,
    ) -> None:
        down = replace(down, codes=_pad_columns(down.codes, _padding(down.codes, gated)))
        first = quantized.stack_coded(gate_up, gated, _pack_coded_tiles)
        second = quantized.stack_coded(down, False, _pack_coded_tiles)
        first_bias, second_bias = _tiled_biases(gate_up_bias, down_bias, gated)
        self._weights = first.tiles, first.scales, first_bias, second.tiles, second.scales, second_bias, activation
        self._form = first.values, first.group, first.factors, second.group, second.factors, gated

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor, changes: ExpertChanges | None = None) -> Tensor:
        return _coded_experts(x, weights, ids, *self._weights, *self._form, changes)

    @property
    def layout(self) -> str:
        return f"{super().layout} of {self._form}"

    def state(self, index: int) -> list[Tensor]:
        return _tensors_at(self._weights, index)


class CodedWordsExperts(PackedExperts):
    """Weights in few bits as they are published, on a GPU, as in `linear.CodedWordsLinear`."""

    def __init__(
        self,
        gate_up: QuantizedWeight,
        down: QuantizedWeight,
        activation: str,
        gate_up_bias: Tensor | None,
        down_bias: Tensor | None,
        gated: bool,
    ) -> None:
        self._weights = coded_words.pack_words(gate_up), coded_words.pack_words(down)
        self._activation, self._biases, self._gated = activation, _detached(gate_up_bias, down_bias), gated

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor, changes: ExpertChanges | None = None) -> Tensor:
        given = *self._weights, self._activation, *self._biases, self._gated
        return _coded_fused_experts(x, weights, ids, *given, changes)

    @property
    def layout(self) -> str:
        return f"{super().layout} of {[(each.values, each.inputs, each.group) for each in self._weights]}"

    def state(self, index: int) -> list[Tensor]:
        weights = [each for weight in self._weights for each in weight.at(index).tensors]
        return weights + _tensors_at(self._biases, index)


class RoundedExperts(PackedExperts):
    """Weights of 8 bits as they are published, on a GPU, as in `linear.RoundedLinear`."""

    def __init__(
        self,
        gate_up: QuantizedWeight,
        down: QuantizedWeight,
        activation: str,
        gate_up_bias: Tensor | None,
        down_bias: Tensor | None,
    ) -> None:
        first, second = ((coded_words.typed_codes(each), each.scales) for each in (gate_up, down))
        self._weights = *first, *second, activation, *_detached(gate_up_bias, down_bias)

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor, changes: ExpertChanges | None = None) -> Tensor:
        return _rounded_fused_experts(x, weights, ids, *self._weights, changes=changes)

    @property
    def row_rounding(self) -> RowRounding | None:
        codes, scales, *_ = self._weights
        return RowRounding(codes.dtype, scales.shape[2])

    def of_rounded(self, x: RoundedRows, weights: Tensor, ids: Tensor, changes: ExpertChanges | None = None) -> Tensor:
        return _rounded_fused_experts(x.codes, weights, ids, *self._weights, x.scales, x.dtype, changes)

    def state(self, index: int) -> list[Tensor]:
        return _tensors_at(self._weights, index)


class Fp4Experts(PackedExperts):
    """Weights of 4-bit floats as they are published, on a GPU, as in `linear.Fp4Linear`."""

    def __init__(
        self,
        gate_up: QuantizedWeight,
        down: QuantizedWeight,
        activation: str,
        gate_up_bias: Tensor | None,
        down_bias: Tensor | None,
    ) -> None:
        self._weights = fp4.pack_fp4(gate_up), fp4.pack_fp4(down)
        self._activation, self._biases = activation, _detached(gate_up_bias, down_bias)

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor, changes: ExpertChanges | None = None) -> Tensor:
        return _fp4_fused_experts(x, weights, ids, *self._weights, self._activation, *self._biases, changes)

    def state(self, index: int) -> list[Tensor]:
        return [each for weight in self._weights for each in weight.at(index).tensors] + _tensors_at(
            self._biases, index
        )


def _detached(gate_up_bias: Tensor | None, down_bias: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    first, second = (bias if bias is None else bias.detach() for bias in (gate_up_bias, down_bias))
    return first, second


def _tiled_biases(
    gate_up_bias: Tensor | None, down_bias: Tensor | None, gated: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Biases `[experts, features]` in the order of tiles, in float32."""
    if gate_up_bias is not None and not gated:
        gate_up_bias = F.pad(gate_up_bias.detach().float(), (0, -gate_up_bias.shape[1] % packed.TILE))
    elif gate_up_bias is not None:
        gate_up_bias = torch.stack([packed.interleave_gated(bias) for bias in gate_up_bias.detach().float()])
    if down_bias is not None:
        down_bias = F.pad(down_bias.detach().float(), (0, -down_bias.shape[1] % packed.TILE))
    return gate_up_bias, down_bias


def _padding(down: Tensor, gated: bool) -> int:
    """Columns that `down` lacks: it has one for each pair of gate and up in a tile, or for each up."""
    return -down.shape[-1] % (packed.TILE // 2 if gated else packed.TILE)


def _tensors_at(weights: Sequence[Tensor | str | None], index: int) -> list[Tensor]:
    return [weight[index] for weight in weights if isinstance(weight, Tensor)]


def _stack(weights: Tensor, *, gated: bool = False, padding: int = 0) -> tuple[Tensor, None]:
    """Pack each expert's weight, padded by `padding` columns, into tiles; in the memory of `weights` if they fit."""
    tiles = (linear.pack_float_tiles(_pad_columns(weight, padding), gated) for weight in weights)
    first = next(tiles)
    shape = (len(weights), *first.shape)
    fits = first.numel() == weights[0].numel() and weights.is_contiguous()
    stack = weights.view(shape) if fits else weights.new_empty(shape)
    for target, source in zip(stack, chain((first,), tiles), strict=True):
        target.copy_(source)
    return stack, None


def _int8_stack(weights: Tensor | QuantizedWeight, *, gated: bool = False, padding: int = 0) -> tuple[Tensor, Tensor]:
    tiles = (
        quantized.pack_int8_codes(weight, gated, _pack_tiles)
        if isinstance(weight, QuantizedWeight)
        else linear.pack_int8_tiles(weight, gated)
        for weight in _padded_experts(weights, padding)
    )
    first = next(tiles)
    stack, scales = (x.new_empty((_number(weights), *x.shape)) for x in first)
    for expert, packed_weight in enumerate(chain((first,), tiles)):
        stack[expert], scales[expert] = packed_weight
    return stack, scales


def _int4_stack(weights: Tensor | QuantizedWeight, *, gated: bool = False, padding: int = 0) -> tuple[Tensor, None]:
    tiles = (linear.pack_int4_tiles(weight, gated) for weight in _padded_experts(weights, padding))
    first = next(tiles)
    stack = first.new_empty((_number(weights), *first.shape))
    for expert, packed_weight in enumerate(chain((first,), tiles)):
        stack[expert] = packed_weight
    return stack, None


def _number(weights: Tensor | QuantizedWeight) -> int:
    """Number of experts."""
    return len(weights.codes if isinstance(weights, QuantizedWeight) else weights)


def _padded_experts(weights: Tensor | QuantizedWeight, padding: int) -> Iterator[Tensor | QuantizedWeight]:
    """Each expert's weight, padded by `padding` columns."""
    for expert in range(_number(weights)):
        if isinstance(weights, QuantizedWeight):
            weight = weights.at(expert)
            yield replace(weight, codes=_pad_columns(weight.codes, padding))
        else:
            yield _pad_columns(weights[expert], padding)


def _pad_columns(weight: Tensor, padding: int) -> Tensor:
    return F.pad(weight, (0, padding)) if padding else weight


class ExpertByExpert(PackedExperts):
    """On CPUs, two packed linear layers per expert, called for every expert that has rows.

    Python reads which experts these are, so steps cannot be replayed: decodes run without CUDA graphs or op replay.
    """

    def __init__(
        self,
        gate_up: Sequence[linear.PackedLinear],
        down: Sequence[linear.PackedLinear],
        activation: str,
        gate_up_bias: Tensor | None,
        down_bias: Tensor | None,
        gated: bool,
    ) -> None:
        self._gate_up, self._down, self._activation, self._gated = list(gate_up), list(down), activation, gated
        self._gate_up_biases, self._down_biases = (
            [None] * len(down) if bias is None else list(bias.detach()) for bias in (gate_up_bias, down_bias)
        )

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor, changes: ExpertChanges | None = None) -> Tensor:
        def gates_and_ups(expert: int, rows: Tensor) -> Tensor:
            return self._gate_up[expert](rows, self._gate_up_biases[expert])

        def downs(expert: int, inner: Tensor) -> Tensor:
            return self._down[expert](inner, self._down_biases[expert])

        given = gates_and_ups, downs, self._activation, self._gated
        return reference.mix_experts(x, weights, ids, len(self._down), *given, changes, _act_mul, _add_low_rank)

    @property
    def layout(self) -> str:
        return f"{super().layout} of {packed_state.to_plain(self._expert(0), [], copies=True)}"

    def state(self, index: int) -> list[Tensor]:
        return packed_state.tensors_of(self._expert(index))

    def restore(self, index: int, state: Sequence[Tensor]) -> None:
        rest = list(state)
        for experts in self._lists:
            targets = packed_state.tensors_of(experts[index])
            sources, rest = rest[: len(targets)], rest[len(targets) :]
            if packed_state.is_opaque(experts[index]):
                experts[index] = packed_state.with_tensors(experts[index], [each.clone() for each in sources])
                continue
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)

    def _expert(self, index: int) -> list[Any]:
        return [experts[index] for experts in self._lists]

    @property
    def _lists(self) -> list[list[Any]]:
        return [self._gate_up, self._down, self._gate_up_biases, self._down_biases]
