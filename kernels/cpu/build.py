"""Compiling the C++ kernels for this host, once: the library stays in a cache, named by all that it depends on.

The cache is `quire/kernels` in `XDG_CACHE_HOME` (`~/.cache`); `QUIRE_KERNEL_CACHE` names another folder, which may be
filled beforehand (in an image) and be read-only then.
"""

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

logger = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent
_FLAGS = ("-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-std=c++20")
_LIBRARY = "quire_cpu"


class CannotBuild(Exception):
    """There is no library and none can be made; the text says why."""


def load() -> None:
    """Make `torch.ops.quire` there, from the cache or compiled now, which takes some seconds. Raises `CannotBuild`.

    Ranks that start together compile once: the others wait for the first.
    """
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        raise CannotBuild("no C++ compiler was found (c++, or what $CXX names); g++ is one")
    built = _cache() / _key(compiler) / f"{_LIBRARY}.so"
    try:
        if not built.exists():
            built.parent.mkdir(parents=True, exist_ok=True)
            with open(built.parent / "lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # let go of when this process ends, however it ends
                if not built.exists():
                    return _compile(built)
        torch.ops.load_library(built)  # type: ignore[no-untyped-call]
    except OSError as error:
        raise CannotBuild(f"{built}: {error.strerror or error}; QUIRE_KERNEL_CACHE names another folder") from error


def _cache() -> Path:
    named = os.environ.get("QUIRE_KERNEL_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quire" / "kernels"


def _key(compiler: str) -> str:
    """A hash of sources, flags, compiler, processor and torch."""
    digest = hashlib.sha256()
    for source in sorted([*_SOURCES.glob("*.cpp"), *_SOURCES.glob("*.h")]):
        digest.update(source.name.encode() + source.read_bytes())
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    digest.update(repr((_FLAGS, version, _processor(), torch.__version__)).encode())
    return digest.hexdigest()[:16]


def _processor() -> str:
    """The instruction sets of this host, as Linux names them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _compile(built: Path) -> None:
    """Compile and load; the file appears under its name when it is whole."""
    import ninja
    from torch.utils import cpp_extension

    begun = time.monotonic()
    logger.info("compiling the CPU kernels for this host, once")
    os.environ["PATH"] = os.pathsep.join((ninja.BIN_DIR, os.environ.get("PATH", os.defpath)))
    with tempfile.TemporaryDirectory(dir=built.parent) as work:
        try:
            cpp_extension.load(
                _LIBRARY,
                [str(source) for source in sorted(_SOURCES.glob("*.cpp"))],
                extra_cflags=list(_FLAGS),
                build_directory=work,
                is_python_module=False,
                with_cuda=False,
            )
        except (RuntimeError, subprocess.SubprocessError) as error:
            raise CannotBuild(f"the compiler failed: {error}") from error
        os.replace(Path(work) / built.name, built)
    logger.info("compiled the CPU kernels in %.1f s; they stay in %s", time.monotonic() - begun, built.parent)
