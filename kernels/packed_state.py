"""Packed weights as plain data: their tensors, and the rest of them as JSON.

As such they are kept in files and move between ranks. Objects are made from it with the tensors as they are: packing is
skipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from quire.kernels import dispatch, isa


class Packed:
    """A weight in the layout that the device multiplies fastest. Its state has tensors, packed weights, numbers and
    strings, and lists of these."""

    is_opaque: ClassVar[bool] = False
    """Whether it is in a format of oneDNN's: then the state is a copy, which is packed again."""

    def __getstate__(self) -> dict[str, Any]:
        return vars(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class NotPlain(Exception):
    """A packed weight is in a format of oneDNN's."""


def platform() -> str:
    """What the layout of packed weights depends on, besides the weights and Quire's version."""
    chosen = (isa.chosen().name, isa.has("amx_tile"))
    return repr((chosen, sorted(dispatch.PLATFORMS), torch.backends.mkldnn.is_available()))  # type: ignore[no-untyped-call]


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
    """Return what `to_plain` was given. Raises `KeyError`, `IndexError` or `TypeError` for what it has not returned."""
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
