"""Random schemas: what the grammar accepts is valid for an independent checker, and the other way round.

The checker is the package jsonschema with Python's regular expressions. Each random pattern is made in two dialects at
once: as ECMA-262 writes it, for the schema, and as Python does, with ECMA's classes, for the checker.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import numpy as np
import pytest

from quire import SamplingParams, StructuredOutputs
from quire.engine.scheduler.grammar import Grammar, GrammarCompiler, GrammarError
from quire.server.text.json_schema import checked_schema
from tests.fakes.configs import TINY, engine_config
from tests.fakes.random_schemas import Keywords
from tests.fakes.tokenizers import SPECIAL, byte_level

PAIRS = int(os.environ.get("QUIRE_FUZZ_PAIRS", "10000"))
"""Pairs of a schema and an output; the whole fuzzing is 200,000."""
SEED = int(os.environ.get("QUIRE_FUZZ_SEED", "34"))
SECONDS = float(os.environ.get("QUIRE_FUZZ_SECONDS", "240"))
EOS = 2
CHECK_SECONDS = 0.5
"""Time for one check; what takes longer is left out."""
LARGE = re.compile("[eE][+-]?[0-9]{4}")
"""Numbers too large for exact arithmetic."""
UNCHECKED = re.compile(f"[iI\u0130\u0131]|{LARGE.pattern}")
"""And letters that only Python takes for each other if cases are ignored."""
PLAIN = SamplingParams()
PER_SCHEMA = 24
MAX_ORDERS = 120
"""Orders of properties that are tried."""

CHARACTERS = 'aabbkKsZ01_-""\\\\/:.,*?$^[](){}|&~ \n\t\r\b\f\u00e9\u0663\u2028\ufeff\u017f\u212a\U0001f600'
BEGIN, END = r"\A", r"\Z"
SPACE = r"\t-\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
SHORTHANDS = {"d": "0-9", "w": "0-9A-Za-z_", "s": SPACE}
WORD = f"[{SHORTHANDS['w']}]"
IN_CLASS = "\\]^-"
OUTSIDE = r"\^$.*+?()[]{}|"
"""Characters to escape in a class, and outside."""
LIMIT = "too complex"
"""Part of the error of a grammar that exceeds a limit."""
UNWRITABLE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")


@dataclass
class Pattern:
    """A regular expression in both dialects, and a function that makes a string that it often matches."""

    ecma: str
    python: str
    sample: Callable[[], str]


class Patterns:
    """Makes random patterns."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._look_arounds = 0.0
        """The share of terms that are look-arounds."""

    def pattern(self) -> Pattern:
        """A pattern of several alternatives with and without anchors, which can be in groups."""
        random = self._random
        self._look_arounds = random.choice((0, 0, 0.1, 0.25))
        if random.random() < 0.1:
            first = self._joined([self._anchored(1, ends=("",)) for _ in range(2)], "|")
            last = self._joined([self._anchored(1, starts=("",)) for _ in range(2)], "|")
            parts = [self._grouped(first), self._sequence(1), self._grouped(last)]
            result = self._joined(parts if random.random() < 0.5 else random.choice((parts[:2], parts[1:])))
        else:
            result = self._joined([self._anchored(2) for _ in range(random.choice((1, 1, 1, 2)))], "|")
        if random.random() < 0.05:
            return Pattern(f"(?i){result.ecma}", f"(?i:{result.python})", result.sample)
        return result

    def _anchored(
        self, depth: int, starts: Sequence[str] = ("^", "^", "^", ""), ends: Sequence[str] = ("$", "$", "$", "")
    ) -> Pattern:
        body, start, end = self._sequence(depth), self._random.choice(starts), self._random.choice(ends)
        return Pattern(
            f"{start}{body.ecma}{end}",
            f"{start and BEGIN}{body.python}{end and END}",
            lambda: ("" if start else self._noise()) + body.sample() + ("" if end else self._noise()),
        )

    def _grouped(self, inner: Pattern, opening: str = "(", python: str = "(?:") -> Pattern:
        return Pattern(f"{opening}{inner.ecma})", f"{python}{inner.python})", inner.sample)

    def _noise(self) -> str:
        return "".join(self._random.choices(CHARACTERS, k=self._random.choice((0, 0, 1, 2))))

    def _joined(self, parts: list[Pattern], by: str = "") -> Pattern:
        samples = [part.sample for part in parts]
        sample = (lambda: self._random.choice(samples)()) if by else lambda: "".join(each() for each in samples)
        return Pattern(by.join(each.ecma for each in parts), by.join(each.python for each in parts), sample)

    def _sequence(self, depth: int) -> Pattern:
        return self._joined([self._term(depth) for _ in range(self._random.choice((0, 1, 1, 2, 2, 3)))])

    def _look_around(self) -> Pattern:
        random = self._random
        if random.random() < 0.3:
            inside, outside = f"(?={WORD})", f"(?!{WORD})"
            before, not_before = f"(?<={WORD})", f"(?<!{WORD})"
            letter = random.choice("bB")
            if letter == "B":
                inside, outside = outside, inside
            return Pattern(f"\\{letter}", f"(?:{before}{outside}|{not_before}{inside})", str)
        opening = random.choice(("(?=", "(?!", "(?!", "(?<=", "(?<!"))
        if "<" in opening:
            inner = self._joined([self._atom() for _ in range(random.choice((1, 1, 2)))])
        else:
            inner = self._anchored(0, starts=("",), ends=("", "", "$"))
            if random.random() < 0.3:
                inner = self._joined([Pattern(".*", "[^\n\r\u2028\u2029]*", str), inner])
        return Pattern(f"{opening}{inner.ecma})", f"{opening}{inner.python})", str)

    def _term(self, depth: int) -> Pattern:
        random = self._random
        if random.random() < self._look_arounds:
            return self._look_around()
        atom = self._group(depth - 1) if depth and random.random() < 0.3 else self._atom()
        if random.random() < 0.55:
            return atom
        least, most = random.choice(
            ((0, None), (1, None), (0, 1), (2, 2), (1, None), (1, 3), (0, 2), (3, None), (0, 0))
        )
        counts = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((least, most), "")
        if not counts or random.random() < 0.2:
            counts = f"{{{least}}}" if least == most else f"{{{least},{'' if most is None else most}}}"
        counts += random.choice(("", "", "", "?"))
        upper = least + 3 if most is None else most
        return Pattern(
            atom.ecma + counts,
            atom.python + counts,
            lambda: "".join(atom.sample() for _ in range(random.randint(least, upper))),
        )

    def _group(self, depth: int) -> Pattern:
        inner = self._joined([self._sequence(depth) for _ in range(self._random.choice((1, 2, 2, 3)))], "|")
        opening = self._random.choice(("(", "(?:", f"(?<stop{self._random.randrange(10**9)}>", "(?i:"))
        return self._grouped(inner, opening, opening if opening == "(?i:" else "(?:")

    def _atom(self) -> Pattern:
        random = self._random
        match random.choice(("character", "character", "class", "class", "class", ".", "shorthand")):
            case "character":
                character = random.choice(CHARACTERS)
                return Pattern(self._spelled(character, OUTSIDE), re.escape(character), lambda: character)
            case ".":
                return self._of(".", "[^\n\r\u2028\u2029]")
            case "shorthand":
                letter = random.choice("dwsDWS")
                return self._of(f"\\{letter}", f"[{'^' * letter.isupper()}{SHORTHANDS[letter.lower()]}]")
            case _:
                return self._class()

    def _class(self) -> Pattern:
        random = self._random
        negation = random.choice(("", "^", "^"))
        ecma, python = [], []
        for _ in range(random.choice((1, 1, 2, 3))):
            match random.choice(("character", "character", "character", "range", "controls", "shorthand")):
                case "character":
                    character = random.choice(CHARACTERS)
                    ecma.append(self._spelled(character, IN_CLASS))
                    python.append(re.escape(character))
                case "range":
                    first, last = sorted(random.choices(CHARACTERS, k=2))
                    ecma.append(f"{self._spelled(first, IN_CLASS)}-{self._spelled(last, IN_CLASS)}")
                    python.append(f"{re.escape(first)}-{re.escape(last)}")
                case "controls":
                    last = random.choice("\x1e\x1f !#[~")
                    ecma.append(f"\\x00-{self._spelled(last, IN_CLASS)}")
                    python.append(f"\\x00-{re.escape(last)}")
                case _:
                    letter = random.choice("dws")
                    ecma.append(f"\\{letter}")
                    python.append(SHORTHANDS[letter])
        return self._of(f"[{negation}{''.join(ecma)}]", f"[{negation}{''.join(python)}]")

    def _of(self, ecma: str, python: str) -> Pattern:
        """A class, of which samples are found by trying."""
        matching = [character for character in CHARACTERS if re.fullmatch(python, character)] or [""]
        return Pattern(ecma, python, lambda: self._random.choice(matching))

    def _spelled(self, character: str, special: str) -> str:
        """A character as ECMA-262 may write it."""
        code = ord(character)
        ways = [f"\\u{{{code:x}}}"]
        ways += [f"\\x{code:02x}"] if code < 256 else []
        ways += (
            [f"\\u{code:04X}"]
            if code < 0x10000
            else [f"\\u{0xD800 + (code - 0x10000 >> 10):04x}\\u{0xDC00 + (code & 0x3FF):04x}"]
        )
        ways += [f"\\{character}"] * 3 if character in special or character == "/" else [character] * 6
        ways += [f"\\{letter}" for letter, of in zip("nrtf", "\n\r\t\f", strict=True) if of == character]
        return self._random.choice(ways)


@dataclass
class Made:
    """A schema for the server, the same one for the checker, and a function that makes instances, often valid ones."""

    ours: Any
    theirs: Any
    sample: Callable[[], Any]


class Schemas:
    """Makes random schemas."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._patterns = Patterns(random)

    def schema(self, depth: int = 2) -> Made:
        """A schema of at most this many levels."""
        of_strings = [self._string, self._length, self._several]
        others = [
            self._number,
            self._listed,
            *([self._by_pattern, self._object, self._list, self._either] * (depth > 0)),
        ]
        return self._random.choice(self._random.choice((of_strings, others)))(depth - 1)

    def _made(self, keywords: Callable[[Any], dict[str, Any]], parts: Any, sample: Callable[[], Any]) -> Made:
        """A schema of which `keywords` makes both versions, from both versions of its parts."""
        return Made(keywords(_side(parts, 0)), keywords(_side(parts, 1)), sample)

    def _string(self, _: int) -> Made:
        one = self._patterns.pattern()
        return self._made(lambda pattern: {"type": "string", "pattern": pattern}, one, one.sample)

    def _length(self, _: int) -> Made:
        one = self._patterns.pattern()
        least, most = sorted(self._random.choices(range(5), k=2))
        bounds = self._random.choice(
            ({"minLength": least}, {"maxLength": most}, {"minLength": least, "maxLength": most})
        )
        return self._made(lambda pattern: {"type": "string", "pattern": pattern, **bounds}, one, one.sample)

    def _several(self, _: int) -> Made:
        parts = [self._patterns.pattern() for _ in range(2)]
        return self._made(
            lambda patterns: {"type": "string", "allOf": [{"pattern": each} for each in patterns]},
            parts,
            self._random.choice(parts).sample,
        )

    def _number(self, _: int) -> Made:
        random = self._random
        is_whole = random.random() < 0.5
        values = sorted(random.randint(-50, 150) / (1 if is_whole else 4) for _ in range(2))
        least, most = map(int, values) if is_whole else values
        schema: dict[str, Any] = {"type": "integer" if is_whole else "number"}
        schema |= random.choice(({}, {"minimum": least}, {"exclusiveMinimum": least}))
        schema |= random.choice(({}, {"maximum": most}, {"exclusiveMaximum": most}))
        schema |= random.choice(({}, {"multipleOf": random.randint(1, 12)} if is_whole else {}))
        parts = [0] if is_whole else [0, 0.25, 0.5]  # the grammar writes integers without a fraction
        return Made(schema, schema, lambda: random.randint(-60, 160) + random.choice(parts))

    def _listed(self, _: int) -> Made:
        random = self._random
        values = [random.choice((None, True, 0, -1.5, 'a"', "\\", "", [1, "a"], {'"': "b"})) for _ in range(3)]
        schema = random.choice(({"enum": values}, {"const": values[0]}))
        return Made(schema, schema, lambda: random.choice(values))

    def _by_pattern(self, depth: int) -> Made:
        random = self._random
        key, value = self._patterns.pattern(), self.schema(depth)
        others = random.choice((Made(False, False, value.sample), self.schema(0)))
        grouped = Pattern(key.ecma, f"(?:{key.python})", key.sample)  # jsonschema ignores an empty pattern
        return self._made(
            lambda of: {"type": "object", "patternProperties": {of[0]: of[1]}, "additionalProperties": of[2]},
            [grouped, value, others],
            lambda: {
                key.sample(): random.choice((value, value, others)).sample() for _ in range(random.choice((0, 1, 1, 2)))
            },
        )

    def _object(self, depth: int) -> Made:
        random = self._random
        members = {name: self.schema(depth) for name in ("a", 'q"', "b\\")[: random.randint(1, 3)]}
        required = [name for name in members if random.random() < 0.6]
        return self._made(
            lambda of: {
                "type": "object",
                "properties": dict(zip(members, of, strict=True)),
                "required": required,
                "additionalProperties": False,
            },
            [*members.values()],
            lambda: {
                name: member.sample() for name, member in members.items() if name in required or random.random() < 0.5
            },
        )

    def _list(self, depth: int) -> Made:
        item = self.schema(depth)
        least, most = sorted(self._random.choices(range(1, 4), k=2))
        return self._made(
            lambda of: {"type": "array", "items": of, "minItems": least - 1, "maxItems": most},
            item,
            lambda: [item.sample() for _ in range(self._random.randint(least, most))],
        )

    def _either(self, depth: int) -> Made:
        options = [self.schema(depth) for _ in range(2)]
        return self._made(lambda of: {"anyOf": of}, options, lambda: self._random.choice(options).sample())


def _side(parts: Any, at: int) -> Any:
    match parts:
        case Pattern():
            return (parts.ecma, parts.python)[at]
        case Made():
            return (parts.ours, parts.theirs)[at]
    return [_side(part, at) for part in parts]


def model_config(folder: Path) -> Any:
    byte_level().save(str(folder / "tokenizer.json"))
    return engine_config(tokenizer=folder, architecture=replace(TINY, vocab_size=320), eos=(EOS,)).model


class Undecided(Exception):
    """Python's regular expressions go back exponentially often, or llguidance's exceed a limit, which is an error."""


class Outputs:
    """Writes outputs that a grammar allows, and tells whether it allows one."""

    def __init__(self, folder: Path, random: Random) -> None:
        self.grammars = GrammarCompiler(model_config(folder))
        self._random = random
        bytes_of = {text: byte for byte, text in _alphabet().items()}
        self._bytes = {
            token: bytes(map(bytes_of.__getitem__, text))
            for text, token in byte_level().get_vocab().items()
            if text not in SPECIAL
        }
        self._tokens = {text: token for token, text in self._bytes.items()}
        texts = [self._bytes.get(token, b"") for token in range(320)]
        self._any = np.array([bool(text) for text in texts], np.uint8)
        self._plain = np.array([b"" < text < b"\x80" for text in texts], np.uint8)
        self._likely = np.array([text in (b'"', b"\\", b"]", b"}", b",", b":") for text in texts], np.uint8)

    def accepts(self, grammar: Grammar, text: str) -> bool:
        try:
            grammar.advance([self._tokens[bytes([byte])] for byte in text.encode()])
        except GrammarError as error:
            if LIMIT in str(error):
                raise Undecided from None
            return False
        return bool(self.grammars.masks([grammar])[0][0] & 1 << EOS)

    def written(self, grammar: Grammar, most: int = 120) -> str | None:
        """A random output that often ends strings and escapes; None if it does not end early enough."""
        random, result = self._random, bytearray()
        while len(result) < most:
            try:
                row = grammar.mask_row(self.grammars.masks([grammar])[0], PLAIN, [])
            except GrammarError as error:
                assert LIMIT in str(error), f"after {bytes(result)!r}: {error}"  # noqa: PT017
                raise Undecided from None
            allowed = np.unpackbits(np.frombuffer(row, np.uint8), bitorder="little")
            if allowed[EOS] and random.random() < 0.5:
                return result.decode()
            levels = [self._likely, self._plain, self._any]
            wanted = random.choices(levels, (0.4, 0.5, 0.1) if len(result) < most / 3 else (0.9, 0.1, 0))
            tokens = next((found for level in (*wanted, *levels) if len(found := np.flatnonzero(allowed & level))), ())
            if not len(tokens):
                return result.decode() if allowed[EOS] else None
            token = int(random.choice(tokens))
            grammar.advance([token])
            result += self._bytes[token]
        return None


def _alphabet() -> dict[int, str]:
    """The texts of the tokens for single bytes, as GPT-2 has them."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + at) for at, byte in enumerate(others)}


def parsed(text: str) -> Any:
    try:
        return json.loads(text, parse_float=Fraction)
    except ValueError as error:
        raise AssertionError(f"not JSON: {text!r}: {error}") from None


def changed(value: Any, random: Random) -> Any:
    """An instance with one of its strings changed at one place, so that it may no longer be valid."""
    match value:
        case str():
            at = random.randint(0, len(value))
            return value[:at] + random.choice((random.choice(CHARACTERS), "")) + value[at + random.randint(0, 1) :]
        case dict() if value:
            name = random.choice([*value])
            return value | {name: changed(value[name], random)}
        case [first, *others]:
            return [*others, changed(first, random)]
    return value


def strings(value: Any) -> Iterator[str]:
    match value:
        case str():
            yield value
        case dict():
            for key, each in value.items():
                yield key
                yield from strings(each)
        case list():
            for each in value:
                yield from strings(each)


def is_valid(checker: jsonschema.Draft202012Validator, instance: Any) -> bool:
    """Raises `Undecided`."""
    signal.setitimer(signal.ITIMER_REAL, CHECK_SECONDS)
    try:
        return checker.is_valid(instance)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def too_slow(*_: object) -> None:
    raise Undecided


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 60, method="thread")
def test_the_grammar_and_the_checker_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random = Random(SEED)
    outputs, schemas = Outputs(tmp_path, random), Schemas(random)
    seen: Counter[str] = Counter()
    refusals: Counter[str] = Counter()
    end = time.monotonic() + SECONDS
    previous = signal.signal(signal.SIGALRM, too_slow)
    try:
        while seen["valid"] + seen["invalid"] < PAIRS and time.monotonic() < end:
            made = schemas.schema()
            try:
                structured = StructuredOutputs(json=checked_schema(made.ours))
                outputs.grammars.compile(structured)
            except (GrammarError, ValueError) as error:
                refusals[re.sub(r"/.*/|/\S*|\d+|'.*'", "…", str(error))[:80]] += 1
                continue
            try:
                seen += compared(outputs, structured, jsonschema.Draft202012Validator(made.theirs), made.sample, random)
            except Undecided:
                seen["undecided"] += 1
            except AssertionError as error:
                raise AssertionError(f"{error}\n{made.ours}\n{made.theirs}") from None
            seen["schemas"] += 1
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert min(seen["valid"], seen["invalid"]) > 0
    print(f"seed {SEED}: {dict(seen)}; refused: {sum(refusals.values())} {refusals.most_common(8)}")


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 60, method="thread")
def test_rewritten_keywords_and_the_checker_agree(tmp_path: Path) -> None:
    random = Random(SEED)
    outputs, keywords = Outputs(tmp_path, random), Keywords(random)
    seen: Counter[str] = Counter()
    refusals: Counter[str] = Counter()
    end = time.monotonic() + SECONDS
    previous = signal.signal(signal.SIGALRM, too_slow)
    try:
        while seen["valid"] + seen["invalid"] < PAIRS / 2 and time.monotonic() < end:
            schema = keywords.root()
            try:
                structured = StructuredOutputs(json=checked_schema(schema))
                outputs.grammars.compile(structured)
            except (GrammarError, ValueError) as error:
                refusals[re.sub(r" \(at .*?\)|/\S*|\d+|'.*'", "…", str(error))[:80]] += 1
                continue
            try:
                seen += compared_values(outputs, structured, schema, keywords, random)
            except (Undecided, RecursionError):
                seen["undecided"] += 1
            except AssertionError as error:
                raise AssertionError(f"{error}\n{json.dumps(schema)}") from None
            seen["schemas"] += 1
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert min(seen["valid"], seen["invalid"]) > 0
    print(f"seed {SEED}: {dict(seen)}; refused: {sum(refusals.values())} {refusals.most_common(12)}")


def compared_values(
    outputs: Outputs, structured: StructuredOutputs, schema: Any, keywords: Keywords, random: Random
) -> Counter[str]:
    """What the grammar writes is valid; of random values and of changed valid ones, it accepts those that are."""
    seen: Counter[str] = Counter()
    checker = jsonschema.Draft202012Validator(schema)
    values = [keywords.value() for _ in range(PER_SCHEMA // 2)]
    for _ in range(PER_SCHEMA // 2):
        text = outputs.written(outputs.grammars.compile(structured))
        if text is None or LARGE.search(text):
            continue
        value = parsed(text)
        assert is_valid(checker, value), f"accepted, but not valid: {text!r}"
        seen["valid"] += 1
        values.append(keywords.changed(value))
    for value in values:
        if UNWRITABLE.search("".join(strings(value))) or has_fractions(value):
            continue
        expected = is_valid(checker, value)
        texts = [json.dumps(each, ensure_ascii=False) for each in itertools.islice(orders(value), MAX_ORDERS + 1)]
        if any(outputs.accepts(outputs.grammars.compile(structured), text) for text in texts):
            assert expected, f"invalid, but not so for the grammar: {texts[0]}"
        elif expected and (len(texts) > MAX_ORDERS or may_be_lost(schema, value)):
            seen["lost"] += 1
            continue
        else:
            assert not expected, f"valid, but not so for the grammar: {texts[0]}"
        seen["valid" if expected else "invalid"] += 1
    return seen


def may_be_lost(schema: Any, value: Any) -> bool:
    """Whether a valid value may be rejected: `minProperties` counts one property that is not named, and `contains` and
    negated `items` try a number of places.
    """
    text = json.dumps(schema)
    parts = list(parts_of(value))
    return ('"minProperties"' in text and any(isinstance(each, dict) and len(each) > 1 for each in parts)) or (
        ('"contains"' in text or '"items"' in text) and any(isinstance(each, list) and len(each) > 8 for each in parts)
    )


def has_fractions(value: Any) -> bool:
    """Whether a value has numbers that are not integral, which `not` excludes, or integers written as others."""
    return any(isinstance(each, Fraction) for each in parts_of(value))


def parts_of(value: Any) -> Iterator[Any]:
    yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from parts_of(each)


def orders(value: Any) -> Iterator[Any]:
    """A value with its properties in every order, since a grammar fixes the order."""
    match value:
        case dict():
            for names in itertools.permutations(value):
                for each in itertools.product(*(list(orders(value[name])) for name in names)):
                    yield dict(zip(names, each, strict=True))
        case list():
            yield from map(list, itertools.product(*(list(orders(each)) for each in value)))
        case _:
            yield value


def compared(
    outputs: Outputs,
    structured: StructuredOutputs,
    checker: jsonschema.Draft202012Validator,
    sample: Callable[[], Any],
    random: Random,
) -> Counter[str]:
    seen: Counter[str] = Counter()
    for _ in range(PER_SCHEMA // 2):
        text = outputs.written(outputs.grammars.compile(structured))
        if text is not None and not (UNCHECKED if "(?i:" in str(checker.schema) else LARGE).search(text):
            assert is_valid(checker, parsed(text)), f"accepted, but not valid: {text!r}"
            seen["valid"] += 1
        instance = changed(sample(), random) if random.random() < 0.5 else sample()
        if UNWRITABLE.search("".join(strings(instance))):
            continue
        expected, text = is_valid(checker, instance), json.dumps(instance, ensure_ascii=False)
        accepts = outputs.accepts(outputs.grammars.compile(structured), text)
        assert accepts == expected, f"{'valid' if expected else 'invalid'}, but not so for the grammar: {text}"
        seen["valid" if expected else "invalid"] += 1
    return seen
