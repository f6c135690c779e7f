"""Features of images as transformers computes them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from quire import kernels
from quire.engine.models.tower import Tower
from quire.engine.protocol.media import MediaItem


class TransformersTower(Tower):
    """See `TransformersTowerSpec`. `base` is a model of images and text without its head, which has the parameters."""

    def __init__(self, base: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self._base: list[Any] = [base]  # in a list, as it is not a part of this
        self._dtype, self._device = dtype, device

    def encode(
        self, arrays: Mapping[str, Tensor], item: MediaItem, adapter: kernels.OneAdapter | None = None
    ) -> Iterator[Tensor | None]:
        """See `Tower`. It does not pause, and may wait for the device, which gets all arrays: transformers' models read
        grids there."""
        assert adapter is None
        features = self.features(arrays)
        yield None
        yield features

    def features(self, arrays: Mapping[str, Tensor]) -> Tensor:
        """`[features, hidden_size]` of one picture."""
        compute = self._base[0].get_image_features
        taken = inspect.signature(compute).parameters
        inputs = {
            name: array.to(self._device, self._dtype if array.is_floating_point() else array.dtype)
            for name, array in arrays.items()
            if name in taken
        }
        found = compute(**inputs, return_dict=True).pooler_output
        parts = [found] if isinstance(found, Tensor) else found
        return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])
