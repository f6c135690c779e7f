"""Compile the C++ kernels for an instruction set. Used at the first start on a host, and to build the wheel.

Needs a compiler and torch's headers, of which it uses the stable ABI only: a library works with every version of torch
that pyproject.toml admits, and may be built with another one, also for another machine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent
PREBUILT = Path("prebuilt")
"""The folder beside the sources where a wheel has its libraries."""
_OLDEST_TORCH = "0x020b000000000000"  # 2.11
_COMPILE = (
    *("-std=c++20", "-O3", "-DNDEBUG", "-fPIC", "-fvisibility=hidden", "-fopenmp-simd"),
    *("-fno-math-errno", "-fno-trapping-math", f"-DTORCH_TARGET_VERSION={_OLDEST_TORCH}"),
)
_TORCH = "torch_cpu"


class CompileError(Exception):
    """The text is the compiler's output."""


def library_name(isa_name: str) -> str:
    """The file name of the library for the instruction set of this name."""
    return f"quire_cpu-{isa_name}.so"


def flags(isa_flags: Sequence[str]) -> list[str]:
    return [*_COMPILE, *isa_flags]


def compile_library(compiler: str, isa_flags: Sequence[str], torch_headers: Path, library: Path) -> None:
    """Compile all sources to `library`, which appears when it is complete. Raises `CompileError`, and `OSError`.

    `torch_headers`: the folder of torch's that contains `torch/csrc/stable`.
    """
    with tempfile.TemporaryDirectory(dir=library.parent) as name:
        folder = Path(name)

        def compile_source(source: Path) -> Path:
            target = folder / f"{source.stem}.o"
            # No folder of the host that compiles is in the library.
            prefixes = (f"-ffile-prefix-map={path}/=" for path in (SOURCES, torch_headers))
            paths = (*prefixes, "-isystem", str(torch_headers), "-c", str(source))
            _run([compiler, *flags(isa_flags), *paths, "-o", str(target)])
            return target

        # The slowest to compile come first; coded.cpp has many instantiations.
        sources = sorted(SOURCES.glob("*.cpp"), key=lambda source: (source.stem != "coded", -source.stat().st_size))
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            objects = [str(target) for target in pool.map(compile_source, sources)]
        # Stands in for torch's library, which the process has loaded by the time that it loads this one.
        _run([compiler, "-shared", f"-Wl,-soname,lib{_TORCH}.so", "-o", str(folder / f"lib{_TORCH}.so")])
        built = folder / library.name
        link = ("-shared", "-Wl,--no-as-needed", f"-L{folder}", f"-l{_TORCH}", "-Wl,--as-needed")
        _run([compiler, *objects, *link, "-o", str(built)])
        os.replace(built, library)


def find_compiler() -> str | None:
    """The path of the C++ compiler: `CXX`, or c++."""
    return shutil.which(os.environ.get("CXX") or "c++")


def _run(command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise CompileError(done.stdout)
