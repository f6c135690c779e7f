"""A rank for which a step needs more memory than there is, driven by the real core: the requests that fail, and the
others."""

from __future__ import annotations

import itertools
import os
import random
import sys
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.engine.config.engine_config import EngineConfig
from quire.engine.executor.uni import UniExecutor
from quire.engine.layers.batch import Batch
from quire.engine.models.decoder_layer import DecoderLayer
from quire.engine.protocol.engine_core import EngineCoreOutput
from quire.engine.protocol.errors import ConfigError
from quire.engine.protocol.runner_output import ModelRunnerOutput, WorkerFailed, WorkerReady
from quire.engine.protocol.sampling_params import SamplingParams
from quire.engine.worker import worker
from quire.engine.worker.drafter import DraftModel
from quire.engine.worker.model_runner import ModelRunner
from tests.fakes.checkpoints import write_checkpoint
from tests.fakes.core_with_ranks import Ranks
from tests.fakes.drafts import Always
from tests.fakes.model_logits import configure
from tests.integration.engine.worker.test_memory import FakeMeter

FAILING_LAYER = 3
"""Some layers of a step have stored their keys and values by then."""
ERRORS = {
    "cuda": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "cpu": RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried"),
}


class Scarcity:
    """Steps of the model, by number, that find no memory; the layers before `FAILING_LAYER` run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: frozenset[int] = frozenset()
        self.error: Exception = ERRORS["cuda"]
        self.tokens: list[int] = []
        """Number of tokens of each step."""
        self.tensors: list[weakref.ref[Tensor]] = []
        """The tensors that failed steps had made."""
        self._calls = 0
        forward = DecoderLayer.forward

        def scarce(layer: DecoderLayer, x: Tensor, *rest: Any) -> Any:
            step, number = divmod(self._calls, 6)
            self._calls += 1
            if number == 0:
                self.tokens.append(len(x))
            if number == FAILING_LAYER and step in self.steps:
                made = x + 1
                self.tensors.append(weakref.ref(made))
                self._calls = (step + 1) * 6
                raise self.error
            return forward(layer, x, *rest)

        monkeypatch.setattr(DecoderLayer, "forward", scarce)

    def at(self, *steps: int) -> None:
        """Begin to count anew."""
        self.steps, self.tokens, self._calls = frozenset(steps), [], 0


SETTINGS: dict[str, Any] = {
    "block_size": 4,
    "max_num_seqs": 4,
    "max_model_len": 128,
    "max_num_batched_tokens": 48,
    "enforce_eager": True,
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    return configure(write_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3")), **SETTINGS)


@pytest.fixture(scope="module", params=[1, 2], ids=["depth 1", "depth 2"])
def ranks(config: EngineConfig, request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """With two plans in flight, the rank has a thread of its own."""
    config = replace(config, scheduler=replace(config.scheduler, depth=request.param))
    with Ranks(config, UniExecutor(config)) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def expected(ranks: Ranks) -> list[list[int]]:
    """The tokens where there is memory."""
    return [tokens(outputs) for outputs in ranks.run(requests())]


@pytest.fixture
def scarcity(monkeypatch: pytest.MonkeyPatch) -> Scarcity:
    return Scarcity(monkeypatch)


def requests() -> list[tuple[list[int], SamplingParams]]:
    """More than run at once; all prompts begin alike, and some are longer than a step."""
    rng = random.Random(5)
    shared = [rng.randrange(130) for _ in range(24)]
    prompts = [shared + [rng.randrange(130) for _ in range(rng.choice([1, 8, 60]))] for _ in range(10)]
    plain = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    reported = SamplingParams(temperature=0.8, seed=3, max_tokens=12, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    return [(prompt, reported if number % 3 == 2 else plain) for number, prompt in enumerate(prompts)]


def tokens(outputs: list[EngineCoreOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


@pytest.mark.parametrize(
    ("kind", "steps"), list(zip(itertools.cycle(ERRORS), [(0,), (1,), (2, 3), (6,), (9, 14)])), ids=str
)
def test_only_requests_of_the_failed_step_fail(
    ranks: Ranks, expected: list[list[int]], scarcity: Scarcity, kind: str, steps: tuple[int, ...]
) -> None:
    """The books are checked after every turn; shared blocks have been computed, or tokens would differ."""
    scarcity.error = ERRORS[kind]
    scarcity.at(*steps)
    ended = ranks.run(requests())
    failed = [outputs[-1] for outputs in ended if outputs[-1].finish_reason == "error"]
    assert 0 < len(failed) < len(ended)
    for output in failed:
        assert output.error is not None
        assert output.error.startswith("out of memory on cpu in a step of ")
        assert "--max-num-batched-tokens, --max-num-seqs" in output.error
    for outputs, right in zip(ended, expected, strict=True):
        mine = tokens(outputs)
        assert mine == right[: len(mine)]
        assert len(mine) == 12 or outputs[-1].finish_reason == "error"
    assert len(scarcity.tensors) == len(steps)
    assert not any(tensor() is not None for tensor in scarcity.tensors)
    scarcity.at()
    assert [tokens(outputs) for outputs in ranks.run(requests())] == expected


def test_steps_do_without_drafts_for_which_there_is_no_memory(
    config: EngineConfig, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafting = configure(config.model.path, **SETTINGS, speculative_config={"model": str(config.model.path)})
    forward, calls = DraftModel._forward, itertools.count()

    def scarce(drafter: DraftModel, batch: Batch) -> Tensor:
        if next(calls) % 7 == 5:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(drafter, batch)

    monkeypatch.setattr(DraftModel, "_forward", scarce)
    with Ranks(drafting, UniExecutor(drafting)) as ranks:
        ended = ranks.run(requests(), speculation=Always(3, 16))
        assert [tokens(outputs) for outputs in ended] == expected
        assert ranks.stats.num_accepted_tokens
    assert next(calls) > 20


def test_a_rank_that_always_lacks_memory_answers_everybody(ranks: Ranks, scarcity: Scarcity) -> None:
    scarcity.at(*range(1000))
    ended = ranks.run(requests())
    assert [outputs[-1].finish_reason for outputs in ended] == ["error"] * 10


def test_other_errors_end_the_rank(config: EngineConfig, scarcity: Scarcity) -> None:
    """Nothing but a lack of memory is recovered from: the state might be wrong."""
    scarcity.error = RuntimeError("CUDA error: an illegal memory access was encountered")
    with Ranks(config, UniExecutor(config)) as ranks:
        scarcity.at(2)
        with pytest.raises(RuntimeError, match="illegal memory access"):
            ranks.run(requests())


class Told:
    def __init__(self) -> None:
        self.messages: list[WorkerReady | WorkerFailed | ModelRunnerOutput] = []

    def send(self, message: WorkerReady | WorkerFailed | ModelRunnerOutput) -> None:
        self.messages.append(message)


@pytest.mark.parametrize("error", [ERRORS["cuda"], ValueError("no such block")], ids=["out of memory", "other"])
def test_a_rank_that_others_wait_for_ends_with_a_remedy(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr(os, "_exit", sys.exit)
    reported = Told()
    with pytest.raises(SystemExit):
        worker._fail(1, error, reported)  # type: ignore[arg-type]
    (failed,) = reported.messages
    assert isinstance(failed, WorkerFailed)
    assert failed.reason.startswith(f"{type(error).__name__}: {error}")
    assert ("lower --max-num-batched-tokens" in failed.reason) == (error is ERRORS["cuda"])


def test_a_model_that_does_not_fit_after_all_is_refused(
    config: EngineConfig, scarcity: Scarcity, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a meter, the largest step is run while the rank is made."""
    scarcity.at(0)
    monkeypatch.setattr(
        worker,
        "ModelRunner",
        lambda config, rank, links, device, *_: ModelRunner(config, rank, links, device, FakeMeter()),
    )
    with pytest.raises(ConfigError, match=r"rank 0 ran out of memory while loading and warming up the model: CUDA out"):
        worker.Worker(config, 0, None)
