"""A C++ compiler that keeps its objects: the same source is compiled once, for all tests and folders.

An object is known by a digest of everything that it depends on: the source after the preprocessor, with every header;
the compiler's version and target; and its options, without paths, which objects do not contain. The program is a copy
of this file, so it needs nothing but Python.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quire" / "objects"
UNUSED_DAYS = 30
"""Objects that no test has asked for since are removed."""


def compiler(command: str, folder: Path = FOLDER, python: str = sys.executable, seen_as: str = "") -> Path:
    """A program that compiles as `command` does, in `folder` beside its objects. `seen_as` and `python` are the paths
    of the folder and of Python where the program runs."""
    folder.mkdir(parents=True, exist_ok=True)
    for kept in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process may remove it
            if kept.stat().st_mtime < time.time() - UNUSED_DAYS * 86400:
                kept.unlink()
    call = f"raise SystemExit(main({command!r}, Path({seen_as or str(folder)!r}), sys.argv[1:]))"
    program = folder / f"kept-{hashlib.sha256((python + call).encode()).hexdigest()[:8]}"
    written = program.with_name(f"{program.name}-{os.getpid()}")
    written.write_text(f"#!{python} -IS\n{Path(__file__).read_text()}\n\n{call}\n")
    written.chmod(0o755)
    written.replace(program)
    return program


def main(command: str, objects: Path, arguments: list[str]) -> int:
    """The exit status of the compiler, which is called only if there is no such object.

    Headers are not precompiled: most often, no object needs them, and sources include them anyway.
    """
    if "c++-header" in arguments:
        return 0
    if "-include" in arguments:
        place = arguments.index("-include")
        del arguments[place : place + 2]
    if "-c" not in arguments or "-march=native" in arguments:
        return subprocess.call([command, *arguments])
    options, source, target = split(arguments)
    text = subprocess.run([command, *options, "-E", "-P", source], stdout=subprocess.PIPE, check=False)
    if text.returncode:
        return text.returncode
    version = subprocess.check_output([command, "--version"]) + subprocess.check_output([command, "-dumpmachine"])
    shown = shlex.join(without_paths(options)).encode()
    digest = hashlib.sha256(b"\0".join((version, shown, text.stdout))).hexdigest()[:32]
    kept = objects / f"{digest}.o"
    with (objects / f"{digest}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another test may be compiling it
        if not kept.exists():
            unfinished = kept.with_suffix(".unfinished")
            if status := subprocess.call([command, *options, "-c", source, "-o", str(unfinished)]):
                return status
            unfinished.replace(kept)
        os.utime(kept)
        shutil.copyfile(kept, target)
    return 0


def split(arguments: list[str]) -> tuple[list[str], str, str]:
    """The options, the source and the object, of the form in which the kernels are compiled."""
    rest = arguments[:]
    values = []
    for name in ("-c", "-o"):
        place = rest.index(name)
        values.append(rest[place + 1])
        del rest[place : place + 2]
    return rest, values[0], values[1]


def without_paths(options: list[str]) -> list[str]:
    """The options that objects depend on: the headers that a folder has are in the source after the preprocessor."""
    return [
        option
        for before, option in zip(["", *options], options, strict=False)
        if "-isystem" not in (before, option) and not option.startswith("-ffile-prefix-map=")
    ]
