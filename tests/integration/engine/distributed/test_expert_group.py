"""Ranks that share experts, as real processes: rows in uneven numbers, and a layer that is spread over them."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.engine.config.engine_config import ExpertParallelConfig, ParallelConfig
from quire.engine.distributed.expert_group import ExpertCommunicator
from quire.engine.distributed.parallel_state import connect
from tests.fakes.processes import CONTEXT
from tests.integration.engine.distributed.test_parallel_state import CPU, grid


def coupled(dp: int, tp: int, pp: int, replica: int, all2all: Any = "all_to_all") -> ParallelConfig:
    experts = ExpertParallelConfig(all2all_backend=all2all)
    return replace(grid(tp, pp), replicas=dp, replica=replica, local_replicas=range(dp), experts=experts)


def numbers(sender: int, receiver: int) -> int:
    """The number of rows from one rank to another: 0 for some, and more for ranks with high numbers."""
    return (sender + 2 * receiver) % 4


def check_rows(peers: ExpertCommunicator, name: int) -> None:
    """Check the rows: each has its sender, receiver and number."""
    everyone = range(peers.size)

    def rows(sender: int, receiver: int) -> list[list[int]]:
        return [[name, sender, receiver, row] for row in range(numbers(sender, receiver))]

    mine = [row for receiver in everyone for row in rows(peers.rank, receiver)]
    sent = [numbers(peers.rank, receiver) for receiver in everyone]
    received = [numbers(sender, peers.rank) for sender in everyone]
    expected = [row for sender in everyone for row in rows(sender, peers.rank)]
    for dtype in (torch.int64, torch.float32, torch.bfloat16):
        x = torch.tensor(mine, dtype=dtype).view(-1, 4)
        assert peers.all_to_all(x, sent, received).tolist() == expected
    counts = [3 * rank for rank in everyone]  # the first has none
    x = torch.full((counts[peers.rank], 2), float(peers.rank))
    gathered = peers.start_all_gather(x, counts).wait()
    assert gathered.tolist() == [[float(rank)] * 2 for rank in everyone for _ in range(counts[rank])]
    summed = peers.reduce_scatter(torch.full((sum(counts), 2), float(peers.rank + 1)), counts)
    assert summed.tolist() == [[float(sum(rank + 1 for rank in everyone))] * 2] * counts[peers.rank]
    spent = peers.spent
    assert peers.all_gather_ints((name, peers.rank)) == [[name, rank] for rank in everyone]
    assert (0 < spent < peers.spent) if peers.size > 1 else peers.spent == 0


def talk(dp: int, tp: int, pp: int, replica: int, rank: int, init_method: str, done: Barrier) -> None:
    torch.set_num_threads(1)
    config = coupled(dp, tp, pp, replica)
    links = connect(config, rank, init_method, CPU, timedelta(seconds=60))
    stage, position, group = config.stage_of(rank), config.tp_rank_of(rank), links.experts
    assert group is not None
    assert (links.tp.rank, links.tp.size, group.tp) == (position, tp, links.tp)
    assert (group.dp.rank, group.dp.size) == (replica, dp)
    assert (
        (group.rank, group.size) == (group.all_ranks.rank, group.all_ranks.size) == (replica * tp + position, dp * tp)
    )
    check_rows(group.dp, 10 * stage + position)
    check_rows(group.all_ranks, stage)
    total = links.tp.all_reduce(torch.tensor([float(100 * replica + rank)]))
    assert total.item() == sum(100 * replica + stage * tp + other for other in range(tp))
    if not links.pipeline.is_first:
        message = links.pipeline.receive((2, 3), torch.float32)
        assert message.tolist() == [[100.0 * replica + rank - tp] * 3] * 2
    if not links.pipeline.is_last:
        links.pipeline.send(torch.full((2, 3), 100.0 * replica + rank))
    done.wait(60)  # a rank that closes its links resets the receives that others have posted ahead
    links.close()


def compute(dp: int, tp: int, replica: int, rank: int, init_method: str, all2all: Any) -> None:
    """A layer, of which replica 0 has 9 tokens, 1 none, and so on; then of none at all."""
    from quire.engine.distributed.communicator import Parallel
    from quire.engine.layers.moe import MixtureOfExperts
    from tests.fakes.experts import EVERYTHING, HIDDEN, batch, build, packed
    from tests.integration.engine.layers.test_sharding import fill

    torch.set_num_threads(1)
    links = connect(coupled(dp, tp, 1, replica, all2all), rank, init_method, CPU, timedelta(seconds=60))
    assert links.experts is not None
    counts = [9, 0, 4][:dp]
    x = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(replica))[: counts[replica]]
    with torch.no_grad():
        expected = fill(MixtureOfExperts(EVERYTHING, HIDDEN, Parallel()))(x)
        module = packed(build(EVERYTHING, links.experts))
        for _ in range(3):
            assert (module(x, batch(len(x), counts)) - expected).abs().sum() <= 1e-5 * expected.abs().sum()
        assert module(x[:0], batch(0, [0] * dp)).shape == (0, HIDDEN)
    links.close()


def run(target: Any, everyone: list[tuple[Any, ...]]) -> None:
    processes = [CONTEXT.Process(target=target, args=arguments) for arguments in everyone]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * len(processes)


@pytest.mark.parametrize(("dp", "tp", "pp"), [(2, 2, 2), pytest.param(1, 2, 2, marks=pytest.mark.slow)])
def test_ranks_reach_those_that_share_their_experts(dp: int, tp: int, pp: int, tmp_path: Path) -> None:
    where = f"file://{tmp_path}/rendezvous"
    done = CONTEXT.Barrier(dp * tp * pp)
    run(talk, [(dp, tp, pp, replica, rank, where, done) for replica in range(dp) for rank in range(tp * pp)])


@pytest.mark.parametrize(("dp", "tp"), [(2, 2), pytest.param(3, 1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("all2all", ["allgather_reducescatter", "all_to_all"])
def test_a_layer_over_processes_gives_what_one_gives(dp: int, tp: int, all2all: str, tmp_path: Path) -> None:
    where = f"file://{tmp_path}/rendezvous"
    run(compute, [(dp, tp, replica, rank, where, all2all) for replica in range(dp) for rank in range(tp)])


def test_one_rank_alone_may_have_all_experts() -> None:
    links = connect(coupled(1, 1, 1, 0), 0, None, CPU)
    assert links.experts is not None
    assert (links.experts.rank, links.experts.size) == (0, 1)
    check = links.experts.all_ranks
    x = torch.ones(3, 2)
    assert check.all_to_all(x, [3], [3]) is x
    assert check.start_all_gather(x, [3]).wait().tolist() == x.tolist()
    assert check.reduce_scatter(x, [3]).tolist() == x.tolist()
    assert check.all_gather_ints((1, 2)) == [[1, 2]]
