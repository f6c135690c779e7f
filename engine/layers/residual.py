"""Residual streams other than the usual one (Gemma 3n, DeepSeek-V4); replicated on all ranks."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire import kernels
from quire.engine.architecture.residual_spec import (
    AltUpSpec,
    ConnectionSpec,
    GatedConnectionSpec,
    HyperConnectionSpec,
    LaurelSpec,
)
from quire.engine.architecture.spec_parts import NormSpec
from quire.engine.layers.from_spec import FromSpec
from quire.engine.layers.linear import GroupedLinear
from quire.engine.layers.norm import make_norm
from quire.engine.layers.weight import Weight, whole

_SMALLEST_SQUARE = 1e-5
"""Lower bound of a projected stream's mean square, as in the authors' code."""


class AltUp(nn.Module):
    """A layer's part of alternating updates, as described by `quire.engine.architecture.residual_spec.AltUpSpec`."""

    def __init__(self, spec: AltUpSpec, hidden_size: int) -> None:
        super().__init__()
        self.active, self._hidden_size = spec.active, hidden_size
        own = FromSpec(spec.parameters(hidden_size))
        self.norm = make_norm(spec.norm, hidden_size)
        self.router, self.prediction, self.correction = (
            GroupedLinear(own.weight(f"alt_up.{name}")) for name in ("router", "prediction", "correction")
        )
        self.scale = own.weight("alt_up", "scale") if spec.scales_output else None

    def predict(self, x: Tensor, adapters: kernels.AdapterRows | None = None) -> Tensor:
        """`[tokens, streams * hidden_size]` → `[tokens, streams, hidden_size]`"""
        streams = torch.unflatten(x, -1, (-1, self._hidden_size))
        count = streams.shape[1]
        modalities = self._modalities(streams[:, self.active], adapters)
        weights: Tensor = self.prediction(modalities, adapters).unflatten(-1, (count, count))
        # In a batched product, a token's sum would depend on how many tokens there are.
        return sum((weights[:, :, number, None] * streams[:, number, None] for number in range(count)), start=streams)

    def correct(self, predicted: Tensor, computed: Tensor, adapters: kernels.AdapterRows | None = None) -> Tensor:
        """`predicted`, corrected by the result for the active stream, `computed` `[tokens, hidden_size]`."""
        weights: Tensor = self.correction(self._modalities(computed, adapters), adapters) + 1
        return predicted + weights[..., None] * (computed - predicted[:, self.active])[:, None]

    def scaled(self, x: Tensor) -> Tensor:
        return x if self.scale is None else x * self.scale

    def _modalities(self, x: Tensor, adapters: kernels.AdapterRows | None = None) -> Tensor:
        """`[tokens, hidden_size]` → `[tokens, streams]`"""
        routed: Tensor = self.router(self.norm(x) / self._hidden_size, adapters)
        return routed.float().tanh().to(x.dtype)


class StreamProjections(GroupedLinear):
    """The projections of all streams but the first: before the layers, each is applied to the embedded tokens; after
    them, each to its own stream."""

    def __init__(self, spec: AltUpSpec, hidden_size: int, *, is_last: bool) -> None:
        weight = FromSpec(spec.projections("", hidden_size)).weight("")
        super().__init__(weight, spec.num_streams - 1 if is_last else 1)
        self._hidden_size = hidden_size

    def expand(self, x: Tensor) -> Tensor:
        """The embedded tokens `[tokens, hidden_size]` → `[tokens, streams * hidden_size]`"""
        return torch.cat((x, self._projected(x, x).flatten(1)), dim=-1)

    def merge(self, x: Tensor) -> Tensor:
        """`[tokens, streams * hidden_size]` → `[tokens, hidden_size]`"""
        first, others = x[:, : self._hidden_size], x[:, self._hidden_size :]
        streams = (first, *self._projected(others, first).unbind(1))
        return sum(streams[1:], start=first) / len(streams)

    def _projected(self, x: Tensor, like: Tensor) -> Tensor:
        """The other streams `[tokens, streams - 1, hidden_size]`, with the size of `like` `[tokens, hidden_size]`."""
        projected: Tensor = self(x)
        return _with_size_of(like, torch.unflatten(projected, -1, (-1, self._hidden_size)))


def _with_size_of(x: Tensor, others: Tensor) -> Tensor:
    """`others` `[tokens, streams, hidden_size]` with the root mean square of `x` `[tokens, hidden_size]`."""
    size = x.square().mean(dim=-1, keepdim=True).sqrt()
    return others * size[:, None] / others.square().mean(dim=-1, keepdim=True).clamp(min=_SMALLEST_SQUARE).sqrt()


class Laurel(nn.Module):
    """A learned residual as described by `quire.engine.architecture.residual_spec.LaurelSpec`."""

    def __init__(self, spec: LaurelSpec, hidden_size: int) -> None:
        super().__init__()
        own = FromSpec(spec.parameters(hidden_size))
        self.down, self.up = own.column_parallel("laurel.down"), own.column_parallel("laurel.up")
        self.norm = make_norm(spec.norm, hidden_size)

    def forward(self, x: Tensor, adapters: kernels.AdapterRows | None = None) -> Tensor:
        """`[tokens, hidden_size]` → the same."""
        return x + self.norm(self.up(self.down(x, adapters), adapters))  # type: ignore[no-any-return]


class Mixing(NamedTuple):
    """The streams before a layer, and how they go on after it; all weights are float32."""

    streams: Tensor
    """`[tokens, streams * hidden_size]`"""
    outputs: Tensor
    """`[tokens, streams]`, the weight of the layer's output in each stream."""
    mixed: Tensor
    """`[tokens, streams, streams]`, the weight of each stream (first) in each stream (second); empty: streams are not
    mixed."""


class HyperConnection(nn.Module):
    """The streams before and after an attention or a feed-forward layer, as described by
    `quire.engine.architecture.residual_spec.HyperConnectionSpec`."""

    def __init__(self, spec: HyperConnectionSpec, hidden_size: int) -> None:
        super().__init__()
        self._spec, own = spec, FromSpec(spec.connection("", spec.num_weights, spec.num_scales, hidden_size))
        self.function, self.base, self.scale = (own.weight("", kind) for kind in ("function", "base", "scale"))

    def before(self, x: Tensor, adapters: kernels.AdapterRows | None = None) -> tuple[Tensor, Mixing]:
        """The streams `[tokens, streams * hidden_size]` → the layer's input `[tokens, hidden_size]`."""
        spec, weights = self._spec, (self.function, self.base, self.scale)
        constants = spec.num_streams, spec.norm.eps, spec.eps, spec.iterations, spec.magnitude, spec.output_eps
        read, outputs, mixed = kernels.mhc_pre(x, *weights, *constants)
        return read, Mixing(x, outputs, mixed)

    def after(self, x: Tensor, mixing: Mixing) -> Tensor:
        """The layer's output `[tokens, hidden_size]` → the streams `[tokens, streams * hidden_size]`."""
        return kernels.mhc_post(x, mixing.streams, mixing.outputs, mixing.mixed)


class StreamNorm(nn.Module):
    """RMSNorm of each stream, with weights of its own."""

    def __init__(self, norm: NormSpec, num_streams: int, hidden_size: int) -> None:
        super().__init__()
        self._norm, self._streams = norm, num_streams
        self.weight = Weight((num_streams * hidden_size,), whole(num_streams * hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        """`[tokens, streams * hidden_size]` → the same."""
        streams = torch.unflatten(x.float(), -1, (self._streams, -1))
        normed = F.rms_norm(streams, streams.shape[-1:], None, self._norm.eps).flatten(-2)
        return (normed * (self.weight.float() + self._norm.offset)).to(x.dtype)


class GatedConnection(nn.Module):
    """The streams before and after an attention or a feed-forward layer, as described by
    `quire.engine.architecture.residual_spec.GatedConnectionSpec`."""

    def __init__(self, spec: GatedConnectionSpec, hidden_size: int) -> None:
        super().__init__()
        self._streams, own = spec.num_streams, FromSpec(spec.connection("", hidden_size))
        self.norm = StreamNorm(spec.norm, spec.num_streams, hidden_size)
        self.down, self.up = own.column_parallel(".down"), own.column_parallel(".up")
        self.outputs = own.replicated(".outputs")

    def before(self, x: Tensor, adapters: kernels.AdapterRows | None = None) -> tuple[Tensor, Mixing]:
        """The streams `[tokens, streams * hidden_size]` → the layer's input `[tokens, hidden_size]`."""
        normed = self.norm(x)
        gates = self.up(F.silu(self.down(normed, adapters) / self._streams), adapters)
        outputs = 2 * (self.outputs.logits(normed, adapters) / self._streams).sigmoid()
        return _mean_of_gated(normed, gates, self._streams), Mixing(x, outputs, outputs.new_empty(len(x), 0, 0))

    def after(self, x: Tensor, mixing: Mixing) -> Tensor:
        """The layer's output `[tokens, hidden_size]` → the streams `[tokens, streams * hidden_size]`."""
        return kernels.mhc_post(x, mixing.streams, mixing.outputs, mixing.mixed)


class GatedHead(nn.Module):
    """The mean of the gated streams after the layers."""

    def __init__(self, spec: GatedConnectionSpec, hidden_size: int) -> None:
        super().__init__()
        self._streams, own = spec.num_streams, FromSpec(spec.last_parameters("", hidden_size))
        self.norm = StreamNorm(spec.norm, spec.num_streams, hidden_size)
        self.down, self.up = own.replicated(".down"), own.replicated(".up")

    def merge(self, x: Tensor) -> Tensor:
        """`[tokens, streams * hidden_size]` → `[tokens, hidden_size]`"""
        normed = self.norm(x)
        gates = self.up.logits(F.silu(self.down.logits(normed) / self._streams))
        return _mean_of_gated(normed, gates, self._streams)


def _mean_of_gated(streams: Tensor, gates: Tensor, count: int) -> Tensor:
    """`[tokens, count * hidden_size]` → `[tokens, hidden_size]`"""
    gated = streams * gates.sigmoid().to(streams.dtype)
    return torch.unflatten(gated, -1, (count, -1)).mean(dim=1)


class HyperHead(nn.Module):
    """The sum of the streams after the layers, with weights that are computed from them; or their mean."""

    def __init__(self, spec: HyperConnectionSpec, hidden_size: int) -> None:
        super().__init__()
        self._spec, own = spec, FromSpec(spec.last_parameters("", hidden_size))
        if not spec.averages:
            self.function, self.base, self.scale = (own.weight("", kind) for kind in ("function", "base", "scale"))

    def merge(self, x: Tensor) -> Tensor:
        """`[tokens, streams * hidden_size]` → `[tokens, hidden_size]`"""
        if (spec := self._spec).averages:
            return torch.unflatten(x, -1, (spec.num_streams, -1)).mean(dim=1)
        weights = self.function, self.base, self.scale
        return kernels.mhc_pre(x, *weights, spec.num_streams, spec.norm.eps, spec.eps)[0]


def make_connection(spec: ConnectionSpec, hidden_size: int) -> HyperConnection | GatedConnection:
    """The connection of a layer's streams."""
    if isinstance(spec, GatedConnectionSpec):
        return GatedConnection(spec, hidden_size)
    return HyperConnection(spec, hidden_size)


def make_merger(spec: ConnectionSpec, hidden_size: int) -> HyperHead | GatedHead:
    """The module that merges several streams into one after the layers."""
    return GatedHead(spec, hidden_size) if isinstance(spec, GatedConnectionSpec) else HyperHead(spec, hidden_size)
