"""The files of an adapter: PEFT's folder, or a GGUF file as llama.cpp's convert_lora_to_gguf.py writes it. No torch.

An adapter is known by the digest of its weights and of the settings that matter. Each tensor has a digest, too, which
is compared whenever its bytes are read: so they are those of the adapter that was opened, whatever happens to the file
meanwhile, and in whatever process they are read.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from io import BufferedReader
from pathlib import Path
from typing import Any, Literal

from quire.engine.architecture.adapter_spec import AdapterSpec
from quire.engine.architecture.adapters import gguf as gguf_adapter
from quire.engine.architecture.adapters import peft, settings
from quire.engine.architecture.adapters.base import Base
from quire.engine.architecture.quantization.method import FLOATS
from quire.engine.protocol.errors import ConfigError, reason_of
from quire.engine.repository import gguf, gguf_architectures, model_files
from quire.engine.repository.gguf import GgufTensor
from quire.engine.repository.model_files import check_regular

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PATTERNS = (
    *(CONFIG, WEIGHTS, "*.jinja", "chat_template.json"),
    *("*.model", "*.tiktoken", "*.txt", "*token*.json", "vocab.json"),
)
"""The files of a Hugging Face repository that belong to an adapter."""
_PICKLES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")
_MAX_CONFIG_BYTES = 1 << 20
_CHUNK, _MAX_HEADER = 1 << 20, 1 << 26
"""Bytes."""
DIGEST_BYTES = 32


@dataclass(frozen=True)
class AdapterTensor:
    """A tensor in the adapter's file."""

    dtype: str
    """safetensors' or ggml's name."""
    shape: tuple[int, ...]
    start: int
    """Its first byte in the file."""
    size: int
    """Bytes."""
    digest: bytes
    """Of its bytes."""


@dataclass(frozen=True)
class AdapterFolder:
    """An adapter's files, as they were when they were opened."""

    path: Path
    """As the user knows it."""
    file: Path
    """The file with the weights."""
    format: Literal["peft", "gguf"]
    settings: Mapping[str, Any]
    """adapter_config.json, or the metadata of GGUF."""
    tensors: Mapping[str, AdapterTensor]
    digest: bytes
    """Of weights and settings; equal for the same adapter in other files."""

    def spec(self, base: Base, architecture: str) -> AdapterSpec:
        """What the adapter does to a base of this architecture. Raises `ConfigError` naming a setting or a tensor."""
        shapes = {name: each.shape for name, each in self.tensors.items()}
        try:
            if self.format == "gguf":
                modules = gguf_architectures.adapter_modules(self.settings, shapes, architecture)
                return gguf_adapter.read(self.settings, modules, shapes, base)
            digests = {name: each.digest for name, each in self.tensors.items()}
            return peft.read(settings.read(self.settings), shapes, base, digests)
        except ConfigError as error:
            raise ConfigError(f"{self.path}: {error}") from None

    @contextlib.contextmanager
    def reading(self) -> Iterator[Callable[[str], bytearray]]:
        """A function that reads a tensor's bytes. Raises `ConfigError` if they are not those that were digested."""
        with _opened(self.file) as stream:

            def read(name: str) -> bytearray:
                tensor, content = self.tensors[name], bytearray(self.tensors[name].size)
                stream.seek(tensor.start)
                if stream.readinto(content) != tensor.size or _digest(content) != tensor.digest:
                    raise ConfigError(f"{self.file}: {name} has changed since the adapter was opened; load it again")
                return content

            yield read


def size_of(repository: str, revision: str | None) -> int:
    """Bytes of the files of a Hugging Face repository that `locate` may download; 0 if it cannot be asked."""
    return model_files.size_of(repository, revision, (*_PATTERNS, "*.gguf"))


def locate(adapter: str, revision: str | None, download_dir: str | None, *, is_repository: bool = False) -> Path:
    """The folder of an adapter, or the snapshot of a Hugging Face repository, whose files are downloaded to
    `download_dir`, by default to Hugging Face's cache. With `is_repository`, no folder is meant, whatever exists.
    Raises `ConfigError`."""
    find = model_files.download if is_repository else model_files.locate
    path = find(adapter, revision, download_dir, _PATTERNS)
    if not (path / WEIGHTS).exists() and (is_repository or not Path(adapter).expanduser().is_dir()):
        names = model_files.list_repository(adapter, revision)
        _refuse_pickles(adapter, names)
        if len(found := [name for name in names if name.endswith(".gguf")]) == 1 and not (path / CONFIG).exists():
            path = model_files.download(adapter, revision, download_dir, found)
    return path


def _refuse_pickles(adapter: str, names: Sequence[str]) -> None:
    if pickled := next((name for name in _PICKLES if name in names), None):
        raise ConfigError(f"{adapter}: {pickled} is a pickle, which may run code; save the adapter as {WEIGHTS}")


def open_adapter(path: Path, *, reads_weights: bool = True) -> AdapterFolder:
    """Read an adapter's headers and settings, and all of its bytes once for the digest.

    `path` is a folder, or a GGUF file. Raises `ConfigError` for files that are missing, damaged, or not supported.
    Without `reads_weights` the digests are empty, so that only the settings can be used.
    """
    if path.suffix == ".gguf":
        return _open_gguf(path, reads_weights=reads_weights)
    if not path.is_dir():
        raise ConfigError(f"{path}: no such folder of an adapter")
    if not (path / WEIGHTS).exists():
        _refuse_pickles(str(path), [name for name in _PICKLES if (path / name).exists()])
        if len(found := sorted(path.glob("*.gguf"))) == 1 and not (path / CONFIG).exists():
            return _open_gguf(found[0], reads_weights=reads_weights)
        raise ConfigError(f"{path}: no {WEIGHTS} found; is it the folder of a PEFT adapter?")
    config = _read_config(path / CONFIG)
    with _opened(path / WEIGHTS) as stream:
        header, first = model_files.header_of(path / WEIGHTS, stream)
        places, end = {}, 0
        header.pop("__metadata__", None)
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            start, stop = entry["data_offsets"]
            if entry["dtype"] not in FLOATS:
                raise ConfigError(
                    f"{path / WEIGHTS}: {name} is of type {entry['dtype']}, which is not supported; supported: "
                    f"{', '.join(FLOATS)}"
                )
            if start != end:
                raise ConfigError(f"{path / WEIGHTS}: {name} does not begin where the tensor before it ends")
            end = stop
            places[name] = entry["dtype"], tuple(entry["shape"]), first + start, stop - start
        digest_of = partial(_digest_at, path / WEIGHTS, stream) if reads_weights else _no_digest
        tensors = {
            name: AdapterTensor(dtype, shape, start, size, digest_of(start, size))
            for name, (dtype, shape, start, size) in places.items()
        }
    if not tensors:
        raise ConfigError(f"{path / WEIGHTS}: there are no tensors in it")
    try:
        digest = _digest_of("peft", settings.digested(config), tensors)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return AdapterFolder(path, path / WEIGHTS, "peft", config, tensors, digest if reads_weights else b"")


def _open_gguf(path: Path, *, reads_weights: bool) -> AdapterFolder:
    with _opened(path) as stream:
        metadata, found = _gguf_header(path, stream)
        kinds = metadata.get("general.type"), metadata.get("adapter.type")
        if kinds != ("adapter", "lora"):
            raise ConfigError(f"{path}: general.type and adapter.type are {kinds}; supported: ('adapter', 'lora')")
        digest_of = partial(_digest_at, path, stream) if reads_weights else _no_digest
        tensors = {
            name: AdapterTensor(each.dtype, each.shape, each.start, each.bytes, digest_of(each.start, each.bytes))
            for name, each in found.items()
        }
    if not tensors:
        raise ConfigError(f"{path}: there are no tensors in it")
    digest = _digest_of("gguf", gguf_adapter.digested(metadata), tensors)
    return AdapterFolder(path, path, "gguf", metadata, tensors, digest if reads_weights else b"")


def _gguf_header(path: Path, stream: BufferedReader) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    """Metadata and tensors. The file is not mapped, as it may become shorter, and not read whole, as it may be a
    model."""
    size, length = os.fstat(stream.fileno()).st_size, _CHUNK
    while True:
        stream.seek(0)
        try:
            return gguf.read_header(path, stream.read(length), size)
        except ConfigError:
            if length >= min(size, _MAX_HEADER):
                raise
        length *= 4


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BufferedReader]:
    check_regular(path)
    try:
        with path.open("rb") as stream:
            yield stream
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {reason_of(error)}") from error


def _read_config(path: Path) -> dict[str, Any]:
    """adapter_config.json, in which no name may occur twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise ConfigError(f"{path}: {twice} occurs twice")
        return found

    if not path.exists():
        raise ConfigError(f"{path.parent}: no {path.name} found; is it the folder of a PEFT adapter?")
    with _opened(path) as stream:
        content = stream.read(_MAX_CONFIG_BYTES + 1)
    if len(content) > _MAX_CONFIG_BYTES:
        raise ConfigError(f"{path}: larger than {_MAX_CONFIG_BYTES >> 20} MiB")
    try:
        config = json.loads(content, object_pairs_hook=unique)
    except RecursionError:
        raise ConfigError(f"{path}: not valid JSON: nested too deeply") from None
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}: not valid JSON: {reason_of(error)}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: expected a JSON object")
    return config


def _digest(content: bytes | bytearray | memoryview) -> bytes:
    return blake2b(content, digest_size=DIGEST_BYTES).digest()


def _no_digest(start: int, size: int) -> bytes:
    return b""


def _digest_at(path: Path, stream: BufferedReader, start: int, size: int) -> bytes:
    """The digest of a part of a file."""
    found, left = blake2b(digest_size=DIGEST_BYTES), size
    stream.seek(start)
    while left:
        if not (content := stream.read(min(left, _CHUNK))):
            raise ConfigError(f"{path}: has become shorter while it was read; load it again")
        found.update(content)
        left -= len(content)
    return found.digest()


def _digest_of(kind: str, own: Mapping[str, Any], tensors: Mapping[str, AdapterTensor]) -> bytes:
    """The digest of an adapter; the order of its tensors in the file does not matter."""
    listed = [(name, each.dtype, each.shape, each.digest.hex()) for name, each in sorted(tensors.items())]
    return _digest(json.dumps([kind, own, listed]).encode())
