"""Versions of Python and of packages, against what Quire's metadata allow."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable, Sequence

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from quire.engine.doctor.check import Check, fault, not_applicable, ok, warning
from quire.engine.process.version import DISTRIBUTION

COMPARED = ("python", DISTRIBUTION, "torch")
"""Packages whose versions must be the same on all hosts (`quire.engine.cluster.handshake.versions`)."""
_REPORTED = ("transformers", "triton", "flashinfer-python", "ray", "numpy")
"""Other packages whose versions are compared, and may differ."""
_EXTRAS = ("flashinfer", "ray")
"""Packages that servers use if they are installed."""


def installed(package: str) -> str | None:
    """The version of a package; None: it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def collect() -> dict[str, str]:
    """The versions to compare with other hosts'."""
    found = {name: installed(name) for name in (*COMPARED[1:], *_REPORTED)}
    return {"python": platform.python_version()} | {name: version or "none" for name, version in found.items()}


def python(version: str, allowed: str | None) -> Check:
    """`allowed` is a version specifier."""
    if not allowed:
        return not_applicable("python", f"{version}; Quire is not installed as a package")
    if version not in SpecifierSet(allowed):
        return fault("python", f"{version}, and Quire needs {allowed}", "install a newer Python")
    return ok("python", f"{version} (allowed: {allowed})")


def packages(requirements: Sequence[str] | None, version_of: Callable[[str], str | None] = installed) -> list[Check]:
    """`requirements` come from Quire's metadata. Packages of extras are checked if they are installed."""
    if not requirements:
        return [not_applicable("packages", "Quire is not installed as a package")]
    right, wrong = [], list[Check]()
    for requirement in map(Requirement, requirements):
        extras = [
            extra
            for extra in ("", *_EXTRAS)
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra})
        ]
        if not extras:
            continue
        name, needed, found = requirement.name, str(requirement.specifier), version_of(requirement.name)
        is_optional = "" not in extras
        remedy = f"pip install '{name}{needed}'"
        if found is None:
            wrong += [] if is_optional else [fault(name, f"not installed; {needed or 'any version'} is needed", remedy)]
        elif not requirement.specifier.contains(found, prereleases=True):
            report = warning if is_optional else fault
            wrong.append(report(name, f"{found}, and Quire needs {needed}", remedy))
        else:
            right.append(f"{name} {found}")
    return [*wrong, ok("packages", ", ".join(right))]


def cuda(torch_cuda: str | None, driver_cuda: int | None, driver: str) -> Check:
    """The CUDA version that torch was built for, and the newest one (as 12040) that the driver supports."""
    if driver_cuda is None:
        return not_applicable("CUDA", "no NVIDIA driver")
    newest = f"{driver_cuda // 1000}.{driver_cuda % 1000 // 10}"
    if torch_cuda is None:
        remedy = f"install torch from PyTorch's index for CUDA {newest} or older, or choose --device cpu"
        return fault("CUDA", "there is an NVIDIA driver, and torch is a build without CUDA", remedy)
    major, minor = map(int, torch_cuda.split(".")[:2])
    text = f"torch is built for CUDA {torch_cuda}, driver {driver} supports {newest}"
    if major > driver_cuda // 1000:
        return fault("CUDA", text, f"install a driver for CUDA {major}.0 or newer, or torch for CUDA {newest}")
    if (major, minor) > (driver_cuda // 1000, driver_cuda % 1000 // 10):
        return warning("CUDA", text, "install a newer driver: kernels that are compiled at run time may need it")
    return ok("CUDA", text)
