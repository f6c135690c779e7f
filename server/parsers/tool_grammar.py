"""Grammars that constrain a model to a tool format, in llguidance's Lark notation.

The notation: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md. A marker that is a single token of the
tokenizer is written as `<[id]>`, since text in a grammar does not match such tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from quire.engine.protocol.errors import InvalidParameter
from quire.engine.protocol.sampling_params import StructuredOutputs
from quire.engine.scheduler.grammar import json_mark
from quire.server.parsers.argument_types import TEXT, property_names, types_of
from quire.server.parsers.incremental import any_of
from quire.server.parsers.input_grammar import INPUT, InputGrammar, as_terminals, embedded, has_line_breaks
from quire.server.parsers.quoted_grammar import QuotedGrammar
from quire.server.parsers.reasoning import HARMONY_REASONING, ReasoningFormat
from quire.server.parsers.text_grammar import definitions, narrowed, pattern, quoted, selections, text_terminal
from quire.server.parsers.tool_formats import HARMONY, JsonObject, Python, Quoted, Tagged, ToolFormat
from quire.server.parsers.value_bounds import excluded

TokenId = Callable[[str], int | None]
"""The id of a marker that is one added token; None for plain text."""

_UNCONSTRAINING = {"type", "properties", "required", "additionalProperties", "$defs", "definitions"} | {
    "$schema", "$id", "x-guidance", "title", "description", "default", "examples", "strict",
}  # fmt: skip
"""The keywords of an object's schema that arguments written one by one can enforce, and the keywords without effect."""

_NESTED = frozenset({"object", "array"})

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
    grammar: InputGrammar | None = None
    """The grammar of its only argument, in a strict custom tool."""


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
    budget: int | None = None,
) -> StructuredOutputs:
    """Return the grammar of an answer with calls of these tools.

    `required`: only calls, whose arguments follow the schemas. Otherwise free text too, or with `answer` (a JSON
    schema) a matching answer instead of calls; then only `strict` tools follow their schemas. `several` calls, or at
    most one. If the model uses reasoning, that comes first (`is_thinking`: the prompt has opened it), at most `budget`
    tokens of it. A budget requires `has_closing_token`. Raises `InvalidParameter` for schemas that keyword arguments
    cannot enforce.
    """
    is_either = answer is not None and not required
    grammar = _GrammarText(format, reasoning, token_id, as_json=is_either and format.bare == "{")
    for tool in tools:
        is_held = required or tool.strict
        schema = tool.parameters if is_held else _lax(tool.parameters, format)
        grammar.add_tool(tool.name, schema, property_names(tool.parameters), tool.grammar)
    grammar.add_blocks(several)
    if is_either:
        is_apart = format.answer_open or format.block[0][:1] not in ("", "[", "{")
        form = grammar.json(answer) if is_apart else f"%json {json.dumps(answer)}"
        grammar.rules.append(f"answer: {form}")
        body = f"(calls | {grammar.literal(format.answer_open)} answer)"
    else:
        body = "calls" if required else grammar.free_text(several, reasoning.open if reasoning else None)
    text = grammar.text_of(body, reasoning, is_thinking, budget)
    return StructuredOutputs(grammar=text, num_marks=grammar.num_marks)


def thoughts_grammar(reasoning: ReasoningFormat, token_id: TokenId, is_thinking: bool, budget: int) -> str:
    """Return the grammar of any answer after at most `budget` tokens of reasoning; see `tool_grammar`."""
    grammar = _GrammarText(HARMONY if reasoning == HARMONY_REASONING else ToolFormat(), reasoning, token_id, False)
    body = f"{grammar.literal(HARMONY.answer_open)} TEXT" if reasoning == HARMONY_REASONING else "TEXT"
    return grammar.text_of(body, reasoning, is_thinking, budget)


def has_closing_token(reasoning: ReasoningFormat, token_id: TokenId) -> bool:
    """Return whether the text that closes reasoning begins with a marker that is a token."""
    markers = filter(reasoning.close.startswith, reasoning.all_markers)
    return any(token_id(marker) is not None for marker in markers)


class _GrammarText:
    """Collects the rules of a grammar."""

    def __init__(self, format: ToolFormat, reasoning: ReasoningFormat | None, token_id: TokenId, as_json: bool) -> None:
        """`as_json`: a call is JSON with arbitrary spacing, not the format's own text.

        This is for calls next to other JSON: a lexeme that is a prefix of a longer one, as `{` is of the text of a
        call, would be taken for the longer one.
        """
        self.rules: list[str] = []
        self._format = format
        self._as_json = as_json
        markers = (*format.all_markers, *(reasoning.all_markers if reasoning else ()))
        self._tokens = {marker: token for marker in markers if (token := token_id(marker)) is not None}
        self._split = re.compile(f"({any_of(*self._tokens).pattern})")
        self._calls: list[str] = []
        self.num_marks = 0
        self._shared: set[str] = set()
        """Names of rules that are used several times."""
        if isinstance(format.call, Quoted):
            self._values = QuotedGrammar(format.call.quote, self.rules, self.literal)

    def text_of(self, body: str, reasoning: ReasoningFormat | None, is_thinking: bool, budget: int | None) -> str:
        """The grammar of reasoning and then `body`."""
        if reasoning is not None:
            thoughts = f"{self._thoughts(reasoning.close, budget)} SPACE"
            if reasoning.answer:
                thoughts += f" ({self.literal(reasoning.answer[0])} SPACE)?"
            body = f"{thoughts} {body}" if is_thinking else f"({self.literal(reasoning.open)} {thoughts})? {body}"
        rules = [f"start: {body}", *self.rules, r"TEXT: /(.|\n)*/", r"SPACE: /\s{0,4}/"]
        rules += ["NOTHING: /()/"] if self.num_marks else []
        rules += [r"KEY: /[^<>\"=\n]+/", "NUMBER: /[0-9]{1,4}/"]
        return "\n".join(rules) + "\n"

    def _thoughts(self, close: str, budget: int | None) -> str:
        if budget is None:
            return self.text_up_to("thoughts", close)
        assert not self._split.split(close)[0], "see `has_closing_token`"
        self.rules.append(f"thoughts[max_tokens={budget}]: TEXT")
        return f"{'thoughts ' if budget else ''}{self.literal(close)}"

    def literal(self, text: str) -> str:
        """An expression for this text, in which markers may be tokens; empty for empty text."""
        parts = [part for part in self._split.split(text) if part]
        return " ".join(f"<[{self._tokens[part]}]>" if part in self._tokens else quoted(part) for part in parts)

    def add_tool(
        self, name: str, schema: dict[str, Any], known: Collection[str], input_grammar: InputGrammar | None = None
    ) -> None:
        """Add the rules for a call of this function, whose arguments follow `schema`; it has the properties `known`."""
        index, format = len(self._calls), self._format
        self._calls.append(f"call_{index}")
        match format.call:
            case _ if input_grammar is not None:
                try:
                    arguments = self._input(f"input_{index}", input_grammar.definition)
                except (ValueError, RecursionError) as error:
                    raise InvalidParameter(f"{input_grammar.param}: {error}", input_grammar.param) from None
            case JsonObject(key) if self._as_json:
                self.rules.append(f"call_{index}: %json {json.dumps(_object(name, key, schema))}")
                if format.separator is not None:
                    self.rules.append(f"more_{index}: {self.literal(format.separator)} call_{index}")
                return
            case Python():
                arguments = " | ".join(self._keywords(index, name, schema))
            case Tagged() as tags:
                arguments = " | ".join(self._tagged(tags, index, name, schema, known))
            case Quoted():
                arguments = self._quoted(name, schema)
            case _:
                arguments = self.json({"type": "object", **schema})
        self.rules.append(f"args_{index}: {arguments}")
        before, between, after = format.call.around
        for rule, separator in (("call", ""), ("more", format.separator)):
            if separator is None:
                continue
            if format.id_as_name:
                head = f"{self.literal(f'{separator}{before}functions.{name}:')} NUMBER {self.literal(between)}"
            else:  # one literal, so that no other literal starts with a part of it
                head = self.literal(f"{separator}{before}{name}{between}")
            self.rules.append(f"{rule}_{index}: {head} args_{index} {self.literal(after)}")

    def json(self, schema: Any) -> str:
        """An expression for values of this schema, where nothing else that begins with a bracket is allowed."""
        text = f"%json {json.dumps(schema)}"
        if '"uniqueItems"' not in text:
            return text
        self.num_marks += 1
        name, rule = json_mark(self.num_marks)
        self.rules.append(rule)
        return f"{name} {text}"

    def _input(self, rule: str, grammar: str) -> str:
        """The only argument of a custom tool, with a grammar of its own."""
        if self._as_json:
            raise ValueError("this model's tool calls do not allow a grammar together with a format of the answer")
        before, after, end = f'{{"{INPUT}": "', '"}', None
        match self._format.call:
            case Python():
                before, after = f'{INPUT}="', '"'
            case Tagged(open=opening, between=between, close=close):
                before, after, end = f"{opening}{INPUT}{between}", close, close.rstrip("\n")
            case Quoted(quote):
                before, after, end = f"{INPUT}:{quote}", quote, quote
        is_text = end is not None
        if end in self._tokens:
            end = None
        elif isinstance(tags := self._format.call, Tagged):  # a lexeme of the grammar could include its beginning
            end = tags.close.strip()
            try:
                terminal, rules = as_terminals(grammar, rule.upper())
            except ValueError:
                if not tags.close.startswith("\n") or has_line_breaks(grammar):
                    raise
            else:
                self.rules += rules
                text = self._raw(rule, f"{terminal} & ~/(.|\\n)*{pattern(end)}(.|\\n)*/", tags)
                return f"{self.literal(before)} {text}"
        elif end is not None:
            raise ValueError(f"this model's tool calls allow no grammar of a text, as {end!r} ends it; use a regex")
        self.rules.append(f"{rule}: {embedded(grammar, end, as_json=not is_text)}")
        return f"{self.literal(before)} {rule} {self.literal(after)}"

    def add_blocks(self, several: bool) -> None:
        """`calls`: one or more blocks. `rest`: a block without its marker."""
        format = self._format
        calls = "call"
        if several and format.separator is not None:
            calls = "call more*"
            self.rules.append(f"more: {' | '.join(call.replace('call', 'more') for call in self._calls)}")
        marker, opening, closing = format.block
        rest = f"{self.literal(opening)} {calls} {self.literal(closing)}"
        block = f"{self.literal(marker)} rest"
        again = f"({self.literal(format.gap + marker)} rest)*" if several and format.separator is None else ""
        self.rules += [f"call: {' | '.join(self._calls)}", f"rest: {rest}", f"calls: {block} {again}"]

    def free_text(self, several: bool, opener: str | None) -> str:
        """Text with calls in it. For formats without a marker: calls, or text that does not start with `opener`."""
        format = self._format
        if format.bare:
            but = rf" & ~/\s*{pattern(opener)}(.|\n)*/" if opener else ""
            self.rules.append(rf"PLAIN: /\s*[^\s\{format.bare}](.|\n)*/{but}")
            return "(calls | PLAIN)?"
        if format.answer_open:
            return f"(calls | {self.literal(format.answer_open)} TEXT)"
        block = f"{self.text_up_to('head', format.block[0])} rest"
        return f"({block})* TEXT" if several else f"({block} | TEXT)"

    def text_up_to(self, name: str, marker: str) -> str:
        """Free text followed by the first `marker`, either as tokens or as text."""
        self.rules.append(f"{name}_text[lazy]: TEXT {quoted(marker)}")
        before, *tokens = self._split.split(marker)
        if not tokens:
            return f"{name}_text"
        self.rules.append(f"{name.upper()}_HEAD: TEXT {quoted(before)}" if before else f"{name.upper()}_HEAD: TEXT")
        return f"({name}_text | {name.upper()}_HEAD {self.literal(marker.removeprefix(before))})"

    def _keywords(self, index: int, name: str, schema: dict[str, Any]) -> Iterator[str]:
        """Keyword arguments in the schema's order."""
        items = []
        for at, (key, value, is_required) in enumerate(_properties(name, schema)):
            if not key.isidentifier():
                raise InvalidParameter(
                    f"tools: {key!r} in the parameters of {name}: this model's tool calls use keyword arguments, whose "
                    "names must be identifiers",
                    "tools",
                )
            rule = f"value_{index}_{at}"
            self.rules.append(f"{rule}: %json {json.dumps(value)}")
            items.append((f"{quoted(key + '=')} {rule}", is_required))
        yield from selections(items, '", "')

    def _quoted(self, name: str, schema: dict[str, Any]) -> str:
        """Arguments that are like JSON, but for the quotes, in the schema's order."""
        try:
            return self._values.members({"type": "object", **schema}, schema)
        except ValueError as error:
            raise InvalidParameter(f"tools: the parameters of {name}: {error}", "tools") from None

    def _tagged(
        self, tags: Tagged, index: int, name: str, schema: dict[str, Any], known: Collection[str]
    ) -> Iterator[str]:
        """Arguments between tags in the schema's order; any arguments if the schema says nothing about them."""
        bounds = [f"BOUND_{index}"] * bool(known)
        self.rules += [f"{bound}: {excluded(tags, known)}" for bound in bounds]
        is_open = schema.get("additionalProperties") in (None, True, {})
        if is_open and not schema.get("properties") and not schema.get("required"):
            rule = f"any_{index}" if known else "any"
            if rule not in self._shared:
                raw = self._raw(rule, " & ~".join(("TEXT", *bounds)), tags)
                betweens = " | ".join(self.literal(way) for way in (tags.between, tags.between_json) if way)
                self.rules.append(f"{rule}_args: ({self.literal(tags.open)} KEY ({betweens}) {raw})*")
            yield f"{rule}_args"
            return
        items = []
        for at, (key, value, is_required) in enumerate(_properties(name, schema)):
            opening, rule = self.literal(tags.open + key), f"value_{index}_{at}"
            try:
                ways = " | ".join(self._tagged_value(tags, rule, value, schema, bounds))
            except ValueError as error:
                raise InvalidParameter(f"tools: {key} in the parameters of {name}: {error}", "tools") from None
            if not ways:
                raise InvalidParameter(f"tools: {key} in the parameters of {name} allows no value", "tools")
            items.append((f"{opening} ({ways})", is_required))
        yield from selections(items, "")

    def _tagged_value(
        self, tags: Tagged, rule: str, schema: Any, root: dict[str, Any], bounds: Sequence[str]
    ) -> Iterator[str]:
        """The ways to write a value, each from `between` to `close`: as text that matches none of `bounds`, as JSON."""
        types = types_of(schema, root)
        others = types - TEXT
        if "string" in types:
            unlike = frozenset[str]() if tags.between_json else others
            text = text_terminal(schema, root, tags.close.strip(), unlike, bounds)
            if text is not None:
                yield f"{self.literal(tags.between)} {self._raw(rule, text, tags)}"
            if not tags.between_json:
                others &= _NESTED
        if others:
            held = schema if types == others else narrowed(schema, root, others)
            self.rules.append(f"{rule}_json: %json {json.dumps(held)}")
            yield f"{self.literal(tags.between_json or tags.between)} {rule}_json {self.literal(tags.close)}"

    def _raw(self, rule: str, terminal: str, tags: Tagged) -> str:
        """Text that matches the terminal's expression, and the closing tag, either as tokens or as text."""
        close = tags.close.rstrip("\n")
        before, *tokens = self._split.split(close)
        name = f"{rule.upper()}_TEXT"
        if rule not in self._shared:
            self._shared.add(rule)
            self.rules.append(f"{name}: {terminal}")
            if tokens:
                self.rules.append(f"{name}_HEAD: {name} {quoted(before)}" if before else f"{name}_HEAD: {name}")
            else:
                self.rules.append(f"{rule}_text[lazy]: {name} {quoted(close)}")
        if tokens:
            return f"{name}_HEAD {self.literal(tags.close.removeprefix(before))}"
        return f"{rule}_text {self.literal(tags.close.removeprefix(close))}"


def _lax(schema: dict[str, Any], format: ToolFormat) -> dict[str, Any]:
    """The schema of a function whose arguments are not enforced."""
    if not isinstance(format.call, Python):
        return {"type": "object"}
    return {"type": "object", "properties": {key: {} for key in property_names(schema) if key.isidentifier()}}


def _properties(name: str, schema: dict[str, Any]) -> Iterator[tuple[str, Any, bool]]:
    """The properties of a schema, their schemas, and whether they are required, for arguments written one by one."""
    if unheld := sorted(schema.keys() - _UNCONSTRAINING):
        raise InvalidParameter(
            f"tools: {unheld[0]} in the parameters of {name}: this model writes the arguments of tool calls one by "
            "one, which can enforce only properties and required",
            "tools",
        )
    required = schema.get("required", [])
    properties = dict(schema.get("properties", {}))
    properties |= {key: {} for key in required if key not in properties}
    for key, value in properties.items():
        if value is False and key not in required:
            continue
        yield key, {**value, **definitions(schema)} if isinstance(value, dict) else value, key in required


def _object(name: str, key: str, schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of a call that is an object."""
    inner = {keyword: value for keyword, value in schema.items() if keyword not in _AT_THE_ROOT}
    return {
        "type": "object",
        "properties": {"name": {"const": name}, key: _moved({"type": "object", **inner}, f"/properties/{key}")},
        "required": ["name", key],
        "additionalProperties": False,
    }


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
