"""Compile the C++ kernels for this host once; the library is cached on disk under a hash of all its inputs."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import torch

from quire.kernels import disk, isa

logger = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent
_FLAGS = ("-O3", "-DNDEBUG", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-std=c++20")
_LIBRARY = "quire_cpu"


class CannotBuild(Exception):
    """The library is not cached and cannot be compiled; the message gives the reason."""


def load() -> None:
    """Register `torch.ops.quire`, from the cache or by compiling, which takes a minute. Raises `CannotBuild`.

    Ranks that start together compile once: the others wait for the first one and share its failure.
    """
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        raise CannotBuild("no C++ compiler found (c++ or $CXX); install g++ 12 or newer")
    try:
        built = disk.folder() / _key(compiler) / f"{_LIBRARY}.so"
        if not built.exists():
            built.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            disk.check_owner(built.parent)
            with open(built.parent / "lock", "a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # released when this process ends, however it ends
                if not built.exists():
                    return _compile(built)
        disk.check_owner(built.parent, built)
        torch.ops.load_library(built)  # type: ignore[no-untyped-call]
    except (OSError, RuntimeError, ImportError) as error:
        raise CannotBuild(f"{error}; set QUIRE_KERNEL_CACHE to another folder for the library") from error


def _flags() -> list[str]:
    return [*_FLAGS, isa.compiler_flag()]


def _key(compiler: str) -> str:
    """A hash of the sources, flags, compiler, processor and torch version."""
    digest = hashlib.sha256()
    for source in sorted([*_SOURCES.glob("*.cpp"), *_SOURCES.glob("*.h")]):
        digest.update(source.name.encode() + source.read_bytes())
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    digest.update(repr((_flags(), version, disk.processor(), torch.__version__)).encode())
    return digest.hexdigest()[:16]


def _compile(built: Path) -> None:
    """Compile and load the library; the file is moved into place when it is complete.

    A failure is not retried: a file beside the library keeps the compiler's output.
    """
    failed = built.with_name("failed.txt")
    if failed.exists():
        raise CannotBuild(f"the compiler failed before; see {failed} and remove it to retry")
    import ninja
    from torch.utils import cpp_extension

    started = time.monotonic()
    logger.info("compiling the CPU kernels for this host (once)")
    os.environ["PATH"] = os.pathsep.join((ninja.BIN_DIR, os.environ.get("PATH", os.defpath)))
    os.environ.setdefault("MAX_JOBS", str(len(os.sched_getaffinity(0))))
    with tempfile.TemporaryDirectory(dir=built.parent) as work:
        try:
            cpp_extension.load(
                _LIBRARY,
                [str(source) for source in sorted(_SOURCES.glob("*.cpp"))],
                extra_cflags=_flags(),
                build_directory=work,
                is_python_module=False,
                with_cuda=False,
            )
        except (RuntimeError, subprocess.SubprocessError) as error:
            failed.write_text(f"{error}\n")
            raise CannotBuild(f"the compiler failed (g++ 12 or newer, or clang, is required); see {failed}") from error
        os.replace(Path(work) / built.name, built)
    logger.info("compiled the CPU kernels in %.1f s, cached in %s", time.monotonic() - started, built.parent)
