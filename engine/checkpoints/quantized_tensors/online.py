"""Rounds weights while they are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from quire.engine.architecture.quantization.method import Shape
from quire.engine.architecture.quantization.online import OnlineScheme
from quire.engine.checkpoints.quantized_tensors.reader import Cut, Reader, Sliceable
from quire.kernels.quantized import Rounding, choose_factors, nearest_codes

_AT_ONCE = 1 << 16
"""Weights that a thread widens to float32 at once."""


class OnlineReader(Reader[OnlineScheme]):
    """Codes, scales and offsets are read one after the other, and each of them computes the factors again."""

    def __init__(
        self,
        scheme: OnlineScheme,
        module: str,
        shape: Shape,
        tensors: Mapping[str, Tensor],
        stored: Sliceable | None = None,
    ) -> None:
        """`stored` is the weight, if the checkpoint quantizes it."""
        super().__init__(scheme, module, shape, tensors)
        if stored is None:
            stored = self._tensors[".weight"].mT if scheme.is_transposed else self._tensors[".weight"]
        self._weight = stored
        self._rounding = Rounding(
            scheme.values,
            scheme.group,
            has_offsets=scheme.has_offsets,
            scales="e8m0" if scheme.values == "e2m1" else "float",
        )

    def codes(self, cut: Cut) -> Tensor:
        *rows, columns = cut
        first = columns.start // self.group
        codes = torch.cat(
            [
                nearest_codes(part, self._rounding, *choose_factors(part, self._rounding))
                for part in self._parts((*rows, slice(first, -(-columns.stop // self.group))))
            ],
            dim=-2,
        )
        return codes[..., columns.start - first * self.group : columns.stop - first * self.group]

    def scales(self, cut: Cut) -> Tensor:
        return torch.cat([choose_factors(part, self._rounding)[0] for part in self._parts(cut)], dim=-2)

    def offsets(self, cut: Cut) -> Tensor | None:
        offsets = [choose_factors(part, self._rounding)[1] for part in self._parts(cut)]
        found = [each for each in offsets if each is not None]
        return torch.cat(found, dim=-2) if found else None

    def _parts(self, cut: Cut) -> Sequence[Tensor]:
        """The weights of whole groups, a few rows at a time."""
        *rows, groups = cut
        weight = self._weight[(*rows, slice(groups.start * self.group, groups.stop * self.group))]
        return torch.split(weight, max(1, _AT_ONCE // weight.shape[-1]), dim=-2)
