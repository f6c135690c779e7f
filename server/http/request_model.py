"""The pydantic shapes of requests, and the handling of fields that nothing reads.

A field that may change the answer and is not supported is rejected by name. A hint, a label and an unknown field inside
a message are accepted and ignored (`RequestModel`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from quire.engine.protocol.errors import InvalidParameter

T = TypeVar("T")
M = TypeVar("M", bound="RequestModel")

MAX_MESSAGES = 4096
"""Messages of a chat."""

TokenId = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""An integer that fits into a message to the engine."""
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
"""Only the first error of a long list is reported: reporting every element would take minutes and gigabytes."""


def _integral(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


INTEGRAL = BeforeValidator(_integral)
"""Lets JSON have the form 16.0. Bounds stand before it: after it, they would not be in the OpenAPI document."""
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63), INTEGRAL]
"""An integer that fits into a message to the engine. Lists of many are `TokenId`s, which are faster to check."""
Natural = Annotated[int, Field(ge=0, lt=2**63), INTEGRAL]
Positive = Annotated[int, Field(ge=1, lt=2**63), INTEGRAL]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ExtraField(NamedTuple):
    """The handling of a field that nothing reads. Null is the same as no field."""

    kind: Literal["label", "hint", "rejected"]
    """A label never has an effect. Other values of a hint are ignored and logged, or rejected with
    `--strict-parameters`.
    """
    neutral: tuple[Any, ...] = ()
    """Values without effect, which are always accepted."""


LABEL = ExtraField("label")


def hint(*neutral: Any) -> ExtraField:
    """A preference, such as a shorter answer, or a label that few servers know."""
    return ExtraField("hint", neutral)


def rejected(*neutral: Any) -> ExtraField:
    """A field that would change the answer."""
    return ExtraField("rejected", neutral)


def _add_extra_fields(schema: dict[str, Any], model: type[RequestModel]) -> None:
    """Add the fields that nothing reads to a JSON schema. docs/reference/api.md is generated from this."""
    for kind in ("label", "hint", "rejected"):
        extra = {name: each for name, each in model.extra_fields.items() if name not in model.model_fields}
        found = {name: list(each.neutral) for name, each in sorted(extra.items()) if each.kind == kind}
        if found:
            schema[f"x-{kind}"] = found
    if model.unknown_fields.kind == "hint":
        schema["x-ignores-unknown"] = True


class RequestModel(BaseModel):
    """A body, or part of one. It may have fields that it does not declare: see `extra_fields`."""

    model_config = ConfigDict(
        extra="allow",
        strict=True,
        use_attribute_docstrings=True,
        json_schema_extra=_add_extra_fields,
    )
    extra_fields: ClassVar[Mapping[str, ExtraField]] = {}
    """The known fields that nothing reads."""
    unknown_fields: ClassVar[ExtraField] = rejected()
    """The handling of all other fields that nothing reads."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        """Null is the same as no field."""
        return {name: each for name, each in value.items() if each is not None} if isinstance(value, dict) else value

    def check_fields(self, param: str = "") -> set[str]:
        """Return the fields that are ignored, here and in parts, named after `param`; raise `InvalidParameter` for the
        first one that is rejected.
        """
        ignored = set()
        for name, value in (self.model_extra or {}).items():
            extra = self.extra_fields.get(name, self.unknown_fields)
            if extra.kind == "label" or value in extra.neutral:
                continue
            if extra.kind == "rejected":
                why = "is not a parameter of this API"
                if name in self.extra_fields:
                    why = "is not supported" + " with this value" * bool(extra.neutral)
                raise InvalidParameter(f"{param}{name} {why}", f"{param}{name}")
            ignored.add(f"{param}{name}")
        for name in type(self).model_fields:
            match getattr(self, name):
                case RequestModel() as part:
                    ignored |= part.check_fields(f"{param}{name}.")
                case [RequestModel() | str(), *_] as parts:  # not lists of token ids, which are long
                    for at, part in enumerate(parts):
                        if isinstance(part, RequestModel):
                            ignored |= part.check_fields(f"{param}{name}[{at}].")
        return ignored


class MessagePart(RequestModel):
    """A message, or part of one. Clients send back messages of other servers, so unknown fields are ignored."""

    unknown_fields: ClassVar[ExtraField] = hint()


def variant(
    kinds: Mapping[str, type[M]], value: Mapping[str, Any], param: str, ignored: set[str], default: str | None = None
) -> M:
    """Parse `value` as the model for its `type`, or for `default` without one, and add the ignored fields to `ignored`.

    Raises `InvalidParameter`.
    """
    kind = default if (given := value.get("type")) is None else given
    if not isinstance(kind, str) or kind not in kinds:
        raise InvalidParameter(f"{param}.type must be {' or '.join(kinds)}; {kind!r} is not supported", f"{param}.type")
    return parsed(kinds[kind], {name: each for name, each in value.items() if name != "type"}, param, ignored)


def parsed(model: type[M], value: Mapping[str, Any], param: str, ignored: set[str]) -> M:
    """Parse `value` as the model, and add the ignored fields to `ignored`. Raises `InvalidParameter`."""
    try:
        read = model.model_validate(value)
    except ValidationError as error:
        problem = error.errors()[0]
        where = param + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in problem["loc"])
        raise InvalidParameter(f"{where}: {problem['msg']}", where) from None
    ignored |= read.check_fields(f"{param}.")
    return read


def only_one(given: Mapping[str, T | None]) -> T | None:
    """Return the value that is not None of parameters, by name; raises `InvalidParameter` if there are several."""
    found = [name for name, value in given.items() if value is not None]
    if len(found) > 1:
        raise InvalidParameter(f"{found[0]} and {found[1]} exclude each other; send only one of them", found[0])
    return given[found[0]] if found else None


def check_length(values: Sized, most: int, param: str) -> None:
    """Reject a list that is too long."""
    if len(values) > most:
        raise InvalidParameter(f"{param}: at most {most} are allowed, got {len(values)}", param)
