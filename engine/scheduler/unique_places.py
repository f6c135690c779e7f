"""The places of a JSON schema at which arrays must have unique items, and the languages of these items.

The schema is one that the server has checked: what `oneOf`, `not` and others require is written with `anyOf` and
`allOf`. All errors are ValueErrors about schemas in which it depends on the values, not only on their place, what an
array's items must be.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from llguidance import LLMatcher

Schema = dict[str, Any]
Together = tuple[Schema, ...]
"""Schemas without alternatives that must all hold."""

_MAX_STEPS = 50_000
"""Combinations of alternatives that are read for one schema, of some microseconds each."""
_MAX_COUNTED = 10_000
"""Beginnings of items that are tried to find `minItems` different ones, of some 50 microseconds each."""
_MAX_KEPT_BYTES = 2**20
"""Size of the continuations that a language keeps, of `_KEPT_BYTES` each and the beginning itself."""
_KEPT_BYTES = 256
_MAX_LANGUAGES = 32
"""Different languages of one array's items, as each item may be a dead end in each of them."""
_BOUNDS = {
    "string": {"pattern", "format", "maxLength", "enum", "const"},
    "integer": {"enum", "const", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
}
"""The keywords without which all strings or integers, but for short strings, are allowed."""
_SCALARS = {"string", "integer", "boolean", "null"}
_TYPES = {*_SCALARS, "number", "array", "object"}
_COMBINED = {"allOf", "anyOf", "oneOf", "$ref"}
_OF_ARRAYS = ("items", "prefixItems", "minItems", "maxItems", "enum", "const")
_QUOTE = ord('"')
_SPACES = frozenset(b" \n\t\r")


class Following(NamedTuple):
    """How a beginning of an item continues."""

    next: frozenset[int]
    is_complete: bool
    """Whether it is an item."""
    forced: bytes = b""
    """The only bytes that can follow, as far as there are no others."""


class Language:
    """The texts that an item may have. Thread-safe, as all requests for a schema share it."""

    def __init__(self, matcher: LLMatcher, free: Set[str] = frozenset(), *, is_free: bool = False) -> None:
        """`matcher` reads the bytes of one item: token n is byte n. `free`: the types, "string" or "integer", of which
        each beginning continues to endlessly many items, but for 0. `is_free`: there are only such strings.
        """
        self._initial = matcher
        self.free = free
        self.is_free = is_free
        self._lock = threading.Lock()
        self._matcher = matcher.deep_copy()
        self._text = b""
        """What `_matcher` has read. Most beginnings that are asked for differ from the last one at their end only."""
        self._kept: dict[bytes, Following | None] = {}
        self._num_kept_bytes = 0

    def following(self, start: bytes) -> Following | None:
        """Return how this beginning of an item continues; None if no item begins so."""
        if len(start) > 1 and start[0] == _QUOTE == start[-1] and _is_closed(start):
            return Following(frozenset(), is_complete=True)
        with self._lock:
            if start in self._kept:
                return self._kept[start]
            self._num_kept_bytes += _KEPT_BYTES + len(start)
            if self._num_kept_bytes > _MAX_KEPT_BYTES:
                self._kept, self._num_kept_bytes = {}, _KEPT_BYTES + len(start)
            found = self._kept[start] = self._following(start)
            return found

    def _following(self, start: bytes) -> Following | None:
        if not self._move(start):
            return None
        matcher = self._matcher
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        found = frozenset(np.flatnonzero(bits[:256]).tolist())
        found, is_complete = found if start[:1] == b'"' else found - _SPACES, matcher.is_accepting()
        forced = b"" if is_complete or len(found) != 1 else matcher.compute_ff_bytes() or bytes(found)
        return Following(found, is_complete, forced)

    def _move(self, start: bytes) -> bool:
        """Let the matcher have read this beginning of an item; returns whether there is one."""
        same = _num_same(self._text, start)
        if self._matcher.is_error() or not (same == len(self._text) or self._matcher.rollback(len(self._text) - same)):
            self._matcher, same = self._initial.deep_copy(), 0
        num_read = self._matcher.try_consume_tokens([*start[same:]]) if same < len(start) else 0
        self._text = start[: same + num_read]
        return len(self._text) == len(start)

    def has(self, number: int) -> bool:
        """Return whether it has so many items. Raises ValueError if that takes too long."""
        if self.free:
            return True
        level, found, tried = [b""], 0, 0
        while level and found < number:
            longer: list[bytes] = []
            for at, start in enumerate(level):
                tried += 1
                if tried > _MAX_COUNTED:
                    raise ValueError(f"uniqueItems is not supported with a minItems of {number} for these items")
                following = self.following(start)
                assert following is not None
                found += following.is_complete and start != b"-0"  # which is 0
                longer += (start + (following.forced or bytes((each,))) for each in sorted(following.next))
                # All that are left are beginnings of different items, but `-` and `-0` may be those of 0.
                if found + len(level) - at - 1 + len(longer) - 2 >= number:
                    return True
            level = sorted(longer, key=lambda start: start[-1] != _QUOTE)
        return found >= number


@dataclass(eq=False)
class Place:
    """A place in a JSON value, with all places below that matter; None: nothing below must be unique."""

    properties: dict[bytes, Place | None] = field(default_factory=dict)
    """By name as JSON."""
    other: Place | None = None
    """Of all other properties."""
    first: list[Place | None] = field(default_factory=list)
    """The places of an array's first items."""
    rest: Place | None = None
    languages: list[Language | None] = field(default_factory=list)
    """Of the items of an array that must be unique; the last one is that of all further items, too."""

    @property
    def is_unique(self) -> bool:
        return bool(self.languages)

    def language(self, index: int) -> Language | None:
        """Return the language of an item; None if there can be none."""
        return self.languages[min(index, len(self.languages) - 1)]

    def property(self, name: bytes) -> Place | None:
        return self.properties.get(name, self.other)

    def item(self, index: int) -> Place | None:
        return self.first[index] if index < len(self.first) else self.rest


def without_unique_items(schema: Any) -> Any:
    """Return a schema without the keyword `uniqueItems` in it and in its subschemas."""
    if not isinstance(schema, dict):
        return schema
    result = {key: value for key, value in schema.items() if key != "uniqueItems" or value is not True}
    for keyword, value in result.items():
        if keyword in _MAPS and isinstance(value, dict):
            result[keyword] = {name: without_unique_items(each) for name, each in value.items()}
        elif keyword in _LISTS and isinstance(value, list):
            result[keyword] = [without_unique_items(each) for each in value]
        elif keyword in _ONE:
            result[keyword] = without_unique_items(value)
    return result


def places_of(schema: Any, compile: Callable[[Schema], LLMatcher]) -> Place | None:
    """Return the place of the whole value; None if nothing in it must be unique.

    `compile` returns a matcher of a schema's values that reads bytes. Raises ValueError.
    """
    if not isinstance(schema, dict):
        return None
    return _Places(schema, compile).root()


_ONE = ("items", "additionalProperties", "additionalItems")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")


def _subschemas(schema: Schema) -> Iterator[Any]:
    for keyword, value in schema.items():
        if keyword in _MAPS and isinstance(value, dict):
            yield from value.values()
        elif keyword in _LISTS and isinstance(value, list):
            yield from value
        elif keyword in _ONE:
            yield value


class _Places:
    def __init__(self, root: Schema, compile: Callable[[Schema], LLMatcher]) -> None:
        self._root = root
        self._compile = compile
        self._left = _MAX_STEPS
        self._bases: dict[int, Schema] = {}
        """Schemas without their alternatives, by identity of the schema."""
        self._kept: list[Any] = [root]
        """Keeps the identities of schemas."""
        self._known: dict[frozenset[frozenset[int]], Place | None] = {}
        self._languages: dict[str, Language] = {}
        self._reaching = self._find_reaching()

    def root(self) -> Place | None:
        if not self._reaching:
            return None
        try:
            return self._place(self._alternatives(self._root))
        except RecursionError:
            raise ValueError("uniqueItems is not supported in a schema nested so deeply") from None

    def _find_reaching(self) -> set[int]:
        """Return the identities of the schemas in or below which items must be unique."""
        above: dict[int, list[int]] = {}
        pending: list[Schema] = [self._root]
        seen = {id(self._root)}
        found: list[int] = []
        while pending:
            schema = pending.pop()
            if schema.get("uniqueItems") is True:
                found.append(id(schema))
            inner = [each for each in _subschemas(schema) if isinstance(each, dict)]
            if "$ref" in schema and isinstance(target := self._target(schema["$ref"]), dict):
                inner.append(target)
            for each in inner:
                above.setdefault(id(each), []).append(id(schema))
                if id(each) not in seen:
                    seen.add(id(each))
                    pending.append(each)
        reaching: set[int] = set()
        while found:
            if (identity := found.pop()) not in reaching:
                reaching.add(identity)
                found += above.get(identity, ())
        return reaching

    def _target(self, reference: Any) -> Any:
        target: Any = self._root
        try:
            for part in str(reference).removeprefix("#").split("/")[1:]:
                part = part.replace("~1", "/").replace("~0", "~")
                target = target[int(part) if isinstance(target, list) else part]
        except (LookupError, ValueError, TypeError):
            raise ValueError(f"points to nothing: {reference}") from None
        return target

    def _alternatives(self, schema: Any, above: frozenset[int] = frozenset()) -> list[Together]:
        """Return the alternatives of a schema; it holds if one of them holds."""
        if schema is False:
            return []
        if not isinstance(schema, dict):
            return [()]
        if id(schema) in above:
            raise ValueError("uniqueItems is not supported next to a $ref that refers to itself")
        above |= {id(schema)}
        if id(schema) not in self._bases:
            self._bases[id(schema)] = {key: value for key, value in schema.items() if key not in _COMBINED}
            if id(schema) in self._reaching:
                self._reaching.add(id(self._bases[id(schema)]))
        found: list[Together] = [(self._bases[id(schema)],)]
        parts = list(schema.get("allOf", ()))
        if "$ref" in schema:
            parts.append(self._target(schema["$ref"]))
        for part in parts:
            found = self._both(found, self._alternatives(part, above))
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                options = [each for option in schema[keyword] for each in self._alternatives(option, above)]
                found = self._both(found, options)
        return found

    def _both(self, some: list[Together], others: list[Together]) -> list[Together]:
        self._step(len(some) * len(others))
        return [(*one, *other) for one, other in itertools.product(some, others) if _types((*one, *other))]

    def _step(self, number: int) -> None:
        self._left -= number
        if self._left < 0:
            raise ValueError("uniqueItems is not supported in a schema with so many combinations of alternatives")

    def _all(self, schemas: Sequence[Any]) -> list[Together]:
        """Return the alternatives of schemas that must all hold."""
        found: list[Together] = [()]
        for schema in schemas:
            found = self._both(found, self._alternatives(schema))
        return found

    def _place(self, alternatives: list[Together]) -> Place | None:
        if not any(id(schema) in self._reaching for each in alternatives for schema in each):
            return None
        key = frozenset(frozenset(map(id, each)) for each in alternatives)
        if key in self._known:
            return self._known[key]
        place = self._known[key] = Place()
        arrays = [each for each in alternatives if "array" in _types(each)]
        objects = [each for each in alternatives if "object" in _types(each)]
        if any(_is_unique(each) for each in arrays):
            self._add_languages(place, arrays)
        elif arrays:
            number = max(len(schema.get("prefixItems", ())) for each in arrays for schema in (*each, {}))
            *place.first, place.rest = (
                self._place([found for each in arrays for found in self._all(_items(each, at))])
                for at in range(number + 1)
            )
        if objects:
            self._add_properties(place, objects)
        return place

    def _add_properties(self, place: Place, objects: list[Together]) -> None:
        names = {name: None for each in objects for schema in each for name in schema.get("properties", ())}
        for schema in {id(schema): schema for each in objects for schema in each}.values():
            if "patternProperties" in schema and id(schema) in self._reaching:
                named, rest = schema.get("properties"), schema.get("additionalProperties", True)
                if named or len(schema["patternProperties"]) > 1 or rest is not False:
                    raise ValueError(
                        "uniqueItems is not supported below patternProperties next to other properties of the object"
                    )
        for name in names:
            found = [one for each in objects for one in self._all([_property(schema, name) for schema in each])]
            place.properties[json.dumps(name, ensure_ascii=False).encode()] = self._place(found)
        others = [one for each in objects for one in self._all([_property(schema, None) for schema in each])]
        place.other = self._place(others)

    def _add_languages(self, place: Place, arrays: list[Together]) -> None:
        texts = {
            tuple(sorted(json.dumps({key: schema.get(key) for key in _OF_ARRAYS}, sort_keys=True) for schema in each))
            for each in arrays
        }
        if len(texts) > 1 or not all(map(_is_unique, arrays)):
            raise ValueError(
                "uniqueItems is not supported where several alternatives allow an array, but not with the same keywords"
            )
        array = arrays[0]
        if any(key in schema for schema in array for key in ("enum", "const")):
            raise ValueError("uniqueItems is not supported together with enum or const")
        most = min((schema["maxItems"] for schema in array if "maxItems" in schema), default=None)
        least = max(schema.get("minItems", 0) for schema in array)
        number = max(len(schema.get("prefixItems", ())) for schema in array)
        for at in range(number + 1):
            alternatives = self._all(_items(array, at)) if most is None or at < most else []
            if not all(_types(each) <= _SCALARS for each in alternatives):
                raise ValueError(
                    "uniqueItems is only supported for items that are strings, integers, booleans or null, or that "
                    "have few values, such as those of a small enum"
                )
            language = self._language(_items(array, at), alternatives) if alternatives else None
            needed = at + 1 if at < number else least
            if language is not None and 1 < needed <= least and not language.has(needed):
                raise ValueError(f"uniqueItems is not supported with fewer than {needed} values for item {needed}")
            place.languages.append(language)
            if len({*place.languages} - {None}) > _MAX_LANGUAGES:
                raise ValueError(
                    f"uniqueItems is not supported for an array whose items have more than {_MAX_LANGUAGES} schemas"
                )

    def _language(self, items: Sequence[Any], alternatives: Sequence[Together]) -> Language:
        """Return the language of items for which all of these schemas hold."""
        text = json.dumps(items, sort_keys=True)
        if text not in self._languages:
            definitions = {key: value for key, value in self._root.items() if key in ("$defs", "definitions")}
            schema = items[0] if len(items) == 1 and isinstance(items[0], dict) else {"allOf": [*items]}
            matcher = self._compile(without_unique_items({**definitions, **schema}))
            free = {
                type
                for type, bounds in _BOUNDS.items()
                for each in alternatives
                if type in _types(each) and all(bounds.isdisjoint(part) for part in each)
            }
            types = set[str]().union(*map(_types, alternatives))
            self._languages[text] = Language(matcher, free, is_free=free == types == {"string"})
        return self._languages[text]


def _num_same(one: bytes, other: bytes) -> int:
    """Return the number of bytes with which both texts begin."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _is_closed(text: bytes) -> bool:
    """Return whether the quote at the end of a string's text is not escaped."""
    return (len(text) - 1 - len(text[:-1].rstrip(b"\\"))) % 2 == 0


def _is_unique(schemas: Together) -> bool:
    return any(schema.get("uniqueItems") is True for schema in schemas)


def _types(schemas: Together) -> set[str]:
    """Return the types of the values for which all these schemas can hold."""
    found = set(_TYPES)
    for schema in schemas:
        if "type" in schema:
            named = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
            found &= {*named, *(("integer",) if "number" in named else ())}
        if (values := _values(schema)) is not None:
            found &= set(map(_type, values))
    return found


def _values(schema: Schema) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def _type(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def _items(schemas: Together, at: int) -> list[Any]:
    """Return the schemas of an array's item at this place, as far as they say something."""
    found = []
    for schema in schemas:
        first, values = schema.get("prefixItems", []), _values(schema)
        found.append(first[at] if at < len(first) else schema.get("items", True))
        if values is not None:
            found.append({"enum": [each[at] for each in values if isinstance(each, list) and at < len(each)]})
    return [each for each in found if each is not True] or [True]


def _property(schema: Schema, name: str | None) -> Any:
    """Return the schema of a property; without a name, that of other ones."""
    if (values := _values(schema)) is not None:
        return {"enum": [each[name] for each in values if isinstance(each, dict) and name is not None and name in each]}
    if name is not None and name in schema.get("properties", ()):
        return schema["properties"][name]
    if patterns := schema.get("patternProperties"):
        return {"anyOf": [*patterns.values(), schema.get("additionalProperties", True)]}
    return schema.get("additionalProperties", True)
