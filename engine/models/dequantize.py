"""Slices of quantized tensors, dequantized to the model's data type."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from quire.engine.config.checkpoint_tensors import MXFP4_GROUP

_ROWS = 128
"""Rows of fp8 that are converted at once."""
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_PAIRS = torch.cartesian_prod(torch.cat((_E2M1, -_E2M1)), torch.cat((_E2M1, -_E2M1))).flip(1).contiguous()
"""`[256, 2]`: the two values in a byte, the low half first."""


class Sliceable(Protocol):
    """A tensor of a checkpoint."""

    def __getitem__(self, cut: tuple[slice, ...], /) -> Tensor: ...


class Fp8Slices:
    """`values` `[rows, columns]`, of 8 bits, times the scale of their block in `scales`; computed in float32.

    Source: `weight_dequant` in inference/kernel.py of github.com/deepseek-ai/DeepSeek-V3.
    """

    def __init__(self, values: Tensor, scales: Tensor, block: tuple[int, int], dtype: torch.dtype) -> None:
        self._values, self._scales, self._block, self._dtype = values, scales, block, dtype

    def __getitem__(self, cut: tuple[slice, ...]) -> Tensor:
        values = self._values[cut]
        rows, columns = (
            torch.arange(size)[index] // block
            for size, index, block in zip(self._values.shape, cut, self._block, strict=True)
        )
        scales = self._scales.float()[:, columns]
        out = torch.empty(values.shape, dtype=self._dtype)
        for start in range(0, len(out), _ROWS):
            part = slice(start, start + _ROWS)
            out[part] = values[part].float() * scales[rows[part]]
        return out


class Mxfp4Slices:
    """Stacked matrices `[experts, columns, rows]` of 4-bit floats in groups, each with a power of 2 as its scale.

    `blocks` is uint8 `[experts, rows, groups, 16]`, `scales` uint8 `[experts, rows, groups]`, an exponent plus 127.
    Rows and columns are swapped, as in gpt-oss's unquantized form. Source: OCP Microscaling Formats 1.0.
    """

    def __init__(self, blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> None:
        self._blocks, self._scales, self._dtype = blocks, scales, dtype

    def __getitem__(self, cut: tuple[slice, ...]) -> Tensor:
        experts, columns, rows = cut
        first, last = columns.start // MXFP4_GROUP, -(-columns.stop // MXFP4_GROUP)
        blocks = self._blocks[experts, rows, first:last]
        exponents = self._scales[experts, rows, first:last].int() - 127
        pairs = _PAIRS.index_select(0, blocks.flatten().int()).view(*exponents.shape, MXFP4_GROUP)
        values = torch.ldexp(pairs, exponents[..., None]).to(self._dtype).flatten(2)
        skipped = columns.start - first * MXFP4_GROUP
        return values[..., skipped : skipped + columns.stop - columns.start].transpose(1, 2)
