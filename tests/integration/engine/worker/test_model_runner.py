"""One rank driven by plans made by hand: transformers' tokens, however the plans reach them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from quire.engine.distributed.parallel_state import connect
from quire.engine.models.decoder import Decoder
from quire.engine.models.decoder_layer import DecoderLayer
from quire.engine.protocol.runner_output import ModelRunnerOutput
from quire.engine.protocol.sampling_params import SamplingParams
from quire.engine.protocol.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from quire.engine.worker.model_runner import ModelRunner
from tests.fakes.checkpoints import generate, write_checkpoint
from tests.fakes.model_logits import CPU, configure
from tests.fakes.plans import Driver, Request, executing

COUNT = 16
LENGTHS = (1, 5, 16, 33, 64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(130) for _ in range(length)] for length in LENGTHS]


@pytest.fixture(scope="module")
def expected(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    return generate(folder, prompts, COUNT)


def driver(folder: Path, block_size: int = 4) -> Driver:
    config = configure(folder, block_size=block_size, max_num_seqs=8, max_model_len=128)
    runner = ModelRunner(config, 0, connect(config.parallel, 0, None, CPU), CPU)
    return Driver(executing(runner), 8, config.cache.num_blocks, block_size)


def greedy(prompts: list[list[int]]) -> list[Request]:
    return [Request(prompt, SamplingParams(temperature=0.0)) for prompt in prompts]


@pytest.mark.parametrize(("block_size", "budget"), [(1, 7), (4, 10), (16, 3), (16, 1000)])
def test_chunked_prefill_with_decodes(
    folder: Path, prompts: list[list[int]], expected: list[list[int]], block_size: int, budget: int
) -> None:
    requests = greedy(prompts)
    driver(folder, block_size).decode(requests, COUNT, budget)
    assert [request.output for request in requests] == expected


def test_decodes_run_ahead_of_what_is_known(folder: Path, prompts: list[list[int]], expected: list[list[int]]) -> None:
    """Plans made beforehand, without a look at a result: the worker goes on from its own tokens."""
    config = configure(folder, block_size=4, max_num_seqs=8, max_model_len=128)
    runner = ModelRunner(config, 0, connect(config.parallel, 0, None, CPU), CPU)
    params = SamplingParams(temperature=0.0)
    start = SchedulerOutput(0, [], [], [])
    for slot, prompt in enumerate(prompts[:3]):
        blocks = list(range(slot * 20, slot * 20 + 20))
        start.new.append(NewRequestData(slot, prompt, len(prompt), 0, blocks, params))
        start.scheduled.append(CachedRequestData(slot, len(prompt), [], []))
    plans = [start, *(SchedulerOutput(step, [], [], [], decodes=[2, 0, 1]) for step in range(1, COUNT))]
    results = [runner.launch(plan).result() for plan in plans]
    columns = [result.token_ids for result in results if isinstance(result, ModelRunnerOutput)]
    assert [[columns[0][slot], *(row[(slot + 1) % 3] for row in columns[1:])] for slot in range(3)] == expected[:3]


@pytest.mark.parametrize("scores", [False, True])
def test_the_last_layer_computes_what_is_read(folder: Path, prompts: list[list[int]], scores: bool) -> None:
    """Only the last token of a prompt, or of a part of one, but all tokens if the prompt is scored."""
    config = configure(folder, block_size=4, max_num_seqs=8, max_model_len=128)
    runner = ModelRunner(config, 0, connect(config.parallel, 0, None, CPU), CPU)
    assert isinstance(runner._model, Decoder)
    rows: list[int] = []
    for layer in runner._model.layers.values():
        assert isinstance(layer, DecoderLayer)
        assert layer.feed_forward is not None
        layer.feed_forward.register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))
    params = SamplingParams(temperature=0.0, logprobs=0 if scores else None, prompt_logprobs=0 if scores else None)
    requests = [Request(prompts[3], params), Request(prompts[4], SamplingParams(temperature=0.0))]
    driven = Driver(executing(runner), 8, config.cache.num_blocks, 4)
    driven.step((requests[0], 33), (requests[1], 20))
    assert (set(rows[:-1]), rows[-1]) == ({53}, 53 if scores else 2)
    rows.clear()
    driven.step((requests[0], 1), (requests[1], 44))
    assert (set(rows[:-1]), rows[-1]) == ({45}, 2)
    driven.step((requests[0], 1), (requests[1], 1))
    assert [len(request.output) for request in requests] == [3, 2]
    for request in requests:
        alone = Request(request.prompt, SamplingParams(temperature=0.0))
        driver(folder).decode([alone], len(request.output), 1000)
        assert alone.output == request.output


def test_one_by_one(folder: Path, prompts: list[list[int]], expected: list[list[int]]) -> None:
    driven = driver(folder)
    for request, tokens in zip(greedy(prompts), expected, strict=True):
        driven.decode([request], COUNT, 1000)
        driven.release(request)
        assert request.output == tokens


def test_preempted_requests_go_on(folder: Path, prompts: list[list[int]], expected: list[list[int]]) -> None:
    requests, driven = greedy(prompts), driver(folder)
    driven.decode(requests, 5, 50)
    for request in requests[::2]:
        driven.release(request)
    driven.decode(requests[1::2], 9, 50)
    driven.decode(requests, COUNT, 20)
    assert [request.output for request in requests] == expected


def test_step_without_samples_or_rows(folder: Path, prompts: list[list[int]]) -> None:
    driven = driver(folder)
    (request,) = greedy([prompts[-1]])
    driven.step((request, 10))
    driven.step()
    driven.step((request, 10))
    assert not request.output


def test_empty_plan_is_answered(folder: Path) -> None:
    config = configure(folder)
    runner = ModelRunner(config, 0, connect(config.parallel, 0, None, CPU), CPU)
    assert runner.launch(SchedulerOutput(41, [], [], [])).result() == ModelRunnerOutput(41, [])


def test_logprobs_are_of_the_rows_that_asked(folder: Path, prompts: list[list[int]]) -> None:
    requests = greedy(prompts)
    requests[1].params = SamplingParams(temperature=0.0, logprobs=3)
    requests[3].params = SamplingParams(temperature=0.0, logprobs=0)
    driver(folder).decode(requests, 4, 40)
    for number, request in enumerate(requests):
        found = [entry for entry in request.logprobs if entry is not None]
        assert len(found) == (4 if number in (1, 3) else 0)
        for token, entry in zip(request.output, found, strict=False):
            assert entry.rank == 1
            assert len(entry.top_ids) == len(entry.top_logprobs) == (3 if number == 1 else 0)
            assert entry.logprob < 0
            if number == 1:
                assert entry.top_ids[0] == token
                assert entry.top_logprobs[0] == entry.logprob


FEATURES = SamplingParams(
    temperature=0.9,
    top_p=0.95,
    presence_penalty=0.7,
    frequency_penalty=0.3,
    repetition_penalty=1.2,
    min_tokens=12,
    logit_bias={7: 2.0},
    seed=5,
)


def test_seeded_sampling_alone_batched_and_preempted(folder: Path, prompts: list[list[int]]) -> None:
    params = [FEATURES, SamplingParams(seed=9), SamplingParams(seed=-1, top_k=20, min_p=0.01), FEATURES, FEATURES]

    def make() -> list[Request]:
        return [Request(prompt, each) for prompt, each in zip(prompts, params, strict=True)]

    alone, crowd, preempted = make(), make(), make()
    driven = driver(folder)
    for request in alone:
        driven.decode([request], COUNT, 1000)
        driven.release(request)
    driven.decode(crowd, COUNT, 25)
    for request in crowd:
        driven.release(request)
    driven.decode(preempted[::-1], 6, 60)
    for request in preempted:
        driven.release(request)
    driven.decode(preempted, COUNT, 33)
    assert [r.output for r in crowd] == [r.output for r in alone]
    assert [r.output for r in preempted] == [r.output for r in alone]
    assert not torch.equal(torch.tensor(alone[3].output), torch.tensor(alone[4].output))
