"""Tokens and their log-probabilities in API responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.engine.protocol.logprobs import PromptLogprobs, TokenLogprobs
from quire.server.serving.llm_outputs import Logprob, prompt_logprobs
from quire.server.text.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have. OpenAI's API uses the same value."""


class TokenNames:
    r"""The text that represents a token: its own, or `token_id:123` with `as_ids`.

    A token that holds part of a character has no text. As in OpenAI's API, its bytes are shown instead, such as
    \xf0\x9f, after `prefix`. So different tokens have different names, unless they decode to the same text.
    """

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool, prefix: str = "") -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids
        self._prefix = prefix

    def __call__(self, token_id: int) -> str:
        if self._as_ids:
            return f"token_id:{token_id}"
        text = self._tokenizer.token_text(token_id)
        if "\ufffd" not in text or (raw := self._tokenizer.token_bytes(token_id)) == text.encode():
            return text
        return self._prefix + "".join(chr(byte) if 0x20 <= byte < 0x7F else f"\\x{byte:02x}" for byte in raw)


def token_logprobs(tokenizer: Tokenizer, name: TokenNames, token_id: int, at: TokenLogprobs, num_top: int) -> Any:
    """The log-probabilities of an output token in the format of chat and Responses."""

    def scored(token_id: int, logprob: float) -> dict[str, Any]:
        raw = list(tokenizer.token_bytes(token_id))
        return {"token": name(token_id), "logprob": max(logprob, MIN_LOGPROB), "bytes": raw}

    top = list(zip(at.top_ids, at.top_logprobs, strict=True))[:num_top]
    return scored(token_id, at.logprob) | {"top_logprobs": [scored(*each) for each in top]}


def prompt_logprobs_object(
    tokenizer: Tokenizer, prompt: Sequence[int], scores: PromptLogprobs, num_top: int | None
) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's `prompt_logprobs`: null for the prompt's first token, then the scores of each token and of the most likely
    ones.
    """
    return [
        None if at is None else {str(token_id): _object(entry) for token_id, entry in at.items()}
        for at in prompt_logprobs(tokenizer, prompt, scores, num_top)
    ]


def _object(entry: Logprob) -> dict[str, Any]:
    return entry._asdict() | {"logprob": max(entry.logprob, MIN_LOGPROB)}
