"""Runs a task that needs torch in a process of its own, for commands that do not import it."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire.engine.protocol.errors import ConfigError


def part_of(out: Path) -> Path:
    """The name of a folder until it is complete."""
    return out.with_name(f"{out.name}.part")


def run(module: str, request: object, out: Path) -> None:
    """Pass a request to the module, which calls `main`, and let it show a progress bar. Raises `ConfigError` if it
    fails. Nothing of `out` is left then, even if its process was killed."""
    is_own = not os.path.exists(part_of(out))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-P", "-m", module]  # -P: import nothing from the current folder
    process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
            pickle.dump(request, stdin)
        with process.stdout as stdout:
            output = stdout.read()
        process.wait()
    except BaseException:
        process.terminate()  # and let it remove what it has written
        process.wait()
        raise
    finally:
        signal.signal(signal.SIGTERM, previous)
        if process.returncode and is_own:
            shutil.rmtree(part_of(out), ignore_errors=True)
    if output:
        raise ConfigError(output.decode())
    if process.returncode:
        raise ConfigError(f"{out}: not written, as the process that writes it died ({process.returncode})")


def main(handle: Callable[[Any], None]) -> None:
    """Handle the request on standard input; an error of the user's is printed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which then terminates this process
    signal.signal(signal.SIGTERM, _end)
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    request = pickle.load(sys.stdin.buffer)
    try:
        handle(request)
    except ConfigError as error:
        print(error, end="", file=output, flush=True)


def _end(*_: object) -> None:
    """Leave no folder behind."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(143)
