"""Layers whose residual stream is normalized (Bloom's `apply_residual_connection_post_layernorm`, MiniMax)."""

from __future__ import annotations

from torch import Tensor

from quire.engine.architecture.residual_spec import NormedResidualSpec
from quire.engine.models.decoder_layer import DecoderLayer, LayerStep, add


class NormedResidualLayer(DecoderLayer):
    """The outputs of mixers and feed-forward layer are added to their normalized input, times a factor, in place of the
    residual stream."""

    sole_readers = ()

    def forward(self, x: Tensor, residual: Tensor | None, step: LayerStep) -> tuple[Tensor, Tensor | None]:
        """See `DecoderLayer`."""
        path = self.spec.residual
        assert isinstance(path, NormedResidualSpec)
        normed, _ = add(self.attention_norm, x, residual)
        assert isinstance(normed, Tensor)
        mixed = self._mix(normed, step)
        normed = normed if step.last_tokens is None else normed[step.last_tokens]
        normed, _ = add(self.feed_forward_norm, mixed, normed * path.mixer_multiplier)
        assert isinstance(normed, Tensor)
        return self._fed(normed, step), normed * path.feed_forward_multiplier
