"""Models whose linear layers are changed by adapters with random numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from hashlib import sha256
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from quire.engine.layers.linear import Linear
from quire.engine.layers.norm import AdaptedNorm
from quire.engine.layers.weight import DenseWeights, Weight
from quire.engine.models.decoder import Decoder
from quire.engine.models.encoder import Encoder
from quire.engine.models.tower import Tower
from quire.kernels import LowRankPool
from tests.fakes.model_logits import CPU

SLOTS = 3


class Pool(LowRankPool):
    """Notices that it is read."""

    used: ClassVar[set[int]] = set()

    def __getattribute__(self, name: str) -> Any:
        if name == "a":
            Pool.used.add(id(self))
        return super().__getattribute__(name)


class Change(NamedTuple):
    """A rank's slices of the change of a layer's part by an adapter."""

    a: Tensor
    b: Tensor
    scale: Tensor
    bias: Tensor


def changeable(model: Decoder | Encoder | Tower) -> Iterator[tuple[str, Linear]]:
    for name, module in (model if isinstance(model, Tower) else model.layers).named_modules():
        if isinstance(module, Linear) and module.may_have_pool:
            yield name, module


def changes(name: str, layer: Linear, slot: int) -> list[Change]:
    """The same of the whole matrix whatever the layout."""
    generator = torch.Generator().manual_seed(int.from_bytes(sha256(f"{name} {slot}".encode()).digest()[:4]))
    found, rank = [], 2 + slot
    for shard in layer.weight.shards:
        outs, ins = shard.shape[0], math.prod(shard.shape[1:])
        a = torch.randn(rank, ins, generator=generator) * ins**-0.5
        b = torch.randn(outs, rank, generator=generator) * 0.3 * rank**-0.5
        scale = 1 + 0.2 * torch.rand(outs, generator=generator)
        bias = 0.1 * torch.randn(outs, generator=generator) * layer.adds_bias
        own = slice(shard.start, shard.start + shard.length)
        found.append(Change(a[:, own], b, scale, bias) if shard.dim else Change(a, b[own], scale[own], bias[own]))
    return found


def add_pools(model: Decoder | Encoder | Tower, *, has_scale: bool = False) -> dict[str, Pool]:
    """Let adapters of all slots but 1 change all linear layers that may be changed; by factors and biases, too, if
    `has_scale`."""
    pools = {}
    for name, layer in changeable(model):
        by_slot = {slot: changes(name, layer, slot) for slot in (0, 2)}
        widths, ins = [len(each.b) for each in by_slot[0]], by_slot[0][0].a.shape[1]
        ranks = sum(len(each.a) for own in by_slot.values() for each in own)
        pool = Pool.allocate(SLOTS, ranks, ins, widths, torch.float32, CPU, 4, has_scale=has_scale, has_bias=has_scale)
        first = 0
        for slot, own in by_slot.items():
            pool.assign(slot, first, [(each.a, each.b) for each in own])
            first += sum(len(each.a) for each in own)
            if pool.scale is not None and pool.bias is not None:
                pool.scale[slot] = torch.cat([each.scale for each in own])
                pool.bias[slot] = torch.cat([each.bias for each in own])
        assert isinstance(pool, Pool)
        layer.pool = pools[name] = pool
    Pool.used.clear()
    return pools


def norms(tower: Tower) -> Iterator[tuple[str, AdaptedNorm]]:
    for name, module in tower.named_modules():
        if isinstance(module, AdaptedNorm) and module.weight is not None:
            yield name, module


def changed_norm(name: str, norm: AdaptedNorm, slot: int) -> DenseWeights:
    """A norm as an adapter changes it; the same of the whole whatever the layout."""
    found = dict[str, Tensor]()
    for kind, own in norm.named_parameters():
        assert isinstance(own, Weight)
        (shard,) = own.shards
        generator = torch.Generator().manual_seed(int.from_bytes(sha256(f"{name} {kind} {slot}".encode()).digest()[:4]))
        found[kind] = own + 0.3 * torch.randn(shard.shape, generator=generator)[shard.source]
    return DenseWeights(found["weight"], found.get("bias"))


def change_norms(tower: Tower) -> None:
    """Let the adapters of `add_pools` have norms of their own, too."""
    for name, norm in norms(tower):
        norm.changes |= {slot: changed_norm(name, norm, slot) for slot in (0, 2)}


def merge(model: Decoder | Encoder | Tower, slot: int) -> None:
    """Add the changes by an adapter to weights that are not packed."""
    for name, layer in changeable(model):
        delta = torch.cat([each.b @ each.a for each in changes(name, layer, slot)])
        layer.weight.data += delta.view_as(layer.weight)


def merge_norms(tower: Tower, slot: int) -> None:
    for name, norm in norms(tower):
        for kind, each in vars(changed_norm(name, norm, slot)).items():
            if each is not None:
                norm.get_parameter(kind).data.copy_(each)
