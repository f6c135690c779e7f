"""API keys: those of the command line or the environment, and those of a file that may change."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Iterable

from quire.engine.protocol.errors import ConfigError
from quire.server.config import ServerOptions

ENVIRONMENT = "QUIRE_API_KEY"

logger = logging.getLogger(__name__)


class ApiKeys:
    """Which keys are good. Only digests are kept and compared, so that the time it takes tells nothing about a key."""

    def __init__(self, keys: tuple[str, ...], file: str | None = None) -> None:
        self._fixed = _digests(keys)
        self._file = file
        self._seen: tuple[int, int, int] | None = None
        self._from_file: frozenset[bytes] = frozenset()
        if file is not None:
            try:
                self._seen = _state(file)
                self._from_file = _read(file)
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"--api-key-file {file}: cannot be read: {error}") from None
            if not self._from_file:
                raise ConfigError(f"--api-key-file {file}: there is no key in it")

    @staticmethod
    def load(options: ServerOptions) -> ApiKeys | None:
        """The keys that these options and the environment name; None: nobody needs a key. Raises `ConfigError`."""
        named = options.api_key or tuple(re.split(r"[\s,]+", os.environ.get(ENVIRONMENT, "").strip(" ,")))
        named = tuple(filter(None, named))
        if not named and options.api_key_file is None:
            return None
        return ApiKeys(named, options.api_key_file)

    def admit(self, key: bytes) -> bool:
        """Whether this key is good now."""
        if self._file is not None:
            self._look_again(self._file)
        digest = hashlib.sha256(key).digest()
        return digest in self._fixed or digest in self._from_file

    def _look_again(self, file: str) -> None:
        """Read the file if it has changed. One that cannot be read leaves the keys as they are."""
        try:
            state = _state(file)
            if state != self._seen:
                self._seen = state
                self._from_file = _read(file)
                logger.info("%s has changed: %d keys", file, len(self._from_file))
        except (OSError, UnicodeDecodeError) as error:
            if self._seen is not None:
                logger.warning("%s cannot be read, its last keys stay good: %s", file, error)
            self._seen = None


def _state(file: str) -> tuple[int, int, int]:
    found = os.stat(file)
    return found.st_mtime_ns, found.st_size, found.st_ino


def _read(file: str) -> frozenset[bytes]:
    with open(file, encoding="utf-8") as lines:
        keys = (re.split(r"(?:^|\s)#", line)[0].strip() for line in lines)
        return _digests(filter(None, keys))


def _digests(keys: Iterable[str]) -> frozenset[bytes]:
    return frozenset(hashlib.sha256(key.encode()).digest() for key in keys)
