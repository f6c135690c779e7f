"""Compile the C++ kernels for an instruction set. Used at the first start on a host, and to build the wheel.

Needs a compiler and torch's headers, of which it uses the stable ABI only: a library works with every version of torch
that pyproject.toml admits, and may be built with another one, also for another machine.

A wheel has one library with all kernels. A host compiles two: the first one has what most models need; the second one,
with the other kernels, depends on it, and is compiled when a model needs it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

SOURCES = Path(__file__).parent
PREBUILT = Path("prebuilt")
"""The folder beside the sources where a wheel has its libraries."""
SECOND = frozenset({"coded", "compression", "experts", "hyper_connections", "index", "low_rank", "recurrent"})
"""The sources of the second library: quantized checkpoints, adapters, and layers other than attention to all tokens and
MLPs."""
FIRST = frozenset(path.stem for path in SOURCES.glob("*.cpp")) - SECOND
_OLDEST_TORCH = "0x020b000000000000"  # 2.11
_COMPILE = (
    *("-std=c++20", "-O3", "-DNDEBUG", "-fPIC", "-fvisibility=hidden", "-fopenmp-simd"),
    *("-fno-math-errno", "-fno-trapping-math", f"-DTORCH_TARGET_VERSION={_OLDEST_TORCH}"),
)
_TORCH = "torch_cpu"


class CompileError(Exception):
    """The text is the compiler's output, or names the file that has it."""


def library_name(isa_name: str, *, is_second: bool = False) -> str:
    """The file name of the library for the instruction set of this name."""
    return f"quire_cpu-{isa_name}{'-second' * is_second}.so"


def flags(isa_flags: Sequence[str]) -> list[str]:
    return [*_COMPILE, *isa_flags]


def compile_library(
    compiler: str,
    isa_flags: Sequence[str],
    torch_headers: Path,
    library: Path,
    report: Callable[[int, int], None] = lambda done, total: None,
    names: Collection[str] = FIRST | SECOND,
    needed: Path | None = None,
) -> None:
    """Compile sources to `library`, which appears when it is complete. Raises `CompileError`, and `OSError`.

    `torch_headers`: the folder of torch's that contains `torch/csrc/stable`. `report` is called with the number of
    files that are compiled, and of all. `names`: of the sources. `needed`: a library in the same folder that has what
    these sources need of others.
    """
    with tempfile.TemporaryDirectory(dir=library.parent) as name:
        folder = Path(name)
        # No folder of the host that compiles is in the library.
        prefixes = (f"-ffile-prefix-map={path}/=" for path in (SOURCES, torch_headers))
        command = [compiler, *flags(isa_flags), *prefixes, "-isystem", str(torch_headers)]
        # The headers that all sources include take as long to parse as a small source to compile. They are parsed once,
        # for all sources but those that other processors begin meanwhile.
        common = folder / "common.h"
        common.write_text(f'#include "{SOURCES / "vec.h"}"\n')

        def compile_source(source: Path) -> Path:
            target = folder / f"{source.stem}.o"
            included = ["-include", str(common)] if headers.done() else []
            _run([*command, *included, "-c", str(source), "-o", str(target)])
            return target

        # The longest come first: they take the longest to compile.
        sources = sorted((SOURCES / f"{each}.cpp" for each in names), key=lambda source: -source.stat().st_size)
        objects = []
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            headers = pool.submit(_run, [*command, "-x", "c++-header", str(common), "-o", f"{common}.gch"])
            compiled = [pool.submit(compile_source, source) for source in sources]
            try:
                for done in as_completed(compiled):
                    objects.append(done.result())
                    report(len(objects), len(sources))
            except CompileError:
                pool.shutdown(cancel_futures=True)
                raise
        # Stands in for torch's library, which the process has loaded by the time that it loads this one.
        _run([compiler, "-shared", f"-Wl,-soname,lib{_TORCH}.so", "-o", str(folder / f"lib{_TORCH}.so")])
        built = folder / library.name
        link = ["-shared", "-Wl,--no-as-needed", f"-L{folder}", f"-l{_TORCH}", "-Wl,--as-needed"]
        if needed is not None:
            link += [f"-L{needed.parent}", f"-l:{needed.name}", "-Wl,-rpath,$ORIGIN"]
        _run([compiler, *map(str, sorted(objects)), *link, "-o", str(built)])
        os.replace(built, library)


def find_compiler() -> str | None:
    """The path of the C++ compiler: `CXX`, or c++."""
    return shutil.which(os.environ.get("CXX") or "c++")


def once(library: Path, compile_it: Callable[[], None]) -> None:
    """Call `compile_it` if there is no `library` yet. A process that calls this meanwhile waits, then does so if the
    first one has died, and otherwise shares its failure.

    Raises `CompileError`, and `OSError`. A failure is not retried: a file beside the library keeps the compiler's
    output.
    """
    failed = library.with_name("failed.txt")
    with open(library.with_suffix(".lock"), "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when this process ends, however it ends
        if library.exists():
            return
        if failed.exists():
            raise CompileError(f"the compiler failed before; see {failed} and remove it to retry")
        try:
            compile_it()
        except CompileError as error:
            failed.write_text(f"{error}\n")
            raise CompileError(f"the compiler failed (g++ 12 or newer, or clang, is required); see {failed}") from error


def _run(command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise CompileError(done.stdout)
