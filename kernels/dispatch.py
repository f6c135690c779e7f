"""Which implementation of an operation runs: that of the platform of its first argument, else the reference."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Concatenate, ParamSpec, TypeVar

from torch import Tensor

from quire.kernels import cpu

logger = logging.getLogger(__name__)

PLATFORMS: dict[str, ModuleType] = {}
"""Device type → the module whose functions replace the reference's of the same name."""

P = ParamSpec("P")
R = TypeVar("R")


def by_device(operation: Callable[Concatenate[Tensor, P], R]) -> Callable[Concatenate[Tensor, P], R]:
    """The reference's `operation`, replaced where the platform has a better one."""

    @functools.wraps(operation)
    def dispatch(first: Tensor, /, *args: P.args, **kwargs: P.kwargs) -> R:
        platform = PLATFORMS.get(first.device.type)
        chosen: Callable[Concatenate[Tensor, P], R] = getattr(platform, operation.__name__, operation)
        return chosen(first, *args, **kwargs)

    return dispatch


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
            PLATFORMS["cpu"] = cpu

    if device_type != "cpu" or "cpu" in PLATFORMS:
        return lambda: None
    thread = threading.Thread(target=work, name="prepare-kernels")
    thread.start()
    return thread.join
