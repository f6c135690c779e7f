"""The matmul of a linear layer. Its weight is packed once, into the form that the device multiplies by fastest.

On CPUs with AVX2 or AVX-512 the products are our own: faster than oneDNN's for the few rows of decodes, about as fast
for many (benchmarks/matmul.py; docs/cpu.md has the figures), and a row's product does not depend on the rows beside it.
Elsewhere, and for int8 and bfloat16 where there are tiles (AMX), they are oneDNN's, through torch: prepacked, they run
at 85 % of the processor's peak where `F.linear` (MKL) stays at 40 % on processors not made by Intel
(benchmarks/machine.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels import dispatch, isa, packed, reference
from quire.kernels.dispatch import by_device

Quantization = Literal["int8", "int4"]

_act_mul = by_device(reference.act_mul)
_quantize_rows = by_device(packed.quantize_rows)
_scale_rows = by_device(packed.scale_rows)
_panels = by_device(packed.panels)
_quantize_weight = by_device(packed.quantize_weight)
int8_panels = by_device(packed.int8_panels)
_panel_linear = by_device(packed.panel_linear)
_int8_linear = by_device(packed.int8_linear)
_widened_linear = by_device(packed.widened_linear)
_int4_linear = by_device(packed.int4_linear)

_ROWS_HINT = 256
"""The number of rows that oneDNN packs for. What it packs for a few rows is slow for many, and not the other way."""
INT4_GROUPS = (128, 64, 32)
"""Weights that share a scale: the largest of these that divides the input features."""


class PackedLinear(ABC):
    """A weight in the form that the device multiplies by."""

    @abstractmethod
    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`x @ weight.T + bias`; `x` is `[rows, in]`, the result `[rows, out]` of the same type."""

    @abstractmethod
    def state(self) -> list[Tensor]:
        """All that was made of the weight: with it, another of this shape and form becomes the same (`restore`)."""

    def restore(self, state: Sequence[Tensor]) -> None:
        """Become that whose `state` this is; what is held is overwritten."""
        for mine, theirs in zip(self.state(), state, strict=True):
            mine.copy_(theirs)


def pack_linear(weight: Tensor, quantization: Quantization | None = None) -> PackedLinear:
    """The matmul by `weight` `[out, in]`, which need not be kept. Quantized ones are for CPUs.

    int8: one scale for each output feature, and one for each row of `x`, found when it comes (W8A8, dynamic).
    int4: a scale and a zero for each group of up to 128 weights of an output feature; `in` is a multiple of 32.
    """
    return packing(weight, quantization)(weight)


def pack_gated(weight: Tensor, activation: str, quantization: Quantization | None = None) -> PackedLinear:
    """The matmul by `weight` `[2 * size, in]`, gates before ups, and `act_mul` of that: it returns `[rows, size]`."""
    pack = packing(weight, quantization)
    if pack is TiledLinear or pack is Int8Linear:
        return pack(weight, activation)
    return PackedGatedLinear(pack(weight), activation)


def packing(weight: Tensor, quantization: Quantization | None) -> Callable[[Tensor], PackedLinear]:
    """The class below that packs weights like this one, `[out, in]`."""
    if weight.device.type != "cpu":
        return PlainLinear
    if quantization == "int4":
        return Int4Linear
    if quantization == "int8":
        return Int8Linear if _is_ours("int8") else Int8OneDNNLinear
    if weight.dtype == torch.float32:
        return TiledLinear if _is_ours("float32") else OneDNNLinear if _has_onednn() else PlainLinear
    if weight.dtype == torch.bfloat16:
        if weight.shape[1] % 2 == 0 and _is_ours("bfloat16"):
            return TiledLinear
        # Without AVX-512 oneDNN refuses bfloat16; without AVX-512 BF16 it emulates it, at half the speed of float32.
        if _has_onednn() and (isa.has("avx512_bf16") or isa.has("amx")):
            return OneDNNLinear
    return WidenedLinear


def _is_ours(kind: Literal["float32", "bfloat16", "int8"]) -> bool:
    """Whether our own products of these numbers are the ones to use on this processor."""
    if "cpu" not in dispatch.PLATFORMS or not isa.has("avx2"):
        return False
    return kind == "float32" or not isa.has("amx")


def _has_onednn() -> bool:
    """Whether this build of torch brings it."""
    return torch.backends.mkldnn.is_available()  # type: ignore[no-any-return,no-untyped-call]


def _padded(x: Tensor) -> Tensor:
    """`x` with rows added up to a number that comes again: oneDNN compiles and keeps code for each number of rows.

    That takes 0.3 to 1.4 ms and 0.2 to 8 MB for each shape, and steps come in every size.
    """
    rows = len(x)
    step = 1 if rows <= 8 else 4 if rows <= 32 else 16 if rows <= 128 else 32 if rows <= 512 else 128
    return F.pad(x, (0, 0, 0, -rows % step)) if rows % step else x


class PlainLinear(PackedLinear):
    """torch's own matmul."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight.detach()

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, self._weight, bias)

    def state(self) -> list[Tensor]:
        return [self._weight]


class PackedGatedLinear(PackedLinear):
    """A product of gates and ups, and their activation behind it."""

    def __init__(self, product: PackedLinear, activation: str) -> None:
        self._product, self._activation = product, activation

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return _act_mul(self._product(x, bias), self._activation)

    def state(self) -> list[Tensor]:
        return self._product.state()

    def restore(self, state: Sequence[Tensor]) -> None:
        self._product.restore(state)


class TiledLinear(PackedLinear):
    """Our own, of float32 or bfloat16; sums are float32. Gates and ups are activated while they are in registers."""

    def __init__(self, weight: Tensor, activation: str = "") -> None:
        self._features, self._activation = len(weight) // (2 if activation else 1), activation
        self._weight = word_panels(weight, bool(activation))

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        bias = _arranged(bias, self._activation)
        return _panel_linear(x, self._weight, bias, self._features, self._activation)

    def state(self) -> list[Tensor]:
        return [self._weight]


class OneDNNLinear(PackedLinear):
    """Prepacked by oneDNN; sums are float32."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS_HINT)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(_padded(x), self._weight, bias, "none", [], "")
        return out[: len(x)]

    def state(self) -> list[Tensor]:
        return [self._weight.to_dense()]

    def restore(self, state: Sequence[Tensor]) -> None:
        (dense,) = state
        self._weight = torch.ops.mkldnn._reorder_linear_weight(dense, _ROWS_HINT)


class WidenedLinear(PackedLinear):
    """16-bit weights that no other form takes, as those of float16: widened in the cache; float32 sums."""

    def __init__(self, weight: Tensor) -> None:
        self._features = len(weight)
        self._weight = _panels(weight.detach())

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return _widened_linear(x.float(), self._weight, bias, self._features, x.dtype)

    def state(self) -> list[Tensor]:
        return [self._weight]


def _arranged(bias: Tensor | None, activation: str) -> Tensor | None:
    return packed.side_by_side(bias) if bias is not None and activation else bias


def word_panels(weight: Tensor, gated: bool = False) -> Tensor:
    """`weight` `[out, in]`, float32 or bfloat16, as `panels`."""
    return _panels(weight.detach(), 4 // weight.element_size(), gated)


class Int8Linear(PackedLinear):
    """Our own products of 8-bit integers: exact but for the rounding of weights and of `x` to 255 steps.

    Gates and ups are activated while they are in registers.
    """

    def __init__(self, weight: Tensor, activation: str = "") -> None:
        self._features, self._activation = len(weight) // (2 if activation else 1), activation
        self._weight, self._scales = int8_panels(weight.detach(), bool(activation))

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        bias = _arranged(bias, self._activation)
        return _int8_linear(x, self._weight, self._scales, bias, self._features, self._activation)

    def state(self) -> list[Tensor]:
        return [self._weight, self._scales]


class Int8OneDNNLinear(PackedLinear):
    """The same by oneDNN."""

    def __init__(self, weight: Tensor) -> None:
        # Without VNNI, two products are summed in 16 bits: weights of 7 bits cannot overflow them.
        steps = 127 if isa.has("avx512_vnni") else 63
        quantized, self._scales = _quantize_weight(weight.detach(), steps)
        self._zeros = torch.zeros(len(weight), dtype=torch.int32)
        self._weight = torch.ops.onednn.qlinear_prepack(quantized, None)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        quantized, scales = _quantize_rows(x)
        out = torch.ops.onednn.qlinear_pointwise(
            *(_padded(quantized), 1.0, packed.INT8_ZERO, self._weight, self._scales, self._zeros),
            *(None, 1.0, 0, torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32, "none", [], ""),
        )
        return _scale_rows(out[: len(x)], scales, bias, x.dtype)

    def state(self) -> list[Tensor]:
        return [self._weight.to_dense().T.contiguous(), self._scales]

    def restore(self, state: Sequence[Tensor]) -> None:
        quantized, scales = state
        self._weight = torch.ops.onednn.qlinear_prepack(quantized, None)
        self._scales.copy_(scales)


class Int4Linear(PackedLinear):
    """Groups of 4-bit weights, for decode, where reading the weights takes the time; `x` and the sums are float32."""

    def __init__(self, weight: Tensor) -> None:
        self._features = len(weight)
        group = next(size for size in INT4_GROUPS if weight.shape[1] % size == 0)
        quantized, scales, zeros = packed.quantize_groups(weight.detach(), group)
        self._scales, self._zeros = _panels(scales), _panels(zeros)
        low, high = _panels(quantized).chunk(2, dim=2)
        self._weight = low | high << 4

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return _int4_linear(x.float(), self._weight, self._scales, self._zeros, bias, self._features, x.dtype)

    def state(self) -> list[Tensor]:
        return [self._weight, self._scales, self._zeros]
