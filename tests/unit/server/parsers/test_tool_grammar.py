"""Grammars of calls: the texts that they allow, token by token, with the markers as text and as tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import product
from typing import Any

import llguidance
import pytest
from tokenizers import AddedToken, Tokenizer

from quire.engine.protocol.errors import InvalidParameter
from quire.engine.protocol.sampling_params import StructuredOutputs
from quire.server.parsers.argument_types import ANY_TYPE, property_types
from quire.server.parsers.output_parser import tool_parser
from quire.server.parsers.reasoning import REASONING_FORMATS, ReasoningFormat
from quire.server.parsers.tool_calls import ParserOptions
from quire.server.parsers.tool_formats import TOOL_FORMATS, Python, Quoted, Tagged
from quire.server.parsers.tool_grammar import GrammarTool, has_closing_token, thoughts_grammar, tool_grammar
from quire.server.text.structured_outputs import _checked_grammar
from tests.fakes.tokenizers import byte_level
from tests.unit.server.parsers.mutations import values_with_tags
from tests.unit.server.parsers.samples import SCHEMAS, TOOLS, TWO_CALLS, joined

THINK = REASONING_FORMATS["qwen3"]
MARKERS = {m for format in TOOL_FORMATS.values() for m in format.all_markers} | {*THINK.all_markers}
MARKERS.remove("<function=")  # which Qwen3-Coder writes as text, and so do the others
KINDS = ("text", "added", "special")
CASES = [(format, kind) for format in TWO_CALLS for kind in KINDS if kind != "added" or format == "hermes"]
FORMATS = pytest.mark.parametrize(("format", "kind"), CASES)


@lru_cache
def tokenizers(kind: str) -> tuple[Tokenizer, llguidance.LLTokenizer]:
    """A tokenizer that writes markers as plain text, or has a token for each, special or not."""
    tokenizer = byte_level()
    if kind != "text":
        special = kind == "special"
        tokenizer.add_tokens([AddedToken(marker, special=special, normalized=False) for marker in sorted(MARKERS)])
    return tokenizer, llguidance.LLTokenizer(tokenizer.to_str(), eos_token=2)


def grammar(format: str, kind: str, tools: Sequence[GrammarTool] = TOOLS, **options: Any) -> str:
    tokenizer, _ = tokenizers(kind)
    options = {"required": True, "several": True} | options
    text = tool_grammar(TOOL_FORMATS[format], tools, tokenizer.token_to_id, **options).grammar
    assert text is not None
    return text


@lru_cache
def compiled(kind: str, grammar: str) -> llguidance.LLMatcher:
    _, guide = tokenizers(kind)
    matcher = llguidance.LLMatcher(guide, grammar)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def verdict(kind: str, grammar: str, text: str) -> str:
    """Whether a text may be the answer (`yes`), its beginning (`begun`), or not (`no`)."""
    tokenizer, _ = tokenizers(kind)
    matcher = compiled(kind, grammar).deep_copy()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    if matcher.validate_tokens(ids) < len(ids):
        return "no"
    assert matcher.consume_tokens(ids)
    return "yes" if matcher.is_accepting() else "begun"


def check(kind: str, grammar: str, good: Iterable[str] = (), bad: Iterable[str] = ()) -> None:
    """Assert that the first texts may be the answer, and the second may not."""
    for texts, expected in ((good, "yes"), (bad, "no")):
        for text in texts:
            assert verdict(kind, grammar, text) == expected, text


def wrong(format: str, text: str) -> list[str]:
    """The same calls with arguments that break the schema."""
    others = [text.replace("city", "town")]
    if not isinstance(TOOL_FORMATS[format].call, Tagged | Quoted):
        others.append(text.replace("Bonn", 'Bonn", unit="k').replace('", unit=', '", "unit": '))
    return others


@FORMATS
def test_required_calls_are_calls_with_valid_arguments(format: str, kind: str) -> None:
    text, rules = TWO_CALLS[format], grammar(format, kind)
    check(kind, rules, [text], [*wrong(format, text), "Hello", f"So {text}", text.replace("get_weather", "get_time")])
    assert verdict(kind, rules, "") == "begun"
    for tools in (TOOLS, TOOLS[:1]):
        check(kind, grammar(format, kind, tools, several=False), bad=[text])


@FORMATS
def test_strict_tools_beside_free_text(format: str, kind: str) -> None:
    text, rules = TWO_CALLS[format], grammar(format, kind, required=False)
    check(kind, rules, [text, "Hello, you.", ""], wrong(format, text))
    if not TOOL_FORMATS[format].bare:
        check(kind, rules, [f"Let me see.\n{text}"], [f"Let me see.\n{wrong(format, text)[0]}"])
    if not isinstance(TOOL_FORMATS[format].call, Python):
        lax = (GrammarTool("get_weather", TOOLS[0].parameters), TOOLS[1])
        check(kind, grammar(format, kind, lax, required=False), wrong(format, text)[:1])


@FORMATS
@pytest.mark.parametrize("required", [True, False])
def test_thoughts_go_before_calls(format: str, kind: str, required: bool) -> None:
    text = TWO_CALLS[format]
    bad = wrong(format, text)[0]
    rules = grammar(format, kind, required=required, reasoning=THINK, is_thinking=True)
    check(kind, rules, [f"I think\n</think>\n\n{text}"], [f"I think\n</think>\n\n{bad}"])
    assert verdict(kind, rules, "I think") == "begun"
    rules = grammar(format, kind, required=required, reasoning=THINK)
    check(kind, rules, [text, f"<think>\nI think\n</think>\n\n{text}"], [f"<think></think>{bad}"])


ANSWER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "name": {"type": "string"},
        "count": {"$ref": "#/$defs/count"},
        "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"count": {"type": "integer"}},
}


@FORMATS
@pytest.mark.parametrize("several", [True, False])
@pytest.mark.parametrize("reasoning", [None, THINK])
def test_calls_or_an_answer_of_a_schema(
    format: str, kind: str, several: bool, reasoning: ReasoningFormat | None
) -> None:
    rules = grammar(format, kind, required=False, several=several, answer=ANSWER, reasoning=reasoning)
    text, nested = TWO_CALLS[format], '{\n  "city": "x", "next": {"city": "y", "next": null}}'
    for good in ('{"city": "Bonn"}', '{"city":"Bonn","name":"get_weather","count":3}', nested):
        check(kind, rules, [good])
        assert verdict(kind, rules, f"<think>hm</think>{good}") == ("yes" if reasoning else "no")
    check(
        kind, rules, bad=['{"town": "Bonn"}', '{"city": 1}', '{"city": "x", "count": "y"}', '{"city": "x", "next": {}}']
    )
    check(kind, rules, bad=["Hello", "[]", *wrong(format, text), f"Hello {text}", f'{text}{{"city": "Bonn"}}'])
    check(kind, rules, bad=[f'{{"city": "Bonn"}}{text}'])
    assert verdict(kind, rules, "") == "begun"
    assert verdict(kind, rules, text) == ("yes" if several else "no")


def test_references_of_a_tool_lead_to_the_same_beside_an_answer() -> None:
    """There its schema is a part of a call's."""
    tree = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://example.com/tree",
        "type": "object",
        "properties": {
            "left": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
            "value": {"$ref": "#/$defs/a~1b"},
            "again": {"$ref": "#/properties/value"},
            "$ref": {"const": {"$ref": "#"}},
        },
        "additionalProperties": {"items": {"$ref": "#/$defs/a~1b"}, "type": "array"},
        "$defs": {"a/b": {"type": "integer"}},
    }
    tools = [GrammarTool("f", tree, strict=True)]
    rules = grammar("llama3_json", "text", tools, required=False, several=False, answer=ANSWER)
    _checked_grammar(StructuredOutputs(grammar=rules), None)  # raises where it would be refused
    good = ['{"left": {"left": null, "value": 1}}', '{"value": 1, "again": 2}', '{"$ref": {"$ref": "#"}}', '{"x": [1]}']
    bad = ['{"left": {"value": "x"}}', '{"value": 1, "again": "x"}', '{"x": ["y"]}', '{"left": {"name": "f"}}']
    check("text", rules, *([f'{{"name": "f", "parameters": {each}}}' for each in texts] for texts in (good, bad)))


def test_keyword_arguments_in_any_selection() -> None:
    schema = {
        "properties": {"a": {"$ref": "#/$defs/n"}, "b": {"type": "boolean"}, "c": {}, "d": {"type": "null"}},
        "required": ["c"],
        "$defs": {"n": {"type": "integer"}},
    }
    rules = grammar("pythonic", "text", (GrammarTool("f", schema),))
    good = ["[f(c=1)]", "[f(a=1, c=[])]", '[f(b=true, c="x", d=null)]', "[f(a=2, b=false, c=1, d=null)]"]
    bad = ["[f()]", "[f(a=1)]", "[f(a=1.5, c=1)]", "[f(c=1, a=1)]", "[f(, c=1)]", "[f(c=1,)]"]
    check("text", rules, good, bad)
    optional = grammar("pythonic", "text", (GrammarTool("f", {"properties": {"a": {}, "b": {}}}),))
    check("text", optional, ["[f()]", "[f(a=1)]", "[f(b=1)]", "[f(a=1, b=1)]"])
    for tool in (GrammarTool("f", {"minProperties": 1}), GrammarTool("f", {"properties": {"not a name": {}}})):
        with pytest.raises(InvalidParameter):
            grammar("pythonic", "text", (tool,))


@pytest.mark.parametrize("format", TWO_CALLS)
def test_what_the_grammar_forces_is_what_the_parser_reads(format: str) -> None:
    """Walk through the grammar, always taking the first token that it allows: a call of the one tool."""
    tokenizer, guide = tokenizers("special")
    schema = {"properties": {"n": {"const": 7}}, "required": ["n"], "additionalProperties": False}
    matcher = llguidance.LLMatcher(guide, grammar(format, "special", (GrammarTool("now", schema),), several=False))
    ids: list[int] = []
    while not matcher.is_stopped():
        forced = matcher.compute_ff_tokens()
        mask = matcher.compute_logit_bias() if not forced else b""
        token = forced[0] if forced else next(i for i, allowed in enumerate(mask) if allowed)
        assert matcher.consume_token(token)
        ids.append(token)
    parser = tool_parser(ParserOptions(TOOL_FORMATS[format], SCHEMAS))
    text = tokenizer.decode([i for i in ids if i != 2], skip_special_tokens=False)
    content, _, calls = joined(parser.feed(text) + parser.finish())
    assert (content, [(name, json.loads(said)) for name, said in calls]) == ("", [("now", {"n": 7})])


@pytest.mark.parametrize("format", TWO_CALLS)
def test_a_string_may_contain_every_tag_but_its_closing_one(format: str) -> None:
    """Only a line that opens another argument is not written. Without a grammar, it ends a text unless it is quoted."""
    own, rules, refused, misread = TOOL_FORMATS[format], grammar(format, "text"), [], []
    is_raw = isinstance(own.call, Tagged | Quoted)
    for value in values_with_tags(format):
        text = TWO_CALLS[format].replace("Bonn", value if is_raw else json.dumps(value, ensure_ascii=False)[1:-1])
        if verdict("text", rules, text) != "yes":
            refused.append(value)
        for is_enforced, chunks in product((False, True), ([text], text)):
            parser = tool_parser(ParserOptions(own, SCHEMAS, is_enforced=is_enforced))
            content, _, calls = joined([event for each in chunks for event in parser.feed(each)] + parser.finish())
            got = (content, [(name, json.loads(arguments)) for name, arguments in calls])
            if got != ("", [("get_weather", {"city": value}), ("now", {})]):
                assert not is_enforced
                misread.append(value)
    assert refused or not misread
    if isinstance(own.call, Tagged):
        line = "\n" * own.call.close.endswith("\n") + own.call.open
        assert all(re.search(f"{re.escape(line)}(city|unit)", f"\n{value}") for value in (*refused, *misread))
    assert not any(own.block[0] in value for value in misread)


HARMONY_CALL = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Bonn"}'
HARMONY_THOUGHTS = "<|channel|>analysis<|message|>I think<|end|><|start|>assistant"


@pytest.mark.parametrize("kind", ["text", "special"])
def test_harmony_writes_calls_and_answers_in_channels(kind: str) -> None:
    thoughts = REASONING_FORMATS["openai_gptoss"]
    required, free, either = (
        grammar("openai", kind, several=False, reasoning=thoughts, **options)
        for options in ({"required": True}, {"required": False}, {"required": False, "answer": ANSWER})
    )
    for start in ("", HARMONY_THOUGHTS):
        call, answer = start + HARMONY_CALL, f"{start}<|channel|>final<|message|>"
        bad_call = call.replace("city", "town")
        check(kind, required, [call], [bad_call, f"{answer}Hello"])
        check(kind, free, [call, f"{answer}Hello"], [bad_call])
        check(kind, either, [f'{answer}{{"city": "Bonn"}}'], [f"{answer}Hello"])


ARGUMENTS: dict[str, object] = {
    "properties": {
        "text": {"type": "string", "minLength": 2, "maxLength": 4},
        "code": {"type": "string", "pattern": "^[a-z]+/[0-9]"},
        "id": {"type": "string", "format": "uuid"},
        "kind": {"enum": ["a", 1, None]},
        "count": {"type": "integer", "minimum": 3},
        "some": {"anyOf": [{"type": "string"}, {"type": "integer"}, {"type": "array", "items": {"type": "null"}}]},
        "bound": {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 3}]},
        "maybe": {"$ref": "#/$defs/maybe"},
        "list": {"type": "array", "items": {"type": "integer"}},
        "both": {"allOf": [{"enum": ["a", "b", 1, 2, None]}, {"enum": ["b", 2, True, None]}], "enum": ["b", 1.0, 2, 3]},
    },
    "additionalProperties": False,
    "$defs": {"maybe": {"type": ["string", "null"]}},
}


@pytest.mark.parametrize(
    ("key", "good", "bad"),
    [
        ("text", ["ab", "é\n<x"], ["a", "abcde"]),
        ("code", ["ab/1", "ab/1 more"], ["ab", "1ab/1"]),
        ("id", ["123e4567-e89b-12d3-a456-426614174000"], ["123e4567"]),
        ("kind", ["a", "1", "null"], ["b", '"a"', "2"]),
        ("count", ["3", "30"], ["2", '"3"', "three"]),
        ("some", ["3", "three", "3 men", "[null]"], ["2.5", "[3]"]),
        ("bound", ["x", "3 men"], ["2", "3"]),
        ("maybe", ["null", "nothing", "5", ""], []),
        ("list", ["[1, 2]", "[]"], ["1", "[1.5]", "[1"]),
        ("both", ["b", "2"], ["a", "1", "1.0", "3", "true", "null"]),
    ],
)
@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("qwen3_coder",
         "<tool_call>\n<function=f>\n<parameter={key}>\n{value}\n</parameter>\n</function>\n</tool_call>"),
        ("glm47", "<tool_call>f<arg_key>{key}</arg_key><arg_value>{value}</arg_value></tool_call>"),
    ],
)  # fmt: skip
def test_text_and_json_follow_the_schema(format: str, text: str, key: str, good: list[str], bad: list[str]) -> None:
    rules = {kind: grammar(format, kind, (GrammarTool("f", ARGUMENTS),), several=False) for kind in ("text", "special")}
    texts = [[text.format(key=key, value=value) for value in values] for values in (good, bad)]
    check("text", rules["text"], *texts)
    check("special", rules["special"], texts[0])


TREE: dict[str, object] = {
    "properties": {
        "text": {"type": "string", "maxLength": 4},
        "kind": {"enum": ["a", 1, None, {"b": [2]}]},
        "count": {"type": "integer", "minimum": 3},
        "some": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "null"}}]},
        "list": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
        "tree": {"$ref": "#/$defs/tree"},
        "map": {"type": "object", "additionalProperties": {"type": "boolean"}},
        "any": {},
        "both": {"allOf": [{"properties": {"a": {"type": "number"}}}, {"properties": {"a": {"maximum": 3}, "b": {}}}]},
        "a:b": {"const": True},
    },
    "additionalProperties": False,
    "$defs": {
        "tree": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "next": {"$ref": "#/$defs/tree"}},
            "required": ["name"],
            "additionalProperties": False,
        }
    },
}


@pytest.mark.parametrize(
    ("key", "good", "bad"),
    [
        ("text", ['"ab"', '"é\n<x"', '""'], ['"abcde"', "ab", "1"]),
        ("kind", ['"a"', "1", "null", "{b:[2]}"], ['"b"', "2", "{b:[3]}", "a"]),
        ("count", ["3", "30"], ["2", '"3"', "3.5"]),
        ("some", ['"x, {y}"', "[]", "[null,null]"], ["[1]", "null", "{}"]),
        ("list", ["[1]", "[1,2,3]"], ["[]", "[1,2,3,4]", '["1"]', "[1,]"]),
        ("tree", ['{name:"a"}', '{name:"a",next:{name:"b"}}'], ["{}", '{name:"a",next:{}}', "{name:1}", '{x:"a"}']),
        ("map", ["{}", "{x:true,y z:false}"], ["{x:1}", "{:true}", "[]"]),
        ("any", ['"a"', "1.5", "{a:[{},[null]],b:true}", "[]"], ["a", "{a}", "[1", '{"a":1}']),
        ("both", ["{a:2,b:[]}", "{}", "{b:1}"], ["{a:4}", '{a:"x"}']),
        ("a:b", ["true"], ["false"]),
    ],
)
@pytest.mark.parametrize(
    ("format", "call"),
    [
        ("functiongemma", "<start_function_call>call:f{{{key}:{value}}}<end_function_call>"),
        ("gemma4", "<|tool_call>call:f{{{key}:{value}}}<tool_call|>"),
    ],
)
def test_quoted_arguments_follow_the_schema(format: str, call: str, key: str, good: list[str], bad: list[str]) -> None:
    tool_format = TOOL_FORMATS[format]
    assert isinstance(tool_format.call, Quoted)
    quote = tool_format.call.quote
    calls = [[call.format(key=key, value=value.replace('"', quote)) for value in values] for values in (good, bad)]
    for kind in ("text", "special"):
        rules = grammar(format, kind, (GrammarTool("f", TREE),), several=False)
        _checked_grammar(StructuredOutputs(grammar=rules), None)  # raises where it would be refused
        check(kind, rules, *calls)
    for written in calls[0]:
        _, _, ((_, said),) = joined(tool_parser(ParserOptions(tool_format, {"f": TREE})).feed(written))
        assert [*json.loads(said)] == [key]


def test_quoted_arguments_in_any_selection() -> None:
    schema = {"properties": {"a": {"type": "integer"}, "b": {}, "c": {"type": "null"}}, "required": ["b"]}
    rules = grammar("gemma4", "special", (GrammarTool("f", schema),))
    good, bad = (
        ("b:1", "a:1,b:[]", "b:{},c:null", "a:2,b:true,c:null"),
        ("", "a:1", "b:1,", ",b:1", "b:1,a:1", "a:1b:1"),
    )
    check("special", rules, *([f"<|tool_call>call:f{{{each}}}<tool_call|>" for each in texts] for texts in (good, bad)))
    for refused, problem in (
        ({"minProperties": 1}, "minProperties is not supported for this model's tool calls"),
        ({"properties": {"a": {"type": "array", "uniqueItems": True}}}, "uniqueItems is not supported for this"),
        ({"properties": {"a": {"type": "string", "enum": [1]}}}, "allows no value"),
        ({"properties": {"a": False}, "required": ["a"]}, "false allows no value"),
        ({"type": "object", "allOf": [{"type": "string"}]}, "allows no value"),
    ):
        with pytest.raises(InvalidParameter, match=f"tools: the parameters of f: .*{problem}"):
            grammar("gemma4", "special", (GrammarTool("f", refused),))


def test_any_arguments_where_the_schema_says_nothing() -> None:
    tools = (GrammarTool("f", {"type": "object"}), GrammarTool("g", {"type": "object"}, strict=True))
    rules = grammar("deepseek_v32", "text", tools, required=False)
    for arguments in ("", '<｜DSML｜parameter name="any" string="false">[1]</｜DSML｜parameter>\n'):
        call = f'<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n{arguments}</｜DSML｜invoke>\n'
        check("text", rules, [f"{call}</｜DSML｜function_calls>"])


@pytest.mark.parametrize("value", [{"not": {"const": "a"}}, {"type": "string", "format": "hostname"}])
def test_what_a_text_cannot_enforce_is_refused(value: object) -> None:
    with pytest.raises(InvalidParameter, match="tools: key in the parameters of f"):
        grammar("seed_oss", "text", (GrammarTool("f", {"properties": {"key": value}}),))


@pytest.mark.parametrize("is_thinking", [True, False])
def test_thoughts_end_with_their_budget(is_thinking: bool) -> None:
    tokenizer, _ = tokenizers("special")
    rules = thoughts_grammar(THINK, tokenizer.token_to_id, is_thinking, budget=3)
    for text, allowed in (("abc</think>def", 14), ("abcd", 3), ("</think>and more than that", 26)):
        matcher = compiled("special", rules).deep_copy()
        ids = tokenizer.encode(text if is_thinking else f"<think>{text}", add_special_tokens=False).ids
        count = 0
        for token in ids:
            if not matcher.compute_logit_bias()[token]:
                break
            matcher.consume_token(token)
            count += len(tokenizer.decode([token], skip_special_tokens=False))
        assert count == allowed + (0 if is_thinking else len("<think>"))
    none = thoughts_grammar(THINK, tokenizer.token_to_id, is_thinking=True, budget=0)
    check("special", none, ["</think>a"], ["a</think>"])
    assert has_closing_token(THINK, tokenizer.token_to_id)
    assert not has_closing_token(THINK, tokenizers("text")[0].token_to_id)
    harmony = thoughts_grammar(REASONING_FORMATS["openai_gptoss"], tokenizer.token_to_id, is_thinking=False, budget=50)
    check("special", harmony, [f"{HARMONY_THOUGHTS}<|channel|>final<|message|>Hello"])


def test_keyword_arguments_may_be_named_behind_references() -> None:
    base = {"properties": {"b": {"type": "integer"}, "a": {}}}
    schema = {"allOf": [{"$ref": "#/$defs/base"}], "properties": {"c": {}}, "$defs": {"base": base}}
    tools = (GrammarTool("f", schema), GrammarTool("g", {"type": "object"}, strict=True))
    check("text", grammar("pythonic", "text", tools, required=False), ["[f(c=1, b=2, a=3)]"])


def test_a_schema_that_refers_to_itself_costs_little() -> None:
    reference = {"$ref": "#/$defs/t"}
    schema = {"properties": {"a": reference}, "$defs": {"t": {"anyOf": [{"type": "string"}, *[reference] * 8]}}}
    assert property_types(schema, "a") == ANY_TYPE
