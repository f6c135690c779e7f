"""Reads torchao's Int4Tensor; its other layouts are `Unpacked`."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.engine.models.quantization.torchao import QDATA, SCALE, ZERO_POINT, TorchAoInt4
from quire.engine.models.quantized_tensors.nibbles import unpack_nibbles
from quire.engine.models.quantized_tensors.reader import Cut, Reader


class TorchAoInt4Reader(Reader[TorchAoInt4]):
    def codes(self, cut: Cut) -> Tensor:
        return unpack_nibbles(self._tensors[QDATA].view(torch.uint8), cut) ^ 8

    def scales(self, cut: Cut) -> Tensor:
        return self._factors(SCALE, cut)

    def offsets(self, cut: Cut) -> Tensor:
        scales = self.scales(cut)
        return torch.where(scales == 0, 0, self._factors(ZERO_POINT, cut) / scales)

    def _factors(self, name: str, cut: Cut) -> Tensor:
        *experts, rows, groups = cut
        return self._tensors[name][(*experts, groups, rows)].float().transpose(-1, -2)
