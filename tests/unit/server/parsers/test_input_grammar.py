"""Grammars of the input of custom tools: the texts that they allow as they are, and inside of calls of every kind."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import product

import pytest

from quire.engine.protocol.errors import InvalidParameter
from quire.server.openai.custom_input import custom_input
from quire.server.parsers.input_grammar import InputGrammar, as_terminals, embedded
from quire.server.parsers.output_parser import tool_parser
from quire.server.parsers.tool_calls import ParserOptions
from quire.server.parsers.tool_formats import TOOL_FORMATS, Python, Quoted, Tagged
from quire.server.parsers.tool_grammar import GrammarTool
from tests.unit.server.parsers.test_tool_grammar import grammar, verdict

PATCH = """\
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?
hunk: add_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
update_hunk: "*** Update File: " filename LF change?
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
change: (change_context | change_line)+
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
%import common.LF
"""
"""The grammar of Codex's apply_patch, without some of its hunks."""
LINES = (
    '*** Begin Patch\n*** Add File: a.py\n+x = "a\\n" \\ é\t\n+\n*** Update File: b\n@@ def f\n-x\n+y\n*** End Patch'
)
GRAMMARS: dict[str, tuple[str, str]] = {
    "patch": (PATCH, "*@+ x\n"),
    "strings": ('start: STRING (", " STRING)*\nSTRING: "\\"" /[^"\\\\]*/ "\\""', 'a",\\ \n'),
    "imported": ("start: ESCAPED_STRING (WS INT)*\n%import common (ESCAPED_STRING, WS, INT)", '"\\1 \n'),
    "renamed": ("start: /a/ (NL /a/)*  // lines\n%import common.LF -> NL", "a\nb"),
    "ignored": ('start: "a" ("," "a")*\n%ignore WS\n%import common.WS', 'a,\n "'),
    "dotted": ('start: A ".." B+ "%ignore" "%import common.LF"\nA: "x"\nB: " ".."b"', 'x." b'),
    "ranges": ('start: ("a".."c" | "\\t".."\\n")+ /\\s*=[^\\S\\n]{0,2}/', "ac=\n \t"),
    "classes": (r"start: /[^\x00-\x1f\\]+(?:\\.|\r?\n)*/", 'a\\\r\n"'),
    "terminals": ('start: A+\nA: B | "x" C\nB: "\\n" | /[ab]+/\nC: /\\d{1,2}/', "ab\nx1"),
    "dots": (r"start: /a.*/s", 'a"\\\n'),
    "aliased": ('start: "a -> b|c" -> one\n  | /d -> e|f/ -> two | "g"', "fg "),
    "quoted": (r'start: /"([^"\\]|\\["\\])*"( \w+)?/', '"\\ a'),
}


def as_json(lark: str) -> str:
    return f'start: "\\"" inner "\\""\ninner: {embedded(lark, None, as_json=True)}'


@pytest.mark.parametrize("name", GRAMMARS)
def test_json_and_terminals_allow_the_same_texts(name: str) -> None:
    lark, alphabet = GRAMMARS[name]
    quoted, choose = as_json(lark), random.Random(name)
    texts = ["".join(text) for length in range(4) for text in product(alphabet, repeat=length)]
    texts = choose.sample(texts, 30) + ["".join(choose.choices(alphabet, k=6)) for _ in range(30)]
    texts += [
        LINES,
        '"a", "b\n"',
        '"\\"" 1\n2',
        "a\na",
        "a ,\n a",
        "a\t=  ",
        'a "\\n\\"',
        "ab\nx12",
        'a"\\\n',
        '"\\"" w',
        "x..ab%ignore%import common.LF",
        "a -> b|c",
        "d -> e",
    ]
    allowed = [verdict("text", lark, text) == "yes" for text in texts]
    assert {*allowed} == {True, False}
    if name != "ignored":
        terminal, rules = as_terminals(lark, "T")
        as_terminal = "\n".join((f"start: {terminal}", *rules))
        assert [verdict("text", as_terminal, text) == "yes" for text in texts] == allowed
    for text, is_allowed in zip(texts, allowed, strict=True):
        assert (verdict("text", quoted, json.dumps(text, ensure_ascii=False)) == "yes") == is_allowed, text


def call(format: str, text: str) -> str:
    """A call of `f` with this input."""
    own = TOOL_FORMATS[format]
    before, between, after = own.call.around
    match own.call:
        case Python():
            arguments = f"input={json.dumps(text, ensure_ascii=False)}"
        case Tagged(open=opening, between=middle, close=close):
            arguments = f"{opening}input{middle}{text}{close}"
        case Quoted(quote):
            arguments = f"input:{quote}{text}{quote}"
        case _:
            arguments = json.dumps({"input": text}, ensure_ascii=False)
    name = "functions.f:0" if own.id_as_name else "f"
    return f"{own.block[0]}{own.block[1]}{before}{name}{between}{arguments}{after}{own.block[2]}"


TOOL = GrammarTool("f", {"type": "object", "properties": {"input": {"type": "string"}}}, True, InputGrammar(PATCH, "p"))
SPELLED = [("hermes", "text"), ("hermes", "special"), ("mistral", "text"), ("kimi_k2", "special"), ("lfm2", "text")]
SPELLED += [("openai", "special"), ("qwen3_coder", "text"), ("qwen3_coder", "special"), ("glm45", "special")]
SPELLED += [("seed_oss", "text"), ("minimax_m2", "text"), ("step3", "special"), ("deepseek_v32", "special")]
SPELLED += [("gemma4", "special"), ("llama3_json", "text")]


@pytest.mark.parametrize(("format", "kind"), SPELLED)
def test_calls_of_every_kind_follow_it(format: str, kind: str) -> None:
    for is_required in (True, False):
        held = grammar(format, kind, [TOOL], several=False, required=is_required)
        assert verdict(kind, held, call(format, LINES)) == "yes"
        assert verdict(kind, held, call(format, LINES.replace("+y", "y"))) == "no"
        assert verdict(kind, held, call(format, LINES.replace("*** End Patch", ""))) == "no"
    if format != "openai":  # whose parser is `HarmonyParser`
        parser = tool_parser(ParserOptions(TOOL_FORMATS[format], {"f": TOOL.parameters}))
        events = [*parser.feed(call(format, LINES)), *parser.finish()]
        assert custom_input("".join(getattr(event, "arguments", "") for event in events)) == LINES


@pytest.mark.parametrize("format", ["qwen3_coder", "seed_oss", "minimax_m2"])
def test_the_end_of_an_argument_is_not_part_of_it(format: str) -> None:
    held = grammar(format, "text", [TOOL], several=False)
    for line in ("+<b></b>", "+</parameter", "+</para</parameters>"):
        assert verdict("text", held, call(format, LINES.replace("+y", line))) == "yes"
    assert verdict("text", held, call(format, LINES.replace("+y", "+</parameter>y"))) == "no"


@pytest.mark.parametrize("kind", ["text", "special"])
@pytest.mark.parametrize("format", ["qwen3_coder", "seed_oss"])
def test_a_lexeme_with_line_breaks_can_end(format: str, kind: str) -> None:
    for lark in ("start: /(.|\\n)+/", 'start: "a" /(.|\\n)*/', 'start: (/[^\\n]/ | "\\n")+'):
        held = grammar(format, kind, [replace(TOOL, grammar=InputGrammar(lark, "p"))], several=False)
        for text in ("a", "a\n", "a\n</parameter", "a\n\n<b>"):
            assert verdict(kind, held, call(format, text)) == "yes", (lark, text)


def test_a_rule_may_refer_to_itself_where_a_line_break_comes_before_the_tag() -> None:
    lark = 'start: "(" (start | WORD)? ")"  // balanced\n%import common.WORD'
    tools = [replace(TOOL, grammar=InputGrammar(lark, "p"))]
    held = grammar("qwen3_coder", "text", tools, several=False)
    assert [verdict("text", held, call("qwen3_coder", text)) for text in ("((a))", "(()")] == ["yes", "no"]
    for format, more in (("seed_oss", ""), ("qwen3_coder", ' | "\\n"'), ("qwen3_coder", " | LF\n%import common.LF")):
        held_tools = [replace(TOOL, grammar=InputGrammar(f"{lark}\nline: start{more}", "p"))]
        with pytest.raises(InvalidParameter, match="p: start refers to itself"):
            grammar(format, "text", held_tools, several=False)


def test_what_cannot_become_a_terminal_is_refused() -> None:
    for lark, named in (
        ("start: a?\na: /x/ start", "refers to itself"),
        ('start: "a"\n%ignore " "', "%ignore"),
        ('%ignore " "\nstart: "a"', '%ignore " "'),
        ("// Names\n%import python.NAME\nstart: NAME", "%import python.NAME"),
        ('nonsense (\nstart: "a"', "nonsense"),
        ('begin: "a"', "start is missing"),
    ):
        with pytest.raises(ValueError, match=named):
            as_terminals(lark, "T")
    with pytest.raises(ValueError, match="ends the arguments"):
        embedded('start: "a</parameter>"', "</parameter>", as_json=False)


@pytest.mark.parametrize(
    ("format", "kind", "options"),
    [("gemma4", "text", {}), ("llama3_json", "text", {"required": False, "answer": {}})],
)
def test_a_format_that_cannot_hold_it_is_refused(format: str, kind: str, options: dict[str, object]) -> None:
    with pytest.raises(InvalidParameter) as error:
        grammar(format, kind, [TOOL], **options)
    assert error.value.param == "p"


@pytest.mark.parametrize(
    ("lark", "named"),
    [
        ("start: <think>", "<think>"),
        ('start: %json {"type": "string"}', "%json"),
        ("start: a\na[lazy]: /x/", "a"),
        ("start: A\nA: /.*/ & ~/a/", "A"),
        ("start: /.*foo/", "may not be followed"),
        (r"start: /\p{Lu}.*/", r"\p"),
        ("start: /[[:alpha:].]/", "class"),
        ("start: /.*?/", "*?"),
        ('start: /"x/i', "flags i"),
        ('start: "a"\n%ignore "b" "\\n"', "%ignore"),
        ("start: A\n%import common (C_COMMENT)", "C_COMMENT"),
    ],
)
def test_what_cannot_be_rewritten_is_named(lark: str, named: str) -> None:
    with pytest.raises(ValueError, match=r"supported|cannot") as error:
        as_json(lark)
    assert named in str(error.value)
