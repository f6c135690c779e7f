"""What is read of an adapter's files, and what of it clients may see."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from quire.engine.config.engine_config import EngineConfig
from quire.server.serving.adapter_files import AdapterQuestion, AdapterSource, OpenedAdapter, SharedFolder, make
from tests.fakes.adapters import SETTINGS, Q, write_adapter

SHAPES: Mapping[str, tuple[int, ...]] = {f"{Q}.lora_A.weight": (4, 32), f"{Q}.lora_B.weight": (32, 4)}
Ask = Callable[..., Any]


@pytest.fixture
def ask(config: EngineConfig, tmp_path: Path) -> Ask:
    """Open one adapter."""
    answer = make(config.model)
    (copies := tmp_path / "copies").mkdir()

    def ask(path: Path, root: Path | None = None, **question: Any) -> Any:
        asked = AdapterQuestion(
            (AdapterSource(str(path), None if root is None else str(root)),), str(copies), 2**30, **question
        )
        (found,) = pickle.loads(answer(pickle.dumps(asked)))
        return found

    return ask


def write(folder: Path, **settings: Any) -> Path:
    return write_adapter(folder, SHAPES, SETTINGS | settings)


def _link(link: Path, target: Path) -> None:
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(target)


def test_no_file_outside_the_root_is_read(ask: Ask, tmp_path: Path) -> None:
    (outside := tmp_path / "outside").mkdir()
    (secret := outside / "default.jinja").write_text("secret")
    templates = {
        "chat_template.jinja": secret,
        "chat_template.json": secret,
        "tokenizer_config.json": secret,
        "additional_chat_templates/default.jinja": secret,
        "additional_chat_templates": outside,
    }
    for number, (name, target) in enumerate(templates.items()):
        adapter = write(tmp_path / "root" / str(number))
        _link(adapter / name, target)
        found = ask(adapter, tmp_path / "root")
        assert isinstance(found, str), name
        assert "is not below --lora-root" in found, name
    adapter = write(tmp_path / "root" / "inside")
    (adapter / "own").write_text("own")
    _link(adapter / "additional_chat_templates" / "default.jinja", adapter / "own")
    found = ask(adapter, tmp_path / "root")
    assert isinstance(found, OpenedAdapter)
    assert found.chat_template == "own"


def test_headers_are_checked_before_anything_is_copied(ask: Ask, tmp_path: Path) -> None:
    """Also when only they are read, at the start of the server."""
    bad = write_adapter(tmp_path / "bad", {name.replace("q_proj", "none"): shape for name, shape in SHAPES.items()})
    for reads_weights in (False, True):
        found = ask(bad, reads_weights=reads_weights)
        assert isinstance(found, str)
        assert "none.lora_A.weight: the base has no module" in found
    assert [*(tmp_path / "copies").iterdir()] == []
    assert ask(write(tmp_path / "good"), reads_weights=False) is None


def test_chat_templates_are_valid_texts(ask: Ask, tmp_path: Path) -> None:
    adapter = write(tmp_path / "a")
    (adapter / "tokenizer_config.json").write_text(json.dumps({"chat_template": "x\ud800"}))
    assert "the chat template is not valid Unicode" in ask(adapter)


def test_copies_at_the_same_time_share_the_budget(tmp_path: Path) -> None:
    shared = SharedFolder(str(tmp_path))
    with shared.space(60, 100) as first:
        assert first is not None
        with shared.space(60, 100) as second, shared.space(40, 100) as third:
            assert (second is None, third is None) == (True, False)
        kept = shared.keep(first, b"digest")
    with shared.space(60, 100) as other:
        assert other is not None
    assert kept.is_dir()
    shared.drop(b"digest")
    assert not kept.exists()
