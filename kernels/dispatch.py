"""Which implementation of an operation runs: that of the platform of its first argument, else the reference."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from quire.kernels import backends, cpu, reference
from quire.kernels.backends import AttentionNeeds

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


def prepare(
    device: torch.device | str, dtype: torch.dtype = torch.float32, needs: AttentionNeeds | None = None
) -> Callable[[], None]:
    """Make the device's kernels ready, in the background; call what is returned to wait for them.

    Where they cannot be compiled, or a GPU's do not what the reference does with numbers of `dtype` and the model's own
    `needs`, a warning says so, and the reference serves. What is returned raises `backends.Unavailable` where a
    backend that the needs name cannot serve, and whatever else went wrong.
    """
    device, needs = torch.device(device), needs or AttentionNeeds()
    if device.type == "cuda":
        device = torch.empty(0, device=device).device  # with its number
    load = _load_cpu if device.type == "cpu" else functools.partial(_load_triton, dtype=dtype)
    failures: list[Exception] = []

    def run() -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # a thread begins with the first one, whatever the process has chosen
            load(device, needs)
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=run, name="prepare-kernels")
    thread.start()

    def wait() -> None:
        thread.join()
        if failures:
            raise failures[0]

    return wait


def _load_cpu(device: torch.device, needs: AttentionNeeds) -> None:
    _choose(device, torch.float32, needs)
    if "cpu" in PLATFORMS:
        return
    try:
        cpu.load()
    except cpu.CannotBuild as error:
        logger.warning("the CPU kernels cannot be compiled, a slower reference serves: %s", error)
    else:
        PLATFORMS["cpu"] = cpu


def _load_triton(device: torch.device, needs: AttentionNeeds, dtype: torch.dtype) -> None:
    problem = ""
    try:
        from quire.kernels.triton import check
    except ImportError as error:
        problem = f"Triton cannot be imported: {error}"
        logger.warning("the GPU kernels need Triton, a slower reference serves: %s", error)
    else:
        PLATFORMS[device.type], problems = check.passing(device, dtype, needs)
        problem = problems.get("paged_attention", "")
    _choose(device, dtype, needs, problem)


def _choose(device: torch.device, dtype: torch.dtype, needs: AttentionNeeds, problem: str = "") -> None:
    chosen = backends.choose(device, dtype, needs, _paged_attention, problem)
    backends.CHOSEN.pop(device.type, None)
    if chosen is not None:
        backends.CHOSEN[device.type] = chosen


def paged_attention(query: Tensor, *batch: Any, host: backends.HostRows | None = None, **options: Any) -> Tensor:
    """`reference.paged_attention` by whom `prepare` chose.

    With `host`, the numbers of the batch on the host, a backend may serve that plans a step there. Its plans lie in
    `host.plans`, so that it is a step's own, and every layer of the step gets the same.
    """
    chosen = backends.CHOSEN.get(query.device.type)
    out = chosen(query, *batch, host=host, **options) if chosen is not None else None
    return _paged_attention(query, *batch, **options) if out is None else out


_paged_attention = by_device(reference.paged_attention)
