"""Calls of every format, whole and in pieces, right and wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.server.parsers.argument_types import TEXT, property_types
from quire.server.parsers.events import Content, Event, ToolCall
from quire.server.parsers.output_parser import OutputFormat, tool_parser
from quire.server.parsers.tags import Tags
from quire.server.parsers.tool_calls import ParserOptions
from quire.server.parsers.tool_formats import TOOL_FORMATS, Python, Tagged
from tests.unit.server.parsers.samples import SCHEMAS, TWO_CALLS, cut, joined

BOTH = [("get_weather", {"city": "Bonn"}), ("now", {})]


def events_of(format: str, chunks: Iterable[str], limit: int | None = None) -> list[Event]:
    parser = OutputFormat(tools=TOOL_FORMATS[format], schemas=SCHEMAS, limit=limit).parser()
    events = [event for chunk in chunks for event in parser.feed(chunk)]
    return events + parser.finish()


def read(format: str, text: str) -> tuple[str, list[tuple[str, str]]]:
    """Its content and calls, which are the same whole and character by character."""
    content, _, calls = joined(events_of(format, [text]))
    assert joined(events_of(format, text)) == (content, "", calls)
    return content, calls


@pytest.mark.parametrize("format", TWO_CALLS)
def test_two_calls_and_text_around_them(format: str) -> None:
    texts = {TWO_CALLS[format]: ""}
    if not TOOL_FORMATS[format].bare:
        texts[f"I look it up.\n\n{TWO_CALLS[format]}\nDone."] = "I look it up.\nDone."
    for text, said in texts.items():
        content, calls = read(format, text)
        assert (content, [(name, json.loads(arguments)) for name, arguments in calls]) == (said, BOTH)


@pytest.mark.parametrize("format", TWO_CALLS)
def test_text_without_calls_is_content_and_not_held_back(format: str) -> None:
    text = "Nothing < to [ call | here {}: 1\n\nReally."
    assert read(format, text) == (text, [])
    parser = tool_parser(ParserOptions(TOOL_FORMATS[format], SCHEMAS))
    said = ""
    for end, character in enumerate("It is\n\nhot.", 1):
        said += "".join(event.text for event in parser.feed(character) if isinstance(event, Content))
        assert said == "It is\n\nhot."[:end].rstrip()


@pytest.mark.parametrize("format", TWO_CALLS)
def test_arguments_stream_before_they_are_complete(format: str) -> None:
    text = TWO_CALLS[format]
    if isinstance(TOOL_FORMATS[format].call, Python):
        text = text.replace("city=", "unit='c', city=")
    half = text[: text.index("Bonn") + 2]
    parser = tool_parser(ParserOptions(TOOL_FORMATS[format], SCHEMAS))
    first, *others = [event for character in half for event in parser.feed(character)]
    assert isinstance(first, ToolCall)
    assert (first.index, first.name, first.arguments) == (0, "get_weather", "")
    said = "".join(event.arguments for event in others if isinstance(event, ToolCall))
    assert said == ('{"unit": "c"' if isinstance(TOOL_FORMATS[format].call, Python) else '{"city": "Bo')


def test_ids_are_those_that_the_template_takes() -> None:
    for format, pattern in (("hermes", r"call_[0-9a-f]{24}"), ("mistral", r"[a-zA-Z0-9]{9}")):
        ids = [event.id for event in events_of(format, [TWO_CALLS[format]]) if isinstance(event, ToolCall) and event.id]
        assert len(set(ids)) == 2
        assert all(re.fullmatch(pattern, one) for one in ids)


@pytest.mark.parametrize("format", TWO_CALLS)
def test_a_limit_drops_the_calls_beyond_it(format: str) -> None:
    content, _, calls = joined(events_of(format, TWO_CALLS[format], limit=1))
    assert (content, [name for name, _ in calls]) == ("", ["get_weather"])


OTHER_WAYS = [
    ("hermes", '<tool_call>{"arguments":{"a":"}{]\\"\\\\"},"name":"now"}</tool_call>', "", ['{"a":"}{]\\"\\\\"}']),
    ("hermes", '<tool_call>{"name":"now"}</tool_call>', "", ["{}"]),
    ("hermes", '<tool_call>{"name":"now","arguments":null}</tool_call>', "", ["{}"]),
    ("hermes", '<tool_call>{"name":"now","arguments":"{\\"a\\": 1}"}</tool_call>', "", ['{"a": 1}']),
    ("hermes", '<tool_call>{"id":7,"name":"now","arguments":{"a":"\\u00e9\\ud83d\\ude00"},"x":[{}]}</tool_call>', "",
     ['{"a":"\\u00e9\\ud83d\\ude00"}']),
    ("hermes", '<tool_call>[{"name":"now","arguments":{}},{"name":"now"}]</tool_call>', "", ["{}", "{}"]),
    ("hermes", '<tool_call>{"name":"now","arguments":{}}<tool_call>{"name":"now"}', "", ["{}", "{}"]),
    ("llama3_json", ' \n{"name":"now","arguments":{}}', "", ["{}"]),
    ("llama3_json", '<|python_tag|>{"type":"function","name":"now","parameters":{"a":1}}', "", ['{"a":1}']),
    ("mistral", '[TOOL_CALLS] [{"arguments": {}, "name": "now", "id": "abcdefghi"}]', "", ["{}"]),
    ("mistral", '[TOOL_CALLS]now[ARGS]{"a":1}', "", ['{"a":1}']),
    ("mistral_args", '[TOOL_CALLS] [{"name": "now", "arguments": {}}]', "", ["{}"]),
    ("mistral_args", 'Hm.[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}', "Hm.", ["{}"]),
    ("granite", '<tool_call>[{"name": "now", "arguments": {}}]', "", ["{}"]),
    ("deepseek_v3", "<｜tool▁calls▁begin｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```"
     "<｜tool▁call▁end｜>\n<｜tool▁calls▁end｜>\n", "", ["{}"]),
    ("pythonic", "<|python_start|>[now()]<|python_end|>", "", ["{}"]),
    ("pythonic", "[now(a='it\\'s, (ok)', b=[1, {'x': (None, True)}], c=true, d=-1.5e3, e=\"\\ud83d\\ude00\\/\")]", "",
     ['{"a": "it\'s, (ok)", "b": [1, {"x": [null, true]}], "c": true, "d": -1500.0, "e": "😀/"}']),
    ("pythonic", "[ now( a = 1 , ) , now( ) ]", "", ['{"a": 1}', "{}"]),
    ("hermes", '{"name": "now", "arguments": {}}\n{"name": "now", "arguments": {}}\n', "", ["{}", "{}"]),
    ("hermes", '{"name": "now", "arguments": {}}<tool_call>{"name": "now"}</tool_call>Ok', "Ok", ["{}", "{}"]),
    ("mistral", '[{"name": "now", "arguments": {}}]\n', "", ["{}"]),
    ("gemma4", "call:now{query:x}", "", ['{"query": "x"}']),
    ("glm47", "now<arg_key>query</arg_key><arg_value>x</arg_value>", "", ['{"query": "x"}']),
]  # fmt: skip

"""Variants that models also write: format, text, content and arguments of the calls."""


TAGGED = {name: format.call for name, format in sorted(TOOL_FORMATS.items()) if isinstance(format.call, Tagged)}
OBJECT: dict[str, Any] = {
    "$ref": "#/$defs/base",
    "properties": {"list": {"type": "array"}, "any": {}, "text": {"type": "string"}},
    "$defs": {"base": {"allOf": [{"properties": {"count": {"type": "integer"}, "name": {"type": "string"}}}]}},
}


def tagged_call(format: str, arguments: list[tuple[str, str]], schema: Mapping[str, Any] = OBJECT) -> str:
    tags, (marker, opening, closing) = TAGGED[format], TOOL_FORMATS[format].block
    before, between, after = tags.around
    call = f"{before}f{between}"
    for key, value in arguments:
        is_text = property_types(schema, key) == TEXT
        call += tags.open + key + (tags.between if is_text else tags.between_json or tags.between) + value + tags.close
    return marker + opening + call + after + closing


def read_tagged(format: str, text: str, cuts: list[int] | None = None, schema: Mapping[str, Any] = OBJECT) -> Any:
    def of(chunks: Iterable[str]) -> Any:
        parser = tool_parser(ParserOptions(TOOL_FORMATS[format], {"f": schema}))
        content, _, calls = joined([event for chunk in chunks for event in parser.feed(chunk)] + parser.finish())
        return content, [arguments for _, arguments in calls]

    whole = of([text])
    assert of(text) == whole
    assert of(cut(text, cuts or [])) == whole
    return whole


CITY = "<arg_key>city</arg_key>"
SPOILT = [
    ("glm47", f"<tool_call>get_weather{CITY}\n<arg_value>Bonn</arg_value>\n</tool_call>", ""),
    ("glm47", f"<tool_call>get_weather\n{CITY}\n<arg_value>Bonn</arg_value>\n</tool_call>", ""),
    ("glm47", f"get_weather{CITY}<arg_value>Bonn</arg_value></tool_call>", ""),
    ("glm47", f"Wait, get_weather{CITY}<arg_value>Bonn</arg_value></tool_call>Done.", "Wait,Done."),
    ("glm47", "<tool_call>get_weather<arg_key>city<arg_value>Bonn</arg_value></arg_value></tool_call>", ""),
    ("glm47", f"<tool_call>get_weather{CITY}<arg_value>Bonn</tool_call>", ""),
    ("glm47", "<TOOL_CALL>get_weather< arg_key >city</ arg_key ><arg_value>Bonn</arg_value</tool_call>", ""),
    ("glm45", f"<tool_call>get_weather{CITY}<arg_value>Bonn</arg_value>", ""),
    ("kimi_k2", "<|tool_call_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
     '{"city": "Bonn"}<|tool_call_end|><|tool_call_section_end|>', ""),
    ("kimi_k2", "So.<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
     '{"city": "Bonn"}<|tool_call_end|>', "So."),
    ("kimi_k2", 'So. functions.get_weather:0<|tool_call_argument_begin|>{"city": "Bonn"}<|tool_call_end|>', "So."),
    ("kimi_k2", '<|tool_calls_section_begin|><|tool_call_begin|>get_weather<|tool_call_argument_begin|>'
     '{"city": "Bonn"}', ""),
    ("kimi_k2", "<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
     '{"city": "Bonn"<|tool_call_end|>', ""),
    ("qwen3_coder", "<tool_call>\n<function=get_weather>\n<parameter=city>\nBonn\n</function>\n</tool_call>Ok", "Ok"),
    ("qwen3_coder", "<tool_call>\n<function=get_weather>\n<parameter=city>\nBonn\n</tool_call>", ""),
    ("qwen3_coder", "<tool_call>\n<function=get_weather\n<parameter=city\nBonn\n</parameter>\n</tool_call>", ""),
    ("mistral", 'get_weather[ARGS]{"city": "Bonn"}', ""),
    ("mistral", 'Hm. get_weather[ARGS]{"city": "Bonn"} Ok', "Hm. Ok"),
    ("mistral", '[TOOL_CALLS][TOOL_CALLS]get_weather {"city": "Bonn"}', ""),
    ("hermes", '{"name": "get_weather", "arguments": {"city": "Bonn"}}\n</tool_call>', ""),
    ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bonn"}}}\n</tool_call></tool_call>', ""),
    ("deepseek_v31", '<|tool_calls_begin|><|tool_call_begin|>get_weather<|tool_sep|>{"city": "Bonn"}', ""),
    ("deepseek_v3", "<｜tool▁calls▁begin｜>get_weather\n```\n{\"city\": \"Bonn\"}\n```<｜tool▁call▁end｜>", ""),
    ("minimax_m2", "<invoke name=get_weather><parameter name='city'>Bonn</parameter></invoke>", ""),
    ("deepseek_v32", '<｜DSML｜invoke name="get_weather"><｜DSML｜parameter name="city">Bonn</｜DSML｜invoke>', ""),
    ("lfm2", "<|tool_call_start|>get_weather(city='Bonn')<|tool_call_end|>", ""),
    ("olmo3", "get_weather(city='Bonn')\n</function_calls>", ""),
    ("gemma4", '<|tool_call>get_weather{city:<|"|>Bonn}<tool_call|>', ""),
    ("gemma4", "call:get_weather{city:Bonn<|\"|>}<tool_call|>", ""),
    ("openai", 'commentary to=functions.get_weather json{"city": "Bonn"}<|call|>', ""),
    ("openai", '<|Channel|>commentary to=functions.get_weather<|message|><|message|>{"city": "Bonn"}', ""),
]  # fmt: skip
"""A call of get_weather in Bonn whose tags are missing, doubled or misspelt: format, text, content."""


@pytest.mark.parametrize(("format", "text", "content"), SPOILT)
def test_a_call_with_spoilt_tags_is_a_call(format: str, text: str, content: str) -> None:
    said, calls = read(format, text)
    assert (said, [(name, json.loads(arguments)) for name, arguments in calls]) == (content, BOTH[:1])


def test_a_block_may_have_several_objects() -> None:
    objects = '{"name": "get_weather", "arguments": {"city": "Bonn"}}\n{"name": "now", "arguments": {}}'
    assert read("hermes", f"<tool_call>\n{objects}\n</tool_call>") == (
        "",
        [("get_weather", '{"city": "Bonn"}'), ("now", "{}")],
    )


@pytest.mark.parametrize("format", TAGGED)
def test_tags_in_a_value_with_its_closing_tag_are_text(format: str) -> None:
    """Of the end of the call, and of arguments that are none of this call or are there already."""
    tags, (_, _, closing) = TAGGED[format], TOOL_FORMATS[format].block
    for value in (f"a{tags.around[2]} {closing.strip()} b", f"a {tags.open}text{tags.between}b {tags.open}?"):
        content, (arguments,) = read_tagged(format, tagged_call(format, [("text", value)]))
        assert (content, json.loads(arguments)) == ("", {"text": value})


def test_a_tag_ends_a_value_where_the_call_needs_another_argument() -> None:
    schema = {"properties": {"city": {"type": "string"}, "state": {"type": "string"}}, "required": ["state"]}
    text = "<tool_call>\n<function=f>\n<parameter=city>\nDallas<parameter=state>TX\n</parameter>\n"
    for more, expected in (
        ("", {"city": "Dallas", "state": "TX"}),
        ("<parameter=state>\nUT\n</parameter>\n", {"city": "Dallas<parameter=state>TX", "state": "UT"}),
    ):
        content, (arguments,) = read_tagged("qwen3_coder", f"{text}{more}</function>\n</tool_call>", schema=schema)
        assert (content, json.loads(arguments)) == ("", expected)


@pytest.mark.parametrize("format", ["functiongemma", "gemma4"])
def test_a_misspelt_quote_ends_a_text_only_if_the_exact_one_does_not(format: str) -> None:
    quote, again = ("<escape>", "<ESCAPE>") if format == "functiongemma" else ('<|"|>', '<|"| >')
    begin, *_, end = TOOL_FORMATS[format].block
    call = TWO_CALLS[format].split(f"{begin}call:now")[0]
    first = call.replace(f"Bonn{quote}", f"Bonn{again}")
    for text, expected in (
        (call.replace(f"Bonn{quote}", f"Bonn{again},unit:{quote}c{quote}"), [{"city": "Bonn", "unit": "c"}]),
        (call.replace(f"Bonn{quote}", f"Bonn{again},unit:{quote}, c{quote}"), [{"city": "Bonn", "unit": ", c"}]),
        (first + call, [{"city": "Bonn"}] * 2),
        *(
            (call.replace("Bonn", inside), [{"city": inside}])
            for inside in (f"{again}, or unit", f"{again},unit:c", f"x{again}}}{end}{begin}call:get_weather{{city:")
        ),
    ):
        content, calls = read(format, text)
        assert (content, [json.loads(arguments) for _, arguments in calls]) == ("", expected)


NOTES: dict[str, Any] = {"properties": {key: {"type": "string"} for key in ("a", "b", "c")}, "required": ["a"]}


@pytest.mark.parametrize("format", TAGGED)
def test_a_line_ends_a_text_that_is_not_closed(format: str) -> None:
    """The line opens an argument that the call does not have yet. Another call is not told from a quoted one."""
    tags, line = TAGGED[format], "\n" * TAGGED[format].close.endswith("\n")
    close = tags.close.strip()
    for between in filter(None, (tags.between, tags.between_json)):
        for spoilt in (line, f"{line}{line}" if tags.close.startswith("\n") else line, f"{line}{close.upper()}{line}"):
            call = tagged_call(format, [("a", "foo"), ("c", "x")], NOTES)
            call = call.replace(tags.close + tags.open, spoilt + tags.open, 1).replace(
                tags.between + "x", between + "x"
            )
            content, (arguments,) = read_tagged(format, call, schema=NOTES)
            assert (content, {k: v.strip("\n") for k, v in json.loads(arguments).items()}) == (
                "",
                {"a": "foo", "c": "x"},
            )
    inside = f"foo\n{tags.open}d{tags.between}{line}{tags.open}a{tags.between}{line}see {tags.open}b there"
    text = tagged_call(format, [("a", inside), ("b", "bar")], NOTES)
    assert [json.loads(each) for each in read_tagged(format, text, schema=NOTES)[1]] == [{"a": inside, "b": "bar"}]
    twice = f"foo{line}{tags.open}b{tags.between}x"
    text = tagged_call(format, [("a", twice), ("b", "bar"), ("c", "x")], NOTES)
    assert [json.loads(each) for each in read_tagged(format, text, schema=NOTES)[1]] == [
        {"a": twice, "b": "bar", "c": "x"}
    ]
    first, second = tagged_call(format, [("a", "foo")], NOTES), tagged_call(format, [("a", "bar"), ("b", "x")], NOTES)
    text = first.replace(tags.close, line, 1) + TOOL_FORMATS[format].gap + second
    inside = text[text.index("foo") : text.index(tags.close)]
    content, (arguments,) = read_tagged(format, text, schema=NOTES)
    assert (content, json.loads(arguments)) == ("", {"a": inside, "b": "x"})


@pytest.mark.parametrize("format", TAGGED)
def test_a_closing_tag_behind_a_backslash_ends_a_value(format: str) -> None:
    schema = {"properties": {"n": {"type": ["string", "object"]}, "m": {"type": "string"}}}
    for value in ('{"path": "C:\\', '["a\\'):
        content, (arguments,) = read_tagged(
            format, tagged_call(format, [("n", value), ("m", "x")], schema), schema=schema
        )
        assert (content, json.loads(arguments)) == ("", {"n": value, "m": "x"})


@pytest.mark.parametrize("format", TWO_CALLS)
def test_what_is_cut_off_before_the_arguments_of_a_required_call_is_not_content(format: str) -> None:
    text = TWO_CALLS[format]
    for end in range(len(text)):
        parser = OutputFormat(tools=TOOL_FORMATS[format], schemas=SCHEMAS, is_required=True).parser()
        content, _, calls = joined(parser.feed(text[:end]) + parser.finish())
        assert (content, [name for name, _ in calls]) == ("", ["get_weather", "now"][: len(calls)])


NO_CALLS = [
    ("hermes", "Write <tool_call> and </tool_call>."),
    ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now", "arguments": 5}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now", "arguments": "five"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now", "arguments": "{\\"a\\": \\"\\ud800\\"}"}</tool_call>'),
    ("hermes", '<tool_call>{"name": 5}</tool_call>'),
    ("hermes", '<tool_call>{"' + "x" * 400 + '": 1}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now"'),
    ("hermes", "<tool_call>"),
    ("hermes", "<tool_call>\n<function=now>\n</function>\n</tool_call>"),
    ("llama3_json", '{"answer": 3}'),
    ("llama3_json", '{"name": "now"'),
    ("llama3_json", '{"name": "Ada", "parameters": {}}'),
    ("llama3_json", 'It is {"name": "now", "parameters": {}}'),
    ("mistral", "[TOOL_CALLS]now, later"),
    ("mistral", "[TOOL_CALLS][]"),
    ("mistral_args", "[TOOL_CALLS]now[ARGS]5"),
    ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>unknown\n```json\n{}\n```"),
    ("pythonic", "[1, 2, 3]"),
    ("pythonic", "[now(5)]"),
    ("pythonic", "[now(a=b)]"),
    ("pythonic", "[now(a=1e999)]"),
    ("pythonic", "[now(a={1, 2})]"),
    ("pythonic", "[now(a=" + "(" * 5000),
    ("pythonic", "[now"),
    ("pythonic", "["),
    ("hermes", '{"name": "now", "arguments": {}} is an example'),
    ("hermes", '{"name": "now", "arguments": {}} {"name": "now", "arguments": {}} are two'),
    ("hermes", '{"name": "now", "arguments": {}}, {"name": "unknown", "arguments": {}}'),
    ("hermes", '{"name": "now", "arguments": {"a": 1'),
    ("mistral", '[{"name": "now", "arguments": {}}] is a list'),
    ("glm47", "It is now\n<arg_key>query</arg_key>..."),
    ("lfm2", "[now()] is how you call it."),
    ("olmo3", "now() is how you call it."),
    ("gemma4", "call:now{query:x} is the syntax"),
    ("glm47", "It is now\n<arg_key>query</arg_key>, then <arg_value>x</arg_value>, then the end"),
    ("glm47", "It is now\n<arg_key>query</arg_key><arg_value>x</arg_value> and the end"),
]

"""Text that is no call stays content."""


BROKEN = [
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": [1', "", ['{"a": [1']),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": "\\', "", ['{"a": "\\']),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": 1}', "", ['{"a": 1}']),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": 1}}\n</tool_', "", ['{"a": 1}']),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": ]} so', "]} so", ['{"a": ']),
    ("hermes", '<tool_call>{"name": "now", "arguments": {}</tool_call>ok', "ok", ["{}"]),
    ("mistral", '[TOOL_CALLS][{"name": "now", "arguments": {}}, {"na', ', {"na', ["{}"]),
    ("llama3_json", '{"name": "now", "parameters": {}}; then', "; then", ["{}"]),
    ("pythonic", "[now(a=1, b=x)]", ", b=x)]", ['{"a": 1']),
    ("pythonic", "[now(), unknown()]", ", unknown()]", ["{}"]),
]

"""A call that has begun ends where it breaks."""


@pytest.mark.parametrize(
    ("format", "text", "content", "arguments"),
    [
        *OTHER_WAYS,
        *((format, text + space, text + space, []) for format, text in NO_CALLS for space in ("", " \n")),
        *BROKEN,
    ],
)
def test_content_and_calls_are_told_apart(format: str, text: str, content: str, arguments: list[str]) -> None:
    assert read(format, text) == (content, [("now", said) for said in arguments])


def test_hidden_markers_vanish_where_they_open_no_call() -> None:
    format = TOOL_FORMATS["mistral"]
    for text in ("a[TOOL_CALLS]b[ARGS]c", "[TOOL_CALLS][{]"):
        for chunks in ([text], text):
            parser = tool_parser(ParserOptions(format, SCHEMAS, hidden=("[TOOL_CALLS]", "[ARGS]")))
            events = [event for chunk in chunks for event in parser.feed(chunk)] + parser.finish()
            assert joined(events)[0] == text.replace("[TOOL_CALLS]", "").replace("[ARGS]", "")


@pytest.mark.parametrize("format", TWO_CALLS)
def test_a_hidden_marker_inside_of_a_tag_is_a_part_of_it(format: str) -> None:
    parser = tool_parser(ParserOptions(TOOL_FORMATS[format], SCHEMAS, hidden=TOOL_FORMATS[format].all_markers))
    events = [event for character in TWO_CALLS[format] for event in parser.feed(character)] + parser.finish()
    content, _, calls = joined(events)
    assert (content, [(name, json.loads(arguments)) for name, arguments in calls]) == ("", BOTH)


ALL_MARKERS = [marker for format in TOOL_FORMATS.values() for marker in format.all_markers]
pieces = st.lists(
    st.one_of(
        st.sampled_from([*TWO_CALLS.values(), *(text for _, text, *_ in OTHER_WAYS + BROKEN), " \n", "\n\nok", *"{["]),
        st.sampled_from(ALL_MARKERS),
        st.text('<>[]{}"\\,:() nowx=1', max_size=8),
    ),
    max_size=4,
)


@given(st.sampled_from(sorted(TWO_CALLS)), pieces, st.lists(st.integers(0, 10_000), max_size=12))
@settings(max_examples=300)
def test_what_is_read_does_not_depend_on_the_cuts(format: str, parts: list[str], cuts: list[int]) -> None:
    text = "".join(parts)
    content, calls = read(format, text)
    assert joined(events_of(format, cut(text, cuts))) == (content, "", calls)
    assert all(name in SCHEMAS for name, _ in calls)
    if not calls:
        assert content == text


@pytest.mark.parametrize("cut_after", range(4))
def test_an_escaped_quote_may_be_cut(cut_after: int) -> None:
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "\\"}{"}}\n</tool_call>'
    at = call.index("\\") - 1 + cut_after
    assert joined(events_of("hermes", [call[:at], call[at:]]))[2] == [("get_weather", '{"city": "\\"}{"}')]


@pytest.mark.parametrize("format", TWO_CALLS)
def test_many_opening_tags_are_read_once(format: str) -> None:
    for marker in TOOL_FORMATS[format].markers:
        parser, count = tool_parser(ParserOptions(TOOL_FORMATS[format], SCHEMAS)), 0
        take = parser._take_tag

        def counted(pattern: Tags, take: Any = take) -> Any:
            nonlocal count
            count += 1
            return (yield from take(pattern))

        parser._take_tag = counted  # type: ignore[method-assign]
        text = marker * 400
        assert joined(parser.feed(text) + parser.finish()) == (text, "", [])
        assert count < 5 * 400


@pytest.mark.parametrize("format", TAGGED)
def test_a_closing_tag_ends_a_value_but_not_in_a_string_of_json(format: str) -> None:
    tags = TAGGED[format]
    close, opener = tags.close.strip(), tags.open
    for written in ([close], {"a": f"{close}{opener}list", "b": f'"{close}'}, [[], "\\", close]):
        value = json.dumps(written, ensure_ascii=False)
        text = tagged_call(format, [("list", value), ("any", "1")])
        content, (arguments,) = read_tagged(format, f"{text}Done.")
        assert (content, json.loads(arguments)) == ("Done.", {"list": written, "any": 1})


@pytest.mark.parametrize("format", TAGGED)
@pytest.mark.parametrize("value", ['["a]', '{"a": "b', '["a", "b]', '["a\\"]', '["\\\\\\"]', '[\n"a,\n1]', '{"'])
def test_a_string_of_json_that_is_not_closed_ends_with_the_value(format: str, value: str) -> None:
    for other in ("5", '["b"]', '["c]', '"', "{}"):
        text = tagged_call(format, [("list", value), ("any", other), ("text", "good")])
        content, (arguments,) = read_tagged(format, f"{text}Done.")
        found = json.loads(arguments)
        assert (content, found["list"], found["text"], len(found)) == ("Done.", value, "good", 3)


@pytest.mark.parametrize("format", ["qwen3_coder", "glm47"])
@pytest.mark.parametrize("piece", ["[1, ", '["a", ', '"', "</", "\n", "CLOSE", 'CLOSE OPEN[\\"', '"CLOSE'])
def test_a_long_value_is_read_once(format: str, piece: str) -> None:
    """Counted in characters that are searched, when it comes in pieces of a few."""
    tags = TAGGED[format]
    opening = f"{tags.open}any{tags.between_json or tags.between}"
    piece = piece.replace("CLOSE", tags.close).replace("OPEN", opening)
    text = tagged_call(format, [("list", '["' + piece * (40_000 // len(piece))), ("any", "1")])
    parser = tool_parser(ParserOptions(TOOL_FORMATS[format], {"f": OBJECT}))
    count = 0

    class Counted:
        def __init__(self, pattern: re.Pattern[str]) -> None:
            self.pattern = pattern

        def search(self, text: str, begin: int = 0, end: int | None = None) -> re.Match[str] | None:
            nonlocal count
            found = self.pattern.search(text, begin, len(text) if end is None else end)
            count += (len(text) if end is None else end) - begin if found is None else found.end() - begin
            return found

        def __getattr__(self, name: str) -> Any:
            return getattr(self.pattern, name)

    for name, value in [*vars(parser).items()]:
        if isinstance(value, re.Pattern):
            setattr(parser, name, Counted(value))
        if isinstance(value, Tags):
            whole: Any = Counted(value.whole)
            half: Any = Counted(value.half)
            setattr(parser, name, Tags(whole, half, value.longest))
    for at in range(0, len(text), 4):
        parser.feed(text[at : at + 4])
    parser.finish()
    assert count < 20 * len(text)


@given(st.sampled_from(sorted(TAGGED)), st.data(), st.lists(st.integers(0, 10_000), max_size=8))
def test_tagged_values_do_not_depend_on_the_cuts(format: str, data: st.DataObject, cuts: list[int]) -> None:
    tags = TAGGED[format]
    pieces = ['"', "\\", "\n", " ", "[", "]", "{", "a", "<", "</", tags.close.strip(), tags.open, "list"]
    values = st.lists(st.sampled_from(pieces), max_size=10).map("".join)
    keys = st.sampled_from(["list", "any", "text", "count"])
    text = tagged_call(format, data.draw(st.lists(st.tuples(keys, values), max_size=3)))
    read_tagged(format, f"{text}Done.", cuts)
    read_tagged(format, text[: -(data.draw(st.integers(1, 40)))], cuts)


@pytest.mark.parametrize("format", TAGGED)
def test_properties_stand_behind_references_and_may_have_delimiters(format: str) -> None:
    text = tagged_call(format, [("count", "5"), ("name", "5")])
    assert read_tagged(format, text) == ("", ['{"count": 5, "name": "5"}'])
    names = ["a>b", 'a">', 'a"b', "a<b", "a>b>c", "a=b", "a\nb", "a", "a</arg_key>b"]
    schema = {"allOf": [{"properties": {name: {"type": "integer"} for name in names}}]}
    text = tagged_call(format, [(name, "1") for name in names], schema)
    content, (arguments,) = read_tagged(format, f"{text}Done.", schema=schema)
    assert (content, json.loads(arguments)) == ("Done.", dict.fromkeys(names, 1))


def test_names_have_a_limit_wherever_they_are_cut() -> None:
    for length in (200, 254, 255, 256, 257, 300):
        for text in (
            f'<tool_call>{{"name": "now", "{"x" * length}": 1, "arguments": {{}}}}</tool_call>',
            f'<tool_call>{{"name": "now", "id": {"1" * length}, "arguments": {{}}}}</tool_call>',
        ):
            content, calls = read("hermes", text)
            assert (content, len(calls)) in (("", 1), (text, 0))
        for format in TAGGED:
            read_tagged(format, tagged_call(format, [("x" * length, "1")]))


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
                    | st.text() | st.sampled_from(ALL_MARKERS),
                    lambda of: st.lists(of, max_size=3) | st.dictionaries(st.text(), of, max_size=3)),
       st.sampled_from(["json", "ascii", "wide"]))  # fmt: skip
def test_any_json_comes_through(value: object, style: str) -> None:
    written = json.dumps({"v": value}, ensure_ascii=style == "ascii", indent=2 if style == "wide" else None)
    _, calls = read("hermes", f'<tool_call>{{"name": "now", "arguments": {written}}}</tool_call>')
    assert calls == [("now", written)]
    for text in (json.dumps(value), repr(value)):
        _, calls = read("pythonic", f"[now(v={text})]")
        assert json.loads(calls[0][1]) == {"v": value}
