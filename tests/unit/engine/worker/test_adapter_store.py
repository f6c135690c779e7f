"""The rank rows of a layer's pool, whatever is assigned and freed."""

from __future__ import annotations

import random

import pytest
import torch

from quire.engine.checkpoints.adapter_loader import AdaptedLayer, LayerChange
from quire.engine.layers.linear import ColumnParallelLinear, Partition
from quire.engine.worker.adapter_store import LayerPool

SLOTS, WIDTHS, INPUTS = 5, (4, 6), 8


def change_of(seed: int) -> LayerChange:
    """Of ranks up to 6 of each part, with scales and biases in some."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    first, second = rng.randrange(7), rng.randrange(7)
    spans = torch.tensor([[[0, first], [first, second]]])
    a, b = (torch.randn(first + second, size, generator=generator) for size in (INPUTS, max(WIDTHS)))
    b[:first, WIDTHS[0] :] = 0
    if rng.random() < 0.6:
        return LayerChange(spans, a, b)
    return LayerChange(spans, a, b, *torch.randn(2, 1, sum(WIDTHS), generator=generator))


@pytest.mark.parametrize("seed", range(20))
def test_every_slot_has_its_own(seed: int) -> None:
    rng = random.Random(seed)
    linear = ColumnParallelLinear(
        INPUTS, [Partition(str(n), size, 0, size) for n, size in enumerate(WIDTHS)], bias=True
    )
    pool, held, was = LayerPool(AdaptedLayer.of(linear), SLOTS, torch.device("cpu")), dict[int, LayerChange](), None
    for number in range(60):
        slot, is_changed = rng.randrange(SLOTS), False
        if held.pop(slot, None) is not None:
            pool.free(slot)
        elif rng.random() < 0.9:
            held[slot] = change = change_of(seed * 100 + number)
            growth, before, copies = pool.growth(change), pool.nbytes, rng.choice((0, 1, 3))
            last, further = linear.pool, pool.further_bytes(change)
            is_changed = pool.assign(slot, change, copies)
            assert pool.nbytes - before - growth == (copies * further if growth else 0)
            assert linear.pool is not None
            assert growth or last is None or linear.pool.a is last.a  # scattered rows are moved in place
        else:
            is_changed = pool.shrink()
            assert pool.nbytes == sum(pool.device_bytes(each) for each in held.values())
            largest = max((int(each.spans[..., 1].max()) for each in held.values()), default=0)
            assert linear.pool is None or linear.pool.largest_rank == largest
        own = linear.pool
        tensors = None if own is None else [id(each) for each in (own.a, own.b, own.scale, own.bias, own.slots)]
        assert is_changed or tensors == was
        was = tensors
        for slot in range(SLOTS) if own is not None else ():
            assert own is not None
            expected = held.get(slot)
            for part, (first, rank) in enumerate(own.slots[slot].tolist()):
                assert rank == (0 if expected is None else expected.spans[0, part, 1])
                assert rank <= own.largest_rank
                if rank:
                    start = int(expected.spans[0, part, 0])  # type: ignore[union-attr]
                    for found, rows in ((own.a, expected.a), (own.b, expected.b)):  # type: ignore[union-attr]
                        assert found[first : first + rank].equal(rows[start : start + rank])
            vector = int(own.vectors[slot])
            assert (vector < 0) == (expected is None or expected.scale is None)
            if vector >= 0:
                assert own.scale[vector].equal(expected.scale[0])  # type: ignore
                assert own.bias[vector].equal(expected.bias[0])  # type: ignore
