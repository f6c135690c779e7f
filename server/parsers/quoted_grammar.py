"""Grammars of arguments that are like JSON, but for the quotes of strings and bare keys, from their JSON schemas.

Results are expressions in llguidance's Lark notation. Quotes may be tokens, so that JSON's own rules cannot be used.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from quire.server.parsers.argument_types import TEXT, type_of, types_of
from quire.server.parsers.text_grammar import branches, listed, narrowed, quoted, selections, text_terminal

_ANY = "any_value"
_SCALARS = frozenset({"number", "boolean", "null"})
_UNHELD = {"patternProperties", "propertyNames", "minProperties", "maxProperties", "dependentRequired", "not", "if"} | {
    "dependentSchemas", "unevaluatedProperties", "prefixItems", "contains", "uniqueItems", "unevaluatedItems",
}  # fmt: skip
"""Keywords of objects and arrays that are not enforced."""


class QuotedGrammar:
    """Adds rules to a grammar, `rules`; `literal` is an expression for a text in which markers may be tokens."""

    def __init__(self, quote: str, rules: list[str], literal: Callable[[str], str]) -> None:
        self._quote = quote
        self._rules = rules
        self._literal = literal
        self._is_token = literal(quote) != quoted(quote)
        self._named: dict[str, str] = {}
        """Names of rules by the schema that they are for: a schema may refer to itself."""

    def members(self, schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
        """The members of an object of this schema, without braces.

        Raises ValueError for keywords that cannot be enforced. References refer to `root`.
        """
        if not (ways := [*self._objects(branches(schema, root), root)]):
            raise ValueError(f"{json.dumps(schema)} allows no value")
        return " | ".join(f"({each})" for each in ways)

    def _value(self, schema: Any, root: Mapping[str, Any]) -> str:
        """The rule for a value."""
        found = branches(schema, root)
        is_any = any(not any(each) for each in found)
        key = "" if is_any else json.dumps([schema, root], sort_keys=True)
        if key in self._named:
            return self._named[key]
        name = self._named[key] = _ANY if is_any else f"quoted_{len(self._named)}"
        if is_any:
            self._rules += [
                f"{_ANY}: any_text | any_scalar | {quoted('{')} any_members {quoted('}')} | "
                f"{quoted('[')} ({_ANY} ({quoted(',')} {_ANY})*)? {quoted(']')}",
                f"any_members: (ANY_KEY {_ANY} ({quoted(',')} ANY_KEY {_ANY})*)?",
                r"ANY_KEY: /[^\s<>\":,{}\[\]][^<>\":,{}\[\]\n]{0,64}:/",
                f"any_scalar: %json {json.dumps({'type': sorted(_SCALARS)})}",
                f"any_text: {self._text('any', text_terminal({}, {}, self._quote, frozenset()) or 'TEXT')}",
            ]
            return name
        if not (ways := [*self._ways(schema, found, root, name)] if found else []):
            raise ValueError(f"{json.dumps(schema)} allows no value")
        self._rules.append(f"{name}: {' | '.join(ways)}")
        return name

    def _ways(
        self, schema: Any, found: list[list[Mapping[str, Any]]], root: Mapping[str, Any], name: str
    ) -> Iterator[str]:
        """The ways to write a value: as text, as a number and so on, as an object, as a list."""
        types = types_of(schema, root)
        values = {json.dumps(value): value for branch in found for value in listed(branch) or ()}
        yield from (self.written(value) for value in values.values() if type_of(value) in types - _SCALARS - TEXT)
        if "string" in types and (text := text_terminal(schema, root, self._quote, frozenset())) is not None:
            yield self._text(name, text)
        if scalars := types & _SCALARS:
            self._rules.append(f"{name}_scalar: %json {json.dumps(narrowed(schema, root, scalars))}")
            yield f"{name}_scalar"
        free = [branch for branch in found if listed(branch) is None]
        if "object" in types:
            yield from (f"{quoted('{')} ({each}) {quoted('}')}" for each in self._objects(free, root))
        if "array" in types:
            yield from (f"{quoted('[')} {each} {quoted(']')}" for each in self._arrays(free, root))

    def _text(self, name: str, terminal: str) -> str:
        """A string in quotes, which are tokens or text."""
        quote, own = self._literal(self._quote), f"{name.upper()}_TEXT"
        self._rules.append(f"{own}: {terminal}")
        if self._is_token:
            return f"{quote} {own} {quote}"
        self._rules.append(f"{name}_end[lazy]: {own} {quote}")
        return f"{quote} {name}_end"

    def _objects(self, found: list[list[Mapping[str, Any]]], root: Mapping[str, Any]) -> Iterator[str]:
        for branch in _allowing(found, "object"):
            properties, required, others = dict[str, Any](), list[str](), list[Any]()
            for schema in branch:
                for key, value in schema.get("properties", {}).items():
                    properties[key] = {"allOf": [properties[key], value]} if key in properties else value
                required += schema.get("required", ())
                others.append(schema.get("additionalProperties", True))
            properties |= {key: {} for key in required if key not in properties}
            if not properties and False not in others:
                self._value({}, {})  # has the rules for keys
                restricting = [each for each in others if each is not True and each is not None]
                value = self._value({"allOf": restricting} if restricting else {}, root)
                yield f"(ANY_KEY {value} ({quoted(',')} ANY_KEY {value})*)?"
                continue
            items = [
                (f"{self._literal(f'{key}:')} {self._value(value, root)}", key in required)
                for key, value in properties.items()
                if value is not False or key in required
            ]
            yield " | ".join(selections(items, quoted(",")))

    def _arrays(self, found: list[list[Mapping[str, Any]]], root: Mapping[str, Any]) -> Iterator[str]:
        for branch in _allowing(found, "array"):
            items = [schema["items"] for schema in branch if "items" in schema]
            least = max((schema.get("minItems", 0) for schema in branch), default=0)
            most = min((schema["maxItems"] for schema in branch if "maxItems" in schema), default=None)
            if most is not None and most < max(least, 1):
                if most == least == 0:
                    yield ""
                continue
            value = self._value({"allOf": items} if len(items) > 1 else items[0] if items else {}, root)
            more = f"{{{max(0, least - 1)},{'' if most is None else most - 1}}}"
            several = f"{value} ({quoted(',')} {value}){more}"
            yield several if least else f"({several})?"

    def written(self, value: Any) -> str:
        """An expression for this value."""
        return self._literal(self._plain(value))

    def _plain(self, value: Any) -> str:
        match value:
            case str():
                if self._quote in value:
                    raise ValueError(f"{value!r} contains the quote {self._quote}")
                return f"{self._quote}{value}{self._quote}"
            case list():
                return f"[{','.join(map(self._plain, value))}]"
            case dict():
                return f"{{{','.join(f'{key}:{self._plain(each)}' for key, each in value.items())}}}"
        return json.dumps(value)


def _allowing(found: list[list[Mapping[str, Any]]], kind: str) -> Iterator[list[Mapping[str, Any]]]:
    """The branches that allow values of this type. Raises ValueError for keywords that cannot be enforced."""
    for branch in found:
        if all(kind in types_of({"type": schema["type"]} if "type" in schema else {}, {}) for schema in branch):
            if unheld := sorted(_UNHELD & {keyword for schema in branch for keyword in schema}):
                raise ValueError(f"{unheld[0]} is not supported for this model's tool calls")
            yield branch
