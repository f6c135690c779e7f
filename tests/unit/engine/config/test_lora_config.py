"""What the options for adapters become, and what they are refused for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from quire.engine.architecture.model_spec import TransformersModelSpec
from quire.engine.config import lora_config
from quire.engine.config.devices import Devices
from quire.engine.config.engine_config import LoraConfig
from quire.engine.config.lora_config import adapter_bytes
from quire.engine.config.memory_plan import MemoryPlan, format_bytes
from quire.engine.config.plan_text import plan_text
from quire.engine.config.resolve import resolve
from quire.engine.protocol.errors import ConfigError
from tests.unit.engine.config.test_media_config import resolved
from tests.unit.engine.config.test_resolve import _eight_gib, folder, options  # noqa: F401

GIB = 1 << 30
MIXTRAL: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


def test_memory_is_reserved_for_adapters_of_all_linear_layers(tmp_path: Path) -> None:
    model = folder(tmp_path)
    plain, lora = resolve(options(model)), resolve(options(model, enable_lora=True))
    # Queries, keys and values, and gates and ups, have matrices of their own, as wide as the widest.
    values = 3 * (256 + 256) + (256 + 256) + 2 * (256 + 640) + (640 + 256)
    assert plain.lora is None
    assert lora.lora == LoraConfig(num_slots=64, device_bytes=2 * 6 * values * 64 * 4, host_bytes=8 * GIB // 10)
    adapters = MemoryPlan.of(lora).adapters
    assert adapters == lora.lora.device_bytes + lora.lora.host_bytes  # on a CPU both are the host's memory
    assert MemoryPlan.of(lora).fixed[0] >= MemoryPlan.of(plain).fixed[0] + adapters
    assert f"adapters: {format_bytes(lora.lora.device_bytes)} per rank" in plan_text(lora)
    spread = options(model, enable_lora=True, tensor_parallel_size=2, pipeline_parallel_size=2, max_loras=70)
    found = resolve(replace(spread, max_lora_rank=8, lora_memory=2, max_num_seqs=68)).lora
    values = 3 * (256 + 128) + (128 + 256) + 2 * (256 + 320) + (320 + 256)
    assert found == LoraConfig(num_slots=68, device_bytes=70 * 3 * values * 8 * 4, host_bytes=GIB // 2)


def test_the_experts_of_a_token_have_the_rank_together(tmp_path: Path) -> None:
    config = resolve(options(folder(tmp_path, **MIXTRAL)))
    rows = 3 * (256 + 256) + (256 + 256)
    experts = 8 * (2 * (256 + 640) + (640 + 256))
    assert adapter_bytes(config.model, config.parallel, 16) == 6 * 4 * (16 * rows + 8 * experts)
    spread = resolve(options(folder(tmp_path, **MIXTRAL), tensor_parallel_size=2, enable_expert_parallel=True))
    own = 3 * (256 + 128) + (128 + 256)
    assert adapter_bytes(spread.model, spread.parallel, 16) == 6 * 4 * (16 * own + 8 * experts // 2)


def test_the_first_stage_has_those_of_a_tower(tmp_path: Path) -> None:
    tower = 1024 + 4096 + 8192 + 256
    for stages in (1, 2):
        model = resolved(tmp_path, pipeline_parallel_size=stages)
        text = replace(model.model, architecture=replace(model.model.architecture, media=None))
        own = [adapter_bytes(each, model.parallel, 16) for each in (model.model, text)]
        assert own[0] - own[1] == 4 * 16 * tower


def test_steps_with_adapters_have_cuda_graphs_of_their_own(tmp_path: Path) -> None:
    gpu = Devices("cuda", 1, 64 * GIB, order=(0,))
    plain, lora = (resolve(options(folder(tmp_path), device="cuda", enable_lora=on), described=gpu) for on in (0, 1))
    assert lora.lora is not None
    assert MemoryPlan.of(lora).adapters == lora.lora.device_bytes  # and the host's memory is another one
    assert MemoryPlan.of(lora).graphs > 1.2 * MemoryPlan.of(plain).graphs


def test_gpus_do_not_need_more_than_the_hosts_memory(tmp_path: Path) -> None:
    asked = options(folder(tmp_path), device="cuda", enable_lora=True, lora_memory=8)
    gpu, more = Devices("cuda", 1, 64 * GIB, order=(0,)), replace(asked, lora_memory=8.5)
    assert resolve(asked, described=gpu).lora
    with pytest.raises(ConfigError, match=r"--lora-memory 8\.5 \(GiB\): the host has 8 GiB of free memory"):
        resolve(more, described=gpu)
    assert resolve(more, described=replace(gpu, capability=(9, 0))).lora  # of another host


def test_the_draft_model_has_no_adapters(tmp_path: Path) -> None:
    model = folder(tmp_path)
    drafting = resolve(options(model, enable_lora=True, spec_model=model))
    assert drafting.lora is not None
    assert drafting.drafter is not None
    assert drafting.drafter.lora is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"lora_memory": 8}, r"\+ adapters 8\.01 GiB\), 7\.2 GiB available .* or --max-loras, --max-lora-rank or"),
        ({"lora_memory": -1}, "--lora-memory must be at least 0"),
        ({"max_lora_rank": 0}, "--max-lora-rank must be at least 1"),
    ],
)
def test_what_adapters_are_refused_for(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        resolve(options(folder(tmp_path), enable_lora=True, **changes))


def test_models_by_transformers_have_no_adapters(tmp_path: Path) -> None:
    config = resolve(asked := options(folder(tmp_path), enable_lora=True))
    architecture = Mock(TransformersModelSpec)
    architecture.name = "GPTLM"
    model = replace(config.model, architecture=architecture)
    with pytest.raises(ConfigError, match="by transformers; use quire merge"):
        lora_config.resolve(asked, model, config.parallel, config.scheduler, Devices("cpu", 1, GIB))
