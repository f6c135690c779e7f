"""Load the C++ kernels: the wheel's, or kernels that are compiled for this host once and kept on disk."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import subprocess
import time
from pathlib import Path

import torch

from quire.kernels import disk, isa
from quire.kernels.cpu import compiler

logger = logging.getLogger(__name__)


class CannotBuild(Exception):
    """There is no library for this host, and none can be compiled; the message gives the reason."""


def load() -> None:
    """Register `torch.ops.quire`: the wheel's library for this processor, or one that is compiled, once per host.

    Raises `CannotBuild`. Ranks that start together compile once: the others wait for the first one and share its
    failure.
    """
    chosen = isa.chosen()
    prebuilt = compiler.SOURCES / compiler.PREBUILT / compiler.library_name(chosen.name)
    if prebuilt.exists():
        try:
            return torch.ops.load_library(prebuilt)  # type: ignore[no-any-return,no-untyped-call]
        except (OSError, RuntimeError) as error:
            logger.warning("the CPU kernels that come with Quire cannot be loaded: %s", error)
    try:
        torch.ops.load_library(_compiled(chosen))  # type: ignore[no-untyped-call]
    except (OSError, RuntimeError) as error:
        raise CannotBuild(f"{error}; set QUIRE_KERNEL_CACHE to another folder for the library") from error


def _compiled(chosen: isa.Isa) -> Path:
    """The library in the cache, compiled if it is not there."""
    command = compiler.find_compiler()
    if command is None:
        raise CannotBuild("no C++ compiler found (c++ or $CXX); install g++ 12 or newer")
    built = disk.folder() / _key(command, chosen) / compiler.library_name(chosen.name)
    if not built.exists():
        built.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        disk.check_owner(built.parent)
        with open(built.parent / "lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released when this process ends, however it ends
            if not built.exists():
                _compile(command, chosen, built)
    disk.check_owner(built.parent, built)
    return built


def _key(command: str, chosen: isa.Isa) -> str:
    """A hash of the sources, the flags, the compiler and, if they depend on it, the processor."""
    digest = hashlib.sha256()
    for source in sorted([*compiler.SOURCES.glob("*.cpp"), *compiler.SOURCES.glob("*.h")]):
        digest.update(source.name.encode() + source.read_bytes())
    version = subprocess.run([command, "--version"], capture_output=True, text=True, check=False).stdout
    processor = sorted(isa.processor_features()) if chosen.name == "native" else []
    digest.update(repr((compiler.flags(chosen.flags), version, processor)).encode())
    return digest.hexdigest()[:16]


def _compile(command: str, chosen: isa.Isa, built: Path) -> None:
    """Compile the library. A failure is not retried: a file beside the library keeps the compiler's output."""
    failed = built.with_name("failed.txt")
    if failed.exists():
        raise CannotBuild(f"the compiler failed before; see {failed} and remove it to retry")
    started = time.monotonic()
    logger.info("compiling the CPU kernels for %s (once)", chosen.name)
    try:
        compiler.compile_library(command, chosen.flags, Path(torch.__file__).parent / "include", built)
    except compiler.CompileError as error:
        failed.write_text(f"{error}\n")
        raise CannotBuild(f"the compiler failed (g++ 12 or newer, or clang, is required); see {failed}") from error
    logger.info("compiled the CPU kernels in %.1f s, cached in %s", time.monotonic() - started, built.parent)
