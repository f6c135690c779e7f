"""The matmul of a linear layer. Its weight is packed once, into the form that the device multiplies by fastest.

On CPUs the products are oneDNN's, through torch: prepacked, they run at 85 % of the processor's peak where `F.linear`
(MKL) stays at 40 % on processors not made by Intel (benchmarks/machine.py prints both).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels import reference
from quire.kernels.dispatch import by_device

Quantization = Literal["int8", "int4"]
Linear = Callable[[Tensor, Tensor | None], Tensor]
"""`(x, bias)` → `x @ weight.T + bias`; `x` is `[rows, in]`, the result `[rows, out]` of the same type."""

_quantize_rows = by_device(reference.quantize_rows)
_scale_rows = by_device(reference.scale_rows)
_widened_linear = by_device(reference.widened_linear)
_int4_linear = by_device(reference.int4_linear)

_ROWS_HINT = 256
"""The number of rows that oneDNN packs for. What it packs for a few rows is slow for many, and not the other way."""
INT4_GROUPS = (128, 64, 32)
"""Weights that share a scale: the largest of these that divides the input features."""


def pack_linear(weight: Tensor, quantization: Quantization | None = None) -> Linear:
    """The matmul by `weight` `[out, in]`, which need not be kept. Quantized ones are for CPUs.

    int8: one scale for each output feature, and one for each row of `x`, found when it comes (W8A8, dynamic).
    int4: a scale and a zero for each group of up to 128 weights of an output feature; `in` is a multiple of 32.
    """
    if quantization == "int8":
        return Int8(weight)
    if quantization == "int4":
        return Int4(weight)
    if weight.device.type == "cpu" and torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        if weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and _has_bfloat16()):
            return OneDNN(weight)
        return Widened(weight)
    return Plain(weight)


def _has_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16; oneDNN emulates it elsewhere, at half the speed of float32."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def _padded(x: Tensor) -> Tensor:
    """`x` with rows added up to a number that comes again: oneDNN compiles and keeps code for each number of rows.

    That takes 0.3 to 1.4 ms and 0.2 to 8 MB for each shape, and steps come in every size.
    """
    rows = len(x)
    step = 1 if rows <= 8 else 4 if rows <= 32 else 16 if rows <= 128 else 32 if rows <= 512 else 128
    return F.pad(x, (0, 0, 0, -rows % step)) if rows % step else x


class Plain:
    """torch's own matmul."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight.detach()

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, self._weight, bias)


class OneDNN:
    """Prepacked by oneDNN; sums are float32."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS_HINT)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(_padded(x), self._weight, bias, "none", [], "")
        return out[: len(x)]


class Widened:
    """16-bit weights where the processor has no 16-bit arithmetic: widened in the cache; float32 sums."""

    def __init__(self, weight: Tensor) -> None:
        self._rows = len(weight)
        self._weight = reference.panels(weight.detach())

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return _finish(_widened_linear(x.float(), self._weight), self._rows, bias, x.dtype)


class Int8:
    """Products of 8-bit integers: exact but for the rounding of weights and of `x` to 255 steps."""

    def __init__(self, weight: Tensor) -> None:
        # Without VNNI, two products are summed in 16 bits: weights of 7 bits cannot overflow them.
        steps = 127 if torch.cpu._is_vnni_supported() else 63
        quantized, self._scales = reference.quantize_weight(weight.detach(), steps)
        self._zeros = torch.zeros(len(weight), dtype=torch.int32)
        self._weight = torch.ops.onednn.qlinear_prepack(quantized, None)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        quantized, scales = _quantize_rows(x)
        out = torch.ops.onednn.qlinear_pointwise(
            *(_padded(quantized), 1.0, reference.INT8_ZERO, self._weight, self._scales, self._zeros),
            *(None, 1.0, 0, torch.float32, "none", [], ""),
        )
        return _scale_rows(out[: len(x)], scales, bias, x.dtype)


class Int4:
    """Groups of 4-bit weights, for decode, where reading the weights takes the time; `x` and the sums are float32."""

    def __init__(self, weight: Tensor) -> None:
        self._rows = len(weight)
        group = next(size for size in INT4_GROUPS if weight.shape[1] % size == 0)
        quantized, scales, zeros = reference.quantize_groups(weight.detach(), group)
        self._scales, self._zeros = reference.panels(scales), reference.panels(zeros)
        low, high = reference.panels(quantized).chunk(2, dim=-1)
        self._weight = low | high << 4

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        out = _int4_linear(x.float(), self._weight, self._scales, self._zeros)
        return _finish(out, self._rows, bias, x.dtype)


def _finish(out: Tensor, rows: int, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Without the padding of the last panel, with the bias."""
    out = out[:, :rows]
    return (out if bias is None else out + bias).to(dtype).contiguous()
