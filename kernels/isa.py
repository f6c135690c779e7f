"""The instruction sets that Quire uses: all that the processor has, or fewer where `QUIRE_CPU_ISA` says so.

Every decision that depends on the processor asks here, so that one variable makes a host behave as a lesser one.
"""

from __future__ import annotations

import os
from typing import Literal

import torch

Feature = Literal["avx2", "avx512", "avx512_bf16", "avx512_vnni", "amx"]

_MARCH = {"native": "native", "avx2": "x86-64-v3"}
"""What `QUIRE_CPU_ISA` may say, and what the compiler calls it."""


def chosen() -> str:
    """`QUIRE_CPU_ISA`, "native" where it is not set. Raises `ValueError` where it is none of those, or not here."""
    name = os.environ.get("QUIRE_CPU_ISA") or "native"
    if name not in _MARCH:
        raise ValueError(f"QUIRE_CPU_ISA is {name!r}; it can be {' or '.join(_MARCH)}")
    if name == "avx2" and not torch.cpu._is_avx2_supported():
        raise ValueError("QUIRE_CPU_ISA is avx2, which this processor does not have; unset it")
    return name


def has(feature: Feature) -> bool:
    """Whether the processor has it and it is not to be left out."""
    if chosen() == "avx2":
        return feature == "avx2"
    if feature == "avx2":
        return torch.cpu._is_avx2_supported()
    if feature == "avx512":
        return torch.cpu._is_avx512_supported()
    if feature == "avx512_bf16":
        return torch.cpu._is_avx512_bf16_supported()
    if feature == "avx512_vnni":
        return torch.cpu._is_vnni_supported()
    return torch.cpu._is_amx_tile_supported()


def compiler_flag() -> str:
    """What has the compiler use them."""
    return f"-march={_MARCH[chosen()]}"
