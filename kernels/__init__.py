"""The operations a model is made of, each chosen by the device of its first argument.

`quire.kernels.reference` defines every operation in plain torch and is the oracle that the others are held against.
A platform's module replaces the operations that it names, once `prepare` has made it ready; what it lacks stays with
the reference. Nothing of Quire is imported here.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Concatenate, ParamSpec, TypeVar

from torch import Tensor

from quire.kernels import cpu, reference
from quire.kernels.cache import allocate_kv_cache

logger = logging.getLogger(__name__)

__all__ = [
    "add_rms_norm",
    "allocate_kv_cache",
    "gumbel_noise",
    "paged_attention",
    "prepare",
    "rms_norm",
    "rotary",
    "silu_mul",
    "uniform_noise",
    "write_kv",
]

_PLATFORMS: dict[str, ModuleType] = {}
"""Device type → the module whose functions replace the reference's of the same name."""


def prepare(device_type: str) -> Callable[[], None]:
    """Make the device's kernels ready, in the background; call what is returned to wait for them.

    Where the CPU's cannot be compiled, a warning says why, and the reference serves.
    """

    def work() -> None:
        try:
            cpu.load()
        except cpu.CannotBuild as error:
            logger.warning("the CPU kernels cannot be compiled, a slower reference serves: %s", error)
        else:
            _PLATFORMS["cpu"] = cpu

    if device_type != "cpu" or "cpu" in _PLATFORMS:
        return lambda: None
    thread = threading.Thread(target=work, name="prepare-kernels")
    thread.start()
    return thread.join


P = ParamSpec("P")
R = TypeVar("R")


def _by_device(operation: Callable[Concatenate[Tensor, P], R]) -> Callable[Concatenate[Tensor, P], R]:
    @functools.wraps(operation)
    def dispatch(first: Tensor, /, *args: P.args, **kwargs: P.kwargs) -> R:
        platform = _PLATFORMS.get(first.device.type)
        chosen: Callable[Concatenate[Tensor, P], R] = getattr(platform, operation.__name__, operation)
        return chosen(first, *args, **kwargs)

    return dispatch


rms_norm = _by_device(reference.rms_norm)
add_rms_norm = _by_device(reference.add_rms_norm)
rotary = _by_device(reference.rotary)
silu_mul = _by_device(reference.silu_mul)
write_kv = _by_device(reference.write_kv)
paged_attention = _by_device(reference.paged_attention)
uniform_noise = _by_device(reference.uniform_noise)
gumbel_noise = _by_device(reference.gumbel_noise)
