"""Finds the folder of a model: one that exists, a Hugging Face repository's snapshot, or that of a GGUF file."""

from __future__ import annotations

import os
from pathlib import Path

from quire.engine.config import gguf_folder, model_files


def locate(model: str, revision: str | None, download_dir: str | None, *, has_tokenizer: bool = True) -> Path:
    """Return the folder of a model: `model` itself, the snapshot of a Hugging Face repository, without its weights, or
    the folder that is written for a GGUF file, with its tokenizer unless another one is used.

    Repositories are downloaded to `download_dir`, by default Hugging Face's cache. Raises `ConfigError` if the model
    cannot be read.
    """
    if is_gguf(model):
        return gguf_folder.folder_of(Path(model).expanduser(), _cache(), has_tokenizer=has_tokenizer)
    return model_files.locate(model, revision, download_dir)


def is_gguf(model: str) -> bool:
    """Whether the model is a GGUF file."""
    return model.endswith(".gguf")


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quire" / "gguf"
