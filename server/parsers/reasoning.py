"""Parses the reasoning that a model writes before it answers."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from quire.server.parsers.events import Content, Reasoning
from quire.server.parsers.incremental import IncrementalParser, Steps, TextCutOff, any_of, beginning_of, space_before


@dataclass(frozen=True)
class ReasoningFormat:
    """The markers of reasoning; adjacent white space belongs to them."""

    open: str
    close: str

    @property
    def all_markers(self) -> tuple[str, ...]:
        """The markers that the parser needs."""
        return (self.open, self.close)

    def is_opened_by(self, prompt: str) -> bool:
        """Whether the prompt ends inside reasoning."""
        return prompt.rstrip().endswith(self.open)

    def is_closed_by(self, prompt: str) -> bool:
        """Whether the prompt ends after reasoning."""
        return prompt.rstrip().endswith(self.close)


_THINK = ReasoningFormat("<think>", "</think>")
# DeepSeek-R1 (https://huggingface.co/deepseek-ai/DeepSeek-R1) and models that follow it: Qwen3, QwQ, GLM, Granite 3.3.

REASONING_FORMATS: dict[str, ReasoningFormat] = {
    "deepseek_r1": _THINK,
    "deepseek_v3": _THINK,
    "qwen3": _THINK,
    "glm45": _THINK,
    # The template of Granite 3.2 (https://huggingface.co/ibm-granite/granite-3.2-8b-instruct) asks for these words.
    "granite": ReasoningFormat("Here is my thought process:", "Here is my response:"),
    # Magistral 2509 (https://huggingface.co/mistralai/Magistral-Small-2509).
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
}
"""The values of --reasoning-parser besides `auto` and `none`; the names are vLLM's."""


def detect_reasoning(template: str) -> str | None:
    """Return the name of the format that a chat template uses, or None."""
    for name in ("granite", "mistral", "deepseek_r1"):
        if REASONING_FORMATS[name].close in template:
            return name
    return None


class ReasoningParser(IncrementalParser):
    """Splits text into reasoning and content.

    Reasoning comes first; `is_open` means that the prompt has opened it already. If it is never closed, all text is
    reasoning.
    """

    def __init__(self, format: ReasoningFormat, is_open: bool) -> None:
        self._format = format
        self._is_open = is_open
        self._close = any_of((format.close,))
        self._half_close = beginning_of((format.close,))
        super().__init__()

    def _run(self) -> Steps[None]:
        if self._is_open or (yield from self._opens()):
            yield from self._skip_space()
            yield from self._thoughts()
            yield from self._skip_space()
        while True:
            self._emit_text(Content, len(self._text))
            yield

    def _opens(self) -> Steps[bool]:
        with contextlib.suppress(TextCutOff):
            yield from self._peek()
            if (yield from self._take(self._format.open)):
                return True
        self._pos = 0
        return False

    def _skip_space(self) -> Steps[None]:
        with contextlib.suppress(TextCutOff):
            yield from self._peek()
        self._drop()

    def _thoughts(self) -> Steps[None]:
        """Emit the text up to the closing marker, and discard the marker."""
        while (found := self._close.search(self._text)) is None:
            if self._ended:
                self._emit_text(Reasoning, len(self._text))
                return
            half = self._half_close.search(self._text, max(0, len(self._text) - len(self._format.close)))
            end = half.start() if half else len(self._text)
            self._emit_text(Reasoning, end - space_before(self._text, end))
            yield
        self._emit_text(Reasoning, found.start() - space_before(self._text, found.start()))
        self._pos = self._text.index(self._format.close) + len(self._format.close)

    def _emit_text(self, kind: type[Content | Reasoning], length: int) -> None:
        if length:
            self._events.append(kind(self._text[:length]))
            self._text = self._text[length:]
