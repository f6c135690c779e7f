"""Layers that read the embedded token beside the residual stream (EAGLE-3)."""

from __future__ import annotations

import torch
from torch import Tensor

from quire import kernels
from quire.engine.models.decoder_layer import DecoderLayer


class EmbeddingReaderLayer(DecoderLayer):
    """The mixers read `own`, the embedded token, before the normalized residual stream."""

    sole_readers = ("feed_forward",)

    def _mixer_input(self, normed: Tensor | kernels.RoundedRows, own: Tensor | None) -> Tensor:
        assert own is not None
        assert isinstance(normed, Tensor)
        return torch.cat((own, normed), dim=-1)
