"""Groups that are stored as `code * scale + constant`, read as `(code + offset) * scale`."""

from __future__ import annotations

import torch
from torch import Tensor

_MAX_OFFSET = 2.0**15
"""With a larger offset, a group's codes change less than float16 can show, if its offset fits float16 at all."""


def is_flat(scales: Tensor, constants: Tensor) -> Tensor:
    """Which groups equal their constant, because their scale is 0 or tiny; the factors of these groups are for codes
    that stand for 0."""
    return constants.abs() > scales.abs() * _MAX_OFFSET


def scales_of(scales: Tensor, constants: Tensor) -> Tensor:
    """The scales; the scale of a flat group is its constant."""
    return torch.where(is_flat(scales, constants), constants, scales)


def offsets_of(scales: Tensor, constants: Tensor) -> Tensor:
    """The offsets, in units of the scales; the offset of a flat group is 1."""
    return torch.where(is_flat(scales, constants), 1.0, (constants / scales).nan_to_num(0.0))
