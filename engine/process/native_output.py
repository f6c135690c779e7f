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
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

_PIPE_BYTES = 1 << 20
"""Size of the pipe: while it has space, lines of several processes do not mix."""
_EXIT_SECONDS = 2.0
"""Time at the exit for the last lines of other processes."""
_GATHER_SECONDS = 0.05
"""Text that comes within this time of the text before it is part of its message, such as the lines of a panic."""
_MAX_GATHER_SECONDS = 1.0
_MAX_CHARACTERS = 1 << 16
"""Maximum length of a message, give or take one read."""
_READ_BYTES = 1 << 16
_RECORD = b'{"time":'
"""The begin of the records of `log`."""
_MAX_RECORD_BYTES = 1 << 24
"""Maximum length of a record, such as one with a prompt (`--log-prompts`)."""
_decoder = json.JSONDecoder(parse_constant=int)  # which raises for NaN and Infinity: they are not JSON


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


class Wrapper:
    """Passes records on to `write`, each without its newline, and makes records of the text around them.

    Writers share the pipe, so a record may stand in the middle of a line that another process writes in pieces. A line
    is held until it ends, has been quiet or is too long. Times are in seconds, of any clock.
    """

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self._write = write
        self._line = bytearray()
        """The begin of a line."""
        self._text = bytearray()
        """The text before it, without records."""
        self._begun_at = self._last_at = 0.0
        """Times at which the first and the last bytes of both came."""

    def add(self, chunk: bytes, now: float) -> None:
        """Add bytes read from the pipe."""
        if not self._text and not self._line:
            self._begun_at = now
        for number, part in enumerate(chunk.split(b"\n")):
            if number:
                self._end_line(b"\n", now)
            self._line += part
            if len(self._line) > (_MAX_RECORD_BYTES if self._has_record() else _MAX_CHARACTERS):
                self._end_line(b"", now)
        if self._line:
            self._last_at = now

    def seconds_left(self, now: float) -> float | None:
        """Return the time until `flush` is due, unless more comes before; None if nothing is held."""
        if not self._text and not self._line:
            return None
        until = min(self._last_at + _GATHER_SECONDS, self._begun_at + _MAX_GATHER_SECONDS)
        if self._has_record():  # its writer waits for space in the pipe
            until = self._last_at + _MAX_GATHER_SECONDS
        return max(0.0, until - now)

    def flush(self) -> None:
        """Write everything that is held."""
        self._end_line(b"", self._last_at)
        self._flush_text()

    def _has_record(self) -> bool:
        return self._line.find(_RECORD, 0, _MAX_CHARACTERS) >= 0

    def _end_line(self, newline: bytes, now: float) -> None:
        records, text = _split((self._line + newline).decode(errors="backslashreplace"))
        self._line.clear()
        for record in records:
            self._write(record.encode())
        if added := text.encode():
            if len(self._text) + len(added) > _MAX_CHARACTERS:
                self._flush_text()
            self._text += added
            self._last_at = now

    def _flush_text(self) -> None:
        if message := self._text.decode().strip("\n"):
            found = {
                "time": datetime.now().astimezone().isoformat(timespec="milliseconds"),
                "level": "warning",
                "logger": "stderr",
                "message": message,
            }
            self._write(json.dumps(found, ensure_ascii=False).encode())
        self._text.clear()


def _split(line: str) -> tuple[list[str], str]:
    """Return the records in a line, and the text around them. Any JSON object that is the whole line is a record."""
    records, text, at = list[str](), "", 0
    with contextlib.suppress(RecursionError):  # far too deep for a record
        if line.startswith("{") and _end_of_object(line, 0) == len(line.rstrip()):
            return [line.rstrip()], ""
        while (begin := line.find(_RECORD.decode(), at)) >= 0:
            if end := _end_of_object(line, begin):
                text += line[at:begin]
                records.append(line[begin:end])
            else:
                end = begin + 1
                text += line[at:end]
            at = end
    rest = line[at:]
    return records, text if records and rest.isspace() else text + rest


def _end_of_object(line: str, begin: int) -> int | None:
    try:
        return _decoder.raw_decode(line, begin)[1]
    except ValueError:
        return None


def _run() -> None:
    wrapper = Wrapper(_write)
    while True:
        if select.select([0], [], [], wrapper.seconds_left(time.monotonic()))[0]:
            if not (chunk := os.read(0, _READ_BYTES)):
                break
            wrapper.add(chunk, time.monotonic())
        if wrapper.seconds_left(time.monotonic()) == 0.0:
            wrapper.flush()
    wrapper.flush()


def _write(line: bytes) -> None:
    left = memoryview(line + b"\n")
    while left:
        left = left[os.write(1, left) :]


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends after the others
    Path("/proc/self/comm").write_text("quire-log")
    _run()
