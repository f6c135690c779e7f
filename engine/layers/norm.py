"""Normalization; replicated on all ranks, except norms over sharded heads."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from quire import kernels
from quire.engine.architecture.spec_parts import NormSpec
from quire.engine.distributed.communicator import Parallel
from quire.engine.layers.linear import ReplicatedLinear
from quire.engine.layers.weight import DenseWeights, Shard, Weight, whole


class RoundsInputs(Protocol):
    """A layer whose inputs may be rounded in advance."""

    @property
    def row_rounding(self) -> kernels.RowRounding | None: ...

    @property
    def reads_plain_rows(self) -> bool:
        """Whether it also reads them as they were."""


class AdaptedNorm(nn.Module):
    """A norm that adapters may have weights of their own of, if all its rows have the same adapter, as in towers."""

    may_change = True
    """Whether it is always given the adapter (`normed`)."""

    def __init__(self) -> None:
        super().__init__()
        self.changes: dict[int, DenseWeights] = {}
        """By the adapter's slot."""


def normed(norm: nn.Module | None, x: Tensor, adapters: kernels.RowAdapters | None) -> Tensor:
    """`norm(x)`, where a single adapter of all rows may have other weights; without a norm, `x`."""
    if norm is None:
        return x
    out: Tensor
    if isinstance(norm, AdaptedNorm) and isinstance(adapters, kernels.OneAdapter) and adapters.slot in norm.changes:
        own = {name: each for name, each in vars(norm.changes[adapters.slot]).items() if each is not None}
        out = functional_call(norm, own, (x,))
    else:
        out = norm(x)
    return out


class RMSNorm(AdaptedNorm):
    """`x / rms(x) * (weight + offset)` over the last dimension; without a weight, `x / rms(x)`."""

    def __init__(self, norm: NormSpec, size: int) -> None:
        super().__init__()
        self._norm = norm
        self.weight = Weight((size,), whole(size)) if norm.has_weight else None
        self._next: list[RoundsInputs] = []  # it is a child of the model elsewhere

    def feed(self, layer: RoundsInputs) -> None:
        """Round results as `layer`, the only one that reads them, rounds its inputs."""
        if self.weight is not None:
            self._next = [layer]

    @property
    def _rounding(self) -> kernels.RowRounding | None:
        return self._next[0].row_rounding if self._next else None

    def _plain(self, x: Tensor) -> Tensor | None:
        """Memory for the unrounded results, if they are read, too."""
        return torch.empty_like(x) if self._next[0].reads_plain_rows else None

    def forward(self, x: Tensor) -> Tensor | kernels.RoundedRows:
        if self.weight is None:
            return F.rms_norm(x.float(), x.shape[-1:], None, self._norm.eps).to(x.dtype)
        parameters = self.weight, self._norm.eps, self._norm.offset
        if (rounding := self._rounding) is None:
            return kernels.rms_norm(x, *parameters)
        plain = self._plain(x)
        rows = kernels.rms_norm_rounded(x, *parameters, *rounding, plain)
        return kernels.RoundedRows(*rows, x.dtype, rounding, plain)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor | kernels.RoundedRows, Tensor]:
        """`residual + x`, normalized and unchanged."""
        if self.weight is None:
            residual = residual + x
            return self(residual), residual
        parameters = self.weight, self._norm.eps, self._norm.offset
        if (rounding := self._rounding) is None:
            return kernels.add_rms_norm(x, residual, *parameters)
        plain = self._plain(x)
        codes, scales, total = kernels.add_rms_norm_rounded(x, residual, *parameters, *rounding, plain)
        return kernels.RoundedRows(codes, scales, x.dtype, rounding, plain), total


class LayerNorm(AdaptedNorm):
    """`(x - mean(x)) / deviation(x) * weight + bias` over the last dimension, in float32."""

    def __init__(self, norm: NormSpec, size: int) -> None:
        super().__init__()
        self._eps = norm.eps
        self.weight = Weight((size,), whole(size))
        self.bias = Weight((size,), whole(size)) if norm.bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self._eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """`residual + x`, normalized and unchanged."""
        residual = residual + x
        return self(residual), residual


class GatedNorm(nn.Module):
    """A norm whose result is multiplied by a gate of low rank that is computed from it."""

    def __init__(self, norm: NormSpec, size: int) -> None:
        super().__init__()
        self.norm = make_norm(replace(norm, gate_rank=0), size)
        self.gate_down = ReplicatedLinear(size, norm.gate_rank, bias=False)
        self.gate_up = ReplicatedLinear(norm.gate_rank, size, bias=False)
        self.gate_down.may_have_pool = self.gate_up.may_have_pool = False

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = self.norm(x)
        gate = self.gate_up.logits(F.silu(self.gate_down.logits(normed)))
        return (normed * gate.sigmoid()).to(x.dtype)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """`residual + x`, normalized and unchanged."""
        residual = residual + x
        return self(residual), residual


class LayerScale(AdaptedNorm):
    """A factor for each feature."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = Weight((size,), whole(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """`residual + x`, multiplied and unchanged."""
        residual = residual + x
        return self(residual), residual


Norm = RMSNorm | LayerNorm | GatedNorm | LayerScale


def make_norm(norm: NormSpec, size: int) -> Norm:
    if norm.gate_rank:
        return GatedNorm(norm, size)
    if norm.kind == "scale":
        return LayerScale(size)
    return RMSNorm(norm, size) if norm.kind == "rms" else LayerNorm(norm, size)


class PerHeadNorm(AdaptedNorm):
    """Normalization of each head separately, with separate weights for each head (Command R+)."""

    def __init__(self, norm: NormSpec, shard: Shard, head_dim: int) -> None:
        super().__init__()
        self._norm, self._head_dim = norm, head_dim
        self.weight = Weight((shard.length,), shard)

    def forward(self, heads: Tensor) -> Tensor:
        """`[tokens, heads, head_dim]` → the same."""
        x = heads.float()
        x = F.layer_norm(x, x.shape[-1:], eps=self._norm.eps)
        return (x * self.weight.view(-1, self._head_dim).float()).to(heads.dtype)


class AcrossHeadsNorm(AdaptedNorm):
    """RMSNorm over the features of all heads together, with the heads sharded over the ranks (OLMo 2)."""

    def __init__(self, norm: NormSpec, shard: Shard, parallel: Parallel) -> None:
        super().__init__()
        self._norm, self._parallel = norm, parallel
        self.weight = Weight((shard.length,), shard)

    def forward(self, heads: Tensor) -> Tensor:
        """`[tokens, heads, head_dim]` → the same."""
        x = heads.flatten(1).float()
        mean = self._parallel.all_reduce(x.square().mean(dim=-1, keepdim=True)) / self._parallel.size
        normed = x * torch.rsqrt(mean + self._norm.eps) * self.weight.float()
        return normed.to(heads.dtype).view_as(heads)


class GroupedNorm(nn.Module):
    """RMSNorm over each of `groups` groups of features, with the groups, or the features of a single one, sharded over
    the ranks (Mamba-2)."""

    def __init__(self, norm: NormSpec, size: int, groups: int, parallel: Parallel) -> None:
        super().__init__()
        length = size // parallel.size
        self._norm, self._parallel, self._groups = norm, parallel, max(1, groups // parallel.size)
        self._is_split = groups == 1 < parallel.size
        self.weight = Weight((length,), Shard((size,), parallel.rank * length, length))

    def forward(self, x: Tensor) -> Tensor:
        """`[tokens, features of this rank]` → the same, in float32."""
        grouped = torch.unflatten(x.float(), -1, (self._groups, -1))
        mean = grouped.square().mean(dim=-1, keepdim=True)
        if self._is_split:
            mean = self._parallel.all_reduce(mean) / self._parallel.size
        normed: Tensor = (grouped * torch.rsqrt(mean + self._norm.eps)).flatten(-2) * self.weight.float()
        return normed
