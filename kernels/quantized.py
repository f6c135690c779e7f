"""Weights in few bits: their numbers, and their packed form, in plain torch: the oracle of the kernels.

A quantized weight is a matrix of codes, each an index into a table of values, and factors for groups of inputs:
`weight[o, i] = (values[codes[o, i]] + offsets[o, group of i]) * scales[o, group of i]`. Every published format that
Quire reads has this form, with other values, groups and factors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.low_rank import ExpertChanges
from quire.kernels.packed import (
    INT8_OFFSET,
    TILE,
    _gated,
    _pack_tiles,
    interleave_gated,
    mix_tiles,
    pack_tiles,
)

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_FP4 = (0.0, 0.0052083333, 0.66666667, 1.0, 0.33333333, 0.5, 0.16666667, 0.25)

VALUES: dict[str, Tensor] = {
    "uint4": torch.arange(16.0),
    "int4": torch.arange(-8.0, 8.0),  # the code is the number + 8
    "e2m1": torch.tensor([*_E2M1, *(-each for each in _E2M1)]),  # OCP Microscaling Formats 1.0
    "nf4": torch.tensor(_NF4),  # Dettmers et al. 2023, "QLoRA"
    "fp4": torch.tensor([*_FP4, *(-each for each in _FP4)]),  # bitsandbytes'
    "iq4_nl": torch.tensor([-127.0, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]),  # ggml's
    "int8": torch.arange(256, dtype=torch.uint8).view(torch.int8).float(),  # the code is the byte
    "uint8": torch.arange(256.0),
    "fp8": torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float(),
}
"""The values that codes of each kind stand for: 16 or 256."""


@cache
def values_on(device: torch.device, name: str) -> Tensor:
    """A table of VALUES on a device. It stays there, as CUDA graphs must not copy from the host."""
    return VALUES[name].to(device)


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight `[out, in]`, or a stack of them `[experts, out, in]`, which stands for numbers of `dtype`."""

    values: str
    """A key of VALUES."""
    dtype: torch.dtype
    """Type of the inputs and results of a product."""
    codes: Tensor
    """uint8 `[…, out, in]`"""
    scales: Tensor
    """float32 `[…, out, groups]`, for equal groups of consecutive columns."""
    offsets: Tensor | None = None
    """The same, in units of the values."""
    columns: Tensor | None = None
    """The input of each column, int64 `[columns]` or `[experts, columns]`, if they are not in order. Each input has one
    column; others have none, for which the number of inputs stands."""
    activations: str | None = None
    """int8, fp8 or fp4: inputs may be rounded to this, with a scale for each row, or for the inputs of each group in
    it."""
    wide: bool = False
    """Scales need the precision of float32."""
    rounding: Tensor | None = None
    """The scale and the zero point with which inputs are rounded to 8 bits, float32 `[2]` or `[experts, 2]`; None: each
    row has its own."""
    global_scale: Tensor | None = None
    """The constant scale of inputs that are rounded to fp4, float32 `[]` or `[experts]`: they are multiplied by it, and
    the largest that the publisher measured becomes 6 * 448."""

    def at(self, expert: int) -> QuantizedWeight:
        """One weight of a stack."""
        factors = self.offsets, self.columns, self.rounding, self.global_scale
        offsets, columns, rounding, global_scale = (None if each is None else each[expert] for each in factors)
        return replace(
            self,
            codes=self.codes[expert],
            scales=self.scales[expert],
            offsets=offsets,
            columns=columns,
            rounding=rounding,
            global_scale=global_scale,
        )

    def dequantize(self) -> Tensor:
        """The weight in `dtype`, its columns as they are stored."""
        values = values_on(self.codes.device, self.values)[self.codes.int()]
        grouped = values.view(*self.scales.shape, -1)
        if self.offsets is not None:
            grouped = grouped + self.offsets[..., None]
        dequantized: Tensor = grouped * self.scales[..., None]
        return dequantized.flatten(-2).to(self.dtype)


@dataclass(frozen=True)
class QuantizedFormat:
    """The properties that weights of one kind have in common, and that kernels have variants for."""

    values: str
    group: int = 0
    """Inputs that share factors; 0: all."""
    has_offsets: bool = False
    wide: bool = False
    rounds_inputs: bool = False
    """Inputs are rounded to the type of the weights (W8A8, W4A4)."""
    has_order: bool = False
    """Columns have an order (`QuantizedWeight.columns`)."""
    has_rounding: bool = False
    """Inputs are rounded with a static scale."""


@dataclass(frozen=True)
class Rounding:
    """The numbers that `quantize` rounds to."""

    values: str
    """int4, int8, fp8 or e2m1."""
    group: int = 0
    """Inputs that share factors; 0: all."""
    rows: int = 1
    """Output features that share factors."""
    has_offsets: bool = False
    """Integers cover the range from the least to the largest weight of a group, not a range around 0."""
    scales: Literal["float", "e8m0", "e4m3"] = "float"
    """Numbers that scales may be: numbers of the weight's type, powers of two (MXFP4), or 8-bit floats times one number
    for the whole weight (NVFP4)."""


_LARGEST = {"int4": 7.5, "int8": 127.5, "fp8": 448.0, "e2m1": 6.0}
"""The number that the largest weight of a group becomes. For integers it is then rounded down, which costs less than a
coarser scale."""
_BETWEEN_E2M1 = torch.tensor([(low + high) / 2 for low, high in pairwise(_E2M1)])
_BETWEEN_E2M1[1::2] = _BETWEEN_E2M1[1::2].nextafter(torch.zeros(()))  # a number in the middle takes the even code


_PARTS = (0.92, 0.84, 0.76, 0.6)
"""Parts of the range of a group that `search_factors` tries to cover."""


def quantize(
    weight: Tensor, rounding: Rounding, largest: Tensor | None = None, *, search: bool = False
) -> QuantizedWeight:
    """Round a weight `[out, in]`, or a stack of them, to the nearest codes; `largest` is as for `choose_factors`. With
    `search`, factors come from `search_factors`."""
    scales, offsets = (search_factors if search else choose_factors)(weight, rounding, largest)
    codes = nearest_codes(weight, rounding, scales, offsets)
    return QuantizedWeight(rounding.values, weight.dtype, codes, scales, offsets)


def search_factors(weight: Tensor, rounding: Rounding, largest: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Like `choose_factors`, but factors of 4-bit codes are chosen for the least sum of squared errors in each group,
    also among some that do not cover the largest weights. With 8 bits, a search changes next to nothing."""
    scales, offsets = choose_factors(weight, rounding, largest)
    if rounding.values not in ("int4", "e2m1") or rounding.rows > 1:
        return scales, offsets
    if rounding.scales == "e4m3" and largest is None:
        largest = weight.float().abs().amax(dim=(-2, -1), keepdim=True)
    errors = _squared_errors(weight, rounding, scales, offsets)
    for part in (0.5,) if rounding.scales == "e8m0" else _PARTS:
        others = choose_factors(weight, rounding, largest, part)
        found = _squared_errors(weight, rounding, *others)
        scales = torch.where(found < errors, others[0], scales)
        if offsets is not None and others[1] is not None:
            offsets = torch.where(found < errors, others[1], offsets)
        errors = torch.minimum(errors, found)
    return scales, offsets


def _squared_errors(weight: Tensor, rounding: Rounding, scales: Tensor, offsets: Tensor | None) -> Tensor:
    """The sum of squared errors of each group, `[…, out, groups]`."""
    codes = nearest_codes(weight, rounding, scales, offsets)
    found = QuantizedWeight(rounding.values, torch.float32, codes, scales, offsets).dequantize()
    return (found - weight.float()).square_().view(*scales.shape, -1).sum(dim=-1)


def choose_factors(
    weight: Tensor, rounding: Rounding, largest: Tensor | None = None, part: float = 1.0
) -> tuple[Tensor, Tensor | None]:
    """Scales and offsets, `[…, out, groups]` in float32, with which codes cover this part of the range of each group.

    `largest`: the largest magnitude of the whole weight, `[…, 1, 1]`, if it is not this one's. Scales that are 8-bit
    floats are multiples of `unit_of(largest)`.
    """
    grouped = weight.float().unflatten(-1, (-1, rounding.group or weight.shape[-1]))  # type: ignore[no-untyped-call]
    low, high = (part * each for each in grouped.aminmax(dim=-1))
    if rounding.has_offsets:
        low, high = low.clamp(max=0), high.clamp(min=0)
        scales = ((high - low) / (2 * _LARGEST[rounding.values])).to(weight.dtype).float()
        scales = torch.where(scales == 0, 1.0, scales)
        lowest = VALUES[rounding.values].min()
        return scales, (low / scales).round().clamp(-2 * _LARGEST[rounding.values], 0) - lowest
    sizes = torch.maximum(-low, high)
    if rounding.rows > 1:
        blocks = F.pad(sizes, (0, 0, 0, -sizes.shape[-2] % rounding.rows)).unflatten(-2, (-1, rounding.rows))  # type: ignore[no-untyped-call]
        sizes = blocks.amax(dim=-2).repeat_interleave(rounding.rows, dim=-2)[..., : sizes.shape[-2], :]
    if rounding.scales == "e8m0":  # The largest becomes at least 3.5 and less than 7, and is rounded to 4 or 6.
        mantissas, exponents = torch.frexp(sizes)
        powers = torch.ldexp(torch.ones_like(sizes), (exponents - 3 + (mantissas >= 0.875)).clamp(min=-126))
        return torch.where(sizes.isfinite(), powers, sizes), None
    if rounding.scales == "e4m3":
        unit = unit_of(sizes.amax(dim=(-2, -1), keepdim=True) if largest is None else largest)
        eighths = (sizes / (_LARGEST[rounding.values] * unit)).clamp(2**-9, 448).to(torch.float8_e4m3fn)
        return eighths.float() * unit, None
    scales = (sizes / _LARGEST[rounding.values]).to(weight.dtype).float()
    return torch.where(scales == 0, 1.0, scales), None


def unit_of(largest: Tensor) -> Tensor:
    """The unit of scales that are 8-bit floats, for a weight with this largest magnitude."""
    return torch.where(largest == 0, 1.0, largest.float() / (448 * _LARGEST["e2m1"]))


def nearest_codes(weight: Tensor, rounding: Rounding, scales: Tensor, offsets: Tensor | None) -> Tensor:
    """The codes, uint8 `[…, out, in]`, whose numbers with these factors, `[…, out, groups]`, are the nearest."""
    numbers: Tensor = weight.float().unflatten(-1, (scales.shape[-1], -1)) / scales[..., None]  # type: ignore[no-untyped-call]
    if offsets is not None:
        numbers = numbers.round_().sub_(offsets[..., None])
    numbers = numbers.flatten(-2)
    match rounding.values:
        case "fp8":
            return numbers.clamp_(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        case "e2m1":
            codes = torch.bucketize(numbers.abs().contiguous(), _BETWEEN_E2M1.to(numbers.device), out_int32=True)
            return codes.to(torch.uint8) | numbers.signbit().to(torch.uint8) << 3
        case "int4":
            return numbers.round_().clamp_(-8, 7).add_(8).to(torch.uint8)
    return numbers.round_().clamp_(-128, 127).to(torch.int8).view(torch.uint8)


def round_static(x: Tensor, rounding: Tensor) -> Tensor:
    """Round `x` to integers of 8 bits with the scale and the zero point of `QuantizedWeight.rounding`, and return them
    without the zero point."""
    scale, zero = rounding
    integers: Tensor = (x.float() / scale + zero).round_().clamp_(-128, 127).sub_(zero)
    return integers.to(x.dtype)  # bfloat16 has all integers of 8 bits


@dataclass(frozen=True)
class CodedTiles:
    """A weight packed for `coded_linear`. A step of a tile is a group of inputs: factors, then words of codes.

    Codes of 4 bits have float16 factors unless scales are wide; codes of 8 bits have float32 factors. A word has 32
    bits of each of TILE features, the code of the first input lowest.
    """

    values: str
    group: int
    """Inputs of a step, a multiple of 8."""
    factors: int
    """Factors of a group: 0 none, 1 scales, 2 scales and offsets; `[factors, TILE]`."""
    tiles: Tensor
    """uint8 `[…, tiles, steps, bytes of a step]`"""
    scales: Tensor
    """float32 `[…, tiles * TILE]`: of each feature, in addition."""

    @property
    def bits(self) -> int:
        return 4 if len(VALUES[self.values]) == 16 else 8


def pack_coded_tiles(
    codes: Tensor, scales: Tensor | None, offsets: Tensor | None, group: int, bits: int, wide: bool, gated: bool = False
) -> Tensor:
    """Pack codes `[out, in]` and their factors, float32 `[out, steps]`, as the tiles of `CodedTiles`.

    The inputs are padded to whole groups. `wide`: factors stay float32. `gated` is as for `pack_tiles`.
    """
    parts = [F.pad(codes, (0, -codes.shape[1] % group)), *(each for each in (scales, offsets) if each is not None)]
    codes, *factors = [interleave_gated(each) if gated else each for each in parts]
    words = _pack_tiles(codes, 32 // bits)  # [tiles, words, TILE, codes]
    if bits == 4:
        words = words[..., ::2] | words[..., 1::2] << 4
    kind = torch.float32 if wide else torch.float16
    heads = [_pack_tiles(factor.to(kind), 1).contiguous().view(torch.uint8).flatten(2) for factor in factors]
    return torch.cat((*heads, words.reshape(len(words), codes.shape[1] // group, -1)), dim=2)


def pack_coded(
    weight: QuantizedWeight, gated: bool = False, pack: Callable[..., Tensor] = pack_coded_tiles
) -> CodedTiles:
    """Pack `[out, in]` with `pack_coded_tiles`, or a platform's."""
    bits = 4 if len(VALUES[weight.values]) == 16 else 8
    wide = bits == 8 or weight.wide
    groups, columns = weight.scales.shape[-1], weight.codes.shape[-1]
    scales, offsets = weight.scales.float(), weight.offsets
    factors: tuple[Tensor | None, Tensor | None] = None, None
    assert columns % groups == 0
    group = columns // groups
    if groups == 1:
        group += -group % 8
    assert group % 8 == 0, "groups are whole words"
    size = group if group <= MAX_GROUP else next(size for size in (128, 64, 32, 16, 8) if group % size == 0)
    if groups == 1 and offsets is None:
        of_rows = scales[:, 0]
    else:
        of_rows = common_factor(scales, wide)
        parts = group // size
        factors = (
            (scales / of_rows[:, None]).repeat_interleave(parts, dim=1),
            None if offsets is None else offsets.repeat_interleave(parts, dim=1),
        )
    tiles = pack(weight.codes, *factors, size, bits, wide, gated)
    of_rows = interleave_gated(of_rows) if gated else of_rows
    count = sum(each is not None for each in factors)
    return CodedTiles(weight.values, size, count, tiles, F.pad(of_rows, (0, -len(of_rows) % TILE)))


def common_factor(scales: Tensor, wide: bool) -> Tensor:
    """The divisors for the scales `[out, groups]` of each feature, with which they fit float32 if `wide`, else float16:
    the largest becomes a half or a little more, or about 2 ** 14 in float16, which then loses least.

    If all are 8-bit floats times one number, as in NVFP4, float16 loses nothing.
    """
    mantissas, exponents = torch.frexp(scales.abs().amax(dim=1))
    if wide:
        return torch.ldexp(torch.ones_like(mantissas), exponents)

    def losses(scales: Tensor, factors: Tensor) -> Tensor:
        exact = scales / factors[:, None]
        return exact.half().float().sub_(exact).abs_().sum(dim=1)

    best = torch.ldexp(torch.ones_like(mantissas), exponents - 15)
    lost = losses(scales, best)
    for eighth in range(9, 16):
        (rows,) = torch.where(lost > 0)
        if len(rows) == 0:
            break
        factors = torch.ldexp(mantissas[rows] * 8 / eighth, exponents[rows] - 14)
        found = losses(scales[rows], factors)
        best[rows] = torch.where(found < lost[rows], factors, best[rows])
        lost[rows] = torch.minimum(found, lost[rows])
    return best


MAX_GROUP = 256
"""Larger groups are divided, so that a step fits the caches."""


def unpack_coded(packed: CodedTiles, rows: Tensor | None = None) -> Tensor:
    """The weights `[tiles * TILE, in]` that one weight's tiles stand for, or some rows of them, in float32; inputs are
    padded."""
    if rows is None:
        rows = torch.arange(len(packed.tiles) * TILE, device=packed.tiles.device)
    tiles, steps, size = packed.tiles.shape
    tile, feature = rows // TILE, rows % TILE
    head = size - packed.group * packed.bits // 8 * TILE
    kind = torch.float16 if head == 2 * packed.factors * TILE else torch.float32
    words = packed.tiles.view(torch.int32)[:, :, head // 4 :].view(tiles, steps, -1, TILE)
    codes = words[tile, :, :, feature].view(torch.uint8)  # [rows, steps, bytes]
    if packed.bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), dim=-1)
    table = values_on(codes.device, packed.values)
    values = table.index_select(0, codes.flatten().int()).view(len(rows), steps, packed.group)
    factors = packed.tiles.view(kind)[:, :, : packed.factors * TILE].view(tiles, steps, packed.factors, TILE)
    own = factors[tile, :, :, feature].float()  # [rows, steps, factors]
    if packed.factors == 2:
        values = values + own[..., 1:]
    if packed.factors:
        values = values * own[..., :1]
    return values.flatten(1)


def coded_linear(
    x: Tensor,
    tiles: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    features: int,
    values: str,
    group: int,
    factors: int,
    activation: str = "",
) -> Tensor:
    """Multiply `x` `[rows, in]` by `CodedTiles`, with sums in float32; `[rows, features]` of the type of `x`.

    A kernel may round `x` to 16 bits in each group, and values of 4 bits to 13.
    With an activation, weight and bias are in the order of `interleave_gated`, and the result is gated.
    """
    weight = unpack_coded(CodedTiles(values, group, factors, tiles, scales)) * scales[:, None]
    out = F.linear(x.float(), weight[:, : x.shape[1]])
    if activation:
        out = out if bias is None else out + bias
        return _gated(out, activation, features, x.dtype)
    out = out[:, :features]
    return (out if bias is None else out + bias).to(x.dtype)


def coded_experts(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_scales: Tensor,
    down_bias: Tensor | None,
    activation: str,
    values: str,
    gate_up_group: int,
    gate_up_factors: int,
    down_group: int,
    down_factors: int,
    gated: bool = True,
    changes: ExpertChanges | None = None,
) -> Tensor:
    """`packed_experts` with the `CodedTiles` of each expert: tiles `[experts, tiles, steps, bytes]`, and float32 scales
    and biases `[experts, tiles * TILE]`."""

    def gates_and_ups(expert: int, rows: Tensor) -> Tensor:
        tiles, scales = gate_up[expert], gate_up_scales[expert]
        bias = None if gate_up_bias is None else gate_up_bias[expert]
        return coded_linear(rows.float(), tiles, scales, bias, len(scales), values, gate_up_group, gate_up_factors)

    def downs(expert: int, rows: Tensor) -> Tensor:
        tiles, scales = down[expert], down_scales[expert]
        bias = None if down_bias is None else down_bias[expert]
        return coded_linear(rows.float(), tiles, scales, bias, len(scales), values, down_group, down_factors)

    return mix_tiles(x, weights, ids, gate_up.shape, gates_and_ups, downs, activation, gated, changes)


def pack_int8_codes(
    weight: QuantizedWeight, gated: bool = False, pack: Callable[..., Tensor] = pack_tiles
) -> tuple[Tensor, Tensor]:
    """Pack `[out, in]` of int8 with one scale per output feature as `pack_int8_tiles` does, without rounding, with
    `pack_tiles`, or a platform's."""
    scales = interleave_gated(weight.scales) if gated else weight.scales
    tiles = pack(weight.codes, 4, gated).bitwise_xor_(INT8_OFFSET)
    return tiles, F.pad(scales[:, 0], (0, -len(scales) % TILE))


def pack_int8_excess(weight: QuantizedWeight, rounding: Tensor, gated: bool = False) -> Tensor:
    """`excess` of `int8_linear` for the tiles of `pack_int8_codes`."""
    sums = weight.codes.view(torch.int8).sum(dim=1, dtype=torch.int32) * rounding[1].int()
    sums = interleave_gated(sums) if gated else sums
    return F.pad(sums, (0, -len(sums) % TILE))


def pack_int4_codes(
    weight: QuantizedWeight, group: int, gated: bool = False, pack: Callable[..., Tensor] = pack_coded_tiles
) -> Tensor:
    """Pack `[out, in]` of 16 consecutive integers as `pack_int4_tiles` does, without rounding, in groups of this size,
    which divides the weight's. `pack` is as for `pack_coded`."""
    steps = weight.codes.shape[-1] // group
    scales, offsets = (
        None if each is None else each.repeat_interleave(steps // each.shape[-1], dim=1)
        for each in (weight.scales, weight.offsets)
    )
    assert scales is not None
    least = VALUES[weight.values][0]
    zeros = scales * (least if offsets is None else offsets + least)
    halves = weight.codes.view(len(weight.codes), -1, 2, 4)  # of words
    return pack(halves.transpose(2, 3).flatten(1), scales, zeros, group, 4, True, gated)


def stack_coded(
    weights: QuantizedWeight, gated: bool = False, pack: Callable[..., Tensor] = pack_coded_tiles
) -> CodedTiles:
    """`pack_coded` of each expert, `[experts, …]`."""
    first = pack_coded(weights.at(0), gated, pack)
    tiles, scales = (each.new_empty((len(weights.codes), *each.shape)) for each in (first.tiles, first.scales))
    tiles[0], scales[0] = first.tiles, first.scales
    for expert in range(1, len(weights.codes)):
        each = pack_coded(weights.at(expert), gated, pack)
        tiles[expert], scales[expert] = each.tiles, each.scales
    return replace(first, tiles=tiles, scales=scales)
