"""Products by packed weights in plain torch, and how weights are packed: the oracle of the CPU's kernels.

A weight is laid out in panels of output features, its numbers of 32, 16, 8 or 4 bits. The other operations are in
`quire.kernels.reference`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.reference import act_mul, by_expert

INT8_ZERO = 128
"""The unsigned byte that stands for 0 in quantized activations."""


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Each row of `x` `[rows, columns]` as bytes: `x ≈ (bytes - INT8_ZERO) * scale`, scales float32 `[rows]`.

    The largest magnitude of a row becomes 127 steps; a row of zeros has the scale 0.
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
    """`weight` `[out, in]` as int8 from -steps to steps, with a float32 scale for each output feature."""
    scales = weight.abs().amax(dim=-1).float() / steps
    inverse = torch.where(scales > 0, 1 / scales, 0.0)
    return (weight.float() * inverse[:, None]).round_().to(torch.int8), scales


def quantize_groups(weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """`weight` `[out, in]` as bytes from 0 to 15, with float32 scales and zeros `[out, groups]`, `group` columns each.

    A weight is about `byte * scale + zero`; the least and the greatest of a group are exact.
    """
    grouped = weight.float().view(len(weight), -1, group)
    low, high = grouped.aminmax(dim=-1)
    scales = (high - low) / 15
    inverse = torch.where(scales > 0, 1 / scales, 0.0)
    quantized = ((grouped - low[..., None]) * inverse[..., None]).round_().clamp_(0, 15).to(torch.uint8)
    return quantized.flatten(-2), scales, low


PANEL = 32
INT8_OFFSET = 128
"""On 8-bit weights in panels, which makes them unsigned: it turns their highest bit over."""


def panels(weight: Tensor, per_word: int = 1, gated: bool = False) -> Tensor:
    """`[out, in]` → `[panels, in / per_word, PANEL, per_word]`: the words of PANEL output features side by side.

    `gated`: the weight is of gates and ups, which are put `side_by_side`.
    """
    return _panels(side_by_side(weight) if gated else weight, per_word)


def int8_panels(weight: Tensor, gated: bool = False) -> tuple[Tensor, Tensor]:
    """`[out, in]`, rounded as by `quantize_weight`, as `panels` of unsigned bytes, and the scales `[panels * PANEL]`.

    Four bytes are a word, each INT8_OFFSET too high. `gated` as for `panels`.
    """
    quantized, scales = quantize_weight(side_by_side(weight) if gated else weight)
    return _panels(quantized, 4).view(torch.uint8) ^ INT8_OFFSET, F.pad(scales, (0, -len(scales) % PANEL))


def _panels(weight: Tensor, per_word: int) -> Tensor:
    outs, ins = weight.shape
    padded = F.pad(weight, (0, -ins % per_word, 0, -outs % PANEL))
    return padded.view(-1, PANEL, padded.shape[1] // per_word, per_word).transpose(1, 2).contiguous()


def _unpanelled(weight: Tensor, outs: int, ins: int) -> Tensor:
    return weight.transpose(1, 2).flatten(2).flatten(0, 1)[:outs, :ins]


def side_by_side(gate_up: Tensor) -> Tensor:
    """`[2 * size, …]`, gates before ups → half a panel of gates, their ups, the next gates, …, filled up with zeros."""
    half = PANEL // 2
    filled = [F.pad(part, (0, 0) * (part.dim() - 1) + (0, -len(part) % half)) for part in gate_up.chunk(2)]
    return torch.stack([part.view(-1, half, *part.shape[1:]) for part in filled], dim=1).flatten(0, 2)


def _gated(both: Tensor, activation: str, features: int) -> Tensor:
    """`act_mul` of rows `side_by_side`."""
    halves = both.view(len(both), -1, 2, PANEL // 2)
    gates, ups = (halves[:, :, side].flatten(1)[:, :features] for side in range(2))
    return act_mul(torch.cat((gates, ups), dim=-1), activation)


def panel_linear(x: Tensor, weight: Tensor, bias: Tensor | None, features: int, activation: str = "") -> Tensor:
    """`x` `[rows, in]` by `panels` of its own type, float32 (a word is one) or bfloat16 (two); `[rows, features]`.

    With an activation, weight and bias are those of `side_by_side`, and the result is gated.
    """
    if activation:
        both = F.linear(x.float(), _unpanelled(weight, len(weight) * PANEL, x.shape[1]).float())
        both = both if bias is None else both + bias
        return _gated(both, activation, features).to(x.dtype)
    return F.linear(x, _unpanelled(weight, features, x.shape[1]), bias)


def int8_linear(
    x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, features: int, activation: str = ""
) -> Tensor:
    """`x` `[rows, in]`, rounded as by `quantize_rows`, by panels of bytes, four to a word, each INT8_OFFSET too high.

    `scales` are float32 `[panels * PANEL]`. Sums are exact; the result is of the type of `x`. With an activation as for
    `panel_linear`.
    """
    if activation:
        both = int8_linear(x.float(), weight, scales, None, len(weight) * PANEL)
        both = both if bias is None else both + bias
        return _gated(both, activation, features).to(x.dtype)
    quantized, of_rows = quantize_rows(x)
    whole = _unpanelled(weight, features, x.shape[1]).double() - INT8_OFFSET
    sums = F.linear(quantized.double() - INT8_ZERO, whole).float()
    return scale_rows(sums * scales[:features], of_rows, bias, x.dtype)


def widened_linear(x: Tensor, weight: Tensor, bias: Tensor | None, features: int, dtype: torch.dtype) -> Tensor:
    """float32 `x` `[rows, in]` by 16-bit `panels`, with float32 sums; `[rows, features]` of `dtype`, as `bias`."""
    out = F.linear(x, _unpanelled(weight, features, x.shape[1]).float())
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
    """float32 `x` `[rows, in]` by panels of groups of 4 bits; `[rows, features]` of `dtype`, as `bias`.

    `weight` is `[panels, in, PANEL / 2, 1]` bytes, feature `j` in the low half of byte `j` and `j + PANEL / 2` in the
    high half; `scales` and `zeros` are `[panels, groups, PANEL, 1]`. A weight is `half * scale + zero`.
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
    """`fused_experts` by weights as `panels`, each expert's one after the other: `[experts, panels, words, PANEL, …]`.

    Weights are of the type of `x`, float32 or bfloat16, or bytes as for `int8_linear`. A panel of `gate_up` holds
    PANEL / 2 gates, then their ups; `down` has an input for each. Scales and biases are float32 `[experts, panels *
    PANEL]`.
    """
    hidden = x.shape[1]

    def product(rows: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None, expert: int) -> Tensor:
        features = weight.shape[1] * PANEL
        if scales is None:
            out = panel_linear(rows, weight[expert], None, features)
        else:
            out = int8_linear(rows, weight[expert], scales[expert], None, features)
        return out if bias is None else (out + bias[expert]).to(x.dtype)

    def feed_forward(expert: int, rows: Tensor) -> Tensor:
        both = product(rows, gate_up, gate_up_scales, gate_up_bias, expert)
        halves = both.view(len(rows), -1, 2, PANEL // 2).transpose(1, 2)  # gates, ups
        inner = act_mul(halves.reshape(len(rows), -1), activation)
        return product(inner, down, down_scales, down_bias, expert)[:, :hidden]

    return by_expert(x, weights, ids, len(gate_up), feed_forward)
