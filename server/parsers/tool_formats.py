"""The formats of tool calls: one description each, used by the parser (`tool_calls`) and by `tool_grammar`."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass, replace


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _mistral_id() -> str:
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


@dataclass(frozen=True, kw_only=True)
class TaggedArguments:
    """Arguments between tags: each is `open`, the key, `between`, the value, `close`.

    A value is raw text if the function's schema says string, otherwise JSON. White space around tags is ignored. Inside
    of them, next to the value, it is a part of the value, except for one line break where `between` ends or `close`
    starts with one.
    """

    open: str
    between: str
    close: str
    between_json: str = ""
    """Instead of `between` before values that are not strings, if the tags say so."""


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """How calls are written.

    A block is `open`, calls separated by `separator`, `close`; a call is `before`, the name, `between`, the arguments,
    `after`. Blocks are separated by `gap`. If `before` starts an object, the parser reads any object with these keys
    (in any order, also `arguments` for `parameters` and vice versa), and a list of them; otherwise it reads the pieces
    in order. White space around the pieces is ignored. A new format is an entry below and its signs in `detect_tools`.
    """

    markers: tuple[str, ...] = ()
    """Each opens a block, anywhere in the text. One that is `before` opens a call, and the block may lack `close`."""
    bare: str = ""
    """The character that opens a block at the very start of an answer, without a marker."""
    open: str = ""
    before: str = '{"name": "'
    between: str = '", "arguments": '
    after: str = "}"
    separator: str | None = None
    """None: a block has one call."""
    close: str = ""
    may_close: str = ""
    """Read if it follows a block."""
    gap: str = "\n"
    inner: tuple[str, ...] = ()
    """Markers inside of a block that are single tokens in some tokenizers."""
    python: bool = False
    """Arguments are Python keyword arguments, not JSON."""
    tagged: TaggedArguments | None = None
    """Arguments are tagged, not JSON."""
    quote: str = ""
    """Arguments are like JSON, but for these quotes of strings, in which nothing is escaped, and bare keys."""
    id_as_name: bool = False
    """In place of the name stands the call's id: `functions.`, the name, a colon and a number."""
    answer_open: str = ""
    """What precedes an answer that is not a call."""
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
    # put it between <|python_start|> and <|python_end|>. Also Gemma 3, which has no template for tools of its own.
    markers=("<|python_start|>",),
    bare="[",
    open="[",
    before="",
    between="(",
    after=")",
    separator=", ",
    close="]",
    may_close="<|python_end|>",
    inner=("<|python_end|>",),
    python=True,
)

QWEN3_CODER = ToolFormat(
    # Qwen, the template of Qwen3-Coder, also in Qwen3.5, Nemotron 3 and Step 3.5. Qwen3-Coder sometimes omits
    # <tool_call>.
    markers=("<tool_call>", "<function="),
    open="<tool_call>\n",
    before="<function=",
    between=">\n",
    tagged=TaggedArguments(open="<parameter=", between=">\n", close="\n</parameter>\n"),
    after="</function>",
    close="\n</tool_call>",
    inner=("</tool_call>",),
)

SEED_OSS = ToolFormat(
    # ByteDance, the template of Seed-OSS.
    markers=("<seed:tool_call>",),
    open="<seed:tool_call>\n",
    before="<function=",
    between=">\n",
    tagged=TaggedArguments(open="<parameter=", between=">", close="</parameter>\n"),
    after="</function>",
    close="\n</seed:tool_call>",
    inner=("</seed:tool_call>",),
)

MINIMAX_M2 = ToolFormat(
    # MiniMax, the template of MiniMax-M2 and its tool calling guide.
    markers=("<minimax:tool_call>",),
    open="<minimax:tool_call>\n",
    before='<invoke name="',
    between='">\n',
    tagged=TaggedArguments(open='<parameter name="', between='">', close="</parameter>\n"),
    after="</invoke>",
    separator="\n",
    close="\n</minimax:tool_call>",
    inner=("</minimax:tool_call>",),
)

_GLM_INNER = ("</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

GLM45 = ToolFormat(
    # Zhipu, the templates of GLM-4.5 and GLM-4.6.
    markers=("<tool_call>",),
    open="<tool_call>",
    before="",
    between="\n",
    tagged=TaggedArguments(open="<arg_key>", between="</arg_key>\n<arg_value>", close="</arg_value>\n"),
    after="",
    close="</tool_call>",
    inner=_GLM_INNER,
)

GLM47 = ToolFormat(
    # Zhipu, the templates of GLM-4.7 and GLM-5: without line breaks.
    markers=("<tool_call>",),
    open="<tool_call>",
    before="",
    between="",
    tagged=TaggedArguments(open="<arg_key>", between="</arg_key><arg_value>", close="</arg_value>"),
    after="",
    close="</tool_call>",
    gap="",
    inner=_GLM_INNER,
)

HY_V3 = ToolFormat(
    # Tencent, the template of Hunyuan 3.
    markers=("<tool_calls>",),
    open="<tool_calls>\n",
    before="<tool_call>",
    between="<tool_sep>\n",
    tagged=TaggedArguments(open="<arg_key>", between="</arg_key>\n<arg_value>", close="</arg_value>\n"),
    after="</tool_call>",
    separator="\n",
    close="\n</tool_calls>",
    inner=("</tool_calls>", "<tool_call>", "<tool_sep>", *_GLM_INNER),
)

DEEPSEEK_V32 = ToolFormat(
    # DeepSeek, the encoding of DeepSeek-V3.2, whose repository has a Python module instead of a template.
    markers=("<｜DSML｜function_calls>",),
    open="<｜DSML｜function_calls>\n",
    before='<｜DSML｜invoke name="',
    between='">\n',
    tagged=TaggedArguments(
        open='<｜DSML｜parameter name="',
        between='" string="true">',
        between_json='" string="false">',
        close="</｜DSML｜parameter>\n",
    ),
    after="</｜DSML｜invoke>",
    separator="\n",
    close="\n</｜DSML｜function_calls>",
    inner=("｜DSML｜",),
)

DEEPSEEK_V4 = replace(
    # DeepSeek, the encoding of DeepSeek-V4: as V3.2, but for the name of the block.
    DEEPSEEK_V32,
    markers=("<｜DSML｜tool_calls>",),
    open="<｜DSML｜tool_calls>\n",
    close="\n</｜DSML｜tool_calls>",
)

STEP3 = ToolFormat(
    # StepFun, the template of Step3.
    markers=("<｜tool_calls_begin｜>",),
    open="<｜tool_calls_begin｜>\n",
    before='<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="',
    between='">\n',
    tagged=TaggedArguments(open='<steptml:parameter name="', between='">', close="</steptml:parameter>\n"),
    after="</steptml:invoke><｜tool_call_end｜>",
    separator="\n",
    close="\n<｜tool_calls_end｜>",
    inner=("<｜tool_calls_end｜>", "<｜tool_call_begin｜>", "<｜tool_call_end｜>", "<｜tool_sep｜>"),
)

KIMI_K2 = ToolFormat(
    # Moonshot, docs/tool_call_guidance.md of Kimi-K2. The template shows the model a call's id, which has this form.
    markers=("<|tool_calls_section_begin|>",),
    open="<|tool_calls_section_begin|>",
    before="<|tool_call_begin|>",
    between="<|tool_call_argument_begin|>",
    after="<|tool_call_end|>",
    separator="",
    close="<|tool_calls_section_end|>",
    inner=(
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
    ),
    id_as_name=True,
)

HUNYUAN = ToolFormat(
    # Tencent, the template of Hunyuan-A13B.
    markers=("<tool_calls>",),
    open="<tool_calls>[",
    separator=", ",
    close="]</tool_calls>",
    inner=("</tool_calls>",),
)

NEMOTRON = ToolFormat(
    # NVIDIA, the templates of Llama-Nemotron and Nemotron Nano 2.
    markers=("<TOOLCALL>",),
    open="<TOOLCALL>[",
    separator=", ",
    close="]</TOOLCALL>",
    inner=("</TOOLCALL>",),
)

PHI4_MINI = ToolFormat(
    # Microsoft, Phi-4-mini: its template names no format. The model writes the first one, and other templates for it
    # ask for the second one.
    markers=("functools", "<|tool_call|>"),
    open="functools[",
    separator=", ",
    close="]",
    may_close="<|/tool_call|>",
    inner=("<|/tool_call|>",),
)

INTERNLM = ToolFormat(
    # Shanghai AI Laboratory, the template of InternLM2.5 for tools.
    markers=("<|action_start|>",),
    open="<|action_start|><|plugin|>\n",
    between='", "parameters": ',
    close="\n<|action_end|>",
    inner=("<|plugin|>", "<|action_end|>"),
)

LFM2 = ToolFormat(
    # Liquid AI, the templates of LFM2 and LFM2.5.
    markers=("<|tool_call_start|>",),
    open="<|tool_call_start|>[",
    before="",
    between="(",
    after=")",
    separator=", ",
    close="]<|tool_call_end|>",
    inner=("<|tool_call_end|>",),
    python=True,
)

OLMO3 = ToolFormat(
    # Ai2, the template of Olmo 3: a call per line.
    markers=("<function_calls>",),
    open="<function_calls>\n",
    before="",
    between="(",
    after=")",
    separator="\n",
    close="\n</function_calls>",
    inner=("</function_calls>",),
    python=True,
)

FUNCTIONGEMMA = ToolFormat(
    # Google, the template of FunctionGemma.
    markers=("<start_function_call>",),
    open="<start_function_call>call:",
    before="",
    between="{",
    after="}",
    close="<end_function_call>",
    may_close="<start_function_response>",
    gap="",
    inner=("<end_function_call>", "<escape>", "<start_function_response>"),
    quote="<escape>",
)

GEMMA4 = ToolFormat(
    # Google, the template of Gemma 4: the same with other markers.
    markers=("<|tool_call>",),
    open="<|tool_call>call:",
    before="",
    between="{",
    after="}",
    close="<tool_call|>",
    may_close="<|tool_response>",
    gap="",
    inner=("<tool_call|>", '<|"|>', "<|tool_response>"),
    quote='<|"|>',
)

HARMONY_MARKERS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")

HARMONY = ToolFormat(
    # OpenAI, the format of gpt-oss: https://github.com/openai/harmony/blob/main/docs/format.md. `harmony` parses it;
    # this is what a grammar lets the model write. <|call|> ends the answer.
    markers=("<|channel|>",),
    open="<|channel|>commentary to=functions.",
    before="",
    between=" <|constrain|>json<|message|>",
    after="",
    gap="<|call|><|start|>assistant",
    answer_open="<|channel|>final<|message|>",
    inner=HARMONY_MARKERS,
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
    "qwen3_coder": QWEN3_CODER,
    "qwen3_xml": QWEN3_CODER,
    "step3p5": QWEN3_CODER,
    "glm45": GLM45,
    "glm47": GLM47,
    "kimi_k2": KIMI_K2,
    "deepseek_v32": DEEPSEEK_V32,
    "deepseek_v4": DEEPSEEK_V4,
    "minimax_m2": MINIMAX_M2,
    "seed_oss": SEED_OSS,
    "step3": STEP3,
    "hunyuan_a13b": HUNYUAN,
    "hy_v3": HY_V3,
    "nemotron_json": NEMOTRON,
    "phi4_mini_json": PHI4_MINI,
    "internlm": INTERNLM,
    "lfm2": LFM2,
    "olmo3": OLMO3,
    "functiongemma": FUNCTIONGEMMA,
    "gemma4": GEMMA4,
    "openai": HARMONY,
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
        ("openai", ("<|channel|>", "<|message|>", "functions.")),
        ("hy_v3", ("<tool_sep>", "<arg_key>")),
        ("seed_oss", ("<seed:tool_call>",)),
        ("minimax_m2", ("<minimax:tool_call>",)),
        ("deepseek_v32", ("｜DSML｜", "function_calls>")),
        ("deepseek_v4", ("｜DSML｜",)),
        ("step3", ("<steptml:invoke",)),
        ("qwen3_coder", ("<tool_call>", "<function=")),
        ("glm45", ("<tool_call>{function-name}\n", "<arg_key>")),
        ("glm47", ("<tool_call>", "<arg_key>")),
        ("kimi_k2", ("<|tool_calls_section_begin|>",)),
        ("kimi_k2", ("tool_declare<|im_middle|>",)),
        ("hunyuan_a13b", ("<tool_calls>", "</tool_calls>")),
        ("nemotron_json", ("<TOOLCALL>",)),
        ("internlm", ("<|plugin|>",)),
        ("lfm2", ("<|tool_call_start|>",)),
        ("olmo3", ("<function_calls>",)),
        ("functiongemma", ("<start_function_call>",)),
        ("gemma4", ("<|tool_call>", '<|"|>')),
        ("phi4_mini_json", ("<|tool|>", "<|/tool|>")),
        ("hermes", ("<tool_call>", '"arguments"')),
        ("hermes", ("<tool_call>", "</tool_call>", "arguments")),
        ("pythonic", ("[func_name1(",)),
        ("llama3_json", ('"parameters": ', "<|start_header_id|>")),
        ("llama3_json", ('"parameters": ', "<|header_start|>")),
    ):
        if all(sign in template for sign in signs):
            return name
    return None
