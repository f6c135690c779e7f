"""One spelling for what JSON Schema and its earlier drafts write in several ways."""

from __future__ import annotations

from typing import Any

from quire.server.text.schemas.common import Schema

_COUNTS = (
    *("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
    *("minContains", "maxContains"),
)


_VACUOUS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties"), (True, {})),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), ({},)),
    "propertyNames": (True, {}, {"type": "string"}),
    "uniqueItems": (False,),
    "not": (False,),
}
"""Values with which keywords allow everything."""
_COMPANIONS = {
    **dict.fromkeys(("then", "else"), ("if",)),
    **dict.fromkeys(("minContains", "maxContains"), ("contains",)),
    "if": ("then", "else"),
}
"""Keywords that only have an effect together with one of these."""


def normalized(schema: Schema) -> Schema:
    """Return a schema as draft 2020-12 writes it, without keywords that constrain nothing.

    Integral floats become integers, exclusive bounds numbers, `items` as a list and `additionalItems` become
    `prefixItems` and `items`, and `dependencies` become `dependentRequired` and `dependentSchemas`.
    """
    result = {
        key: _integral(value) if key in _COUNTS else value
        for key, value in schema.items()
        if not _is_vacuous(key, value, schema)
    }
    for exclusive, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(flag := result.get(exclusive), bool):
            del result[exclusive]
            if flag and bound in result:
                result[exclusive] = result.pop(bound)
    if "prefixItems" not in result:
        rest = result.pop("additionalItems", None)
        if isinstance(first := result.get("items"), list):
            result = {("prefixItems" if key == "items" else key): value for key, value in result.items()}
            assert result["prefixItems"] is first
            if rest is not None:
                result["items"] = rest
    if isinstance(dependencies := result.get("dependencies"), dict):
        del result["dependencies"]
        lists = {name: each for name, each in dependencies.items() if isinstance(each, list)}
        for keyword, split in (
            ("dependentRequired", lists),
            ("dependentSchemas", {name: each for name, each in dependencies.items() if name not in lists}),
        ):
            if split:
                result[keyword] = {**result.get(keyword, {}), **split}
    return result


def _is_vacuous(keyword: str, value: Any, schema: Schema) -> bool:
    """Return whether a keyword of a schema constrains nothing, because of its value or without another keyword."""
    if keyword in ("contains", "minContains") and schema.get("minContains") == 0 and schema.get("maxContains") is None:
        return True
    if keyword == "if" and not schema.keys().isdisjoint(("unevaluatedItems", "unevaluatedProperties")):
        return False  # it still evaluates
    if keyword in _COMPANIONS and all(schema.get(name) is None for name in _COMPANIONS[keyword]):
        return True
    return value in _VACUOUS.get(keyword, ()) or (value is None and keyword != "const")


def _integral(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value
