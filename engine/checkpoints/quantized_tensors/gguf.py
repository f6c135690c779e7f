"""Reads GGUF files: their blocks of bytes as codes and factors, which `Reader.__getitem__` dequantizes.

Source of the layouts: ggml-common.h and ggml-quants.c of github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import EllipsisType

import torch
from torch import Tensor

from quire.engine.architecture.quantization.gguf import Gguf
from quire.engine.checkpoints.quantized_tensors.constants import is_flat, offsets_of, scales_of
from quire.engine.checkpoints.quantized_tensors.reader import Cut, Reader


class GgufReader(Reader[Gguf]):
    """`weight` is uint8 `[…, out, bytes]`, rows of blocks.

    A block's minimum is the constant of `quire.engine.checkpoints.quantized_tensors.constants`.
    """

    def codes(self, cut: Cut) -> Tensor:
        blocks, first = self._blocks(cut[:-1], cut[-1], self.scheme.block)
        codes = _LAYOUTS[self.scheme.type].codes(blocks)
        if self.scheme.has_offsets:
            scales, minima = self._factors(blocks)
            assert minima is not None
            codes = codes.reshape(*scales.shape, -1).masked_fill(is_flat(scales, minima)[..., None], 0)
        return codes.flatten(len(cut) - 1)[..., cut[-1].start - first : cut[-1].stop - first]

    def scales(self, cut: Cut) -> Tensor:
        scales, minima, own = self._of_groups(cut)
        return (scales if minima is None else scales_of(scales, minima))[own]

    def offsets(self, cut: Cut) -> Tensor | None:
        scales, minima, own = self._of_groups(cut)
        return None if minima is None else offsets_of(scales, minima)[own]

    def _of_groups(self, cut: Cut) -> tuple[Tensor, Tensor | None, tuple[EllipsisType, slice]]:
        """Factors of the blocks that a cut of groups touches, `[…, rows, groups]`, and the cut's place in them."""
        blocks, first = self._blocks(cut[:-1], cut[-1], self.scheme.block // self.scheme.group)
        scales, minima = self._factors(blocks)
        own = (..., slice(cut[-1].start - first, cut[-1].stop - first))
        return scales.flatten(len(cut) - 1), None if minima is None else minima.flatten(len(cut) - 1), own

    def _factors(self, blocks: Tensor) -> tuple[Tensor, Tensor | None]:
        """Scales and minima `[…, blocks, groups of a block]`."""
        return _LAYOUTS[self.scheme.type].factors(blocks)

    def _blocks(self, rows: Cut, columns: slice, size: int) -> tuple[Tensor, int]:
        """The blocks of `size` columns that contain these, `[…, rows, blocks, bytes]`, and their first column."""
        first, last = columns.start // size, -(-columns.stop // size)
        weight = self._tensors[".weight"]
        blocks = weight.view(*weight.shape[:-1], -1, self.scheme.size)
        return blocks[(*rows, slice(first, last))], first * size


Factors = tuple[Tensor, Tensor | None]


@dataclass(frozen=True)
class _Layout:
    """The content of blocks `[…, bytes]`."""

    codes: Callable[[Tensor], Tensor]
    """uint8 `[…, weights of a block]`"""
    factors: Callable[[Tensor], Factors]
    """Scales and minima, float32 `[…, groups of a block]`; a weight is `values[code] * scale + minimum`."""


def _fields(packed: Tensor, bits: int, count: int) -> Tensor:
    """Codes in runs of `count` bytes: the lowest `bits` of each byte of a run, then the next ones, and so on."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)[:, None]
    runs = packed.reshape(*packed.shape[:-1], -1, 1, count)
    return (runs >> shifts & (1 << bits) - 1).flatten(-3)


def _half(blocks: Tensor, at: int) -> Tensor:
    """A float16 of each block, as float32 `[…, 1]`."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).float()


def _one_scale(blocks: Tensor) -> Factors:
    return _half(blocks, 0), None


def _scale_and_minimum(blocks: Tensor) -> Factors:
    return _half(blocks, 0), _half(blocks, 2)


def _five_bits(blocks: Tensor, at: int) -> Tensor:
    """The high bits of 32 codes, then the low ones."""
    high = (blocks[..., at : at + 4, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2)
    return _fields(blocks[..., at + 4 :], 4, 16) | high << 4


def _six_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima of 8 groups in 12 bytes (Q4_K, Q5_K): 6 low bits and 2 high bits of the last four each."""
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat((first & 63, third & 15 | first >> 2 & 48), dim=-1)
    return scales, torch.cat((second & 63, third >> 4 | second >> 2 & 48), dim=-1)


def _k_factors(blocks: Tensor) -> Factors:
    scales, minima = _six_bits(blocks[..., 4:16])
    return _half(blocks, 0) * scales, -_half(blocks, 2) * minima


def _q2_k_factors(blocks: Tensor) -> Factors:
    return _half(blocks, 80) * (blocks[..., :16] & 15), -_half(blocks, 82) * (blocks[..., :16] >> 4)


def _q3_k_codes(blocks: Tensor) -> Tensor:
    """Numbers from -4 to 3: a high bit that is not set subtracts 4."""
    return _fields(blocks[..., 32:96], 2, 32) + 4 + 4 * _fields(blocks[..., :32], 1, 32)


def _q3_k_factors(blocks: Tensor) -> Factors:
    scales = _fields(blocks[..., 96:104], 4, 8) | _fields(blocks[..., 104:108], 2, 4) << 4
    return _half(blocks, 108) * (scales.float() - 32), None


def _q5_k_codes(blocks: Tensor) -> Tensor:
    return _fields(blocks[..., 48:], 4, 32) | _fields(blocks[..., 16:48], 1, 32) << 4


def _q6_k_codes(blocks: Tensor) -> Tensor:
    return (_fields(blocks[..., :128], 4, 64) | _fields(blocks[..., 128:192], 2, 32) << 4) - 32


def _q6_k_factors(blocks: Tensor) -> Factors:
    return _half(blocks, 208) * blocks[..., 192:208].view(torch.int8), None


def _iq4_xs_factors(blocks: Tensor) -> Factors:
    low = (blocks[..., 4:8, None] >> torch.tensor((0, 4), dtype=torch.uint8) & 15).flatten(-2)
    high = (blocks[..., 2:4, None] >> torch.arange(0, 8, 2, dtype=torch.uint8) & 3).flatten(-2)
    return _half(blocks, 0) * ((low | high << 4).float() - 32), None


def _mxfp4_factors(blocks: Tensor) -> Factors:
    exponents = blocks[..., :1].int() - 127
    return torch.ldexp(torch.ones(exponents.shape), exponents), None


_LAYOUTS = {
    "Q4_0": _Layout(lambda blocks: _fields(blocks[..., 2:], 4, 16), _one_scale),
    "Q4_1": _Layout(lambda blocks: _fields(blocks[..., 4:], 4, 16), _scale_and_minimum),
    "Q5_0": _Layout(lambda blocks: _five_bits(blocks, 2) - 16, _one_scale),
    "Q5_1": _Layout(lambda blocks: _five_bits(blocks, 4), _scale_and_minimum),
    "Q8_0": _Layout(lambda blocks: blocks[..., 2:], _one_scale),
    "Q2_K": _Layout(lambda blocks: _fields(blocks[..., 16:80], 2, 32), _q2_k_factors),
    "Q3_K": _Layout(_q3_k_codes, _q3_k_factors),
    "Q4_K": _Layout(lambda blocks: _fields(blocks[..., 16:], 4, 32), _k_factors),
    "Q5_K": _Layout(_q5_k_codes, _k_factors),
    "Q6_K": _Layout(_q6_k_codes, _q6_k_factors),
    "IQ4_NL": _Layout(lambda blocks: _fields(blocks[..., 2:], 4, 16), _one_scale),
    "IQ4_XS": _Layout(lambda blocks: _fields(blocks[..., 8:], 4, 16), _iq4_xs_factors),
    "MXFP4": _Layout(lambda blocks: _fields(blocks[..., 1:], 4, 16), _mxfp4_factors),
}
