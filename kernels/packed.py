"""Matmuls by packed weights, and the packing itself, in plain torch: the oracle of the CPU kernels.

A weight is laid out in tiles of output features, with elements of 32, 16, 8 or 4 bits. The other operations are in
`quire.kernels.reference`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.reference import act_mul, by_expert

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


def quantize_weight(weight: Tensor, steps: int = 127) -> tuple[Tensor, Tensor]:
    """Quantize `weight` `[out, in]` to int8 from -steps to steps, with one float32 scale per output feature."""
    scales = weight.abs().amax(dim=-1).float() / steps
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


def _gated(both: Tensor, activation: str, features: int) -> Tensor:
    """`act_mul` of rows in the order of `interleave_gated`."""
    halves = both.view(len(both), -1, 2, TILE // 2)
    gates, ups = (halves[:, :, side].flatten(1)[:, :features] for side in range(2))
    return act_mul(torch.cat((gates, ups), dim=-1), activation)


def tiled_linear(x: Tensor, weight: Tensor, bias: Tensor | None, features: int, activation: str = "") -> Tensor:
    """Multiply `x` `[rows, in]` by packed tiles of its type; returns `[rows, features]`.

    A word is one float32 or two bfloat16. With an activation, weight and bias are in the order of `interleave_gated`,
    and the result is gated.
    """
    if activation:
        both = F.linear(x.float(), _unpack_tiles(weight, len(weight) * TILE, x.shape[1]).float())
        both = both if bias is None else both + bias
        return _gated(both, activation, features).to(x.dtype)
    return F.linear(x, _unpack_tiles(weight, features, x.shape[1]), bias)


def int8_linear(
    x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, features: int, activation: str = ""
) -> Tensor:
    """Multiply `x` `[rows, in]`, quantized as by `quantize_rows`, by the tiles of `pack_int8_tiles`.

    `scales` are float32 `[tiles * TILE]`. Sums are exact; the result has the type of `x`. `activation` is as for
    `tiled_linear`.
    """
    if activation:
        both = int8_linear(x.float(), weight, scales, None, len(weight) * TILE)
        both = both if bias is None else both + bias
        return _gated(both, activation, features).to(x.dtype)
    quantized, row_scales = quantize_rows(x)
    unpacked = _unpack_tiles(weight, features, x.shape[1]).double() - INT8_OFFSET
    sums = F.linear(quantized.double() - INT8_ZERO, unpacked).float()
    return scale_rows(sums * scales[:features], row_scales, bias, x.dtype)


def widened_linear(x: Tensor, weight: Tensor, bias: Tensor | None, features: int, dtype: torch.dtype) -> Tensor:
    """Multiply float32 `x` `[rows, in]` by 16-bit tiles with float32 sums; `[rows, features]` of `dtype`, as `bias`."""
    out = F.linear(x, _unpack_tiles(weight, features, x.shape[1]).float())
    return (out if bias is None else out + bias).to(dtype)


def int4_linear(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor,
    bias: Tensor | None,
    features: int,
    dtype: torch.dtype,
) -> Tensor:
    """Multiply float32 `x` `[rows, in]` by tiles of 4-bit weights; `[rows, features]` of `dtype`, as `bias`.

    `weight` is `[tiles, in, TILE / 2, 1]` bytes, with feature `j` in the low half of byte `j` and `j + TILE / 2` in the
    high half; `scales` and `zeros` are `[tiles, groups, TILE, 1]`. A weight is `half * scale + zero`.
    """
    halves = torch.cat((weight & 15, weight >> 4), dim=2).float()
    group = weight.shape[1] // scales.shape[1]
    wide = halves * scales.repeat_interleave(group, dim=1) + zeros.repeat_interleave(group, dim=1)
    return widened_linear(x, wide, bias, features, dtype)


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
) -> Tensor:
    """`fused_experts` with the packed tiles of each expert, `[experts, tiles, words, TILE, …]`.

    Weights have the type of `x`, float32 or bfloat16, or are bytes as for `int8_linear`. A tile of `gate_up` holds
    TILE / 2 gates, then their ups; `down` has one input for each pair. Scales and biases are float32
    `[experts, tiles * TILE]`.
    """
    hidden = x.shape[1]

    def product(rows: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None, expert: int) -> Tensor:
        features = weight.shape[1] * TILE
        if scales is None:
            out = tiled_linear(rows, weight[expert], None, features)
        else:
            out = int8_linear(rows, weight[expert], scales[expert], None, features)
        return out if bias is None else (out + bias[expert]).to(x.dtype)

    def feed_forward(expert: int, rows: Tensor) -> Tensor:
        both = product(rows, gate_up, gate_up_scales, gate_up_bias, expert)
        halves = both.view(len(rows), -1, 2, TILE // 2).transpose(1, 2)  # gates, ups
        inner = act_mul(halves.reshape(len(rows), -1), activation)
        return product(inner, down, down_scales, down_bias, expert)[:, :hidden]

    return by_expert(x, weights, ids, len(gate_up), feed_forward)
