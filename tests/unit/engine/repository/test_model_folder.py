"""GGUF files of a repository or folder, chosen by the name of their quantization."""

from __future__ import annotations

import json
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import pytest

from quire.engine.protocol.errors import ConfigError
from quire.engine.repository.gguf_folder import file_of
from quire.engine.repository.model_folder import choose, is_gguf, locate
from tests.fakes.gguf_models import add_tensors, close, config_of, tensors_of, writer

_OTHERS = (
    "README.md config.json mmproj-Some-7B-Q8_0.gguf Some-7B.imatrix Some-7B-Q8_0.gguf some-7b.q4_k_m.gguf "
    "Some-7B-IQ4_XS.gguf odd.gguf Some-7B-Q2_K-00001-of-00002.gguf Some-7B-UD-Q6_K.gguf Some-7B-Q6_K.gguf"
)
FILES = (*_OTHERS.split(), *(f"BF16/Some-7B-BF16-{number:05}-of-00003.gguf" for number in (2, 1, 3)))


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        ("Q4_K_M", ["some-7b.q4_k_m.gguf"]),
        ("q8_0", ["Some-7B-Q8_0.gguf"]),
        ("bf16", [f"BF16/Some-7B-BF16-{number:05}-of-00003.gguf" for number in (1, 2, 3)]),
        ("odd", ["odd.gguf"]),
        ("UD-Q6_K", ["Some-7B-UD-Q6_K.gguf"]),
        ("Q6_K", ["Some-7B-Q6_K.gguf"]),
        ("Some-7B-Q6_K", ["Some-7B-Q6_K.gguf"]),
    ],
)
def test_names_choose_files(quantization: str, expected: list[str]) -> None:
    assert choose("owner/name", quantization, FILES) == expected


@pytest.mark.parametrize(
    ("quantization", "files", "problem"),
    [
        ("Q4_K", FILES, "has no GGUF file of Q4_K; it has BF16, IQ4_XS, Q2_K, Q6_K, Q8_0, UD-Q6_K, odd, q4_k_m"),
        (
            "Q6_K",
            (*FILES, "B-Q6_K.gguf"),
            "the name of 2 models; use one of owner/name:B-Q6_K, owner/name:Some-7B-Q6_K",
        ),
        ("Q2_K", FILES, r"of the 2 files Some-7B-Q2_K-….gguf, number 2 is missing"),
        ("Q8_0", FILES[:4], r"no model in \*.gguf files; use owner/name without :Q8_0"),
    ],
)
def test_other_names_are_refused_with_those_that_exist(quantization: str, files: tuple[str, ...], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        choose("owner/name", quantization, files)


def write(path: Path) -> Path:
    config = config_of("LlamaForCausalLM")
    made = writer(path, config)
    add_tensors(made, config, {name: np.zeros(shape, np.float32) for name, shape in tensors_of(config).items()})
    close(made)
    return path


def test_only_the_files_of_the_quantization_are_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    stored = write(tmp_path / "Some-7B-Q8_0.gguf")
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    asked: list[tuple[str, str | None]] = []

    def snapshot_download(
        repository: str, *, revision: str | None, cache_dir: str | None, allow_patterns: list[str]
    ) -> str:
        for file in FILES:
            if any(fnmatch(file, pattern) for pattern in allow_patterns):
                asked.append((file, revision))
                (snapshot / file).symlink_to(stored)
        return str(snapshot)

    def list_repo_files(repository: str, *, revision: str | None) -> list[str]:
        if asked:
            raise ConnectionError("refused")
        return list(FILES)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.setattr("huggingface_hub.list_repo_files", list_repo_files)
    folder = locate("owner/name:Q8_0", "v1", None, has_tokenizer=False)
    assert asked == [("Some-7B-Q8_0.gguf", "v1")]
    assert json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"] == "gguf"
    assert file_of(folder) == snapshot / "Some-7B-Q8_0.gguf"
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda repository, **options: str(snapshot))
    assert locate("owner/name:Q8_0", "v1", None, has_tokenizer=False) == folder, "offline, from the snapshot"


def test_folders_may_have_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("Some-7B-Q8_0.gguf", "Some-7B-F16.gguf"):
        write(tmp_path / name)
    model = f"{tmp_path}:F16"
    assert is_gguf(model)
    assert file_of(locate(model, None, None, has_tokenizer=False)) == tmp_path / "Some-7B-F16.gguf"
    with pytest.raises(ConfigError, match="it has F16, Q8_0"):
        locate(f"{tmp_path}:Q4_0", None, None)
    with pytest.raises(ConfigError, match="no such model folder"):
        locate(f"{tmp_path}/none:Q4_0", None, None)
