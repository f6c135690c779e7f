"""The instruction sets that Quire uses: all that the processor has, or fewer if `QUIRE_CPU_ISA` restricts them.

Every decision that depends on the processor is made through this module, so one variable makes a host behave like an
older one.
"""

from __future__ import annotations

import os
from typing import Literal

import torch

Feature = Literal["avx2", "avx512", "avx512_bf16", "avx512_vnni", "amx"]

_MARCH = {"native": "native", "avx2": "x86-64-v3"}
"""Value of `QUIRE_CPU_ISA` → the compiler's `-march`."""


def chosen() -> str:
    """`QUIRE_CPU_ISA`, or "native" if unset. Raises `ValueError` if it is invalid or the processor lacks it."""
    name = os.environ.get("QUIRE_CPU_ISA") or "native"
    if name not in _MARCH:
        raise ValueError(f"QUIRE_CPU_ISA is {name!r}; it must be {' or '.join(_MARCH)}")
    if name == "avx2" and not torch.cpu._is_avx2_supported():
        raise ValueError("QUIRE_CPU_ISA is avx2, which this processor does not have; unset it")
    return name


def has(feature: Feature) -> bool:
    """Whether the processor has the feature and `QUIRE_CPU_ISA` does not disable it."""
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
    """The compiler flag that enables them."""
    return f"-march={_MARCH[chosen()]}"
