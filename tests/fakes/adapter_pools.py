"""Decoders whose linear layers are changed by adapters with random numbers."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from quire.engine.layers.linear import Linear
from quire.engine.models.decoder import Decoder
from quire.engine.models.encoder import Encoder
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


def changeable(decoder: Decoder | Encoder) -> Iterator[tuple[str, Linear]]:
    for name, module in decoder.layers.named_modules():
        if isinstance(module, Linear) and module.may_have_pool:
            yield name, module


def changes(name: str, layer: Linear, slot: int) -> list[Change]:
    """The same of the whole matrix whatever the layout."""
    generator = torch.Generator().manual_seed(int.from_bytes(sha256(f"{name} {slot}".encode()).digest()[:4]))
    found, rank = [], 2 + slot
    for shard in layer.weight.shards:
        outs, ins = shard.shape
        a = torch.randn(rank, ins, generator=generator) * ins**-0.5
        b = torch.randn(outs, rank, generator=generator) * 0.3 * rank**-0.5
        scale = 1 + 0.2 * torch.rand(outs, generator=generator)
        bias = 0.1 * torch.randn(outs, generator=generator) * layer.adds_bias
        own = slice(shard.start, shard.start + shard.length)
        found.append(Change(a[:, own], b, scale, bias) if shard.dim else Change(a, b[own], scale[own], bias[own]))
    return found


def add_pools(decoder: Decoder | Encoder, *, has_scale: bool = False) -> dict[str, Pool]:
    """Let adapters of all slots but 1 change all linear layers that may be changed; by factors and biases, too, if
    `has_scale`."""
    pools = {}
    for name, layer in changeable(decoder):
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


def merge(decoder: Decoder | Encoder, slot: int) -> None:
    """Add the changes by an adapter to weights that are not packed."""
    for name, layer in changeable(decoder):
        delta = torch.cat([each.b @ each.a for each in changes(name, layer, slot)])
        layer.weight.data += delta.view_as(layer.weight)
