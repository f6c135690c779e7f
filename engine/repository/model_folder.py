"""Finds the folder of a model: one that exists, a Hugging Face repository's snapshot, or one that is written for a GGUF
file or for Mistral's own layout."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from quire.engine.protocol.errors import ConfigError
from quire.engine.repository import gguf_folder, mistral_folder, model_files

_SPLIT = re.compile(r"(.*?)(?:-(\d{5})-of-(\d{5}))?\.gguf", re.DOTALL)
_QUANTIZATION = re.compile(r"(?:^|[-._])((?:UD-)?(?:I?Q\d\w*|TQ\d_\d|MXFP4\w*|NVFP4|BF16|F16|F32))$", re.IGNORECASE)
"""How names of files end, without the numbers of split models."""
_NOT_MODELS = ("mmproj", "imatrix")


def locate(model: str, revision: str | None, download_dir: str | None, *, has_tokenizer: bool = True) -> Path:
    """Return the folder of a model: `model` itself, the snapshot of a Hugging Face repository, without its weights, or
    the folder that is written for a GGUF file or for Mistral's own layout, with its tokenizer unless another one is
    used.

    A GGUF file is named by its path, or as `owner/name:Q4_K_M` or `folder:Q4_K_M`. Repositories are downloaded to
    `download_dir`, by default Hugging Face's cache, and of GGUF files only the named ones. Raises `ConfigError` if the
    model cannot be read.
    """
    if (parts := _parts(model)) is not None:
        file = _find(*parts, revision, download_dir)
    elif model.endswith(".gguf"):
        file = Path(model).expanduser()
    else:
        folder = model_files.locate(model, revision, download_dir)
        if not (folder / model_files.PARAMS).exists():
            return folder
        names = [path.name for path in folder.iterdir()]
        if not Path(model).expanduser().is_dir():
            names = model_files.list_repository(model, revision) or names
        if not mistral_folder.is_layout(names):
            return folder
        return mistral_folder.folder_of(folder, names, _cache("mistral"), has_tokenizer=has_tokenizer)
    return gguf_folder.folder_of(file, _cache("gguf"), has_tokenizer=has_tokenizer)


def is_gguf(model: str) -> bool:
    """Whether the model is a GGUF file."""
    return model.endswith(".gguf") or _parts(model) is not None


def _parts(model: str) -> tuple[str, str] | None:
    """The repository or folder, and the quantization, of `owner/name:Q4_K_M`; None: the model is named otherwise."""
    name, _, quantization = model.rpartition(":")
    is_named = name and quantization and "/" not in quantization and not Path(model).expanduser().exists()
    return (name, quantization) if is_named else None


def _find(name: str, quantization: str, revision: str | None, download_dir: str | None) -> Path:
    """The first file of a quantization; the files are downloaded if `name` is a repository."""
    folder = model_files.locate(name, revision, download_dir, patterns=())
    paths = [str(path.relative_to(folder)) for path in folder.rglob("*.gguf")]
    if Path(name).expanduser().is_dir():
        return folder / choose(name, quantization, paths)[0]
    files = choose(name, quantization, model_files.list_repository(name, revision) or paths)
    return model_files.download(name, revision, download_dir, files) / files[0]


def choose(name: str, quantization: str, paths: Sequence[str]) -> list[str]:
    """The files of a quantization, in the order of their numbers, among the `paths` in a repository or folder `name`.

    Raises `ConfigError` with the names that can be chosen unless it is one model.
    """
    models: dict[str, dict[int, str]] = defaultdict(dict)
    counts: dict[str, int] = {}
    for path in paths:
        match = _SPLIT.fullmatch(path)
        if match is not None and not Path(path).name.lower().startswith(_NOT_MODELS):
            models[match[1]][int(match[2] or 1)] = path
            counts[match[1]] = int(match[3] or 1)
    if not models:
        raise ConfigError(f"{name} has no model in *.gguf files; use {name} without :{quantization}")
    names = {stem: Path(stem).name for stem in models}
    ends = {stem: match[1] if (match := _QUANTIZATION.search(own)) else own for stem, own in names.items()}
    wanted = quantization.lower()
    found = [stem for stem in models if wanted in (names[stem].lower(), ends[stem].lower())]
    if len(found) > 1:
        named = ", ".join(f"{name}:{names[stem]}" for stem in sorted(found))
        raise ConfigError(f"{name}:{quantization} is the name of {len(found)} models; use one of {named}")
    if not found:
        raise ConfigError(f"{name} has no GGUF file of {quantization}; it has {', '.join(sorted(set(ends.values())))}")
    files, count = models[found[0]], counts[found[0]]
    if missing := sorted(set(range(1, count + 1)) - files.keys()):
        raise ConfigError(f"{name}: of the {count} files {found[0]}-….gguf, number {missing[0]} is missing")
    return [files[number] for number in range(1, count + 1)]


def _cache(kind: str) -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quire" / kind
