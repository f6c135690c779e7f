"""Parses the reasoning that a model writes before it answers."""

from __future__ import annotations

import contextlib
from dataclasses import KW_ONLY, dataclass

from quire.server.parsers.events import Content, Reasoning
from quire.server.parsers.incremental import IncrementalParser, Steps, TextCutOff, any_of, beginning_of, space_before
from quire.server.parsers.tool_formats import HARMONY_MARKERS


@dataclass(frozen=True)
class ReasoningFormat:
    """The markers of reasoning; adjacent white space belongs to them."""

    open: str
    close: str
    _: KW_ONLY
    answer: tuple[str, ...] = ()
    """The markers that open and close the answer after reasoning, if the model writes them."""
    ends: tuple[str, ...] = ()
    """Markers of calls, which end reasoning that is not closed."""
    inner: tuple[str, ...] = ()
    """Other markers of the format."""
    signs: tuple[str, ...]
    """Texts that a chat template of the format contains."""

    @property
    def all_markers(self) -> tuple[str, ...]:
        """The markers that the parser needs."""
        return (self.open, self.close, *self.answer, *self.ends, *self.inner)

    def is_opened_by(self, prompt: str) -> bool:
        """Whether the prompt ends inside reasoning."""
        return prompt.rstrip().endswith(self.open)

    def is_closed_by(self, prompt: str) -> bool:
        """Whether the prompt ends after reasoning. Harmony's messages of all channels begin after `close`."""
        return self != HARMONY_REASONING and prompt.rstrip().endswith(self.close)


# DeepSeek-R1 (https://huggingface.co/deepseek-ai/DeepSeek-R1) and models that follow it.
_THINK = ReasoningFormat("<think>", "</think>", signs=("</think>",))

HARMONY_REASONING = ReasoningFormat(
    "<|channel|>analysis<|message|>",
    "<|end|><|start|>assistant",
    inner=HARMONY_MARKERS,
    signs=("<|channel|>", "analysis"),
)

REASONING_FORMATS: dict[str, ReasoningFormat] = {
    # gpt-oss, whose answers `harmony` parses; see there.
    "openai_gptoss": HARMONY_REASONING,
    # The template of Granite 3.2 (https://huggingface.co/ibm-granite/granite-3.2-8b-instruct) asks for these words.
    "granite": ReasoningFormat("Here is my thought process:", "Here is my response:", signs=("Here is my response:",)),
    # Magistral 2509 (https://huggingface.co/mistralai/Magistral-Small-2509).
    "mistral": ReasoningFormat("[THINK]", "[/THINK]", signs=("[/THINK]",)),
    # The template of Seed-OSS (https://huggingface.co/ByteDance-Seed/Seed-OSS-36B-Instruct).
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>", signs=("</seed:think>",)),
    # The template of Hunyuan-A13B (https://huggingface.co/tencent/Hunyuan-A13B-Instruct).
    "hunyuan_a13b": ReasoningFormat(
        "<think>", "</think>", answer=("<answer>", "</answer>"), signs=("</think>", "<answer>")
    ),
    # Gemma 4 (https://ai.google.dev/gemma/docs/core/prompt-formatting-gemma4); calls end its thoughts, too.
    "gemma4": ReasoningFormat(
        "<|channel>thought",
        "<channel|>",
        ends=("<|tool_call>",),
        inner=("<|channel>",),
        signs=("<|channel>thought",),
    ),
    # Kimi K2 Thinking may call tools without closing its thoughts.
    "kimi_k2": ReasoningFormat(
        "<think>",
        "</think>",
        ends=("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>", "<|tool_call_begin|>"),
        signs=("</think>", "<|tool_calls_section_begin|>"),
    ),
    **dict.fromkeys(("deepseek_r1", "deepseek_v3", "deepseek_v4", "qwen3", "glm45", "glm47", "holo2", "hy_v3"), _THINK),
    **dict.fromkeys(("mimo", "minimax_m2", "nemotron_v3", "olmo3", "step3", "step3p5"), _THINK),
}
"""The values of --reasoning-parser besides `auto` and `none`; the names are vLLM's. `detect_reasoning` takes the first
format whose signs are all in the template: special cases stand before plain `<think>`."""


def detect_reasoning(template: str) -> str | None:
    """Return the name of the format that a chat template uses, or None."""
    for name, format in REASONING_FORMATS.items():
        if all(sign in template for sign in format.signs):
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
        super().__init__()

    def _run(self) -> Steps[None]:
        if self._is_open or (yield from self._opens()):
            yield from self._skip_space()
            yield from self._up_to(Reasoning, (self._format.close, *self._format.ends), self._format.ends)
            yield from self._skip_space()
            if self._format.answer:
                yield from self._answer(*self._format.answer)
        while True:
            self._emit_text(len(self._text))
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

    def _answer(self, opener: str, closer: str) -> Steps[None]:
        with contextlib.suppress(TextCutOff):
            if (yield from self._take(opener)):
                yield from self._skip_space()
                yield from self._up_to(Content, (closer,), ())
                yield from self._skip_space()

    def _up_to(self, kind: type[Content | Reasoning], markers: tuple[str, ...], kept: tuple[str, ...]) -> Steps[None]:
        """Emit the text up to the first marker, and discard the marker unless it is to be kept."""
        whole, half = any_of(*markers), beginning_of(*markers)
        while (found := whole.search(self._text)) is None:
            if self._ended:
                self._emit_text(len(self._text), kind)
                return
            begun = half.search(self._text, max(0, len(self._text) - max(map(len, markers))))
            end = begun.start() if begun else len(self._text)
            self._emit_text(end - space_before(self._text, end), kind)
            yield
        space = space_before(self._text, found.start())
        self._emit_text(found.start() - space, kind)
        self._pos = space + (0 if found[0] in kept else len(found[0]))
