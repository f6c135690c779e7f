"""The wheel gets every file: each folder is a package that setuptools finds, and other files are package data."""

from __future__ import annotations

import ast
import os
import re
import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest
import setuptools
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from quire.engine.process.version import DISTRIBUTION

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, SETUPTOOLS = PYPROJECT["project"], PYPROJECT["tool"]["setuptools"]
TEXTS = (".py", ".md", ".sh", ".yaml", ".yml")
ROOMS = ("server", "engine", "kernels")


def files() -> dict[str, list[Path]]:
    """The product's files by folder, each folder named as the package that it is imported as."""
    found = {}
    for folder, _, names in os.walk(ROOT / "quire", followlinks=True):
        if "__pycache__" not in folder and (shown := sorted(name for name in names if not name.startswith("."))):
            found[".".join(Path(folder).relative_to(ROOT).parts)] = [Path(folder, name) for name in shown]
    return found


FILES = files()


def test_the_rooms_at_the_top_are_linked_into_the_package() -> None:
    """So that an editor's language server and mypy resolve `quire.engine` in a fresh clone."""
    assert {path.name: os.readlink(path) for path in (ROOT / "quire").iterdir() if path.is_symlink()} == {
        room: f"../{room}" for room in ROOMS
    }


def test_every_folder_with_python_files_is_found_as_a_package() -> None:
    find = SETUPTOOLS["packages"]["find"]
    assert find["namespaces"] is False, "a folder without __init__.py would be a package, too"
    packages = {name for name, paths in FILES.items() if any(path.suffix == ".py" for path in paths)}
    assert packages == set(setuptools.find_packages(str(ROOT), include=find["include"]))


def test_every_other_file_is_package_data() -> None:
    data = {path for paths in FILES.values() for path in paths if path.suffix != ".py"}
    listed: set[Path] = set()
    for package, patterns in SETUPTOOLS["package-data"].items():
        folder = FILES[package][0].parent
        for pattern in patterns:
            matches = data.intersection(folder.glob(pattern))
            assert matches, f"{pattern} of {package} matches no file"
            listed |= matches
    assert data == listed


def test_the_page_on_a_package_index_has_absolute_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each leads to a file of the checkout, on GitHub."""
    told: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", told.update)
    monkeypatch.setenv("CXX", "there-is-none")
    runpy.run_path(str(ROOT / "setup.py"))
    page, source = told["long_description"], f"{PROJECT['urls']['Homepage']}/blob/main/"
    links = [link for link in re.findall(r"\]\(([^)#]*)", page) if link]
    assert len(links) > 20
    for link in links:
        assert (ROOT / link.removeprefix(source)).exists() if link.startswith(source) else link.startswith("https://")
    assert "pip install quire-llm" in page
    assert "mermaid" not in page


def test_every_text_names_our_distribution() -> None:
    """`quire` in a package index is another project's."""
    assert PROJECT["name"] == DISTRIBUTION
    folders = (*ROOMS, "quire", "docs", "examples", "deploy", "benchmarks")
    texts = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in TEXTS]
    texts += [*ROOT.glob("*.md"), *(ROOT / "scripts").iterdir()]
    wrong = re.compile(r"\bquire\[|pip install ['\"]?quire(?![-/\w])")
    assert not [path for path in texts if path.is_file() and wrong.search(path.read_text())]


def test_every_dependency_is_pinned_to_a_version_that_it_allows() -> None:
    extras = PROJECT["optional-dependencies"]
    asked = [Requirement(text) for text in (*PROJECT["dependencies"], *extras["test"], *extras["ci"])]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    unpinned = {"quire-llm", "setuptools", "triton"}  # torch asks for its own version of Triton, and for a setuptools
    assert {canonicalize_name(each.name) for each in asked} - {*pinned} == unpinned
    bounded = [each for each in asked if each.name not in unpinned]
    assert not [each for each in bounded if pinned[canonicalize_name(each.name)] not in each.specifier]


def test_no_two_classes_have_one_name() -> None:
    """So that a search for a class finds only one."""
    places: dict[str, list[str]] = {}
    for package, paths in FILES.items():
        for path in paths:
            tree = ast.parse(path.read_text()) if path.suffix == ".py" else ast.Module([], [])
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    places.setdefault(node.name, []).append(f"{package}/{path.name}:{node.lineno}")
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
