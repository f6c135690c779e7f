"""A real `quire serve` for tests: started on a free port, always ended."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

_SERVING = re.compile(r"serving .* on (http://\S+)")


@dataclass
class Server:
    """A running server; `lines` is its output so far."""

    process: subprocess.Popen[str]
    url: str = ""
    lines: list[str] = field(default_factory=list)

    def family(self) -> list[psutil.Process]:
        """The server and all processes that it started."""
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]

    def all_named(self, name: str) -> dict[psutil.Process, int]:
        """Its processes with this name, quire-core, quire-rank-0, …, and the number of the parent of each."""
        named: dict[psutil.Process, int] = {}
        for process in self.family():
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                if process.name() == name:
                    named[process] = process.ppid()
        return named

    def named(self, name: str) -> psutil.Process:
        """The one with this name."""
        named = self.all_named(name)
        # What a process starts is a copy of it at first, with its name.
        (process,) = (process for process, parent in named.items() if parent not in {each.pid for each in named})
        return process

    def metrics(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples with these labels."""
        text = httpx.get(f"{self.url}/metrics", timeout=60).text
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == f"quire:{name}" and labels.items() <= sample.labels.items()
        )


def quire(*arguments: str) -> list[str]:
    """The command line of `quire`, however it is installed."""
    return [
        sys.executable,
        "-P",
        "-c",
        "import sys; from quire.server.cli.main import main; sys.exit(main())",
        *arguments,
    ]


@contextlib.contextmanager
def serve(
    *arguments: str,
    program: Sequence[str] | None = None,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """`quire serve` with these arguments, ready to answer; raises AssertionError with its output if it is not.

    `program` is the command line of another installation's `quire`.
    """
    process = subprocess.Popen(
        [*(quire() if program is None else program), "serve", *arguments, "--port", "0"],
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    server = Server(process)
    address: Queue[str | None] = Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            server.lines.append(line)
            if found := _SERVING.search(line):
                address.put(found[1])
        address.put(None)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        url = address.get(timeout=120)
        assert url is not None, "".join(server.lines)
        server.url = url
        yield server
    finally:
        family = server.family() if process.poll() is None else []
        process.terminate()
        try:
            process.wait(30)
        finally:
            for left in psutil.wait_procs(family, timeout=5)[1]:
                left.kill()
            reader.join()
            print("".join(server.lines))  # pytest shows it when the test fails
            assert process.stdout is not None
            process.stdout.close()
