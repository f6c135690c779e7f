"""Launch parameters of matmuls, and the limits of GPUs that they depend on."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton

PROCESSORS = 132
"""Multiprocessors of an H100 and of an H200; close enough for other GPUs."""


class Tile(NamedTuple):
    """The launch parameters of a matmul."""

    rows: int
    features: int
    depth: int
    """Inputs of a step."""
    warps: int
    stages: int


@functools.cache
def is_narrow(device: torch.device) -> bool:
    """Whether a thread block is limited to about 99 KiB of shared memory, as on most GPUs outside data centers.

    False on a CPU, where kernels are compiled ahead of time for an H100.
    """
    if device.type != "cuda":
        return False
    return bool(triton.runtime.driver.active.utils.get_device_properties(device.index)["max_shared_mem"] < 160 << 10)
