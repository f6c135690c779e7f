"""The division of a worker's budget in benchmarks/kv_cache_effect.py, and its report."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from quire.engine.config import devices
from quire.engine.config.options import DEMO_MODEL, EngineOptions
from quire.engine.protocol.errors import ConfigError

BUDGET, LENGTH = 163 << 20, 192


@pytest.fixture
def effect(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    monkeypatch.setattr(devices, "free_host_memory", lambda: 8 << 30)
    return importlib.import_module("kv_cache_effect")


def rooms(effect: Any, folder: Path, budget: int) -> list[Any]:
    (folder / "config.json").write_text(json.dumps(effect.SHAPE))
    options: dict[str, Any] = {
        "model": str(folder),
        "tokenizer": str(DEMO_MODEL),
        "load_format": "dummy",
        "device": "cpu",
        "max_model_len": LENGTH,
        "max_num_batched_tokens": 128,
        "max_num_seqs": 24,
    }
    asked = [EngineOptions(**options, tensor_parallel_size=tp) for tp in effect.LAYOUTS]
    return [effect.room_for(one, budget, LENGTH)[1] for one in asked]


def test_a_budget_is_shared_out(effect: Any, tmp_path: Path) -> None:
    one, two = rooms(effect, tmp_path, BUDGET)
    for room in (one, two):
        assert room.weights + room.workspace + room.kv_cache == BUDGET
    assert two.weights == pytest.approx(one.weights / 2, rel=0.01)
    assert 13 < two.blocks / one.blocks < 14.5
    assert (one.requests, one.blocks) == (25 / 12, 25)


def test_a_budget_without_room_for_a_request_is_refused(effect: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="leave nothing of 150 MiB"):
        rooms(effect, tmp_path, 150 << 20)
    with pytest.raises(ConfigError, match="less than one request of 192"):
        rooms(effect, tmp_path, 152 << 20)


def test_the_figures_are_shown(effect: Any, tmp_path: Path) -> None:
    both = [
        effect.Room(1, 256 << 20, 6 << 20, 20 << 20, 20, 3.3),
        effect.Room(2, 128 << 20, 6 << 20, 148 << 20, 280, 46.7),
    ]
    text = effect.table(both, [10.0, 40.0], [1.0, 4.1])
    assert "| TP 2 | 128 MiB | 6 MiB | 148 MiB | 280 | 14.0 | 46.7 | 40.0 | 4.1 |" in text
    picture = tmp_path / "effect.svg"
    effect.draw(str(picture), both, [10.0, 40.0], [1.0, 4.1])
    drawn = picture.read_text()
    assert ">14.0 ×<" in drawn
    assert ">4.1 ×<" in drawn
