"""Converts tokenizers that are Python classes over tiktoken (Kimi K2) to `tokenizers`. Imports transformers."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from transformers.convert_slow_tokenizer import TikTokenConverter

from quire.engine.protocol.errors import ConfigError

_SAMPLES = (
    "Hello, world! It's 2024's 3rd test; they'LL say \u201cnaïve café\u201d, don't they?",
    "def f(x_1: int) -> str:\n    return f'{x_1:>10}'\r\n\n\n\t\tx  +=  123456789.5\n   \n",
    "你好，世界！今天是2024年。I'm中文mixed文本です。ありがとう、한국어 텍스트",
    "Ελληνικά РУССКИЙ текст עברית العربية हिन्दी ไทย 😀👩‍👩‍👧 e\u0301\u00a0\u2003x",
    "   leading and trailing   ",
)
"""Texts for which both tokenizers must give the same tokens."""


def converted(slow: Any) -> Backend:
    """Return the same tokenizer as a `tokenizers` backend.

    Raises `ConfigError` if the class does not hold a `tiktoken.Encoding`, or if samples get other tokens.
    """
    name = type(slow).__name__
    encodings = [each for each in vars(slow).values() if type(each).__module__.partition(".")[0] == "tiktoken"]
    if len(encodings) != 1:
        raise ConfigError(f"{name} is not supported, because it uses neither `tokenizers` nor tiktoken")
    encoding: Any = encodings[0]
    converter: Any = TikTokenConverter(pattern=encoding._pat_str)  # type: ignore[no-untyped-call]
    converter.load_tiktoken_bpe = lambda file: encoding._mergeable_ranks
    backend: Backend = converter.converted()
    added = {number: AddedToken(text, special=True) for text, number in encoding._special_tokens.items()}
    for number, token in sorted((added | dict(slow.added_tokens_decoder)).items()):
        backend.add_tokens([AddedToken(str(token), special=token.special, normalized=False)])
        if backend.token_to_id(str(token)) != number:
            raise ConfigError(f"{name} is not supported: the ids of its special tokens have gaps before {token}")
    for text in (*_SAMPLES, *(str(token) for token in added.values())):
        for special in (True, False):
            ids = backend.encode(text, add_special_tokens=special).ids
            if ids != list(slow.encode(text, add_special_tokens=special)):
                raise ConfigError(f"{name} is not supported: `tokenizers` gives other tokens than it for {text!r}")
    return backend
