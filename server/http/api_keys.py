"""API keys from the command line or environment, and from a file that may change."""

from __future__ import annotations

import hashlib
import logging
import os
import re

from quire.engine.protocol.errors import ConfigError
from quire.server.config.server_options import WEIGHT_RANGE, ServerOptions, read_weight

ENVIRONMENT = "QUIRE_API_KEY"

logger = logging.getLogger(__name__)


class ApiKeys:
    """The accepted keys. Only digests are stored and compared, so comparison times reveal nothing about keys."""

    def __init__(self, keys: tuple[str, ...], file: str | None = None) -> None:
        self._fixed = {_digest(key.encode()): 1.0 for key in keys}
        self._file = file
        self._seen: tuple[int, int, int] | None = None
        self._from_file: dict[bytes, float] = {}
        if file is not None:
            try:
                self._seen = _state(file)
                self._from_file = _read(file)
            except (OSError, ValueError) as error:
                raise ConfigError(f"--api-key-file {file}: cannot read the file: {error}") from None
            if not self._from_file:
                raise ConfigError(f"--api-key-file {file}: contains no keys")

    @staticmethod
    def load(options: ServerOptions) -> ApiKeys | None:
        """Load the keys of the options and the environment; None if no key is required. Raises `ConfigError`."""
        variable = os.environ.get(ENVIRONMENT, "")
        named = tuple(filter(None, options.api_key or re.split(r"[\s,]+", variable)))
        if variable.strip() and not named:
            raise ConfigError(f"environment variable {ENVIRONMENT} has no key in it; unset it to run without API keys")
        if not named and options.api_key_file is None:
            if options.fair_share == "key":
                raise ConfigError("--fair-share key requires API keys: --api-key, --api-key-file or QUIRE_API_KEY")
            return None
        return ApiKeys(named, options.api_key_file)

    def admit(self, key: bytes) -> bool:
        """Return whether this key is currently accepted."""
        if self._file is not None:
            self._reload(self._file)
        return self.weight(key) is not None

    def weight(self, key: bytes) -> float | None:
        """Return the weight of an accepted key, and None for another."""
        digest = _digest(key)
        return self._from_file.get(digest, self._fixed.get(digest))

    def _reload(self, file: str) -> None:
        """Reload the file if it has changed. If it cannot be read, the previous keys stay valid."""
        try:
            state = _state(file)
            if state != self._seen:
                self._seen = state
                self._from_file = _read(file)
                logger.info("%s has changed: %d keys", file, len(self._from_file))
        except (OSError, ValueError) as error:
            if self._seen is not None:
                logger.warning("cannot read %s; its previous keys stay valid: %s", file, error)
            self._seen = None


def _state(file: str) -> tuple[int, int, int]:
    found = os.stat(file)
    return found.st_mtime_ns, found.st_size, found.st_ino


def _read(file: str) -> dict[bytes, float]:
    """Read keys and weights. Raises `ValueError` also for text that is not UTF-8."""
    weights = {}
    with open(file, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            key, *rest = re.split(r"(?:^|\s)#", line)[0].strip().rsplit(maxsplit=1)[:2] or [""]
            weight: float | None = 1.0
            if rest and rest[0].startswith("weight="):
                weight = read_weight(rest[0].removeprefix("weight="))
            elif rest:
                key = " ".join((key, *rest))
            if weight is None:
                raise ValueError(f"line {number}: expected a weight {WEIGHT_RANGE}")
            if key:
                weights[_digest(key.encode())] = weight
    return weights


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
