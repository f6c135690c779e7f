"""Checks and rewrites JSON Schemas for llguidance.

JSON Schema (draft 2020-12, and keywords that earlier drafts name differently) is enforced as a grammar or rejected.
llguidance itself rejects much. This module rejects the parts that llguidance would ignore: constraints that it does not
know, references that could bypass this check, numbers that do not fit into a double, bounds that repeated keys would
satisfy. Patterns are rewritten (`quire.server.text.patterns`). As in JSON Schema, keywords and formats that constrain
nothing, such as unknown ones, are ignored. Date formats are made exact.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, deque
from collections.abc import Iterator, Set
from functools import partial
from typing import Any
from urllib.parse import unquote

from quire.engine.scheduler.grammar import JSON_OPTIONS
from quire.server.text import patterns
from quire.server.text.schemas.common import Budget, Resolve, Shared
from quire.server.text.schemas.disjoint import is_empty
from quire.server.text.schemas.formats import FORMATS, REJECTED_FORMATS
from quire.server.text.schemas.objects import rewritten_names
from quire.server.text.schemas.references import subschemas, with_pointers
from quire.server.text.schemas.rewriting import rewritten

MAX_SCHEMA_BYTES = 256 * 1024
"""Maximum size of a JSON schema, and of a grammar, in bytes."""
MAX_SCHEMA_DEPTH = 64
"""Nesting depth of objects and arrays in a JSON schema."""

_ONE = ("items", "additionalItems", "additionalProperties")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_MAPS = ("properties", "patternProperties")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "const", "enum")
_ENFORCED = {
    *(*_ONE, *_LISTS, *_MAPS, *_NUMBERS, "type", "$ref", "required", "pattern", "format"),
    *("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
    "uniqueItems",
}
_REJECTED = {
    *("dependencies", "$dynamicRef", "$recursiveRef", "$id", "divisibleBy", "disallow", "extends", "x-guidance"),
}
"""Constraints that cannot be enforced, keywords that could change the meaning of a reference, and llguidance's own
options. Keywords that are neither enforced nor rewritten constrain nothing.
"""
_MAX_PATH = 200
"""Characters of a path in an error."""
_MAX_NAME = 64
"""Characters of a definition's name in a checked schema, without its number."""
MAX_ADDED_SCHEMAS = 4096
"""Schemas that rewriting may add to those of a schema, which takes some tens of milliseconds."""
_PRUNING_STEPS = 10_000
"""Steps to find schemas that no value matches."""
_BOUNDS = {"minimum": -1, "exclusiveMinimum": -1, "maximum": 1, "exclusiveMaximum": 1}
_MOST = 1e18
"""The largest bound of numbers that llguidance supports, about."""
_LEAST = 1e-17
"""The least number above an exclusive bound of 0."""
_AT_THE_ROOT = {"$schema", "$id", "id"}
_UNWRITABLE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f\ud800-\udfff]")
"""Characters that JSON can only represent as numeric escapes."""
_SURROGATE = re.compile(r"[\ud800-\udfff]")


def checked_schema(
    schema: Any, dropped: list[str] | None = None, budget: Budget | None = None, *, keeps_unique_items: bool = True
) -> dict[str, Any]:
    """Return a JSON schema (an object or text) as it is enforced; also used for `%json` in a grammar.

    Raises ValueError for a schema that is too large or cannot be enforced. With `dropped`, keywords that are not
    supported are left out, and errors about them are appended to it. Takes about a second of processor time at most;
    the schemas of one request share a budget. `keeps_unique_items`: whether the engine can find the values of this
    schema in an output, which `uniqueItems` needs that is not rewritten.
    """
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the schema is not JSON: {error}") from None
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    if not isinstance(schema, dict):
        raise ValueError(f"a JSON schema must be an object, not {type(schema).__name__}")
    check_schema_size(schema)
    checked = _SchemaWalk(schema, dropped, budget or Budget(), keeps_unique_items).result()
    return {"x-guidance": JSON_OPTIONS, **checked}


class _SchemaWalk:
    """One pass over a schema and its references, in time linear in the schema's size."""

    def __init__(
        self, root: dict[str, Any], dropped: list[str] | None, budget: Budget, keeps_unique_items: bool
    ) -> None:
        self._keeps_unique_items = keeps_unique_items
        self._dropped = dropped
        self._budget = budget
        self._conjunctions: dict[str, list[str]] = {}
        """Rewritten patterns of `pattern`."""
        self._root = {key: value for key, value in with_pointers(root).items() if key not in _AT_THE_ROOT}
        self._targets: dict[str, Any] = {}
        """The rewritten targets of references, by name."""
        self._names: dict[str, str] = {"#": "#"}
        self._by_target: dict[int, str] = {}
        """Names of the targets by identity, since a target has several possible pointers."""
        self._shared: dict[Shared, str] = {}
        self._resolve = Resolve(self._resolved, budget)
        self._pending: deque[tuple[str, Any, str]] = deque()
        """Name, schema and path of the targets to rewrite."""
        self._left = MAX_ADDED_SCHEMAS + 2 * _number_of_schemas(self._root)
        """How many more schemas may be visited."""
        self._is_rewriting = False
        """Whether any keyword has been replaced."""
        self._rewriting = "$ref", ""
        """The keyword that is being replaced, and its path."""
        self._namesakes: Counter[str] = Counter()

    def result(self) -> dict[str, Any]:
        try:
            checked = self._schema(self._root, "")
            while self._pending:
                name, target, path = self._pending.popleft()
                self._targets[name] = self._schema(target, path)
        except RecursionError:
            raise self._error(*self._rewriting, "needs endless alternatives in the grammar") from None
        if not isinstance(checked, dict):
            checked = {} if checked else {"anyOf": []}
        if self._targets:
            checked["$defs"] = self._targets
        if id(checked) not in self._finite(checked):
            raise self._error("$ref", "", "refers to itself endlessly, so no value can be complete")
        if self._targets:
            self._close_unsatisfiable(checked)
        return checked

    def _schema(self, schema: Any, path: str) -> Any:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise ValueError(f"the schema at {path or '/'} is not an object")
        self._left -= 1
        if self._left < 0:
            raise self._error(*self._rewriting, "needs too many alternatives in the grammar")

        schema, parts = rewritten(schema, self._resolve, lambda name, error: self._drop(name, path, str(error)))
        result: dict[str, Any] = {}
        more: list[Any] = []
        for keyword, value in schema.items():
            here = _below(path, keyword)
            self._write(keyword, value, path)
            if keyword in _LISTS:
                if not isinstance(value, list):
                    raise self._error(keyword, path, "must be a list")
                result[keyword] = [self._schema(each, _below(here, at)) for at, each in enumerate(value)]
            elif keyword in _MAPS:
                if not isinstance(value, dict):
                    raise self._error(keyword, path, "must be an object")
                schemas = {name: self._schema(each, _below(here, name)) for name, each in value.items()}
                result[keyword] = schemas if keyword == "properties" else self._by_pattern(schemas, path)
            elif keyword in _ONE and not isinstance(value, list):
                result[keyword] = self._schema(value, here)
            elif keyword == "$ref":
                result[keyword] = self._reference(value, path)
            elif keyword == "pattern" and isinstance(value, str):
                try:
                    result[keyword], *others = self._conjunction(value)
                except ValueError as error:
                    self._drop(keyword, path, str(error))
                    continue
                self._write(keyword, [result[keyword], *others], path)
                more += [{"$comment": here, keyword: other} for other in others]
            elif keyword == "uniqueItems" and not self._keeps_unique_items:
                self._drop(keyword, path, "is only supported for items with few values here")
            elif keyword in _ENFORCED:
                if keyword not in _NUMBERS and not all(map(_fits, _leaves(value))):
                    raise self._error(keyword, path, "has an integer of more than 64 bits")
                result[keyword] = value
            elif keyword in _REJECTED:
                self._drop(keyword, path, "is not supported")
            elif isinstance(value, str) and _SURROGATE.search(value):
                raise self._error(keyword, path, "contains an unpaired surrogate")
        self._check(schema, path)
        _exclude_whole_bounds(result)
        more += [self._replacement(keyword, part, path) for keyword, found in parts.items() for part in found]
        if (format := _format(result.pop("format", ""))) is not None:
            self._write("format", format, path)
            more.append({"$comment": _below(path, "format"), **format})
        if more:
            result["allOf"] = [*result.get("allOf", ()), *more]
        return result

    def _replacement(self, keyword: str, part: Any, path: str) -> Any:
        """Return a schema that replaces this keyword, as it is enforced. Its comment is the path, for errors."""
        self._rewriting, self._is_rewriting = (keyword, path), True
        here = _below(path, keyword)
        if isinstance(part, dict) and part.keys() == {"anyOf"}:
            checked: Any = {"anyOf": [self._schema(each, _below(here, at)) for at, each in enumerate(part["anyOf"])]}
        else:
            checked = self._schema(part, here)
        if checked is False:
            checked = {"anyOf": []}
        return {"$comment": here, **checked} if isinstance(checked, dict) else checked

    def _check(self, schema: dict[str, Any], path: str) -> None:
        """Reject keywords that llguidance would enforce only partially."""
        if "format" in schema and (not isinstance(schema["format"], str) or schema["format"] in REJECTED_FORMATS):
            self._drop("format", path, f"must be one of {', '.join(FORMATS)}, not {schema['format']!r}")
        for keyword in (*_NUMBERS, "properties"):
            if keyword in schema:
                values = [*schema[keyword]] if keyword == "properties" else schema[keyword]
                if problem := self._resolve.once([schema[keyword]], "literals", partial(_literal_problem, values)):
                    raise self._error(keyword, path, problem)
        if "prefixItems" in schema and ("additionalItems" in schema or isinstance(schema.get("items"), list)):
            raise self._error("prefixItems", path, "cannot be combined with additionalItems or a list of items")

    def _by_pattern(self, schemas: dict[str, Any], path: str) -> dict[str, Any]:
        """Return the schemas by their rewritten patterns."""
        result: dict[str, Any] = {}
        for name, schema in schemas.items():
            try:
                pattern = rewritten_names(name, self._resolve)
            except ValueError as error:
                self._drop("patternProperties", path, str(error))
                continue
            if pattern in result:
                raise self._error("patternProperties", path, "has patterns that match the same names")
            result[pattern] = schema
        self._write("patternProperties", result, path)
        return result

    def _conjunction(self, pattern: str) -> list[str]:
        """Return the patterns that replace one; raises ValueError."""
        if pattern not in self._conjunctions:
            self._conjunctions[pattern] = patterns.conjunction(pattern, self._budget.step)
        return self._conjunctions[pattern]

    def _write(self, keyword: str, value: Any, path: str) -> None:
        """Take the bytes of a keyword from the budget, without those of the schemas in it."""
        number = len(keyword)
        if keyword in _MAPS and isinstance(value, dict):
            number += sum(map(len, value)) + len(value)
        elif keyword in _LISTS and isinstance(value, list):
            number += len(value)
        elif keyword in _ENFORCED and keyword not in (*_ONE, "$ref"):
            number += self._resolve.once([value], "size", lambda: _size(value))
        try:
            self._budget.write(number)
        except ValueError as error:
            raise self._error(*(self._rewriting if self._is_rewriting else (keyword, path)), str(error)) from None

    def _reference(self, reference: Any, path: str) -> str:
        """Resolve a reference inside the schema once, and return its new name."""
        if isinstance(reference, Shared):
            if reference not in self._shared:
                shared = self._shared[reference] = self._new_name("shared")
                self._targets[shared] = True
                self._pending.append((shared, reference.schema, path))
            return f"#/$defs/{self._shared[reference]}"
        if not isinstance(reference, str) or reference not in self._names:
            try:
                target = self._resolved(reference)
            except ValueError as error:
                raise self._error("$ref", path, str(error)) from None
            if (name := self._by_target.get(id(target))) is None:
                name = self._new_name(re.sub(r"\W", "_", reference.rpartition("/")[2][:_MAX_NAME]) or "_")
                self._by_target[id(target)] = name
                self._targets[name] = True  # keeps the order
                self._pending.append((name, target, reference[1:]))
            self._names[reference] = f"#/$defs/{name}"
        return self._names[reference]

    def _resolved(self, reference: Any) -> Any:
        """Return the schema to which a reference points, as it was given; raises ValueError."""
        if isinstance(reference, Shared):
            return reference.schema
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise ValueError('must be "#" or point into this schema as "#/…"')
        target: Any = self._root
        for part in unquote(reference[2:]).split("/") if reference != "#" else ():
            part = part.replace("~1", "/").replace("~0", "~")
            try:
                target = target[int(part) if isinstance(target, list) else part]
            except (LookupError, TypeError, ValueError):
                raise ValueError(f"points to nothing: {reference}") from None
        return target

    def _new_name(self, wanted: str) -> str:
        """Return an unused target name."""
        name = wanted
        while name in self._targets:
            self._namesakes[wanted] += 1
            name = f"{wanted}_{self._namesakes[wanted]}"
        return name

    def _close_unsatisfiable(self, root: dict[str, Any]) -> None:
        """Replace references to schemas that no value matches by `False`, since llguidance refuses them even where
        others are allowed instead. Some may remain.
        """
        resolve = Resolve(lambda reference: self._target_of(reference, root), Budget(_PRUNING_STEPS))
        try:
            empty = {id(each) for each in self._visited(root) if is_empty(each, resolve)}
        except ValueError:
            empty = set()
        finite = self._finite(root, empty)
        for schema in self._visited(root):
            for (keyword, *names), each in subschemas(schema, ()):
                if isinstance(each, dict) and "$ref" in each and id(each) not in finite:
                    holder: Any = schema[str(keyword)] if names else schema
                    holder[names[0] if names else keyword] = False

    def _visited(self, root: dict[str, Any]) -> list[dict[str, Any]]:
        """Return all checked schemas."""
        found = [root, *(each for each in self._targets.values() if isinstance(each, dict))]
        for schema in found:
            if schema is not root or "$defs" not in schema:
                inner = schema
            else:
                inner = {keyword: value for keyword, value in schema.items() if keyword != "$defs"}
            found += (each for _, each in subschemas(inner, ()) if isinstance(each, dict))
        return found

    def _target_of(self, reference: Any, root: dict[str, Any]) -> Any:
        return root if reference == "#" else self._targets[reference.removeprefix("#/$defs/")]

    def _finite(self, root: dict[str, Any], empty: Set[int] | None = None) -> set[int]:
        """Return the identities of the schemas of which complete values exist; also of those where that is unclear.
        With `empty`, schemas that no value matches, what needs these is left out, too.

        A schema is finite once each of its needs has a finite alternative. So finiteness propagates from schemas
        without needs to the schemas that depend on them; each need is visited once.
        """
        unmet: dict[int, int] = {}
        """By identity of a schema: how many of its needs have no finite alternative yet."""
        waiting: dict[int, list[tuple[int, list[Any]]]] = {}
        """By identity of a schema: the schemas that need it, and the alternatives of each of these needs; emptied once
        met.
        """
        finite: list[int] = []
        found: set[int] = set()
        pending: list[dict[str, Any]] = [root]
        while pending:
            schema = pending.pop()
            if id(schema) in unmet:
                continue
            if empty is None:
                needs = [need for need in self._needs(schema, root) if all(isinstance(each, dict) for each in need)]
            else:
                needs = [[one for one in need if one is not False] for need in self._needs(schema, root)]
                needs = [need for need in needs if True not in need]
                needs += [[]] if id(schema) in empty else []
            unmet[id(schema)] = len(needs)
            if not needs:
                finite.append(id(schema))
            for need in needs:
                for each in need:
                    waiting.setdefault(id(each), []).append((id(schema), need))
                    pending.append(each)
            if empty is not None:
                pending += (each for _, each in subschemas(schema, ()) if isinstance(each, dict))
        while finite:
            found.add(one := finite.pop())
            for waiter, need in waiting.get(one, ()):
                if need:
                    need.clear()
                    unmet[waiter] -= 1
                    if not unmet[waiter]:
                        finite.append(waiter)
        return found

    def _needs(self, schema: dict[str, Any], root: dict[str, Any]) -> Iterator[list[Any]]:
        """The schemas that must be complete for a value of this schema to be complete: one of each list."""
        if (reference := schema.get("$ref")) is not None:
            yield [self._target_of(reference, root)]
        for keyword in ("anyOf", "oneOf"):
            if options := schema.get(keyword):
                yield list(options)
        if schema.get("type") == "object" and isinstance(required := schema.get("required"), list):
            properties = schema.get("properties", {})
            yield from ([properties[name]] for name in required if isinstance(name, str) and name in properties)
        least = schema.get("minItems", 0)
        if schema.get("type") == "array" and isinstance(least, int) and least > 0:
            first, rest = schema.get("prefixItems", []), schema.get("items", True)
            if isinstance(rest, list):
                first, rest = rest, schema.get("additionalItems", True)
            yield from ([each] for each in first[:least])
            if least > len(first):
                yield [rest]
        yield from ([each] for each in schema.get("allOf", ()))

    def _drop(self, keyword: str, path: str, problem: str) -> None:
        """Leave out a keyword that is not supported if that is wanted; otherwise raise ValueError about it."""
        error = self._error(keyword, path, problem)
        if self._dropped is None:
            raise error
        self._dropped.append(str(error))

    def _error(self, keyword: str, path: str, problem: str) -> ValueError:
        path = path if len(path) <= _MAX_PATH else f"{path[:_MAX_PATH]}…"
        return ValueError(f"the schema's {keyword} (at {path or '/'}) {problem}; it cannot be enforced")


def _literal_problem(value: Any) -> str:
    """Return why a value cannot be enforced; nothing if it can."""
    values = list(_leaves(value))
    if not all(map(_is_exact, values)):
        return "contains a number that does not fit into a double and 64 bits; integers up to 2^53 always do"
    if any(isinstance(value, str) and _UNWRITABLE.search(value) for value in values):
        return "contains a control character or an unpaired surrogate"
    return ""


def _below(path: str, part: str | int) -> str:
    """Return the path of a part, not much longer than errors show it."""
    return f"{path}/{part}"[: _MAX_PATH + 1]


def _size(value: Any) -> int:
    """Return about the bytes of a value as JSON."""
    return sum(len(each) + 4 if isinstance(each, str) else 6 for each in _leaves(value))


def check_schema_size(schema: Any) -> None:
    level = [schema]
    for _ in range(MAX_SCHEMA_DEPTH + 1):
        level = [
            each
            for one in level
            for each in (one.values() if isinstance(one, dict) else one)
            if isinstance(each, dict | list)
        ]
        if not level:
            break
    else:
        raise ValueError(f"the schema is nested more than {MAX_SCHEMA_DEPTH} levels deep")
    if len(json.dumps(schema, ensure_ascii=False).encode(errors="replace")) > MAX_SCHEMA_BYTES:
        raise ValueError(f"the schema has more than {MAX_SCHEMA_BYTES} bytes")


def keywords(schema: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield every keyword of a checked schema, innermost first: how errors call it, its holder, and its name. What
    replaces a keyword is called like that.
    """
    if not isinstance(schema, dict):
        return
    path = schema.get("$comment", path)
    for keyword, value in list(schema.items()):
        here = path if "$comment" in schema and keyword == "anyOf" else _below(path, keyword)
        if keyword in _MAPS or keyword == "$defs":
            for name, each in list(value.items()):
                yield from keywords(each, _below(here, name))
        elif keyword in _LISTS:
            for number, each in enumerate(value):
                yield from keywords(each, _below(here, number))
        elif keyword in _ONE:
            yield from keywords(value, here)
    for keyword in sorted(schema, key=lambda keyword: keyword == "type"):
        if keyword in _ENFORCED:
            at, _, name = path.rpartition("/") if "$comment" in schema else (path, "", keyword)
            yield f"{name} (at {at or '/'})", schema, keyword


def replaced(schema: dict[str, Any]) -> str:
    """Return what errors call the keywords of a checked schema that alternatives replace, the first three of them."""
    names = dict.fromkeys(name for name, holder, _ in keywords(schema) if "$comment" in holder)
    return ", ".join([name for name in names if not name.startswith("format ")][:3])


def _exclude_whole_bounds(schema: dict[str, Any]) -> None:
    """Turn whole exclusive bounds of numbers into inclusive ones that are a few units of precision away from zero.

    llguidance allows the bound itself if the other bound has the same whole part: 3 with more than 3 and less than 3.5.
    It may read a bound wrong in its last place. Numbers beyond `_MOST` are lost if there is a bound beyond it.
    """
    if schema.get("type") == "integer":
        return
    for keyword in schema.keys() & _BOUNDS.keys():
        end, value = _BOUNDS[keyword], schema[keyword]
        if isinstance(value, int | float) and not isinstance(value, bool) and value * end > _MOST:
            schema[keyword] = end * _MOST
    for bound, exclusive, end in (("minimum", "exclusiveMinimum", 1), ("maximum", "exclusiveMaximum", -1)):
        value = schema.get(bound) if schema.get(exclusive) is True else schema.get(exclusive)
        if isinstance(value, bool) or not isinstance(value, int | float) or value % 1 or not 0 <= end * value < 2**50:
            continue
        following = value + 4 * end * math.ulp(value) if value else end * _LEAST
        other = schema.get(bound, following)
        if isinstance(other, int | float):
            del schema[exclusive]
            schema[bound] = end * max(end * following, end * other)


def _format(name: Any) -> dict[str, Any] | None:
    return FORMATS.get(name) if isinstance(name, str) else None


def _number_of_schemas(root: dict[str, Any]) -> int:
    number, pending = 0, [root]
    while pending:
        number += 1
        pending += (each for _, each in subschemas(pending.pop(), ()) if isinstance(each, dict))
    return number


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the strings, property names, numbers and other leaves of a value."""
    match value:
        case dict():
            yield from value
            for each in value.values():
                yield from _leaves(each)
        case list():
            for each in value:
                yield from _leaves(each)
        case _:
            yield value


def _fits(value: Any) -> bool:
    """Return whether a message to the engine can contain the value."""
    return not isinstance(value, int) or -(2**63) <= value < 2**64


def _is_exact(value: Any) -> bool:
    """Return whether a number fits into a double and, if it is an integer, also into 64 bits; True for other values."""
    match value:
        case int():
            return _fits(value) and int(float(value)) == value
        case float():
            return math.isfinite(value)
    return True
