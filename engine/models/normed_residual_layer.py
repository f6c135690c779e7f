"""Layers whose residual stream is normalized (Bloom's `apply_residual_connection_post_layernorm`, MiniMax)."""

from __future__ import annotations

from torch import Tensor

from quire.engine.layers.attention import Batch, LayerCache
from quire.engine.models.decoder_layer import DecoderLayer, Phases, add


class NormedResidualLayer(DecoderLayer):
    """What mixers and feed-forward layer give is added to their normalized input, times a factor, in place of the
    residual stream."""

    sole_readers = ()

    def in_phases(
        self,
        x: Tensor,
        residual: Tensor | None,
        batch: Batch,
        cos_sin: Tensor | None,
        cache: LayerCache,
        own: Tensor | None = None,
        last_tokens: Tensor | None = None,
    ) -> Phases:
        """See `DecoderLayer``."""
        assert self.spec.normed_residuals is not None
        of_mixed, of_fed = self.spec.normed_residuals
        normed, _ = add(self.attention_norm, x, residual)
        assert isinstance(normed, Tensor)
        mixed = self._mix(normed, batch, cos_sin, cache, last_tokens)
        normed = normed if last_tokens is None else normed[last_tokens]
        normed, _ = add(self.feed_forward_norm, mixed, normed * of_mixed)
        assert isinstance(normed, Tensor)
        return (yield from self._fed(normed, batch)), normed * of_fed
