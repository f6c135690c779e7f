"""The handshake between hosts: how each describes itself, and which differences are rejected."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from pathlib import Path

import msgspec

from quire.engine.config.engine_config import EngineConfig
from quire.engine.process.log import printable
from quire.engine.process.version import DISTRIBUTION
from quire.engine.protocol.errors import ConfigError

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "*.gguf")
_HEAD_BYTES, _NUM_SAMPLES, _SAMPLE_BYTES = 1 << 20, 16, 4096
"""Parts of each file of weights that are hashed when a host joins: its beginning, and samples."""
_HASHED = (
    "config.json",
    "*.index.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "*.jinja",
)


class Hello(msgspec.Struct, kw_only=True):
    """Description of a host, which a follower sends when it joins."""

    name: str
    """Name in error messages: node 1 (10.0.0.2)."""
    number: int
    """Number by which the leader identifies the follower."""
    address: str = ""
    """The host's own address."""
    versions: dict[str, str] = {}
    model: dict[str, str] = {}
    """Hash of each file of the model; for weights, size and hash of samples."""
    settings: dict[str, str] = {}
    """See `EngineConfig.shared_settings`."""
    error: str = ""
    """Why the host cannot start."""
    body: bytes = b""
    """Additional data of the layer above."""
    replica: int | None = None
    """Number of the replica whose leader it is to join; the leader of several replicas tells it where."""

    def __post_init__(self) -> None:
        """Escape the texts that errors and log lines repeat."""
        self.name, self.address, self.error = printable(self.name), printable(self.address), printable(self.error)
        for texts in (self.versions, self.model, self.settings):
            for name in list(texts):
                texts[printable(name)] = printable(texts.pop(name))


def describe_host(
    role: str, number: int, address: str, config: EngineConfig | None, *, error: str = "", body: bytes = b""
) -> Hello:
    """Return the `Hello` of this host; `role` is node 1, for example. `config` is None if it cannot start."""
    return Hello(
        name=f"{role} ({address})",
        number=number,
        address=address,
        versions=versions(),
        model={} if config is None else fingerprint(config.model.path),
        settings={} if config is None else config.shared_settings,
        error=error,
        body=body,
    )


def compare(local: Hello, remote: Hello) -> None:
    """Raise `ConfigError` if a host cannot start, or differs from this one in versions, model files or settings."""
    for name, ours in local.versions.items():
        if (other := remote.versions.get(name)) != ours:
            raise ConfigError(
                f"{remote.name} has {f'{name} {other}' if other else f'no {name}'}, and {local.name} has {ours}; "
                "install the same on every host"
            )
    if remote.error:
        raise ConfigError(f"{remote.name}: {remote.error}")
    for name in sorted(local.model.keys() | remote.model.keys()):
        here, there = local.model.get(name), remote.model.get(name)
        if here != there:
            what = f"no {name}" if there is None else f"a {name}" if here is None else f"other bytes in {name}"
            raise ConfigError(f"{remote.name} has {what}, unlike {local.name}; copy the same model files to every host")
    for flag, here in local.settings.items():  # a host without replicas has no resolved values
        if (there := remote.settings.get(flag, here)) != here:
            raise ConfigError(
                f"{remote.name} has {flag} {there}, and {local.name} has {here}; start every host with the same"
            )


def versions() -> dict[str, str]:
    """Return the versions that must be the same on every host."""
    found = {"python": ".".join(platform.python_version_tuple()[:2])}
    for name in ("torch", DISTRIBUTION):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def fingerprint(folder: Path) -> dict[str, str]:
    """Return hashes of a model's small files, and sizes and hashes of samples of its weights: a few ms per file."""
    hashed = {file for pattern in _HASHED for file in folder.glob(pattern)}
    found = {file.name: hashlib.sha256(file.read_bytes()).hexdigest()[:16] for file in hashed if file.is_file()}
    return found | {file.name: _sample(file) for file in weight_files(folder)}


def weight_files(folder: Path) -> list[Path]:
    """Return the files of a model's weights."""
    return sorted({file for pattern in _WEIGHTS for file in folder.glob(pattern) if file.is_file()})


def _sample(path: Path) -> str:
    """Return the size of a file, and a hash of its beginning (the header of safetensors) and of samples."""
    size, hashed = path.stat().st_size, hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        hashed.update(file.read(_HEAD_BYTES))
        for number in range(1, _NUM_SAMPLES + 1):
            file.seek(size * number // (_NUM_SAMPLES + 1))
            hashed.update(file.read(_SAMPLE_BYTES))
    return f"{size} bytes, {hashed.hexdigest()[:16]}"
