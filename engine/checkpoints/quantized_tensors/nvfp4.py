"""Reads NVFP4."""

from __future__ import annotations

from torch import Tensor

from quire.engine.architecture.quantization.nvfp4 import NvFp4
from quire.engine.checkpoints.quantized_tensors.nibbles import unpack_nibbles
from quire.engine.checkpoints.quantized_tensors.reader import Cut, Reader


class NvFp4Reader(Reader[NvFp4]):
    def codes(self, cut: Cut) -> Tensor:
        return unpack_nibbles(self._tensors[self.scheme.packed], cut)

    def scales(self, cut: Cut) -> Tensor:
        scales = self._tensors[self.scheme.scale][cut].float()
        of_weight = self._tensors[self.scheme.global_scale].reshape(*self.shape[:-2], 1, 1)
        if of_weight.dim() == 3:
            of_weight = of_weight[cut[0]]
        return scales / of_weight if self.scheme.divides else scales * of_weight

    def global_scale(self) -> Tensor | None:
        stored = self._tensors.get(self.scheme.input_scale)
        return None if stored is None else stored if self.scheme.divides else 1 / stored
