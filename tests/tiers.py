"""The choice and the order of the tests of a tier.

`tests/seconds.json` has the measured seconds of each test function, for its cases of the default tier and for its slow
cases. A function that takes longer than its budget runs as many cases as fit; the commit chooses which, so that all
take turns, and a whole run (`scripts/test --all`) has them all. Files that take longest go first.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests import parts

ROOT = Path(__file__).parents[1]
SECONDS = ROOT / "tests" / "seconds.json"
UNKNOWN = 0.02  # seconds of a case that has not been measured
LEAST = 0.05  # shorter times are not written down

Measured = dict[str, dict[str, dict[str, list[float]]]]
"""By tier, file and function: the number of cases, and the seconds of them all."""


def read_seconds() -> Measured:
    measured: Measured = json.loads(SECONDS.read_text()) if SECONDS.exists() else {}
    return measured


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tiers")
    group.addoption(
        "--function-seconds",
        type=float,
        metavar="S",
        help="run only as many cases of each function as fit in S seconds; the commit chooses them",
    )
    group.addoption(
        "--case-seconds", type=float, metavar="S", help="leave out functions whose cases take more than S seconds each"
    )
    group.addoption("--record-seconds", action="store_true", help="write the seconds of each function that ran")


def pytest_configure(config: pytest.Config) -> None:
    # Once, before xdist starts its workers: all of them must choose the same cases.
    if config.option.function_seconds and "QUIRE_TEST_COMMIT" not in os.environ:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
        os.environ["QUIRE_TEST_COMMIT"] = head.stdout.strip()
    if config.option.record_seconds and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder())


def function_of(nodeid: str) -> tuple[str, str]:
    """The file and the function of a test."""
    file, _, name = nodeid.partition("::")
    return file, name.partition("[")[0]


def turn(nodeid: str) -> bytes:
    return hashlib.sha256(f"{os.environ.get('QUIRE_TEST_COMMIT')} {nodeid}".encode()).digest()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    measured = read_seconds()
    functions = defaultdict[tuple[str, str, str], list[pytest.Item]](list)
    for item in items:
        file, function = function_of(item.nodeid)
        slow = item.get_closest_marker("slow") is not None
        if slow and not parts.parts_of(file):
            raise pytest.UsageError(f"{item.nodeid} is slow: name its file in a part of tests/parts.toml")
        functions["slow" if slow else "default", file, function].append(item)

    of_function, of_case = config.option.function_seconds, config.option.case_seconds
    kept: set[pytest.Item] = set()
    seconds_of_file = defaultdict[str, float](float)
    for (tier, file, function), cases in functions.items():
        count, seconds = measured.get(tier, {}).get(file, {}).get(function, [1, UNKNOWN])
        mean = seconds / count
        if of_case is not None and mean > of_case:
            continue
        if of_function and mean * len(cases) > of_function:
            cases = sorted(cases, key=lambda case: turn(case.nodeid))[: max(1, int(of_function / mean))]
        kept.update(cases)
        seconds_of_file[file] += mean * len(cases)

    if left_out := [item for item in items if item not in kept]:
        config.hook.pytest_deselected(items=left_out)
        if hasattr(config, "workeroutput"):
            config.workeroutput["left_out"] = len(left_out)
    items[:] = sorted(
        (item for item in items if item in kept), key=lambda item: -seconds_of_file[item.nodeid.partition("::")[0]]
    )


LEFT_OUT = pytest.StashKey[int]()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """The processes of xdist count, as its own process collects nothing."""
    if count := getattr(node, "workeroutput", {}).get("left_out"):
        node.config.stash[LEFT_OUT] = count


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if count := config.stash.get(LEFT_OUT, 0):
        terminalreporter.write_line(f"{count:,} cases were left out for time; scripts/test --all runs them, too")


class Recorder:
    """Adds up the seconds of each function's set-up, calls and tear-down."""

    def __init__(self) -> None:
        self.seconds = defaultdict[tuple[str, str, str], dict[str, float]](dict)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        tier = "slow" if "slow" in report.keywords else "default"
        cases = self.seconds[tier, *function_of(report.nodeid)]
        cases[report.nodeid] = cases.get(report.nodeid, 0) + report.duration

    def pytest_sessionfinish(self) -> None:
        """The new seconds replace the old ones of a file in that tier; files that are gone are forgotten."""
        ran = defaultdict[tuple[str, str], dict[str, list[float]]](dict)
        for (tier, file, function), cases in self.seconds.items():
            ran[tier, file]
            if (total := sum(cases.values())) >= LEAST:
                ran[tier, file][function] = [len(cases), round(total, 2)]
        measured = read_seconds()
        for (tier, file), functions in ran.items():
            measured.setdefault(tier, {})[file] = functions
        kept = {
            tier: {file: dict(sorted(functions.items())) for file, functions in sorted(files.items())}
            for tier, files in measured.items()
        }
        for files in kept.values():
            for file in [file for file, functions in files.items() if not functions or not (ROOT / file).exists()]:
                del files[file]
        lines = json.dumps(kept, indent=1).replace("[\n    ", "[").replace(",\n    ", ", ").replace("\n   ]", "]")
        SECONDS.write_text(lines + "\n")
