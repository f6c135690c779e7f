"""The tokenizer in a GGUF file's metadata, as the tokenizer.json that `tokenizers` reads.

Sources: src/llama-vocab.cpp of github.com/ggml-org/llama.cpp for the meaning of the metadata, and the tokenizer.json of
published models for the parts of each kind.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, Literal

from quire.engine.protocol.errors import ConfigError

Json = dict[str, Any]


class Kind(IntEnum):
    """Kinds of tokens, in tokenizer.ggml.token_type and in the pieces of SentencePiece's models."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_MARKS = r" ?[^\s\p{L}\p{N}]+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORD}\p{{L}}+|\p{{N}}{{1,3}}|{_MARKS}[\r\n]*|{_SPACES}"
_QWEN2 = _LLAMA3.replace("{1,3}", "")
_TEKKEN = rf"{_WORD}{_UPPER}*{_LOWER}+|{_WORD}{_UPPER}+{_LOWER}*|\p{{N}}|{_MARKS}[\r\n/]*|{_SPACES}"
_GPT4O = (
    rf"{_WORD}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_WORD}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}|{_MARKS}[\r\n/]*|{_SPACES}"
)
_SPLITS = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "dbrx", "smaug-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-2", "smollm", "starcoder", "refact"), ""),
}
"""How text is split before merges, by tokenizer.ggml.pre; empty: as GPT-2 does."""
_ONE_DIGIT = ("smollm", "starcoder", "refact")
_WHOLE_WORDS_FIRST = ("llama-bpe", "llama3", "llama-v3", "falcon3", "tekken")
"""Values of tokenizer.ggml.pre with which a word that is a token needs no merges. Their texts begin with BOS."""
_NFC = ("qwen2",)
_ENDS: tuple[Literal["bos", "eos"], ...] = ("bos", "eos")
_PHI3_STRIPS_NOT = ("<unk>", "<s>", "<|endoftext|>")


def tokenizer_json(metadata: Mapping[str, Any]) -> Json:
    """Raises `ConfigError` for tokenizers that are not supported."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise ConfigError(f"tokenizer.ggml.model {kind} is not supported; supported: gpt2, llama; or set --tokenizer")
    tokens = metadata["tokenizer.ggml.tokens"]
    kinds = metadata.get("tokenizer.ggml.token_type") or [Kind.NORMAL] * len(tokens)
    parts = _byte_level(metadata, tokens) if kind == "gpt2" else _sentencepiece(metadata, tokens, kinds)
    strips = kind == "llama" and metadata.get("general.architecture") == "phi3"
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            added_token(
                number,
                token,
                special=kind != Kind.USER_DEFINED,
                rstrip=strips and kind == Kind.CONTROL and token not in _PHI3_STRIPS_NOT,
            )
            for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind in (Kind.UNKNOWN, Kind.CONTROL) or (kind == Kind.USER_DEFINED and not _is_blank(token))
        ],
        **parts,
        "post_processor": _post_processor(metadata),
    }


def added_token(number: int, text: str, *, special: bool = True, rstrip: bool = False) -> Json:
    token = {"id": number, "content": text, "special": special, "rstrip": rstrip}
    return token | dict.fromkeys(("single_word", "lstrip", "normalized"), False)


def special_tokens(metadata: Mapping[str, Any]) -> dict[str, int]:
    """The ids of bos_token, eos_token, unk_token and pad_token, as far as there are any."""
    defaults = {"bos": 1, "eos": 2, "unknown": 0} if metadata.get("tokenizer.ggml.model") == "llama" else {}
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    found = {names[each]: metadata.get(f"tokenizer.ggml.{each}_token_id", defaults.get(each)) for each in names}
    count = len(metadata["tokenizer.ggml.tokens"])
    return {name: number for name, number in found.items() if number is not None and 0 <= number < count}


def adds(metadata: Mapping[str, Any], which: Literal["bos", "eos"]) -> bool:
    """Whether texts begin with BOS, or end with EOS."""
    is_llama = metadata.get("tokenizer.ggml.model") == "llama"
    default = which == "bos" and (is_llama or metadata.get("tokenizer.ggml.pre") in _WHOLE_WORDS_FIRST)
    return bool(metadata.get(f"tokenizer.ggml.add_{which}_token", default))


def _post_processor(metadata: Mapping[str, Any]) -> Json | None:
    tokens, ids = metadata["tokenizer.ggml.tokens"], special_tokens(metadata)
    used = [each for each in _ENDS if f"{each}_token" in ids and adds(metadata, each)]
    return post_processor({each: (tokens[ids[f"{each}_token"]], ids[f"{each}_token"]) for each in used})


def post_processor(ends: Mapping[Literal["bos", "eos"], tuple[str, int]]) -> Json | None:
    """The post-processor that begins texts with BOS and ends them with EOS, which are given by their text and id."""
    if not ends:
        return None
    add = {each: [{"SpecialToken": {"id": text, "type_id": 0}}] for each, (text, _) in ends.items()}
    first, second = (
        [*add.get("bos", []), {"Sequence": {"id": each, "type_id": 0}}, *add.get("eos", [])] for each in "AB"
    )
    return {
        "type": "TemplateProcessing",
        "single": first,
        "pair": [*first, *second],
        "special_tokens": {text: {"id": text, "ids": [number], "tokens": [text]} for text, number in ends.values()},
    }


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str]) -> Json:
    """BPE of bytes, with a character for each byte, as in GPT-2."""
    pre = metadata.get("tokenizer.ggml.pre")
    if pre not in _SPLITS:
        raise ConfigError(
            f"tokenizer.ggml.pre {pre} is not supported; supported: {', '.join(_SPLITS)}; or set --tokenizer"
        )
    split = {"type": "Split", "pattern": {"Regex": _SPLITS[pre]}, "behavior": "Isolated", "invert": False}
    digits = {"type": "Digits", "individual_digits": True}
    before = [split] * bool(_SPLITS[pre]) + [digits] * (pre in _ONE_DIGIT)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": not _SPLITS[pre]}
    return {
        "normalizer": {"type": "NFC"} if pre in _NFC else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*before, byte_level]},
        "decoder": byte_level,
        "model": {
            **_bpe(tokens, _listed_merges(metadata)),
            "ignore_merges": pre in _WHOLE_WORDS_FIRST,
        },
    }


def _sentencepiece(metadata: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int]) -> Json:
    """BPE of characters, with ▁ for a space and single bytes for characters without a token, as in Llama 2 and
    Gemma."""
    has_prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    pieces = [token.replace(" ", "▁") if _is_blank(token) else token for token in tokens]
    merges = _listed_merges(metadata) or sentencepiece_merges(pieces, kinds, metadata["tokenizer.ggml.scores"])
    unknown = special_tokens(metadata).get("unk_token")
    normalizers = [{"type": "Prepend", "prepend": "▁"}] * has_prefix
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] * has_prefix
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*normalizers, _replaced(" ", "▁")]},
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [_replaced("▁", " "), {"type": "ByteFallback"}, {"type": "Fuse"}, *strip],
        },
        "model": {
            **_bpe(pieces, merges),
            "unk_token": None if unknown is None else pieces[unknown],
            "fuse_unk": True,
            "byte_fallback": True,
        },
    }


def _replaced(before: str, after: str) -> Json:
    return {"type": "Replace", "pattern": {"String": before}, "content": after}


def _is_blank(token: str) -> bool:
    """llama.cpp stores the pieces of several ▁ as spaces."""
    return not token.strip(" ▁")


def _bpe(tokens: Sequence[str], merges: Sequence[Sequence[str]]) -> Json:
    vocabulary = {token: number for number, token in enumerate(tokens)}
    return {"type": "BPE", "dropout": None, "vocab": vocabulary, "merges": merges}


def _listed_merges(metadata: Mapping[str, Any]) -> list[list[str]]:
    return [merge.split(" ") for merge in metadata.get("tokenizer.ggml.merges", [])]


def sentencepiece_merges(pieces: Sequence[str], kinds: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """SentencePiece merges any two pieces that make a piece, the piece with the best score first. User-defined pieces
    come before all others."""
    kept = (Kind.NORMAL, Kind.USER_DEFINED, Kind.UNUSED)
    known = {piece for piece, kind in zip(pieces, kinds, strict=True) if kind in kept}
    ranked = [
        (-math.inf if kind == Kind.USER_DEFINED else -score, number, -cut, piece[:cut], piece[cut:])
        for number, (piece, kind, score) in enumerate(zip(pieces, kinds, scores, strict=True))
        for cut in range(1, len(piece) if kind in kept else 0)
        if piece[:cut] in known and piece[cut:] in known
    ]
    return [(left, right) for *_, left, right in sorted(ranked)]
