"""Reads a tokenizer folder's settings and special tokens, as transformers does, without loading the tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quire.engine.protocol.errors import ConfigError
from quire.engine.repository.model_files import read_json


def read_settings(folder: Path) -> dict[str, Any]:
    """Return tokenizer_config.json; empty if there is none.

    In older folders, whose tokenizer_config.json has no `added_tokens_decoder`, special_tokens_map.json takes
    precedence over it. Raises `ConfigError` for files that are not JSON objects.
    """
    settings = _read(folder / "tokenizer_config.json")
    return settings if "added_tokens_decoder" in settings else settings | _read(folder / "special_tokens_map.json")


def content(token: Any) -> str:
    """The text of a token, which may be given with its properties."""
    return str(token["content"]) if isinstance(token, dict) and "content" in token else str(token)


def added_tokens(folder: Path) -> dict[str, int]:
    """Return the ids of the tokens that a tokenizer has besides its vocabulary. Errors as in `token_id`."""
    settings, decoder = read_settings(folder), dict[str, Any]()
    try:
        decoder = settings.get("added_tokens_decoder") or {
            token["id"]: token for token in _read(folder / "tokenizer.json").get("added_tokens", [])
        }
        of_decoder = {content(token): int(number) for number, token in decoder.items()}
        return of_decoder | {text: int(number) for text, number in _read(folder / "added_tokens.json").items()}
    except (TypeError, AttributeError, LookupError, ValueError) as error:
        raise _unknown_form(folder, error) from None


def eos_token_id(folder: Path) -> int | None:
    """Return the id of the tokenizer's `eos_token`; None if it has none, or if only its vocabulary in a format other
    than JSON has the id. Raises `ConfigError` for files that cannot be read.
    """
    settings = read_settings(folder)
    return None if settings.get("eos_token") is None else token_id(folder, content(settings["eos_token"]))


def token_id(folder: Path, text: str) -> int | None:
    """Return the id of a token as the vocabulary spells it; None and errors as in `eos_token_id`."""
    try:
        return next(map(int, _ids(folder, read_settings(folder), text)), None)
    except (TypeError, AttributeError, LookupError, ValueError) as error:
        raise _unknown_form(folder, error) from None


def _unknown_form(folder: Path, error: Exception) -> ConfigError:
    if isinstance(error, ConfigError):
        return error
    return ConfigError(f"{folder}: the tokenizer has a token with an entry of an unknown form: {error}")


def _ids(folder: Path, settings: dict[str, Any], text: str) -> Iterator[Any]:
    """The ids of a token, from the smallest file that has it."""
    yield from (number for number, token in settings.get("added_tokens_decoder", {}).items() if content(token) == text)
    for name in ("added_tokens.json", "vocab.json"):
        yield from (number for number in [_read(folder / name).get(text)] if number is not None)
    tokenizer = _read(folder / "tokenizer.json")
    yield from (token["id"] for token in tokenizer.get("added_tokens", []) if content(token) == text)
    vocabulary = tokenizer.get("model", {}).get("vocab")
    if isinstance(vocabulary, dict) and text in vocabulary:
        yield vocabulary[text]


def _read(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}
