"""JSON lines of the output that does not come from Python's logging: C++ aborts, panics in Rust, NCCL, gloo.

`wrap` puts a pipe in the place of standard error, which all processes inherit that are started later. A process of its
own, this file as a script, reads the pipe until the last of them has ended, so that nothing is lost, whoever dies.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

_PIPE_BYTES = 1 << 20
"""Size of the pipe: while it has space, lines of several processes do not mix."""
_EXIT_SECONDS = 2.0
"""Time at the exit for the last lines of other processes."""
_GATHER_SECONDS = 0.05
"""Lines that come within this time of each other are one message, such as the lines of a panic."""
_MAX_GATHER_SECONDS = 1.0
_MAX_CHARACTERS = 1 << 16


def wrap() -> None:
    """Make JSON of every line on standard error that is none, from this process and those that it starts."""
    reading, writing = os.pipe()
    with contextlib.suppress(OSError):  # more than the user may have
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    process = subprocess.Popen([sys.executable, "-I", "-S", __file__], stdin=reading, stdout=2)
    own = os.dup(2)
    os.dup2(writing, 2)
    os.close(reading)
    os.close(writing)
    # The lines of this process, which may be the last ones of a container, do not wait for another process.
    sys.stderr = os.fdopen(own, "w", buffering=1, errors="backslashreplace")

    def finish() -> None:
        os.dup2(own, 2)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_EXIT_SECONDS)

    atexit.register(finish)


class _Wrapper:
    """Passes JSON lines on, and gathers the others."""

    def __init__(self) -> None:
        self._rest = b""
        """The begin of a line."""
        self._lines: list[str] = []
        self._begun_at = self._last_at = 0.0
        """Times of the first and the last of `_lines`."""

    def run(self) -> None:
        while True:
            if select.select([0], [], [], self._seconds_left())[0]:
                if not (chunk := os.read(0, 1 << 16)):
                    break
                self._add(chunk)
            if self._lines and self._seconds_left() == 0.0:
                self._flush()
        self._add(b"\n" * bool(self._rest))
        self._flush()

    def _seconds_left(self) -> float | None:
        if not self._lines:
            return None
        until = min(self._last_at + _GATHER_SECONDS, self._begun_at + _MAX_GATHER_SECONDS)
        return max(0.0, until - time.monotonic())

    def _add(self, chunk: bytes) -> None:
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"{"):
                _write(line)
                continue
            if sum(map(len, self._lines)) + len(line) > _MAX_CHARACTERS:
                self._flush()
            self._last_at = time.monotonic()
            self._begun_at = self._begun_at if self._lines else self._last_at
            self._lines.append(line.decode(errors="backslashreplace"))

    def _flush(self) -> None:
        if any(self._lines):
            found = {
                "time": datetime.now().astimezone().isoformat(timespec="milliseconds"),
                "level": "warning",
                "logger": "stderr",
                "message": "\n".join(self._lines),
            }
            _write(json.dumps(found, ensure_ascii=False).encode(errors="backslashreplace"))
        self._lines.clear()


def _write(line: bytes) -> None:
    left = memoryview(line + b"\n")
    while left:
        left = left[os.write(1, left) :]


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends after the others
    Path("/proc/self/comm").write_text("quire-log")
    _Wrapper().run()
