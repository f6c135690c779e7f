"""Reads AWQ."""

from __future__ import annotations

from torch import Tensor

from quire.engine.architecture.quantization.awq import AwqScheme
from quire.engine.checkpoints.quantized_tensors.packed_words import PackedWordsReader, unpack
from quire.engine.checkpoints.quantized_tensors.reader import Cut

_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place in a word of each feature's code."""


class AwqReader(PackedWordsReader[AwqScheme]):
    asymmetric = "zero_point to true"
    middle = 8

    def codes(self, cut: Cut) -> Tensor:
        rows, columns = cut
        return unpack(self._tensors[".qweight"][columns], 4, rows, _ORDER).T

    def zeros(self, cut: Cut) -> Tensor:
        rows, groups = cut
        return unpack(self._tensors[".qzeros"][groups], 4, rows, _ORDER).T
