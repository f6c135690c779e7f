"""A `quire serve` of this checkout, for benchmarks."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import psutil

_COMMAND = "import sys; from quire.server.cli.main import main; sys.exit(main())"
_SHUTDOWN_SECONDS = 60.0


@dataclass(frozen=True)
class Server:
    """A running server: its parent process, and its port."""

    process: psutil.Process
    port: int

    @property
    def api_process(self) -> psutil.Process:
        """The first API process."""
        return next(child for child in self.process.children() if child.name() in ("quire-api", "quire-api-0"))


@contextlib.contextmanager
def serving(*arguments: str) -> Iterator[Server]:
    """Run `quire serve` with these arguments on a free port; raises `RuntimeError` with its output if it ends."""
    with subprocess.Popen(
        [sys.executable, "-c", _COMMAND, "serve", "--port", "0", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        try:
            lines = []
            for line in process.stderr:
                lines.append(line)
                if found := re.search(r"serving .*:(\d+)$", line):
                    break
            else:
                raise RuntimeError("the server did not start:\n" + "".join(lines))
            threading.Thread(target=process.stderr.read, daemon=True).start()
            yield Server(psutil.Process(process.pid), int(found[1]))
        finally:
            process.terminate()
            try:
                process.wait(_SHUTDOWN_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
