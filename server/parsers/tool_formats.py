"""The formats of tool calls: one description each, used by the parser (`tool_calls`) and by `tool_grammar`."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

Around = tuple[str, str, str]
"""The text of a call before its name, between name and arguments, and after the arguments."""


@dataclass(frozen=True)
class JsonObject:
    """A call is an object with `name` and, under `key`, the arguments. The parser reads the keys in any order, also
    `arguments` for `parameters` and vice versa, and a list of such objects.
    """

    key: str = "arguments"

    @property
    def around(self) -> Around:
        return '{"name": "', f'", "{self.key}": ', "}"


@dataclass(frozen=True)
class Json:
    """The arguments after the name are a JSON object."""

    around: Around


@dataclass(frozen=True)
class Python:
    """A call in Python, with keyword arguments."""

    around: ClassVar[Around] = ("", "(", ")")


@dataclass(frozen=True)
class Quoted:
    """The arguments are like JSON, but with bare keys, and with `quote` around strings, in which nothing is escaped."""

    quote: str
    around: ClassVar[Around] = ("", "{", "}")


@dataclass(frozen=True)
class Tagged:
    """Each argument is `open`, the key, `between`, the value, `close`.

    A value is raw text if the function's schema says string, otherwise JSON. White space around tags is ignored. Inside
    of them, next to the value, it is a part of the value, except for one line break where `between` ends or `close`
    starts with one.
    """

    around: Around
    open: str
    between: str
    close: str
    between_json: str = ""
    """Instead of `between` before values that are not strings, if the tags say so."""


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _mistral_id() -> str:
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """The notation of calls.

    A block is a marker, the rest of its opening, calls separated by `separator`, its closing. Blocks are separated by
    `gap`. White space around the pieces is ignored.
    """

    names: tuple[str, ...] = ()
    """Values of --tool-call-parser."""
    signs: tuple[tuple[str, ...], ...] = ()
    """A chat template that contains all texts of one of these uses the format. Default: the marker."""
    block: tuple[str, str, str] = ("", "", "")
    """The marker that opens a block, the text after the marker, and the text that closes the block."""
    other_markers: tuple[str, ...] = ()
    """Each also opens a block. One that begins a call opens the call, too, and the block may lack its closing."""
    bare: str = ""
    """The character that opens a block without a marker, at the very start of an answer."""
    call: JsonObject | Json | Python | Quoted | Tagged = JsonObject()
    separator: str | None = None
    """None: a block has one call."""
    may_close: str = ""
    """Read if it follows a block."""
    gap: str = "\n"
    inner: tuple[str, ...] = ()
    """Markers inside of a block that are single tokens in some tokenizers."""
    id_as_name: bool = False
    """The call's id takes the place of the name: `functions.`, the name, a colon and a number."""
    answer_open: str = ""
    """The text before an answer that is not a call."""
    new_id: Callable[[], str] = _call_id
    read_as: ToolFormat | None = None
    """The format to parse, if models that write this one also write another."""

    @property
    def markers(self) -> tuple[str, ...]:
        """The markers that open a block, anywhere in a text."""
        return (self.block[0], *self.other_markers) if self.block[0] else self.other_markers

    @property
    def all_markers(self) -> tuple[str, ...]:
        """The markers that the parser needs."""
        return (*self.markers, *(self.read_as or self).inner)


_DEEPSEEK_INNER = ("<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>")
_GLM_INNER = ("</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_DSML = Tagged(
    ('<｜DSML｜invoke name="', '">\n', "</｜DSML｜invoke>"),
    open='<｜DSML｜parameter name="',
    between='" string="true">',
    close="</｜DSML｜parameter>\n",
    between_json='" string="false">',
)

MISTRAL_ARGS = ToolFormat(
    # Mistral's tokenizers v11 and v13, as in the templates of Mistral-Small-3.2, Devstral 2 and Ministral 3: every call
    # has its marker. v11 also writes [CALL_ID] and an id before [ARGS], which is read and ignored.
    names=("mistral_args",),
    signs=(("[TOOL_CALLS]", "[ARGS]"),),
    block=("[TOOL_CALLS]", "", ""),
    call=Json(("", "[ARGS]", "")),
    gap="",
    inner=("[ARGS]", "[CALL_ID]"),
    new_id=_mistral_id,
)

HARMONY_MARKERS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")

_FORMATS = (
    ToolFormat(
        # DeepSeek, the templates of DeepSeek-V3, V3-0324, R1 and R1-0528.
        names=("deepseek_v3", "deepseek_r1"),
        signs=(
            ("<｜tool▁calls▁begin｜>", "function<｜tool▁sep｜>"),
            ("<｜tool▁calls▁begin｜>", "'<｜tool▁sep｜>'", "```json"),
        ),
        block=("<｜tool▁calls▁begin｜>", "", "<｜tool▁calls▁end｜>"),
        call=Json(("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n", "\n```<｜tool▁call▁end｜>")),
        separator="\n",
        inner=_DEEPSEEK_INNER,
    ),
    ToolFormat(
        # DeepSeek, the template of DeepSeek-V3.1: no type, no code fence.
        names=("deepseek_v31",),
        signs=(("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>"),),
        block=("<｜tool▁calls▁begin｜>", "", "<｜tool▁calls▁end｜>"),
        call=Json(("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")),
        separator="",
        inner=_DEEPSEEK_INNER,
    ),
    MISTRAL_ARGS,
    ToolFormat(
        # Mistral's tokenizers v3 and v7, as in the template of Mistral-7B-Instruct-v0.3 and Mistral-Small-3.1: a JSON
        # list. Templates require call ids of nine letters and digits.
        names=("mistral",),
        block=("[TOOL_CALLS]", "[", "]"),
        separator=", ",
        new_id=_mistral_id,
        read_as=MISTRAL_ARGS,
    ),
    ToolFormat(
        # IBM, the templates of Granite 3.0 (<tool_call>) to 3.3 (<|tool_call|>): a JSON list after the marker.
        names=("granite",),
        signs=(("<|tool_call|>", "<|start_of_role|>"), ("<tool_call>", "assistant_tool_call")),
        block=("<|tool_call|>", "[", "]"),
        other_markers=("<tool_call>",),
        separator=", ",
        gap="",
    ),
    ToolFormat(
        # OpenAI, the format of gpt-oss: https://github.com/openai/harmony/blob/main/docs/format.md. `harmony` parses
        # it; a grammar lets the model write this form. <|call|> ends the answer.
        names=("openai",),
        signs=(("<|channel|>", "<|message|>", "functions."),),
        block=("<|channel|>", "commentary to=functions.", ""),
        call=Json(("", " <|constrain|>json<|message|>", "")),
        gap="<|call|><|start|>assistant",
        answer_open="<|channel|>final<|message|>",
        inner=HARMONY_MARKERS,
    ),
    ToolFormat(
        # Tencent, the template of Hunyuan 3.
        names=("hy_v3",),
        signs=(("<tool_sep>", "<arg_key>"),),
        block=("<tool_calls>", "\n", "\n</tool_calls>"),
        call=Tagged(
            ("<tool_call>", "<tool_sep>\n", "</tool_call>"),
            open="<arg_key>",
            between="</arg_key>\n<arg_value>",
            close="</arg_value>\n",
        ),
        separator="\n",
        inner=("</tool_calls>", "<tool_call>", "<tool_sep>", *_GLM_INNER),
    ),
    ToolFormat(
        # ByteDance, the template of Seed-OSS.
        names=("seed_oss",),
        block=("<seed:tool_call>", "\n", "\n</seed:tool_call>"),
        call=Tagged(("<function=", ">\n", "</function>"), open="<parameter=", between=">", close="</parameter>\n"),
        inner=("</seed:tool_call>",),
    ),
    ToolFormat(
        # MiniMax, the template of MiniMax-M2 and its tool calling guide.
        names=("minimax_m2",),
        block=("<minimax:tool_call>", "\n", "\n</minimax:tool_call>"),
        call=Tagged(
            ('<invoke name="', '">\n', "</invoke>"), open='<parameter name="', between='">', close="</parameter>\n"
        ),
        separator="\n",
        inner=("</minimax:tool_call>",),
    ),
    ToolFormat(
        # DeepSeek, the encoding of DeepSeek-V3.2, whose repository has a Python module instead of a template.
        names=("deepseek_v32",),
        signs=(("｜DSML｜", "function_calls>"),),
        block=("<｜DSML｜function_calls>", "\n", "\n</｜DSML｜function_calls>"),
        call=_DSML,
        separator="\n",
        inner=("｜DSML｜",),
    ),
    ToolFormat(
        # DeepSeek, the encoding of DeepSeek-V4: as V3.2, but for the name of the block.
        names=("deepseek_v4",),
        signs=(("｜DSML｜",),),
        block=("<｜DSML｜tool_calls>", "\n", "\n</｜DSML｜tool_calls>"),
        call=_DSML,
        separator="\n",
        inner=("｜DSML｜",),
    ),
    ToolFormat(
        # StepFun, the template of Step3.
        names=("step3",),
        signs=(("<steptml:invoke",),),
        block=("<｜tool_calls_begin｜>", "\n", "\n<｜tool_calls_end｜>"),
        call=Tagged(
            (
                '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="',
                '">\n',
                "</steptml:invoke><｜tool_call_end｜>",
            ),
            open='<steptml:parameter name="',
            between='">',
            close="</steptml:parameter>\n",
        ),
        separator="\n",
        inner=("<｜tool_calls_end｜>", "<｜tool_call_begin｜>", "<｜tool_call_end｜>", "<｜tool_sep｜>"),
    ),
    ToolFormat(
        # Qwen, the template of Qwen3-Coder, also in Qwen3.5, Nemotron 3 and Step 3.5. Qwen3-Coder sometimes omits
        # <tool_call>.
        names=("qwen3_coder", "qwen3_xml", "step3p5"),
        signs=(("<tool_call>", "<function="),),
        block=("<tool_call>", "\n", "\n</tool_call>"),
        other_markers=("<function=",),
        call=Tagged(("<function=", ">\n", "</function>"), open="<parameter=", between=">\n", close="\n</parameter>\n"),
        inner=("</tool_call>",),
    ),
    ToolFormat(
        # Zhipu, the templates of GLM-4.5 and GLM-4.6.
        names=("glm45",),
        signs=(("<tool_call>{function-name}\n", "<arg_key>"),),
        block=("<tool_call>", "", "</tool_call>"),
        call=Tagged(("", "\n", ""), open="<arg_key>", between="</arg_key>\n<arg_value>", close="</arg_value>\n"),
        inner=_GLM_INNER,
    ),
    ToolFormat(
        # Zhipu, the templates of GLM-4.7 and GLM-5: without line breaks.
        names=("glm47",),
        signs=(("<tool_call>", "<arg_key>"),),
        block=("<tool_call>", "", "</tool_call>"),
        call=Tagged(("", "", ""), open="<arg_key>", between="</arg_key><arg_value>", close="</arg_value>"),
        gap="",
        inner=_GLM_INNER,
    ),
    ToolFormat(
        # Moonshot, docs/tool_call_guidance.md of Kimi-K2. The template shows the model a call's id, which has this
        # form.
        names=("kimi_k2",),
        signs=(("<|tool_calls_section_begin|>",), ("tool_declare<|im_middle|>",)),
        block=("<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>"),
        call=Json(("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")),
        separator="",
        inner=(
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
        ),
        id_as_name=True,
    ),
    ToolFormat(
        # Tencent, the template of Hunyuan-A13B.
        names=("hunyuan_a13b",),
        signs=(("<tool_calls>", "</tool_calls>"),),
        block=("<tool_calls>", "[", "]</tool_calls>"),
        separator=", ",
        inner=("</tool_calls>",),
    ),
    ToolFormat(
        # NVIDIA, the templates of Llama-Nemotron and Nemotron Nano 2.
        names=("nemotron_json",),
        block=("<TOOLCALL>", "[", "]</TOOLCALL>"),
        separator=", ",
        inner=("</TOOLCALL>",),
    ),
    ToolFormat(
        # Shanghai AI Laboratory, the template of InternLM2.5 for tools.
        names=("internlm",),
        signs=(("<|plugin|>",),),
        block=("<|action_start|>", "<|plugin|>\n", "\n<|action_end|>"),
        call=JsonObject("parameters"),
        inner=("<|plugin|>", "<|action_end|>"),
    ),
    ToolFormat(
        # Liquid AI, the templates of LFM2 and LFM2.5.
        names=("lfm2",),
        block=("<|tool_call_start|>", "[", "]<|tool_call_end|>"),
        call=Python(),
        separator=", ",
        inner=("<|tool_call_end|>",),
    ),
    ToolFormat(
        # Ai2, the template of Olmo 3: a call per line.
        names=("olmo3",),
        block=("<function_calls>", "\n", "\n</function_calls>"),
        call=Python(),
        separator="\n",
        inner=("</function_calls>",),
    ),
    ToolFormat(
        # Google, the template of FunctionGemma.
        names=("functiongemma",),
        block=("<start_function_call>", "call:", "<end_function_call>"),
        call=Quoted("<escape>"),
        may_close="<start_function_response>",
        gap="",
        inner=("<end_function_call>", "<escape>", "<start_function_response>"),
    ),
    ToolFormat(
        # Google, the template of Gemma 4: the same with other markers.
        names=("gemma4",),
        signs=(("<|tool_call>", '<|"|>'),),
        block=("<|tool_call>", "call:", "<tool_call|>"),
        call=Quoted('<|"|>'),
        may_close="<|tool_response>",
        gap="",
        inner=("<tool_call|>", '<|"|>', "<|tool_response>"),
    ),
    ToolFormat(
        # Microsoft, Phi-4-mini: its template names no format. The model writes the first one, and other templates for
        # it ask for the second one.
        names=("phi4_mini_json",),
        signs=(("<|tool|>", "<|/tool|>"),),
        block=("functools", "[", "]"),
        other_markers=("<|tool_call|>",),
        separator=", ",
        may_close="<|/tool_call|>",
        inner=("<|/tool_call|>",),
    ),
    ToolFormat(
        # Nous Research, https://github.com/NousResearch/Hermes-Function-Calling; also used by the templates of Qwen2.5,
        # Qwen3, QwQ and Granite 4. Several calls: several blocks, one per line.
        names=("hermes", "qwen", "granite4"),
        signs=(("<tool_call>", '"arguments"'), ("<tool_call>", "</tool_call>", "arguments")),
        block=("<tool_call>", "\n", "\n</tool_call>"),
        inner=("</tool_call>",),
    ),
    ToolFormat(
        # Meta, "zero-shot function calling" in
        # https://github.com/meta-llama/llama-models/blob/main/models/llama3_2/text_prompt_format.md, and Llama 4, which
        # may put it between <|python_start|> and <|python_end|>. Also Gemma 3, which has no template for tools of its
        # own.
        names=("pythonic", "llama4_pythonic"),
        signs=(("[func_name1(",),),
        block=("", "[", "]"),
        other_markers=("<|python_start|>",),
        bare="[",
        call=Python(),
        separator=", ",
        may_close="<|python_end|>",
        inner=("<|python_end|>",),
    ),
    ToolFormat(
        # Meta, "JSON based tool calling" in https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1/: an
        # object instead of an answer; <|python_tag|> may precede it, and some models write several, separated by
        # semicolons.
        names=("llama3_json", "llama4_json"),
        signs=(('"parameters": ', "<|start_header_id|>"), ('"parameters": ', "<|header_start|>")),
        other_markers=("<|python_tag|>",),
        bare="{",
        call=JsonObject("parameters"),
        separator="; ",
    ),
)
"""A new format is one entry here; its names are also choices of a flag, in `ServerOptions`. It stands before the
formats whose signs its templates also contain.
"""

TOOL_FORMATS = {name: format for format in _FORMATS for name in format.names}
"""The values of --tool-call-parser besides `auto` and `none`; the names are vLLM's where it has one."""

HARMONY = TOOL_FORMATS["openai"]


def detect_tools(template: str) -> str | None:
    """Return the name of the format that a chat template uses, or None if it is unknown."""
    for format in _FORMATS:
        assert format.signs or format.block[0], f"every template would be one of {format.names[0]}"
        if any(all(sign in template for sign in signs) for signs in format.signs or (format.block[:1],)):
            return format.names[0]
    return None
