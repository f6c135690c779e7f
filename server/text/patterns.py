"""Rewrites the regular expressions of JSON schemas for llguidance, with the same meaning.

They are ECMA-262's with its flag `u`, as JSON Schema asks for. Forms of other dialects are allowed if they have only
one meaning, such as `\\-`, `(?P<name>…)` and `(?i)`. llguidance reads the syntax of Rust's regex crate, where classes
have operators and names of groups can have a meaning. It quotes the result as JSON, and adds `"` and `\\` to a class
with all control characters, such as `[^"]`. So the result uses only what both syntaxes have in common: explicit
classes, without the control characters that JSON can only write as numeric escapes, and groups without names.
Look-arounds are replaced (`quire.server.text.automata`). Rewriting the result again does not change it.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cache

from quire.server.text import automata, expressions
from quire.server.text.characters import CharacterSet, Ranges, complement, joined, written

MAX_REGEX_LENGTH = 16 * 1024
"""Characters of a pattern."""
MAX_GROUP_DEPTH = 100
"""Nested groups in a pattern."""

_LINE_ENDS = ((0xA, 0xA), (0xD, 0xD), (0x2028, 0x2029))
_SHORTHANDS: dict[str, Ranges] = {
    "d": ((0x30, 0x39),),
    "w": ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)),
    "s": (
        *((9, 0xD), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)),
        *((0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
    ),
}
_CONTROLS = {"t": 9, "n": 0xA, "v": 0xB, "f": 0xC, "r": 0xD}
_CASED = 0x1E944
"""Beyond this code point, no character has an upper and a lower case."""

_QUANTIFIER = re.compile(r"[*+?]|\{([0-9]+)(?:,([0-9]*))?\}")
_PLAIN = re.compile(r"""[A-Za-z0-9 !"#%&',:;<=>@_`~-]+(?![*+?{])""")
"""Characters that are written as they are, and not repeated."""
_ONE = re.compile(r"\[(?:\\.|[^]\\])*\]|\\(?:[dDwWsS]|[^A-Za-z0-9])|[^]\\()[{}*+?]", re.DOTALL)
"""A class or a character, whose meaning does not depend on its place."""
_FLAGS = re.compile(r"\(\?([a-z]*)(?:-([a-z]+))?([:)])")
_NAMED = re.compile(r"\(\?P?<[^\W\d]\w*>")
_LOOK_AROUND = re.compile(r"\(\?<?[=!]")
_HEX = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{0*([0-9a-fA-F]{1,6})\}")
_LOW_SURROGATE = re.compile(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})")
_CONTROL = re.compile(r"c([a-zA-Z])")
_PROPERTY = re.compile(r"([pP])(?:\{([A-Za-z_]+(?:=[A-Za-z0-9_]+)?)\}|([A-Z]))")


class Generated(str):
    """A pattern that the rewriting of a schema has made, which may be longer than `MAX_REGEX_LENGTH`."""

    __slots__ = ()


def check(pattern: str) -> None:
    """Raise ValueError if a pattern contains something that is not supported, unless only an automaton finds it."""
    _normal(pattern, lambda number: None)


def rewritten(pattern: str, step: Callable[[int], None] = lambda number: None) -> str:
    """Return the regular expression for llguidance; raises ValueError that says what is not supported. `step` is told
    the number of steps of about 10 microseconds before they are done.
    """
    result = _normal(pattern, step)
    return result if expressions.is_plain(result) else automata.plain(result, step)


def conjunction(pattern: str, step: Callable[[int], None] = lambda number: None) -> list[str]:
    """Return regular expressions for llguidance that a text must all match to match the pattern. Raises as `rewritten`
    does, but fewer look-arounds are too complex.
    """
    result = _normal(pattern, step)
    return [result] if expressions.is_plain(result) else automata.conjunction(result, step)


def matches_any(pattern: str, step: Callable[[int], None]) -> bool:
    """Return whether any text matches; raises ValueError if that cannot be decided."""
    return automata.matches_any(_normal(pattern, step), step)


def texts(pattern: str, most: int, step: Callable[[int], None]) -> list[str] | None:
    """Return all texts that match; None if they may be more than `most`. Raises as `matches_any` does."""
    return automata.texts(_normal(pattern, step), most, step)


def joint(included: Iterable[str], excluded: Iterable[str] = ()) -> str:
    """Return the pattern of the texts that match all of some patterns, and none of others; raises ValueError as `check`
    does.
    """
    signed = [*((each, "=") for each in included), *((each, "!") for each in excluded)]
    return Generated("".join(_containing(pattern, sign) for pattern, sign in signed))


def constants(texts: Iterable[str]) -> str:
    """Return the pattern of these texts."""
    escaped = ("".join(each if each.isalnum() else rf"\u{{{ord(each):x}}}" for each in text) for text in texts)
    return Generated(f"^(?:{'|'.join(escaped)})$")


def _containing(pattern: str, sign: str) -> str:
    """Return a look-around for the whole text, from its beginning."""
    check(pattern)
    flags = ""
    while (found := _FLAGS.match(pattern)) and found[3] == ")":
        flags, pattern = flags + found[0].removesuffix(")") + ":", pattern[found.end() :]
    return rf"^(?{sign}[\s\S]*(?:{flags}{pattern}{')' * flags.count(':')}))"


def _normal(pattern: str, step: Callable[[int], None]) -> str:
    """Return the expression in the notation that llguidance reads, with its look-arounds."""
    if len(pattern) > MAX_REGEX_LENGTH and not isinstance(pattern, Generated):
        raise ValueError(f"has {len(pattern)} characters, more than {MAX_REGEX_LENGTH}")
    return _Rewriter(pattern, step).result()


class _Rewriter:
    """A recursive descent over one regular expression."""

    def __init__(self, pattern: str, step: Callable[[int], None]) -> None:
        self._text = pattern
        self._step = step
        self._at = 0
        self._flags = frozenset[str]()
        self._depth = 0
        self._known: dict[tuple[str, frozenset[str]], str] = {}
        """Characters and classes by their text and the flags, as expressions often repeat them."""
        self._has_ambiguous_class = False
        """Whether in another dialect a later `]` would end a class."""

    def result(self) -> str:
        while (found := _FLAGS.match(self._text, self._at)) and found[3] == ")":
            self._set_flags(found)
        result = self._alternatives()
        if self._at < len(self._text):
            raise ValueError("has an unmatched )")
        return result

    def _sees(self, text: str) -> bool:
        return self._text.startswith(text, self._at)

    def _next(self) -> str:
        if self._at == len(self._text):
            raise ValueError("ends inside of a class or an escape")
        self._at += 1
        return self._text[self._at - 1]

    def _match(self, expression: re.Pattern[str]) -> re.Match[str] | None:
        if found := expression.match(self._text, self._at):
            self._at = found.end()
        return found

    def _alternatives(self) -> str:
        result = [self._sequence()]
        while self._sees("|"):
            self._at += 1
            result.append(self._sequence())
        return "|".join(result)

    def _sequence(self) -> str:
        result = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            plain = None if "i" in self._flags else self._match(_PLAIN)
            result.append(self._term() if plain is None else plain[0])
        return "".join(result)

    def _term(self) -> str:
        is_anchor = self._sees("^") or self._sees("$")
        is_assertion = is_anchor or _LOOK_AROUND.match(self._text, self._at) is not None
        atom = self._next() if is_anchor else self._atom()
        if (quantifier := self._match(_QUANTIFIER)) is None:
            return atom
        least, most = quantifier[1], quantifier[2]
        if is_assertion:
            raise ValueError(f"repeats {atom if is_anchor else 'a look-around'}")
        if max(len(least or ""), len(most or "")) > 9:
            raise ValueError("has a count of more than 9 digits")
        if most and int(least) > int(most):
            raise ValueError(f"repeats at least {least} and at most {most} times")
        if self._sees("?"):  # matters only for the place of a match
            self._at += 1
        if _QUANTIFIER.match(self._text, self._at):
            raise ValueError("repeats a repetition; put it in parentheses")
        return atom + quantifier[0]

    def _atom(self) -> str:
        if self._sees("("):
            return self._group()
        found = _ONE.match(self._text, self._at)
        if found is None:
            return self._character_or_class()
        key = found[0], self._flags
        if key in self._known:
            self._at = found.end()
        else:
            self._known[key] = self._character_or_class()
            assert self._at == found.end()
        return self._known[key]

    def _character_or_class(self) -> str:
        self._step(1)
        match self._next():
            case "[":
                return self._class()
            case ".":
                return written(CharacterSet(() if "s" in self._flags else _LINE_ENDS), is_negated=True)
            case "\\" if self._sees("b") or self._sees("B"):
                return self._boundary(self._next())
            case "\\":
                item = self._escape()
            case "*" | "+" | "?":
                raise ValueError("repeats nothing")
            case "{" if re.match(r",?[0-9]", self._text[self._at : self._at + 2]):
                raise ValueError(r"has an unclear {; write \{ for the character, and {0,n} for a repetition")
            case "]" if self._has_ambiguous_class:
                raise ValueError(r"has an unclear ]; write \]")
            case character:
                item = _code(character)
        return written(self._cases(item))

    def _group(self) -> str:
        outer, opening = self._flags, "(?:"
        if found := _FLAGS.match(self._text, self._at):
            if found[3] == ")":
                raise ValueError("sets flags after its beginning; write (?i:…)")
            self._set_flags(found)
        elif not self._match(_NAMED):
            if look_around := self._match(_LOOK_AROUND):
                opening = look_around[0]
            elif self._sees("(?"):
                raise ValueError(f"contains {self._text[self._at : self._at + 3]}, which is not supported")
            else:
                self._at += 1
        self._depth += 1
        if self._depth > MAX_GROUP_DEPTH:
            raise ValueError(f"has more than {MAX_GROUP_DEPTH} nested groups")
        inner = self._alternatives()
        if not self._sees(")"):
            raise ValueError("has an unmatched (")
        self._at += 1
        self._depth -= 1
        self._flags = outer
        return f"{opening}{inner})"

    def _boundary(self, kind: str) -> str:
        """The place between a word and something else, or with "B" any other place."""
        word = written(self._cases(CharacterSet(_SHORTHANDS["w"])))
        sides = (("=", "!"), ("!", "=")) if kind == "b" else (("=", "="), ("!", "!"))
        return f"(?:{'|'.join(f'(?<{before}{word})(?{after}{word})' for before, after in sides)})"

    def _set_flags(self, found: re.Match[str]) -> None:
        off = found[2] or ""
        if unknown := {*found[1], *off} - {"i", "s"}:
            raise ValueError(f"sets the flag {min(unknown)}; only i and s are supported")
        self._flags = self._flags.union(found[1]).difference(off)
        self._at = found.end()

    def _class(self) -> str:
        """A class after its `[`."""
        is_negated = self._sees("^")
        self._at += is_negated
        self._has_ambiguous_class |= self._sees("]")
        items: list[int | CharacterSet] = []
        while not self._sees("]"):
            first = self._class_item()
            if not self._sees("-") or self._sees("-]"):
                items.append(first)
                continue
            self._at += 1
            last = self._class_item()
            if not (isinstance(first, int) and isinstance(last, int)):  # without the flag u, a dash is allowed here
                items += [first, _code("-"), last]
            elif first > last:
                raise ValueError("has a range whose ends are in the wrong order")
            else:
                items.append(CharacterSet(((first, last),)))
        self._at += 1
        self._step(len(items) // 4)
        sets = [CharacterSet(((item, item),)) if isinstance(item, int) else item for item in items]
        union = CharacterSet(
            [each for one in sets for each in one.ranges], tuple(p for one in sets for p in one.properties)
        )
        return written(self._cases(union), is_negated)

    def _class_item(self) -> int | CharacterSet:
        match self._next():
            case "\\" if self._sees("b"):
                self._at += 1
                return 8
            case "\\":
                return self._escape()
            case "[":
                self._has_ambiguous_class = True
                if self._sees(":"):
                    raise ValueError(r"contains [: in a class; write \[, or the characters instead of [:name:]")
                return _code("[")
            case character:
                return _code(character)

    def _escape(self) -> int | CharacterSet:
        """What is after a backslash."""
        if found := self._match(_HEX):
            code = int(found[1] or found[2] or found[3], 16)
            if 0xD800 <= code < 0xDC00 and found[2] and (low := self._match(_LOW_SURROGATE)):
                code = 0x10000 + ((code - 0xD800) << 10) + int(low[1], 16) - 0xDC00
            if code > 0x10FFFF:
                raise ValueError(f"contains \\{found[0]}, which is not a character")
            return _code(chr(code))
        if found := self._match(_CONTROL):
            return ord(found[1]) % 32
        if found := self._match(_PROPERTY):
            if "i" in self._flags:
                raise ValueError(f"contains \\{found[0]}, which is not supported together with (?i)")
            return CharacterSet(properties=(f"\\{found[1]}{{{found[2] or found[3]}}}",))
        character = self._next()
        if (ranges := _SHORTHANDS.get(character.lower())) is not None:
            ranges = self._cases(CharacterSet(ranges)).ranges
            return CharacterSet(ranges if character.islower() else complement(ranges))
        if character in _CONTROLS:
            return _CONTROLS[character]
        if character == "0" and not re.match(r"[0-9]", self._text[self._at : self._at + 1]):
            return 0
        if character.isalnum():
            raise ValueError(f"contains \\{character}, which is not supported")
        return _code(character)

    def _cases(self, item: int | CharacterSet) -> CharacterSet:
        """The item with the other cases of its characters, if cases are ignored."""
        found = CharacterSet(((item, item),)) if isinstance(item, int) else item
        if "i" not in self._flags:
            return found
        cases, ordered = _cases()
        places = [(bisect_left(ordered, first), bisect_right(ordered, last)) for first, last in joined(found.ranges)]
        self._step(sum(end - start for start, end in places) // 3)
        cased = [code for start, end in places for code in ordered[start:end]]
        return CharacterSet(
            (*found.ranges, *((other, other) for code in cased for other in cases[code])), found.properties
        )


def _code(character: str) -> int:
    if "\ud800" <= character <= "\udfff":
        raise ValueError("contains an unpaired surrogate")
    return ord(character)


@cache
def _cases() -> tuple[dict[int, list[int]], list[int]]:
    """By code point, the characters that are equal if cases are ignored (simple case folding); and the code points in
    order.
    """
    groups = defaultdict(list)
    for character in map(chr, range(_CASED)):
        groups[character.casefold()].append(ord(character))
    cases = {code: group for group in groups.values() if len(group) > 1 for code in group}
    return cases, sorted(cases)
