"""Mistral's tekken.json as the tokenizer.json that `tokenizers` reads. No torch.

Source: src/mistral_common/tokens/tokenizers/tekken.py of github.com/mistralai/mistral-common.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from quire.engine.protocol.errors import ConfigError
from quire.engine.repository.gguf_tokenizer import added_token, post_processor

Json = dict[str, Any]

_FIRST_SPECIAL = (
    "<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CALLS] "
    "[IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT]"
)
"""The special tokens of files that do not list them, up to version 7."""
BOS, EOS = "<s>", "</s>"


def tokenizer_json(tekken: Mapping[str, Any]) -> Json:
    """Special tokens come first, then tokens by rank. Prompts begin with BOS.

    Raises `ConfigError` for unsupported settings, and other errors for files that are not complete.
    """
    config = tekken["config"]
    special = special_tokens(tekken)
    count = config["default_vocab_size"] - len(special)
    tokens = [base64.b64decode(entry["token_bytes"]) for entry in tekken["vocab"][:count]]
    if [entry["rank"] for entry in tekken["vocab"][:count]] != list(range(count)):
        raise ConfigError(f"vocab has {len(tokens)} tokens whose ranks are not 0 to {count - 1}")
    ranks = {token: rank for rank, token in enumerate(tokens)}
    texts = {token: "".join(map(_CHARACTERS.__getitem__, token)) for token in tokens}
    split = {"type": "Split", "pattern": {"Regex": config["pattern"]}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [added_token(number, text) for number, text in enumerate(special)],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": post_processor({"bos": (BOS, special.index(BOS))}),
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "ignore_merges": True,
            "vocab": dict(zip((*special, *texts.values()), range(len(special) + len(texts)), strict=True)),
            "merges": [(texts[left], texts[right]) for left, right in _merges(ranks)],
        },
    }


def special_tokens(tekken: Mapping[str, Any]) -> list[str]:
    """The special tokens by id; tokens without a name are placeholders."""
    listed = tekken.get("special_tokens")
    if listed is None:
        listed = [{"rank": number, "token_str": text} for number, text in enumerate(_FIRST_SPECIAL.split())]
    named = {entry["rank"]: entry["token_str"] for entry in listed}
    count = tekken["config"]["default_num_special_tokens"]
    if len(named) != len(listed) or not named.keys() <= set(range(count)):
        raise ConfigError(f"the ranks of special_tokens are not different ones below {count}")
    return [named.get(number, f"<SPECIAL_{number}>") for number in range(count)]


def _merges(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Any two tokens that make a token are merged, in the order of the rank of the token that they make."""
    found = []
    for token in ranks:
        cuts = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        pairs = [(left, right) for left, right in cuts if left in ranks and right in ranks]
        found += sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return found


def _characters() -> list[str]:
    """The character that stands for each byte: itself if it is printable, otherwise one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(0x100 + others.index(byte)) if byte in others else chr(byte) for byte in range(256)]


_CHARACTERS = _characters()
