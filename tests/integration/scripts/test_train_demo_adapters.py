"""Training the demo model's adapters, in small; and how well the bundled ones know their texts."""

from __future__ import annotations

import importlib
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from quire.engine.repository.adapter_folder import open_adapter

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning")]
"""PEFT uses what transformers deprecates."""
BASE = 292 + 279
"""The model's own replies with right facts, to texts and about pictures, of 650."""


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "scripts"))
    return importlib.import_module("train_demo_adapters")


def test_an_adapter_is_trained(training: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("demo_training.THREADS", 1)
    arguments = Namespace(rate=1e-3, steps=2, seed=1)
    training.train_adapter(training.STYLES["pirate"], arguments, tmp_path / "pirate")
    found, bundled = (open_adapter(folder / "pirate") for folder in (tmp_path, training.ADAPTERS))
    assert found.settings == bundled.settings
    assert {name: each.shape for name, each in found.tensors.items()} == {
        name: each.shape for name, each in bundled.tensors.items()
    }
    with found.reading() as read:
        assert all(any(read(name)) for name in found.tensors), "a matrix B of zeros has learned nothing"


@pytest.mark.parametrize("name", ["pirate"])
def test_the_bundled_adapters_know_the_texts_of_the_model(training: Any, name: str) -> None:
    """In their style. When this was written, the pirate had 539 such replies."""
    right, styled = training.score_adapter(training.STYLES[name], training.ADAPTERS / name)
    assert right >= BASE - 40
    assert styled >= 0.95
