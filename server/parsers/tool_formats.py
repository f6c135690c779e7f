"""The formats of tool calls: one description each, used by the parser (`tool_calls`) and by `tool_grammar`."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _mistral_id() -> str:
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """How calls are written.

    A block is `open`, calls separated by `separator`, `close`; a call is `before`, the name, `between`, the arguments,
    `after`. Blocks are separated by `gap`. If `before` starts an object, the parser reads any object with these keys
    (in any order, also `arguments` for `parameters` and vice versa), and a list of them; otherwise it reads the pieces
    in order. White space around the pieces is ignored.
    """

    markers: tuple[str, ...] = ()
    """Each opens a block, anywhere in the text."""
    bare: str = ""
    """The character that opens a block at the very start of an answer, without a marker."""
    open: str = ""
    before: str = '{"name": "'
    between: str = '", "arguments": '
    after: str = "}"
    separator: str | None = None
    """None: a block has one call."""
    close: str = ""
    gap: str = "\n"
    inner: tuple[str, ...] = ()
    """Markers inside of a block that are single tokens in some tokenizers."""
    python: bool = False
    """Arguments are Python keyword arguments, not JSON."""
    new_id: Callable[[], str] = _call_id
    read_as: ToolFormat | None = None
    """The format to parse, if models that write this one also write another."""

    @property
    def is_object(self) -> bool:
        """Whether a call is a JSON object."""
        return self.before.startswith("{")

    @property
    def all_markers(self) -> tuple[str, ...]:
        """The markers that the parser needs."""
        return (*self.markers, *(self.read_as or self).inner)


HERMES = ToolFormat(
    # Nous Research, https://github.com/NousResearch/Hermes-Function-Calling; also used by the templates of Qwen2.5,
    # Qwen3, QwQ and Granite 4. Several calls: several blocks, one per line.
    markers=("<tool_call>",),
    open="<tool_call>\n",
    close="\n</tool_call>",
    inner=("</tool_call>",),
)

LLAMA3 = ToolFormat(
    # Meta, "JSON based tool calling" in https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1/: an object
    # instead of an answer; <|python_tag|> may precede it, and some models write several, separated by semicolons.
    markers=("<|python_tag|>",),
    bare="{",
    between='", "parameters": ',
    separator="; ",
)

MISTRAL_ARGS = ToolFormat(
    # Mistral's tokenizers v11 and v13, as in the templates of Mistral-Small-3.2, Devstral 2 and Ministral 3: every call
    # has its marker. v11 also writes [CALL_ID] and an id before [ARGS], which is read and ignored.
    markers=("[TOOL_CALLS]",),
    open="[TOOL_CALLS]",
    before="",
    between="[ARGS]",
    after="",
    gap="",
    inner=("[ARGS]", "[CALL_ID]"),
    new_id=_mistral_id,
)

MISTRAL = ToolFormat(
    # Mistral's tokenizers v3 and v7, as in the template of Mistral-7B-Instruct-v0.3 and Mistral-Small-3.1: a JSON list.
    # Templates require call ids of nine letters and digits.
    markers=("[TOOL_CALLS]",),
    open="[TOOL_CALLS][",
    separator=", ",
    close="]",
    new_id=_mistral_id,
    read_as=MISTRAL_ARGS,
)

GRANITE = ToolFormat(
    # IBM, the templates of Granite 3.0 (<tool_call>) to 3.3 (<|tool_call|>): a JSON list after the marker.
    markers=("<|tool_call|>", "<tool_call>"),
    open="<|tool_call|>[",
    separator=", ",
    close="]",
    gap="",
)

_DEEPSEEK_INNER = ("<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>")

DEEPSEEK_V3 = ToolFormat(
    # DeepSeek, the templates of DeepSeek-V3, V3-0324, R1 and R1-0528.
    markers=("<｜tool▁calls▁begin｜>",),
    open="<｜tool▁calls▁begin｜>",
    before="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    between="\n```json\n",
    after="\n```<｜tool▁call▁end｜>",
    separator="\n",
    close="<｜tool▁calls▁end｜>",
    inner=_DEEPSEEK_INNER,
)

DEEPSEEK_V31 = ToolFormat(
    # DeepSeek, the template of DeepSeek-V3.1: no type, no code fence.
    markers=("<｜tool▁calls▁begin｜>",),
    open="<｜tool▁calls▁begin｜>",
    before="<｜tool▁call▁begin｜>",
    between="<｜tool▁sep｜>",
    after="<｜tool▁call▁end｜>",
    separator="",
    close="<｜tool▁calls▁end｜>",
    inner=_DEEPSEEK_INNER,
)

PYTHONIC = ToolFormat(
    # Meta, "zero-shot function calling" in
    # https://github.com/meta-llama/llama-models/blob/main/models/llama3_2/text_prompt_format.md, and Llama 4, which may
    # put it between <|python_start|> and <|python_end|>.
    markers=("<|python_start|>",),
    bare="[",
    open="[",
    before="",
    between="(",
    after=")",
    separator=", ",
    close="]",
    inner=("<|python_end|>",),
    python=True,
)

TOOL_FORMATS: dict[str, ToolFormat] = {
    "hermes": HERMES,
    "qwen": HERMES,
    "llama3_json": LLAMA3,
    "llama4_json": LLAMA3,
    "mistral": MISTRAL,
    "mistral_args": MISTRAL_ARGS,
    "granite": GRANITE,
    "granite4": HERMES,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_r1": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V31,
    "pythonic": PYTHONIC,
    "llama4_pythonic": PYTHONIC,
}
"""The values of --tool-call-parser besides `auto` and `none`; the names are vLLM's where it has one."""


def detect_tools(template: str) -> str | None:
    """Return the name of the format that a chat template uses, or None if it is unknown."""
    for name, signs in (
        ("deepseek_v3", ("<｜tool▁calls▁begin｜>", "function<｜tool▁sep｜>")),
        ("deepseek_v3", ("<｜tool▁calls▁begin｜>", "'<｜tool▁sep｜>'", "```json")),
        ("deepseek_v31", ("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>")),
        ("mistral_args", ("[TOOL_CALLS]", "[ARGS]")),
        ("mistral", ("[TOOL_CALLS]",)),
        ("granite", ("<|tool_call|>", "<|start_of_role|>")),
        ("granite", ("<tool_call>", "assistant_tool_call")),
        (None, ("<tool_call>", "<function=")),  # Qwen3-Coder's XML
        (None, ("<tool_call>", "<arg_key>")),  # GLM's XML
        ("hermes", ("<tool_call>", '"arguments"')),
        ("hermes", ("<tool_call>", "</tool_call>", "arguments")),
        ("pythonic", ("[func_name1(",)),
        ("llama3_json", ('"parameters": ', "<|start_header_id|>")),
        ("llama3_json", ('"parameters": ', "<|header_start|>")),
    ):
        if all(sign in template for sign in signs):
            return name
    return None
