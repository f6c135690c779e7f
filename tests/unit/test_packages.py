"""The lists of packages and data files in pyproject.toml are complete: what they omit is missing from the wheel."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def files() -> dict[str, list[Path]]:
    """The product's files by folder, each folder named as the package that it is imported as."""
    found: dict[str, list[Path]] = {}
    for package, folder in SETUPTOOLS["package-dir"].items():
        for path in sorted((ROOT / folder).rglob("*")):
            inside = path.relative_to(ROOT / folder)
            if path.is_file() and "__pycache__" not in inside.parts and not path.name.startswith("."):
                found.setdefault(".".join((package, *inside.parts[:-1])), []).append(path)
    return found


FILES = files()


def test_every_folder_with_python_files_is_listed_as_a_package() -> None:
    packages = {name for name, paths in FILES.items() if any(path.suffix == ".py" for path in paths)}
    assert packages == set(SETUPTOOLS["packages"])
    assert len(SETUPTOOLS["packages"]) == len(packages), "a package is listed twice"


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
