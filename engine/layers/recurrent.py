"""Layers with a recurrent state, with the heads sharded over the ranks of a stage."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from quire import kernels
from quire.engine.distributed.communicator import Parallel
from quire.engine.layers.attention import Batch
from quire.engine.layers.linear import ColumnParallelLinear, Partition, RowParallelLinear, divided, stacked
from quire.engine.layers.norm import make_norm
from quire.engine.layers.weight import Weight
from quire.engine.models import model_spec

_LENGTH_EPS = 1e-6
"""Added to the square of the length of queries and keys, as in the authors' code."""


class CausalConv(nn.Module):
    """A convolution of each channel over its last tokens, followed by silu."""

    def __init__(self, parts: list[Partition], size: int) -> None:
        super().__init__()
        self.weight = Weight((sum(part.length for part in parts), 1, size), *stacked(parts, (1, size)))

    def forward(self, x: Tensor, batch: Batch, state: kernels.RecurrentState) -> Tensor:
        """`[tokens, channels]` → the same; updates the inputs in `state`."""
        assert batch.segments is not None
        return kernels.causal_conv(x, self.weight[:, 0], state.inputs, batch.segments)


class GatedDeltaNet(nn.Module):
    """Linear attention as described by `quire.engine.models.model_spec.RecurrentSpec`."""

    def __init__(self, spec: model_spec.RecurrentSpec, hidden_size: int, parallel: Parallel) -> None:
        super().__init__()
        self._spec = spec
        keys, values = spec.num_key_heads * spec.key_head_dim, spec.num_heads * spec.value_head_dim
        parts = [
            divided(name, size, parallel) for name, size in (("q", keys), ("k", keys), ("v", values), ("z", values))
        ]
        self._sizes = [part.length for part in parts]
        heads = divided("", spec.num_heads, parallel)
        self.qkvz = ColumnParallelLinear(hidden_size, parts, bias=False)
        self.gates = ColumnParallelLinear(
            hidden_size, [divided("b", spec.num_heads, parallel), divided("a", spec.num_heads, parallel)], bias=False
        )
        self.conv = CausalConv(parts[:3], spec.conv_size)
        self.decay = Weight((heads.length,), heads.shard())
        self.step_bias = Weight((heads.length,), heads.shard())
        self.norm = make_norm(spec.norm, spec.value_head_dim)
        self.state_output = RowParallelLinear(values, hidden_size, parallel, bias=False)

    def forward(self, x: Tensor, batch: Batch, cos_sin: Tensor, state: kernels.RecurrentState) -> Tensor:
        """`[tokens, hidden_size]` → the same; updates the requests' states. There are no positions."""
        spec = self._spec
        assert batch.segments is not None
        mixed, gate = self.qkvz(x).split((sum(self._sizes[:3]), self._sizes[3]), dim=-1)
        beta, step = self.gates(x).float().chunk(2, dim=-1)
        query, key, value = self.conv(mixed, batch, state).split(self._sizes[:3], dim=-1)
        out = kernels.linear_attention(
            query.unflatten(-1, (-1, spec.key_head_dim)),
            key.unflatten(-1, (-1, spec.key_head_dim)),
            value.unflatten(-1, (-1, spec.value_head_dim)),
            -self.decay.float().exp() * F.softplus(step + self.step_bias.float()),
            beta.sigmoid(),
            state.matrices,
            batch.segments,
            spec.key_head_dim**-0.5,
            _LENGTH_EPS,
        )
        normed = self.norm(out).flatten(1) * F.silu(gate.float())
        return self.state_output(normed.to(x.dtype))  # type: ignore[no-any-return]
