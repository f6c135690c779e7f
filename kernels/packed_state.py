"""Packed weights as tensors and JSON.

The packed cache stores both. Experts that move between ranks send only the tensors, as both ranks have the same JSON
(`PackedExperts.layout`). Loading skips packing, except for oneDNN's formats (`is_opaque`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor


class Packed:
    """A packed weight. Its state consists of tensors, packed weights, numbers, strings, and lists of these; tuples
    become lists."""

    is_opaque: ClassVar[bool] = False
    """Whether it is in one of oneDNN's formats: then its state is a plain copy, and loading packs it again."""

    def __getstate__(self) -> dict[str, Any]:
        return vars(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class NotPlain(Exception):
    """A packed weight is in one of oneDNN's formats."""


def to_plain(value: Any, tensors: list[Tensor], *, copies: bool = False) -> Any:
    """Return a packed weight as JSON, and append its tensors. Raises `NotPlain` if these would be copies, unless
    `copies` is set."""
    match value:
        case Tensor():
            tensors.append(value)
            return {"tensor": len(tensors) - 1}
        case Packed():
            if value.is_opaque and not copies:
                raise NotPlain
            fields = {name: to_plain(each, tensors, copies=copies) for name, each in value.__getstate__().items()}
            return {"class": type(value).__name__, **fields}
        case list() | tuple():
            return [to_plain(each, tensors, copies=copies) for each in value]
        case None | bool() | int() | float() | str():
            return value
    raise AssertionError(value)


def from_plain(plain: Any, tensors: Sequence[Tensor]) -> Any:
    """Return the object that `to_plain` was given. Raises `KeyError`, `IndexError` or `TypeError` for JSON that it has
    not returned."""
    match plain:
        case {"tensor": int(index)}:
            return tensors[index]
        case {"class": name, **fields}:
            packed = object.__new__(_classes()[name])
            packed.__setstate__({str(field): from_plain(value, tensors) for field, value in fields.items()})
            return packed
        case list():
            return [from_plain(each, tensors) for each in plain]
    return plain


def is_opaque(value: Any) -> bool:
    """Whether a packed weight, or any inside it, is in one of oneDNN's formats."""
    try:
        to_plain(value, [])
    except NotPlain:
        return True
    return False


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors of a packed weight, which may be copies."""
    tensors: list[Tensor] = []
    to_plain(value, tensors, copies=True)
    return tensors


def with_tensors(value: Any, tensors: Sequence[Tensor]) -> Any:
    """A packed weight like this one, with the `tensors_of` another one of the same kind and shape."""
    return from_plain(to_plain(value, [], copies=True), tensors)


def _classes() -> dict[str, type[Packed]]:
    found = [Packed]
    for each in found:  # grows
        found.extend(each.__subclasses__())
    return {each.__name__: each for each in found}
