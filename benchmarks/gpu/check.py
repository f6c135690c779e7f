"""Check an NVIDIA machine: is everything correct, and how close does performance come to the limits of the card?

It needs no network and no model files. Each part runs in its own process; a part that fails, crashes or hangs is
reported, and the others continue.

    scripts/gpu_check                                  # under 10 minutes
    scripts/gpu_check --quick --only kernels model     # some parts, with less work
    scripts/gpu_check --only memory                    # 10,000 requests in 95 % of the memory, outside the budget
    scripts/gpu_check --json FILE --write docs/benchmarks/gpu.md
    scripts/gpu_check --load FILE --write docs/benchmarks/gpu.md # measure nothing, write the page again
    scripts/gpu_check --device cpu --tiny              # a dry run at toy sizes, without a GPU

Exit code 0: all parts ran, all checks passed and all targets are reached; 1: a part or a check failed; 3: a target is
not reached.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import Machine

from gpu import parts, report
from gpu.lab import Lab
from gpu.parts import PARTS, Outcome
from gpu.records import Note, Record, Row

_ROOT = Path(__file__).parents[2]
_LEAST = 0.5
"""The share of a part's seconds that must be left to start it."""
_FAILED, _MISSED = 1, 3


class Run:
    """Run all requested parts in turn within `budget` seconds."""

    def __init__(self, lab: Lab, wanted: list[str], budget: float) -> None:
        self.lab, self.budget = lab, budget
        self.parts = [part for part in PARTS if part.name in wanted]
        self.outcomes: list[Outcome] = []

    def __call__(self) -> list[Outcome]:
        begun = time.monotonic()
        for part in self.parts:
            left = self.budget - (time.monotonic() - begun)
            if part.by_default and left < _LEAST * part.seconds and not self.lab.tiny:
                error = f"not started: it needs {part.seconds:.0f} s, {max(left, 0.0):.0f} s left (--budget)"
                outcome = Outcome(part.name, error=error)
            else:
                say(f"\n{part.name}")
                limit = min(part.limit, left) if part.by_default else part.limit
                outcome = parts.run(part, self.lab, limit, self._take)
            self.outcomes.append(outcome)
            shown = report.indented(outcome.error) if outcome.error is not None else ""
            say(f"  {part.name}: {outcome.seconds:.1f} s" + (f", FAILED\n{shown}" if shown else ""))
        return self.outcomes

    def _take(self, record: Record) -> None:
        """Print a record, and keep what later parts need."""
        say(f"  {report.line(record, judged=not self.lab.tiny)}")
        if isinstance(record, Row):
            self.lab.values[record.key] = record.value
        if isinstance(record, Note) and record.data:
            if "machine" in record.data:
                self.lab.machine = Machine(**record.data["machine"])
            else:
                self.lab.data |= record.data


def say(text: str) -> None:
    print(text, flush=True)


def verdict(outcomes: list[Outcome], lab: Lab, *, is_whole: bool) -> int:
    """Print the result and return the exit code."""
    wrong = [outcome.name for outcome in outcomes if not outcome.is_right]
    if wrong:
        say(f"FAILED: {', '.join(wrong)}")
        return _FAILED
    missed = [] if lab.tiny else [row.key for row in report.rows_of(outcomes) if not row.reached]
    missed += report.missing(outcomes) if is_whole and not lab.tiny else []
    if missed:
        say(f"all ran and is right; aims not reached: {', '.join(missed)}")
        return _MISSED
    say("all passed" + (" (aims are not judged at toy sizes)" if lab.tiny else ""))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [part.name for part in PARTS]
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, to test that every part works")
    parser.add_argument("--quick", action="store_true", help="fewer steps, fewer requests")
    parser.add_argument("--only", nargs="+", choices=names, metavar="PART", help=f"of {', '.join(names)}")
    parser.add_argument(
        "--budget", type=float, default=590, metavar="SECONDS", help="seconds for all parts (default: 590)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    parser.add_argument(
        "--write", type=Path, metavar="PAGE.md", help="write the figures between the two markers of this page"
    )
    parser.add_argument(
        "--load", type=Path, metavar="FILE", help="load the figures from this file instead of measuring"
    )
    options = parser.parse_args()
    if options.device == "cpu" and not options.tiny and not options.load:
        parser.error("--device cpu needs --tiny: the default sizes are for a GPU")
    if options.load:
        results = json.loads(options.load.read_text())
        outcomes = report.from_results(results)
        say(report.text_table(outcomes, judged=not results["tiny"], is_whole=True))
        code = 0
    else:
        if options.device == "cuda":
            _require_card(parser)
        results, code = _measure(options)
    if options.write is not None:
        report.write(options.write, results)
    return code


def _require_card(parser: argparse.ArgumentParser) -> None:
    from quire.engine.config import devices

    if not devices.count_gpus():
        parser.error("no NVIDIA GPU is visible; use --device cpu --tiny for a dry run without one")


def _measure(options: argparse.Namespace) -> tuple[dict[str, Any], int]:
    begun, is_whole = time.monotonic(), options.only is None
    facts = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(),
        "command": shlex.join(["scripts/gpu_check", *sys.argv[1:]]),
        "tiny": options.tiny,
    }
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        lab = Lab(options.device, options.tiny, options.quick, Path(scratch), time.monotonic())
        outcomes = Run(lab, options.only or [part.name for part in PARTS if part.by_default], options.budget)()
    results = report.to_results(outcomes, facts | {"seconds": time.monotonic() - begun})
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    say(f"\n{report.text_table(outcomes, judged=not options.tiny, is_whole=is_whole)}\n")
    code = verdict(outcomes, lab, is_whole=is_whole)
    say(f"{results['seconds']:.0f} s in all")
    return results, code


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=_ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "of an unknown commit"


if __name__ == "__main__":
    sys.exit(main())
