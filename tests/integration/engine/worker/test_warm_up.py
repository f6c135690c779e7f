"""The warm-up of a rank on a GPU: every kernel variant that decodes may need, without lasting effects."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from quire import kernels
from quire.engine.config.engine_config import ExpertParallelConfig
from quire.engine.distributed.parallel_state import connect
from quire.engine.protocol.sampling_params import SamplingParams
from quire.engine.worker import warm_up
from quire.engine.worker.drafter import Drafts, SampledStep
from quire.engine.worker.input_batch import InputBatch
from quire.engine.worker.model_runner import ModelRunner
from tests.fakes.checkpoints import generate, write_checkpoint
from tests.fakes.model_logits import CPU, configure
from tests.fakes.plans import Driver, Request, executing
from tests.integration.engine.worker.test_memory import FakeMeter


class Meter(FakeMeter):
    def reset_peak(self) -> None:
        """The step runs in the runner, and not in the meter."""


class Calls:
    """The variants of kernels that are called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: set[int] = set()
        self.drawn: set[tuple[bool, bool, bool]] = set()
        """Whether any row is drawn, with top-k, with top-p."""
        self.counted: set[int] = set()
        """Tokens that a penalty kernel takes at once."""
        self.scored = 0
        sample, penalize, score = kernels.sample, kernels.penalize, kernels.score_tokens

        def sampled(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, *more: Tensor) -> Tensor:
            self.rows.add(len(logits))
            self.drawn.add((bool(temperature.any()), bool((top_k > 0).any()), bool((top_p < 1.0).any())))
            return sample(logits, temperature, top_k, top_p, *more)

        def penalized(*args: Any) -> None:
            self.counted.add(chunk(args[-1]))
            penalize(*args)

        def scored(*args: Any) -> Any:
            self.scored += 1
            return score(*args)

        monkeypatch.setattr(kernels, "sample", sampled)
        monkeypatch.setattr(kernels, "penalize", penalized)
        monkeypatch.setattr(kernels, "score_tokens", scored)


def chunk(longest: int) -> int:
    """As kernels/triton/logits.py takes it."""
    return min(4096, max(32, 1 << (longest - 1).bit_length()))


@pytest.mark.parametrize(("seqs", "length"), [(1, 2), (1, 512), (6, 100), (40, 40)])
def test_every_variant_is_warmed_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seqs: int, length: int) -> None:
    folder = write_checkpoint("qwen3", tmp_path)
    config = configure(folder, block_size=4, max_num_seqs=seqs, max_model_len=length)
    runner = ModelRunner(config, 0, connect(config.parallel, 0, None, CPU), CPU, Meter())
    calls = Calls(monkeypatch)
    seconds = runner.finalize()
    assert list(seconds) == ["warm up decodes"]
    assert calls.rows == {*(rows for rows in (1, 2, 4, 8, 16, 32) if rows < seqs), seqs}
    assert calls.drawn == {
        (False, False, False),
        (True, False, False),
        (True, True, False),
        (True, False, True),
    }
    assert calls.counted == {chunk(known) for known in range(1, length)}
    assert calls.scored
    calls.rows.clear()
    assert runner.finalize() == {}
    assert not calls.rows


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_warm_up_leaves_no_state(tmp_path: Path, family: str) -> None:
    windows = {"sliding_window": 16} if family == "mistral" else {}
    folder = write_checkpoint(family, tmp_path, **windows)
    config = configure(folder, block_size=4, max_num_seqs=8, max_model_len=128)
    runner = ModelRunner(config, 0, connect(config.parallel, 0, None, CPU), CPU, Meter())
    runner.finalize()
    prompts = [[5, 6, 7, 8, 9, 10, 11], [3], list(range(30))]
    requests = [Request(prompt, SamplingParams(temperature=0.0)) for prompt in prompts]
    groups = len(config.cache.groups)
    Driver(executing(runner), 8, runner.num_blocks, 4, groups=groups).decode(requests, 8, 100)
    assert [request.output for request in requests] == generate(folder, prompts, 8)


def test_a_drafter_is_warmed_up_and_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is part of the largest step, and of the decode steps, in which it samples, too."""
    folder = write_checkpoint("qwen3", tmp_path)
    options = {"block_size": 4, "max_num_seqs": 8, "max_model_len": 128}
    plain = configure(folder, **options)
    config = configure(folder, **options, spec_model=str(folder), spec_tokens=3)
    calls = Calls(monkeypatch)
    runner = ModelRunner(config, 0, connect(config.parallel, 0, None, CPU), CPU, Meter())
    assert 8 in calls.rows
    drafted: list[int] = []
    assert runner._drafter is not None
    draft = runner._drafter.draft

    def watched(step: SampledStep, input_batch: InputBatch) -> Drafts | None:
        found = draft(step, input_batch)
        drafted.append(0 if found is None else found.tokens.numel())
        return found

    monkeypatch.setattr(runner._drafter, "draft", watched)
    runner.finalize()
    assert max(drafted) == 3 * 8
    assert not any(plan.num_drafts for plan in warm_up.decode_steps(plain))
    requests = [Request(prompt, SamplingParams(temperature=0.0)) for prompt in ([5, 6, 7, 8, 9, 10, 11], [3])]
    Driver(executing(runner), 8, runner.num_blocks, 4).decode(requests, 8, 100)
    assert [request.output for request in requests] == generate(folder, [request.prompt for request in requests], 8)


def test_warm_up_is_skipped_without_a_meter_and_for_embedding_models(tmp_path: Path) -> None:
    folder = write_checkpoint("qwen3", tmp_path)
    for changes, meter in (({}, None), ({"runner": "pooling"}, Meter())):
        config = configure(folder, block_size=4, max_num_seqs=2, max_model_len=64, **changes)
        runner = ModelRunner(config, 0, connect(config.parallel, 0, None, CPU), CPU, meter)
        assert runner.finalize() == {}


def test_replicas_that_share_experts_step_together(tmp_path: Path) -> None:
    """Their steps have the same numbers, and say whether there is work."""
    config = configure(write_checkpoint("qwen3", tmp_path), max_num_seqs=2, max_model_len=64)
    coupled = replace(config, parallel=replace(config.parallel, replicas=2, experts=ExpertParallelConfig()))
    for each, has_work in ((config, None), (coupled, True)):
        plans = list(warm_up.decode_steps(each))
        assert [plan.step for plan in plans] == list(range(-len(plans), 0))
        assert {plan.has_work for plan in plans} == {has_work}
        assert not plans[-1].num_rows


def test_warm_up_covers_the_largest_penalty_kernel() -> None:
    pytest.importorskip("triton", reason="scripts/setup ci installs it")
    assert (
        importlib.import_module("quire.kernels.triton.logits")._CHUNK == warm_up._PENALTY_LENGTHS[1] == chunk(1 << 20)
    )
