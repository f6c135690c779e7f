"""Patterns for the tags of a format as models write them.

A tag is read in upper and lower case, with spaces next to its punctuation, with ASCII in place of its wide characters,
in the plural for the singular and vice versa (unless that is another tag of the format), and without its last character
where it cannot be mistaken. What is written, by templates and grammars, is only the tag itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

_UNIT = re.compile(r"<[^<>\n]*>?|\[[A-Z_]+\]|[^\s<\[]+|\[")
_SPACE = r"[ \t]{0,2}"
_QUOTE = r"""(?:["']|(?=[^"'\s]))"""
_WIDE = {"｜": "[｜|]", "|": "[｜|]", "▁": "[▁_]", "_": "[▁_]"}
_LAST = {"<": r"(?:>|(?=[\n<{\",:}\]]|[ \t][^ \t>]))", "|": r"(?:>|(?=[^> \t]))", "[": r"(?:\]|(?=[\s<{]))"}
"""The last character of `<tag>`, `<|tag|>` and `[TAG]`, which may be missing where the text goes on like this."""

_MAX_LANGUAGE = 8


class Tags:
    """A set of tags, each found in the ways in which models write it."""

    def __init__(self, whole: re.Pattern[str], half: re.Pattern[str], longest: int) -> None:
        self.whole = whole
        """A tag. Its groups are numbers: the sets of tags that `tags` was given."""
        self.half = half
        """The beginning of a tag at the end of a text."""
        self.longest = longest
        """The maximum number of characters of a tag."""


def is_tag(unit: str) -> bool:
    """Whether a piece of a format is a tag, which hardly any text contains, and not a word or a bracket."""
    return len(unit) > 1 and unit[0] in "<["


def closing_tag(tag: str) -> str:
    """Return the tag that would close this one in HTML; empty if it is none like that."""
    return f"</{tag[1:]}" if tag[:1] == "<" and tag[-1] == ">" else ""


def units(*texts: str) -> tuple[str, ...]:
    """Return the tags and words that texts of a format consist of."""
    return tuple(dict.fromkeys(unit for text in texts for unit in _UNIT.findall(text)))


@lru_cache(maxsize=512)
def exact(tag: str, lead: str = "") -> Tags:
    """Return the pattern for this tag as it is written; `lead`, if it stands before the tag, belongs to it."""
    whole = re.compile(f"({f'{re.escape(lead)}?' if lead else ''}{re.escape(tag)})")
    text = lead + tag
    beginnings = {text[:end] for end in range(1, len(text))} | {tag[:end] for end in range(1, len(tag))}
    half = "|".join(map(re.escape, sorted(beginnings, key=len, reverse=True)))
    return Tags(whole, re.compile(rf"(?:{half})\Z"), len(text))


@lru_cache(maxsize=512)
def tags(*sets: tuple[str, ...], others: tuple[str, ...] = (), lead: str = "", is_expected: bool = False) -> Tags:
    """Return the pattern for the tags of these sets.

    `others` are different tags of the format. The character `lead`, if it stands before a tag, belongs to it. With
    `is_expected`, no other text is possible here: the last character of a tag may be missing whatever follows.
    """
    sets = tuple(tuple(filter(None, each)) for each in sets)
    known = {*others, *(tag for each in sets for tag in each)}
    whole, half, longest = [], [], 0
    for each in sets:
        ways = []
        for tag in sorted({way for one in each for way in _spellings(one, known)}, key=len, reverse=True):
            atoms = [f"{re.escape(lead)}?"] * bool(lead) + _atoms(tag)
            if is_expected:
                atoms[-1] = f"{re.escape(tag[-1])}?"
            ways.append("".join(atoms))
            nested = ""
            for atom in reversed(atoms[:-1]):
                nested = f"{atom}(?:\\Z|{nested})" if nested else f"{atom}\\Z"
            half.append(nested)
            longest = max(longest, len(tag) + 2 * sum(atom == _SPACE for atom in atoms) + len(lead) + _MAX_LANGUAGE)
        whole.append(f"({'|'.join(ways) or '(?!)'})")
    return Tags(_compiled(whole), _compiled([f"(?:{'|'.join(filter(None, half)) or '(?!)'})"]), longest)


def _compiled(patterns: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(patterns), re.IGNORECASE)


def _spellings(tag: str, known: set[str]) -> list[str]:
    """A tag, and the plural or singular of its `call`."""
    other = tag.replace("calls", "call") if "calls" in tag else tag.replace("call", "calls")
    return [tag] if other in known or tag[-1] not in ">]" else [tag, other]


def _atoms(tag: str) -> list[str]:
    """The pieces of the pattern for a tag, all but the last of which match one character or spaces."""
    if tag.startswith("```"):  # a code fence of any language
        return ["`", "`", "`", f"[a-z]{{0,{_MAX_LANGUAGE}}}", r"(?=[^\w])"] if len(tag) > 3 else ["`", "`", "`"]
    atoms: list[str] = []
    for at, character in enumerate(tag):
        is_last = at == len(tag) - 1 and len(tag) > 2
        if is_last and character in ">]" and tag[0] in "<[":
            atoms += [_SPACE, _LAST["|" if tag[-2] in "｜|" else tag[0]]]
        elif character in "/<":
            atoms += [re.escape(character), _SPACE]
        elif character == ">" and tag[0] != ">":
            atoms += [_SPACE, ">"]
        elif character == "=":
            atoms += [_SPACE, "=", _SPACE]
        elif character == '"':
            atoms.append(_QUOTE)
        else:
            atoms.append(_WIDE.get(character) or re.escape(character))
    if tag[-1:].isalnum():
        atoms.append(r"(?=[^\w.-])")
    return atoms
