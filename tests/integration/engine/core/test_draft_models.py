"""Draft models of many kinds, on ranks in threads: each drafts for itself, and so is always right."""

from __future__ import annotations

import random
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch.utils._python_dispatch import TorchDispatchMode

from quire.engine.config.engine_config import EngineConfig
from quire.engine.config.options import DEMO_MODEL, EngineOptions
from quire.engine.config.resolve import resolve
from quire.engine.protocol.errors import ConfigError
from quire.engine.protocol.sampling_params import SamplingParams
from quire.engine.scheduler.catch_up import CatchUp
from quire.engine.scheduler.request import Request
from quire.engine.worker import model_runner
from quire.engine.worker.drafter import DraftModel, Drafts, SampledStep
from quire.engine.worker.input_batch import InputBatch
from tests.fakes.core_with_ranks import Ranks
from tests.fakes.drafts import Always, Mixed
from tests.fakes.families import write
from tests.fakes.threads import ThreadExecutor

DEMO_DRAFT = DEMO_MODEL.with_name("demo_draft")
FAMILIES = ["Gemma 3", "DeepSeek V2", "Gemma 4, layer inputs, shared keys and values", "DeepSeek V4"]
SLOW = ["Mistral, windows", "gpt-oss", "Qwen3 MoE", "GPT-2", "Falcon-RW, ALiBi", "MiMo-V2-Flash"]
STEPS = 26
QUESTION = [1, 299, 201, 702, 742, 223, 43, 864, 276, 406, 780, 342, 989, 33, 2, 201, 1, 295, 201]
"""How can I get a model up and running?"""


def configured(folder: Path, drafter: Path, tp: int = 1, pp: int = 1, **options: Any) -> EngineConfig:
    plain: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 256, "max_num_seqs": 8}
    plain |= {"tensor_parallel_size": tp, "pipeline_parallel_size": pp} | options
    return resolve(EngineOptions(model=str(folder), spec_model=str(drafter), **plain))


def requests(vocabulary: int) -> list[tuple[list[int], SamplingParams]]:
    """Greedy and sampled, two of which start alike."""
    rng = random.Random(0)
    shared = [rng.randrange(3, vocabulary) for _ in range(40)]
    prompts = [[7], [rng.randrange(3, vocabulary) for _ in range(33)], [*shared, 5, 6], [*shared, 7, 8, 9]]
    return [
        (prompt, SamplingParams(temperature=temperature, seed=seed, max_tokens=STEPS, ignore_eos=True))
        for seed, (prompt, temperature) in enumerate(zip(prompts, (0.0, 1.0, 0.0, 0.7), strict=True))
    ]


def check(config: EngineConfig, *, least: float = 1.0) -> None:
    """Tokens are the same as without drafts, in chunks and with prefix hits, and at least this share of drafts is
    accepted."""
    asked = requests(min(config.model.architecture.vocab_size, 100))
    with Ranks(config, ThreadExecutor(config)) as ranks:
        exact = ranks.tokens(asked, speculative=None)
        ways: list[dict[str, Any]] = [{}, {"max_num_batched_tokens": 16}, {"max_num_seqs": 1, "depth": 2}]
        for settings in ways:
            found = ranks.tokens(asked, speculation=Always(4, 16), **settings)
            assert found == exact
            assert ranks.stats.num_accepted_tokens >= least * ranks.stats.num_draft_tokens > 0


@pytest.mark.parametrize(
    ("family", "grid"),
    [
        *((family, (1, 1)) for family in FAMILIES),
        *(pytest.param(family, (2, 2), marks=pytest.mark.slow) for family in FAMILIES + SLOW),
    ],
    ids=str,
)
def test_every_family_drafts(family: str, grid: tuple[int, int], tmp_path: Path) -> None:
    """With windows, latent and shared keys and values, and experts; also on a second stage of two ranks."""
    write(family, tmp_path)
    check(configured(tmp_path, tmp_path, *grid))


class NoSizesFromData(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every tensor's size is known without its device's data."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags) or (
            func.overloadpacket.__name__ == "index" and not any(each.dtype == torch.bool for each in args[1])
        ), f"{func} waits for the device"
        return func(*args, **kwargs or {})


def test_nothing_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """With tokens in a memory of its own, as on a GPU, where the host does not know the sampled tokens."""
    draft = DraftModel.draft

    def watched(*args: Any) -> Drafts | None:
        with NoSizesFromData():  # type: ignore[no-untyped-call]
            return draft(*args)

    monkeypatch.setattr(model_runner, "InputBatch", partial(InputBatch, is_shared=False))
    monkeypatch.setattr(DraftModel, "draft", watched)
    check(configured(DEMO_MODEL, DEMO_MODEL))


@pytest.mark.parametrize(
    "options",
    [
        {"kv_cache_dtype": "int8", "quantization": "int8"},
        {"kv_cache_dtype": "int4"},
        {"enforce_eager": True, "block_size": 4},
    ],
    ids=str,
)
def test_with_other_options(options: dict[str, Any]) -> None:
    check(configured(DEMO_MODEL, DEMO_MODEL, **options), least=0.8 if "quantization" in options else 1.0)


def test_the_bundled_draft_model_is_mostly_right() -> None:
    """On an answer of the demo model, not on random tokens."""
    config = configured(DEMO_MODEL, DEMO_DRAFT)
    with Ranks(config, ThreadExecutor(config)) as ranks:
        params = SamplingParams(temperature=0.0, max_tokens=40)
        asked = [(QUESTION, params), (QUESTION, SamplingParams(temperature=1.0, seed=3, max_tokens=40))]
        exact = ranks.tokens(asked, speculative=None)
        assert ranks.tokens(asked, speculation=Always(4, 16)) == exact
        assert ranks.stats.num_accepted_tokens > 0.6 * ranks.stats.num_draft_tokens


@pytest.mark.parametrize("depth", [1, 2])
def test_what_catches_up_writes_no_block_outside_its_windows(depth: int, tmp_path: Path) -> None:
    """They belong to other requests by then, and maybe to layers of the target."""
    write("Llama", tmp_path / "target")
    write("Mistral, windows", tmp_path / "draft")
    config = configured(tmp_path / "target", tmp_path / "draft", block_size=4)
    params = SamplingParams(temperature=0.0, max_tokens=180, ignore_eos=True)
    asked = [([3 + number, *range(10 + 5 * number)], params) for number in range(4)]
    with Ranks(config, ThreadExecutor(config)) as ranks:
        exact = ranks.tokens(asked, speculative=None, enable_prefix_caching=False)
        predicted = [
            (prompt, replace(params, predicted_token_ids=tokens[:100]))
            for (prompt, _), tokens in zip(asked, exact, strict=True)
        ]
        # While the predictions are right, the draft model is not asked.
        assert ranks.tokens(predicted, speculation=Mixed(4, 64), depth=depth, enable_prefix_caching=False) == exact
        assert ranks.stats.num_accepted_tokens > 300


def test_the_core_knows_how_far_a_draft_model_is_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """After each step in which it runs; only how many slots a row has in advance is not counted."""
    counted: list[dict[int | None, int]] = []
    computed: list[dict[int | None, int]] = []
    caught_up: list[int] = []
    run, draft = CatchUp.run, DraftModel.draft

    def watched_run(books: CatchUp, step: int, rows: Iterable[tuple[Request, int]]) -> None:
        rows = [*rows]
        run(books, step, rows)
        counted.append({request.slot: request.num_drafter_tokens for request, _ in rows})
        caught_up.append(books.in_step(step))

    def watched_draft(drafter: DraftModel, step: SampledStep, input_batch: InputBatch) -> Drafts | None:
        made, slots = draft(drafter, step, input_batch), step.rows.slots
        computed.append(dict(zip(slots.tolist(), input_batch.num_drafter_tokens[slots].tolist(), strict=True)))
        return made

    monkeypatch.setattr(CatchUp, "run", watched_run)
    monkeypatch.setattr(DraftModel, "draft", watched_draft)
    config = configured(DEMO_MODEL, DEMO_DRAFT)
    with Ranks(config, ThreadExecutor(config)) as ranks:
        params = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)
        asked = [([3 + number, *range(10 + 5 * number)], params) for number in range(4)]
        exact = ranks.tokens(asked, speculative=None, enable_prefix_caching=False)
        predicted = [
            (prompt, replace(params, predicted_token_ids=tokens[: 60 + 10 * number]))
            for number, ((prompt, _), tokens) in enumerate(zip(asked, exact, strict=True))
        ]
        computed.clear()
        # While the predictions are right, the draft model is not asked.
        assert ranks.tokens(predicted, speculation=Mixed(4, 64), enable_prefix_caching=False) == exact
    assert len(counted) == len(computed) > 4
    for here, there in zip(counted, computed, strict=True):
        assert here.keys() == there.keys()
        assert all(0 <= tokens - there[slot] <= 1 for slot, tokens in here.items())
    assert max(caught_up) > 100


@pytest.mark.parametrize(
    ("target", "drafter", "grid"),
    [
        ("DeepSeek V4", "Mistral, windows", (1, 1)),
        pytest.param("DeepSeek V4", "DeepSeek V2", (2, 2), marks=pytest.mark.slow),
        pytest.param("DeepSeek V4", "DeepSeek V4, rates as published", (1, 2), marks=pytest.mark.slow),
        pytest.param("Gemma 3", "DeepSeek V4", (2, 1), marks=pytest.mark.slow),
    ],
)
def test_pages_beside_other_blocks(target: str, drafter: str, grid: tuple[int, int], tmp_path: Path) -> None:
    """With compressed attention; also preempted, and beside n-grams that are mostly right."""
    write(target, tmp_path / "target")
    write(drafter, tmp_path / "drafter")
    config = configured(tmp_path / "target", tmp_path / "drafter", *grid)
    asked = requests(100)
    asked += [([8, 9] * 20, params) for _, params in asked]
    with Ranks(config, ThreadExecutor(config)) as ranks:
        exact = ranks.tokens(asked, speculative=None)
        predicted = [
            (prompt, replace(params, predicted_token_ids=[*tokens[:12], 1, 2, 3]))
            for (prompt, params), tokens in zip(asked, exact, strict=True)
        ]
        assert ranks.tokens(asked, speculation=Always(4, 64), depth=2, max_num_batched_tokens=16) == exact
        assert ranks.stats.num_draft_tokens > 300
        assert ranks.tokens(predicted, speculation=Mixed(4, 64), depth=2) == exact
        assert ranks.stats.num_accepted_tokens > 40
        few = 2 * config.cache.max_blocks(72, 16)
        found = ranks.tokens(asked, speculation=Always(4, 64), num_blocks=few, max_num_batched_tokens=16)
        assert found == exact
        assert ranks.stats.preemptions


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("LFM2", "it has recurrent states"),
        ("Llama 4", "it has chunked attention"),
    ],
)
def test_what_cannot_draft_is_refused(family: str, reason: str, tmp_path: Path) -> None:
    write(family, tmp_path / "drafter")
    write("Llama", tmp_path / "target")
    with pytest.raises(ConfigError, match=f"draft model .* is not supported: {reason}"):
        configured(tmp_path / "target", tmp_path / "drafter")


def test_a_request_continues_on_another_replica_as_it_would_have() -> None:
    """After the output so far, of which its drafter has seen nothing."""
    config = configured(DEMO_MODEL, DEMO_MODEL)
    asked = requests(100)
    with Ranks(config, ThreadExecutor(config)) as ranks:
        exact = ranks.tokens(asked, speculative=None)
        for cut in (1, 7, STEPS - 2):
            reported = [tokens[:cut] for tokens in exact]
            found = ranks.tokens(asked, reported=reported, speculation=Always(4, 16))
            assert [[*before, *after] for before, after in zip(reported, found, strict=True)] == exact
            assert ranks.stats.num_accepted_tokens == ranks.stats.num_draft_tokens
