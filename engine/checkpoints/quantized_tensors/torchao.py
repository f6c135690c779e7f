"""Reads torchao's Int4Tensor; its other layouts are `Unpacked`."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.engine.architecture.quantization.torchao import QDATA, SCALE, ZERO_POINT, TorchAoInt4
from quire.engine.checkpoints.quantized_tensors.constants import is_flat, offsets_of, scales_of
from quire.engine.checkpoints.quantized_tensors.nibbles import unpack_nibbles
from quire.engine.checkpoints.quantized_tensors.reader import Cut, Reader


class TorchAoInt4Reader(Reader[TorchAoInt4]):
    """Zeros are the constants of groups: groups of equal weights have scales near 0."""

    def codes(self, cut: Cut) -> Tensor:
        codes = unpack_nibbles(self._tensors[QDATA].view(torch.uint8), cut) ^ 8
        *rows, columns = cut
        first, last = columns.start // self.group, -(-columns.stop // self.group)
        flat = is_flat(*self._factors((*rows, slice(first, last)))).repeat_interleave(self.group, dim=-1)
        start = columns.start - first * self.group
        return codes.masked_fill_(flat[..., start : start + codes.shape[-1]], 8)

    def scales(self, cut: Cut) -> Tensor:
        return scales_of(*self._factors(cut))

    def offsets(self, cut: Cut) -> Tensor:
        return offsets_of(*self._factors(cut))

    def _factors(self, cut: Cut) -> tuple[Tensor, Tensor]:
        """Scales and zeros `[…, rows, groups]`."""
        *experts, rows, groups = cut
        scales, zeros = (
            self._tensors[name][(*experts, groups, rows)].float().transpose(-1, -2) for name in (SCALE, ZERO_POINT)
        )
        return scales, zeros
