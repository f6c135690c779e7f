"""Products of 4-bit floats by 4-bit floats (NVFP4, W4A4) in the layout that GPUs multiply, in plain torch: the oracle
of the Triton kernels.

A group of 16 inputs has an 8-bit float as its scale, on both sides. In addition, a weight has a float32 for each output
feature, and inputs one that is constant, which the publisher has measured.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.low_rank import ExpertChanges
from quire.kernels.packed_state import Packed
from quire.kernels.quantized import QuantizedWeight, Rounding, nearest_codes, values_on
from quire.kernels.reference.experts import mix_experts

FP4_CAPABILITY = (10, 0)
"""The lowest compute capability of NVIDIA GPUs that multiply 4-bit floats."""
GROUP = 16
"""Inputs that share a scale."""
_LARGEST_CODE, _LARGEST_SCALE = 6.0, 448.0


@dataclass(frozen=True)
class Fp4Weight(Packed):
    """A weight `[out, in]`, or a stack of them, packed for `fp4_matmul` or `fp4_fused_experts`."""

    codes: Tensor
    """uint8 `[…, out, in / 2]`, the first of two inputs in the low bits."""
    scales: Tensor
    """float8_e4m3fn `[…, out, in / GROUP]`"""
    of_rows: Tensor
    """float32 `[…, out]`: scales of features, in addition, divided by `global_scale`."""
    global_scale: Tensor
    """float32 `[…, 1]`: as in `QuantizedWeight`."""

    @property
    def tensors(self) -> list[Tensor]:
        return [self.codes, self.scales, self.of_rows, self.global_scale]

    def at(self, expert: int) -> Fp4Weight:
        """One weight of a stack."""
        return Fp4Weight(*(each[expert] for each in self.tensors))


def pack_fp4(weight: QuantizedWeight) -> Fp4Weight:
    """Pack a weight of e2m1 in groups of GROUP, or a stack, one expert at a time, on any device."""
    if weight.codes.dim() == 3:
        first = pack_fp4(weight.at(0))
        stack = Fp4Weight(*(each.new_empty((len(weight.codes), *each.shape)) for each in first.tensors))
        for expert in range(len(weight.codes)):
            packed = pack_fp4(weight.at(expert)) if expert else first
            for target, source in zip(stack.at(expert).tensors, packed.tensors, strict=True):
                target.copy_(source)
        return stack
    assert weight.global_scale is not None
    (scales, of_rows), global_scale = as_eighths(weight.scales), weight.global_scale.view(1)
    return Fp4Weight(_packed(weight.codes), scales, of_rows / global_scale, global_scale)


def as_eighths(scales: Tensor) -> tuple[Tensor, Tensor]:
    """Scales `[out, groups]` that are not negative as float8_e4m3fn, and the factor of each feature's scales, float32
    `[out]`. Scales that are 8-bit floats times one number for a feature stay as they are to 1e-7.

    The largest of a feature becomes 256 to 448, or 240, whichever of the eight fractions loses least in the others:
    multiples of a power of two lose nothing, as small ones have fewer bits.
    """
    largest = scales.amax(dim=1)

    def divided(factors: Tensor) -> Tensor:
        return (scales / factors[:, None]).clamp(max=_LARGEST_SCALE).to(torch.float8_e4m3fn)

    best, least = torch.ones_like(largest), torch.full_like(largest, torch.inf)
    for number in (256, 288, 320, 352, 384, 416, 448, 240):
        factors = torch.where(largest > 0, largest / number, 1.0)
        lost = (divided(factors).float() * factors[:, None] - scales).abs().sum(dim=1)
        best, least = torch.where(lost < least, factors, best), torch.minimum(lost, least)
    return divided(best), best


def round_fp4(x: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Round `x` `[rows, in]` to e2m1, ties to even: codes, uint8 `[rows, in / 2]`, the first of two in the low bits,
    and scales, float8_e4m3fn `[rows, in / GROUP]`. `global_scale` is one number in float32.

    A number is `code * scale / global_scale`, and the scale is `largest / 6 * global_scale`, at most 448, where
    `largest` is the largest magnitude of the group. With a scale that is rounded to 0, all numbers are 0.
    """
    grouped = x.float().unflatten(1, (-1, GROUP))  # type: ignore[no-untyped-call]
    # By a tensor: on GPUs, torch multiplies by the reciprocal of a number.
    sixths = grouped.abs().amax(dim=2) / torch.full((), _LARGEST_CODE, device=x.device)
    scales = (sixths * global_scale).clamp(max=_LARGEST_SCALE).to(torch.float8_e4m3fn)
    wide = scales.float() / global_scale
    codes = nearest_codes(x, Rounding("e2m1", GROUP), torch.where(wide == 0, torch.inf, wide), None)
    return _packed(codes), scales


def _packed(codes: Tensor) -> Tensor:
    return codes[..., ::2] | codes[..., 1::2] << 4


def widen_fp4(codes: Tensor, scales: Tensor) -> Tensor:
    """The numbers that codes and scales stand for, float32 `[…, in]`."""
    numbers = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    wide: Tensor = values_on(codes.device, "e2m1")[numbers.int()] * scales.float().repeat_interleave(GROUP, dim=-1)
    return wide


def fp4_matmul(x: Tensor, weight: Fp4Weight, bias: Tensor | None = None) -> Tensor:
    """Multiply `x` `[rows, in]`, rounded by `round_fp4`, by a packed weight, with sums in float32: `[rows, out]` of the
    type of `x`."""
    product = F.linear(widen_fp4(*round_fp4(x, weight.global_scale)), widen_fp4(weight.codes, weight.scales))
    product = product * weight.of_rows
    return (product if bias is None else product + bias.float()).to(x.dtype)


def fp4_fused_experts(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate_up: Fp4Weight,
    down: Fp4Weight,
    activation: str,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    changes: ExpertChanges | None = None,
) -> Tensor:
    """`reference.fused_experts` with stacks of packed weights; inputs are rounded for each expert by its own scale."""

    def gates_and_ups(expert: int, rows: Tensor) -> Tensor:
        return fp4_matmul(rows, gate_up.at(expert), None if gate_up_bias is None else gate_up_bias[expert])

    def downs(expert: int, inner: Tensor) -> Tensor:
        return fp4_matmul(inner, down.at(expert), None if down_bias is None else down_bias[expert])

    is_gated = has_gates(gate_up, down)
    return mix_experts(x, weights, ids, len(down.codes), gates_and_ups, downs, activation, is_gated, changes)


def has_gates(gate_up: Fp4Weight, down: Fp4Weight) -> bool:
    """Whether the first of two stacks has gates as well as ups."""
    return gate_up.codes.shape[1] > 2 * down.codes.shape[2]
