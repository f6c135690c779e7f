"""Greedy float32 tokens equal transformers', in every layout and situation."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from torch import Tensor

from quire.engine.config.engine_config import EngineConfig
from quire.engine.config.options import DEMO_MODEL, EngineOptions
from quire.engine.config.resolve import resolve
from quire.engine.protocol.sampling_params import SamplingParams
from tests.fakes.checkpoints import FAMILIES, generate, score, write_checkpoint
from tests.fakes.core_with_ranks import Ranks

COUNT = 16
MODELS = ("demo", *FAMILIES)
SIZES, PARTITIONS = (1, 2, 4), (None, "3,3", "3,2,1")
DEFAULT = ((1, None), (2, "3,2,1"), (4, None))
"""Layouts of the demo model in the default tier, which has the logits of other models in
tests/integration/engine/models/test_families.py."""


class Case(NamedTuple):
    folder: Path
    prompts: list[list[int]]
    expected: list[list[int]]
    scores: list[Tensor]
    """Log-probabilities of the token after each token of each prompt."""


class Cases(dict[str, Case]):
    """By model, made on demand: prompts of mixed lengths, two of which start alike, and transformers' results."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self._folders, rng = folders, random.Random(0)
        shared = [rng.randrange(3, 130) for _ in range(40)]
        self._prompts = [[rng.randrange(3, 130) for _ in range(length)] for length in (1, 7, 33, 70)]
        self._prompts += [[*shared, 5, 6], [*shared, 7, 8, 9]]

    def __missing__(self, model: str) -> Case:
        folder = DEMO_MODEL if model == "demo" else write_checkpoint(model, self._folders.mktemp(model))
        expected, scores = generate(folder, self._prompts, COUNT), score(folder, self._prompts)
        return self.setdefault(model, Case(folder, self._prompts, expected, scores))


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    return Cases(tmp_path_factory)


def load(case: Case, tp: int, partition: str | None = None) -> Ranks:
    """The model's ranks, loaded: `tp` for each stage of `partition`."""
    return Ranks(load_config(case, tp, partition))


def load_config(case: Case, tp: int, partition: str | None = None) -> EngineConfig:
    return resolve(
        EngineOptions(
            model=str(case.folder),
            device="cpu",
            dtype="float32",
            tensor_parallel_size=tp,
            pipeline_parallel_size=1 if partition is None else partition.count(",") + 1,
            pipeline_layer_partition=partition,
            max_model_len=256,
            max_num_seqs=16,
        )
    )


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, cases: Cases) -> Iterator[tuple[Case, Ranks]]:
    model, tp, partition = request.param
    with load(cases[model], tp, partition) as loaded:
        yield cases[model], loaded


def layouts() -> list[object]:
    """The demo model in every layout, of which `DEFAULT` is in the default tier; of another model each size and each
    partition once, so that all layouts have another model, too."""
    return [
        pytest.param(
            (model, tp, partition),
            id=f"{model}-tp{tp}-pp{partition or 1}",
            marks=[] if model == "demo" and (tp, partition) in DEFAULT else [pytest.mark.slow],
        )
        for number, model in enumerate(MODELS)
        for (row, tp), (column, partition) in itertools.product(enumerate(SIZES), enumerate(PARTITIONS))
        if model == "demo" or (row + column + number) % 3 == 0
    ]


@pytest.mark.parametrize("ranks", layouts(), indirect=True)
@pytest.mark.parametrize(
    ("budget", "prefix", "preempted"),
    [(16, False, False), (16, True, True), (512, True, False), (512, False, True)],  # every pair of values
    ids=["16-calm", "16-prefix-preempted", "512-prefix-calm", "512-preempted"],
)
def test_tokens_equal_transformers(ranks: tuple[Case, Ranks], budget: int, prefix: bool, preempted: bool) -> None:
    case, loaded = ranks
    params = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
    tokens = loaded.tokens(
        [(prompt, params) for prompt in case.prompts],
        max_num_batched_tokens=budget,
        enable_prefix_caching=prefix,
        num_blocks=9 if preempted else None,
    )
    assert tokens == case.expected
    assert (loaded.stats.preemptions > 0) == preempted
    if not prefix:
        assert loaded.stats.prefix_hit_tokens == 0
    elif not preempted:
        assert loaded.stats.prefix_hit_tokens >= 32


@pytest.mark.parametrize("ranks", layouts(), indirect=True)
@pytest.mark.parametrize("preempted", [False, True], ids=["calm", "preempted"])
@pytest.mark.parametrize("budget", [16, 512])
def test_prompt_logprobs_equal_transformers(ranks: tuple[Case, Ranks], budget: int, preempted: bool) -> None:
    """With a prefix cache that holds all of the prompts, beside requests that use it."""
    case, loaded = ranks
    plain = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
    scored = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True, prompt_logprobs=3)
    outputs = loaded.run(
        [(prompt, params) for params in (plain, scored) for prompt in case.prompts],
        max_num_batched_tokens=budget,
        num_blocks=9 if preempted else None,
    )
    assert (loaded.stats.preemptions > 0) == preempted
    assert [[t for output in each for t in output.token_ids] for each in outputs] == case.expected * 2
    assert not any(output.prompt_logprobs for each in outputs[: len(case.prompts)] for output in each)
    for prompt, exact, each in zip(case.prompts, case.scores, outputs[len(case.prompts) :], strict=True):
        rows = [row for output in each if output.prompt_logprobs for row in output.prompt_logprobs.rows()]
        assert len(rows) == len(prompt) - 1
        for at, (token, row) in enumerate(zip(prompt[1:], rows, strict=True)):
            assert row.logprob == pytest.approx(exact[at, token].item(), abs=1e-4)
            assert row.top_logprobs == pytest.approx(exact[at].topk(3).values.tolist(), abs=1e-4)
            assert exact[at, row.top_ids].tolist() == pytest.approx(row.top_logprobs, abs=1e-4)
            assert abs(row.rank - 1 - (exact[at] > exact[at, token]).sum().item()) <= 1


@pytest.mark.parametrize("tp", [1, 2])
def test_running_ahead_changes_nothing(cases: Cases, tp: int) -> None:
    """Stop tokens found a step late, penalties, logprobs and a full cache, with one plan in flight and with two."""
    case = cases["demo"]
    stops = [tokens[5] for tokens in case.expected]
    requests = [
        (prompt, params)
        for prompt, stop in zip(case.prompts, stops, strict=True)
        for params in (
            SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True, stop_token_ids=[stop]),
            SamplingParams(seed=5, max_tokens=COUNT, repetition_penalty=1.3, presence_penalty=0.5, min_tokens=4),
            SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True, logprobs=2),
        )
    ]
    config = load_config(case, tp)
    with Ranks(replace(config, scheduler=replace(config.scheduler, depth=2))) as ranks:
        for blocks in (None, 13):
            ahead, behind = (ranks.run(requests, depth=depth, num_blocks=blocks) for depth in (2, 1))
            for here, there in zip(ahead, behind, strict=True):
                assert [t for output in here for t in output.token_ids] == [t for o in there for t in o.token_ids]
                assert here[-1].finish_reason == there[-1].finish_reason
                assert here[-1].stop_token_id == there[-1].stop_token_id
                assert sum(len(o.logprobs or []) for o in here) == sum(len(o.logprobs or []) for o in there)
        assert ranks.stats.preemptions > 0


def test_seeded_sampling_does_not_depend_on_the_batch(cases: Cases) -> None:
    case = cases["demo"]
    sampled = SamplingParams(temperature=1.0, top_p=0.95, top_k=50, seed=1234, max_tokens=COUNT, ignore_eos=True)
    mine = (case.prompts[3], sampled)
    others = [
        (prompt, SamplingParams(temperature=1.0, seed=seed, max_tokens=COUNT, ignore_eos=True))
        for seed, prompt in enumerate(case.prompts)
    ]
    answers = []
    for tp in (1, 2):
        with load(case, tp) as ranks:
            answers += ranks.tokens([mine])
            answers += ranks.tokens([*others, mine])[-1:]
            answers += ranks.tokens([mine, *others], max_num_batched_tokens=16)[:1]
            answers += ranks.tokens([*others, mine], num_blocks=9, enable_prefix_caching=False)[-1:]
            assert ranks.stats.preemptions > 0
            seeds = ranks.tokens([(case.prompts[3], other) for _, other in others])
            assert len({tuple(tokens) for tokens in seeds}) == len(others)
    assert answers == answers[:1] * 8
