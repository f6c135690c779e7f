"""Layers with hyper-connections: several residual streams (DeepSeek-V4, Qwen4-Exp, GLM-5.3)."""

from __future__ import annotations

from torch import Tensor

from quire.engine.architecture import model_spec
from quire.engine.architecture.residual_spec import ConnectionSpec
from quire.engine.distributed.communicator import Parallel
from quire.engine.distributed.expert_group import ExpertGroup
from quire.engine.layers.ngrams import NGrams
from quire.engine.layers.residual import make_connection
from quire.engine.models.decoder_layer import DecoderLayer, LayerStep, apply


class StreamsLayer(DecoderLayer):
    """The inputs of mixers and feed-forward layer are sums of the streams, to each of which their output is added. All
    streams are in `x`, and there is no residual."""

    def __init__(
        self, spec: model_spec.LayerSpec, hidden_size: int, parallel: Parallel, experts: ExpertGroup | None = None
    ) -> None:
        super().__init__(spec, hidden_size, parallel, experts)
        assert isinstance(spec.residual, ConnectionSpec)
        self.attention_connection = make_connection(spec.residual, hidden_size)
        self.feed_forward_connection = make_connection(spec.residual, hidden_size)
        self.ngrams = None if spec.ngrams is None else NGrams(spec.ngrams, hidden_size, parallel)

    def forward(self, x: Tensor, residual: Tensor | None, step: LayerStep) -> tuple[Tensor, Tensor | None]:
        """See `DecoderLayer`. All tokens are returned: their streams are merged after the last layer."""
        assert step.last_tokens is None
        batch, cache, adapters = step.batch, step.cache, step.batch.adapters_of()
        if self.ngrams is not None:
            assert cache.state is not None
            x = x + self.ngrams(x, batch.token_ids, batch.segments(cache.state_group), cache.state, adapters)
        collapsed, mixing = self.attention_connection.before(x, adapters)
        mixed = self._mix(apply(self.attention_norm, collapsed), step)
        x = self.attention_connection.after(mixed, mixing)
        collapsed, mixing = self.feed_forward_connection.before(x, adapters)
        out = self._fed(apply(self.feed_forward_norm, collapsed), step)
        return self.feed_forward_connection.after(out, mixing), None
