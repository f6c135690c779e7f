"""The rank grid over real processes, and its properties without any."""

from __future__ import annotations

import time
from datetime import timedelta
from multiprocessing.synchronize import Barrier
from pathlib import Path

import torch
import torch.distributed as dist

from quire.engine.config.engine_config import ParallelConfig
from quire.engine.distributed.communicator import Parallel
from quire.engine.distributed.parallel_state import connect
from tests.fakes.processes import CONTEXT

CPU = torch.device("cpu")


def grid(tp: int, pp: int) -> ParallelConfig:
    return ParallelConfig(
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        stages=tuple(range(stage, stage + 1) for stage in range(pp)),
        executor="mp",
        device="cpu",
    )


def limit_collectives(seconds: float) -> None:
    """From now on. Ranks may have taken longer to start."""
    for group in list(dist.distributed_c10d._world.pg_map):
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def test_a_world_of_one_starts_no_process_group() -> None:
    links = connect(grid(1, 1), 0, None, CPU)
    assert not dist.is_initialized()
    assert type(links.tp) is Parallel
    assert (links.tp.rank, links.tp.size) == (0, 1)
    assert links.pipeline.is_first
    assert links.pipeline.is_last
    x = torch.ones(3)
    assert links.tp.all_reduce(x) is x
    assert links.tp.all_gather(x) is x
    links.close()


def talk(tp: int, pp: int, rank: int, init_method: str, done: Barrier) -> None:
    """Each rank checks the messages from its stage and from the previous stage."""
    torch.set_num_threads(1)
    config = grid(tp, pp)
    links = connect(config, rank, init_method, CPU, timedelta(seconds=60))
    stage, position = config.stage_of(rank), config.tp_rank_of(rank)
    members = [stage * tp + other for other in range(tp)]
    assert (links.tp.rank, links.tp.size) == (position, tp)
    assert (links.pipeline.is_first, links.pipeline.is_last) == (stage == 0, stage == pp - 1)
    for step in range(20):
        mine = torch.full((2, 3), float(rank + step))
        assert links.tp.all_gather(mine).tolist() == [[float(m + step) for m in members for _ in range(3)]] * 2
        assert links.tp.all_reduce(mine).tolist() == [[float(sum(members) + tp * step)] * 3] * 2
        assert links.tp.all_gather(torch.empty(0, 3)).shape == (0, 3 * tp)
        if not links.pipeline.is_first:
            message = links.pipeline.receive((step + 1, 4), torch.float32)
            assert message.tolist() == [[rank - tp + step] * 4] * (step + 1)
            if stage == 1 and step == 0:
                time.sleep(0.5)  # the first stage runs ahead meanwhile
        if not links.pipeline.is_last:
            links.pipeline.send(torch.full((step + 1, 4), float(rank + step)))
            assert len(links.pipeline._sending) <= pp
    done.wait(60)  # a rank that closes its links resets the receives that others have posted ahead
    links.close()


def test_ranks_reach_their_stage_and_the_next(tmp_path: Path) -> None:
    tp, pp = 2, 3
    init_method = f"file://{tmp_path}/rendezvous"
    done = CONTEXT.Barrier(tp * pp)
    processes = [CONTEXT.Process(target=talk, args=(tp, pp, rank, init_method, done)) for rank in range(tp * pp)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * (tp * pp)
