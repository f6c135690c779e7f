"""Inputs of each layer's own (Gemma 3n), as described by `quire.engine.architecture.residual_spec.LayerInputSpec`;
replicated on all ranks, except the embedding."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quire import kernels
from quire.engine.architecture.residual_spec import LayerInputSpec
from quire.engine.distributed.communicator import Parallel
from quire.engine.layers.embedding import VocabParallelEmbedding
from quire.engine.layers.from_spec import FromSpec
from quire.engine.layers.linear import GroupedLinear
from quire.engine.layers.norm import make_norm


class LayerInputs(nn.Module):
    """The inputs of `num_layers` layers, one after another."""

    def __init__(self, spec: LayerInputSpec, num_layers: int, hidden_size: int, parallel: Parallel) -> None:
        super().__init__()
        self._spec, self._hidden_size = spec, hidden_size
        own = FromSpec(spec.outer_parameters(hidden_size, num_layers), parallel)
        self.embedding = VocabParallelEmbedding(spec.vocab_size, num_layers * spec.size, parallel)
        self.projection = GroupedLinear(own.weight("layer_inputs.projection"))
        self.norm = make_norm(spec.norm, spec.size)

    def forward(self, token_ids: Tensor, x: Tensor) -> Tensor:
        """`[tokens]`, and the embedded tokens `[tokens, hidden_size]`, → `[tokens, num_layers * size]`."""
        projected: Tensor = self.projection(x) * self._hidden_size**-0.5
        normed: Tensor = self.norm(torch.unflatten(projected, -1, (-1, self._spec.size)))
        rows: Tensor = self.embedding(token_ids.where(token_ids < self._spec.vocab_size, 0))
        return (normed.flatten(1) + rows * rows.new_full((), self._spec.size**0.5)) * 2**-0.5


class LayerInput(nn.Module):
    """The contribution of a layer's own input to the residual stream."""

    def __init__(self, spec: LayerInputSpec, hidden_size: int) -> None:
        super().__init__()
        self._activation = spec.activation
        own = FromSpec(spec.parameters(hidden_size))
        self.gate = own.column_parallel("layer_input.gate")
        self.projection = own.column_parallel("layer_input.projection")
        self.norm = make_norm(spec.norm, hidden_size)

    def forward(self, x: Tensor, layer_input: Tensor, adapters: kernels.AdapterRows | None = None) -> Tensor:
        """The residual stream `[tokens, hidden_size]`, and the input `[tokens, size]`, → `[tokens, hidden_size]`."""
        gated = kernels.act_mul(torch.cat((self.gate(x, adapters), layer_input), dim=-1), self._activation)
        return self.norm(self.projection(gated, adapters))  # type: ignore[no-any-return]
