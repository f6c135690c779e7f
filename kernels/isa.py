"""The instruction sets that the CPU kernels are built for, and the one that this process uses.

A process uses the most capable one that its processor has, or the one that `QUIRE_CPU_ISA` names. Every decision that
depends on the processor is made through this module, so one variable makes a host behave like an older one. Nothing
here needs torch: the build of the wheel uses it, too.
"""

from __future__ import annotations

import functools
import os
import platform
from pathlib import Path
from typing import Literal, NamedTuple

Feature = Literal["avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "asimddp"]
"""The processor features that kernels are chosen by, as Linux names them in /proc/cpuinfo."""


class Isa(NamedTuple):
    """An instruction set for which there is a build of the CPU kernels."""

    name: str
    machine: str
    """As `platform.machine()` names it."""
    requires: frozenset[str]
    """In the words of /proc/cpuinfo."""
    flags: tuple[str, ...]
    """The compiler's flags."""


_V3 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_AVX512 = ("-march=x86-64-v4", "-mtune=icelake-server", "-mprefer-vector-width=512")
ISAS = (
    Isa(
        "avx512_bf16",
        "x86_64",
        _V4 | {"avx512_vnni", "avx512_bf16"},
        (*_AVX512, "-mavx512vnni", "-mavx512bf16"),
    ),
    Isa(
        "avx512_vnni",
        "x86_64",
        _V4 | {"avx512_vnni"},
        (*_AVX512, "-mavx512vnni"),
    ),
    Isa("avx512", "x86_64", _V4, _AVX512),
    Isa("avx_vnni", "x86_64", _V3 | {"avx_vnni"}, ("-march=x86-64-v3", "-mavxvnni")),
    Isa("avx2", "x86_64", _V3, ("-march=x86-64-v3",)),
    Isa("neon_dotprod", "aarch64", frozenset({"asimddp"}), ("-march=armv8.2-a+dotprod",)),
)
"""The most capable first. AMX has no entry: no kernel of ours uses it, oneDNN's do."""
_VARIABLE = "QUIRE_CPU_ISA"


@functools.cache
def processor_features() -> frozenset[str]:
    """The features that this host's processor and kernel support, in the words of /proc/cpuinfo; empty where there is
    none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith(("flags", "Features"))), "").split())


def chosen() -> Isa:
    """The instruction set that this process uses; "native" if the processor fits none that is listed.

    Raises `ValueError` if `QUIRE_CPU_ISA` names one that is unknown or that the processor does not have.
    """
    here, features = platform.machine(), processor_features()
    fitting = {isa.name: isa for isa in ISAS if isa.machine == here and isa.requires <= features}
    name = os.environ.get(_VARIABLE)
    if not name:
        return next(iter(fitting.values()), Isa("native", here, frozenset(), ("-march=native",)))
    if name not in (known := [isa.name for isa in ISAS]):
        raise ValueError(f"{_VARIABLE} is {name!r}; it must be one of {', '.join(known)}")
    if name not in fitting:
        raise ValueError(f"{_VARIABLE} is {name}, which this processor does not have; unset it")
    return fitting[name]


def has(feature: Feature) -> bool:
    """Whether the processor has the feature and `QUIRE_CPU_ISA` does not disable it."""
    if feature == "amx_tile":
        return not os.environ.get(_VARIABLE) and feature in processor_features()
    return feature in chosen().requires
