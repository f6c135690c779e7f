"""Finds the tests that notice a fault: applies each patch of tests/faults to a copy of the tree, and runs tests there.

    scripts/test --faults                   all faults
    scripts/test --faults NAME … --jobs 2   some of them, two at once

A patch is a small diff with a header: a sentence that describes the fault, and the test that is expected to fail, with
its tier. That test runs first, and must pass without the fault. Only if it does not notice the fault, the quick and
then the default tier run. The tier of a fault is the tier of the test that fails. The exit status is 1 if no test
notices a fault, if a patch does not apply, or if an expected test fails without the fault.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Literal

ROOT = Path(__file__).resolve().parents[1]
FAULTS = ROOT / "tests" / "faults"
Tier = Literal["quick", "default", "slow"]
SELECTIONS: dict[Tier, tuple[str, ...]] = {
    "quick": ("--case-seconds=0.12", "--function-seconds=0.25"),
    "default": ("--function-seconds=1",),
    "slow": ("-m", "slow"),
}
"""Options that scripts/test passes to pytest for a tier. A case that a tier leaves out notices nothing."""
PATHS: dict[Tier, str] = {"quick": "tests/unit", "default": "tests"}
"""The folders with the tests of the tiers that run as a whole."""
_HEADER = re.compile(
    r"(?P<sentence>[A-Z`][^\n]+(?:\n[^\n]+)*\.)\n\n"
    r"Caught by: (?P<node>[^\s:]+::\w+) \((?P<tier>quick|default|slow)\)\n\n(?=--- a/)"
)
_TARGET = re.compile(r"^\+\+\+ b/(.+)$", re.MULTILINE)
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?::.+?)(?: - .*)?$", re.MULTILINE)
_PASSED, _TESTS_FAILED, _NO_TESTS = 0, 1, 5
"""Exit codes of pytest."""
_HANGS_AFTER = 1800.0
"""Seconds of a run of pytest, which itself limits each test."""


class InvalidFault(Exception):
    """A patch has no valid header, does not apply, or its test fails without it."""


@dataclass(frozen=True)
class Fault:
    """A patch of tests/faults."""

    patch: Path
    sentence: str
    node: str
    """The test that is expected to fail."""
    tier: Tier
    """Its tier."""
    targets: tuple[str, ...]
    """The files that the patch changes."""

    @staticmethod
    def read(patch: Path) -> Fault:
        """Raises `InvalidFault`."""
        text = patch.read_text(encoding="utf-8")
        if (found := _HEADER.match(text)) is None:
            expected = "a sentence, and a line `Caught by: FILE::TEST (quick|default|slow)`"
            raise InvalidFault(f"the header of tests/faults/{patch.name} must be {expected}")
        tier: Tier = found["tier"]  # type: ignore[assignment]  # as the expression says
        return Fault(patch, " ".join(found["sentence"].split()), found["node"], tier, tuple(_TARGET.findall(text)))

    @property
    def name(self) -> str:
        return self.patch.stem

    @property
    def room(self) -> str:
        """The folder of the first file that changes."""
        return str(Path(self.targets[0]).parent)

    def attempts(self, *, has_tiers: bool) -> Iterator[tuple[Tier, str]]:
        """The runs: the expected test, as in the lowest tier that may have it, and then whole tiers."""
        if self.tier == "slow":
            yield "slow", self.node
        else:
            if self.node.startswith(PATHS["quick"]):
                yield "quick", self.node
            yield "default", self.node
        if has_tiers:
            yield from PATHS.items()


@dataclass
class Trees:
    """Copies of the tree below a temporary folder."""

    folder: Path
    num_jobs: int
    _checked: dict[tuple[Tier, str], bool] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def __post_init__(self) -> None:
        self.clean = self.folder / "clean"
        _copy_tree(self.clean)
        # The kernels of a fault in C++ are of no further use. Those that have been compiled need not be again.
        self._kernels = self.folder / "kernels"
        compiled = Path(os.environ.get("QUIRE_KERNEL_CACHE") or Path.home() / ".cache" / "quire" / "kernels")
        if compiled.is_dir():
            shutil.copytree(compiled, self._kernels)

    @contextlib.contextmanager
    def faulty(self, fault: Fault) -> Iterator[Path]:
        """A copy with a fault; raises `InvalidFault`."""
        tree = self.folder / fault.name
        shutil.copytree(self.clean, tree, symlinks=True)
        try:
            done = subprocess.run(["git", "apply", str(fault.patch)], cwd=tree, capture_output=True, text=True)
            if done.returncode:
                raise InvalidFault(f"does not apply: {done.stderr.strip()}")
            yield tree
        finally:
            shutil.rmtree(tree, ignore_errors=True)

    def failure(self, tree: Path, tier: Tier, what: str) -> str | None:
        """Run tests as a tier runs them; returns the first one that fails, or None."""
        is_whole = what == PATHS.get(tier)
        num_processes = max(1, (os.cpu_count() or 1) // self.num_jobs) if is_whole else 0
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        command += ["--dist=loadfile", "--no-loadscope-reorder"]
        command += [f"--numprocesses={num_processes}", *SELECTIONS[tier], what]
        # Processes that ignore the current folder import the copy, too.
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": str(tree), "QUIRE_TEST_COMMIT": _head()}
        environment["QUIRE_KERNEL_CACHE"] = str(self._kernels)
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        code, output = _run(command, tree, environment)
        if code in (_PASSED, _NO_TESTS):
            return None
        found = _FAILED.search(output)
        if code is None or code < 0:  # hangs, or has been killed by a signal
            return found[1] if found else f"{what} {'hangs' if code is None else 'crashes'}"
        if code != _TESTS_FAILED or found is None:
            raise InvalidFault(f"pytest {what} ends with exit code {code}:\n{output[-2000:]}")
        return found[1]

    def check(self, tier: Tier, node: str) -> None:
        """Raise `InvalidFault` if a test fails without a fault."""
        with self._lock:
            if (tier, node) not in self._checked:
                self._checked[tier, node] = self.failure(self.clean, tier, node) is None
            if not self._checked[tier, node]:
                raise InvalidFault(f"{node} fails without the fault")


@dataclass(frozen=True)
class Result:
    """The outcome of a fault."""

    fault: Fault
    tier: Tier | None = None
    """None: no test notices it, or it is invalid."""
    node: str = ""
    problem: str = ""

    @property
    def line(self) -> str:
        found = self.node or self.problem or "no test that has run"
        return f"{self.fault.name:<40}  {self.fault.room:<36}  {self.tier or 'NONE':<7}  {found}"


def examine(fault: Fault, trees: Trees, *, has_tiers: bool) -> Result:
    """Find the first test that notices a fault; without `has_tiers`, among the expected tests."""
    try:
        with trees.faulty(fault) as tree:
            for tier, what in fault.attempts(has_tiers=has_tiers):
                if (node := trees.failure(tree, tier, what)) is None:
                    continue
                if what == fault.node:
                    trees.check(tier, what)
                return Result(fault, tier, node)
    except InvalidFault as error:
        return Result(fault, problem=str(error))
    return Result(fault)


def summary(results: Sequence[Result]) -> str:
    """The number of faults that each tier notices."""
    count = {tier: sum(each.tier == tier for each in results) for tier in SELECTIONS}
    quick, default, missed = count["quick"], count["quick"] + count["default"], len(results) - sum(count.values())
    found = f"{quick} in quick, {default} in default (with quick), {count['slow']} in slow only, {missed} in none"
    return f"{len(results)} faults: {found}"


@cache
def _head() -> str:
    """The commit, which determines the cases of functions that take long."""
    command = ["git", "rev-parse", "HEAD"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def _copy_tree(target: Path) -> None:
    """Copy the files that git tracks, and the files that it would track."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, dict.fromkeys(listed.split("\0"))):
        if (source := ROOT / name).is_symlink() or source.exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name, follow_symlinks=False)


def _run(command: Sequence[str], folder: Path, environment: dict[str, str]) -> tuple[int | None, str]:
    """Run a command in a folder; returns its exit code, None if it hangs, and its output."""
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        code: int | None = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(_HANGS_AFTER)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and processes that it has left behind
            process.wait()
        output.seek(0)
        return code, output.read()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/test --faults", description="Report which tests notice planted faults."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="names in tests/faults (default: all)")
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="faults that are examined at once (default: 1)"
    )
    parser.add_argument("--expected", action="store_true", help="run the expected tests only, no whole tiers")
    options = parser.parse_args()
    names = options.names or sorted(path.stem for path in FAULTS.glob("*.patch"))
    if unknown := [name for name in names if not (FAULTS / f"{name}.patch").exists()]:
        parser.error(f"there is no fault {', '.join(unknown)} in tests/faults")
    faults = []
    for name in names:
        try:
            faults.append(Fault.read(FAULTS / f"{name}.patch"))
        except InvalidFault as error:
            parser.error(str(error))
    results = []
    with tempfile.TemporaryDirectory(prefix="quire-faults-") as folder, ThreadPoolExecutor(options.jobs) as pool:
        trees = Trees(Path(folder), options.jobs)
        for result in pool.map(lambda fault: examine(fault, trees, has_tiers=not options.expected), faults):
            print(result.line, flush=True)
            results.append(result)
    print(summary(results))
    return int(any(result.tier is None for result in results))


if __name__ == "__main__":
    sys.exit(main())
