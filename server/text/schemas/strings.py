"""The strings that match a schema, as one pattern."""

from __future__ import annotations

from typing import Any

from quire.server.text import patterns
from quire.server.text.schemas.common import Resolve, count, listed, mapping, types_of
from quire.server.text.schemas.formats import PATTERNS, is_known
from quire.server.text.schemas.normal import normalized

_NONE = "(?!)"
_ANY = r"[\s\S]"


def pattern_of(schema: Any, resolve: Resolve) -> str:
    """Return a pattern of all strings that match a schema; raises ValueError if there is none."""
    return patterns.Generated(f"^{_condition(schema, resolve, 0)}")


def _condition(schema: Any, resolve: Resolve, depth: int) -> str:
    """Return an expression that matches the empty text at the beginning of strings that match a schema."""
    resolve.step()
    if isinstance(schema, bool):
        return "" if schema else _NONE
    if depth > 8:
        raise ValueError("refers to itself, or is nested too deep")

    def condition(each: Any) -> str:
        return _condition(each, resolve, depth + 1)

    schema = normalized(mapping(schema))
    found = [""]
    for keyword, value in schema.items():
        match keyword:
            case "type" if "string" not in types_of(schema):
                found.append(_NONE)
            case "const" | "enum":
                values = [value] if keyword == "const" else listed(value)
                found.append(f"(?={patterns.constants(each for each in values if isinstance(each, str))})")
            case "pattern":
                found.append(patterns.joint([value]))
            case "format" if value in PATTERNS:
                found.append(patterns.joint([PATTERNS[value]]))
            case "format" if not is_known(value):
                pass
            case "minLength":
                found.append(f"(?={_ANY}{{{count(value)}}})")
            case "maxLength":
                found.append(f"(?={_ANY}{{0,{count(value)}}}$)")
            case "$ref":
                found.append(condition(resolve(value)))
            case "not":
                found.append(f"(?!{condition(value)})")
            case "allOf":
                found += map(condition, listed(value))
            case "anyOf":
                found.append(_either([condition(each) for each in listed(value)]))
            case "oneOf":
                each = [condition(option) for option in listed(value)]
                others = ["".join(f"(?!{other})" for other in each[:at] + each[at + 1 :]) for at in range(len(each))]
                found.append(_either([one + rest for one, rest in zip(each, others, strict=True)]))
            case "if":
                then, otherwise = condition(schema.get("then", True)), condition(schema.get("else", True))
                found.append(_either([f"{condition(value)}{then}", f"(?!{condition(value)}){otherwise}"]))
            case "format" | "contentSchema" | "$dynamicRef":
                raise ValueError(f"contains {keyword}, which cannot be enforced for names")
    return "".join(found)


def _either(options: list[str]) -> str:
    return f"(?:{'|'.join(options)})" if options else _NONE
