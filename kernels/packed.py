"""Matmuls by packed weights, and the packing itself, in plain torch: the oracle of the CPU kernels.

A weight is laid out in tiles of output features, with elements of 32, 16, 8 or 4 bits. The other operations are in
`quire.kernels.reference`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.low_rank import AdapterRows, ExpertChanges, LowRankPool
from quire.kernels.reference.elementwise import act_mul
from quire.kernels.reference.experts import mix_experts
from quire.kernels.reference.low_rank import add_low_rank

INT8_ZERO = 128
"""The unsigned byte that represents 0 in quantized activations."""


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize `x` `[rows, columns]` to bytes, `x ≈ (bytes - INT8_ZERO) * scale`, with float32 scales `[rows]`.

    The largest magnitude of a row maps to 127 steps; a row of zeros has scale 0.
    """
    x = x.float()
    scales = x.abs().amax(dim=-1) / 127
    inverse = torch.where(scales > 0, 1 / scales, 0.0)
    return (x * inverse[:, None]).round_().add_(INT8_ZERO).to(torch.uint8), scales


def scale_rows(x: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`x * scales[:, None] + bias` in `dtype`; `x` is float32 or `dtype`, `[rows, columns]`, and may be overwritten."""
    x = x * scales[:, None]
    return (x if bias is None else x + bias).to(dtype)


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize `weight` `[out, in]` to int8 from -127 to 127, with one float32 scale per output feature."""
    scales = weight.abs().amax(dim=-1).float() / 127
    inverse = torch.where(scales > 0, 1 / scales, 0.0)
    return (weight.float() * inverse[:, None]).round_().to(torch.int8), scales


def quantize_groups(weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize `weight` `[out, in]` to bytes from 0 to 15, with float32 scales and zeros `[out, groups]`.

    Each group is `group` columns. A weight is about `byte * scale + zero`; a group's minimum and maximum are exact.
    """
    grouped = weight.float().view(len(weight), -1, group)
    low, high = grouped.aminmax(dim=-1)
    scales = (high - low) / 15
    inverse = torch.where(scales > 0, 1 / scales, 0.0)
    quantized = ((grouped - low[..., None]) * inverse[..., None]).round_().clamp_(0, 15).to(torch.uint8)
    return quantized.flatten(-2), scales, low


TILE = 32
"""Output features per tile."""
SEPARATE = "separate"
"""In place of an activation: the result is gates and then ups, float32. It is among the names of activations because
both say what becomes of the sums of tiles of gates and ups; a flag of its own would have no meaning for other tiles."""
INT8_OFFSET = 128
"""Added to packed 8-bit weights to make them unsigned, which flips their highest bit."""


def pack_tiles(weight: Tensor, per_word: int = 1, gated: bool = False) -> Tensor:
    """Pack `[out, in]` as `[tiles, in / per_word, TILE, per_word]`: a word of TILE output features after the other.

    `gated`: the weight consists of gates and ups, which are packed as by `interleave_gated`.
    """
    return _pack_tiles(interleave_gated(weight) if gated else weight, per_word)


def pack_int8_tiles(weight: Tensor, gated: bool = False) -> tuple[Tensor, Tensor]:
    """Quantize `[out, in]` as `quantize_weight` does and pack it; returns unsigned tiles and scales `[tiles * TILE]`.

    A word is four bytes, each offset by INT8_OFFSET. `gated` is as for `pack_tiles`.
    """
    quantized, scales = quantize_weight(interleave_gated(weight) if gated else weight)
    return _pack_tiles(quantized, 4).view(torch.uint8) ^ INT8_OFFSET, F.pad(scales, (0, -len(scales) % TILE))


def pack_int4_tiles(weight: Tensor, group: int, gated: bool = False) -> Tensor:
    """Quantize `[out, in]` as `quantize_groups` does and pack it; returns bytes `[tiles, groups, bytes of a group]`.

    A group's bytes are TILE float32 scales, TILE float32 zeros, and `[group / 8, TILE, 4]` words of eight inputs: the
    first four in the low halves of the bytes, the others in the high halves. `gated` is as for `pack_tiles`.
    """
    quantized, *factors = quantize_groups(interleave_gated(weight) if gated else weight, group)
    both = _pack_tiles(quantized, 8).view(-1, quantized.shape[1] // group, group // 8, TILE, 2, 4)
    words = both[..., 0, :] | both[..., 1, :] << 4
    heads = [_pack_tiles(factor, 1).view(torch.uint8).flatten(2) for factor in factors]
    return torch.cat((*heads, words.flatten(2)), dim=2)


def _unpack_int4(weight: Tensor) -> Tensor:
    """The weights `[tiles * TILE, in]` that the tiles of `pack_int4_tiles` stand for."""
    scales, zeros = weight[:, :, : 8 * TILE].contiguous().view(torch.float32).view(*weight.shape[:2], 2, TILE).unbind(2)
    words = weight[:, :, 8 * TILE :].view(*weight.shape[:2], -1, TILE, 4)
    halves = torch.stack((words & 15, words >> 4), dim=4).float()  # [tiles, groups, words, TILE, 2, 4]
    wide = halves.permute(0, 3, 1, 2, 4, 5).flatten(3) * scales.permute(0, 2, 1)[..., None]
    return (wide + zeros.permute(0, 2, 1)[..., None]).flatten(2).flatten(0, 1)


def _pack_tiles(weight: Tensor, per_word: int) -> Tensor:
    outs, ins = weight.shape
    padded = F.pad(weight, (0, -ins % per_word, 0, -outs % TILE))
    return padded.view(-1, TILE, padded.shape[1] // per_word, per_word).transpose(1, 2).contiguous()


def _unpack_tiles(weight: Tensor, outs: int, ins: int) -> Tensor:
    return weight.transpose(1, 2).flatten(2).flatten(0, 1)[:outs, :ins]


def interleave_gated(gate_up: Tensor) -> Tensor:
    """Reorder `[2 * size, …]`, gates before ups, to half a tile of gates, their ups, the next gates, …, zero-padded."""
    half = TILE // 2
    padded = [F.pad(part, (0, 0) * (part.dim() - 1) + (0, -len(part) % half)) for part in gate_up.chunk(2)]
    return torch.stack([part.view(-1, half, *part.shape[1:]) for part in padded], dim=1).flatten(0, 2)


def _gated(both: Tensor, activation: str, features: int, dtype: torch.dtype) -> Tensor:
    """`act_mul`, in `dtype`, of rows of float32 in the order of `interleave_gated`; or SEPARATE."""
    halves = both.view(len(both), -1, 2, TILE // 2)
    gates, ups = (halves[:, :, side].flatten(1)[:, :features] for side in range(2))
    separate = torch.cat((gates, ups), dim=-1)
    return separate if activation == SEPARATE else act_mul(separate, activation).to(dtype)


def tiled_linear(x: Tensor, weight: Tensor, bias: Tensor | None, features: int, activation: str = "") -> Tensor:
    """Multiply `x` `[rows, in]` by packed tiles of its type, or of a narrower one than its float32, which gives the
    same sums; returns `[rows, features]` of the type of `x`.

    A word is one float32, one float16 or two bfloat16. With an activation, weight and bias are in the order of
    `interleave_gated`, and the result is gated; or it is SEPARATE, `[rows, 2 * features]`.
    """
    if activation:
        both = F.linear(x.float(), _unpack_tiles(weight, len(weight) * TILE, x.shape[1]).float())
        both = both if bias is None else both + bias
        return _gated(both, activation, features, x.dtype)
    return F.linear(x, _unpack_tiles(weight, features, x.shape[1]).to(x.dtype), bias)


def int8_linear(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    features: int,
    activation: str = "",
    rounding: Tensor | None = None,
    excess: Tensor | None = None,
) -> Tensor:
    """Multiply `x` `[rows, in]`, quantized as by `quantize_rows`, by the tiles of `pack_int8_tiles`.

    `scales` are float32 `[tiles * TILE]`. Sums are exact; the result has the type of `x`. `activation` is as for
    `tiled_linear`. With `rounding`, float32 `[2]`, all rows are quantized with this scale and zero point instead, and
    cut off; `excess` is then the zero point times the sum of each feature's weights, int32 `[tiles * TILE]`.
    """
    if activation:
        both = int8_linear(x.float(), weight, scales, None, len(weight) * TILE, "", rounding, excess)
        both = both if bias is None else both + bias
        return _gated(both, activation, features, x.dtype)
    unpacked = _unpack_tiles(weight, features, x.shape[1]).double() - INT8_OFFSET
    if rounding is None or excess is None:
        quantized, row_scales = quantize_rows(x)
        sums = F.linear(quantized.double() - INT8_ZERO, unpacked)
    else:
        scale, zero = rounding
        row_scales = scale.expand(len(x))
        integers = (x.float() / scale + zero).round_().clamp_(-128, 127)
        sums = F.linear(integers.double(), unpacked) - excess[:features]
    return scale_rows(sums.float() * scales[:features], row_scales, bias, x.dtype)


def int4_linear(x: Tensor, weight: Tensor, bias: Tensor | None, features: int, activation: str = "") -> Tensor:
    """Multiply `x` `[rows, in]` by the tiles of `pack_int4_tiles`; `[rows, features]` of the type of `x`.

    Each group of a row is first quantized as by `quantize_rows`. `activation` is as for `tiled_linear`.
    """
    if activation:
        both = int4_linear(x.float(), weight, None, len(weight) * TILE)
        both = both if bias is None else both + bias
        return _gated(both, activation, features, x.dtype)
    unpacked = _unpack_int4(weight)[:features]
    quantized, scales = quantize_rows(x.reshape(-1, x.shape[1] // weight.shape[1]))
    rounded = (quantized.float() - INT8_ZERO) * scales[:, None]
    out = F.linear(rounded.view(x.shape), unpacked)
    return (out if bias is None else out + bias).to(x.dtype)


def gated_low_rank(
    x: Tensor,
    weight: Tensor,
    scales: Tensor | None,
    bias: Tensor | None,
    features: int,
    activation: str,
    pool: LowRankPool,
    rows: AdapterRows,
) -> Tensor:
    """A gated product whose gates and ups are changed by `add_low_rank` before the activation; `[rows, features]`.

    The weight is tiles as for `int8_linear` if there are scales, as for `int4_linear`, or as for `tiled_linear`.
    """
    if scales is not None:
        both = int8_linear(x, weight, scales, bias, features, SEPARATE)
    elif weight.dtype == torch.uint8:
        both = int4_linear(x, weight, bias, features, SEPARATE)
    else:
        both = tiled_linear(x, weight, bias, features, SEPARATE)
    add_low_rank(both, x, pool, rows)
    return act_mul(both, activation).to(x.dtype)


def packed_experts(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor | None,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_scales: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    gated: bool = True,
    changes: ExpertChanges | None = None,
) -> Tensor:
    """`fused_experts` with the packed tiles of each expert, `[experts, tiles, …]`.

    They are tiles as for `tiled_linear`, as for `int8_linear` if there are scales, or as for `int4_linear`. A tile of
    `gate_up` holds TILE / 2 gates, then their ups; `down` has one input for each pair. If not `gated`, it holds TILE
    ups, and `down` has one input for each. Scales and biases are float32 `[experts, tiles * TILE]`.
    """

    def product(rows: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None, expert: int) -> Tensor:
        features, rows = weight.shape[1] * TILE, rows.float()
        if scales is not None:
            out = int8_linear(rows, weight[expert], scales[expert], None, features)
        elif weight.dtype == torch.uint8:
            out = int4_linear(rows, weight[expert], None, features)
        else:
            out = tiled_linear(rows, weight[expert], None, features)
        return out if bias is None else out + bias[expert]

    def gates_and_ups(expert: int, rows: Tensor) -> Tensor:
        return product(rows, gate_up, gate_up_scales, gate_up_bias, expert)

    def downs(expert: int, rows: Tensor) -> Tensor:
        return product(rows, down, down_scales, down_bias, expert)

    return mix_tiles(x, weights, ids, gate_up.shape, gates_and_ups, downs, activation, gated, changes)


def mix_tiles(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    shape: Sequence[int],
    gate_up: Callable[[int, Tensor], Tensor],
    down: Callable[[int, Tensor], Tensor],
    activation: str,
    gated: bool,
    changes: ExpertChanges | None,
) -> Tensor:
    """`mix_experts` with products of an expert and its rows, float32, which have the features of whole tiles; `shape`
    is that of the tiles of `gate_up`."""
    num_experts, tiles, *_ = shape
    inputs = tiles * (TILE // 2 if gated else TILE)
    size = inputs if changes is None else changes.size

    def gates_and_ups(expert: int, rows: Tensor) -> Tensor:
        parts = gate_up(expert, rows).view(len(rows), tiles, -1, TILE // 2 if gated else TILE).transpose(1, 2)
        return parts.flatten(2)[:, :, :size].flatten(1)

    def downs(expert: int, inner: Tensor) -> Tensor:
        return down(expert, F.pad(inner, (0, inputs - size)))[:, : x.shape[1]]

    return mix_experts(x, weights, ids, num_experts, gates_and_ups, downs, activation, gated, changes)
