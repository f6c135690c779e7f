"""Reads weights with a byte for each code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor

from quire.engine.architecture.quantization.method import Shape
from quire.engine.architecture.quantization.unpacked import INPUT_SCALE, INPUT_ZERO_POINT, Blocks, Unpacked
from quire.engine.checkpoints.quantized_tensors.nibbles import powers_of_two
from quire.engine.checkpoints.quantized_tensors.reader import Cut, Reader
from quire.engine.protocol.errors import ConfigError

B = TypeVar("B", bound=Blocks)
U = TypeVar("U", bound=Unpacked)


class BlockReader(Reader[B]):
    """Factors of blocks."""

    def factors(self, stored: Tensor, cut: Cut) -> Tensor:
        """The factors, float32 `[…, rows, groups]`, of a tensor with one for each block, or for the whole weight. Bytes
        are exponents."""
        *experts, rows, groups = cut
        blocks = self.scheme.factors(self.shape)
        stored = stored.expand(blocks) if stored.numel() == 1 else stored.reshape(blocks)
        block = torch.arange(self.shape[-2])[rows] // (self.scheme.rows or self.shape[-2])
        first, last = int(block[0]), int(block[-1])
        own = stored[(*experts, slice(first, last + 1), groups)]
        own = powers_of_two(own) if own.dtype == torch.uint8 else own.float()
        return own.index_select(-2, block - first)


class UnpackedReader(BlockReader[U]):
    """Raises `ConfigError` if zero points of a symmetric weight are not 0."""

    def __init__(self, scheme: U, module: str, shape: Shape, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(scheme, module, shape, tensors)
        if not scheme.has_offsets and scheme.zero_point in self._tensors and self._tensors[scheme.zero_point].any():
            raise ConfigError(f"{module}{scheme.zero_point} is not 0, but quantization_config says symmetric")

    def octets(self, cut: Cut) -> Tensor:
        """The bytes, uint8 `[…, rows, columns]`."""
        return _in_order(self._tensors[self.scheme.weight].view(torch.uint8), self.shape)[cut]

    def codes(self, cut: Cut) -> Tensor:
        octets = self.octets(cut)
        return octets + 8 & 15 if self.scheme.values == "int4" else octets

    def scales(self, cut: Cut) -> Tensor:
        blocks = self.scheme.factors(self.shape)
        scales = self.factors(_in_order(self._tensors[self.scheme.scale], blocks), cut)
        return scales if self.scheme.divisor == 1 else scales / self.scheme.divisor

    def rounding(self) -> Tensor | None:
        if not self.scheme.has_rounding:
            return None
        scale, zero = self._tensors[INPUT_SCALE], self._tensors.get(INPUT_ZERO_POINT)
        return torch.tensor([float(scale), 0.0 if zero is None else float(zero)])

    def offsets(self, cut: Cut) -> Tensor | None:
        if not self.scheme.has_offsets:
            return None
        blocks = self.scheme.factors(self.shape)
        return -self.factors(_in_order(self._tensors[self.scheme.zero_point], blocks), cut)


def _in_order(stored: Tensor, shape: Shape) -> Tensor:
    """A stack of this shape, which may be stored as `[experts, in, out]`."""
    return stored.transpose(1, 2) if stored.ndim == len(shape) == 3 and stored.shape != shape else stored
