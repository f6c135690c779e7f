"""Steps are launched one after the other while nothing of them has reached the host."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quire.engine.distributed.parallel_state import connect
from quire.engine.protocol.runner_output import ModelRunnerOutput
from quire.engine.protocol.sampling_params import SamplingParams
from quire.engine.protocol.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from quire.engine.worker.input_batch import InputBatch
from quire.engine.worker.model_runner import ModelRunner
from tests.fakes.checkpoints import write_checkpoint
from tests.fakes.late_device import GPU, DeviceTensor, Waited, late_device, move
from tests.fakes.model_logits import CPU, configure

COUNT = 8
BLOCK = 4
LENGTHS = (5, 16, 1, 33, 20, 3)
PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, logprobs=3),
    SamplingParams(temperature=0.9, seed=3, top_p=0.9, presence_penalty=0.5, repetition_penalty=1.3, logprobs=0),
    SamplingParams(temperature=0.0, prompt_logprobs=2, min_tokens=6, frequency_penalty=1.1),
    SamplingParams(temperature=0.0, bad_word_ids=[[7], [3, 9]], logit_bias={4: 3.0}),
    SamplingParams(temperature=0.7, seed=5, top_k=9, min_p=0.01, allowed_token_ids=list(range(2, 60))),
)


WINDOWS = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}


@pytest.fixture(scope="module", params=[{}, WINDOWS], ids=["full", "windows"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"), **request.param)


def make(folder: Path) -> ModelRunner:
    config = configure(folder, block_size=BLOCK, max_num_seqs=8, max_model_len=64, enforce_eager=True)
    return ModelRunner(config, 0, connect(config.parallel, 0, None, CPU), CPU)


def to_gpu(runner: ModelRunner) -> None:
    """Move the runner to the device, as if it had been loaded there."""
    move(runner._model)
    memory = [cache.memory for cache in runner._kv_caches.layers if cache.memory is not None]
    runner._kv_caches.layers = [
        cache._replace(memory=DeviceTensor(each)) for cache, each in zip(runner._kv_caches.layers, memory, strict=True)
    ]
    runner._device = runner._sampler._device = GPU
    runner._input_batch = InputBatch(8, 64, BLOCK, runner._input_batch._groups, GPU)


def plans(groups: int) -> list[SchedulerOutput]:
    """All are known beforehand: prompts in chunks, then decodes, among them one with a mask, and a slot used twice."""
    rng = random.Random(1)
    prompts = [[rng.randrange(130) for _ in range(length)] for length in LENGTHS]
    blocks = [list(range(slot * 16 * groups, (slot * 16 + 12) * groups)) for slot in range(len(prompts))]
    half = 6 * groups
    new = [
        NewRequestData(slot, prompt, len(prompt), 0, blocks[slot][:half], params)
        for slot, (prompt, params) in enumerate(zip(prompts, PARAMS, strict=True))
    ]
    chunks = [CachedRequestData(slot, -(-len(prompt) // 2), [], []) for slot, prompt in enumerate(prompts)]
    rests = [CachedRequestData(slot, len(prompt) // 2, [], blocks[slot][half:]) for slot, prompt in enumerate(prompts)]
    rests[2].num_tokens = 1  # its prompt is a single token
    slots = list(range(len(prompts)))
    decodes = [SchedulerOutput(step, [], [], [], decodes=slots[::-1]) for step in range(2, COUNT)]
    mask = bytes([0b1111_0000] * 20)
    decodes[2].decodes.remove(0)
    decodes[2].scheduled.append(CachedRequestData(0, 1, [], []))
    decodes[2].masks = {0: mask}
    again = NewRequestData(1, prompts[4], len(prompts[4]), 0, blocks[1], PARAMS[4])
    rest = [slot for slot in slots if slot not in (1, 2)]
    last = SchedulerOutput(COUNT, [1, 2], [again], [CachedRequestData(1, len(prompts[4]), [], [])], decodes=rest)
    empty = SchedulerOutput(COUNT + 1, [], [], [])
    end = SchedulerOutput(COUNT + 2, [], [], [], decodes=[1, *rest])
    return [SchedulerOutput(0, [], new, chunks), SchedulerOutput(1, [], [], rests), *decodes, last, empty, end]


def test_nothing_waits_for_the_device_until_results_are_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = make(folder)
    groups = here._input_batch._groups
    expected = [here.launch(plan).result() for plan in plans(groups)]
    runner = make(folder)
    with late_device(monkeypatch) as device, torch.inference_mode():
        to_gpu(runner)
        launched = [runner.launch(plan) for plan in plans(groups)]  # all of them, before the first result
        assert not device.may_go.is_set()
        device.may_go.set()
        results = [each.result() for each in launched]
    for found, right in zip(results, expected, strict=True):
        assert isinstance(found, ModelRunnerOutput)
        assert isinstance(right, ModelRunnerOutput)
        check(found, right)
    assert any(result.logprobs for result in expected if isinstance(result, ModelRunnerOutput))


def check(found: ModelRunnerOutput, right: ModelRunnerOutput) -> None:
    """The host's own kernels round in another way."""
    assert (found.step, found.token_ids) == (right.step, right.token_ids)
    assert found.prompt_logprobs.keys() == right.prompt_logprobs.keys()
    pairs = [*zip(found.logprobs, right.logprobs, strict=True)]
    for row, scores in right.prompt_logprobs.items():
        pairs += zip(found.prompt_logprobs[row].rows(), scores.rows(), strict=True)
    for one, other in pairs:
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert (one.rank, one.top_ids) == (other.rank, other.top_ids)
            numbers = [one.logprob, *one.top_logprobs], [other.logprob, *other.top_logprobs]
            assert numbers[0] == pytest.approx(numbers[1], abs=1e-4)


def test_what_would_wait_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with late_device(monkeypatch), torch.inference_mode():
        x = torch.zeros(3, device=GPU)
        waiting: list[Callable[[], object]] = [
            lambda: x[0].item(),
            lambda: x.tolist(),
            lambda: bool(x.any()),
            lambda: x.nonzero(),
            lambda: x[x > 0],
            lambda: x.cpu(),
            lambda: torch.zeros(3).to(GPU),
            lambda: torch.zeros(3).to(GPU, non_blocking=True),  # not pinned
        ]
        for attempt in waiting:
            with pytest.raises((Waited, RuntimeError)):
                attempt()
        assert not x.to("cpu", non_blocking=True).eq(0).any()  # nothing has come
