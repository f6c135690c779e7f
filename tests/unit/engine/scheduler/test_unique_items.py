"""Arrays whose items must be unique: exact masks, in all places and with tokens that cross several items."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from quire.engine.protocol.sampling_params import SamplingParams, StructuredOutputs
from quire.engine.scheduler import unique_places
from quire.engine.scheduler.grammar import GrammarCompiler, GrammarError, json_mark
from quire.engine.scheduler.unique_places import Following, Language, without_unique_items
from quire.server.parsers.reasoning import REASONING_FORMATS
from quire.server.parsers.tool_formats import TOOL_FORMATS, Json, JsonObject
from quire.server.parsers.tool_grammar import GrammarTool, tool_grammar
from quire.server.text.structured_outputs import _checked_grammar
from tests.fakes.configs import TINY, engine_config
from tests.fakes.tokenizers import byte_fallback

_CROSSING = [
    *('","', '", "', '"a"', '["', '"]', '"a","', 'a","b', '"a","a"', '["a","a"', '["a","b"', '["a",', '"],["', '[["'),
    *("1,", "1,1", ",1", "[1", "[1,1", "1]", "10", "11", "0,", "[0,", ", ", " 1", ' "', "1 ,", "null,", "true", "-0"),
    *(
        '"a',
        'ab"',
        'a"',
        "a\\",
        '\\"',
        '"\\"',
        "\\\\",
        "b",
        '{"x":["',
        ": [1, 1",
        "\xe9",
        '"\xe9"',
        "x" * 70,
        '"' + "a" * 70,
    ),
]
_ENDS_SCALAR = re.compile(r'("(?:[^"\\]|\\.)*(?:"|$))|([-0-9a-z]+)(?=[^-0-9a-z])|\s+')


def _byte_level(extra: list[str]) -> Tokenizer:
    byte = pre_tokenizers.ByteLevel(add_prefix_space=False)
    names = [*sorted(byte.alphabet()), "<end>"]
    names += ["".join(part for part, _ in byte.pre_tokenize_str(text)) for text in extra]
    built = Tokenizer(models.BPE({name: at for at, name in enumerate(dict.fromkeys(names))}, []))
    built.pre_tokenizer, built.decoder = byte, decoders.ByteLevel()
    built.add_special_tokens(["<end>"])
    return built


def _compiler(folder: Path, tokenizer: Tokenizer, end: str) -> GrammarCompiler:
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    architecture = replace(TINY, vocab_size=tokenizer.get_vocab_size())
    return GrammarCompiler(
        engine_config(tokenizer=folder, architecture=architecture, eos=(tokenizer.get_vocab()[end],)).model
    )


@pytest.fixture(scope="module")
def compilers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, GrammarCompiler]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "crossing": _compiler(folder / "crossing", _byte_level(_CROSSING), "<end>"),
        "bytes": _compiler(folder / "bytes", byte_fallback(), "</s>"),
    }


def _texts(compiler: GrammarCompiler) -> list[bytes]:
    return compiler._token_texts().texts


def _masks(compiler: GrammarCompiler, grammars: list[Any]) -> list[set[int]]:
    masks = np.ascontiguousarray(compiler.masks(grammars)).view(np.uint8)
    return [set(np.flatnonzero(np.unpackbits(row, bitorder="little")).tolist()) for row in masks]


def _unique(items: Any, **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, "uniqueItems": True, **more}


def _marked(text: str) -> str:
    """JSON without white space, with a mark where a number or literal ends."""
    return _ENDS_SCALAR.sub(lambda found: found[1] or (f"{found[2]}\N{BULLET}" if found[2] else ""), text)


def _lists(values: list[Any], least: int, most: int) -> Iterator[list[Any]]:
    for size in range(least, most + 1):
        yield from (list(each) for each in itertools.permutations(values, size))


_FEW: list[tuple[Any, list[Any], int, int]] = [
    ({"type": "integer", "minimum": 0, "maximum": 1}, [0, 1], 0, 2),
    ({"type": "integer", "minimum": 9, "maximum": 11}, [9, 10, 11], 1, 3),
    ({"enum": [1, 10, 11, 101]}, [1, 10, 11, 101], 4, 4),
    ({"type": ["boolean", "null"]}, [True, False, None], 0, 3),
    ({"enum": ["", "a", "ab", "aa"]}, ["", "a", "ab", "aa"], 2, 4),
    ({"type": "string", "pattern": '^["\\\\]{1,2}$'}, ['"', "\\", '""', "\\\\", '"\\', '\\"'], 1, 3),
    ({"anyOf": [{"const": "a"}, {"const": 1}, {"type": "null"}]}, ["a", 1, None], 3, 3),
    ({"enum": ["é", "a", "b"]}, ["é", "a", "b"], 0, 2),
    ({"enum": ["abcabc", "abcabd", "abc"]}, ["abcabc", "abcabd", "abc"], 3, 3),
    ({"type": "integer", "minimum": 1230, "maximum": 1231}, [1230, 1231], 0, 2),
]


_TWO_LANGUAGES = {"prefixItems": [{"enum": ["a", "b"]}], "items": {"enum": ["a", "c", "ac"]}, "type": "array"}


def _check_walks(compiler: GrammarCompiler, schema: Any, lists: list[Any], seed: str) -> int:
    """Walk at random, and compare each mask with all texts of these values; returns the number of tokens removed."""
    good = {_marked(json.dumps(each, ensure_ascii=False).encode().decode("latin-1")) for each in lists}
    begun = {each[:size] for each in good for size in range(len(each) + 1)}
    texts, rng, removed = _texts(compiler), random.Random(seed), 0
    for _ in range(4):
        grammar = compiler.compile(StructuredOutputs(json=schema))
        plain = compiler.compile(StructuredOutputs(json=without_unique_items(schema)))
        text = ""
        while not grammar.is_complete:
            exact, loose = _masks(compiler, [grammar, plain])
            assert exact
            expected = {token for token in loose if _marked(text + texts[token].decode("latin-1")) in begun}
            assert exact == expected, (text, [texts[token] for token in exact ^ expected])
            removed += len(loose - exact)
            further = [token for token in exact if texts[token].strip(b" \n\t]")]
            token = rng.choice(sorted(further or exact))
            grammar.advance([token])
            plain.advance([token])
            text += texts[token].decode("latin-1")
        assert _marked(text) in good
    return removed


@pytest.mark.parametrize(("vocabulary", "around"), [("crossing", ""), ("bytes", "object"), ("crossing", "arrays")])
@pytest.mark.parametrize(("items", "values", "least", "most"), _FEW)
def test_exactly_the_tokens_that_lead_to_different_items_are_allowed(
    compilers: dict[str, GrammarCompiler],
    vocabulary: str,
    around: str,
    items: Any,
    values: list[Any],
    least: int,
    most: int,
) -> None:
    schema: Any = _unique(items, minItems=least, maxItems=most)
    lists: list[Any] = list(_lists(values, least, most))
    if around == "object":
        schema = {"type": "object", "properties": {"x": schema}, "required": ["x"], "additionalProperties": False}
        lists = [{"x": each} for each in lists]
    elif around == "arrays":
        lists = [[one, other] for one in lists[1:3] for other in lists]
        first = {"enum": [one for one, _ in lists]}
        schema = {"type": "array", "prefixItems": [first, schema], "items": False, "minItems": 2}
    assert _check_walks(compilers[vocabulary], schema, lists, f"{values}{around}")


@pytest.mark.parametrize("vocabulary", ["crossing", "bytes"])
def test_items_of_two_languages_differ_as_well(compilers: dict[str, GrammarCompiler], vocabulary: str) -> None:
    lists = [each for each in _lists(["a", "b", "c", "ac"], 1, 4) if each[0] in "ab" and "b" not in each[1:]]
    schema = {**_TWO_LANGUAGES, "uniqueItems": True, "minItems": 1}
    assert _check_walks(compilers[vocabulary], schema, lists, "two")


def _after(compiler: GrammarCompiler, schema: Any, text: str) -> set[bytes]:
    """The texts of the tokens that are allowed after this text, written with single bytes."""
    grammar = compiler.compile(StructuredOutputs(json=schema))
    tokens = compiler._token_texts()
    for byte in text.encode():
        (allowed,) = _masks(compiler, [grammar])
        assert tokens.of_byte[byte] in allowed
        grammar.advance([tokens.of_byte[byte]])
    (allowed,) = _masks(compiler, [grammar])
    return {tokens.texts[token] for token in allowed}


@pytest.mark.parametrize(
    ("items", "text", "gone", "left"),
    [
        ({"type": "string"}, '["a","', {b'a"'}, {b'"a"', b"a\\", b"b", b'"', b'","', b'ab"'} - {b'"a"'}),
        ({"type": "string"}, '["a","a', {b'"', b'","', b'", "', b'"]', b'"a"'}, {b"b", b"\\", b"\xc3"}),
        ({"type": "string"}, '["a","b","', set(), {b'"', b'a","b'} - {b'a","b'}),
        ({"type": "string"}, '["b",', {b'"a","a"'}, {b'"a"', b'"a","', b'"', b"\n"}),
        ({"type": "string"}, '["\\"","\\', {b'""'}, {b'"', b"\\", b"n"}),
        ({"type": "string"}, '["é",', {'"é"'.encode()}, {b'"a"', b'"'}),
        ({"type": "string"}, "[", {b'"a","a"'}, {b'"a"', b'"a","'}),
        ({"type": "string", "maxLength": 1}, '["a","', {b"a", b"a\\"}, {b"b", b'"', b"\\"}),
        ({"type": "integer"}, "[1,", {b"1,", b"1,1", b"1]"}, {b"1", b"11", b"10", b" 1", b"0,"}),
        ({"type": "integer"}, "[1,1", {b",", b"]", b" ", b", ", b",1"}, {b"1", b"10", b"1,", b"0,"}),
        ({"type": "integer"}, "[0,-", {b"0", b"0,"}, {b"1", b"1,", b"10"}),
        ({"type": "integer"}, "[-0,", {b"0", b"0,", b"-0"}, {b"1", b"1,", b"-"}),
        ({"type": ["integer", "null"]}, "[null", {b","} - {b","}, {b",", b",1", b"]", b" "}),
        ({"type": ["integer", "null"]}, "[null,", {b"null,", b"n"}, {b"1", b"1,1"} - {b"1,1"}),
    ],
)
def test_values_without_limit(
    compilers: dict[str, GrammarCompiler], items: Any, text: str, gone: set[bytes], left: set[bytes]
) -> None:
    found = _after(compilers["crossing"], _unique(items), text)
    assert not gone & found
    assert left <= found


def test_long_items_cost_little(compilers: dict[str, GrammarCompiler], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bytes] = []
    following = Language._following

    def spy(self: Language, start: bytes) -> Following | None:
        asked.append(start)
        return following(self, start)

    monkeypatch.setattr(Language, "_following", spy)
    long = ["x" * 900 + end for end in ("a", "b" * 900, "c" * 900)]
    compiler = compilers["crossing"]
    grammar = compiler.compile(StructuredOutputs(json=_unique({"enum": long}, minItems=3)))
    tokens = compiler._token_texts()
    grammar.advance([tokens.of_byte[byte] for byte in json.dumps(long, separators=(",", ":"))[:-1].encode()])
    (allowed,) = _masks(compiler, [grammar])
    found = {tokens.texts[token] for token in allowed}
    assert b"]" in found
    assert b"," not in found
    assert len(asked) < 150


class _Counting:
    """A matcher that counts the bytes that it reads."""

    def __init__(self, matcher: Any) -> None:
        self.matcher, self.num_read = matcher, 0

    def try_consume_tokens(self, tokens: list[int]) -> Any:
        self.num_read += len(tokens)
        return self.matcher.try_consume_tokens(tokens)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.matcher, name)


@pytest.mark.parametrize(
    ("items", "most"),
    [({"type": "string"}, 0), ({"type": ["string", "null"]}, 0), ({"type": "string", "pattern": "^[a-z]*$"}, 300)],
)
def test_a_mask_inside_of_a_long_string_reads_none_of_it_again(
    compilers: dict[str, GrammarCompiler], items: Any, most: int
) -> None:
    compiler = compilers["crossing"]
    grammar, tokens = compiler.compile(StructuredOutputs(json=_unique(items))), compiler._token_texts()
    grammar.advance([tokens.of_byte[byte] for byte in b'["a","'])
    unique = grammar._unique_items
    assert unique is not None
    root = unique._roots[""]
    assert root is not None
    (language,) = root.languages
    assert language is not None
    counting: Any = _Counting(language._matcher)
    language._matcher = counting
    for _ in range(143):
        grammar.advance([tokens.texts.index(b"x" * 70)])
    compiler.masks([grammar])
    counting.num_read = 0
    for byte in b"abc":
        grammar.advance([tokens.of_byte[byte]])
        (allowed,) = _masks(compiler, [grammar])
        assert tokens.of_byte[ord('"')] in allowed
    assert counting.num_read <= most


def test_continuations_of_long_beginnings_are_forgotten(
    compilers: dict[str, GrammarCompiler], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unique_places, "_MAX_KEPT_BYTES", 2**16)
    grammar = compilers["bytes"].compile(StructuredOutputs(json=_unique({"type": "string", "pattern": "^[a-z]*$"})))
    assert grammar._unique_items is not None
    root = grammar._unique_items._roots[""]
    assert root is not None
    (language,) = root.languages
    assert language is not None
    for size in range(0, 20_000, 500):
        found = language.following(b'"' + b"a" * size)
        assert found is not None
        assert len(found.next) == 27
    assert 0 < sum(map(len, language._kept)) <= 2**16


@pytest.mark.parametrize("least", [2, 50])
@pytest.mark.parametrize(
    "items",
    [
        *({"type": "string", "format": name} for name in ("uuid", "date", "email")),
        {"type": "string", "minLength": 5},
        {"type": "string", "pattern": "^[ab]{2000}[ab]*$"},
        {"type": "integer", "minimum": 100_000},
        {"type": "string", "pattern": "^a*$"},
    ],
)
def test_enough_items_are_found_soon(
    compilers: dict[str, GrammarCompiler], monkeypatch: pytest.MonkeyPatch, items: Any, least: int
) -> None:
    monkeypatch.setattr(unique_places, "_MAX_COUNTED", 110)
    assert compilers["bytes"].error(StructuredOutputs(json=_unique(items, minItems=least))) is None


def test_the_search_for_enough_items_is_limited(
    compilers: dict[str, GrammarCompiler], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unique_places, "_MAX_COUNTED", 20)
    schema = _unique({"type": "string", "pattern": "^a*$"}, minItems=50)
    assert "minItems of 50" in str(compilers["bytes"].error(StructuredOutputs(json=schema)))


def test_the_items_of_an_array_have_a_limited_number_of_schemas(
    compilers: dict[str, GrammarCompiler], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unique_places, "_MAX_LANGUAGES", 3)
    for number, is_good in ((3, True), (4, False)):
        items = [{"enum": ["a", str(at)]} for at in range(number)]
        outputs = StructuredOutputs(json={**_unique(False), "prefixItems": items})
        error = compilers["bytes"].error(outputs)
        assert (error is None) == is_good, error
        assert is_good or "more than 3 schemas" in str(error)


def test_tokens_that_begin_several_arrays_do_not_share_their_items(tmp_path: Path) -> None:
    compiler = _compiler(tmp_path / "model", _byte_level([f'{{"{name}":["x",' for name in "abcdefgh"]), "<end>")
    some, one = (_unique({"type": "string", "pattern": pattern}) for pattern in ("^[xy]$", "^x$"))
    properties = {name: (some, one)[at % 2] for at, name in enumerate("abcdefgh")}
    found = _after(compiler, {**_CLOSED, "properties": properties}, "")
    assert {text[2:3] for text in found if text.endswith(b",")} == {b"a", b"c", b"e", b"g"}


_TAGS = _unique({"type": "string"})
_CLOSED = {"type": "object", "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "unique", "free"),
    [
        ({**_CLOSED, "properties": {"a": _TAGS, "b": {"items": {"type": "string"}}}}, ['{"a":['], ['{"b":[']),
        ({"type": "object", "additionalProperties": _TAGS}, ['{"a":[', '{"\\"":["","x"],"b":['], []),
        ({"type": "object", "patternProperties": {"^x": _TAGS}, "additionalProperties": False}, ['{"x1":['], []),
        ({"anyOf": [{"type": "null"}, {"$ref": "#/$defs/t"}], "$defs": {"t": _TAGS}}, ["["], []),
        ({"allOf": [{"uniqueItems": True}, {"type": "array"}, {"items": {"type": "string"}}]}, ["["], []),
        (
            {"type": "array", "prefixItems": [{"items": {"type": "string"}}, _TAGS], "items": {"$ref": "#"}},
            ['[["a","a"],[', '[[],[],[["a","a"],['],
            ["[[", "[[],[],[["],
        ),
        (
            {**_CLOSED, "properties": {"next": {"$ref": "#"}, "tags": _TAGS}},
            ['{"next":{"next":{"tags":[]},"tags":[', '{"tags":['],
            [],
        ),
        (
            {
                "anyOf": [
                    {**_CLOSED, "properties": {"kind": {"const": "a"}, "tags": _TAGS}},
                    {**_CLOSED, "properties": {"kind": {"const": "b"}, "tags": {**_TAGS}}},
                ]
            },
            ['{"kind":"b","tags":["","x"'],
            [],
        ),
    ],
)  # fmt: skip
def test_places(compilers: dict[str, GrammarCompiler], schema: Any, unique: list[str], free: list[str]) -> None:
    for text in unique:
        text += "," * text.endswith('"')
        assert b'"' not in _after(compilers["crossing"], schema, f'{text}"a","a'), text
        assert b'"' in _after(compilers["crossing"], schema, f'{text}"a","b')
    for text in free:
        assert b'"' in _after(compilers["crossing"], schema, f'{text}"a","a'), text


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        (_unique({"type": "number"}), "only supported for items"),
        (_unique(True), "only supported for items"),
        (_unique({"type": "object"}), "only supported for items"),
        (_unique({"enum": [1.5, 2]}), "only supported for items"),
        (_unique({"enum": ["a", "b"]}, minItems=3), "fewer than 3 values"),
        (_unique({"type": "integer", "minimum": 0, "maximum": 1}, minItems=3), "fewer than 3 values"),
        ({"anyOf": [_TAGS, {"type": "array"}]}, "several alternatives"),
        ({"anyOf": [_TAGS, _unique({"type": "integer"})]}, "several alternatives"),
        ({"properties": {"a": True}, "patternProperties": {"^x": _TAGS}}, "patternProperties"),
        (_unique({"type": "string"}, enum=[["a"]]), "enum or const"),
    ],
)
def test_what_depends_on_more_than_the_place_is_refused(
    compilers: dict[str, GrammarCompiler], schema: Any, why: str
) -> None:
    with pytest.raises(GrammarError, match=why):
        compilers["crossing"].compile(StructuredOutputs(json=schema))


def test_values_inside_of_a_grammar(compilers: dict[str, GrammarCompiler]) -> None:
    compiler = compilers["crossing"]
    (one, other), rules = zip(*map(json_mark, (1, 2)), strict=True)
    texts, tags = compiler._token_texts(), {**_CLOSED, "properties": {"x": _TAGS}}
    numbers = {**_CLOSED, "properties": {"y": _unique({"type": "integer"})}}
    lark = "\n".join([
        "start: head (one | other) (\";\" (one | other))*", "head[lazy]: /(.|\\n)*/ \"call \"",
        f'one: "one: " {one} %json {json.dumps(tags)}', f'other: "two: " {other} %json {json.dumps(numbers)}',
        *rules, "NOTHING: /()/",
    ])  # fmt: skip
    grammar = compiler.compile(StructuredOutputs(grammar=lark, num_marks=2))
    ids = {text: token for token, text in enumerate(texts.texts)}

    def write(text: str) -> None:
        grammar.advance([texts.of_byte[byte] for byte in text.encode()])

    write('{"x": ["a","a"]} call one:')
    write(' {"x": ["a","a')
    (allowed,) = _masks(compiler, [grammar])
    assert ids[b'"'] not in allowed
    write('b"]};one: {"x": ["a"]};two:')
    write(' {"y": [')
    (allowed,) = _masks(compiler, [grammar])
    assert ids[b"1,1"] in allowed
    write("1,1")
    (allowed,) = _masks(compiler, [grammar])
    assert ids[b"]"] not in allowed
    with pytest.raises(GrammarError, match="repeats"):
        write("]")


def test_known_output_is_read_again(compilers: dict[str, GrammarCompiler]) -> None:
    compiler, outputs = compilers["crossing"], StructuredOutputs(json=_unique({"type": "integer"}, minItems=20))
    grammar, rng, known = compiler.compile(outputs), random.Random(3), list[int]()
    while not grammar.is_complete:
        again = compiler.compile(outputs)
        again.advance(known)
        (mask,), (same,) = compiler.masks([grammar]), compiler.masks([again])
        assert grammar.mask_row(mask, SamplingParams(), known) == again.mask_row(same, SamplingParams(), known)
        (allowed,) = _masks(compiler, [grammar])
        known.append(rng.choice(sorted(allowed)))
        grammar.advance(known[-1:])
    numbers = json.loads(b"".join(_texts(compiler)[token] for token in known))
    assert len(numbers) == len({*numbers}) >= 20


_JSON_CALLS = [name for name, each in TOOL_FORMATS.items() if isinstance(each.call, Json | JsonObject)]


@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize("name", _JSON_CALLS)
def test_calls_of_tools(compilers: dict[str, GrammarCompiler], name: str, required: bool) -> None:
    compiler, format = compilers["crossing"], TOOL_FORMATS[name]
    rules = tool_grammar(format, _TOOLS, lambda _: None, required=required, several=True)
    before, between, _ = format.call.around
    (opening, rest, _), prefix = format.block, "functions." if format.id_as_name else ""
    suffix = ":0" if format.id_as_name else ""
    for function, text, is_good in (("f", '["a","a', False), ("f", '["a","b', True), ("g", '["a","a', True)):
        head = f'{opening}{rest}{before}{prefix}{function}{suffix}{between}{{"a":{text}'
        assert _can_end_string(compiler, rules, head) == is_good, (function, text)


def _checked(rules: StructuredOutputs) -> StructuredOutputs:
    return StructuredOutputs(grammar=_checked_grammar(rules, None), num_marks=rules.num_marks)


_TOOLS = [
    GrammarTool("f", {**_CLOSED, "properties": {"a": _TAGS}}, strict=True),
    GrammarTool("g", {**_CLOSED, "properties": {"a": {"type": "array"}}}, strict=True),
]


def _can_end_string(compiler: GrammarCompiler, rules: StructuredOutputs, text: str) -> bool:
    """Whether a quote may follow this text."""
    grammar = compiler.compile(_checked(rules))
    tokens = compiler._token_texts()
    for byte in text.encode():
        grammar.forced_tokens()  # the matcher looks ahead
        grammar.advance([tokens.of_byte[byte]])
    (allowed,) = _masks(compiler, [grammar])
    return tokens.of_byte[ord('"')] in allowed


def test_calls_or_an_answer(compilers: dict[str, GrammarCompiler]) -> None:
    compiler, format, think = compilers["crossing"], TOOL_FORMATS["hermes"], REASONING_FORMATS["qwen3"]
    answer = {**_CLOSED, "properties": {"a": {**_TAGS, "maxItems": 9}}}
    rules = tool_grammar(format, _TOOLS, lambda _: None, required=False, several=True, answer=answer, reasoning=think)
    for thought in ("", '<think>["a","a"] {"a":["a","a"]}</think>\n\n'):
        for text, is_good in (
            ('{"a":["a","a', False),
            ('{"a":["a","b', True),
            ('<tool_call>\n{"name": "f", "arguments": {"a":["a","a', False),
            ('<tool_call>\n{"name": "g", "arguments": {"a":["a","a', True),
        ):
            assert _can_end_string(compiler, rules, thought + text) == is_good, thought + text
    rules = tool_grammar(TOOL_FORMATS["mistral"], _TOOLS, lambda _: None, required=False, several=True, answer=answer)
    with pytest.raises(ValueError, match=r"uniqueItems .* few values"):
        _checked(rules)
