"""Real ranks compute prompts, and others with another layout continue: the tokens are those of one replica."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.engine.architecture.families import transformers_backend
from quire.engine.config.options import DEMO_MODEL
from quire.engine.models.transformers_backend import describe
from quire.engine.worker import arena_link
from tests.fakes.core_with_ranks import LocalStore, Ranks
from tests.fakes.draft_heads import HEAD, write_eagle3
from tests.fakes.families import write
from tests.fakes.threads import ThreadExecutor
from tests.integration.engine.core.test_kv_tiers import FAMILIES, MIN_TOKENS, SLOW, RemoteStore, configured, requests


def check(folder: Path, prefill: tuple[int, int], decode: tuple[int, int], nodes: int = 1, **options: Any) -> None:
    """Prompts in one step and in chunks, expected or not; each time, the second replica loads all but a block.
    Ranks of the first one are on so many hosts."""
    one, other = configured(folder, *prefill, **options), configured(folder, *decode, **options)
    one = replace(one, parallel=replace(one.parallel, nodes=nodes))
    asked, size = requests(), one.cache.block_size
    with Ranks(one, ThreadExecutor(one)) as first, Ranks(other, ThreadExecutor(other)) as second:
        expected = second.tokens(asked, enable_prefix_caching=False)
        for is_expected, settings in ((True, {"max_num_batched_tokens": 32}), (True, {}), (False, {})):
            second.store = store = LocalStore(one) if nodes == 1 else RemoteStore(one)
            outputs = second.continued(first, asked, is_expected=is_expected, **settings)
            assert [[token for each in own for token in each.token_ids] for own in outputs] == expected
            for (prompt, _), (handed, continued, *_) in zip(asked, outputs, strict=True):
                assert handed.is_handed_over
                if (length := (len(prompt) - 1) // size * size) >= MIN_TOKENS:
                    assert continued.num_cached_tokens >= length
            assert sum(continued.num_loaded_tokens[0] for _, continued, *_ in outputs) > 150
            assert second.stats.kv_failed_load_tokens == 0
            store.close()


def test_attention(tmp_path: Path) -> None:
    check(DEMO_MODEL, (2, 1), (1, 1))


@pytest.mark.slow
def test_what_transformers_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_backend, "describe", describe.describe)  # without a process of its own
    check(DEMO_MODEL, (1, 1), (2, 1), model_impl="transformers")


@pytest.mark.slow
def test_the_layers_of_a_drafter(tmp_path: Path) -> None:
    write_eagle3("Llama", tmp_path)
    options = {"method": "eagle3", "model": str(tmp_path / HEAD), "num_speculative_tokens": 3}
    check(tmp_path, (2, 1), (1, 1), speculative_config=options)


@pytest.mark.slow
def test_layers_leave_another_host_while_the_next_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_link, "SECONDS", 10.0)
    check(DEMO_MODEL, (2, 2), (1, 1), nodes=2)


@pytest.mark.parametrize(
    "family",
    [
        "Qwen3-Next",
        *(pytest.param(family, marks=pytest.mark.slow) for family in (*FAMILIES, *SLOW[::3]) if family != "Qwen3-Next"),
    ],
)
def test_families(family: str, tmp_path: Path) -> None:
    write(family, tmp_path)
    check(tmp_path, (1, 2), (2, 1))
