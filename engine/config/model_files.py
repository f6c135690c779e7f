"""Finding a model's files and reading their headers, before any weight is read. No torch here."""

from __future__ import annotations

import json
import struct
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.engine.protocol.errors import ConfigError

_PATTERNS = ["*.json", "*.jinja", "*.model", "*.txt", "tokenizer*", "*.py"]
_INDICES = {"safetensors": "model.safetensors.index.json", "pt": "pytorch_model.bin.index.json"}
_WEIGHTS = {"safetensors": "model*.safetensors", "pt": "pytorch_model*.bin"}
"""Of a repository, which may hold the weights twice."""
_LEGACY_TORCH = b"\x80\x02\x8a\nl\xfc\x9cF\xf9"
"""A pickle that begins with torch's magic number: files of torch before 1.6."""


def locate(model: str, revision: str | None) -> Path:
    """The folder of a model: `model` itself, or the snapshot of a Hugging Face repository, without its weights.

    Raises `ConfigError` for what is not there, offline and gated repositories included.
    """
    path = Path(model).expanduser()
    try:
        if path.is_dir():
            next(path.iterdir(), None)  # may it be read?
            return path.resolve()
        exists = path.exists()
    except OSError as error:
        raise ConfigError(f"{model}: the folder cannot be read: {error.strerror}; check its permissions") from None
    if exists or model.startswith(("/", ".", "~")) or model.count("/") != 1:
        raise ConfigError(f"{model}: no such model folder (a Hugging Face repository would be named as owner/name)")
    return _download(model, revision, _PATTERNS)


def fetch_weights(
    model: str, revision: str | None, folder: Path, load_format: str, subfolders: Sequence[str] = ()
) -> None:
    """Download the weights of a repository, and of the folders `subfolders` in it, into its snapshot `folder`; a local
    folder is left as it is."""
    if not Path(model).expanduser().is_dir():
        names = _files_in_index(folder, load_format) or [_WEIGHTS[load_format]]
        _download(model, revision, [*names, *(f"{each}/*{Path(_WEIGHTS[load_format]).suffix}" for each in subfolders)])


def _files_in_index(folder: Path, load_format: str) -> list[str]:
    """The files that the folder's index names; none where it has no index."""
    index = folder / _INDICES[load_format]
    return sorted(set(read_json(index).get("weight_map", {}).values())) if index.exists() else []


def check_weights(folder: Path, load_format: str) -> None:
    """See that the files are there and whole; raises `ConfigError`."""
    if load_format == "safetensors":
        read_headers(folder)
        return
    for file in torch_files(folder):
        try:
            with file.open("rb") as stream:
                is_known = zipfile.is_zipfile(stream)
                stream.seek(0)
                is_known |= stream.read(len(_LEGACY_TORCH)) == _LEGACY_TORCH
        except OSError as error:
            raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
        if not is_known:
            raise ConfigError(f"{file}: truncated, or not a file of torch.save; fetch it again")


def torch_files(folder: Path) -> list[Path]:
    """The folder's pytorch_model*.bin, those of the index where there is one."""
    files = [folder / name for name in _files_in_index(folder, "pt")] or sorted(folder.glob(_WEIGHTS["pt"]))
    if not files:
        raise ConfigError(f"{folder}: no pytorch_model*.bin there, which --load-format pt reads; leave it out")
    return files


def _download(repository: str, revision: str | None, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=patterns))
    except GatedRepoError:
        raise ConfigError(
            f"{repository} is gated: ask for access on its page at huggingface.co, "
            "then set HF_TOKEN or run `hf auth login`"
        ) from None
    except RevisionNotFoundError:
        raise ConfigError(f"{repository} has no revision {revision!r}; see --revision") from None
    except RepositoryNotFoundError:
        raise ConfigError(
            f"{repository}: neither a local folder nor a repository that you can see on Hugging Face "
            "(a private one needs HF_TOKEN)"
        ) from None
    except HFValidationError as error:
        raise ConfigError(f"{repository}: {error}") from None
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HfHubHTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"{repository}: cannot be downloaded and is not in the local cache ({reason}); "
            "check the network and HF_HUB_OFFLINE, or name a local folder"
        ) from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, or `ConfigError` with the file's name."""
    content = _parse(path)
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: a JSON object is expected")
    return content


def read_json_list(path: Path) -> list[dict[str, Any]]:
    """A JSON list of objects from a file, or `ConfigError` with the file's name."""
    content = _parse(path)
    if not isinstance(content, list) or not all(isinstance(entry, dict) for entry in content):
        raise ConfigError(f"{path}: a JSON list of objects is expected")
    return content


def _parse(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path.parent}: no {path.name} there; is it a Hugging Face model folder?") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from None


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a checkpoint, from the header of its file."""

    file: Path
    dtype: str
    """As safetensors spells it: F32, BF16, F16, …"""
    shape: tuple[int, ...]
    name: str
    """In that file."""


def read_headers(folder: Path) -> dict[str, TensorInfo]:
    """Every tensor of the folder's *.safetensors by name; truncated or missing files raise `ConfigError`.

    Format: 8 bytes of header length, the header (JSON), then the data
    (https://github.com/huggingface/safetensors#format).
    """
    files = [folder / name for name in _files_in_index(folder, "safetensors")] or sorted(folder.glob("*.safetensors"))
    if not files:
        if pickled := sorted(file.name for file in folder.glob("*.bin")):
            raise ConfigError(
                f"{folder}: no *.safetensors there, only {', '.join(pickled[:3])}{', …' * (len(pickled) > 3)}: "
                "--load-format pt reads pytorch_model*.bin (tensors only, no code in them is run)"
            )
        raise ConfigError(
            f"{folder}: no *.safetensors there (--load-format pt reads pytorch_model*.bin, "
            "--load-format dummy serves random weights)"
        )
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        for name, entry in _read_header(file).items():
            if name != "__metadata__":
                tensors[name] = TensorInfo(file, str(entry.get("dtype")), tuple(entry.get("shape", ())), name)
    return tensors


def _read_header(file: Path) -> dict[str, Any]:
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
            if 8 + length > size:
                raise ConfigError(f"{file}: truncated ({size:,} bytes, less than its header); fetch it again")
            header: dict[str, Any] = json.loads(stream.read(length))
            end = max((e["data_offsets"][1] for n, e in header.items() if n != "__metadata__"), default=0)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{file}: not a safetensors file; fetch it again") from None
    if size != 8 + length + end:
        raise ConfigError(f"{file}: truncated: {size:,} bytes of {8 + length + end:,}; fetch it again")
    return header
