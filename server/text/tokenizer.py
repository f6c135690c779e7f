"""The model's tokenizer: text ⇄ token ids, and its special tokens.

`tokenizers` alone loads a folder's tokenizer.json in milliseconds, with the same result as transformers' AutoTokenizer
(a test compares them). transformers is imported only if that file is missing or the tokenizer has its own code.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tokenizers import AddedToken, Encoding
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE

from quire.engine.protocol.errors import ConfigError, InvalidParameter
from quire.engine.repository import tokenizer_files
from quire.engine.repository.model_files import read_json
from quire.engine.repository.tokenizer_files import content

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_VOCABULARIES = ("tokenizer*", "*vocab*", "merges.txt", "*.model", "*.tiktoken", "*.bpe", "tekken.json")
"""Files that transformers converts to a tokenizer."""
_OF_SENTENCEPIECE = ("", "LlamaTokenizer", "GemmaTokenizer")
"""The classes in tokenizer_config.json whose ids are sentencepiece's own."""
_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


class TokenizerFailed(InvalidParameter):
    """The backend cannot process a text, as it has a bug. `reason` is for the log."""

    def __init__(self, message: str, param: str | None = None, reason: str = "") -> None:
        super().__init__(message, param)
        self.reason = reason


class Tokenizer:
    """A `tokenizers` backend with its folder's special tokens and chat settings.

    `special_tokens` maps bos_token, eos_token, … to their text; `config` is tokenizer_config.json.
    """

    def __init__(self, backend: Backend, special_tokens: dict[str, str], config: dict[str, Any]) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.special_tokens = special_tokens
        self.config = config
        self._pieces = (_Pieces(backend, False), _Pieces(backend, True))
        self.token_text = lru_cache(maxsize=65536)(self._token_text)

    @staticmethod
    def load(folder: Path, trust_remote_code: bool = False) -> Tokenizer:
        """Load a tokenizer folder; raises `ConfigError` if it contains no usable tokenizer."""
        path = folder / "tokenizer_config.json"
        config = tokenizer_files.read_settings(folder)
        if (folder / "tokenizer.json").exists() and not (trust_remote_code and "auto_map" in config):
            try:
                return _from_tokenizer_json(folder, config)
            except (TypeError, AttributeError, LookupError, ValueError) as error:
                if isinstance(error, ConfigError):
                    raise
                raise ConfigError(f"{path}: a token has an entry of an unknown form: {error}") from None
        return _from_transformers(folder, config, trust_remote_code)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return a text's token ids; with `add_special_tokens` as the model expects a prompt (usually with bos)."""
        ids: list[int] = self._encoding(self.backend.encode_batch_fast, text, add_special_tokens).ids
        return ids

    def encode_with_offsets(self, text: str, *, add_special_tokens: bool) -> tuple[list[int], list[tuple[int, int]]]:
        """Like `encode`, with the characters of each token, in order. Added special tokens have none."""
        encoding = self._encoding(self.backend.encode_batch, text, add_special_tokens)
        offsets, end = [], 0
        for start, stop in encoding.offsets:
            offsets.append((start, stop) if start < stop else (end, end))
            end = max(end, stop)
        return encoding.ids, offsets

    def _encoding(
        self, encode_batch: Callable[..., list[Encoding]], text: str, add_special_tokens: bool = False
    ) -> Encoding:
        """The encoding of a text. Unlike `encode`, `encode_batch` releases the interpreter lock, and
        `encode_batch_fast` computes no offsets.
        """
        try:
            return encode_batch([text], add_special_tokens=add_special_tokens)[0]
        except TypeError:  # raised for a str that cannot be encoded as UTF-8
            raise _surrogate_error() from None
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # of Rust; no module has the class
                raise
            raise TokenizerFailed("the tokenizer cannot process this text", reason=str(error)) from None

    @cached_property
    def max_characters(self) -> int | None:
        """The most characters of a text that one token represents; None if that is unlimited or unknown."""
        parts = _text_parts(self.backend)
        is_byte_level = any(part["type"] == "ByteLevel" for part in parts) or getattr(
            self.backend.model, "byte_fallback", False
        )
        strips = any(token.lstrip or token.rstrip for _, token in self._added.values())
        if not isinstance(self.backend.model, BPE) or not is_byte_level or strips or not all(map(_is_lossless, parts)):
            return None  # BERT's tokenizer drops spaces, others represent any number of unknown characters by a token
        composed = 4 if any(part["type"] == "NFC" for part in parts) else 1
        return composed * max(map(len, self.backend.get_vocab()))

    def encode_within(
        self, text: str, limit: int, *, add_special_tokens: bool, side: Literal["left", "right"]
    ) -> list[int]:
        """Like `encode`, but at most `limit` tokens, including special ones. Longer texts are truncated on this side.

        Raises `InvalidParameter` if the special tokens alone exceed the limit.
        """
        room = limit - (self.backend.num_special_tokens_to_add(False) if add_special_tokens else 0)
        if room < 0:
            raise InvalidParameter(
                f"truncate_prompt_tokens must be at least {limit - room}, the number of special tokens added to a text",
                "truncate_prompt_tokens",
            )
        encoding = self._encoding(self.backend.encode_batch_fast, text)
        encoding.truncate(room, direction=side)
        ids: list[int] = self.backend.post_process(encoding, None, add_special_tokens).ids
        return ids

    def join_pair(
        self,
        first: Sequence[int],
        second: Sequence[int],
        limit: int | None,
        *,
        add_special_tokens: bool,
        side: Literal["left", "right"],
    ) -> tuple[list[int], int]:
        """Return the token ids of a pair of texts, tokenized without special tokens, as the tokenizer joins them, and
        the first one whose type is 1 (0: none).

        With a `limit`, the longer text is truncated on this side until the shorter one is as long, then both are.
        Raises `InvalidParameter` if the special tokens alone exceed the limit.
        """
        layout = self._pair_layouts[add_special_tokens]
        if limit is not None:
            room = limit - len(layout.ids)
            if room < 0:
                raise InvalidParameter(
                    f"truncate_prompt_tokens must be at least {limit - room}, the number of special tokens added to a "
                    "pair of texts",
                    "truncate_prompt_tokens",
                )
            kept = min(len(first), len(second), room // 2)
            lengths = (kept, room - kept) if len(first) <= len(second) else (room - kept, kept)
            first, second = (
                ids[:most] if side == "right" else ids[max(0, len(ids) - most) :]
                for ids, most in zip((first, second), lengths, strict=True)
            )
        at, then = layout.places
        ids = [*layout.ids[:at], *first, *layout.ids[at:then], *second, *layout.ids[then:]]
        one, other = layout.text_types
        types = [*layout.types[:at], *[one] * len(first), *layout.types[at:then], *[other] * len(second)]
        types += layout.types[then:]
        return ids, types.index(1) if 1 in types else 0

    @cached_property
    def _pair_layouts(self) -> tuple[_PairLayout, _PairLayout]:
        """The pair templates without and with special tokens.

        The backend's own `post_process` is not used for texts: it keeps the parts that `Encoding.truncate` removes from
        both, and joins them in all combinations.
        """
        texts = ("a", *self.backend.get_vocab())
        text = next(text for text in texts if self.encode(text, add_special_tokens=False))

        def encoding(length: int) -> Encoding:
            made = self.backend.encode(text, add_special_tokens=False)
            made.truncate(length)
            return made

        def layout(add_special_tokens: bool) -> _PairLayout:
            specials, *with_text = (
                self.backend.post_process(encoding(first), encoding(second), add_special_tokens)
                for first, second in ((0, 0), (1, 0), (0, 1))
            )
            ids: list[int] = specials.ids
            at, then = (
                next((i for i, (a, b) in enumerate(zip(ids, each.ids, strict=False)) if a != b), len(ids))
                for each in with_text
            )
            assert at <= then, "the first text comes first"
            types = (with_text[0].type_ids[at], with_text[1].type_ids[then])
            return _PairLayout(ids, specials.type_ids, (at, then), types)

        return layout(False), layout(True)

    def shortened(self, text: str, limit: int, side: Literal["left", "right"] = "right") -> str:
        """Return the part of a text that its first `limit` tokens represent, or its last ones."""
        spans = self._encoding(self.backend.encode_batch, text).offsets
        if len(spans) <= limit:
            return text
        if not limit:
            return ""
        return text[: spans[limit - 1][1]] if side == "right" else text[spans[-limit][0] :]

    def offsets(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return where in `text` each token of `encode` starts. Added special tokens are between characters."""
        begins, end = [], 0
        for start, stop in self._encoding(self.backend.encode_batch, text, add_special_tokens).offsets:
            begins.append(min(start, end) if start < stop else end)
            end = max(end, stop)
        return begins

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        """Return the text of token ids. Bytes that are not UTF-8 become U+FFFD; unknown ids are skipped."""
        text: str = self.backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def pieces(self, skip_special_tokens: bool) -> Mapping[int, str]:
        """By token id, the text that it adds after any whole characters. Tokens without such a text are empty."""
        return self._pieces[skip_special_tokens]

    def _token_text(self, token_id: int) -> str:
        """The text that a token adds inside a text (some decoders strip the space before the first token)."""
        once = self.decode([token_id], skip_special_tokens=False)
        return self.decode([token_id, token_id], skip_special_tokens=False)[len(once) :]

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The ids that `skip_special_tokens` skips."""
        return frozenset(token_id for token_id, token in self._added.values() if token.special)

    def special_among(self, texts: Iterable[str]) -> dict[str, int]:
        """Return the texts that are special tokens, with their ids."""
        found = {text: self._added[text] for text in texts if text in self._added}
        return {text: token_id for text, (token_id, token) in found.items() if token.special}

    def added_id(self, text: str) -> int | None:
        """Return the id of an added token, special or not."""
        found = self._added.get(text)
        return None if found is None else found[0]

    @cached_property
    def _added(self) -> dict[str, tuple[int, AddedToken]]:
        return {token.content: (i, token) for i, token in self.backend.get_added_tokens_decoder().items()}

    def token_bytes(self, token_id: int) -> bytes:
        """Return the UTF-8 bytes of a token, even if they are only part of a character."""
        piece = self.backend.id_to_token(token_id) or ""
        if byte := _BYTE_PIECE.fullmatch(piece):
            return bytes([int(byte[1], 16)])
        text = self.token_text(token_id)
        if "\ufffd" in text and all(c in _BYTE_OF for c in piece):
            return bytes(_BYTE_OF[c] for c in piece)
        return text.encode()


class _PairLayout(NamedTuple):
    """A tokenizer's layout of pairs of texts: its special tokens and their types, and the places among them of the
    texts, whose tokens have other types.
    """

    ids: list[int]
    types: list[int]
    places: tuple[int, int]
    text_types: tuple[int, int]


class _Pieces(dict[int, str]):
    """`Tokenizer.pieces`, filled on demand.

    Byte-level decoders concatenate the bytes of all tokens and decode the result, so a token that is valid UTF-8 has
    the same text everywhere. This does not hold for other decoders.
    """

    def __init__(self, backend: Backend, skip_special_tokens: bool) -> None:
        self._backend = backend
        self._skip = skip_special_tokens
        self._is_byte_level = isinstance(backend.decoder, ByteLevel)

    def __missing__(self, token_id: int) -> str:
        text = ""
        if self._is_byte_level:
            text = self._backend.decode([token_id], skip_special_tokens=self._skip)
            if "\ufffd" in text:
                text = ""
        self[token_id] = text
        return text


def _text_parts(backend: Backend) -> list[dict[str, Any]]:
    """The normalizers and pre-tokenizers as in tokenizer.json."""
    states = [json.loads(part.__getstate__()) for part in (backend.normalizer, backend.pre_tokenizer) if part]
    return [part for state in states for part in state.get("normalizers") or state.get("pretokenizers") or [state]]


def _is_lossless(part: dict[str, Any]) -> bool:
    """Return whether a normalizer or pre-tokenizer drops no characters; NFC composes some."""
    match part:
        case {"type": "ByteLevel" | "Metaspace" | "Digits" | "NFC" | "Prepend"}:
            return True
        case {"type": "Split" | "Punctuation", "behavior": behavior}:
            return bool(behavior != "Removed")
        case {"type": "Replace", "pattern": {"String": before}, "content": after}:
            return len(before) <= len(after)
    return False


def _surrogate_error() -> InvalidParameter:
    return InvalidParameter("the text contains an unpaired surrogate, which is not a character")


def _byte_alphabet() -> dict[str, int]:
    """The character that represents each byte in byte-level vocabularies: itself if printable, otherwise from U+0100
    on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _from_tokenizer_json(folder: Path, config: dict[str, Any]) -> Tokenizer:
    path = folder / "tokenizer.json"
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # tokenizers raises no narrower class
        raise ConfigError(f"{path}: not a valid tokenizer: {error}") from None
    return _completed(backend, folder, config, {})


def _completed(backend: Backend, folder: Path, config: dict[str, Any], named: dict[str, str]) -> Tokenizer:
    """Add the tokens of tokenizer_config.json, whose names for special tokens take precedence over the `named` ones."""
    special = named | {name: content(config[name]) for name in _NAMED if config.get(name) is not None}
    for token_id, entry in sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0])):
        if backend.token_to_id(entry["content"]) is None:
            backend.add_tokens([AddedToken(**{**entry, "special": entry.get("special", False)})])
            if backend.token_to_id(entry["content"]) != int(token_id):
                raise ConfigError(
                    f"{folder}: tokenizer_config.json assigns {entry['content']!r} the id {token_id}, which "
                    "conflicts with the vocabulary"
                )
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    texts = [*special.values(), *map(content, extra.values() if isinstance(extra, dict) else extra)]
    known = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in texts if t not in known])
    return Tokenizer(backend, special, config)


def _from_transformers(folder: Path, config: dict[str, Any], trust_remote_code: bool) -> Tokenizer:
    if not any(path.name != "tokenizer_config.json" for pattern in _VOCABULARIES for path in folder.glob(pattern)):
        raise ConfigError(f"{folder}: no usable tokenizer: no tokenizer.json and no other vocabulary; set --tokenizer")
    if "auto_map" in config and not trust_remote_code:  # transformers may find a class that splits texts otherwise
        raise ConfigError(
            f"{folder}: no usable tokenizer: it has no tokenizer.json, and requires its own Python code, which needs "
            "--trust-remote-code"
        )
    if missing := [name for name in _libraries(folder) if importlib.util.find_spec(name.partition(".")[0]) is None]:
        raise ConfigError(
            f"{folder}: no tokenizer.json, and reading its vocabulary needs {', '.join(missing)}; run "
            "pip install 'quire-llm[tokenizers]'"
        )
    name = str(config.get("tokenizer_class") or "").removesuffix("Fast")
    if "auto_map" not in config and name in _OF_SENTENCEPIECE and _is_sentencepiece(folder / "tokenizer.model"):
        try:
            return _from_sentencepiece(folder, config)
        except (TypeError, AttributeError, LookupError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{folder}: an added token has an entry of an unknown form: {error}") from None
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError, AttributeError) as error:  # AttributeError: of code for transformers 4
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(f"{folder}: no usable tokenizer: {reason}; set --tokenizer") from None
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, Backend):
        from quire.server.text.tiktoken_conversion import converted

        try:
            backend = converted(loaded)
        except ConfigError as error:
            raise ConfigError(f"{folder}: {error}; set --tokenizer to a folder with tokenizer.json") from None
    special = {name: str(token) for name in _NAMED if (token := getattr(loaded, name, None)) is not None}
    return Tokenizer(backend, special, config)


def _from_sentencepiece(folder: Path, config: dict[str, Any]) -> Tokenizer:
    """Texts begin with BOS unless tokenizer_config.json says otherwise, as these classes do."""
    from quire.server.text.sentencepiece_conversion import converted, with_ends

    path = folder / "added_tokens.json"
    older = read_json(path) if path.exists() else {}
    added: dict[str, Any] = {str(number): {"content": text} for text, number in older.items()}
    added |= config.get("added_tokens_decoder") or {}
    added = {number: {**entry, "normalized": False} for number, entry in added.items()}  # found in texts as they are
    listed = {content(entry) for entry in added.values()}
    legacy = config.get("legacy")
    backend, named = converted(folder / "tokenizer.model", listed, prefix_everywhere=legacy is None or bool(legacy))
    tokenizer = _completed(backend, folder, {**config, "added_tokens_decoder": added}, named)
    ends = (tokenizer.special_tokens.get(f"{end}_token") for end in ("bos", "eos"))
    adds = (config.get("add_bos_token", True), config.get("add_eos_token", False))
    with_ends(backend, *(text if text and add else None for text, add in zip(ends, adds, strict=True)))
    return Tokenizer(backend, tokenizer.special_tokens, config)


def _libraries(folder: Path) -> list[str]:
    """The modules that reading the vocabulary requires."""
    files = [path for pattern in ("*.model", "*.tiktoken") for path in sorted(folder.glob(pattern))]
    if not files:
        return []
    return ["sentencepiece", "google.protobuf"] if _is_sentencepiece(files[0]) else ["tiktoken"]


def _is_sentencepiece(file: Path) -> bool:
    """Whether a vocabulary exists and is sentencepiece's, a protobuf message; tiktoken's are lines of text."""
    if not file.exists():
        return False
    with file.open("rb") as stream:
        return stream.read(1) == b"\n"  # the first field
