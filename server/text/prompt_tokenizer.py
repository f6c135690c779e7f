"""Prompts as token ids, within the model's limits."""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from quire.engine.config.engine_config import ModelConfig
from quire.engine.protocol.errors import InvalidParameter
from quire.server.text.inputs import ContextLengthExceeded, Prompt, TruncationSide
from quire.server.text.tokenizer import Tokenizer

T = TypeVar("T")
Truncated = TypeVar("Truncated", str, list[int])

SHORT = 2048
"""Characters and token ids that are processed on the event loop. More are processed in a thread, so that other streams
do not wait.
"""
MAX_PROMPT_TOKENS = 2**21
"""Tokens of all prompts or inputs of a request. A single prompt may have as many as the model allows."""


class PromptTokenizer:
    """Tokenizes prompts. Raises `InvalidParameter` for prompts that the model does not take."""

    def __init__(self, tokenizer: Tokenizer, model: ModelConfig) -> None:
        self.tokenizer = tokenizer
        self.max_model_len = model.max_model_len
        self.vocab_size = model.architecture.vocab_size

    def num_kept(self, truncate: int | None, reserved: int = 0) -> int | None:
        """Resolve `truncate_prompt_tokens` to a number of tokens; None: all of them. -1 leaves `reserved` tokens of the
        model's length for the output.
        """
        if truncate == -1:
            return max(1, self.max_model_len - reserved)
        if truncate is not None and not 1 <= truncate <= self.max_model_len:
            raise InvalidParameter(
                f"truncate_prompt_tokens must be -1 or from 1 to {self.max_model_len}, got {truncate}",
                "truncate_prompt_tokens",
            )
        return truncate

    def token_ids(
        self, prompt: Prompt, param: str, last: int | None, add_special_tokens: bool, side: TruncationSide = "left"
    ) -> list[int]:
        """Return the token ids of a prompt; of a text, at least the `last` ones."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(self.cut(prompt, param, last, side), add_special_tokens=add_special_tokens)
        try:
            return [operator.index(token_id) for token_id in prompt]
        except TypeError:
            raise InvalidParameter(f"{param}: token ids must be integers", param) from None

    def most_characters(self, last: int | None) -> int | None:
        """Return the number of characters of a text that is truncated to `last` tokens which are tokenized as in the
        whole text; None: all of them.
        """
        longest = self.tokenizer.max_characters
        return None if last is None or longest is None else 2 * longest * (last + 1)

    def cut(self, text: str, param: str, last: int | None, side: TruncationSide = "left") -> str:
        """Return the part of a text that its `last` tokens may represent; rejects a text that is certainly too long, or
        contains an unpaired surrogate.
        """
        try:
            text.encode()
        except UnicodeEncodeError:
            message = f"{param}: the text contains an unpaired surrogate, which is not a character"
            raise InvalidParameter(message, param) from None
        if last is not None and (kept := self.most_characters(last)) is not None:
            return truncated(text, kept, side)
        longest = self.tokenizer.max_characters
        if longest is not None and (least := len(text) // longest) > self.max_model_len:
            raise ContextLengthExceeded(
                f"this model's maximum context length is {self.max_model_len} tokens, output included, but the "
                f"prompt has at least {least}",
                param,
            )
        return text

    def add_tokens(self, total: int, ids: Sequence[int], param: str) -> int:
        """Count a prompt; rejects too many tokens in one request."""
        total += len(ids)
        if total > (most := max(MAX_PROMPT_TOKENS, self.max_model_len)):
            raise InvalidParameter(f"{param}: more than {most} tokens in one request; send several requests", param)
        return total

    def check_ids(self, ids: Collection[int], param: str) -> None:
        """Reject ids outside of the model's vocabulary; a tokenizer may have more tokens than its model."""
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            bad = next(i for i in ids if not 0 <= i < self.vocab_size)
            raise InvalidParameter(
                f"{param}: token id {bad} is not in the model's vocabulary (0 to {self.vocab_size - 1})", param
            )


def truncated(given: Truncated, length: int, side: TruncationSide) -> Truncated:
    """Return the part that remains when `side` is truncated."""
    return given[-length:] if side == "left" else given[:length]


async def run_in_thread(size: int, work: Callable[[], T]) -> T:
    """Return the result of work on so many characters or tokens: in a thread, unless there are few."""
    return work() if size <= SHORT else await asyncio.to_thread(work)
