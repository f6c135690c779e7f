"""Collectives over shared memory, with threads as ranks: exact results in any order of events."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from quire.kernels.cpu import shared

SLOT = 1 << 12
TIMEOUT = 60.0


@pytest.fixture(autouse=True)
def implementation() -> str:
    """The compiled ones only."""
    if not shared.available():
        pytest.skip("the kernels are not compiled")
    return "cpu"


class Rank:
    """The collectives of one rank; each returns its result."""

    def __init__(self, memory: Tensor, rank: int, size: int) -> None:
        self.rank, self.size, self._memory = rank, size, memory

    def all_reduce(self, x: Tensor) -> Tensor:
        shared.all_reduce(self._memory, self.rank, self.size, TIMEOUT, x)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return shared.all_gather(self._memory, self.rank, self.size, TIMEOUT, x)

    def broadcast(self, x: Tensor) -> Tensor:
        shared.broadcast(self._memory, self.rank, self.size, TIMEOUT, x)
        return x


def segment(size: int) -> Tensor:
    return torch.zeros(shared.segment_bytes(size, SLOT), dtype=torch.uint8)


def on_ranks(size: int, work: Callable[[Rank], None], memory: Tensor | None = None) -> None:
    memory = segment(size) if memory is None else memory
    with ThreadPoolExecutor(size) as pool:
        for future in [pool.submit(work, Rank(memory, rank, size)) for rank in range(size)]:
            future.result()


def values(key: int, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * key + rank)).to(dtype)


def total(parts: list[Tensor]) -> Tensor:
    """In float32 and in the order of ranks."""
    result = parts[0].float()
    for part in parts[1:]:
        result = result + part.float()
    return result.to(parts[0].dtype)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", shared.SUMMED, ids=str)
def test_sums_are_exact_in_the_order_of_ranks(size: int, dtype: torch.dtype) -> None:
    lengths = (0, 1, 7, 511, 1024, 1025, 5461, 16384, 16385, 70001)  # one pass, two, and more than a slot

    def work(rank: Rank) -> None:
        for key, length in enumerate(lengths):
            parts = [values(key, other, (length,), dtype) for other in range(size)]
            assert torch.equal(rank.all_reduce(parts[rank.rank].clone()), total(parts))

    on_ranks(size, work)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_parts_are_gathered_along_the_last_dimension(size: int) -> None:
    shapes = [(1,), (5,), (3, 7), (0, 3), (3, 0), (2, 3, 5), (3, 5000), (700, 9), (1, 1)]

    def work(rank: Rank) -> None:
        for dtype, (key, shape) in itertools.product((torch.float32, torch.bfloat16, torch.int64), enumerate(shapes)):
            parts = [(100 * values(key, other, shape, torch.float32)).to(dtype) for other in range(size)]
            assert torch.equal(rank.all_gather(parts[rank.rank]), torch.cat(parts, -1))

    on_ranks(size, work)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_first_rank_may_run_ahead_with_what_it_hands_out(size: int) -> None:
    def work(rank: Rank) -> None:
        for key in range(200):
            x = values(key, 0, (1 + 37 * key,), torch.float32).long()
            assert torch.equal(rank.broadcast(x.clone() if rank.rank == 0 else torch.zeros_like(x)), x)

    on_ranks(size, work)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("start", [0, -1000], ids=["counts from zero", "counts wrap around"])
def test_thousands_of_mixed_calls_back_to_back(size: int, start: int) -> None:
    memory = segment(size)
    counts = memory[: size * 256].view(torch.int32).view(size, 2, 32)
    counts[:, :, 0] = start  # the counts that a rank has published, and the safe ones

    def work(rank: Rank) -> None:
        rng = random.Random(7)
        for _ in range(2000):
            kind, length, base = rng.randrange(4), rng.choice((1, 3, 100, 900, 1500, 9000)), rng.randrange(1000)
            x = torch.full((length,), float(base + rank.rank))
            if kind == 0:
                assert (rank.all_gather(x).view(size, -1)[:, -1] == base + torch.arange(size)).all()
            elif kind == 1:
                assert (rank.broadcast(x) == base).all()
            else:
                assert (rank.all_reduce(x) == size * base + size * (size - 1) // 2).all()

    on_ranks(size, work, memory)
    assert (counts[:, 0, 0] > (0 if start == 0 else -1000)).all()
    assert len(set(counts[:, 0, 0].tolist())) == 1
    assert not counts[:, 0, 1].any()  # nobody sleeps any more


def test_a_rank_that_does_not_come_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"rank 1 of 2 did not join a collective within 0.1 s"):
        shared.all_reduce(segment(2), 0, 2, 0.1, torch.ones(5))


def test_the_interpreter_is_free_while_a_rank_waits_in_its_sleep() -> None:
    memory = segment(2)
    x, y = torch.ones(3), torch.ones(3)
    waiting = threading.Thread(target=shared.all_reduce, args=(memory, 0, 2, TIMEOUT, x))
    waiting.start()
    while not memory[256 + 4 : 256 + 8].any():  # the waiting rank sleeps until the second comes
        pass
    shared.all_reduce(memory, 1, 2, TIMEOUT, y)
    waiting.join()
    assert x.tolist() == y.tolist() == [2.0] * 3
