"""The planted faults that scripts/faults.py applies fit the present tree, and are spread over all of it."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[3]
PATCHES = sorted((ROOT / "tests" / "faults").glob("*.patch"))
HEADER = re.compile(r"[A-Z`][^\n]+(?:\n[^\n]+)*\.\n\nCaught by: (\S+)::(\w+) \((?:quick|default|slow)\)\n\n--- a/")
MOST_LINES = 5


@cache
def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_patch_applies() -> None:
    for patch in PATCHES:
        done = subprocess.run(["git", "apply", "--check", str(patch)], cwd=ROOT, capture_output=True, text=True)
        assert not done.returncode, done.stderr


def test_every_patch_has_a_header_that_names_a_test() -> None:
    for patch in PATCHES:
        found = HEADER.match(patch.read_text(encoding="utf-8"))
        assert found is not None, f"{patch.name}: expected a sentence, and `Caught by: NODE (quick|default|slow)`"
        path, name = ROOT / found[1], found[2]
        assert path.is_file(), f"{patch.name}: there is no {found[1]}"
        assert name in functions_of(path), f"{patch.name}: {found[1]} has no {name}"


def test_faults_are_small() -> None:
    for patch in PATCHES:
        lines = patch.read_text(encoding="utf-8").splitlines()
        changed = Counter(line[0] for line in lines if re.match(r"[+-](?![+-]{2} )", line))
        assert 0 < max(changed["+"], changed["-"]) <= MOST_LINES, patch.name


def test_every_room_has_faults() -> None:
    counts = Counter(
        Path(target).parent
        for patch in PATCHES
        for target in re.findall(r"^\+\+\+ b/(.+)$", patch.read_text(encoding="utf-8"), re.MULTILINE)
    )
    files = (path for top in ("server", "engine", "kernels") for path in (ROOT / top).rglob("*.*"))
    code = {path.parent for path in files if path.suffix in (".py", ".cpp") and path.name != "__init__.py"}
    rooms = {path.relative_to(ROOT) for path in code}
    assert {str(room): counts[room] for room in rooms if counts[room] < 2} == {}
    assert len(PATCHES) >= 64
