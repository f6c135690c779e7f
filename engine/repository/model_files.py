"""Finds a model's files and reads their headers, before any weight is read. No torch."""

from __future__ import annotations

import contextlib
import fnmatch
import json
import math
import os
import stat
import struct
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

from quire.engine.protocol.errors import ConfigError, reason_of
from quire.engine.repository import mistral_layout

_PATTERNS = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "tokenizer*", "*.py")
_READ = (*_PATTERNS, "*.safetensors", "*.bin", "*.gguf")
"""The files that are read in a local folder."""
LoadFormat = Literal["safetensors", "pt", "mistral"]
"""mistral: safetensors in Mistral's own layout."""
PARAMS = "params.json"
"""The settings of a model in Mistral's own layout."""
_INDICES = {
    "safetensors": "model.safetensors.index.json",
    "pt": "pytorch_model.bin.index.json",
    "mistral": "consolidated.safetensors.index.json",
}
_WEIGHTS = {"safetensors": "model*.safetensors", "pt": "pytorch_model*.bin", "mistral": "consolidated*.safetensors"}
"""The files to download by default; a repository may contain the weights in several formats."""
_DTYPE_BITS = {
    **dict.fromkeys(("F64", "I64", "U64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 8),
}
"""Bits of an element, by safetensors' name of its type; there are others."""
_MAX_HEADER = 100_000_000
"""Bytes, as in safetensors' own reader."""
_LEGACY_TORCH = b"\x80\x02\x8a\nl\xfc\x9cF\xf9"
"""Start of files saved by torch before 1.6: a pickle of torch's magic number."""


def locate(model: str, revision: str | None, download_dir: str | None, patterns: Sequence[str] = _PATTERNS) -> Path:
    """Return the folder of a model: `model` itself, or the snapshot of a Hugging Face repository, with the files that
    match, by default all but its weights.

    Repositories are downloaded to `download_dir`, by default Hugging Face's cache. Raises `ConfigError` if the folder
    or the repository cannot be read.
    """
    path = Path(model).expanduser()
    try:
        if path.is_dir():
            for file in path.iterdir():
                if any(fnmatch.fnmatch(file.name, pattern) for pattern in _READ) and not file.is_dir():
                    check_regular(file)
            return path.resolve()
        exists = path.exists()
    except OSError as error:
        raise ConfigError(f"{model}: the folder cannot be read: {error.strerror}; check its permissions") from None
    if exists or model.startswith(("/", ".", "~")) or model.count("/") > 1:
        raise ConfigError(
            f"{model}: no such model folder (the name of a Hugging Face repository has the form owner/name, or name)"
        )
    return download(model, revision, download_dir, patterns)


def check_regular(file: Path) -> None:
    """Raise `ConfigError` for what is no regular file, if it exists: reading a FIFO or a device may never end."""
    with contextlib.suppress(OSError):  # reading it says why
        mode = file.stat().st_mode
        kinds = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
        if (kind := kinds.get(stat.S_IFMT(mode))) is not None:
            raise ConfigError(f"{file}: {kind}, not a regular file")


def find_load_format(model: str, revision: str | None, folder: Path) -> LoadFormat:
    """Return the format of the weights in `folder`, or in the repository whose snapshot it is: pt only if there are
    pytorch_model*.bin and no *.safetensors, mistral only if there are no others than consolidated*.safetensors, beside
    a params.json.
    """
    names = [path.name for path in folder.iterdir()]
    if (found := weights_among(names)) is not None or Path(model).expanduser().is_dir():
        return found or "safetensors"
    return weights_among(list_repository(model, revision) or names) or "safetensors"


def list_repository(repository: str, revision: str | None) -> list[str]:
    """The files of a Hugging Face repository; empty if it cannot be asked: offline its snapshot has to do."""
    import httpx
    from huggingface_hub import list_repo_files
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    with contextlib.suppress(HfHubHTTPError, OfflineModeIsEnabled, httpx.HTTPError, OSError):
        return list_repo_files(repository, revision=revision)
    return []


def size_of(repository: str, revision: str | None, patterns: Sequence[str]) -> int:
    """Bytes of the files of a Hugging Face repository that match, downloaded or not; 0 if it cannot be asked: then
    nothing can be downloaded."""
    import httpx
    from huggingface_hub import model_info
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    with contextlib.suppress(HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, httpx.HTTPError, OSError):
        files = model_info(repository, revision=revision, files_metadata=True).siblings or []
        wanted = [file for file in files if any(fnmatch.fnmatch(file.rfilename, each) for each in patterns)]
        return sum(file.size or 0 for file in wanted)
    return 0


def weights_among(names: Sequence[str]) -> LoadFormat | None:
    """Return the format of the weights in a folder with files of these names; None if there are none."""
    consolidated = fnmatch.filter(names, _WEIGHTS["mistral"])
    if _INDICES["safetensors"] in names or set(fnmatch.filter(names, "*.safetensors")) - set(consolidated):
        return "safetensors"
    if consolidated:
        return "mistral" if PARAMS in names else "safetensors"
    return "pt" if _INDICES["pt"] in names or fnmatch.filter(names, _WEIGHTS["pt"]) else None


def fetch_weights(
    model: str,
    revision: str | None,
    download_dir: str | None,
    folder: Path,
    load_format: str,
    subfolders: Sequence[str] = (),
) -> None:
    """Download the weights of a repository and of `subfolders` in it into its snapshot `folder`.

    Does nothing if `model` is a local folder.
    """
    if not Path(model).expanduser().is_dir():
        names = _files_in_index(folder, load_format) or [_WEIGHTS[load_format]]
        names += [f"{each}/*{Path(_WEIGHTS[load_format]).suffix}" for each in subfolders]
        download(model, revision, download_dir, names)


def _files_in_index(folder: Path, load_format: str) -> list[str]:
    """Return the files in the folder's index; empty without an index."""
    index = folder / _INDICES[load_format]
    if not index.exists():
        return []
    files = read_json(index).get("weight_map")
    names = set(map(str, files.values())) if isinstance(files, dict) else {".."}
    if any({"..", "/"} & {*Path(name).parts} for name in names):
        raise ConfigError(f"{index}: weight_map must map names of tensors to names of files in the folder")
    return sorted(names)


def check_weights(folder: Path, load_format: str) -> dict[str, TensorInfo] | None:
    """Check that the files exist and are complete; returns the headers of safetensors. Raises `ConfigError`."""
    if load_format != "pt":
        return read_headers(folder, load_format)
    for file in torch_files(folder):
        try:
            with file.open("rb") as stream:
                is_known = zipfile.is_zipfile(stream)
                stream.seek(0)
                is_known |= stream.read(len(_LEGACY_TORCH)) == _LEGACY_TORCH
        except OSError as error:
            raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
        if not is_known:
            raise ConfigError(f"{file}: truncated, or not saved by torch.save; download it again")
    return None


def torch_files(folder: Path) -> list[Path]:
    """Return the folder's pytorch_model*.bin files, or the files in its index."""
    files = [folder / name for name in _files_in_index(folder, "pt")] or sorted(folder.glob(_WEIGHTS["pt"]))
    if not files:
        raise ConfigError(
            f"{folder}: no pytorch_model*.bin found for --load-format pt; omit the flag to read safetensors"
        )
    return files


def download(repository: str, revision: str | None, folder: str | None, patterns: Sequence[str]) -> Path:
    """Download the files that match into the repository's snapshot, and return it. Raises `ConfigError`."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty() and constants.HF_HUB_DISABLE_PROGRESS_BARS is None:
        disable_progress_bars()
    try:
        return Path(snapshot_download(repository, revision=revision, cache_dir=folder, allow_patterns=list(patterns)))
    except GatedRepoError:
        raise ConfigError(
            f"{repository} is gated: request access on its page at huggingface.co, "
            "then set HF_TOKEN or run `hf auth login`"
        ) from None
    except RevisionNotFoundError:
        raise ConfigError(f"{repository} has no revision {revision!r}; see --revision") from None
    except RepositoryNotFoundError:
        raise ConfigError(
            f"{repository}: no local folder and no accessible Hugging Face repository has this name "
            "(private repositories need HF_TOKEN)"
        ) from None
    except HFValidationError as error:
        raise ConfigError(f"{repository}: {error}") from None
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HfHubHTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"{repository}: cannot be downloaded and is not in the local cache ({reason}); "
            "check the network and HF_HUB_OFFLINE, or use a local folder"
        ) from None


def with_overrides(hf_config: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json with --hf-overrides: values are replaced; in a part, such as text_config, one by one.

    `rope_scaling` and `rope_theta` change the `rope_parameters` that transformers 5 writes in their place.
    """
    changed = dict(hf_config)
    for name, value in overrides.items():
        part = changed.get(name) if name.endswith("_config") else None
        changed[name] = with_overrides(part, value) if isinstance(part, dict) and isinstance(value, dict) else value
    rope, older = hf_config.get("rope_parameters"), {"rope_scaling", "rope_theta"} & overrides.keys()
    if not older or not rope or not isinstance(rope, dict) or "rope_parameters" in overrides:
        return changed
    scaling = overrides.get("rope_scaling", rope) or {"rope_type": "default"}
    if not isinstance(scaling, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise ConfigError(
            f"--hf-overrides {sorted(older)[0]}: this config.json has rope_parameters "
            f"({', '.join(map(str, rope))}); override these, with an object"
        )
    kept = {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    named = {"rope_type": scaling["type"]} if "type" in scaling else {}
    changed["rope_parameters"] = {**kept, **named, **scaling}
    if "rope_theta" in overrides:
        changed["rope_parameters"]["rope_theta"] = overrides["rope_theta"]
    for name in older:
        del changed[name]
    return changed


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file. Raises `ConfigError` with the file's name."""
    content = _parse(path)
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a JSON object")
    return content


def read_json_list(path: Path) -> list[dict[str, Any]]:
    """Read a JSON list of objects from a file. Raises `ConfigError` with the file's name."""
    content = _parse(path)
    if not isinstance(content, list) or not all(isinstance(entry, dict) for entry in content):
        raise ConfigError(f"{path}: expected a JSON list of objects")
    return content


def _parse(path: Path) -> Any:
    check_regular(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path.parent}: no {path.name} found; is it a Hugging Face model folder?") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {reason_of(error)}") from None
    except RecursionError:
        raise ConfigError(f"{path}: not valid JSON: nested too deeply") from None
    except ValueError as error:  # also for integers of thousands of digits
        raise ConfigError(f"{path}: not valid JSON: {error}") from None


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a checkpoint, from the header of its file."""

    file: Path
    dtype: str
    """safetensors' name: F32, BF16, F16, …"""
    shape: tuple[int, ...]
    name: str
    """Name in the file."""


def read_headers(folder: Path, load_format: str = "safetensors") -> dict[str, TensorInfo]:
    """Return the tensors of the folder's *.safetensors by name, of Mistral's own layout by the names of transformers.
    Raises `ConfigError` for truncated or missing files.

    Format: 8 bytes of header length, the header (JSON), then the data
    (https://github.com/huggingface/safetensors#format).
    """
    is_mistral = load_format == "mistral"
    files = [folder / name for name in _files_in_index(folder, load_format)]
    if not files:
        own, all_files = set(folder.glob(_WEIGHTS["mistral"])), set(folder.glob("*.safetensors"))
        files = sorted(own if is_mistral else all_files - own or all_files)
    if not files:
        pickled = sorted(file.name for file in folder.glob("*.bin"))
        only = f", only {', '.join(pickled[:3])}{', …' * (len(pickled) > 3)}" if pickled else ""
        raise ConfigError(
            f"{folder}: no *.safetensors found{only} (--load-format pt reads pytorch_model*.bin, "
            "--load-format dummy uses random weights)"
        )
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        for name, entry in read_header(file).items():
            needed = mistral_layout.hf_name(name) if is_mistral else name
            if name != "__metadata__" and needed is not None:
                tensors[needed] = TensorInfo(file, entry["dtype"], tuple(entry["shape"]), name)
    return tensors


def tensor_names(folder: Path, load_format: str) -> set[str] | None:
    """Return the names of the tensors in the folder's weights; None if they cannot be known without the weights, which
    are not here or not in order: `check_weights` says why."""
    with contextlib.suppress(ConfigError):
        if load_format in _INDICES and (index := folder / _INDICES[load_format]).exists():
            files = read_json(index).get("weight_map")
            if not isinstance(files, dict) or load_format != "mistral":
                return set(files) if isinstance(files, dict) else None
            return {found for name in files if (found := mistral_layout.hf_name(name)) is not None}
        return set(read_headers(folder, load_format)) if load_format in ("safetensors", "mistral") else None
    return None


def read_header(file: Path) -> dict[str, Any]:
    """Return the header of a file of safetensors. Raises `ConfigError` if it does not fit the file's size."""
    try:
        with file.open("rb") as stream:
            return header_of(file, stream)[0]
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None


def header_of(file: Path, stream: BinaryIO) -> tuple[dict[str, Any], int]:
    """The header of an open file of safetensors, and where its data begin; errors as in `read_header`."""
    try:
        size = os.fstat(stream.fileno()).st_size
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if 8 + length > size:
            raise ConfigError(f"{file}: truncated ({size:,} bytes, less than its header); download it again")
        if length > _MAX_HEADER:
            raise ConfigError(f"{file}: not a safetensors file: its header has {length:,} bytes")
        header: dict[str, Any] = json.loads(stream.read(length))
        end = 0
        for name, entry in header.items():
            if name != "__metadata__":
                start, stop = entry["data_offsets"]
                shape, bits = entry["shape"], _DTYPE_BITS.get(entry["dtype"])
                if min((start, *shape)) < 0 or (bits is not None and math.prod(shape) * bits != 8 * (stop - start)):
                    raise ConfigError(
                        f"{file}: {name} has the shape {shape} and the type {entry['dtype']}, but "
                        f"{stop - start:,} bytes; download it again"
                    )
                end = max(end, stop)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{file}: not a safetensors file; download it again") from None
    if size < 8 + length + end:
        raise ConfigError(f"{file}: truncated: {size:,} bytes of {8 + length + end:,}; download it again")
    if size > 8 + length + end:
        raise ConfigError(
            f"{file}: longer than its header says: {size:,} bytes instead of {8 + length + end:,}; download it again"
        )
    return header, 8 + length
