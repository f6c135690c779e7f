"""GrammarCompiler: compiled once, advanced token by token, and their masks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.engine.config.engine_config import ModelConfig
from quire.engine.protocol.sampling_params import SamplingParams, StructuredOutputs
from quire.engine.scheduler import grammar as grammar_module
from quire.engine.scheduler.grammar import Grammar, GrammarCompiler, GrammarError
from tests.fakes.configs import TINY, engine_config
from tests.fakes.tokenizers import byte_fallback, byte_level, write_model

EOS = 2
TOKENIZER = byte_level()
SIZE = TOKENIZER.get_vocab_size()


def ids(text: str) -> list[int]:
    encoded: list[int] = TOKENIZER.encode(text, add_special_tokens=False).ids
    return encoded


def letter(character: str) -> int:
    (token,) = ids(character)
    return token


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def model(folder: Path, vocab_size: int = SIZE, eos: tuple[int, ...] = (EOS,)) -> ModelConfig:
    return engine_config(tokenizer=folder, architecture=replace(TINY, vocab_size=vocab_size), eos=eos).model


@pytest.fixture(scope="module")
def grammars(folder: Path) -> GrammarCompiler:
    return GrammarCompiler(model(folder))


def members(mask: bytes | np.ndarray[Any, Any]) -> set[int]:
    """The tokens of a mask."""
    array = np.frombuffer(mask, np.uint8) if isinstance(mask, bytes) else np.ascontiguousarray(mask).view(np.uint8)
    return set(np.flatnonzero(np.unpackbits(array, bitorder="little")).tolist())


def allowed(grammars: GrammarCompiler, grammar: Grammar, output: list[int] | None = None, **params: Any) -> set[int]:
    (mask,) = grammars.masks([grammar])
    return members(grammar.mask_row(mask, SamplingParams(max_tokens=None, **params), output or []))


def test_a_grammar_goes_on_with_the_tokens_sampled(grammars: GrammarCompiler) -> None:
    grammar = grammars.compile(StructuredOutputs(regex="a(b|c)d?"))
    assert grammar.forced_tokens() == [letter("a")]
    assert allowed(grammars, grammar) == {letter("a")}
    grammar.advance([letter("a")])
    assert allowed(grammars, grammar) == {letter("b"), letter("c")}
    assert grammar.forced_tokens() == []
    grammar.advance([letter("c")])
    assert allowed(grammars, grammar) == {letter("d"), EOS}
    assert not grammar.is_complete
    grammar.advance([letter("d")])
    assert grammar.is_complete
    assert allowed(grammars, grammar) == {EOS}


def test_what_is_not_allowed_is_an_error(grammars: GrammarCompiler) -> None:
    grammar = grammars.compile(StructuredOutputs(regex="ab"))
    with pytest.raises(GrammarError):
        grammar.advance([letter("b")])
    assert not grammar.is_complete
    (mask,) = grammars.masks([grammar])
    with pytest.raises(GrammarError):
        grammar.mask_row(mask, SamplingParams(), [])


def test_forced_tokens_are_those_of_the_tokenizer(grammars: GrammarCompiler) -> None:
    for text in ("hello world, how are you?", "中文 😀", "serve a model"):
        assert grammars.compile(StructuredOutputs(choice=[text])).forced_tokens() == ids(text)


def test_choices_may_have_any_character(grammars: GrammarCompiler) -> None:
    for text in ("".join(map(chr, range(32))), "\x7f", "a\x85\u2028", '"\\/|'):
        grammar = grammars.compile(StructuredOutputs(choice=["other", text]))
        grammar.advance(ids(text))
        assert EOS in allowed(grammars, grammar)


def test_thousands_of_choices(grammars: GrammarCompiler) -> None:
    choices = [f"{'a' * (at % 30)} choice {at}" for at in range(10_000)]
    for text in (choices[0], choices[-1]):
        grammar = grammars.compile(StructuredOutputs(choice=choices))
        for token in ids(text):
            assert token in allowed(grammars, grammar)
            grammar.advance([token])
        assert EOS in allowed(grammars, grammar)


def test_a_grammar_whose_first_step_fails_is_rejected(grammars: GrammarCompiler) -> None:
    rules = " | ".join(f'"x{at}"' for at in range(2500))  # more than the parser can follow at once
    with pytest.raises(GrammarError, match="fails after its first token: the grammar is too ambiguous: more than 500"):
        grammars.compile(StructuredOutputs(grammar=f"start: {rules}"))


def exhaust(grammars: GrammarCompiler, outputs: StructuredOutputs) -> None:
    """Advance until the grammar fails."""
    grammar = grammars.compile(outputs)
    for output in range(400):
        grammar.advance([letter("a")])
        allowed(grammars, grammar, [letter("a")] * output)


@pytest.mark.parametrize("rules", ['s: s s s | s s | /[a-z ]/ | ""', "s: s s | /[a-z]/", 's: s "a" s | s s | "a"'])
def test_an_ambiguous_grammar_ends_with_an_error_that_says_so(grammars: GrammarCompiler, rules: str) -> None:
    with pytest.raises(GrammarError, match="the grammar is too ambiguous: more than 500 alternatives are open at one"):
        exhaust(grammars, StructuredOutputs(grammar=f"start: s\n{rules}"))


def test_a_regex_that_is_too_complex_is_an_error_that_says_so(grammars: GrammarCompiler) -> None:
    with pytest.raises(GrammarError, match="the regular expressions are too complex"):
        exhaust(grammars, StructuredOutputs(regex="(([a-z ]{1,100}a){1,100}b){1,100}"))


def test_a_grammar_that_forces_millions_of_tokens_is_an_error(grammars: GrammarCompiler) -> None:
    rule = "T{30}\nT: /x{30000}/"
    assert "forces more than 65536 tokens" in str(grammars.error(StructuredOutputs(grammar=f"start: {rule}")))
    assert "forces more than 65536 tokens" in str(grammars.error(StructuredOutputs(grammar=f"start: /[ab]/ {rule}")))
    grammar = grammars.compile(StructuredOutputs(grammar=f"start: /[ab]/ /[ab]/ {rule}"))
    grammar.advance([letter("a"), letter("b")])
    with pytest.raises(GrammarError, match="forces more than 65536 tokens"):
        grammar.forced_tokens()


def _optional(count: int) -> dict[str, Any]:
    kinds = [{"type": "string"}, {"type": "integer"}, {"type": ["string", "null"]}]
    return {"type": "object", "properties": {f"p{at}": kinds[at % 3] for at in range(count)}}


def _alternatives(count: int) -> dict[str, Any]:
    return {
        "anyOf": [
            {"type": "object", "properties": {"kind": {"const": f"k{at}"}}, "required": ["kind"]} for at in range(count)
        ]
    }


LANGUAGE = "\n".join(
    [
        "start: statement*",
        "statement: " + " | ".join(f"s{at}" for at in range(150)),
        *(f's{at}: "k{at}" expression (";" | "{{" statement* "}}")' for at in range(150)),
        "expression: e0",
        *(f'e{at}: e{at + 1} | e{at} "o{at}" e{at + 1}' for at in range(100)),
        'e100: /[a-z]+/ | "(" expression ")" | "-" e100 | e100 "." /[a-z]+/',
    ]
)
TOOLS = "start: " + " | ".join(
    f'("<{at}>" %json {json.dumps(_optional(120 if at == 127 else 8))} "</{at}>")' for at in range(128)
)


@pytest.mark.parametrize(
    ("outputs", "text"),
    [
        (StructuredOutputs(json=_optional(490)), '{"p0": "a", "p400": 4, "p488": "b"}'),
        (StructuredOutputs(json={"type": "array", "items": _optional(490)}), '[{"p400": 4, "p402": "b"}]'),
        (StructuredOutputs(json=_alternatives(1000)), '{"kind": "k999"}'),
        (StructuredOutputs(grammar=LANGUAGE), "k149(a)o99(b)o3-(c);k7(-(a).b){k8-a;}"),
        (StructuredOutputs(grammar=TOOLS), '<127>{"p0": "a", "p119": "b"}</127>'),
    ],
)
def test_large_grammars_are_within_the_limits(grammars: GrammarCompiler, outputs: StructuredOutputs, text: str) -> None:
    grammar = grammars.compile(outputs)
    output: list[int] = []
    for token in ids(text):
        assert token in allowed(grammars, grammar, output)
        grammar.advance([token])
        output.append(token)


def test_many_masks_are_those_of_one_at_a_time(grammars: GrammarCompiler) -> None:
    many = [grammars.compile(StructuredOutputs(regex=regex)) for regex in ("a+", "[b-f]", "x|yz", ".*", "a+")]
    many[-1].advance([letter("a")])
    together = grammars.masks(many)
    assert [members(row) for row in together] == [members(grammars.masks([one])[0]) for one in many]
    assert len({row.tobytes() for row in together}) == 5
    assert grammars.masks([]).shape == (0, SIZE // 32)


@pytest.mark.parametrize("vocab_size", [SIZE, SIZE + 1, SIZE + 21, SIZE + 200, SIZE - 1, SIZE - 30])
def test_padded_and_cut_vocabularies(folder: Path, vocab_size: int) -> None:
    grammars = GrammarCompiler(model(folder, vocab_size))
    grammar = grammars.compile(StructuredOutputs(regex="(?s:.*)"))
    masks = grammars.masks([grammar, grammars.compile(StructuredOutputs(regex="a"))])
    assert masks.shape == (2, -(-vocab_size // 32))
    assert max(members(masks[0])) < min(vocab_size, SIZE)
    assert members(masks[1]) == {letter("a")}
    assert (
        max(grammars.compile(StructuredOutputs(choice=["hello world, how are you"])).forced_tokens(), default=0)
        < vocab_size
    )


@pytest.mark.parametrize("eos", [(EOS,), (0, 2), (0, 1, 2, 700)])
def test_every_end_of_sequence_ends(folder: Path, eos: tuple[int, ...]) -> None:
    grammars = GrammarCompiler(model(folder, SIZE + 500, eos))
    for end in set(eos) - {700}:
        grammar = grammars.compile(StructuredOutputs(regex="a*"))
        assert allowed(grammars, grammar) >= {*eos} - {700}
        grammar.advance([letter("a"), end])
        assert grammar.is_complete


def test_the_other_parameters_restrict_a_mask(grammars: GrammarCompiler) -> None:
    grammar = grammars.compile(StructuredOutputs(regex="[a-d]*"))
    a, b, c, d = map(letter, "abcd")
    assert allowed(grammars, grammar) >= {a, b, c, d, EOS}
    assert EOS not in allowed(grammars, grammar, min_tokens=1)
    assert EOS in allowed(grammars, grammar, [a], min_tokens=1)
    assert allowed(grammars, grammar, allowed_token_ids=[a, b, EOS], min_tokens=3, stop_token_ids=[b]) == {a}
    assert EOS not in allowed(grammars, grammar, ignore_eos=True)
    assert allowed(grammars, grammar, allowed_token_ids=[a, b, c], bad_word_ids=[[a]]) == {b, c}
    bad = [[a, b], [b, c, d], [c]]
    assert allowed(grammars, grammar, [b, c], allowed_token_ids=[a, b, c, d], bad_word_ids=bad) == {a, b}
    assert allowed(grammars, grammar, [c], allowed_token_ids=[a, b, c, d], bad_word_ids=bad) == {a, b, d}
    with pytest.raises(GrammarError, match="after 2 tokens the grammar together with the other parameters"):
        allowed(grammars, grammar, [a, a], allowed_token_ids=[a], bad_word_ids=[[a, a]])


def test_the_end_stays_where_nothing_else_can_follow(grammars: GrammarCompiler) -> None:
    grammar = grammars.compile(StructuredOutputs(regex="a"))
    grammar.advance([letter("a")])
    for params in ({"min_tokens": 9}, {"ignore_eos": True}, {"allowed_token_ids": [letter("a")]}):
        assert allowed(grammars, grammar, **params) == {EOS}


def test_what_was_compiled_is_shared_and_does_not_interfere(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_module, "_MAX_COMPILED", 3)
    grammars = GrammarCompiler(model(folder))
    compiled: list[str] = []
    compile = grammars._compile

    def count(source: str, max_row: int) -> object:
        compiled.append(source)
        return compile(source, max_row)

    monkeypatch.setattr(grammars, "_compile", count)
    first, second = (grammars.compile(StructuredOutputs(regex="ab")) for _ in range(2))
    first.advance(ids("ab"))
    assert first.is_complete
    assert not second.is_complete
    assert not grammars.compile(StructuredOutputs(regex="ab")).is_complete
    assert len(compiled) == 1
    for regex in ("c", "d", "ab", "e", "ab", "c"):
        grammars.compile(StructuredOutputs(regex=regex))
    assert len(compiled) == 5  # "ab" stayed, as it was in use; "c" had to go
    assert len(grammars._compiled) == 3


@pytest.mark.parametrize(
    "outputs",
    [{"regex": "("}, {"grammar": "start: nothing"}, {"json": {"not": {}}}, {"json": {"enum": []}}, {"json": "["}],
)
def test_compile_errors_are_returned(grammars: GrammarCompiler, outputs: dict[str, Any]) -> None:
    with pytest.raises(GrammarError):
        grammars.compile(StructuredOutputs(**outputs))
    assert grammars.error(StructuredOutputs(**outputs))
    assert grammars.error(StructuredOutputs(regex="a")) is None


def test_the_server_s_options_cannot_be_overridden(grammars: GrammarCompiler) -> None:
    schema = {"x-guidance": {"lenient": True, "whitespace_flexible": True}, "type": "array", "uniqueItems": True}
    with pytest.raises(GrammarError, match="uniqueItems"):
        grammars.compile(StructuredOutputs(json=schema))
    grammar = grammars.compile(StructuredOutputs(json={"x-guidance": {"whitespace_pattern": " *"}, "type": "array"}))
    grammar.advance(ids("[ "))
    assert letter(" ") not in allowed(grammars, grammar)


def test_tokens_that_only_the_tokenizer_s_settings_add(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    added = {
        "content": "<tool>",
        "special": True,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "single_word": False,
    }
    settings["added_tokens_decoder"] = {str(SIZE): added, "2": {**added, "content": "<|im_end|>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = byte_level()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(folder / "tokenizer.json"))
    grammars = GrammarCompiler(model(folder, SIZE + 32))
    grammar = grammars.compile(StructuredOutputs(grammar='start: <tool> "hello world, how are you?"'))
    assert grammar.forced_tokens() == [SIZE, *ids("hello world, how are you?")]


def test_a_tokenizer_of_the_other_kind(tmp_path: Path) -> None:
    tokenizer = byte_fallback()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    grammars = GrammarCompiler(model(tmp_path, tokenizer.get_vocab_size()))
    grammar = grammars.compile(StructuredOutputs(regex="h[a-z]{1,9} é中"))
    pieces: list[Any] = [tokenizer.token_to_id(piece) for piece in ("he", "ll", "o", "▁", "é", "中")]
    grammar.advance(pieces[:3])
    assert pieces[3] in allowed(grammars, grammar)
    grammar.advance(pieces[3:])
    assert grammar.is_complete


def test_a_model_without_a_tokenizer_that_can_be_used(tmp_path: Path) -> None:
    with pytest.raises(GrammarError, match=r"tokenizer\.json"):
        GrammarCompiler(model(tmp_path)).compile(StructuredOutputs(regex="a"))


def test_a_grammar_that_has_failed_is_not_kept(folder: Path) -> None:
    """It may hold a hundred megabytes."""
    compiler = GrammarCompiler(model(folder))
    good, bad = StructuredOutputs(regex="[ab]{3}"), StructuredOutputs(regex="[ab]{4}")
    for outputs in (good, bad):
        compiler.compile(outputs)
    with pytest.raises(GrammarError):
        compiler.compile(bad).advance([letter("c")])
    assert [key for key, *_ in compiler._compiled] == [grammar_module._to_llguidance(good)]
