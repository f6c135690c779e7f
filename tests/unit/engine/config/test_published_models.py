"""Every published model in `tests/fakes/published_configs`, planned at its real size without weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from quire.engine.config import devices
from quire.engine.config.options import EngineOptions
from quire.engine.config.resolve import resolve
from tests.fakes.published import FOLDER, MODELS, config


@pytest.fixture(autouse=True)
def _large_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "free_host_memory", lambda: 1 << 43)


def test_every_model_has_its_files_and_its_numbers() -> None:
    assert {path.name for path in FOLDER.iterdir()} == MODELS.keys()


@pytest.mark.parametrize("name", MODELS)
def test_a_published_model_is_planned(name: str) -> None:
    """With its parameters, length, format and ends of answers, and by Quire's own implementation."""
    options = EngineOptions(model=str(FOLDER / name), load_format="safetensors", device="cpu", model_impl="quire")
    model, published = resolve(options).model, MODELS[name]
    arch, quantized = model.architecture, model.quantized
    arch = arch if published.has_tower else replace(arch, media=None)
    assert published.has(arch.stage_parameters([range(arch.num_layers)], 0, 1))
    assert (None if quantized is None else quantized.name) == published.quantization
    stated = config(name)
    text: dict[str, Any] = stated.get("text_config", {})
    assert model.max_model_len == (published.length or {**stated, **text}["max_position_embeddings"])
    sources = (config(name, "generation_config.json"), stated, text)
    eos: Any = next((each["eos_token_id"] for each in sources if each.get("eos_token_id") is not None), [])
    assert model.eos_token_ids == tuple(eos if isinstance(eos, list) else [eos])
