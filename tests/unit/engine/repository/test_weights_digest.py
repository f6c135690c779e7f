"""Digests of files and of a model's weights."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from quire.engine.repository import weights_digest
from quire.engine.repository.gguf_folder import folder_of
from quire.engine.repository.weights_digest import digests
from tests.fakes.gguf_models import add_tensors, close, config_of, tensors_of, writer


def test_a_file_is_hashed_once_for_each_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(weights_digest, "_MIN_BYTES", 1)
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"1")
    count, compute = [0], hashlib.file_digest

    def counted(*arguments: Any) -> Any:
        count[0] += 1
        return compute(*arguments)

    monkeypatch.setattr(hashlib, "file_digest", counted)
    first = digests([file])
    assert first == {"model.safetensors": hashlib.sha256(b"1").hexdigest()}
    assert (digests([file]), count) == (first, [1])
    other = tmp_path / "other"
    other.write_bytes(b"2")
    other.rename(file)
    assert (digests([file]), count) == ({"model.safetensors": hashlib.sha256(b"2").hexdigest()}, [2])
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))  # not a folder
    assert (digests([file]), count) == ({"model.safetensors": hashlib.sha256(b"2").hexdigest()}, [3])


def test_the_digest_of_a_model_is_that_of_its_content(tmp_path: Path) -> None:
    def model(name: str, last: float = 0.0, config: str = "{}", **files: str) -> bytes:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(config)
        save_file({"a": np.array([1.0, last], np.float32)}, folder / "model.safetensors")
        for each, text in files.items():
            (folder / each.replace("_", ".")).write_text(text)
        return weights_digest.weights_digest(folder, "safetensors")

    same = {model("first"), model("at another place"), model("with a tokenizer", tokenizer_json="{}")}
    other = {model("weights", last=1.0), model("settings", config="{ }"), model("code", model_py="")}
    assert (len(same), len(other), len(same | other)) == (1, 3, 4)
    dummy = weights_digest.weights_digest(tmp_path / "first", "dummy")
    assert dummy not in same | other


def test_the_digest_of_a_gguf_file_does_not_depend_on_its_place(tmp_path: Path) -> None:
    def model(name: str, value: float) -> bytes:
        config, file = config_of("LlamaForCausalLM"), tmp_path / f"{name}.gguf"
        made = writer(file, config)
        add_tensors(
            made, config, {each: np.full(shape, value, np.float32) for each, shape in tensors_of(config).items()}
        )
        close(made)
        folder = folder_of(file, tmp_path / "cache", has_tokenizer=False)
        return weights_digest.weights_digest(folder, "gguf")

    assert model("a", 0) == model("b", 0) != model("c", 1)
