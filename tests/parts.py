"""The parts of the slow tier, as tests/parts.toml lists them, and the parts that a change touches. Needs no library:

python -m tests.parts names                 every part, as JSON
python -m tests.parts root                  the parts that need root and privileges, as JSON
python -m tests.parts files hosts ray       the files of some parts
python -m tests.parts touched 540           the parts to run for the changes since the last full run, in 540 s
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
LAST_FULL_RUN = ROOT / "tests" / "last-full-run.json"
CORES = 2


@dataclass(frozen=True)
class Part:
    tests: list[str]
    touched_by: list[str]
    needs_root: bool = False
    """It makes network namespaces, or runs another system in a container or on an emulated processor."""

    def changed_lines(self, changes: Mapping[str, int]) -> int:
        """The number of changed lines in files that touch this part."""
        return sum(
            lines
            for path, lines in changes.items()
            if path in self.tests
            or any(path == other or (other.endswith("/") and path.startswith(other)) for other in self.touched_by)
        )


PARTS = {name: Part(**table) for name, table in tomllib.loads((ROOT / "tests" / "parts.toml").read_text()).items()}


def parts_of(file: str) -> list[str]:
    return [name for name, part in PARTS.items() if file in part.tests]


def choose(changes: Mapping[str, int], seconds: Mapping[str, float], budget: float) -> tuple[list[str], list[str]]:
    """The touched parts that fit in the budget, in the order of the lines that touch them, and the touched parts that
    do not fit."""
    lines = {name: part.changed_lines(changes) for name, part in PARTS.items()}
    touched = sorted((name for name in PARTS if lines[name]), key=lambda name: -lines[name])
    chosen, left_out = [], []
    for name in touched:
        if seconds[name] <= budget:
            budget -= seconds[name]
            chosen.append(name)
        else:
            left_out.append(name)
    return chosen, left_out


def seconds_of_parts() -> dict[str, float]:
    """Seconds of the parts on two cores. A file that has not been measured counts like the median of the others."""
    slow = json.loads((ROOT / "tests" / "seconds.json").read_text())["slow"]
    measured = {file: sum(seconds for _, seconds in functions.values()) for file, functions in slow.items()}
    usual = median(measured.values())
    files = {name: [measured.get(file, usual) for file in part.tests] for name, part in PARTS.items()}
    return {name: max(sum(seconds) / CORES, *seconds) for name, seconds in files.items()}


def changes_since(commit: str) -> dict[str, int]:
    """The changed lines of each file since a commit; if that is not in this clone, everything has changed."""
    diff = ["git", "diff", "--numstat", "--no-renames", commit, "HEAD"]
    result = subprocess.run(diff, cwd=ROOT, capture_output=True, text=True, check=False)
    if result.returncode:
        return {file: 1 for part in PARTS.values() for file in part.tests}
    rows = (line.split("\t") for line in result.stdout.splitlines())
    return {path: max(1, sum(int(count) for count in counts if count != "-")) for *counts, path in rows}


def files_of(names: Iterable[str]) -> list[str]:
    for name in names:
        if name not in PARTS:
            raise SystemExit(f"no part of the slow tier is called {name!r}; there are {', '.join(PARTS)}")
    return [file for name in names for file in PARTS[name].tests]


def main(command: str, *arguments: str) -> None:
    if command == "names":
        print(json.dumps(list(PARTS)))
    elif command == "root":
        print(json.dumps([name for name, part in PARTS.items() if part.needs_root]))
    elif command == "files":
        print(*files_of(arguments), sep="\n")
    elif command == "touched":
        changes = changes_since(json.loads(LAST_FULL_RUN.read_text())["commit"])
        chosen, left_out = choose(changes, seconds_of_parts(), float(arguments[0]))
        if left_out:
            print("Touched, but left out for time:", *left_out, file=sys.stderr)
        print(*chosen)
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main(*sys.argv[1:])
