"""Packed weights as plain data, to be kept in a file: their tensors, and the rest of them as JSON.

Unlike `PackedLinear.state` and `PackedExperts.state`, which move weights between objects that exist, this makes the
objects, with the tensors as they are: packing is skipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quire.kernels import dispatch, isa
from quire.kernels.experts import PackedExperts
from quire.kernels.linear import PackedLinear

PackedWeight = PackedLinear | PackedExperts
_Class = type[PackedLinear] | type[PackedExperts]


class NotPlain(Exception):
    """A packed weight is in a format of oneDNN's, which cannot be stored."""


def platform() -> str:
    """What the layout of packed weights depends on, besides the weights and Quire's version."""
    chosen = (isa.chosen().name, isa.has("amx_tile"))
    return repr((chosen, sorted(dispatch.PLATFORMS), torch.backends.mkldnn.is_available()))  # type: ignore[no-untyped-call]


def to_plain(value: Any, tensors: list[Tensor]) -> Any:
    """Return a packed weight as JSON, and append its tensors. Raises `NotPlain`."""
    match value:
        case Tensor():
            if value.layout != torch.strided:
                raise NotPlain
            tensors.append(value)
            return {"tensor": len(tensors) - 1}
        case PackedLinear() | PackedExperts():
            fields = {name: to_plain(each, tensors) for name, each in vars(value).items()}
            return {"class": type(value).__name__, **fields}
        case list() | tuple():
            return [to_plain(each, tensors) for each in value]
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
            for field, value in fields.items():
                setattr(packed, str(field), from_plain(value, tensors))
            return packed
        case list():
            return [from_plain(each, tensors) for each in plain]
    return plain


def _classes() -> dict[str, _Class]:
    found: list[_Class] = [PackedLinear, PackedExperts]
    for each in found:  # grows
        found.extend(each.__subclasses__())
    return {each.__name__: each for each in found}
