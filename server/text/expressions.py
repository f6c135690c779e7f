"""Regular expressions as trees of parts, and the look-arounds that need no automaton.

Input is the notation that `quire.server.text.patterns` writes, with look-arounds and anchors everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from quire.server.text.characters import SURROGATES, UNWRITABLE, CharacterSet, Ranges, complement, written

Step = Callable[[int], None]
ALL = tuple(complement((*UNWRITABLE, *SURROGATES)))
"""All characters that a text can have."""
ANY = written(CharacterSet(ALL))
"""An expression for every character."""
_LOOK_AROUND = re.compile(r"\(\?(<?)([=!])")
_LITERAL = re.compile(r"\\.|\[(?:\\.|[^]\\])*\]", re.DOTALL)
"""A class, or an escaped character."""
_ASSERTION = re.compile(r"[$^]|\(\?<?[=!]")
_QUANTIFIER = re.compile(r"([*+?])|\{([0-9]+)(?:(,)([0-9]*))?\}")
_ESCAPE = re.compile(r"\\u\{([0-9a-f]+)\}|\\([^\w])")
_WITH_PROPERTIES = re.compile(r"\[(?:\\u\{[0-9a-f]+\}|\\[^\w]|[^]\\])*\\[pP]\{(?:\\.|[^]\\])*\]")


@dataclass
class Part:
    """A part of an expression."""

    text: str
    """How it is written, without its quantifier."""
    kind: str
    """"set", "begin", "end", "look", or "group" for alternatives of sequences."""
    ranges: Ranges | None = ()
    """None for a set with Unicode properties."""
    options: list[list[Part]] = field(default_factory=list)
    is_ahead: bool = False
    is_negative: bool = False
    quantifier: str = ""
    least: int = 1
    most: int | None = 1

    @cached_property
    def width(self) -> int | None:
        """The number of characters that match; None if it differs."""
        if self.kind != "group":
            inner: int | None = int(self.kind == "set")
        else:
            widths = {_width(option) for option in self.options}
            inner = widths.pop() if len(widths) == 1 else None
        return inner * self.least if inner is not None and (inner == 0 or self.least == self.most) else None


def _width(sequence: Iterable[Part]) -> int | None:
    widths = [node.width for node in sequence]
    return None if None in widths else sum(each or 0 for each in widths)


class ExpressionReader:
    """Reads an expression."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def result(self) -> list[list[Part]]:
        """The alternatives, each a sequence."""
        options = [self._sequence()]
        while self._text.startswith("|", self._at):
            self._at += 1
            options.append(self._sequence())
        return options

    def _sequence(self) -> list[Part]:
        nodes: list[Part] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            node = self._node()
            if found := _QUANTIFIER.match(self._text, self._at):
                self._at = found.end()
                node.quantifier = found[0]
                if found[1]:
                    node.least, node.most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[found[1]]
                else:
                    node.least = int(found[2])
                    node.most = node.least if not found[3] else int(found[4]) if found[4] else None
            nodes.append(node)
        return nodes

    def _node(self) -> Part:
        begin = self._at
        if found := _LOOK_AROUND.match(self._text, begin):
            self._at = found.end()
            options = self.result()
            node = Part("", "look", (), options, is_ahead=not found[1], is_negative=found[2] == "!")
            self._at += 1
        elif self._text.startswith("(?:", begin):
            self._at += 3
            node = Part("", "group", (), self.result())
            self._at += 1
        elif self._text[begin] in "^$":
            self._at += 1
            node = Part("", "begin" if self._text[begin] == "^" else "end")
        else:
            node = Part("", "set", self._class() if self._text[begin] == "[" else self._one())
        node.text = self._text[begin : self._at]
        return node

    def _one(self) -> Ranges:
        code = self._character()
        return ((code, code),)

    def _class(self) -> Ranges | None:
        if found := _WITH_PROPERTIES.match(self._text, self._at):
            self._at = found.end()
            return None
        self._at += 1
        is_negated = self._text.startswith("^", self._at)
        self._at += is_negated
        ranges: list[tuple[int, int]] = []
        while self._text[self._at] != "]":
            first = last = self._character()
            if self._text[self._at] == "-":
                self._at += 1
                last = self._character()
            ranges.append((first, last))
        self._at += 1
        return complement(ranges) if is_negated else ranges

    def _character(self) -> int:
        if found := _ESCAPE.match(self._text, self._at):
            self._at = found.end()
            return int(found[1], 16) if found[1] else ord(found[2])
        self._at += 1
        return ord(self._text[self._at - 1])


def is_plain(expression: str) -> bool:
    """Return whether an expression has no look-arounds, and `^` and `$` only at its ends or those of alternatives and
    groups there.
    """
    rest = _LITERAL.sub("", expression).removeprefix("^").removesuffix("$")
    if not _ASSERTION.search(rest):
        return True
    return are_plain(ExpressionReader(expression).result(), is_first=True, is_last=True)


def are_plain(options: list[list[Part]], *, is_first: bool, is_last: bool) -> bool:
    """Like `is_plain`, for alternatives; whether they are at the beginning and the end of the expression."""
    for option in options:
        for at, node in enumerate(option):
            begins, ends = is_first and at == 0, is_last and at == len(option) - 1
            match node.kind:
                case "look":
                    return False
                case "begin" if not begins:
                    return False
                case "end" if not ends:
                    return False
                case "group" if not are_plain(
                    node.options, is_first=begins and not node.quantifier, is_last=ends and not node.quantifier
                ):
                    return False
    return True


def conditions_of(options: list[list[Part]], step: Step) -> tuple[list[str], str]:
    """Return the look-arounds with a known place as expressions of their own, and the rest."""
    if len(options) > 1:
        return [], "|".join("".join(node.text + node.quantifier for node in option) for option in options)
    nodes = list(_spliced(options[0]))
    conditions: list[str] = []
    for is_forward in (True, False):
        if not is_forward:
            nodes.reverse()
        kept: list[Part] = []
        place = 0
        for at, node in enumerate(nodes):
            if at == 0:
                if node.kind != ("begin" if is_forward else "end"):
                    kept = nodes
                    break
            elif node.kind == "look" and node.is_ahead == is_forward:
                step(1)
                text = node.text if node.is_negative else f"(?:{node.text[len('(?=' if is_forward else '(?<=') :]}"
                skipped = f"{ANY}{{{place}}}" if place else ""
                conditions.append(f"^{skipped}{text}" if is_forward else f"{text}{skipped}$")
                continue
            elif node.width is None:
                kept += nodes[at:]
                break
            else:
                place += node.width
            kept.append(node)
        nodes = kept
    nodes.reverse()
    return conditions, "".join(node.text + node.quantifier for node in nodes)


def text_of(options: list[list[Part]]) -> str:
    """Return how alternatives are written."""
    return "|".join("".join(node.text + node.quantifier for node in option) for option in options)


def narrowed(options: list[list[Part]]) -> list[list[Part]]:
    """Return the alternatives without the look-arounds for one character beside a class that matches it: these narrow
    the class. Automata would have too many states if the class is repeated: `(?!-)[a-z-]{1,63}(?<!-)`.
    """
    return [_without_ends(_without_beginnings([_narrowed_inside(node) for node in option])) for option in options]


def _narrowed_inside(node: Part) -> Part:
    if node.kind != "group":
        return node
    options = narrowed(node.options)
    return replace(node, options=options, text=f"(?:{text_of(options)})")


def _without_beginnings(nodes: list[Part]) -> list[Part]:
    found: list[Part] = []
    for node in nodes:
        if found and found[-1].is_ahead and node.least and (first := _both(found[-1], node)) is not None:
            found[-1:] = [first, *_shortened(node)]
        else:
            found.append(node)
    return found


def _without_ends(nodes: list[Part]) -> list[Part]:
    found: list[Part] = []
    for node in nodes:
        is_behind = node.kind == "look" and not node.is_ahead
        before = found[-1] if found else node
        if not is_behind or (last := _both(node, before)) is None:
            found.append(node)
        elif before.least:
            found[-1:] = [*_shortened(before), last]
        elif len(found) > 1 and not found[-2].quantifier and (alone := _both(node, found[-2])) is not None:
            options = [[alone], [found[-2], *_shortened(replace(before, least=1)), last]]
            found[-2:] = [Part(f"(?:{text_of(options)})", "group", options=options)]
        else:
            found.append(node)
    return found


def _both(look: Part, node: Part) -> Part | None:
    """Return the class of the characters that a class and a look-around for one character match, or None."""
    if look.kind != "look" or node.kind != "set" or node.ranges is None or len(look.options) != 1:
        return None
    if len(look.options[0]) != 1 or look.options[0][0].quantifier or not (ranges := look.options[0][0].ranges):
        return None
    without = ranges if look.is_negative else complement(ranges)
    left = complement((*complement(node.ranges), *without))
    return Part(written(CharacterSet(left)), "set", left)


def _shortened(node: Part) -> list[Part]:
    """Return the node with one repetition less."""
    most = None if node.most is None else node.most - 1
    if most == 0:
        return []
    least = node.least - 1
    quantifier = f"{{{least},{'' if most is None else most}}}"
    return [replace(node, least=least, most=most, quantifier=quantifier)]


def looks_ahead(options: list[list[Part]]) -> bool:
    """Return whether what follows matters for an expression."""
    nodes = [node for option in options for node in option]
    return any(node.is_ahead or node.kind == "end" or looks_ahead(node.options) for node in nodes)


def _spliced(sequence: Iterable[Part]) -> Iterator[Part]:
    """Yield the nodes of a sequence and of the groups in it that only group."""
    for node in sequence:
        if node.kind == "group" and len(node.options) == 1 and not node.quantifier:
            yield from _spliced(node.options[0])
        else:
            yield node
