"""The planted faults that scripts/faults.py applies fit the present tree, and are spread over all of it."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
PATCHES = sorted((ROOT / "tests" / "faults").glob("*.patch"))
MOST_LINES = 5


@pytest.fixture(scope="module")
def faults() -> list[Any]:
    """The faults that the script reads from the patches; it rejects invalid headers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "scripts")  # no package
        script = importlib.import_module("faults")
    return [script.Fault.read(each) for each in PATCHES]


@cache
def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_patch_applies() -> None:
    for patch in PATCHES:
        done = subprocess.run(["git", "apply", "--check", str(patch)], cwd=ROOT, capture_output=True, text=True)
        assert not done.returncode, done.stderr


def test_every_patch_names_a_test(faults: list[Any]) -> None:
    for fault in faults:
        file, name = fault.node.split("::")
        assert (ROOT / file).is_file(), f"{fault.name}: there is no {file}"
        assert name in functions_of(ROOT / file), f"{fault.name}: {file} has no {name}"


def test_faults_are_small() -> None:
    for patch in PATCHES:
        lines = patch.read_text(encoding="utf-8").splitlines()
        changed = Counter(line[0] for line in lines if re.match(r"[+-](?![+-]{2} )", line))
        assert 0 < max(changed["+"], changed["-"]) <= MOST_LINES, patch.name


def test_every_room_has_faults(faults: list[Any]) -> None:
    counts = Counter(Path(target).parent for fault in faults for target in fault.targets)
    files = (path for top in ("server", "engine", "kernels") for path in (ROOT / top).rglob("*.*"))
    code = {path.parent for path in files if path.suffix in (".py", ".cpp") and path.name != "__init__.py"}
    rooms = {path.relative_to(ROOT) for path in code}
    assert {str(room): counts[room] for room in rooms if counts[room] < 2} == {}
    assert len(PATCHES) >= 64
