"""Steps that are planned before the accepted tokens and drafts of the previous step are known change no token."""

from __future__ import annotations

import itertools
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from quire.engine.config.options import DEMO_MODEL
from quire.engine.executor.base import StepFuture
from quire.engine.protocol.logprobs import TokenLogprobs
from quire.engine.protocol.sampling_params import SamplingParams
from quire.engine.protocol.scheduler_output import SchedulerOutput
from quire.engine.scheduler.model_drafts import ModelSpeculationManager, make_speculation
from quire.engine.worker import model_runner
from quire.engine.worker.chained_rows import StepEnd
from quire.engine.worker.drafter import DraftModel, Drafts
from quire.engine.worker.input_batch import InputBatch
from tests.fakes.core_with_ranks import Ranks
from tests.fakes.draft_heads import write_eagle3
from tests.fakes.drafts import Always, FreeSteps
from tests.fakes.threads import ThreadExecutor
from tests.integration.engine.core import test_draft_heads
from tests.integration.engine.core.test_draft_models import DEMO_DRAFT, QUESTION, configured

COMMON: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}
KINDS = {
    "greedy": SamplingParams(temperature=0.0, **COMMON),
    "sampled": SamplingParams(temperature=1.0, seed=3, top_p=0.95, **COMMON),
    "penalties": SamplingParams(temperature=0.7, seed=1, frequency_penalty=0.6, repetition_penalty=1.2, **COMMON),
    "logprobs": SamplingParams(temperature=0.0, logprobs=3, presence_penalty=0.3, **COMMON),
    "words": SamplingParams(temperature=0.0, bad_word_ids=[[201], [295, 201]], logit_bias={33: 2.0}, **COMMON),
    "until the end": SamplingParams(temperature=0.0, max_tokens=60, min_tokens=12),
    "stops": SamplingParams(temperature=0.9, seed=5, max_tokens=60, stop_token_ids=[*range(300, 340)]),
}
ASKED = [(QUESTION, params) for params in KINDS.values()] + [([7, 8, 9], KINDS["greedy"])]


def watch(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> list[SchedulerOutput]:
    """Keep the plans from now on."""
    plans: list[SchedulerOutput] = []
    submit = ranks.executor.submit

    def keep(plan: SchedulerOutput, limit: float) -> StepFuture:
        plans.append(plan)
        return submit(plan, limit)

    monkeypatch.setattr(ranks.executor, "submit", keep)
    return plans


def num_chained(plans: list[SchedulerOutput]) -> int:
    return sum(any(row.is_chained for row in plan.scheduled) for plan in plans)


def logprobs(found: list[TokenLogprobs]) -> list[float]:
    return [value for each in found for value in (each.logprob, *each.top_logprobs)]


@pytest.mark.parametrize(("tp", "is_shared"), [(1, False), (2, True)], ids=["apart", "one memory"])
def test_tokens_are_those_without_speculation(tp: int, is_shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At any temperature, with penalties, words and stop tokens, and with log-probabilities; as on a CPU, and with
    tokens in a memory of its own as on a GPU, where the host does not have the drafts."""
    monkeypatch.setattr(model_runner, "InputBatch", partial(InputBatch, is_shared=is_shared))
    config = configured(DEMO_MODEL, DEMO_DRAFT, tp)
    with Ranks(config, ThreadExecutor(config)) as ranks:
        plans = watch(ranks, monkeypatch)
        exact = ranks.run(ASKED, speculative=None)
        tokens = [[token for output in outputs for token in output.token_ids] for outputs in exact]
        scores = [logprobs([each for output in outputs for each in output.logprobs or ()]) for outputs in exact]
        assert any(len(found) < 40 for found in tokens)
        assert sum(map(bool, scores)) == 1
        for speculation in (Always(4, 40), Always(4, 40, varies=True)):
            plans.clear()
            found = ranks.run(ASKED, speculation=speculation, depth=2)
            assert [[token for output in outputs for token in output.token_ids] for outputs in found] == tokens
            for outputs, expected in zip(found, scores, strict=True):
                reported = [each for output in outputs for each in output.logprobs or ()]
                assert logprobs(reported) == pytest.approx(expected, abs=1e-4)
            assert num_chained(plans) > 8
            assert 0 < ranks.stats.num_accepted_tokens < ranks.stats.num_draft_tokens
        plans.clear()
        alone = ranks.tokens(ASKED, speculation=Always(4, 40), depth=2, max_num_seqs=1)
        assert alone == tokens
        assert num_chained(plans) > len(plans) / 2


def test_with_the_real_manager_and_ranks_as_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    config = configured(DEMO_MODEL, DEMO_DRAFT, 2)
    with Ranks(config) as ranks:
        assert config.scheduler.depth == 2
        plans = watch(ranks, monkeypatch)
        exact = ranks.tokens(ASKED, speculative=None)
        assert ranks.tokens(ASKED) == exact
        assert not num_chained(plans)  # ranks on CPUs wait for each other
        plans.clear()
        assert ranks.tokens(ASKED, speculation=Always(4, 40)) == exact
        assert num_chained(plans) > 8


def test_the_real_manager_chains_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """With steps that all take the same time, so that its decisions do not depend on the machine."""
    config = configured(DEMO_MODEL, DEMO_DRAFT)
    with Ranks(config, ThreadExecutor(config)) as ranks:
        plans = watch(ranks, monkeypatch)
        exact = ranks.tokens(ASKED, speculative=None)
        manager = make_speculation(config)
        assert isinstance(manager, ModelSpeculationManager)
        manager.times = FreeSteps()
        plans.clear()
        assert ranks.tokens(ASKED, speculation=manager, depth=2) == exact
        assert num_chained(plans) > 0
        assert ranks.stats.num_accepted_tokens > 0.2 * ranks.stats.num_draft_tokens


def test_a_draft_model_on_the_first_rank_only_chains_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank does not have the drafts, so that nobody keeps how a step has ended."""
    config = configured(DEMO_MODEL, DEMO_DRAFT, 2, speculative_config={"draft_tensor_parallel_size": 1})
    with Ranks(config, ThreadExecutor(config)) as ranks:
        plans = watch(ranks, monkeypatch)
        monkeypatch.setattr(model_runner, "StepEnd", None)
        exact = ranks.tokens(ASKED, speculative=None)
        assert ranks.tokens(ASKED, speculation=Always(4, 40), depth=2) == exact
        assert ranks.stats.num_accepted_tokens
        assert not num_chained(plans)


def test_a_step_without_drafts_keeps_nothing_to_chain_to(monkeypatch: pytest.MonkeyPatch) -> None:
    config = configured(DEMO_MODEL, DEMO_DRAFT)
    with Ranks(config, ThreadExecutor(config)) as ranks:
        exact = ranks.tokens(ASKED[:2], speculative=None)
        ends: list[StepEnd] = []

        def kept(*args: Any) -> StepEnd:
            ends.append(StepEnd(*args))
            return ends[-1]

        monkeypatch.setattr(model_runner, "StepEnd", kept)
        plans = watch(ranks, monkeypatch)
        assert ranks.tokens(ASKED[:2], speculation=Always(4, 40, varies=True), depth=2) == exact
        assert len(ends) == sum(bool(plan.num_drafts or plan.num_draft_tokens) for plan in plans) < len(plans)


def test_drafts_for_which_there_is_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step goes on without them, and so does a row that was to have them."""
    calls, draft = itertools.count(), DraftModel.draft

    def scarce(self: DraftModel, *args: Any) -> Drafts | None:
        if next(calls) % 3 == 1:
            raise MemoryError
        return draft(self, *args)

    monkeypatch.setattr(DraftModel, "draft", scarce)
    config = configured(DEMO_MODEL, DEMO_DRAFT)
    with Ranks(config, ThreadExecutor(config)) as ranks:
        plans = watch(ranks, monkeypatch)
        exact = ranks.tokens(ASKED, speculative=None)
        plans.clear()
        assert ranks.tokens(ASKED, speculation=Always(4, 40), depth=2) == exact
        assert num_chained(plans) > 8
        assert ranks.stats.num_accepted_tokens


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_rows_with_the_drafts_of_a_head(tp: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when blocks are scarce and requests are preempted, and when each of many requests ends at another step."""
    write_eagle3("Llama", tmp_path)
    config = test_draft_heads.configured(tmp_path, "EAGLE-3", tp)
    asked = [*test_draft_heads.REQUESTS]
    random.Random(0).shuffle(asked)
    with Ranks(config, ThreadExecutor(config)) as ranks:
        plans = watch(ranks, monkeypatch)
        exact = ranks.tokens(asked, speculative=None)
        for settings in ({"num_blocks": 14}, {}, {"max_num_seqs": 2}):
            plans.clear()
            assert ranks.tokens(asked, speculation=Always(3, 64), depth=2, **settings) == exact
            assert bool(ranks.stats.preemptions) == ("num_blocks" in settings)
        assert num_chained(plans) > len(plans) / 2
