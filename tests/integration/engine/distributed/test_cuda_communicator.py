"""Ranks of GPUs: the algorithm of a sum, by size and by the ranks' agreement. gloo stands in for GPUs and NCCL."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from quire.engine.distributed import cuda_communicator, symmetric_memory
from quire.engine.distributed.cuda_communicator import SIZES, CudaParallel, describe_algorithms
from quire.engine.distributed.symmetric_memory import MAX_BYTES, AllReduceAlgorithm, SymmetricBuffer, unavailable_reason
from tests.fakes.processes import CONTEXT
from tests.integration.engine.distributed.test_parallel_state import CPU

KIB = 1 << 10
HOST = ("this kernel", "1")


def test_ranks_share_memory_where_all_reach_each_other() -> None:
    assert unavailable_reason([SymmetricBuffer(HOST, 0, (0, 1)), SymmetricBuffer(HOST, 1, (1, 0))]) == ""
    other = SymmetricBuffer(("another kernel", "1"), 1, (0, 1))
    assert unavailable_reason([SymmetricBuffer(HOST, 0, (0, 1)), other]) == "the ranks are not all on one host"
    assert (
        unavailable_reason([SymmetricBuffer(None, 0, (0, 1)), SymmetricBuffer(None, 1, (0, 1))])
        == "the ranks are not all on one host"
    )
    assert "each sees only its own" in unavailable_reason(
        [SymmetricBuffer(HOST, 0, (0,)), SymmetricBuffer(HOST, 0, (0,))]
    )
    assert (
        unavailable_reason([SymmetricBuffer(HOST, 0, (0, 1)), SymmetricBuffer(HOST, 1, (1,))])
        == "GPU 1 cannot read the memory of GPU 0"
    )


def test_algorithms_are_described_by_ranges_of_sizes() -> None:
    one, two = AllReduceAlgorithm("one-shot", lambda x: x), AllReduceAlgorithm("two-shot", lambda x: x)
    assert SIZES[-1] == MAX_BYTES
    assert describe_algorithms([one] * 3 + [two] * (len(SIZES) - 3)) == (
        f"one-shot up to 16 KiB, two-shot up to {MAX_BYTES >> 10} KiB, NCCL for the rest"
    )
    assert describe_algorithms([one, None, one, *[None] * (len(SIZES) - 3)]) == (
        "one-shot up to 4 KiB, NCCL up to 8 KiB, one-shot up to 16 KiB, NCCL for the rest"
    )
    assert describe_algorithms([None] * len(SIZES)) == "NCCL for the rest"


class Site:
    """A rank's algorithms for sums, which are really gloo's and may be wrong or refuse, and their made-up times."""

    def __init__(self, rank: int, *, wrong: str = "", refuses: str = "", no_memory: str = "", apart: bool = False):
        self.rank, self.wrong, self.refuses, self.no_memory, self.apart = rank, wrong, refuses, no_memory, apart
        self.calls: list[str] = []

    def install(self) -> None:
        host = ("kernel", str(self.rank)) if self.apart else HOST
        symmetric_memory.local_buffer = lambda _: SymmetricBuffer(host, self.rank, (0, 1))  # type: ignore[assignment]
        symmetric_memory.allocate = self.allocate  # type: ignore[assignment]
        symmetric_memory.share = lambda memory, group: [
            self.algorithm("one-shot", group),
            self.algorithm("two-shot", group),
        ]
        symmetric_memory.wait = lambda what, seconds: None
        symmetric_memory.measure = self.measure
        dist.get_backend = lambda group=None: "nccl"  # type: ignore[assignment, return-value]

    def allocate(self, _: torch.device) -> Tensor:
        if self.no_memory:
            raise RuntimeError(self.no_memory)
        return torch.empty(MAX_BYTES, dtype=torch.uint8)

    def algorithm(self, name: str, group: dist.ProcessGroup) -> AllReduceAlgorithm:
        def run(x: Tensor) -> Tensor:
            self.calls.append(name)
            if self.refuses == name and x.dtype == torch.float16:
                raise RuntimeError("Half is not supported\nmore of it")
            x = x.clone()
            dist.all_reduce(x, group=group)
            return x + 1 if self.wrong == name else x

        return AllReduceAlgorithm(name, run)

    def measure(self, run: Callable[[], object]) -> float:
        """One-shot is the fastest up to 64 KiB and two-shot up to 1 MiB, as this rank sees it."""
        (x,) = run.args  # type: ignore[attr-defined]
        name = "nccl" if run.func.__name__ == "all_reduce" else ("one-shot", "two-shot")[self.turn()]  # type: ignore[attr-defined]
        size: int = x.nbytes
        times: dict[str, float] = {"one-shot": size, "two-shot": 60 * KIB + size / 8, "nccl": 200 * KIB}
        return times[name] * (1 + 0.01 * self.rank)

    turns = 0

    def turn(self) -> int:
        self.turns += 1
        return (self.turns - 1) % 2


def serve(
    rank: int, init_method: str, options: dict[str, Any], work: Callable[[CudaParallel, Site], Any], pipe: Connection
) -> None:
    logging.basicConfig(level="INFO")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=init_method, world_size=2, rank=rank)
    assert dist.group.WORLD is not None
    site = Site(rank, **options)
    site.install()
    said: list[str] = []
    log: Any = cuda_communicator.logger
    log.info = log.warning = lambda text, *arguments: said.append(text % arguments)
    tp = CudaParallel(dist.group.WORLD, CPU)
    tp.finalize()
    pipe.send((work(tp, site), said))
    pipe.recv()
    os._exit(0)


def on_ranks(folder: Path, work: Callable[[CudaParallel, Site], Any], *options: dict[str, Any]) -> list[Any]:
    """The results of `work` on each of two settled ranks, and the first one's log."""
    started = []
    for rank, own in enumerate(options or ({}, {})):
        ours, theirs = CONTEXT.Pipe()
        process = CONTEXT.Process(target=serve, args=(rank, f"file://{folder}/rendezvous", own, work, theirs))
        process.start()
        started.append((process, ours))
    try:
        results = [pipe.recv() for _, pipe in started]
        for process, pipe in started:
            pipe.send(None)
            process.join(60)
        return [*(result for result, _ in results), results[0][1]]
    finally:
        for process, pipe in started:
            pipe.close()
            process.kill()
            process.join()


def name(algorithm: AllReduceAlgorithm | None) -> str | None:
    return None if algorithm is None else algorithm.name


def ways_by_size(tp: CudaParallel, site: Site) -> list[str | None]:
    sizes = (16, 4 * KIB, 64 * KIB, 64 * KIB + 16, 1 << 20, (1 << 20) + 16, MAX_BYTES, MAX_BYTES + 16, 24, 0)
    return [name(tp.algorithm(torch.bfloat16, size)) for size in sizes]


def sums(tp: CudaParallel, site: Site) -> list[Any]:
    """Sums of several shapes, an unaligned one and one of another type among them; and their algorithms."""
    site.calls.clear()
    wide = torch.arange(4.0 * 1024).view(4, 1024)
    assert torch.equal(tp.all_reduce(wide + tp.rank), 2 * wide + 1)
    assert torch.equal(tp.all_reduce((wide + tp.rank).t()), (2 * wide + 1).t())
    assert torch.equal(tp.all_reduce((wide + tp.rank).view(-1)[1:9]), (2 * wide + 1).view(-1)[1:9])
    small = list(site.calls)
    assert torch.equal(tp.all_reduce(wide.repeat(100, 1)), 2 * wide.repeat(100, 1))
    assert tp.all_reduce(torch.arange(64)).tolist() == list(range(0, 128, 2))  # integers are NCCL's
    assert tp.all_reduce(torch.ones(3)).tolist() == [2.0] * 3
    gathered = tp.all_gather(wide[:2] + tp.rank)
    assert torch.equal(gathered, torch.cat((wide[:2], wide[:2] + 1), dim=-1))
    return [small, site.calls[len(small) :]]


def types(tp: CudaParallel, site: Site) -> dict[str, set[str | None]]:
    return {str(dtype): {name(algorithm) for algorithm in algorithms} for dtype, algorithms in tp.table.items()}


def test_all_reduce_uses_the_fastest_algorithm_for_its_size(tmp_path: Path) -> None:
    first, second, said = on_ranks(tmp_path, ways_by_size)
    one, two = "one-shot", "two-shot"
    assert first == second == [one, one, one, two, two, None, None, None, None, None]
    assert (
        said[0]
        == "all-reduces of a stage in bfloat16: one-shot up to 64 KiB, two-shot up to 1024 KiB, NCCL for the rest"
    )


def test_all_reduce_and_all_gather_are_correct_with_every_algorithm(tmp_path: Path) -> None:
    assert on_ranks(tmp_path, sums)[0] == [["one-shot"] * 3, []]


def test_an_algorithm_that_fails_on_one_rank_is_used_by_none(tmp_path: Path) -> None:
    first, second, said = on_ranks(tmp_path, types, {}, {"wrong": "one-shot"})
    assert first == second == {f"torch.{name}": {"two-shot", None} for name in ("bfloat16", "float16", "float32")}
    assert said[0].startswith("one-shot all-reduces of bfloat16 are not used: rank 1: Tensor-likes are not close!")


def test_an_unsupported_dtype_uses_another_algorithm(tmp_path: Path) -> None:
    first, second, said = on_ranks(tmp_path, types, *[{"refuses": "one-shot"}] * 2)
    assert first == second
    assert first["torch.float16"] == {"two-shot", None}
    assert first["torch.bfloat16"] == {"one-shot", "two-shot", None}
    assert said[0] == "one-shot all-reduces of float16 are not used: rank 0: RuntimeError: Half is not supported"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (({}, {"no_memory": "driver too old"}), "rank 1: RuntimeError: driver too old"),
        (({"apart": True}, {"apart": True}), "the ranks are not all on one host"),
    ],
)
def test_nccl_is_used_if_one_rank_has_no_symmetric_memory(
    options: tuple[dict[str, Any], ...], reason: str, tmp_path: Path
) -> None:
    first, second, said = on_ranks(tmp_path, types, *options)
    assert first == second == {}
    assert said == [f"all-reduces of a stage: only NCCL, since {reason}"]


@contextmanager
def alone(folder: Path) -> Any:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", world_size=1, rank=0)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def test_it_can_be_turned_off(tmp_path: Path) -> None:
    with alone(tmp_path) as group:
        tp = CudaParallel(group, CPU, is_custom=False)
        tp.finalize()
        assert tp.table == {}
        assert tp.all_reduce(torch.ones(2)).tolist() == [1.0, 1.0]
