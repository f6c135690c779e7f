"""Layers with an input of their own (Gemma 4), and with several residual streams, too (Gemma 3n)."""

from __future__ import annotations

from torch import Tensor

from quire.engine.architecture import model_spec
from quire.engine.architecture.residual_spec import AltUpSpec, ScaledResidualSpec
from quire.engine.distributed.communicator import Parallel
from quire.engine.distributed.expert_group import ExpertGroup
from quire.engine.layers.layer_input import LayerInput
from quire.engine.layers.residual import AltUp, Laurel
from quire.engine.layers.weight import Weight, whole
from quire.engine.models.decoder_layer import DecoderLayer, LayerStep, add, apply


class ScaledResidualLayer(DecoderLayer):
    """After the plain layer its own input, if it has one, is added to the residual stream, and all of it is multiplied
    by a scalar."""

    def __init__(
        self, spec: model_spec.LayerSpec, hidden_size: int, parallel: Parallel, experts: ExpertGroup | None = None
    ) -> None:
        super().__init__(spec, hidden_size, parallel, experts)
        path = spec.residual
        assert isinstance(path, ScaledResidualSpec)
        self.layer_input = None if path.layer_input is None else LayerInput(path.layer_input, hidden_size)
        self.scalar = Weight((1,), whole(1))

    def forward(self, x: Tensor, residual: Tensor | None, step: LayerStep) -> tuple[Tensor, Tensor | None]:
        """See `DecoderLayer`."""
        x, residual = super().forward(x, residual, step)
        assert residual is not None
        if self.layer_input is not None:
            assert step.own is not None
            residual = residual + x
            own = step.own if step.last_tokens is None else step.own[step.last_tokens]
            x = self.layer_input(residual, own, step.batch.adapters_of(step.last_tokens))
        return x * self.scalar, residual * self.scalar


class AltUpLayer(DecoderLayer):
    """One of several residual streams is computed, with a learned residual beside the attention, and the others are
    corrected by it. All streams are in `x`, and there is no residual."""

    sole_readers = ("feed_forward",)

    def __init__(
        self, spec: model_spec.LayerSpec, hidden_size: int, parallel: Parallel, experts: ExpertGroup | None = None
    ) -> None:
        super().__init__(spec, hidden_size, parallel, experts)
        path = spec.residual
        assert isinstance(path, AltUpSpec)
        self.alt_up, self.laurel = AltUp(path, hidden_size), Laurel(path.laurel, hidden_size)
        self.layer_input = LayerInput(path.layer_input, hidden_size)

    def forward(self, x: Tensor, residual: Tensor | None, step: LayerStep) -> tuple[Tensor, Tensor | None]:
        """See `DecoderLayer`."""
        own, last = step.own, step.last_tokens
        assert own is not None
        predicted = self.alt_up.predict(x, step.batch.adapters_of())
        x = predicted[:, self.alt_up.active].contiguous()
        normed = apply(self.attention_norm, x)
        mixed = self._mix(normed, step)
        if last is not None:
            normed, x, own, predicted = normed[last], x[last], own[last], predicted[last]
        adapters = step.batch.adapters_of(last)
        fed, x = add(self.feed_forward_norm, (mixed + self.laurel(normed, adapters)) * 0.5**0.5, x * 0.5**0.5)
        streams = self.alt_up.correct(predicted, x + self._fed(fed, step), adapters)
        added = self.layer_input(self.alt_up.scaled(streams[:, self.alt_up.active]), own, adapters)
        streams[:, 1:] += added[:, None]
        return streams.flatten(1), None
