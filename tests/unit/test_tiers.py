"""Cases take turns within a function's budget, and a change runs the parts of the slow tier that it touches."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests import parts, tiers

FILE = "tests/unit/test_example.py"


@dataclass(eq=False)
class Item:
    nodeid: str
    markers: tuple[str, ...]

    def get_closest_marker(self, name: str) -> object:
        return name if name in self.markers else None


def items(*names: str, file: str = FILE, markers: tuple[str, ...] = ()) -> list[Item]:
    return [Item(nodeid=f"{file}::{name}", markers=markers) for name in names]


Select = Callable[..., list[str]]


@pytest.fixture
def select(monkeypatch: pytest.MonkeyPatch) -> Select:
    """The items that a run with these options and measurements keeps, in order."""

    def selected(
        given: list[Item],
        measured: dict[str, Any],
        function_seconds: float | None = None,
        case_seconds: float | None = None,
        commit: str = "1234",
    ) -> list[str]:
        monkeypatch.setenv("QUIRE_TEST_COMMIT", commit)
        monkeypatch.setattr(tiers, "read_seconds", lambda: measured)
        option = SimpleNamespace(function_seconds=function_seconds, case_seconds=case_seconds)
        config = SimpleNamespace(option=option, hook=SimpleNamespace(pytest_deselected=lambda items: None))
        left = list(given)
        tiers.pytest_collection_modifyitems(cast(pytest.Config, config), cast(list[pytest.Item], left))
        return [item.nodeid.partition("::")[2] for item in left]

    return selected


CASES = items(*(f"test_slow[{number}]" for number in range(10)), "test_fast")
MEASURED = {"default": {FILE: {"test_slow": (10, 20.0)}}}


def test_a_function_runs_the_cases_that_fit_in_its_budget(select: Select) -> None:
    assert len(select(CASES, MEASURED, function_seconds=7)) == 3 + 1
    assert len(select(CASES, MEASURED, function_seconds=1)) == 1 + 1, "one case always runs"
    assert len(select(CASES, MEASURED)) == len(select(CASES, MEASURED, function_seconds=20)) == len(CASES)


def test_every_case_has_its_turn_and_a_commit_always_chooses_the_same(select: Select) -> None:
    runs = [select(CASES, MEASURED, function_seconds=7, commit=str(commit)) for commit in range(40)]
    assert set().union(*runs) == {item.nodeid.partition("::")[2] for item in CASES}
    assert runs[0] == select(CASES, MEASURED, function_seconds=7, commit="0")


def test_slow_cases_have_measurements_of_their_own(select: Select) -> None:
    slow = items("test_slow[a]", "test_slow[b]", file="tests/e2e/test_ray.py", markers=("slow",))
    measured = {"slow": {"tests/e2e/test_ray.py": {"test_slow": (2, 20.0)}}, "default": {}}
    assert len(select(slow, measured, function_seconds=12)) == 1


def test_the_quick_tier_leaves_out_functions_with_long_cases(select: Select) -> None:
    assert select(CASES, MEASURED, case_seconds=0.05) == ["test_fast"]
    assert len(select(CASES, MEASURED, case_seconds=2.0, function_seconds=4.0)) == 3


def test_the_longest_file_goes_first(select: Select) -> None:
    others = items("test_a", "test_b", file="tests/unit/test_other.py")
    assert select([*others, *CASES], MEASURED)[-2:] == ["test_a", "test_b"]


def test_a_slow_test_without_a_part_is_an_error(select: Select) -> None:
    with pytest.raises(pytest.UsageError, match="name its file in a part of tests/parts"):
        select(items("test_long", markers=("slow",)), MEASURED)


def test_what_ran_replaces_the_seconds_of_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "SECONDS", tmp_path / "seconds.json")
    file = "tests/unit/test_tiers.py"
    for seconds, names in ((1.0, ("test_a[1]", "test_a[2]", "test_b")), (2.0, ("test_a[1]",)), (0.01, ())):
        recorder = tiers.Recorder()
        for name in names:
            for part in (seconds, 0.25):
                report = SimpleNamespace(nodeid=f"{file}::{name}", keywords={}, duration=part)
                recorder.pytest_runtest_logreport(cast(pytest.TestReport, report))
        recorder.pytest_sessionfinish()
        first = tiers.read_seconds()["default"]
        if seconds == 1.0:
            assert first == {file: {"test_a": [2, 2.5], "test_b": [1, 1.25]}}
    assert first == {file: {"test_a": [1, 2.25]}}


def test_every_path_of_a_part_exists_and_every_file_is_in_one_part() -> None:
    files = [file for part in parts.PARTS.values() for file in part.tests]
    assert len(files) == len({*files})
    for part in parts.PARTS.values():
        for path in (*part.tests, *part.touched_by):
            assert (parts.ROOT / path).is_dir() == path.endswith("/"), path
            assert (parts.ROOT / path).exists(), path


def test_parts_are_chosen_by_the_lines_that_touch_them_within_the_budget() -> None:
    changes = {"engine/cluster/security.py": 40, "setup.py": 7, "README.md": 100}
    seconds = dict.fromkeys(parts.PARTS, 60.0)
    chosen, left_out = parts.choose(changes, seconds, 180)
    assert chosen == ["hosts", "ray", "wheel"]
    assert left_out == ["image", "arm"]
    assert parts.choose(changes, seconds | {"hosts": 600.0}, 120) == (["ray", "wheel"], ["hosts", "image", "arm"])
    assert parts.choose({"README.md": 1}, seconds, 180) == ([], [])


def test_a_file_that_was_not_measured_counts_like_the_median(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = {"test_it": [2, 40.0], "test_that": [1, 20.0]}
    names = {"a": usual, "b": usual, "c": usual, "d": {"test_it": [1, 90.0]}}
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "seconds.json").write_text(json.dumps({"slow": names}))
    monkeypatch.setattr(parts, "ROOT", tmp_path)
    monkeypatch.setattr(parts, "PARTS", {"new": parts.Part(["a", "new"], []), "long": parts.Part(["d", "new"], [])})
    assert parts.seconds_of_parts() == {"new": 60.0, "long": 90.0}


def test_an_unknown_part_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(SystemExit, match=r"'host'; there are families, .*hosts"):
        parts.files_of(["host"])
