"""Codes of 4 bits, two in a byte."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.engine.checkpoints.quantized_tensors.reader import Cut


def unpack_nibbles(packed: Tensor, cut: Cut, high_first: bool = False) -> Tensor:
    """The codes of a cut, uint8 `[…, rows, columns]`, of `packed` `[…, out, in / 2]`."""
    *rows, columns = cut
    first = columns.start // 2
    pairs = packed[(*rows, slice(first, -(-columns.stop // 2)))]
    halves = (pairs >> 4, pairs & 15) if high_first else (pairs & 15, pairs >> 4)
    return torch.stack(halves, dim=-1).flatten(-2)[..., columns.start - 2 * first : columns.stop - 2 * first]


def powers_of_two(exponents: Tensor) -> Tensor:
    """The numbers, in float32, whose exponents plus 127 are stored in a byte (E8M0); 255 is not a number."""
    return exponents.view(torch.float8_e8m0fnu).float()
