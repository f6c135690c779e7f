"""Grammars of strings that are written as raw text, without quotes and escapes, from their JSON schemas.

Results are expressions of terminals in llguidance's Lark notation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from quire.server.parsers.argument_types import resolved, type_of, types_of

_MAX_BRANCHES = 64
"""Combinations of alternatives in one schema."""
_MAX_DEPTH = 32
_NESTED = "its alternatives and references are nested too deeply for a text"
_FORMATS = {
    "uuid": r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "ipv4": r"((25[0-5]|(2[0-4]|1[0-9]|[1-9])?[0-9])\.){3}(25[0-5]|(2[0-4]|1[0-9]|[1-9])?[0-9])",
    "email": r"[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*@([A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.)+[A-Za-z]{2,63}",
    "uri": r"[A-Za-z][A-Za-z0-9+.-]*:(//[A-Za-z0-9._~-]+(:[0-9]{1,5})?)?"
    r"(/([A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})*)*(\?([A-Za-z0-9._~!$&'()*+,;=:@/?-]|%[0-9A-Fa-f]{2})*)?"
    r"(#([A-Za-z0-9._~!$&'()*+,;=:@/?-]|%[0-9A-Fa-f]{2})*)?",
}
"""Patterns of the texts that may be written for a format: all or most of its values."""
_ANYTHING = r"(.|\n)*"
_ALTERNATIVES = ("anyOf", "oneOf")
_NOT_NESTED = frozenset({"null", "boolean", "number"})
_BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "not", "if"}
_NOT_JSON = {
    "number": r"/\s*-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?\s*/",
    "boolean": r"/\s*(true|false)\s*/",
    "null": r"/\s*null\s*/",
    "object": r"/\s*\{(.|\n)*/",
    "array": r"/\s*\[(.|\n)*/",
}
"""By type, patterns for texts that could be taken for a JSON value of this type, and maybe more."""


def text_terminal(
    schema: Any, root: Mapping[str, Any], end: str, others: frozenset[str], excluded: Sequence[str] = ()
) -> str | None:
    """Return an expression for the values that a schema allows as text, or None if it allows none.

    These are strings, which do not contain `end`, match none of the terminals `excluded` and are not like JSON of the
    types `others`, and of these types null, booleans and numbers (numbers with bounds are left out): a lexeme of their
    own would be taken for the start of a string. References in the schema refer to `root`. Raises ValueError for
    keywords that cannot be enforced.
    """
    found = branches(schema, root)
    texts = [text for branch in found if (text := _branch(branch)) is not None]
    scalars = sorted({scalar for branch in found for scalar in _scalars(branch, others)})
    but = [f"/(.|\\n)*{pattern(end)}(.|\\n)*/", *excluded, *(_NOT_JSON[name] for name in sorted(others))]
    strings = "TEXT" if "TEXT" in texts else f"({' | '.join(texts)})"
    values = ([f"({' & ~'.join((strings, *but))})"] if texts else []) + scalars
    return " | ".join(values) or None


def definitions(root: Mapping[str, Any]) -> dict[str, Any]:
    """The definitions that references in a part of the schema `root` refer to."""
    return {key: root[key] for key in ("$defs", "definitions") if key in root}


def narrowed(schema: Any, root: Mapping[str, Any], types: frozenset[str]) -> dict[str, Any]:
    """The schema of the values of these types that a schema allows."""
    return {**definitions(root), "allOf": [schema, {"type": sorted(types)}]}


def quoted(text: str) -> str:
    """A literal."""
    return json.dumps(text, ensure_ascii=False)


def pattern(text: str) -> str:
    """A regular expression, between slashes, for this text."""
    return between_slashes(re.escape(text))


def branches(schema: Any, root: Mapping[str, Any], depth: int = 0) -> list[list[Mapping[str, Any]]]:
    """Resolve references and alternatives: in each branch, all schemas must hold."""
    if depth > _MAX_DEPTH:
        raise ValueError(_NESTED)
    if schema is False:
        return []
    if not isinstance(schema, Mapping):
        return [[]]
    own = {keyword: value for keyword, value in schema.items() if keyword not in ("$ref", "allOf", *_ALTERNATIVES)}
    groups = [schema[keyword] for keyword in _ALTERNATIVES if keyword in schema]
    groups += [[each] for each in schema.get("allOf", ())]
    if "$ref" in schema:
        groups.append([resolved(schema["$ref"], root)])
    found: list[list[Mapping[str, Any]]] = [[own]]
    for group in groups:
        others = [branch for each in group for branch in branches(each, root, depth + 1)]
        found = [one + other for one in found for other in others]
        if len(found) > _MAX_BRANCHES:
            raise ValueError(_NESTED)
    return found


def _branch(schemas: list[Mapping[str, Any]]) -> str | None:
    """The strings for which all of these schemas hold."""
    parts: list[str] = []
    for schema in schemas:
        types = schema.get("type", "string")
        if "string" not in ([types] if isinstance(types, str) else types):
            return None
        parts += _constraints(schema)
    if (values := listed(schemas)) is not None:
        texts = [value for value in values if isinstance(value, str)]
        parts.insert(0, f"({' | '.join(map(quoted, texts))})")
        if not texts:
            return None
    return " & ".join(parts) or "TEXT"


def listed(schemas: list[Mapping[str, Any]]) -> list[Any] | None:
    """The values that const and enum of all of these schemas allow; None if they have neither."""
    lists = [[schema["const"]] for schema in schemas if "const" in schema]
    lists += [schema["enum"] for schema in schemas if "enum" in schema]
    if not lists:
        return None
    first, *others = lists
    sets = [{_plain(value) for value in values} for values in others]
    return [value for value in first if all(_plain(value) in allowed for allowed in sets)]


def _plain(value: Any) -> tuple[str, Any]:
    """A key of a JSON value that is equal for equal values: 1 is 1.0, but not true."""
    kind = type_of(value)
    return kind, json.dumps(value, sort_keys=True) if kind in ("object", "array") else value


def _scalars(schemas: list[Mapping[str, Any]], others: frozenset[str]) -> Iterator[str]:
    """Null, booleans and numbers of the types `others` for which all of these schemas hold."""
    types = others
    for schema in schemas:
        types &= types_of({"type": schema["type"]} if "type" in schema else {}, {})
    if (values := listed(schemas)) is not None:
        yield from (quoted(json.dumps(v)) for v in values if type_of(v) in types & _NOT_NESTED)
        return
    if "null" in types:
        yield quoted("null")
    if "boolean" in types:
        yield '"true" | "false"'
    if "number" in types and not any(_BOUNDS & schema.keys() for schema in schemas):
        is_whole = any(schema.get("type") == "integer" for schema in schemas)
        yield (
            r"/-?(0|[1-9][0-9]{0,15})/"
            if is_whole
            else r"/-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,16})?([eE][+-]?[0-9]{1,2})?/"
        )


def _constraints(schema: Mapping[str, Any]) -> Iterator[str]:
    for keyword in ("not", "if"):
        if keyword in schema:
            raise ValueError(f"{keyword} is not supported for a text")
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if least or most is not None:
        yield rf"/(.|\n){{{least},{'' if most is None else most}}}/"
    if (regex := schema.get("pattern")) is not None:
        yield f"/{_searched(regex)}/"
    if (name := schema.get("format")) is not None:
        if name not in _FORMATS:
            raise ValueError(f"the format {name} is not supported for a text")
        yield f"/{between_slashes(_FORMATS[name])}/"


def _searched(regex: str) -> str:
    """JSON Schema's regular expressions match anywhere in a text, a terminal's the whole text."""
    starts, ends = regex.startswith("^"), regex.endswith("$") and not regex.endswith(r"\$")
    if (starts or ends) and _has_alternatives(regex):
        raise ValueError(f"the pattern {regex} is not supported for a text: put its alternatives in parentheses")
    inner = regex[starts : len(regex) - ends]
    return between_slashes(f"{'' if starts else _ANYTHING}({inner}){'' if ends else _ANYTHING}")


def _has_alternatives(regex: str) -> bool:
    """Whether a regular expression has alternatives outside of parentheses."""
    depth, at, in_class = 0, 0, False
    while at < len(regex):
        match regex[at]:
            case "\\":
                at += 1
            case "[":
                in_class = True
            case "]":
                in_class = False
            case "(" if not in_class:
                depth += 1
            case ")" if not in_class:
                depth -= 1
            case "|" if not in_class and not depth:
                return True
        at += 1
    return False


def selections(items: list[tuple[str, bool]], separator: str) -> Iterator[str]:
    """Items in their order, with or without the optional ones: one alternative for each possible first item."""
    for first, (item, is_required) in enumerate(items):
        others = (f"{separator} {other}" if must else f"({separator} {other})?" for other, must in items[first + 1 :])
        yield " ".join((item, *others))
        if is_required:
            return
    yield '""'


def between_slashes(regex: str) -> str:
    """A regular expression as it is written between slashes."""
    return re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", regex, flags=re.DOTALL).replace("\n", r"\n")
