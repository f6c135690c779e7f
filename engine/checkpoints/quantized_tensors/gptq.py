"""Reads GPTQ."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quire.engine.architecture.quantization.gptq import GptqScheme
from quire.engine.architecture.quantization.method import Shape
from quire.engine.checkpoints.quantized_tensors.packed_words import PackedWordsReader, unpack
from quire.engine.checkpoints.quantized_tensors.reader import Cut
from quire.engine.protocol.errors import ConfigError

_ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}
"""A word of ones, by width."""


class GptqReader(PackedWordsReader[GptqScheme]):
    asymmetric = "sym to false"

    def __init__(self, scheme: GptqScheme, module: str, shape: Shape, tensors: Mapping[str, Tensor]) -> None:
        """Raises `ConfigError` if the settings say that columns are in order and they are not."""
        super().__init__(scheme, module, shape, tensors)
        order = self._tensors.get(".g_idx")
        if order is None or scheme.has_order:
            return
        in_order = torch.arange(shape[-1]) // self.group
        if bool(order.any()) and not torch.equal(order.long(), in_order):  # some tools leave zeros
            raise ConfigError(
                f"{module}.g_idx: the columns are not in order, though quantization_config says so; set desc_act to "
                "true in it"
            )

    @property
    def middle(self) -> int:
        return 1 << self.scheme.width - 1

    def codes(self, cut: Cut) -> Tensor:
        rows, columns = cut
        codes = unpack(self._tensors[".qweight"].T[rows], self.scheme.width, columns)
        if self.scheme.has_offsets:
            return codes
        return codes.sub_(self.middle).add_(0 if self.scheme.values == "int8" else 8)

    def zeros(self, cut: Cut) -> Tensor:
        rows, groups = cut
        words, width = self._tensors[".qzeros"][groups], self.scheme.width
        if self.scheme.minus_one and width in _ONES:
            # Tools subtract the ones from words, with borrows; but with 3 bits, from each zero point.
            return unpack(words + _ONES[width], width, rows).T
        zeros = unpack(words, width, rows).T
        return zeros + 1 & 2**width - 1 if self.scheme.minus_one else zeros

    def order(self) -> Tensor | None:
        return self._tensors[".g_idx"].long() if self.scheme.has_order else None
