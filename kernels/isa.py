"""The instruction sets that Quire uses: all that the processor has, or fewer if `QUIRE_CPU_ISA` restricts them.

Every decision that depends on the processor is made through this module, so one variable makes a host behave like an
older one.
"""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path
from typing import Literal

import torch

Feature = Literal["avx2", "avx_vnni", "avx512", "avx512_bf16", "avx512_vnni", "amx"]

_MARCH = {"native": "native", "avx2": "x86-64-v3", "avx_vnni": "x86-64-v3 -mavxvnni"}
"""Value of `QUIRE_CPU_ISA` → the compiler's `-march`, and a further flag."""


def chosen() -> str:
    """`QUIRE_CPU_ISA`, or "native" if unset. Raises `ValueError` if it is invalid or the processor lacks it."""
    name = os.environ.get("QUIRE_CPU_ISA") or "native"
    if name not in _MARCH:
        raise ValueError(f"QUIRE_CPU_ISA is {name!r}; it must be {', '.join(_MARCH)}")
    if name in ("avx2", "avx_vnni") and not _is_supported(name):
        raise ValueError(f"QUIRE_CPU_ISA is {name}, which this processor does not have; unset it")
    return name


def has(feature: Feature) -> bool:
    """Whether the processor has the feature and `QUIRE_CPU_ISA` does not disable it."""
    name = chosen()
    if name != "native":
        return feature in ("avx2", name)
    return _is_supported(feature)


@functools.cache
def _cpu_flags() -> frozenset[str]:
    """The processor's flags as Linux names them; torch's own list is not in all versions of torch."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    found = re.search(r"^flags\s*: (.*)$", text, re.MULTILINE)
    return frozenset(found[1].split()) if found else frozenset()


def _is_supported(feature: str) -> bool:
    if feature == "avx2":
        return torch.cpu._is_avx2_supported()
    if feature == "avx_vnni":
        return "avx_vnni" in _cpu_flags()
    if feature == "avx512":
        return torch.cpu._is_avx512_supported()
    if feature == "avx512_bf16":
        return torch.cpu._is_avx512_bf16_supported()
    if feature == "avx512_vnni":
        return torch.cpu._is_vnni_supported()
    return torch.cpu._is_amx_tile_supported()


def compiler_flag() -> str:
    """The compiler flag, or flags separated by spaces, that enable them."""
    return f"-march={_MARCH[chosen()]}"
