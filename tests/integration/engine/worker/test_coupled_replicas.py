"""Replicas that share experts, all ranks threads of this process: the same tokens as one rank."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.engine.config.engine_config import EngineConfig, ExpertParallelConfig
from quire.engine.distributed.expert_group import ExpertGroup
from quire.engine.distributed.parallel_state import ParallelState
from quire.engine.protocol.scheduler_output import SchedulerOutput
from quire.engine.worker.model_runner import ModelRunner
from tests.fakes.checkpoints import generate
from tests.fakes.coupled import serving
from tests.fakes.families import CASES, SIZES, write_model
from tests.fakes.model_logits import configure
from tests.fakes.ranks import expert_groups
from tests.fakes.threads import QueuePipeline, ThreadExecutor

CPU = torch.device("cpu")
LENGTHS = (1, 33, 70, 7, 50)


class ReplicaExecutor(ThreadExecutor):
    """The ranks of one replica; `groups` are its ranks' groups, stage by stage."""

    def __init__(self, config: EngineConfig, groups: Sequence[ExpertGroup]) -> None:
        tp, stages = config.parallel.tensor_parallel_size, len(config.parallel.stages)
        self.config, self.seconds = config, {}
        self._plans: list[SimpleQueue[tuple[SchedulerOutput, Future[Any]] | None]] = [SimpleQueue() for _ in groups]
        queues: list[list[SimpleQueue[Tensor]]] = [[SimpleQueue() for _ in range(stages)] for _ in range(tp)]
        self._threads = []
        for rank, (group, plans) in enumerate(zip(groups, self._plans, strict=True)):
            links = ParallelState(group.tp, QueuePipeline(rank // tp, stages, queues[rank % tp]), group)
            runner = ModelRunner(config, rank, links, CPU)
            self._threads.append(threading.Thread(target=self._run, args=(runner, plans), daemon=True))
            self._threads[-1].start()
        self._last = (stages - 1) * tp


def coupled(config: EngineConfig, replicas: int, experts: ExpertParallelConfig) -> EngineConfig:
    """As `resolve` makes it: without speculation."""
    return replace(
        config,
        parallel=replace(config.parallel, replicas=replicas, experts=experts),
        scheduler=replace(config.scheduler, speculative=None),
    )


def replica_executors(config: EngineConfig) -> list[ReplicaExecutor]:
    parallel = config.parallel
    assert parallel.experts is not None
    tp = parallel.tensor_parallel_size
    stages = [expert_groups(parallel.replicas, tp, parallel.experts)[0] for _ in parallel.stages]
    return [
        ReplicaExecutor(config, [group for stage in stages for group in stage[replica * tp : (replica + 1) * tp]])
        for replica in range(parallel.replicas)
    ]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models whose experts can be divided over four ranks."""
    found = {}
    for case, changes in (
        ("Mixtral", {"num_local_experts": 8}),
        ("DeepSeek V3", {}),
        ("Granite MoE", {"num_local_experts": 8}),
    ):
        found[case] = tmp_path_factory.mktemp(case.replace(" ", "-"))
        architecture, others = CASES[case]
        write_model(architecture, SIZES | others | changes, found[case])
    return found


MOVING = ExpertParallelConfig(enable_eplb=True, step_interval=2, num_redundant_experts=4)
"""Experts find new places every second step."""
LAYOUTS = [
    pytest.param("Mixtral", 2, 1, 1, ExpertParallelConfig(), id="mixtral"),
    pytest.param("Mixtral", 2, 2, 1, ExpertParallelConfig(all2all_backend="all_to_all"), id="mixtral-tp2"),
    pytest.param("DeepSeek V3", 2, 1, 2, ExpertParallelConfig(placement="round_robin"), id="deepseek-pp2"),
    pytest.param("Mixtral", 4, 1, 1, ExpertParallelConfig(), id="mixtral-dp4"),
    pytest.param("Mixtral", 2, 2, 1, MOVING, id="mixtral-moving"),
    pytest.param("DeepSeek V3", 2, 1, 2, replace(MOVING, placement="round_robin"), id="deepseek-pp2-moving"),
    pytest.param("Granite MoE", 2, 2, 1, replace(MOVING, all2all_backend="all_to_all"), id="granite-tp2-moving"),
]


@pytest.mark.parametrize(("case", "dp", "tp", "pp", "experts"), LAYOUTS)
def test_tokens_are_those_of_one_rank(
    case: str, dp: int, tp: int, pp: int, experts: ExpertParallelConfig, folders: dict[str, Path]
) -> None:
    """Uneven loads, replicas without any, and prompts in chunks."""
    rng = random.Random(1)
    prompts = [[rng.randrange(3, 130) for _ in range(length)] for length in LENGTHS]
    expected = generate(folders[case], prompts, 12)
    config = configure(
        folders[case],
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        max_model_len=128,
        max_num_seqs=8,
        max_num_batched_tokens=24,
        block_size=4,
    )
    config = coupled(config, dp, experts)
    executors = replica_executors(config)
    with serving(config, executors) as them:
        for replicas in ((0,), (dp - 1,), (0, dp - 1)):
            asked = {str(at): replicas[at % len(replicas)] for at in range(len(prompts))}
            for wire in them.wires:
                wire.ended.clear()
                wire.tokens.clear()
            for request_id, replica in asked.items():
                them.submit(replica, request_id, prompts[int(request_id)], 12)
            answers = [them.wires[replica].answer(request_id) for request_id, replica in asked.items()]
            assert answers == expected
        them.probe(0)
    for executor in executors:
        executor.close()
