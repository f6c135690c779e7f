"""Sets of characters, and how the expressions for llguidance write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

Ranges = Sequence[tuple[int, int]]
"""Code points, as ranges that include both ends."""

UNWRITABLE = ((0, 7), (0xB, 0xB), (0xE, 0x1F), (0x7F, 0x7F))
"""Control characters that JSON can only write as numeric escapes, which are not allowed in the output."""
SURROGATES = ((0xD800, 0xDFFF),)
_LAST = 0x10FFFF
_SPECIAL = frozenset(r"\^$.*+?()[]{}|/")
_SPECIAL_IN_CLASS = frozenset(r"\[]^-&~/")
_NOTHING = r"[^\u{0}-\u{10ffff}]"
"""No character."""


class CharacterSet(NamedTuple):
    """An item of a class that is not a single character."""

    ranges: Ranges = ()
    properties: tuple[str, ...] = ()
    """Unicode properties as they are written, such as `\\p{L}`."""


def joined(ranges: Ranges) -> Ranges:
    """The ranges in order, as few as possible."""
    result: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if result and first <= result[-1][1] + 1:
            result[-1] = (result[-1][0], max(last, result[-1][1]))
        else:
            result.append((first, last))
    return result


def complement(ranges: Ranges) -> Ranges:
    gaps = joined(ranges)
    starts = (0, *(last + 1 for _, last in gaps))
    ends = (*(first - 1 for first, _ in gaps), _LAST)
    return [(start, end) for start, end in zip(starts, ends, strict=True) if start <= end]


def written(found: CharacterSet, is_negated: bool = False) -> str:
    """An expression for one character of a set, or for one that is not in it."""
    if found.properties and is_negated:
        return _negated(found.ranges, found.properties)
    inverse = {"p": "P", "P": "p"}
    parts = [_negated((), (f"\\{inverse[each[1]]}{each[2:]}",)) for each in found.properties]
    if found.ranges or not parts:
        own = found.ranges if is_negated else complement(found.ranges)
        ranges = complement((*own, *UNWRITABLE, *SURROGATES))
        if not ranges:
            parts.append(_NOTHING)
        elif len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
            parts.append(_character(ranges[0][0], _SPECIAL))
        else:
            parts.append(f"[{_items(ranges)}]")
    return parts[0] if len(parts) == 1 else f"(?:{'|'.join(parts)})"


def _negated(ranges: Ranges, properties: Sequence[str]) -> str:
    return f"[^{_items(joined((*ranges, *UNWRITABLE)))}{''.join(properties)}]"


def _items(ranges: Ranges) -> str:
    ends = ((_character(first, _SPECIAL_IN_CLASS), _character(last, _SPECIAL_IN_CLASS)) for first, last in ranges)
    return "".join(first if first == last else f"{first}-{last}" for first, last in ends)


def _character(code: int, special: frozenset[str]) -> str:
    character = chr(code)
    if character in special:
        return f"\\{character}"
    return character if character.isprintable() else f"\\u{{{code:x}}}"
