"""Places of tokens before their blocks are complete: whatever rows do, a block's tokens are together when it is."""

from __future__ import annotations

import random

import numpy as np
import pytest

from quire.engine.config.engine_config import RecentBlocks
from quire.engine.worker.recent_slots import RecentSlots

SIZE, SLOTS = 4, 3


def test_places_of_short_and_long_rows() -> None:
    slots = RecentSlots(RecentBlocks("float32", 2, 5), SIZE)
    rows, first, counts = np.array([2, 0]), np.array([5, 3]), np.array([13, 2])
    owners = np.repeat(rows, counts)
    positions = np.concatenate([np.arange(5, 18), np.arange(3, 5)])
    places, moves = slots.of_step(rows, first, counts, owners, positions)
    others = 5  # before the rings
    assert (places[:13] // SIZE).tolist() == [0] * 3 + [1] * 4 + [others + 5] * 4 + [others + 4] * 2
    assert places[13:].tolist() == [others * SIZE + 3, others * SIZE + 4]  # of the first block and the second one
    assert moves is not None
    assert moves.tolist() == [[others + 5], [0]]  # the block that was begun
    assert (places % SIZE == positions % SIZE).all()


@pytest.mark.parametrize("ring", [1, 3])
def test_complete_blocks_have_all_their_tokens(ring: int) -> None:
    """With rows that go back by as many tokens as a ring holds, and chunks of any length."""
    rng, again = random.Random(0), (ring - 1) * SIZE
    slots = RecentSlots(RecentBlocks("float32", ring, 40), SIZE)
    memory = np.full(((SLOTS * ring + 40) * SIZE, 2), -1)
    computed, highest = [0] * SLOTS, [0] * SLOTS
    for _ in range(300):
        rows = np.array(rng.sample(range(SLOTS), rng.randint(1, SLOTS)))
        for row in rows:
            computed[row] = rng.randint(max(0, highest[row] - again), highest[row])
        first = np.array([computed[row] for row in rows])
        counts = np.array([rng.choice([1, 1, 2, 5, 23]) for _ in rows])
        owners = np.repeat(rows, counts)
        positions = np.concatenate([np.arange(start, start + n) for start, n in zip(first, counts, strict=True)])
        places, moves = slots.of_step(rows, first, counts, owners, positions)
        blocks = memory.reshape(-1, SIZE, 2)
        if moves is not None:
            blocks[moves[1]] = blocks[moves[0]]
        assert len({*places.tolist()}) == len(places)
        memory[places] = np.stack((owners, positions), axis=1)
        for owner, position, place in zip(owners.tolist(), positions.tolist(), places.tolist(), strict=True):
            found = memory[place // SIZE * SIZE : place + 1]  # what a query there sees of its own block
            begin = position // SIZE * SIZE
            assert found.tolist() == [[owner, at] for at in range(begin, position + 1)]
        for row, start, count in zip(rows, first, counts, strict=True):
            highest[row] = max(highest[row], start + count)
