"""Layers with a recurrent state, with the heads sharded over the ranks of a stage."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire import kernels
from quire.engine.architecture import recurrent_spec
from quire.engine.distributed.communicator import Parallel
from quire.engine.layers.from_spec import FromSpec
from quire.engine.layers.linear import GroupedLinear, divided
from quire.engine.layers.norm import GroupedNorm, PerHeadNorm, make_norm
from quire.engine.layers.weight import Weight
from quire.kernels import RecurrentState, StateSegments

_LENGTH_EPS = 1e-6
"""Added to the square of the length of queries and keys, as in the authors' code."""
_DECAY_POWER = 8.0
"""Power of the decays in a real-gated linear recurrent unit, as in the paper."""
_SMALLEST_STEP = 1e-30
"""Below it, a state does not change in float32; dividing by it does not overflow."""


def make_mixer(spec: recurrent_spec.RecurrentSpec, hidden_size: int, parallel: Parallel) -> nn.Module:
    """The layer with such a state. Its `forward` takes the hidden states `[tokens, hidden_size]`, the tokens'
    positions, the segments of its KV cache group, the pages of states and the tokens' adapters, and returns the same
    shape; it updates the requests' states."""
    match spec:
        case recurrent_spec.GatedDeltaNetSpec():
            return GatedDeltaNet(spec, hidden_size, parallel)
        case recurrent_spec.ShortConvSpec():
            return ShortConv(spec, hidden_size, parallel)
        case recurrent_spec.Mamba2Spec():
            return Mamba2(spec, hidden_size, parallel)
        case recurrent_spec.KimiDeltaSpec():
            return KimiDeltaAttention(spec, hidden_size, parallel)
        case recurrent_spec.LightningSpec():
            return LightningAttention(spec, hidden_size, parallel)
        case recurrent_spec.MLSTMSpec():
            return MLSTM(spec, hidden_size, parallel)
        case recurrent_spec.GroupedMambaSpec():
            return GroupedMamba(spec, hidden_size, parallel)
        case recurrent_spec.MambaSpec():
            return Mamba(spec, hidden_size, parallel)
        case recurrent_spec.RGLRUSpec():
            return RGLRU(spec, hidden_size, parallel)
        case recurrent_spec.RWKVSpec():
            return RWKV(spec, hidden_size, parallel)
    raise AssertionError(spec)


class CausalConv(nn.Module):
    """A convolution of each channel over its last tokens, followed by silu if `silu`."""

    def __init__(self, weight: Weight, bias: Weight | None = None, *, silu: bool = True) -> None:
        """`weight` is `[channels, 1, tokens]`."""
        super().__init__()
        self._silu = silu
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor, segments: StateSegments, state: RecurrentState) -> Tensor:
        """`[tokens, channels]` → the same; updates the inputs in `state`."""
        return kernels.causal_conv(x, self.weight[:, 0], self.bias, state.inputs, segments, silu=self._silu)


class GatedDeltaNet(nn.Module):
    """Linear attention as described by `quire.engine.architecture.recurrent_spec.GatedDeltaNetSpec`."""

    def __init__(self, spec: recurrent_spec.GatedDeltaNetSpec, hidden_size: int, parallel: Parallel) -> None:
        super().__init__()
        self._spec = spec
        own = FromSpec(spec.parameters(hidden_size), parallel)
        self._sizes = own.widths("state.input")[:4]
        self.input = own.column_parallel("state.input")
        self.gates = None if spec.has_joint_input else own.column_parallel("state.gates")
        self.conv = CausalConv(own.weight("state.conv"))
        self.decay, self.step_bias = own.weight("state", "decay"), own.weight("state", "step_bias")
        self.norm = make_norm(spec.norm, spec.value_head_dim)
        self.output = own.row_parallel("state.output")

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        segments: StateSegments,
        state: RecurrentState,
        adapters: kernels.AdapterRows | None = None,
    ) -> Tensor:
        """See `make_mixer`."""
        spec = self._spec
        mixed, gate, *rest = self.input(x, adapters).tensor_split((sum(self._sizes[:3]), sum(self._sizes)), dim=-1)
        beta, step = (rest[0] if self.gates is None else self.gates(x, adapters)).float().chunk(2, dim=-1)
        query, key, value = self.conv(mixed, segments, state).split(self._sizes[:3], dim=-1)
        out = kernels.linear_attention(
            query.unflatten(-1, (-1, spec.key_head_dim)),
            key.unflatten(-1, (-1, spec.key_head_dim)),
            value.unflatten(-1, (-1, spec.value_head_dim)),
            -self.decay.float().exp() * F.softplus(step + self.step_bias.float()),
            beta.sigmoid() * spec.beta_scale,
            state.matrices,
            segments,
            spec.key_head_dim**-0.5,
            _LENGTH_EPS,
        )
        gate = gate.float().sigmoid() if spec.gate == "sigmoid" else F.silu(gate.float())
        normed = self.norm(out).flatten(1) * gate
        return self.output(normed.to(x.dtype), adapters)  # type: ignore[no-any-return]


class ShortConv(nn.Module):
    """A gated convolution as described by `quire.engine.architecture.recurrent_spec.ShortConvSpec`."""

    def __init__(self, spec: recurrent_spec.ShortConvSpec, hidden_size: int, parallel: Parallel) -> None:
        super().__init__()
        own = FromSpec(spec.parameters(hidden_size), parallel)
        self.input = own.column_parallel("state.input")
        bias = own.weight("state.conv", "bias") if spec.bias else None
        self.conv = CausalConv(own.weight("state.conv"), bias, silu=False)
        self.output = own.row_parallel("state.output")

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        segments: StateSegments,
        state: RecurrentState,
        adapters: kernels.AdapterRows | None = None,
    ) -> Tensor:
        """See `make_mixer`."""
        before, after, mixed = self.input(x, adapters).chunk(3, dim=-1)
        return self.output(after * self.conv(before * mixed, segments, state), adapters)  # type: ignore[no-any-return]


class Mamba2(nn.Module):
    """A state space as described by `quire.engine.architecture.recurrent_spec.Mamba2Spec`."""

    def __init__(self, spec: recurrent_spec.Mamba2Spec, hidden_size: int, parallel: Parallel) -> None:
        super().__init__()
        self._spec = spec
        own = FromSpec(spec.parameters(hidden_size), parallel)
        self._sizes = own.widths("state.input")
        self.input = own.column_parallel("state.input")
        bias = own.weight("state.conv", "bias") if spec.conv_bias else None
        self.conv = CausalConv(own.weight("state.conv"), bias)
        self.decay, self.skip = own.weight("state", "decay"), own.weight("state", "skip")
        self.step_bias = own.weight("state", "step_bias")
        self.norm = None
        if spec.norm is not None:
            self.norm = GroupedNorm(spec.norm, spec.width, spec.groups, parallel)
        self.output = own.row_parallel("state.output")

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        segments: StateSegments,
        state: RecurrentState,
        adapters: kernels.AdapterRows | None = None,
    ) -> Tensor:
        """See `make_mixer`."""
        spec = self._spec
        parts = self.input(x, adapters)
        if any(multiplier != 1.0 for multiplier in spec.multipliers):
            pieces = zip(parts.split_with_sizes(self._sizes, dim=-1), spec.multipliers, strict=True)
            parts = torch.cat([part * multiplier for part, multiplier in pieces], dim=-1)
        gate, mixed, step = parts.split_with_sizes((self._sizes[0], sum(self._sizes[1:4]), self._sizes[4]), dim=-1)
        value, key, query = self.conv(mixed, segments, state).split_with_sizes(self._sizes[1:4], dim=-1)
        step = F.softplus(step.float() + self.step_bias.float())
        if spec.step_limits != (0.0, math.inf):
            step = step.clamp(*spec.step_limits)
        value = value.unflatten(-1, (-1, spec.value_head_dim))
        mixed = kernels.linear_attention(
            query.unflatten(-1, (-1, spec.state_size)),
            key.unflatten(-1, (-1, spec.state_size)),
            value,
            step * -self.decay.float().exp(),
            step,
            state.matrices,
            segments,
            1.0,
            is_delta=False,
        )
        inner, gate = (mixed + value * self.skip[:, None]).flatten(1), F.silu(gate.float())
        if self.norm is None:
            inner = inner * gate
        elif spec.norm_before_gate:
            inner = self.norm(inner) * gate
        else:
            inner = self.norm(inner * gate)
        out: Tensor = self.output(inner.to(x.dtype), adapters)
        return out if spec.output_multiplier == 1.0 else out * spec.output_multiplier


class KimiDeltaAttention(nn.Module):
    """Linear attention as described by `quire.engine.architecture.recurrent_spec.KimiDeltaSpec`."""

    def __init__(self, spec: recurrent_spec.KimiDeltaSpec, hidden_size: int, parallel: Parallel) -> None:
        super().__init__()
        self._spec = spec
        own = FromSpec(spec.parameters(hidden_size), parallel)
        *convolved, beta, step, gate = own.widths("state.input")
        self._sizes = [sum(convolved), beta, step, gate]
        self.input = own.column_parallel("state.input")
        self.decay_up = self.gate_up = None
        if spec.rank is not None:
            self.decay_up = own.column_parallel("state.decay_up")
            self.gate_up = own.column_parallel("state.gate_up")
        self.conv = CausalConv(own.weight("state.conv"))
        self.decay, self.step_bias = own.weight("state", "decay"), own.weight("state", "step_bias")
        self.norm = make_norm(spec.norm, spec.value_head_dim)
        self.output = own.row_parallel("state.output")

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        segments: StateSegments,
        state: RecurrentState,
        adapters: kernels.AdapterRows | None = None,
    ) -> Tensor:
        """See `make_mixer`."""
        spec = self._spec
        mixed, beta, step, gate = self.input(x, adapters).split_with_sizes(self._sizes, dim=-1)
        if self.decay_up is not None and self.gate_up is not None:
            step, gate = self.decay_up(step, adapters), self.gate_up(gate, adapters)
        step = (step.float() + self.step_bias.float()).unflatten(-1, (-1, spec.value_head_dim))
        rate = self.decay.float().exp().view(-1, 1)
        bound = spec.lower_bound
        decay = -rate * F.softplus(step) if bound is None else bound * (rate * step).sigmoid()
        query, key, value = self.conv(mixed, segments, state).unflatten(-1, (3, -1, spec.value_head_dim)).unbind(1)
        out = kernels.linear_attention(
            query,
            key,
            value,
            decay,
            beta.float().sigmoid(),
            state.matrices,
            segments,
            spec.value_head_dim**-0.5,
            _LENGTH_EPS,
        )
        normed = self.norm(out).flatten(1) * gate.float().sigmoid()
        return self.output(normed.to(x.dtype), adapters)  # type: ignore[no-any-return]


class LightningAttention(nn.Module):
    """Linear attention as described by `quire.engine.architecture.recurrent_spec.LightningSpec`."""

    def __init__(self, spec: recurrent_spec.LightningSpec, hidden_size: int, parallel: Parallel) -> None:
        super().__init__()
        self._spec = spec
        own = FromSpec(spec.parameters(hidden_size), parallel)
        self.input = own.column_parallel("state.input")
        self.norm = GroupedNorm(spec.norm, spec.width, 1, parallel)
        self.output = own.row_parallel("state.output")
        with torch.device("cpu"):  # see `Rotary`
            heads_from_1 = torch.arange(1, spec.num_heads + 1, dtype=torch.float32)
            rates = (heads_from_1 * (-8 / spec.num_heads)).exp2() * spec.rate
        heads = divided("", spec.num_heads, parallel)
        self._decay = -rates[heads.start : heads.start + heads.length].to(torch.get_default_device())

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        segments: StateSegments,
        state: RecurrentState,
        adapters: kernels.AdapterRows | None = None,
    ) -> Tensor:
        """See `make_mixer`."""
        spec = self._spec
        *parts, gate = self.input(x, adapters).chunk(4, dim=-1)
        query, key, value = (torch.unflatten(F.silu(part), -1, (-1, spec.value_head_dim)) for part in parts)
        decay = self._decay.expand(len(x), -1)
        mixed = kernels.linear_attention(query, key, value, decay, None, state.matrices, segments, 1.0, is_delta=False)
        normed = self.norm(mixed.flatten(1)) * gate.float().sigmoid()
        out: Tensor = self.output(normed.to(x.dtype), adapters)
        return out if spec.output_multiplier == 1.0 else out * spec.output_multiplier


class MLSTM(nn.Module):
    """A matrix memory as described by `quire.engine.architecture.recurrent_spec.MLSTMSpec`. The last of a head's values
    is 1.

    Exponentials of gates are limited by their cap, so that in float32 neither sums nor states need a running maximum;
    float16 has no room for them. The authors also add 1e-6 times the exponential of that maximum to divisors.
    """

    def __init__(self, spec: recurrent_spec.MLSTMSpec, hidden_size: int, parallel: Parallel) -> None:
        super().__init__()
        self._spec = spec
        own = FromSpec(spec.parameters(hidden_size), parallel)
        self._sizes = own.widths("state.input")
        self.input, self.gates = own.column_parallel("state.input"), own.column_parallel("state.gates")
        self.norm = PerHeadNorm(spec.norm, own.shards("state.norm")[0], spec.value_head_dim)
        self.output = own.row_parallel("state.output")

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        segments: StateSegments,
        state: RecurrentState,
        adapters: kernels.AdapterRows | None = None,
    ) -> Tensor:
        """See `make_mixer`."""
        spec = self._spec
        *inputs, gate = self.input(x, adapters).split_with_sizes(self._sizes, dim=-1)
        dims = spec.key_head_dim, spec.key_head_dim, spec.value_head_dim
        query, key, value = (each.float().unflatten(-1, (-1, dim)) for each, dim in zip(inputs, dims, strict=True))
        beta, step = ((self.gates(x, adapters).float() / spec.gate_cap).tanh() * spec.gate_cap).chunk(2, dim=-1)
        mixed = kernels.linear_attention(
            query,
            key,
            F.pad(value, (0, 1), value=1.0),
            F.logsigmoid(step),
            beta.exp(),
            state.matrices,
            segments,
            spec.key_head_dim**-0.5,
            is_delta=False,
        )
        heads = mixed[..., :-1] / mixed[..., -1:].abs().clamp(min=1.0)
        normed = self.norm(heads).flatten(1) * gate.float().sigmoid()
        return self.output(normed.to(x.dtype), adapters)  # type: ignore[no-any-return]


class Mamba(nn.Module):
    """A state space as described by `quire.engine.architecture.recurrent_spec.MambaSpec`."""

    def __init__(self, spec: recurrent_spec.MambaSpec, hidden_size: int, parallel: Parallel) -> None:
        super().__init__()
        own = FromSpec(spec.parameters(hidden_size), parallel)
        self._sizes = [spec.rank, spec.state_size, spec.state_size]
        self.input = own.column_parallel("state.input")
        self.conv = CausalConv(own.weight("state.conv"), own.weight("state.conv", "bias") if spec.conv_bias else None)
        self.select = own.row_parallel("state.select")
        self.step_norm = self.key_norm = self.query_norm = None
        if spec.norm is not None:
            self.step_norm, self.key_norm, self.query_norm = (make_norm(spec.norm, size) for size in self._sizes)
        self.step = own.column_parallel("state.step")
        self.decay, self.skip = own.weight("state", "decay"), own.weight("state", "skip")
        self.output = own.row_parallel("state.output")

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        segments: StateSegments,
        state: RecurrentState,
        adapters: kernels.AdapterRows | None = None,
    ) -> Tensor:
        """See `make_mixer`."""
        value, gate = self.input(x, adapters).chunk(2, dim=-1)
        value = self.conv(value, segments, state)
        step, key, query = self.select(value, adapters).split_with_sizes(self._sizes, dim=-1)
        if self.step_norm is not None and self.key_norm is not None and self.query_norm is not None:
            step, key, query = self.step_norm(step), self.key_norm(key), self.query_norm(query)
        step = F.softplus(self.step(step, adapters).float())
        rates = -self.decay.float().exp().T
        out = kernels.selective_scan(value, step, rates, key, query, state.matrices, segments)
        return self.output((out + value * self.skip) * F.silu(gate), adapters)  # type: ignore[no-any-return]


class GroupedMamba(nn.Module):
    """A state space as described by `quire.engine.architecture.recurrent_spec.GroupedMambaSpec`."""

    def __init__(self, spec: recurrent_spec.GroupedMambaSpec, hidden_size: int, parallel: Parallel) -> None:
        super().__init__()
        own = FromSpec(spec.parameters(hidden_size), parallel)
        self._sizes = [spec.rank, spec.state_size, spec.state_size]
        self.input = own.column_parallel("state.input")
        self.conv = CausalConv(own.weight("state.conv"), own.weight("state.conv", "bias") if spec.conv_bias else None)
        select, step = own.weight("state.select"), own.weight("state.step")
        self.select, self.step = GroupedLinear(select, len(select)), GroupedLinear(step, len(step))
        self.step_bias = own.weight("state", "step_bias")
        self.decay, self.skip = own.weight("state", "decay"), own.weight("state", "skip")
        self.output = own.row_parallel("state.output")

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        segments: StateSegments,
        state: RecurrentState,
        adapters: kernels.AdapterRows | None = None,
    ) -> Tensor:
        """See `make_mixer`."""
        value, gate = self.input(x, adapters).chunk(2, dim=-1)
        value = self.conv(value, segments, state)
        selected = self.select(value).unflatten(-1, (len(self.skip), -1))  # [tokens, groups, numbers]
        step, keys, queries = selected.split_with_sizes(self._sizes, dim=-1)
        value = value.unflatten(-1, self.skip.shape)
        step = self.step(step.flatten(1)).view_as(value).float() + self.step_bias.float()
        step, rates = F.softplus(step), -self.decay.float().exp().transpose(1, 2)
        out = torch.empty_like(value)
        for group in range(value.shape[1]):
            own = step[:, group], rates[group].contiguous(), keys[:, group], queries[:, group]
            matrices = state.matrices[:, group : group + 1]
            out[:, group] = kernels.selective_scan(value[:, group], *own, matrices, segments)
        return self.output((out + value * self.skip).flatten(1) * F.silu(gate), adapters)  # type: ignore[no-any-return]


class RGLRU(nn.Module):
    """A recurrent unit as described by `quire.engine.architecture.recurrent_spec.RGLRUSpec`.

    It is a selective scan whose states have one element: the gate of the decay is the step. The scan multiplies inputs
    by their steps, so they are divided by them before.
    """

    def __init__(self, spec: recurrent_spec.RGLRUSpec, hidden_size: int, parallel: Parallel) -> None:
        super().__init__()
        self._activation = spec.activation
        own = FromSpec(spec.parameters(hidden_size), parallel)
        self.input = own.column_parallel("state.input")
        self.conv = CausalConv(own.weight("state.conv"), own.weight("state.conv", "bias"), silu=False)
        gates = own.weight("state.input_gate"), own.weight("state.decay_gate")
        self.input_gate, self.decay_gate = (GroupedLinear(gate, len(gate)) for gate in gates)
        self.input_bias, self.decay_bias = own.weight("state", "input_bias"), own.weight("state", "decay_bias")
        self.decay = own.weight("state", "decay")
        self.output = own.row_parallel("state.output")

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        segments: StateSegments,
        state: RecurrentState,
        adapters: kernels.AdapterRows | None = None,
    ) -> Tensor:
        """See `make_mixer`."""
        value, gate = self.input(x, adapters).chunk(2, dim=-1)
        value = self.conv(value, segments, state)
        gated = value * (self.input_gate(value) + self.input_bias.flatten()).float().sigmoid()
        step = (self.decay_gate(value) + self.decay_bias.flatten()).float().sigmoid().clamp(min=_SMALLEST_STEP)
        rates = -_DECAY_POWER * F.softplus(self.decay.float())
        size = (-torch.expm1(2 * step * rates)).sqrt()  # so that states keep the size of their inputs
        gated = gated * size.where(positions[:, None] > 0, 1.0)
        one = gated.new_ones(len(x), 1)
        out = kernels.selective_scan(gated / step, step, rates[None], one, one, state.matrices, segments)
        gated = kernels.act_mul(torch.cat((gate, out.to(x.dtype)), dim=-1), self._activation)
        return self.output(gated, adapters)  # type: ignore[no-any-return]


class RWKV(nn.Module):
    """A layer as described by `quire.engine.architecture.recurrent_spec.RWKVSpec`."""

    mix_key: Weight
    mix_value: Weight
    mix_receptance: Weight
    inner_mix_key: Weight
    inner_mix_receptance: Weight

    def __init__(self, spec: recurrent_spec.RWKVSpec, hidden_size: int, parallel: Parallel) -> None:
        super().__init__()
        own = FromSpec(spec.parameters(hidden_size), parallel)
        self.norm, self.inner_norm = make_norm(spec.norm, hidden_size), make_norm(spec.norm, hidden_size)
        for name in ("mix_key", "mix_value", "mix_receptance", "inner_mix_key", "inner_mix_receptance"):
            self.register_parameter(name, own.weight("state", name))
        self.key, self.value = own.column_parallel("state.key"), own.column_parallel("state.value")
        self.receptance = own.column_parallel("state.receptance")
        self.decay, self.bonus = own.weight("state", "decay"), own.weight("state", "bonus")
        self.output = own.row_parallel("state.output")
        self.inner_key = own.column_parallel("state.inner_key")
        self.inner_receptance = own.column_parallel("state.inner_receptance")
        self.inner_value = own.row_parallel("state.inner_value")
        self._shift = torch.tensor([1.0, 0.0]).repeat(hidden_size, 1)  # a convolution that gives the token before

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        segments: StateSegments,
        state: RecurrentState,
        adapters: kernels.AdapterRows | None = None,
    ) -> Tensor:
        """See `make_mixer`; `x` is the residual stream."""
        normed: Tensor = self.norm(x)
        before = self._before(normed, segments, state.inputs[:, :1])
        key, value, receptance = (
            linear(torch.lerp(before, normed, mix[0]), adapters)
            for linear, mix in (
                (self.key, self.mix_key),
                (self.value, self.mix_value),
                (self.receptance, self.mix_receptance),
            )
        )
        decay, bonus = -self.decay.float().exp(), self.bonus.float()
        mean = kernels.wkv(key, value, decay, bonus, state.matrices, segments)
        mixed: Tensor = self.output(receptance.sigmoid() * mean, adapters)
        normed = self.inner_norm(x + mixed)
        before = self._before(normed, segments, state.inputs[:, 1:])
        inner = self.inner_key(torch.lerp(before, normed, self.inner_mix_key[0]), adapters)
        inner = kernels.activate(inner, "relu2")
        receptance = self.inner_receptance(torch.lerp(before, normed, self.inner_mix_receptance[0]), adapters)
        return mixed + receptance.sigmoid() * self.inner_value(inner, adapters)  # type: ignore[no-any-return]

    def _before(self, x: Tensor, segments: StateSegments, inputs: Tensor) -> Tensor:
        """The token before each of `x` `[tokens, hidden_size]`; updates `inputs`."""
        return kernels.causal_conv(x, self._shift, None, inputs, segments, silu=False)
