"""Readers of the packed layouts of compressed-tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.engine.architecture.quantization.compressed_tensors import PackedScheme, Sparse24Scheme
from quire.engine.checkpoints.quantized_tensors.nibbles import unpack_nibbles
from quire.engine.checkpoints.quantized_tensors.reader import Cut
from quire.engine.checkpoints.quantized_tensors.unpacked import BlockReader, UnpackedReader


class PackedReader(BlockReader[PackedScheme]):
    """Codes in words of 32 bits."""

    def codes(self, cut: Cut) -> Tensor:
        octets = self._tensors[".weight_packed"].view(torch.uint8)
        return octets[cut] ^ 128 if self.scheme.bits == 8 else unpack_nibbles(octets, cut)

    def scales(self, cut: Cut) -> Tensor:
        return self.factors(self._tensors[".weight_scale"], cut)

    def offsets(self, cut: Cut) -> Tensor | None:
        if not self.scheme.has_offsets:
            return None
        *experts, rows, groups = cut
        bits, stored = self.scheme.bits, self._tensors[".weight_zero_point"]
        first = torch.arange(self.shape[-2], dtype=torch.int32)[rows] * bits
        words = stored[(*experts, slice(None), groups)].index_select(-2, first // 32)
        codes: Tensor = words >> (first % 32)[:, None] & 2**bits - 1
        return (codes - (1 << bits - 1)).neg().float()

    def order(self) -> Tensor | None:
        order = self._tensors.get(".weight_g_idx")
        return None if order is None else order.long()


class Sparse24Reader(UnpackedReader[Sparse24Scheme]):
    """Two bytes and four bits for four columns."""

    def octets(self, cut: Cut) -> Tensor:
        rows, columns = cut
        first, last = columns.start // 8, -(-columns.stop // 8)
        masks = self._tensors[".bitmask"][rows, first:last]
        is_stored = (masks[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).bool().flatten(-2)
        octets = torch.zeros(is_stored.shape, dtype=torch.uint8)
        octets[is_stored] = self._tensors[".compressed"].view(torch.uint8)[rows, 4 * first : 4 * last].flatten()
        return octets[:, columns.start - 8 * first : columns.stop - 8 * first]
