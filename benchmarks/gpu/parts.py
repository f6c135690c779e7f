"""The parts in order with their time limits, and running a part in its own process."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from gpu.lab import Lab
from gpu.records import Check, Record, from_json, to_json

_POLL = 0.05
_SETTLE = 15.0
"""Seconds that a part waits for the memory of the previous one to be freed."""
_TAIL = 1500


@dataclass(frozen=True)
class Part:
    """A part; `function` is `module:name` in this package, and yields records."""

    name: str
    function: str
    seconds: float
    """The time it takes on an H100, including process startup."""
    limit: float
    """The limit after which it is terminated."""
    by_default: bool = True
    """Whether it runs by default within the budget; else it only runs if requested, outside the budget."""


PARTS = (
    Part("device", "device:identify", 6, 30),
    Part("ceilings", "device:ceilings", 10, 45),
    Part("tokens", "tokens:check", 55, 90),
    Part("kernels", "kernel_checks:check", 80, 180),
    Part("attention", "kernel_rows:attention", 10, 40),
    Part("sampler", "kernel_rows:sampler", 10, 40),
    Part("quantized", "kernel_rows:quantized", 12, 40),
    Part("model", "model:measure", 45, 110),
    Part("towers", "towers:check", 40, 90),
    Part("offline", "offline:measure", 60, 120),
    Part("server", "serving:measure", 100, 150),
    Part("ranks", "tokens:ranks", 40, 90),
    Part("transformers", "offline:transformers", 120, 180),
    Part("memory", "memory:check", 150, 900, by_default=False),
)
"""About 588 s of 590. A slower machine, or one without compiled kernels, skips the last parts."""


@dataclass
class Outcome:
    """The outcome of a part."""

    name: str
    seconds: float = 0.0
    error: str | None = None
    """None if it ran to the end."""
    records: list[Record] = field(default_factory=list)

    @property
    def is_right(self) -> bool:
        """Whether it ran to the end and all checks passed."""
        return self.error is None and all(record.ok for record in self.records if isinstance(record, Check))


def run(part: Part, lab: Lab, limit: float, tell: Callable[[Record], None]) -> Outcome:
    """Run the part in its own process for at most `limit` seconds; reports records as they arrive."""
    begun = time.monotonic()
    lab.deadline = begun + limit  # the clock is the same in all processes
    outcome = Outcome(part.name)
    found, log = lab.scratch / f"{part.name}.jsonl", lab.scratch / f"{part.name}.log"
    found.touch()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "gpu.parts", part.function, str(found)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(lab.to_json().encode())
            process.stdin.close()
        with found.open() as lines:
            while process.poll() is None and time.monotonic() < lab.deadline:
                _take(lines, outcome, tell)
                time.sleep(_POLL)
            has_ended = process.poll() is not None
            _take(lines, outcome, tell)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    outcome.seconds = time.monotonic() - begun
    tail = log.read_text(errors="replace")[-_TAIL:].strip()
    if not has_ended:
        outcome.error = f"terminated after {limit:.0f} s; the end of its log:\n{tail}"
    elif process.returncode:
        outcome.error = f"exit code {process.returncode}; the end of its log:\n{tail}"
    return outcome


def _take(lines: Iterator[str], outcome: Outcome, tell: Callable[[Record], None]) -> None:
    """The records written since; lines are written atomically."""
    for line in lines:
        record = from_json(json.loads(line))
        outcome.records.append(record)
        tell(record)


def main() -> None:
    """In the part's process: `python -m gpu.parts module:function FILE`, with the lab on standard input."""
    where, path = sys.argv[1:]
    lab = Lab.from_json(sys.stdin.read())
    module, _, name = where.partition(":")
    try:
        _settle(lab)
        function: Callable[[Lab], Iterator[Record]] = getattr(importlib.import_module(f"gpu.{module}"), name)
        with Path(path).open("a", buffering=1) as file:
            for record in function(lab):
                file.write(json.dumps(to_json(record)) + "\n")
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # despite threads and children that a broken part left
    os._exit(0)


def _settle(lab: Lab) -> None:
    """Wait until the previous part's device memory is free."""
    wanted = lab.data.get("free memory")
    if lab.device != "cuda" or wanted is None:
        return
    from quire.engine.config import devices

    until = time.monotonic() + _SETTLE
    while devices.find("cuda", (1,)).memory < 0.98 * wanted and time.monotonic() < until:
        time.sleep(_POLL)


if __name__ == "__main__":
    main()
