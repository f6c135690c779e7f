"""Custom tools: functions of one text, which may have a grammar. Chat and Responses share them."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

from quire.engine.protocol.errors import InvalidParameter
from quire.server.parsers.input_grammar import INPUT, InputGrammar
from quire.server.text.patterns import check

_FLAGS = re.compile(r"(?:\(\?[a-z]*(?:-[a-z]+)?\))*")
"""The flags at the beginning of a regular expression."""


def custom_function(
    description: str | None, syntax: Literal["lark", "regex"] | None, definition: str, param: str
) -> tuple[dict[str, Any], InputGrammar | None]:
    """Return the fields of the function for a custom tool, and its grammar if that is in Lark's notation.

    `syntax`: that of `definition`, whose name for errors is `param`; None: any text. Raises `InvalidParameter`.
    """
    text, grammar = {"type": "string", "description": "The whole input of the tool, as text."}, None
    match syntax:
        case "lark":
            grammar = InputGrammar(definition, param)
            text["description"] += f" It must match this grammar:\n{definition}"
        case "regex":
            text["pattern"] = _whole_pattern(definition, param)
    parameters = {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}
    fields: dict[str, Any] = {"parameters": parameters}
    if description is not None:
        fields = {"description": description, **fields}
    return fields if syntax is None else {**fields, "strict": True}, grammar


def custom_arguments(text: str) -> str:
    """Return the JSON arguments of a custom tool's function for this input."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


def _whole_pattern(definition: str, param: str) -> str:
    """A regular expression for texts that match this one as a whole; raises `InvalidParameter` for one that cannot be
    enforced, alone or as this.
    """
    flags = _FLAGS.match(definition)
    assert flags is not None
    whole = f"{flags[0]}^(?:{definition[flags.end() :]})$"
    try:
        for pattern in (definition, whole):
            check(pattern)
    except ValueError as error:
        raise InvalidParameter(f"{param}: the regular expression {error}", param) from None
    return whole
