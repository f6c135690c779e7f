"""Compiles the CPU kernels into the wheel, names the commit and adapts the README. All else is in pyproject.toml.

A wheel gets a library for each instruction set of the machine that the compiler (`CXX`, or c++) compiles for, so with a
cross-compiler a wheel of another machine is built. It needs torch's headers: torch is installed, and the wheel is built
by `pip wheel --no-build-isolation`, as `scripts/wheel` does, or `TORCH_HEADERS` names torch's folder `include`. Without
them or a compiler the wheel has no libraries and works everywhere; the kernels are then compiled at the first start on
a host. `KERNEL_ISAS` names fewer instruction sets, with commas between them. `REVISION` names the commit where there is
no git repository to read it from, as in the build of an image.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import tomllib
from pathlib import Path
from types import ModuleType

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).parent
KERNELS = ROOT / "quire" / "kernels"


def load(path: Path) -> ModuleType:
    """A module of Quire's that needs nothing else, without the package around it."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


version = load(ROOT / "quire" / "engine" / "process" / "version.py")
compiler, isa = load(KERNELS / "cpu" / "compiler.py"), load(KERNELS / "isa.py")
CXX = compiler.find_compiler()
TORCH = importlib.util.find_spec("torch")
HEADERS = os.environ.get("TORCH_HEADERS") or (TORCH and TORCH.origin and Path(TORCH.origin).parent / "include")
BUILDS_KERNELS = bool(CXX and HEADERS)
MACHINE = subprocess.run([CXX, "-dumpmachine"], capture_output=True, text=True).stdout.split("-")[0] if CXX else ""
ISAS = [each for each in isa.ISAS if each.machine == MACHINE]
if BUILDS_KERNELS and (names := os.environ.get("KERNEL_ISAS")):
    chosen, known = names.split(","), [each.name for each in ISAS]
    if not {*chosen} <= {*known}:
        raise SystemExit(f"KERNEL_ISAS is {names!r}; it may name {', '.join(known)}")
    ISAS = [each for each in ISAS if each.name in chosen]


def write_commit(folder: str) -> None:
    """Write the commit into the package in `folder`, if it is known."""
    if commit := os.environ.get("REVISION") or version.commit(ROOT):
        (Path(folder) / version.COMMIT_FILE).write_text(f"{commit}\n")


class BuildPy(build_py):
    """Adds the commit and the libraries to the package, except to an editable installation."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        write_commit(self.build_lib)
        if not BUILDS_KERNELS:
            return
        folder = Path(self.build_lib) / "quire" / "kernels" / "cpu" / compiler.PREBUILT
        folder.mkdir(parents=True, exist_ok=True)
        for each in ISAS:
            print(f"compiling the CPU kernels for {each.name}", flush=True)
            compiler.compile_library(CXX, each.flags, Path(HEADERS), folder / compiler.library_name(each.name))


class Sdist(sdist):
    """Has the commit, too, for the wheels that are built from it."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        write_commit(base_dir)


class BdistWheel(bdist_wheel):
    """Names the oldest C library that the wheel's libraries work with. They need no particular Python."""

    def get_tag(self) -> tuple[str, str, str]:
        libraries = Path(self.bdist_dir or os.curdir).rglob(compiler.library_name("*"))
        needed = {int(minor) for path in libraries for minor in re.findall(rb"GLIBC_2\.(\d+)", path.read_bytes())}
        return ("py3", "none", f"manylinux_2_{max(needed)}_{MACHINE}" if needed else "any")


def index_page(readme: str) -> str:
    """The README for a package index, where relative links lead nowhere. It ends before the chapters for developers."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    for_users = readme.partition("\n## How a request flows")[0]
    return re.sub(r"(?<=\]\()(?!https?:|#)", f"{urls['Homepage']}/blob/main/", for_users)


class PlatformDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return BUILDS_KERNELS


setup(
    distclass=PlatformDistribution,
    cmdclass={"build_py": BuildPy, "sdist": Sdist, "bdist_wheel": BdistWheel},
    long_description=index_page((ROOT / "README.md").read_text()),
    long_description_content_type="text/markdown",
)
