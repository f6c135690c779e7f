"""Grammars of the input of custom tools, which clients write in llguidance's Lark notation, inside of a tool call.

The notation: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md. Most formats of tool calls write the
input as a JSON string. Its grammar is then rewritten: a line break becomes a backslash and an n.

The lexer takes the longest lexeme, and goes back by at most one character. So a lexeme that contains an escape cannot
be followed by another escape: each escape is a lexeme of its own, between lexemes of other text.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

from quire.server.parsers.text_grammar import pattern, quoted

_SPECIAL = frozenset(map(chr, range(0x20))) | {'"', "\\"}
"""The characters that JSON escapes."""
_NUMERIC = [char for char in _SPECIAL if json.dumps(char).startswith(r'"\u')]
_PLAIN = r'[^"\\\x00-\x1f]'
_SAMPLE = [chr(code) for code in (*range(0x20, 0x80), 0xA0, 0xE9, 0x4E2D, 0x1F600) if chr(code) not in _SPECIAL]
"""Characters of all kinds that JSON does not escape."""
_SPACE = frozenset("\t\n\v\f\r")
_CLASSES = {"d": frozenset[str](), "w": frozenset[str](), "s": _SPACE}
"""By letter, the characters of a class that JSON escapes. The others have a capital letter."""
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a", "0": "\0"}
_COMMON = {
    "LF": r"/\n/",
    "CR": r"/\r/",
    "NEWLINE": r"(/\r/? /\n/)+",
    "WS": r"/[ \t\f\r\n]+/",
    "WS_INLINE": r"/[ \t]+/",
    "ESCAPED_STRING": r'/"([^"\\]|\\[^\n])*"/',
}
"""The importable terminals that may contain characters that JSON escapes."""
_TOKEN = re.compile(
    r"""(?P<comment>//[^\n]*|\#[^\n]*)
    |(?P<range>"(?:\\.|[^"\\\n])+"\s*\.\.\s*"(?:\\.|[^"\\\n])+")
    |(?P<string>"(?:\\.|[^"\\\n])*"i?)
    |(?P<regex>/(?:\\.|[^/\\\n])+/[a-z]*)
    |(?P<directive>%[a-z]+)
    |(?P<alias>->[ \t]*_?[A-Za-z]\w*)
    |(?P<name>_?[A-Za-z][\w-]*)
    |(?P<special><[^<>\s]+>)
    |(?P<space>\s+)
    |(?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
_DEFINITION = re.compile(r"^[ \t]*[?!]*(_?[A-Za-z][\w-]*)(\.-?\d+)?[ \t]*(?=[:\[{])", re.MULTILINE)
_IMPORT = re.compile(
    r"^[ \t]*%import[ \t]+common(?:\.(\w+)(?:[ \t]*->[ \t]*(\w+))?|[ \t]*\(([\w\s,]*)\))[ \t]*$", re.MULTILINE
)
_RAW = ", as this model's tool calls have texts without quotes"

INPUT = "input"
"""The name of a custom tool's only argument."""


@dataclass(frozen=True)
class InputGrammar:
    """The grammar of a custom tool's input, and the name of its parameter, for error messages."""

    definition: str
    param: str


def embedded(grammar: str, end: str | None, *, as_json: bool) -> str:
    """Return an expression for the texts of a grammar, which has a rule `start`.

    `as_json`: as they are inside of a JSON string. Otherwise as they are, but without `end`, the text that ends them;
    None: that is a token.

    Raises ValueError for what cannot be enforced.
    """
    _check(grammar)
    inner = _AsJson(grammar).text() if as_json else grammar if end is None else _without(grammar, end)
    return f"%lark {{\n{inner}\n}}"


def _check(grammar: str) -> None:
    """Refuse what would act on the grammar of the whole call."""
    for token in _TOKEN.finditer(grammar):
        if token.lastgroup == "special":
            raise ValueError(f"{token[0]}: a tool's grammar cannot have special tokens")
        if token.lastgroup == "directive" and token[0] not in ("%import", "%ignore"):
            raise ValueError(f"{token[0]} is not supported in a tool's grammar")
    for found in _DEFINITION.finditer(grammar):
        if grammar[found.end()] != ":":
            raise ValueError(f"{found[1]}: options of a rule are not supported in a tool's grammar")


def as_terminals(grammar: str, prefix: str) -> tuple[str, list[str]]:
    """Return a terminal for the texts of a grammar, which has a rule `start`, and the rules that define it.

    A terminal can be combined with others. Rules become terminals, so they may not refer to themselves. Names begin
    with `prefix`. Raises ValueError for what cannot be enforced.
    """
    _check(grammar)
    grammar = _TOKEN.sub(lambda token: "" if token.lastgroup == "comment" else token[0], grammar)
    names: dict[str, str] = {}
    rules: list[str] = []
    for found in _IMPORT.finditer(grammar):
        for name in _names_in(found):
            own = names[found[2] or name] = f"{prefix}_{len(names)}"
            rules.append(f"%import common.{name} -> {own}")
    grammar = _IMPORT.sub("", grammar)
    begins = [*_DEFINITION.finditer(grammar)]
    if head := grammar[: begins[0].start() if begins else len(grammar)].strip():
        line = head.partition("\n")[0]
        if head.startswith("%ignore"):
            raise ValueError(f"{line} is not supported{_RAW}")
        raise ValueError(f"{line}: only comments and imports from common may stand before the first rule")
    names |= {found[1]: f"{prefix}_{at}" for at, found in enumerate(begins, len(names))}
    users: dict[str, set[str]] = {}
    for found, end in zip(begins, [*(found.start() for found in begins[1:]), len(grammar)], strict=True):
        users[found[1]], body = set(), list[str]()
        for token in _TOKEN.finditer(grammar, found.end(), end):
            if token.lastgroup == "alias":  # has no effect
                continue
            if token.lastgroup == "directive":
                line = grammar[token.start() : end].partition("\n")[0]
                raise ValueError(f"{line} is not supported{_RAW}")
            if token.lastgroup == "name":
                users[found[1]].add(token[0])
            body.append(names[token[0]] if token[0] in names else token[0])
        rules.append(f"{names[found[1]]}{''.join(body).rstrip()}")
    try:
        TopologicalSorter(users).prepare()
    except CycleError as error:
        raise ValueError(f"{error.args[1][0]} refers to itself, which is not supported{_RAW}; use a regex") from None
    if "start" not in names:
        raise ValueError("the rule start is missing")
    return names["start"], rules


def has_line_breaks(grammar: str) -> bool:
    """Return whether texts of a grammar may have line breaks."""
    imported = [name for found in _IMPORT.finditer(grammar) for name in _names_in(found)]
    if any(name.endswith("_COMMENT") for name in imported):
        return True
    texts = (_IMPORT.sub("", grammar), *(_COMMON.get(name, "") for name in imported))
    return any(_breaks_line(token) for text in texts for token in _TOKEN.finditer(text))


def _breaks_line(token: re.Match[str]) -> bool:
    match token.lastgroup:
        case "string":
            return "\n" in _string(token[0])[0]
        case "regex" | "range":
            try:
                return "\n" in _special_in(_Regex.of(_as_regex(token)))
            except ValueError:
                return True
    return token[0] == "%import"


def _special_in(node: _Node) -> frozenset[str]:
    """The characters that JSON escapes in the texts of a part of a regular expression."""
    match node:
        case _CharacterSet(special=special):
            return special
        case _Repeated(node=inner):
            return _special_in(inner)
        case _Sequence(nodes=nodes) | _Alternatives(nodes=nodes):
            return frozenset[str]().union(*map(_special_in, nodes))
    return _SPECIAL


def _without(grammar: str, end: str) -> str:
    """The grammar, without texts that contain `end` inside of a lexeme."""
    but, own = f"~/(.|\\n)*{pattern(end)}(.|\\n)*/", list[str]()

    def replace(token: re.Match[str]) -> str:
        if token.lastgroup == "string" and end in _string(token[0])[0]:
            raise ValueError(f"{token[0]} is not supported, as {end} ends the arguments of this model's tool calls")
        if token.lastgroup != "regex":
            return token[0]
        own.append(f"OWN_{len(own)}: {token[0]} & {but}")
        return f"OWN_{len(own) - 1}"

    return "\n".join((_TOKEN.sub(replace, grammar), *own))


class _AsJson:
    """Rewrites a grammar for text inside of a JSON string. Terminals that may contain escapes become rules."""

    def __init__(self, grammar: str) -> None:
        grammar = _IMPORT.sub(
            _imported, _TOKEN.sub(lambda token: "" if token.lastgroup == "comment" else token[0], grammar)
        )
        begins = [*_DEFINITION.finditer(grammar), None]
        self._head = grammar[: begins[0].start() if begins[0] else len(grammar)]
        self._definitions: list[tuple[str, str, str]] = []
        """Name, text up to the colon, and the rest up to the next definition."""
        for begin, after in pairwise(begins):
            assert begin is not None
            body = grammar[begin.end() : after.start() if after else len(grammar)]
            self._definitions.append((begin[1], begin[0], body))
        self._prefix = f"terminal-{hashlib.sha256(grammar.encode(errors='replace')).hexdigest()[:16]}-"
        self._escaping = self._terminals_with_escapes()

    def _terminals_with_escapes(self) -> set[str]:
        """The terminals that may contain escapes, themselves or in others that they refer to."""
        users: defaultdict[str, list[str]] = defaultdict(list)
        found: list[str] = []
        for name, _, body in self._definitions:
            if not _is_terminal(name):
                continue
            tokens = [*_TOKEN.finditer(_split_directives(body)[0])]
            for token in tokens:
                if token.lastgroup == "name":
                    users[token[0]].append(name)
            if any(map(_escapes, tokens)):
                found.append(name)
        escaping = set(found)
        while found:
            new = set(users[found.pop()]) - escaping
            escaping |= new
            found += new
        return escaping

    def text(self) -> str:
        """The grammar."""
        return "".join((self._body(self._head), *self._rewritten()))

    def _rewritten(self) -> Iterator[str]:
        for name, head, body in self._definitions:
            if name in self._escaping:
                rule, _, _ = _split_directives(body)
                if re.search(r"[&]|~(?!\s*\d)", _TOKEN.sub(_only_operators, rule)):
                    raise ValueError(
                        f"{name}: & and ~ are not supported in a terminal that may contain quotation marks, "
                        "backslashes or control characters, as this model's tool calls are JSON"
                    )
                head = f"{self._prefix}{name.lower()}"
            yield head + self._body(body)

    def _body(self, body: str) -> str:
        rule, ignored, rest = _split_directives(body)
        text = _TOKEN.sub(self._leaf, rule)
        if ignored:
            text += f"%ignore {self._ignored(ignored.strip())}\n"
        return text + (self._body(rest) if rest else "")

    def _leaf(self, token: re.Match[str]) -> str:
        match token.lastgroup:
            case "name" if token[0] in self._escaping:
                return f"{self._prefix}{token[0].lower()}"
            case "string":
                return _escaped_string(token[0])
            case "regex" | "range":
                node = _Regex.of(_as_regex(token))
                return token[0] if node.is_plain else node.rule()
        return token[0]

    def _ignored(self, expression: str) -> str:
        """A terminal's expression, as one lexeme."""
        bodies = {name: body for name, _, body in self._definitions}
        if expression in self._escaping:
            expression = _split_directives(bodies[expression])[0].removeprefix(":").strip()
        found = _TOKEN.fullmatch(expression)
        if found is not None and found.lastgroup == "regex":
            return f"/{_Regex.of(expression).lexeme()}/"
        if found is not None and found.lastgroup in ("string", "name"):
            return self._leaf(found)
        raise ValueError(f"%ignore {expression}: only one string or regular expression is supported")


def _as_regex(token: re.Match[str]) -> str:
    """A regular expression, or a range of characters as one."""
    if token.lastgroup == "regex":
        return token[0]
    ends = [_string(end)[0] for end in re.findall(r'"(?:\\.|[^"\\])+"', token[0])]
    if any(len(end) != 1 for end in ends):
        raise ValueError(f"{token[0]} is not a range of characters")
    first, last = (rf"\x{{{ord(end):x}}}" for end in ends)
    return f"/[{first}-{last}]/"


def _escapes(token: re.Match[str]) -> bool:
    if token.lastgroup == "string":
        return not _SPECIAL.isdisjoint(_string(token[0])[0])
    return token.lastgroup in ("regex", "range") and not _Regex.of(_as_regex(token)).is_plain


def _is_terminal(name: str) -> bool:
    return name.lstrip("_")[:1].isupper()


def _names_in(found: re.Match[str]) -> list[str]:
    """The names that an `%import` line takes from `common`."""
    return [found[1]] if found[1] else found[3].replace(",", " ").split()


def _imported(found: re.Match[str]) -> str:
    lines = []
    for name in _names_in(found):
        if name.endswith("_COMMENT"):
            raise ValueError(f"%import common.{name} is not supported, as this model's tool calls are JSON")
        alias = found[2] or name
        is_plain = name not in _COMMON
        lines.append(f"%import common.{name} -> {alias}" if is_plain else f"{alias}: {_COMMON[name]}")
    return "\n".join(lines)


def _split_directives(body: str) -> tuple[str, str, str]:
    """The text before the first `%ignore`, what that ignores, and the text after its line."""
    for token in _TOKEN.finditer(body):
        if token[0] == "%ignore":
            ignored, _, after = body[token.end() :].partition("\n")
            return body[: token.start()], ignored, after
    return body, "", ""


def _only_operators(token: re.Match[str]) -> str:
    return token[0] if token.lastgroup in ("other", "space", "name") else " "


def _string(token: str) -> tuple[str, str]:
    """The text of a string, and its flag."""
    text, _, flag = token.rpartition('"')
    return json.loads(f'{text}"', strict=False), flag


def _escaped_string(token: str) -> str:
    """A string as JSON escapes it. Each escape is a lexeme of its own."""
    text, flag = _string(token)
    if not _SPECIAL.intersection(text):
        return token
    parts = re.split(r'(["\\\x00-\x1f])', text)
    return f"({' '.join(f'{quoted(_escape(part))}{flag}' for part in parts if part)})"


def _escape(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


@lru_cache(256)
def _escapes_of(special: frozenset[str]) -> str:
    """A regular expression for the escapes of these characters."""
    escapes = sorted(map(_escape, special))
    numeric = [f"\\{way}" for way in escapes if way.startswith(r"\u")]
    if len(numeric) == len(_NUMERIC):
        numeric = [r"\\u00(0[0-7be-f]|1[0-9a-f])"]
    short = "".join(re.escape(way[1:]) for way in escapes if not way.startswith(r"\u"))
    ways = [rf"\\[{short}]"] * bool(short) + numeric
    return f"({'|'.join(ways)})"


@dataclass(frozen=True)
class _Node:
    """A part of a regular expression. Its `source` can stand in a sequence of others."""

    source: str
    is_plain: bool
    """It matches no character that JSON escapes."""

    def rule(self) -> str:
        """An expression of one or more lexemes."""
        return f"/{self.source}/"

    def lexeme(self) -> str:
        """A regular expression."""
        return self.source


@dataclass(frozen=True)
class _CharacterSet(_Node):
    """One character."""

    plain: str
    """A regular expression for the characters that JSON does not escape; empty: there are none."""
    special: frozenset[str]

    def ways(self, count: str = "") -> list[str]:
        """Regular expressions for some of these characters, between two escapes, and for one escape."""
        return [f"{self.plain}{count}"] * bool(self.plain) + [_escapes_of(self.special)] * bool(self.special)

    def rule(self) -> str:
        return f"({' | '.join(f'/{way}/' for way in self.ways())})"

    def lexeme(self) -> str:
        return f"({'|'.join(self.ways())})"

    def overlaps(self, other: _CharacterSet) -> bool:
        """Whether both may match a character that JSON does not escape; True also if that is not known."""
        if not self.plain or not other.plain:
            return False
        try:
            return any(re.fullmatch(self.source, char) and re.fullmatch(other.source, char) for char in _SAMPLE)
        except re.error:
            return True


@dataclass(frozen=True)
class _Repeated(_Node):
    node: _Node
    count: str

    def rule(self) -> str:
        if self.is_plain:
            return super().rule()
        ways = [self.node.rule()]
        if self.count in "*+":
            nodes = self.node.nodes if isinstance(self.node, _Alternatives) else (self.node,)
            sets = [f"/{way}/" for node in nodes if isinstance(node, _CharacterSet) for way in node.ways("+")]
            ways = sets + [node.rule() for node in nodes if not isinstance(node, _CharacterSet)]
        return f"({' | '.join(ways)}){self.count}"

    def lexeme(self) -> str:
        return f"({self.node.lexeme()}){self.count}"


@dataclass(frozen=True)
class _Sequence(_Node):
    nodes: tuple[_Node, ...]

    def rule(self) -> str:
        parts, plain = list[str](), ""
        for at, node in enumerate(self.nodes):
            after = [*_firsts(_next_lexemes(node, self.nodes[at + 1 :]))]
            if isinstance(node, _Repeated) and any(
                one.overlaps(other) for one in _firsts([node.node]) for other in after
            ):
                raise ValueError(
                    f"/{self.source}/ is not supported, as this model's tool calls are JSON: {node.source} may not be "
                    "followed by a character with which it could go on"
                )
            if node.is_plain:
                plain += node.source
                continue
            parts += [f"/{plain}/"] * bool(plain) + [node.rule()]
            plain = ""
        return f"({' '.join((*parts, *[f'/{plain}/'] * bool(plain)))})"

    def lexeme(self) -> str:
        return "".join(node.lexeme() for node in self.nodes)


@dataclass(frozen=True)
class _Alternatives(_Node):
    nodes: tuple[_Node, ...]

    def rule(self) -> str:
        return f"({' | '.join(node.rule() for node in self.nodes)})"

    def lexeme(self) -> str:
        return f"({'|'.join(node.lexeme() for node in self.nodes)})"


def _next_lexemes(node: _Node, rest: Sequence[_Node]) -> Sequence[_Node]:
    """The parts that may follow a part as lexemes of their own: plain ones are one lexeme."""
    for at, each in enumerate(rest if node.is_plain else ()):
        if not each.is_plain:
            return rest[at:]
        if not _is_optional(each):
            return ()
    return () if node.is_plain else rest


def _is_optional(node: _Node) -> bool:
    return isinstance(node, _Repeated) and node.count.startswith(("*", "?", "{0", "{,"))


def _firsts(nodes: Sequence[_Node]) -> Iterator[_CharacterSet]:
    """The characters that may come first in a sequence."""
    for node in nodes:
        match node.node if isinstance(node, _Repeated) else node:
            case _Alternatives(nodes=inner):
                for each in inner:
                    yield from _firsts([each])
            case _Sequence(nodes=inner):
                yield from _firsts(inner)
            case _Repeated() as inner:
                yield from _firsts([inner])
            case _CharacterSet() as inner:
                yield inner
        if not _is_optional(node):
            return


class _Regex:
    """Parses a regular expression. Raises ValueError for what cannot be rewritten."""

    @staticmethod
    @lru_cache(256)
    def of(token: str) -> _Node:
        """The expression of a token, between slashes."""
        text, _, flags = token[1:].rpartition("/")
        parser = _Regex(text, "s" in flags)
        node = parser.choice()
        if parser.pos < len(text):
            raise parser.unsupported(text[parser.pos :])
        if not node.is_plain and flags.strip("s"):
            raise parser.unsupported(f"the flags {flags}")
        return node

    def __init__(self, text: str, dot_is_any: bool) -> None:
        self._text, self.pos = text, 0
        self._dot_is_any = dot_is_any

    def unsupported(self, what: str) -> ValueError:
        """Return the error."""
        return ValueError(f"{what} is not supported in /{self._text}/, as this model's tool calls are JSON")

    def choice(self) -> _Node:
        """Read up to the end or to a closing parenthesis."""
        begin, nodes = self.pos, [self._sequence()]
        while self._text.startswith("|", self.pos):
            self.pos += 1
            nodes.append(self._sequence())
        if len(nodes) == 1:
            return nodes[0]
        return _Alternatives(f"({self._text[begin : self.pos]})", all(node.is_plain for node in nodes), tuple(nodes))

    def _sequence(self) -> _Node:
        begin, nodes = self.pos, list[_Node]()
        while self.pos < len(self._text) and self._text[self.pos] not in "|)":
            start, node = self.pos, self._atom()
            while found := _COUNT.match(self._text, self.pos):
                if found[2]:
                    raise self.unsupported(found[0])
                self.pos = found.end()
                node = _Repeated(self._text[start : self.pos], node.is_plain, node, found[1])
            nodes.append(node)
        if len(nodes) == 1:
            return nodes[0]
        return _Sequence(self._text[begin : self.pos], all(node.is_plain for node in nodes), tuple(nodes))

    def _atom(self) -> _Node:
        begin, char = self.pos, self._text[self.pos]
        self.pos += 1
        match char:
            case "(":
                if self._text.startswith("?", self.pos):
                    if not self._text.startswith("?:", self.pos):
                        raise self.unsupported(self._text[begin : begin + 3])
                    self.pos += 2
                node = self.choice()
                if not self._text.startswith(")", self.pos):
                    raise self.unsupported("an unbalanced parenthesis")
                self.pos += 1
                return replace(node, source=self._text[begin : self.pos]) if node.is_plain else node
            case "[":
                special, has_plain = self._class()
                source = self._text[begin : self.pos]
            case ".":
                source, special, has_plain = char, _SPECIAL if self._dot_is_any else _SPECIAL - {"\n"}, True
            case "\\":
                special, has_plain = self._members(self._escaped(begin))
                source = self._text[begin : self.pos]
            case "^" | "$" | "*" | "+" | "?" | "{":
                raise self.unsupported(char)
            case _:
                source, (special, has_plain) = char, self._members(char)
        plain = ""
        if has_plain:
            plain = source if not special else _PLAIN if source == "." else f"[{source}&&{_PLAIN}]"
        return _CharacterSet(source, not special, plain, special)

    def _members(self, char: str) -> tuple[frozenset[str], bool]:
        r"""The members of a character, or of `\d` and the like, that JSON escapes, and whether there are others."""
        if len(char) == 1:
            return _SPECIAL & {char}, char not in _SPECIAL
        own = _CLASSES[char[1].lower()]
        return own if char[1].islower() else _SPECIAL - own, True

    def _escaped(self, begin: int) -> str:
        r"""Read an escape: the character, or `\d` and the like."""
        found = _ESCAPED.match(self._text, begin)
        if found is None:
            raise self.unsupported(self._text[begin : begin + 2])
        self.pos = found.end()
        if code := found[1] or found[2] or found[3]:
            return chr(int(code, 16))
        name = found[4]
        if name.lower() in _CLASSES:
            return f"\\{name}"
        if name.isalnum() and name not in _ESCAPES:
            raise self.unsupported(found[0])
        return _ESCAPES.get(name, name)

    def _class(self) -> tuple[frozenset[str], bool]:
        """Read a class after its bracket; returns its members as `_members` does."""
        negated = self._text.startswith("^", self.pos)
        self.pos += negated
        special, has_plain, begin = frozenset[str](), False, self.pos
        while self.pos == begin or not self._text.startswith("]", self.pos):
            first = last = self._class_char()
            if len(first) == 1 and self._text.startswith("-", self.pos) and not self._text.startswith("-]", self.pos):
                self.pos += 1
                last = self._class_char()
            if len(first) == len(last) == 1:
                special |= {char for char in _SPECIAL if first <= char <= last}
                has_plain |= first != last or first not in _SPECIAL
            else:
                for each in {first, last}:
                    own, is_more = self._members(each)
                    special, has_plain = special | own, has_plain or is_more
        self.pos += 1
        return (_SPECIAL - special, True) if negated else (special, has_plain)

    def _class_char(self) -> str:
        if self.pos >= len(self._text):
            raise self.unsupported("a class without end")
        if self._text.startswith(("[", "&&", "--", "~~"), self.pos):
            raise self.unsupported("a class inside of a class")
        if self._text[self.pos] == "\\":
            return self._escaped(self.pos)
        self.pos += 1
        return self._text[self.pos - 1]


_COUNT = re.compile(r"([*+?]|\{\d*,?\d*\})([?+]?)")
_ESCAPED = re.compile(r"\\(?:x\{([0-9a-fA-F]+)\}|x([0-9a-fA-F]{2})|u\{?([0-9a-fA-F]{4,6})\}?|(.))", re.DOTALL)
