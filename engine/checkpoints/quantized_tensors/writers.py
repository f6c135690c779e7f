"""Writes quantized weights in the layout of compressed-tensors, which the readers read."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.engine.architecture.quantization.compressed_tensors import PackedScheme
from quire.engine.architecture.quantization.method import Scheme
from quire.engine.architecture.quantization.mxfp4 import MxFp4
from quire.engine.architecture.quantization.nvfp4 import NvFp4
from quire.engine.architecture.quantization.unpacked import Unpacked
from quire.kernels.quantized import QuantizedWeight, Rounding, unit_of


def rounding_of(scheme: Scheme) -> Rounding:
    """The numbers that the weights of a scheme are rounded to."""
    if isinstance(scheme, MxFp4):
        return Rounding("e2m1", scheme.group, scales="e8m0")
    if isinstance(scheme, NvFp4):
        return Rounding("e2m1", scheme.group, scales="e4m3")
    assert isinstance(scheme, PackedScheme | Unpacked)
    return Rounding(scheme.values, scheme.group, scheme.rows, scheme.has_offsets)


def stored_tensors(scheme: Scheme, weight: QuantizedWeight, largest: Tensor | None) -> dict[str, Tensor]:
    """The tensors of a weight `[out, in]`, by the suffix of the module's name. `largest` is the largest magnitude in
    the layers that are multiplied together, such as q, k and v: NVFP4 needs it."""
    codes, scales = weight.codes, weight.scales.to(weight.dtype)
    if isinstance(scheme, MxFp4):
        return {
            ".weight_packed": _packed_nibbles(codes),
            ".weight_scale": weight.scales.to(torch.float8_e8m0fnu).view(torch.uint8),
        }
    if isinstance(scheme, NvFp4):
        assert largest is not None
        unit = unit_of(largest)
        return {
            ".weight_packed": _packed_nibbles(codes),
            ".weight_scale": (weight.scales / unit).to(torch.float8_e4m3fn),
            ".weight_global_scale": (1 / unit).view(1),
        }
    if isinstance(scheme, PackedScheme):
        found = {
            ".weight_packed": _words(codes if scheme.bits == 4 else codes ^ 128, scheme.bits),
            ".weight_scale": scales,
            ".weight_shape": torch.tensor(codes.shape),
        }
        if weight.offsets is not None:  # zero points of consecutive rows are in a word
            zeros = (2 ** (scheme.bits - 1) - weight.offsets).to(torch.uint8)
            found[".weight_zero_point"] = _words(zeros.T, scheme.bits).T.contiguous()
        return found
    assert isinstance(scheme, Unpacked)
    dtype = torch.float8_e4m3fn if scheme.values == "fp8" else torch.int8
    return {".weight": codes.view(dtype), ".weight_scale": scales[:: scheme.rows].contiguous()}


def _packed_nibbles(codes: Tensor) -> Tensor:
    return codes[..., ::2] | codes[..., 1::2] << 4


def _words(codes: Tensor, bits: int) -> Tensor:
    """Codes of a row in words of 32 bits, the first one lowest."""
    codes = F.pad(codes, (0, -codes.shape[-1] % (32 // bits)))
    octets = _packed_nibbles(codes) if bits == 4 else codes
    return octets.flatten().view(torch.int32).view(len(codes), -1)
