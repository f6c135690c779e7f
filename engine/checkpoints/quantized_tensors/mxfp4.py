"""Reads MXFP4."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.engine.architecture.quantization.mxfp4 import MxFp4
from quire.engine.checkpoints.quantized_tensors.nibbles import powers_of_two, unpack_nibbles
from quire.engine.checkpoints.quantized_tensors.reader import Cut, Reader


class MxFp4Reader(Reader[MxFp4]):
    def codes(self, cut: Cut) -> Tensor:
        packed = self._tensors[self.scheme.packed]
        return unpack_nibbles(packed.view(torch.uint8).flatten(len(self.shape) - 1), cut)

    def scales(self, cut: Cut) -> Tensor:
        return powers_of_two(self._tensors[self.scheme.scale][cut])
