"""Rounds the weights of a 16-bit checkpoint while they are read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.engine.models.quantization.online import OnlineScheme
from quire.engine.models.quantized_tensors.reader import Cut, Reader
from quire.kernels.quantized import Rounding, choose_factors, nearest_codes

_ROUNDINGS = {"fp8": Rounding("fp8"), "e2m1": Rounding("e2m1", 32, scales="e8m0")}


_AT_ONCE = 1 << 16
"""Weights that a thread widens to float32 at once."""


class OnlineReader(Reader[OnlineScheme]):
    """Codes and factors are read one after the other, so that factors are computed twice: that is less than reading."""

    def codes(self, cut: Cut) -> Tensor:
        *rows, columns = cut
        first, rounding = columns.start // self.group, _ROUNDINGS[self.scheme.values]
        parts = self._parts((*rows, slice(first, -(-columns.stop // self.group))))
        codes = torch.cat([nearest_codes(part, rounding, *choose_factors(part, rounding)) for part in parts], dim=-2)
        return codes[..., columns.start - first * self.group : columns.stop - first * self.group]

    def scales(self, cut: Cut) -> Tensor:
        rounding = _ROUNDINGS[self.scheme.values]
        return torch.cat([choose_factors(part, rounding)[0] for part in self._parts(cut)], dim=-2)

    def _parts(self, cut: Cut) -> Sequence[Tensor]:
        """The weights of whole groups, a few rows at a time."""
        *rows, groups = cut
        weight = self._tensors[".weight"]
        weight = weight.mT if self.scheme.is_transposed else weight
        weight = weight[(*rows, slice(groups.start * self.group, groups.stop * self.group))]
        return torch.split(weight, max(1, _AT_ONCE // weight.shape[-1]), dim=-2)
