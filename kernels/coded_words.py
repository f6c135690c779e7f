"""Weights of 4 or 8 bits in the layout that GPUs multiply by, and the products, in plain torch: the oracle of the
Triton kernels.

`QuantizedWeight` defines the numbers. They are multiplied in one of two ways: as `CodedWords`, whose codes become
numbers of the type of the inputs in registers, or as 8-bit floats or integers by inputs that are rounded to the same
(W8A8).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.cache import LARGEST
from quire.kernels.low_rank import ExpertChanges
from quire.kernels.packed_state import Packed
from quire.kernels.quantized import VALUES, QuantizedWeight, common_factor, round_static, values_on
from quire.kernels.reference.elementwise import act_mul, activate, add_rms_norm, rms_norm
from quire.kernels.reference.experts import mix_experts

WORDS = 16
"""Words of a feature in a block, and inputs of a step of the tensor cores."""
ROUNDED_GROUP = 128
"""Inputs of a row that share a scale, if not all do."""


@dataclass(frozen=True)
class CodedWords(Packed):
    """A weight `[out, in]`, or a stack of them, packed for `coded_matmul` or `coded_fused_experts`.

    A block is 16 words of each feature: 128 inputs of 4 bits, or 64 of 8. Word `w` has inputs `w`, `w + 16`, …, the
    first one lowest. Codes of 4 bits have float16 factors unless scales are wide; codes of 8 bits have float32 factors.
    """

    values: str
    inputs: int
    """Columns as stored."""
    group: int
    """Inputs that share factors: a power of two, or whole blocks; 0 if there are no factors."""
    words: Tensor
    """int32 `[…, blocks, out, 16]`"""
    scales: Tensor | None
    """`[…, groups, out]`, at most 1; groups are padded to whole blocks."""
    offsets: Tensor | None
    """The same, in units of the values."""
    of_rows: Tensor
    """float32 `[…, out]`: scales of features, in addition. NaN if a code of the feature is NaN."""
    columns: Tensor | None = None
    """int64 `[…, columns]`: as in `QuantizedWeight`."""
    rounding: Tensor | None = None
    """float32 `[…, 2]`: as in `QuantizedWeight`. The weight's scales include the inputs' scale."""

    @property
    def bits(self) -> int:
        return 4 if len(VALUES[self.values]) == 16 else 8

    @property
    def features(self) -> int:
        return self.words.shape[-2]

    @property
    def tensors(self) -> list[Tensor]:
        every = self.words, self.scales, self.offsets, self.of_rows, self.columns, self.rounding
        return [each for each in every if each is not None]

    def at(self, expert: int) -> CodedWords:
        """One weight of a stack."""
        optional = self.scales, self.offsets, self.columns, self.rounding
        scales, offsets, columns, rounding = (None if each is None else each[expert] for each in optional)
        words, of_rows = self.words[expert], self.of_rows[expert]
        return CodedWords(self.values, self.inputs, self.group, words, scales, offsets, of_rows, columns, rounding)

    def rows(self, rows: Tensor) -> CodedWords:
        """Some rows of one weight."""
        scales, offsets = (None if each is None else each[:, rows] for each in (self.scales, self.offsets))
        return replace(self, words=self.words[:, rows], scales=scales, offsets=offsets, of_rows=self.of_rows[rows])


def pack_words(weight: QuantizedWeight) -> CodedWords:
    """Pack a weight, or a stack, on any device."""
    if weight.codes.dim() == 3:
        return _pack_stack(weight)
    bits = 4 if len(VALUES[weight.values]) == 16 else 8
    of_block, per_word = WORDS * 32 // bits, 32 // bits
    inputs, groups = weight.codes.shape[-1], weight.scales.shape[-1]
    kind = torch.float32 if bits == 8 or weight.wide else torch.float16
    assert inputs % groups == 0
    codes = weight.codes ^ 0x80 if weight.values == "int8" else weight.codes
    codes = F.pad(codes, (0, -inputs % of_block)).reshape(*codes.shape[:-1], -1, per_word, WORDS)
    words = codes[..., 0, :].int()
    for place in range(1, per_word):
        words |= codes[..., place, :].int() << bits * place
    factors: tuple[Tensor | None, Tensor | None]
    group, scales, offsets = inputs // groups, weight.scales.float(), weight.offsets
    scales = scales if weight.rounding is None else scales * weight.rounding[0]
    if groups == 1 and offsets is None:
        of_rows, group, factors = scales[..., 0], 0, (None, None)
    else:
        # The largest becomes a half or a little more: kernels multiply by up to 2 ** 126.
        of_rows = common_factor(scales, kind == torch.float32)
        of_rows = of_rows if kind == torch.float32 else of_rows * 2**15
        size = group if group % of_block == 0 else gcd(group, of_block)
        padding = -inputs % max(size, of_block) // size

        def of_groups(factor: Tensor) -> Tensor:
            """`[…, out, groups]` as `[…, groups of the packed weight, out]`."""
            spread = F.pad(factor.repeat_interleave(group // size, dim=-1), (0, padding)).movedim(-1, -2)
            return spread.to(kind).contiguous()

        factors = of_groups(scales / of_rows[..., None]), None if offsets is None else of_groups(offsets)
        group = size
    if weight.values == "fp8":
        of_rows = of_rows.masked_fill(((weight.codes & 0x7F) == 0x7F).any(dim=-1), torch.nan)
    words = words.movedim(-2, -3).contiguous()
    return CodedWords(
        weight.values,
        inputs,
        group,
        words,
        scales=factors[0],
        offsets=factors[1],
        of_rows=of_rows.contiguous(),
        columns=weight.columns,
        rounding=weight.rounding,
    )


def _pack_stack(weights: QuantizedWeight) -> CodedWords:
    """`pack_words` of each expert, one at a time: temporary tensors are one expert's."""
    first = pack_words(weights.at(0))

    def of_all(each: Tensor) -> Tensor:
        return each.new_empty((len(weights.codes), *each.shape))

    optional = first.scales, first.offsets, first.columns, first.rounding
    scales, offsets, columns, rounding = (None if each is None else of_all(each) for each in optional)
    words, of_rows = of_all(first.words), of_all(first.of_rows)
    stack = CodedWords(first.values, first.inputs, first.group, words, scales, offsets, of_rows, columns, rounding)
    for expert in range(len(weights.codes)):
        packed = pack_words(weights.at(expert)) if expert else first
        for target, source in zip(stack.at(expert).tensors, packed.tensors, strict=True):
            target.copy_(source)
    return stack


def unpack_words(packed: CodedWords) -> Tensor:
    """The weight `[…, out, in]` in float32, its columns as they are stored."""
    places = torch.arange(0, 32, packed.bits, device=packed.words.device)[:, None]
    codes = packed.words.movedim(-3, -2)[..., None, :] >> places & (1 << packed.bits) - 1
    codes = codes.flatten(-3)[..., : packed.inputs]  # of [blocks, codes of a word, words]
    values = values_on(codes.device, packed.values)[codes ^ 0x80 if packed.values == "int8" else codes]
    for factors, combine in ((packed.offsets, torch.add), (packed.scales, torch.mul)):
        if factors is not None:
            wide = factors.float().movedim(-1, -2).repeat_interleave(packed.group, dim=-1)
            values = combine(values, wide[..., : packed.inputs])
    unpacked: Tensor = values * packed.of_rows[..., None]
    return unpacked


def coded_matmul(x: Tensor, weight: CodedWords, bias: Tensor | None = None) -> Tensor:
    """Multiply `x` `[rows, in]`, of any type of floats, by a packed weight: `[rows, out]` of the type of `x`.

    Sums are float32.
    """
    if weight.columns is not None:
        x = F.pad(x, (0, 1)).index_select(1, weight.columns)
    if weight.rounding is not None:
        x = round_static(x, weight.rounding)
    return F.linear(x.float(), unpack_words(weight), None if bias is None else bias.float()).to(x.dtype)


def coded_fused_experts(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate_up: CodedWords,
    down: CodedWords,
    activation: str,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    gated: bool = True,
    changes: ExpertChanges | None = None,
) -> Tensor:
    """`reference.fused_experts` with stacks of packed weights. Their shapes do not show whether there are gates:
    reordered columns may be more than the inputs."""

    def gates_and_ups(expert: int, rows: Tensor) -> Tensor:
        return coded_matmul(rows, gate_up.at(expert), _bias_at(gate_up_bias, expert))

    def downs(expert: int, inner: Tensor) -> Tensor:
        return coded_matmul(inner, down.at(expert), _bias_at(down_bias, expert))

    return mix_experts(x, weights, ids, len(down.words), gates_and_ups, downs, activation, gated, changes)


def _bias_at(bias: Tensor | None, expert: int) -> Tensor | None:
    return None if bias is None else bias[expert]


def round_rows(x: Tensor, dtype: torch.dtype, groups: int = 1) -> tuple[Tensor, Tensor]:
    """Round `x` `[rows, in]` to float8_e4m3fn or int8, and return float32 scales `[rows, groups]`: the largest number
    of a group becomes 448 or 127. More than one group are of ROUNDED_GROUP inputs; the last one may have fewer."""
    rows, inputs = x.shape
    size = ROUNDED_GROUP if groups > 1 else inputs
    assert groups == -(-inputs // size)
    grouped, largest = F.pad(x.float(), (0, groups * size - inputs)).view(rows, groups, size), LARGEST[dtype]
    # By a tensor: on GPUs, torch multiplies by the reciprocal of a number.
    scales = grouped.abs().amax(dim=2) / torch.full((), largest, device=x.device)
    codes = (grouped / torch.where(scales > 0, scales, 1.0)[..., None]).clamp(-largest, largest)
    codes = codes.flatten(1)[:, :inputs]
    return (codes.round() if dtype == torch.int8 else codes).to(dtype), scales


class RowRounding(NamedTuple):
    """How the inputs of a product are rounded: the arguments of `round_rows`."""

    dtype: torch.dtype
    groups: int


@dataclass(frozen=True)
class RoundedRows:
    """Rows that `round_rows` has rounded, for a product that rounds its inputs in the same way."""

    codes: Tensor
    scales: Tensor
    dtype: torch.dtype
    """The type that they had."""
    rounding: RowRounding
    plain: Tensor | None = None
    """The rows as they were, if some readers do not round them in this way."""

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def __getitem__(self, rows: Tensor, /) -> RoundedRows:
        """Some of the rows."""
        codes = self.codes.view(torch.uint8)[rows].view(self.codes.dtype)
        plain = None if self.plain is None else self.plain[rows]
        return RoundedRows(codes, self.scales[rows], self.dtype, self.rounding, plain)


def plain_rows(x: Tensor | RoundedRows) -> Tensor:
    """Rows as they were before they were rounded."""
    if isinstance(x, Tensor):
        return x
    assert x.plain is not None
    return x.plain


def rows_for(x: Tensor | RoundedRows, rounding: RowRounding | None) -> Tensor | RoundedRows:
    """Rows for a product that rounds its inputs in this way."""
    return x if isinstance(x, RoundedRows) and x.rounding == rounding else plain_rows(x)


def rms_norm_rounded(
    x: Tensor,
    weight: Tensor,
    eps: float,
    offset: float,
    dtype: torch.dtype,
    groups: int,
    plain: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`round_rows` of `reference.rms_norm` of rows `[rows, columns]`, which is stored in `plain`, if given."""
    normed = rms_norm(x, weight, eps, offset)
    if plain is not None:
        plain.copy_(normed)
    return round_rows(normed, dtype, groups)


def add_rms_norm_rounded(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    offset: float,
    dtype: torch.dtype,
    groups: int,
    plain: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`round_rows` of `reference.add_rms_norm`, which is stored in `plain`, if given: codes, scales, and the sum."""
    normed, total = add_rms_norm(x, residual, weight, eps, offset)
    if plain is not None:
        plain.copy_(normed)
    return *round_rows(normed, dtype, groups), total


def act_mul_rounded(
    x: Tensor, activation: str, dtype: torch.dtype, groups: int, gated: bool = True
) -> tuple[Tensor, Tensor]:
    """`round_rows` of `reference.act_mul` of rows `[rows, 2 * columns]`, or if not `gated` of `reference.activate` of
    rows `[rows, columns]`."""
    return round_rows((act_mul if gated else activate)(x, activation), dtype, groups)


def typed_codes(weight: QuantizedWeight) -> Tensor:
    """The codes of int8 or fp8 as numbers of their type, in the same memory."""
    return weight.codes.view(torch.int8 if weight.values == "int8" else torch.float8_e4m3fn)


def rounded_matmul(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    x_scales: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Multiply `x` `[rows, in]`, rounded by `round_rows`, by a weight `[out, in]`: `[rows, out]` of the type of `x`.

    `codes` is float8_e4m3fn or int8; `scales` is float32 `[out, groups]`, for all inputs or for each ROUNDED_GROUP.
    With `x_scales`, `x` has been rounded, and `dtype` is the result's.
    """
    groups = scales.shape[1]
    size = ROUNDED_GROUP if groups > 1 else x.shape[1]
    rounded = x
    if x_scales is None:
        rounded, x_scales = round_rows(x, codes.dtype, groups)

    def numbers(each: Tensor, factors: Tensor) -> Tensor:
        return each.float() * factors.repeat_interleave(size, dim=1)[:, : each.shape[1]]

    product = F.linear(numbers(rounded, x_scales), numbers(codes, scales), None if bias is None else bias.float())
    return product.to(dtype or x.dtype)


def rounded_fused_experts(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    down: Tensor,
    down_scales: Tensor,
    activation: str,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    x_scales: Tensor | None = None,
    dtype: torch.dtype | None = None,
    changes: ExpertChanges | None = None,
) -> Tensor:
    """`reference.fused_experts` with weights and scales as in `rounded_matmul`, stacked to `[experts, …]`; `x_scales`
    and `dtype` are as in `rounded_matmul`, too."""
    dtype, rounding = dtype or x.dtype, RowRounding(gate_up.dtype, gate_up_scales.shape[2])
    if x_scales is None:
        x, x_scales = round_rows(x, *rounding)

    def gates_and_ups(expert: int, rows: RoundedRows) -> Tensor:
        bias = _bias_at(gate_up_bias, expert)
        return rounded_matmul(rows.codes, gate_up[expert], gate_up_scales[expert], bias, rows.scales, rows.dtype)

    def downs(expert: int, inner: Tensor) -> Tensor:
        return rounded_matmul(inner, down[expert], down_scales[expert], _bias_at(down_bias, expert))

    rows, is_gated = RoundedRows(x, x_scales, dtype, rounding), gate_up.shape[1] > down.shape[2]
    return mix_experts(rows, weights, ids, len(down), gates_and_ups, downs, activation, is_gated, changes)
