"""Which implementation of an operation runs: that of the platform of its first argument, else the reference."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from quire.kernels import cpu

logger = logging.getLogger(__name__)

PLATFORMS: dict[str, object] = {}
"""Device type → what has the functions that replace the reference's of the same name."""

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


def prepare(device: torch.device | str, dtype: torch.dtype = torch.float32) -> Callable[[], None]:
    """Make the device's kernels ready, in the background; call what is returned to wait for them.

    Where they cannot be compiled, or a GPU's do not what the reference does with numbers of `dtype`, a warning says
    so, and the reference serves.
    """
    device = torch.device(device)
    if device.type in PLATFORMS:
        return lambda: None
    load = _load_cpu if device.type == "cpu" else functools.partial(_load_triton, device, dtype)
    thread = threading.Thread(target=load, name="prepare-kernels")
    thread.start()
    return thread.join


def _load_cpu() -> None:
    try:
        cpu.load()
    except cpu.CannotBuild as error:
        logger.warning("the CPU kernels cannot be compiled, a slower reference serves: %s", error)
    else:
        PLATFORMS["cpu"] = cpu


def _load_triton(device: torch.device, dtype: torch.dtype) -> None:
    try:
        from quire.kernels.triton import check
    except ImportError as error:
        logger.warning("the GPU kernels need Triton, a slower reference serves: %s", error)
    else:
        PLATFORMS[device.type] = check.passing(device, dtype)
