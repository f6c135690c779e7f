"""Memory of keys and values in 4 bits, and the models that cannot have them."""

from __future__ import annotations

from typing import Any

import pytest

from quire.engine.config import devices
from quire.engine.config.engine_config import EngineConfig
from quire.engine.config.kv_cache_groups import recent_layers
from quire.engine.config.memory_plan import MemoryPlan
from quire.engine.config.options import EngineOptions
from quire.engine.config.plan_text import plan_text
from quire.engine.config.resolve import resolve
from quire.engine.protocol.errors import ConfigError
from tests.fakes.published import FOLDER


@pytest.fixture(autouse=True)
def _large_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "free_host_memory", lambda: 1 << 43)


def configured(name: str, **options: Any) -> EngineConfig:
    plain: dict[str, Any] = {"load_format": "dummy", "dtype": "bfloat16", "device": "cpu", "kv_cache_dtype": "int4"}
    plain |= {"max_model_len": 4096, "max_num_seqs": 64, "max_num_batched_tokens": 2048, **options}
    return resolve(EngineOptions(model=str(FOLDER / name), **plain))


def test_the_plan_has_blocks_that_are_not_complete() -> None:
    """Two for each request and layer, and those of a step's tokens, which layers use one after another; with a draft
    model, some more."""
    config = configured("Llama-3.1-8B-Instruct", tensor_parallel_size=2, pipeline_parallel_size=2)
    plan, block = MemoryPlan.of(config), 16 * 2 * 4 * 128 * 2
    assert plan.kv_block == (16 * 4 * (16 * 128 + 4 * (16 + 128)),) * 2
    assert plan.recent == ((16 * 2 * 64 + 2048 // 16) * block,) * 2
    assert all(fixed > recent for fixed, recent in zip(plan.fixed, plan.recent, strict=True))
    assert "tokens in int4 and 68 MiB in bfloat16 for the newest tokens" in plan_text(config)
    drafting = configured("Llama-3.1-8B-Instruct", spec_model=str(FOLDER / "Llama-3.2-1B-Instruct")).cache.recent
    assert drafting is not None
    assert drafting.per_request == 1 + 3  # at most 16 drafts, and as many ahead


def test_a_layer_that_others_read_has_a_step_for_itself() -> None:
    """Others of its shape run before the last one that reads it."""
    found = recent_layers(configured("gemma-4-E4B-it"), 0)
    assert [numbers for _, numbers in found[2:]] == [[22], [23]]
    assert sorted(number for _, numbers in found for number in numbers) == [*range(24)]


def test_models_without_such_keys_and_values_are_refused() -> None:
    refused = "--kv-cache-dtype int4 is not supported for "
    for name, reason in {
        "DeepSeek-V2-Lite": "whose attention is latent, sparse or compressed; use auto",
        "MiniMax-M3": "whose attention is latent, sparse or compressed; use auto",
        "gemma-3-4b-it": "whose tokens attend to later ones; use int8, fp8 or auto",
        "mamba-130m-hf": "which keeps no keys and values; use auto",
        "DeepSeek-V4-Flash": "whose cache has what entries are computed from; use auto",
    }.items():
        with pytest.raises(ConfigError, match=f"{refused}.*{reason}"):
            configured(name)
    for size in (15, 1024):
        with pytest.raises(
            ConfigError, match=f"128 features, with --block-size {size}; use an even one that divides 512"
        ):
            configured("Qwen3-0.6B", block_size=size)
