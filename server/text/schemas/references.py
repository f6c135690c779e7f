"""References by name: `$id`, `$anchor` and `$dynamicAnchor` inside one schema become pointers from its root."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, unquote, urldefrag, urljoin

from quire.server.text.schemas.common import Schema

_ONE = {
    *("items", "additionalItems", "additionalProperties", "unevaluatedItems", "unevaluatedProperties", "contains"),
    *("not", "if", "then", "else", "propertyNames", "contentSchema"),
}
_LISTS = {"allOf", "anyOf", "oneOf", "prefixItems", "items"}
_MAPS = {"properties", "patternProperties", "dependentSchemas", "dependencies", "$defs", "definitions"}

_MAX_ID = 2048
"""Characters of an `$id`."""
_Place = tuple[str | int, ...]
"""The keys from the root to a schema."""


def subschemas(schema: Schema, at: _Place) -> Iterator[tuple[_Place, Any]]:
    """Yield the schemas directly in a schema, with their places."""
    for keyword, value in schema.items():
        if keyword in _LISTS and isinstance(value, list):
            yield from (((*at, keyword, number), each) for number, each in enumerate(value))
        elif keyword in _MAPS and isinstance(value, dict):
            yield from (((*at, keyword, name), each) for name, each in value.items())
        elif keyword in _ONE:
            yield (*at, keyword), value


def with_pointers(root: Schema) -> Schema:
    """Return a schema whose references are "#" or "#/…", from the root. Other references remain: those that point
    nowhere, and dynamic ones whose target is known only while a value is checked.
    """
    index = _Index(root)
    return index.replaced() if index.has_names else root


class _Index:
    """The places of a schema's resources (`$id`) and anchors."""

    def __init__(self, root: Schema) -> None:
        self._bases: dict[_Place, str] = {}
        """The base URI of each schema, by its place."""
        self._resources: dict[str, _Place] = {}
        self._anchors: dict[tuple[str, str], _Place] = {}
        self._dynamic: dict[tuple[str, str], _Place] = {}
        """Anchors of `$dynamicAnchor`; they are in `_anchors`, too."""
        self._pointers: dict[_Place, str] = {}
        self._root = root
        self.has_names = False
        pending: list[tuple[_Place, Any, str]] = [((), root, "")]
        while pending:
            at, schema, base = pending.pop()
            if not isinstance(schema, dict):
                continue
            base = self._add(at, schema, base)
            pending += ((place, each, base) for place, each in subschemas(schema, at))
        self._root_uri = self._bases.get((), "")
        self._dynamic_names = Counter(name for _, name in self._dynamic)

    def _add(self, at: _Place, schema: Schema, base: str) -> str:
        """Add a schema's names, and return its base URI."""
        if isinstance(name := schema.get("$id"), str):
            if len(name) > _MAX_ID:
                raise ValueError(
                    f"the schema's $id ({name[:200]}…) has more than {_MAX_ID} characters; it cannot be enforced"
                )
            uri, fragment = urldefrag(name if name.startswith("#") else urljoin(base, name))
            base = uri or base
            if fragment:
                self._anchors[base, fragment] = at
            if uri or not at:
                self._resources[base] = at
            self.has_names |= bool(at)
        elif not at:
            self._resources[base] = at
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(name := schema.get(keyword), str):
                self._anchors[base, name] = at
                if keyword == "$dynamicAnchor":
                    self._dynamic[base, name] = at
        reference = schema.get("$ref")
        self.has_names |= "$dynamicRef" in schema
        self.has_names |= isinstance(reference, str) and reference != "#" and not reference.startswith("#/")
        self._bases[at] = base
        return base

    def replaced(self) -> Schema:
        """Return the schema with its references replaced."""
        result: Schema = self._replaced(self._root, ())
        return result

    def _replaced(self, schema: Any, at: _Place) -> Any:
        if not isinstance(schema, dict):
            return schema
        result = {key: value for key, value in schema.items() if key != "$id" or not at}
        inner: dict[str, Any] = {}
        for place, each in subschemas(schema, at):
            keyword, *rest = place[len(at) :]
            if not rest:
                result[str(keyword)] = self._replaced(each, place)
            else:
                holder = inner.setdefault(str(keyword), type(schema[keyword])())
                if isinstance(holder, list):
                    holder.append(self._replaced(each, place))
                else:
                    holder[rest[0]] = self._replaced(each, place)
        result |= inner
        for keyword in ("$ref", "$dynamicRef"):
            try:
                target = self._target(result.get(keyword), self._bases[at], is_dynamic=keyword == "$dynamicRef")
            except ValueError as error:
                path = "".join(f"/{part}" for part in at)[:200]
                raise ValueError(f"the schema's {keyword} (at {path}) {error}; it cannot be enforced") from None
            if target is None:
                continue
            del result[keyword]
            if target not in self._pointers:
                self._pointers[target] = "#" + "".join(f"/{_escaped(part)}" for part in target)
            pointer = self._pointers[target]
            if "$ref" in result:
                result["allOf"] = [*result.get("allOf", ()), {"$ref": pointer}]
            else:
                result["$ref"] = pointer
        return result

    def _target(self, reference: Any, base: str, *, is_dynamic: bool) -> _Place | None:
        """Return the place to which a reference points, or None."""
        if not isinstance(reference, str):
            return None
        uri, fragment = urldefrag(reference if reference.startswith("#") else urljoin(base, reference))
        uri = uri or base
        if uri not in self._resources:
            return None
        fragment = unquote(fragment)
        if not fragment or fragment.startswith("/"):
            return self._at_pointer(self._resources[uri], fragment)
        place = self._anchors.get((uri, fragment))
        if not is_dynamic or (uri, fragment) not in self._dynamic:
            return place
        if (self._root_uri, fragment) in self._dynamic:  # the outermost one counts
            return self._dynamic[self._root_uri, fragment]
        return place if self._dynamic_names[fragment] == 1 else None

    def _at_pointer(self, start: _Place, pointer: str) -> _Place | None:
        """Return the place of the schema at a pointer, or None if there is nothing.

        Raises ValueError inside an embedded resource (`$id`) if the place is not one where the specification has
        schemas: the references there, and those to nothing, would be read as from the root.
        """
        place, base = start, self._bases[start]
        value: Any = self._root
        for part in start:
            value = value[part]
        for part in pointer.split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            try:
                key: str | int = int(part) if isinstance(value, list) else part
                value = value[key]
            except (LookupError, TypeError, ValueError):
                if base != self._root_uri:
                    raise ValueError(f"points to nothing in {base[:200]!r}") from None
                return None
            place = (*place, key)
            base = self._bases.get(place, base)
        if place not in self._bases and not isinstance(value, bool) and base != self._root_uri:
            raise ValueError(f"points into {base[:200]!r} at a place where it can have no schema; use $defs")
        return place


def _escaped(part: str | int) -> str:
    return quote(str(part).replace("~", "~0").replace("/", "~1"), safe="~ ")
