"""Grammars that constrain a model to a tool format, in llguidance's Lark notation.

The notation: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md. A marker that is a single token of the
tokenizer is written as `<[id]>`, since text in a grammar does not match such tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from quire.engine.protocol.errors import InvalidParameter
from quire.server.parsers.incremental import any_of
from quire.server.parsers.reasoning import ReasoningFormat
from quire.server.parsers.tool_formats import ToolFormat

TokenId = Callable[[str], int | None]
"""The id of a marker that is one added token; None for plain text."""

_UNCONSTRAINING = {"type", "properties", "required", "additionalProperties", "$defs", "definitions"} | {
    "$schema", "$id", "title", "description", "default", "examples", "strict",
}  # fmt: skip
"""The schema keywords that keyword arguments can enforce, and the values that have no effect."""

_AT_THE_ROOT = {"$schema", "$id", "id"}
"""Keywords that are only allowed in a root schema."""

_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords whose value maps names to schemas."""


@dataclass(frozen=True)
class GrammarTool:
    """A function that the model may call. `parameters` is the JSON schema of its arguments, of type object."""

    name: str
    parameters: dict[str, Any]
    strict: bool = False


def tool_grammar(
    format: ToolFormat,
    tools: Sequence[GrammarTool],
    token_id: TokenId,
    *,
    required: bool,
    several: bool,
    answer: Any = None,
    reasoning: ReasoningFormat | None = None,
    is_thinking: bool = False,
) -> str:
    """Return the grammar of an answer with calls of these tools.

    `required`: only calls, whose arguments follow the schemas. Otherwise free text too, or with `answer` (a JSON
    schema) a matching answer instead of calls; then only `strict` tools follow their schemas. `several` calls, or at
    most one. If the model uses reasoning, that comes first (`is_thinking`: the prompt has opened it). Raises
    `InvalidParameter` for schemas that keyword arguments cannot enforce.
    """
    is_either = answer is not None and not required
    grammar = _GrammarText(format, token_id, as_json=is_either and format.bare == "{")
    for tool in tools:
        is_held = required or tool.strict
        grammar.add_tool(tool.name, tool.parameters if is_held else {"type": "object"})
    grammar.add_blocks(several)
    if is_either:
        grammar.rules.append(f"answer: %json {json.dumps(answer)}")
        body = "(calls | answer)"
    else:
        body = "calls" if required else grammar.free_text(several, reasoning.open if reasoning else None)
    if reasoning is not None:
        thoughts = f"{grammar.text_up_to('thoughts', reasoning.close)} SPACE"
        body = f"{thoughts} {body}" if is_thinking else f"({grammar.marker(reasoning.open)} {thoughts})? {body}"
    rules = [f"start: {body}", *grammar.rules, r"TEXT: /(.|\n)*/", r"SPACE: /\s{0,4}/"]
    return "\n".join(rules) + "\n"


class _GrammarText:
    """Collects the rules of a grammar."""

    def __init__(self, format: ToolFormat, token_id: TokenId, as_json: bool) -> None:
        """`as_json`: a call is JSON with arbitrary spacing, not the format's own text.

        This is for calls next to other JSON: a lexeme that is a prefix of a longer one, as `{` is of the text of a
        call, would be taken for the longer one.
        """
        self.rules: list[str] = []
        self._format = format
        self._as_json = as_json
        self._token_id = token_id
        self._split = re.compile(f"({any_of(format.all_markers).pattern})")
        self._calls: list[str] = []

    def literal(self, text: str) -> str:
        """An expression for this text, in which markers may be tokens; empty for empty text."""
        parts = [part for part in self._split.split(text) if part]
        return " ".join(self.marker(part) if self._split.fullmatch(part) else _quoted(part) for part in parts)

    def marker(self, text: str) -> str:
        """A marker, as a token if it is one."""
        token = self._token_id(text)
        return _quoted(text) if token is None else f"<[{token}]>"

    def add_tool(self, name: str, schema: dict[str, Any]) -> None:
        """Add the rules for a call of this function."""
        index, format = len(self._calls), self._format
        self._calls.append(f"call_{index}")
        if self._as_json:
            self.rules.append(f"call_{index}: %json {json.dumps(self._object(name, schema))}")
            return
        if format.python:
            self.rules.append(f"args_{index}: {' | '.join(self._keywords(index, name, schema))}")
        else:
            self.rules.append(f"args_{index}: %json {json.dumps({'type': 'object', **schema})}")
        before, after = self.literal(f"{format.before}{name}{format.between}"), self.literal(format.after)
        self.rules.append(f"call_{index}: {before} args_{index} {after}")

    def _object(self, name: str, schema: dict[str, Any]) -> dict[str, Any]:
        """The schema of a call, for formats in which it is an object."""
        key, _, _ = self._format.between.removeprefix('", "').partition('"')
        inner = {keyword: value for keyword, value in schema.items() if keyword not in _AT_THE_ROOT}
        arguments = _moved({"type": "object", **inner}, f"/properties/{key}")
        return {
            "type": "object",
            "properties": {"name": {"const": name}, key: arguments},
            "required": ["name", key],
            "additionalProperties": False,
        }

    def add_blocks(self, several: bool) -> None:
        """`calls`: one or more blocks. `rest`: a block without its marker."""
        format = self._format
        calls = "call"
        if several and format.separator is not None:
            calls = f"call ({self.literal(format.separator)} call)*"
        marker = format.markers[0] if format.open.startswith(format.markers[0]) else ""
        rest = f"{self.literal(format.open.removeprefix(marker))} {calls} {self.literal(format.close)}"
        block = f"{self.literal(marker)} rest"
        again = f"({self.literal(format.gap)} {block})*" if several and format.separator is None else ""
        self.rules += [f"call: {' | '.join(self._calls)}", f"rest: {rest}", f"calls: {block} {again}"]

    def free_text(self, several: bool, opener: str | None) -> str:
        """Text with calls in it. For formats without a marker: calls, or text that does not start with `opener`."""
        format = self._format
        if format.bare:
            but = rf" & ~/\s*{_pattern(opener)}(.|\n)*/" if opener else ""
            self.rules.append(rf"PLAIN: /\s*[^\s\{format.bare}](.|\n)*/{but}")
            return "(calls | PLAIN)?"
        block = f"{self.text_up_to('head', format.markers[0])} rest"
        return f"({block})* TEXT" if several else f"({block} | TEXT)"

    def text_up_to(self, name: str, marker: str) -> str:
        """Free text followed by the first `marker`, either as a token or as text."""
        self.rules.append(f"{name}_text[lazy]: TEXT {_quoted(marker)}")
        token = self._token_id(marker)
        return f"{name}_text" if token is None else f"({name}_text | TEXT <[{token}]>)"

    def _keywords(self, index: int, name: str, schema: dict[str, Any]) -> Iterator[str]:
        """Keyword arguments in the schema's order: one alternative for each possible first argument."""
        if unheld := sorted(schema.keys() - _UNCONSTRAINING):
            raise InvalidParameter(
                f"tools: {unheld[0]} in the parameters of {name}: this model's tool calls use keyword arguments, which "
                "can enforce only properties and required",
                "tools",
            )
        required = schema.get("required", [])
        properties = dict(schema.get("properties", {}))
        properties |= {key: {} for key in required if key not in properties}
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        items: list[tuple[str, bool]] = []
        for key, value in properties.items():
            if not key.isidentifier():
                raise InvalidParameter(
                    f"tools: {key!r} in the parameters of {name}: this model's tool calls use keyword arguments, whose "
                    "names must be identifiers",
                    "tools",
                )
            rule = f"value_{index}_{len(items)}"
            self.rules.append(f"{rule}: %json {json.dumps({**value, **shared} if isinstance(value, dict) else value)}")
            items.append((f"{_quoted(key + '=')} {rule}", key in required))
        for first, (item, is_required) in enumerate(items):
            others = (f'", " {other}' if must else f'(", " {other})?' for other, must in items[first + 1 :])
            yield " ".join((item, *others))
            if is_required:
                return
        yield '""'


def _moved(schema: Any, path: str) -> Any:
    """Move a schema to this path of another one; its references keep their targets."""
    if not isinstance(schema, dict):
        return schema
    moved: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword == "$ref" and isinstance(value, str) and value.startswith("#"):
            moved[keyword] = f"#{path}{value[1:]}"
        elif keyword in _OF_SCHEMAS and isinstance(value, dict):
            moved[keyword] = {name: _moved(each, path) for name, each in value.items()}
        elif isinstance(value, list) and keyword in ("allOf", "anyOf", "oneOf", "prefixItems", "items"):
            moved[keyword] = [_moved(each, path) for each in value]
        elif keyword in ("items", "additionalItems", "additionalProperties"):
            moved[keyword] = _moved(value, path)
        else:
            moved[keyword] = value
    return moved


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _pattern(text: str) -> str:
    """A regular expression, between slashes, for this text."""
    return re.escape(text).replace("/", "\\/")
