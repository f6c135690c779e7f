"""Load the C++ kernels: the wheel's, or kernels that are compiled for this host once and kept on disk."""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from quire.kernels import disk, isa
from quire.kernels.cpu import compiler

logger = logging.getLogger(__name__)


class CannotBuild(Exception):
    """There is no library for this host, and none can be compiled; the message gives the reason."""


class Operations:
    """`torch.ops.quire`. An operation that is not there yet is in the second library, which its first use loads."""

    def __getattr__(self, name: str) -> Any:
        """Raises `CannotBuild`."""
        if not hasattr(torch.ops.quire, name):
            load()
        operation = getattr(torch.ops.quire, name)
        setattr(self, name, operation)  # the next use calls it directly
        return operation


def load(*, complete: bool = True) -> None:
    """Register `torch.ops.quire`: the wheel's library for this processor, or those that are compiled, once per host.

    If not `complete`, only the first library, which most models need, is compiled and loaded; see `Operations`. Ranks
    that start together compile once: the others wait for the first one and share its failure. Raises `CannotBuild`.
    """
    chosen = isa.chosen()
    prebuilt = compiler.SOURCES / compiler.PREBUILT / compiler.library_name(chosen.name)
    if prebuilt.exists():
        try:
            return torch.ops.load_library(prebuilt)  # type: ignore[no-any-return,no-untyped-call]
        except (OSError, RuntimeError) as error:
            logger.warning("the CPU kernels that come with Quire cannot be loaded: %s", error)
    command = compiler.find_compiler()
    if command is None:
        raise CannotBuild("no C++ compiler found (c++ or $CXX); install g++ 12 or newer")
    folder = disk.folder() / _key(command, chosen)
    first, second = (folder / compiler.library_name(chosen.name, is_second=each) for each in (False, True))
    arguments = command, chosen.flags, Path(torch.__file__).parent / "include"
    try:
        _load(first, chosen, lambda report: compiler.compile_library(*arguments, first, report, compiler.FIRST))
        if complete:
            names = compiler.SECOND
            _load(second, chosen, lambda report: compiler.compile_library(*arguments, second, report, names, first))
    except compiler.CompileError as error:
        raise CannotBuild(str(error)) from error
    except (OSError, RuntimeError) as error:
        raise CannotBuild(f"{error}; set QUIRE_KERNEL_CACHE to another folder for the library") from error


def _load(library: Path, chosen: isa.Isa, compile_library: Callable[[Callable[[int, int], None]], None]) -> None:
    """Load the library from the cache, compiled if it is not there."""
    if not library.exists():
        library.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        disk.check_owner(library.parent)
        compiler.once(library, lambda: _compile(library, chosen.name, compile_library))
    disk.check_owner(library.parent, library)
    torch.ops.load_library(library)  # type: ignore[no-untyped-call]


def _key(command: str, chosen: isa.Isa) -> str:
    """A hash of the sources, the flags, the compiler and, if they depend on it, the processor."""
    digest = hashlib.sha256()
    for source in sorted([*compiler.SOURCES.glob("*.cpp"), *compiler.SOURCES.glob("*.h")]):
        digest.update(source.name.encode() + source.read_bytes())
    version = subprocess.run([command, "--version"], capture_output=True, text=True, check=False).stdout
    processor = sorted(isa.processor_features()) if chosen.name == "native" else []
    digest.update(repr((compiler.flags(chosen.flags), sorted(compiler.SECOND), version, processor)).encode())
    return digest.hexdigest()[:16]


def _compile(library: Path, isa_name: str, compile_library: Callable[[Callable[[int, int], None]], None]) -> None:
    """Compile a library, and log it. Raises `compiler.CompileError`."""
    started = time.monotonic()
    kernels = "other CPU kernels" if library.name == compiler.library_name(isa_name, is_second=True) else "CPU kernels"
    logger.info("compiling the %s for %s (once)", kernels, isa_name)
    # A bar on terminals, else a line for each quarter.
    bar = tqdm(desc=kernels, unit="file", disable="TQDM_DISABLE" in os.environ or None)

    def report(done: int, total: int) -> None:
        bar.total = total
        bar.update()
        if bar.disable and 4 * done // total > 4 * (done - 1) // total:
            logger.info("compiled %d of %d files of the %s", done, total, kernels)

    with bar:
        compile_library(report)
    logger.info("compiled the %s in %.1f s, cached in %s", kernels, time.monotonic() - started, library.parent)
