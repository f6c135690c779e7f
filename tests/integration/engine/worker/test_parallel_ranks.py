"""Several ranks, each a process: the same tokens as one."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from quire.engine.distributed.parallel_state import connect
from quire.engine.protocol.sampling_params import SamplingParams
from quire.engine.protocol.scheduler_output import SchedulerOutput
from quire.engine.worker.model_runner import ModelRunner
from tests.fakes.checkpoints import generate, write_checkpoint
from tests.fakes.model_logits import CPU, configure
from tests.fakes.plans import Driver, Request, executing
from tests.fakes.rank_processes import Ranks

LAYOUTS = ((2, None, 1, 1), (1, "2,4", 1, 2), (2, "3,3", 2, 1))
"""Tensor parallel, layers of stages, decode and prefill context parallel."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("qwen2", tmp_path_factory.mktemp("qwen2"))  # tied, one KV head, a padded vocabulary


@pytest.mark.parametrize(("tp", "partition", "context", "shares"), LAYOUTS)
def test_tokens_are_those_of_one_rank(
    tp: int, partition: str | None, context: int, shares: int, folder: Path, tmp_path: Path
) -> None:
    rng = random.Random(2)
    prompts = [[rng.randrange(130) for _ in range(length)] for length in (3, 20, 41)]
    expected = generate(folder, prompts, 10)
    config = configure(
        folder,
        tensor_parallel_size=tp,
        pipeline_parallel_size=1 if partition is None else 2,
        pipeline_layer_partition=partition,
        decode_context_parallel_size=context,
        prefill_context_parallel_size=shares,
        block_size=4,
        max_num_seqs=8,
        max_model_len=128,
    )
    ranks = Ranks(config, tmp_path)
    driven = Driver(ranks.execute, 8, config.cache.num_blocks, 4, workers_keep=partition is None)
    requests = [Request(prompt, SamplingParams(temperature=0.0)) for prompt in prompts]
    driven.step((requests[2], 7))  # nobody samples
    driven.step()  # a sign of life
    driven.decode(requests, 10, 12)
    assert [request.output for request in requests] == expected
    sampled = Request(prompts[1], SamplingParams(seed=3, logprobs=2))
    driven.decode([sampled], 10, 100)
    alone = Request(prompts[1], sampled.params)
    single = configure(folder, block_size=4, max_num_seqs=8, max_model_len=128)
    one = ModelRunner(single, 0, connect(single.parallel, 0, None, CPU), CPU)
    Driver(executing(one), 8, single.cache.num_blocks, 4).decode([alone], 10, 100)
    assert sampled.output == alone.output
    for here, there in itertools.zip_longest(sampled.logprobs, alone.logprobs):
        assert here is not None
        assert there is not None
        assert (here.rank, here.top_ids) == (there.rank, there.top_ids)
        assert here.logprob == pytest.approx(there.logprob, abs=1e-4)
    for step in range(6):  # a stage may run ahead of the next
        ranks.send(SchedulerOutput(1000 + step, [], [], []))
    assert [ranks.receive().step for _ in range(6)] == [1000 + step for step in range(6)]
    ranks.close()
