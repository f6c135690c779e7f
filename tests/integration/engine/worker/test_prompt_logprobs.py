"""Log-probabilities of prompts on one rank and on several equal transformers', however the prompt is divided."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from quire.engine.distributed.parallel_state import connect
from quire.engine.protocol.logprobs import PromptLogprobs
from quire.engine.protocol.runner_output import ModelRunnerOutput
from quire.engine.protocol.sampling_params import SamplingParams
from quire.engine.protocol.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from quire.engine.worker.model_runner import ModelRunner
from tests.fakes.checkpoints import score, write_checkpoint
from tests.fakes.model_logits import CPU, configure
from tests.fakes.plans import Driver, Execute, Request, executing
from tests.fakes.rank_processes import Ranks

rng = random.Random(3)
PROMPTS = [[rng.randrange(130) for _ in range(length)] for length in (1, 2, 20, 70)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("qwen2", tmp_path_factory.mktemp("qwen2"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[Tensor]:
    return score(folder, PROMPTS)


class Recorder:
    """Between driver and runner: joins the scores of each slot."""

    def __init__(self, execute: Execute) -> None:
        self._execute = execute
        self.scores: dict[int, PromptLogprobs] = {}

    def __call__(self, plan: SchedulerOutput) -> ModelRunnerOutput | None:
        result = self._execute(plan)
        if result is not None:
            slots = plan.decodes + [row.slot for row in plan.scheduled]
            for row, scores in result.prompt_logprobs.items():
                if slots[row] in self.scores:
                    self.scores[slots[row]].extend(scores)
                else:
                    self.scores[slots[row]] = scores
        return result


def check(scores: PromptLogprobs, prompt: list[int], exact: Tensor, begin: int = 0) -> None:
    rows = scores.rows()
    assert len(rows) == len(scores) == len(prompt) - 1 - begin
    for at, row in enumerate(rows, begin):
        assert row.logprob == pytest.approx(exact[at, prompt[at + 1]].item(), abs=1e-4)
        assert row.rank == 1 + (exact[at] > exact[at, prompt[at + 1]]).sum().item()
        best = exact[at].topk(scores.num_top)
        assert row.top_ids == best.indices.tolist()
        assert row.top_logprobs == pytest.approx(best.values.tolist(), abs=1e-4)


def configured(folder: Path, **options: Any) -> Any:
    return configure(folder, block_size=4, max_num_seqs=8, max_model_len=128, **options)


@pytest.mark.parametrize("at_once", [1, 7, 256])
@pytest.mark.parametrize("budget", [3, 33, 1000])
def test_scores_are_those_of_transformers(folder: Path, expected: list[Tensor], budget: int, at_once: int) -> None:
    config = configured(folder)
    runner = ModelRunner(config, 0, connect(config.parallel, 0, None, CPU), CPU)
    runner._score_chunk_size = at_once
    recorder = Recorder(executing(runner))
    driven = Driver(recorder, 8, config.cache.num_blocks, 4)
    scored = [Request(p, SamplingParams(prompt_logprobs=k)) for k, p in zip((2, 0, 5, 3), PROMPTS, strict=True)]
    plain = [Request(prompt, SamplingParams()) for prompt in PROMPTS]
    driven.decode([*plain[:2], *scored, *plain[2:]], 3, budget)
    assert recorder.scores.keys() == {request.slot for request in scored[1:]}  # one token has none before it
    for request, exact in zip(scored[1:], expected[1:], strict=True):
        scores = recorder.scores[request.slot]
        assert scores.num_top == request.params.prompt_logprobs
        check(scores, request.prompt, exact)


def test_more_than_the_vocabulary_is_the_vocabulary(folder: Path, expected: list[Tensor]) -> None:
    config = configured(folder)
    recorder = Recorder(executing(ModelRunner(config, 0, connect(config.parallel, 0, None, CPU), CPU)))
    request = Request(PROMPTS[2], SamplingParams(prompt_logprobs=1000))
    Driver(recorder, 8, config.cache.num_blocks, 4).decode([request], 1, 100)
    (scores,) = recorder.scores.values()
    assert scores.num_top == 131
    assert [row.logprob for row in scores.rows()] == pytest.approx(
        [row.top_logprobs[row.rank - 1] for row in scores.rows()]
    )


def test_what_was_scored_before_is_not_scored_again(folder: Path, expected: list[Tensor]) -> None:
    config = configured(folder)
    runner = ModelRunner(config, 0, connect(config.parallel, 0, None, CPU), CPU)
    params = SamplingParams(prompt_logprobs=1)
    new = NewRequestData(0, PROMPTS[3], 70, 0, list(range(20)), params, num_scored_tokens=31)
    first = runner.launch(SchedulerOutput(0, [], [new], [CachedRequestData(0, 30, [], [])])).result()
    then = runner.launch(SchedulerOutput(1, [], [], [CachedRequestData(0, 40, [], [])])).result()
    assert isinstance(first, ModelRunnerOutput)
    assert isinstance(then, ModelRunnerOutput)
    assert first.prompt_logprobs == {}
    check(then.prompt_logprobs[0], PROMPTS[3], expected[3], begin=31)


@pytest.mark.parametrize(("tp", "partition"), [(2, None), (1, "2,4"), (2, "3,3")])
def test_ranks_score_as_one(
    tp: int, partition: str | None, folder: Path, expected: list[Tensor], tmp_path: Path
) -> None:
    config = configured(
        folder,
        tensor_parallel_size=tp,
        pipeline_parallel_size=1 if partition is None else 2,
        pipeline_layer_partition=partition,
    )
    ranks = Ranks(config, tmp_path)
    recorder = Recorder(ranks.execute)
    driven = Driver(recorder, 8, config.cache.num_blocks, 4, workers_keep=partition is None)
    scored = [Request(prompt, SamplingParams(prompt_logprobs=3)) for prompt in PROMPTS[1:]]
    driven.decode(scored, 4, 25)
    for request, exact in zip(scored, expected[1:], strict=True):
        check(recorder.scores[request.slot], request.prompt, exact)
    ranks.close()
