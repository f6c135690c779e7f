"""Keys from the command line or environment, and from a file that may change: what each may do, and its name."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from functools import partial
from typing import Literal, NamedTuple

from quire.engine.protocol.errors import ConfigError
from quire.server.config.server_options import WEIGHT_RANGE, ServerOptions, read_weight
from quire.server.http.watched_files import WatchedFiles

Role = Literal["api", "admin", "metrics"]
ENVIRONMENT: dict[Role, str] = {"api": "QUIRE_API_KEY", "admin": "QUIRE_ADMIN_KEY", "metrics": "QUIRE_METRICS_KEY"}
"""The variable with the keys of each role."""
_OPTION = r"(weight|role)=(\S*)"


class Key(NamedTuple):
    """An accepted key, without its secret."""

    name: str
    role: Role = "api"
    weight: float = 1.0
    """For `--fair-share key`."""
    digest: str = ""
    """Of the secret, if the operator has given the key no name: its number may be another key's after a change."""

    @property
    def owner(self) -> str:
        """Whose the files and responses are that its requests store."""
        return self.digest or self.name


class ApiKeys:
    """The accepted keys. Only digests are stored and compared, so comparison times reveal nothing about keys."""

    def __init__(self, given: Iterable[tuple[Role, str]], file: str | None = None) -> None:
        """`given` has the role and the secret of each key that is not in the file. Raises `ConfigError`."""
        self._fixed: dict[bytes, Key] = {}
        for role, secret in given:
            number = 1 + sum(key.role == role for key in self._fixed.values())
            digest = _digest(secret.encode())
            key = self._fixed.setdefault(digest, Key(f"{role}-{number}", role, digest=_text(digest)))
            if key.role != role:
                raise ConfigError(f"{_flag(key.role)} and {_flag(role)} have a key in common; each role needs its own")
        self._from_file: dict[bytes, Key] = {}
        self.file: WatchedFiles | None = None
        if file is not None:
            try:
                self.file = WatchedFiles(partial(self._reload, file), file)
                self._from_file = self._read(file)
            except (OSError, ValueError) as error:
                raise ConfigError(f"--api-key-file {file}: cannot read the file: {error}") from None
            if not self._from_file:
                raise ConfigError(f"--api-key-file {file}: contains no keys")
        self.roles: set[Role] = {key.role for key in (*self._fixed.values(), *self._from_file.values())}
        """The roles that have keys, or have had some: a file that loses its keys opens nothing."""
        if file is not None:
            self.roles.add("api")

    @staticmethod
    def load(options: ServerOptions) -> ApiKeys | None:
        """Load the keys of the options and the environment; None if there are none. Raises `ConfigError`."""
        flags: dict[Role, tuple[str, ...] | None] = {
            "api": options.api_key,
            "admin": options.admin_key,
            "metrics": options.metrics_key,
        }
        given = [(role, secret) for role in ENVIRONMENT for secret in flags[role] or _from_environment(role)]
        keys = ApiKeys(given, options.api_key_file) if given or options.api_key_file is not None else None
        if options.fair_share == "key" and (keys is None or "api" not in keys.roles):
            raise ConfigError("--fair-share key requires API keys: --api-key, --api-key-file or QUIRE_API_KEY")
        return keys

    def find(self, secret: bytes) -> Key | None:
        """Return the key with this secret if it is currently accepted."""
        if self.file is not None:
            self.file.check()
        digest = _digest(secret)
        return self._from_file.get(digest, self._fixed.get(digest))

    def _reload(self, file: str) -> str:
        self._from_file = self._read(file)
        self.roles |= {key.role for key in self._from_file.values()}
        return f"{len(self._from_file)} keys"

    def _read(self, file: str) -> dict[bytes, Key]:
        """Read lines `[NAME:]SECRET [weight=WEIGHT] [role=ROLE]`. Raises `ValueError`, also for text that is not UTF-8,
        and for a secret with two roles.
        """
        found: dict[bytes, Key] = {}
        roles: dict[str, Role] = {role: role for role in ENVIRONMENT}
        with open(file, encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                text, weight, role = re.split(r"(?:^|\s)#", line)[0].strip(), "1", "api"
                while option := re.fullmatch(rf"(.*\S)\s+{_OPTION}", text):
                    text = option[1]
                    weight, role = (option[3], role) if option[2] == "weight" else (weight, option[3])
                if (read := read_weight(weight)) is None:
                    raise ValueError(f"line {number}: expected a weight {WEIGHT_RANGE}")
                if role not in roles:
                    raise ValueError(f"line {number}: role={role}: expected {' or '.join(roles)}")
                named = re.match(r"([\w.@-]*):\s*", text)
                secret = text[named.end() :] if named else text
                if (named and not secret) or re.fullmatch(_OPTION, secret):
                    raise ValueError(f"line {number}: there is no key in {text}")
                if secret:
                    digest = _digest(secret.encode())
                    name = named[1] if named else ""
                    other = found.get(digest) or self._fixed.get(digest)
                    if other is not None and other.role != role:
                        place = "an earlier line" if digest in found else _flag(other.role)
                        raise ValueError(f"line {number}: {place} gives this key the role {other.role}, not {role}")
                    found[digest] = Key(name or f"line-{number}", roles[role], read, "" if name else _text(digest))
        return found


def _from_environment(role: Role) -> list[str]:
    name = ENVIRONMENT[role]
    if (value := os.environ.get(name)) is None:
        return []
    if not (keys := list(filter(None, re.split(r"[\s,]+", value)))):
        also = " (or VLLM_API_KEY)" * (role == "api")
        raise ConfigError(f"environment variable {name}{also} is empty; unset it, or set it to a key")
    return keys


def _flag(role: Role) -> str:
    return f"--{role}-key (or {ENVIRONMENT[role]})"


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _text(digest: bytes) -> str:
    return f"sha256:{digest.hex()}"  # no name has a colon
