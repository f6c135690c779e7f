"""The name that Quire is installed under, its version, and its commit."""

from __future__ import annotations

import importlib.metadata
import subprocess
from pathlib import Path

DISTRIBUTION = "quire-llm"
"""The name of the package that pip installs; another project's package is named `quire`."""
COMMIT_FILE = Path("quire", "engine", "process", "commit.txt")
"""Where `setup.py` writes the commit that a wheel or an sdist is built from."""


def version() -> str:
    """Raises `importlib.metadata.PackageNotFoundError` in a checkout that is not installed."""
    return importlib.metadata.version(DISTRIBUTION)


def commit(root: Path = Path(__file__).parents[3]) -> str:
    """The commit of the files below `root`, a checkout or the folder of installed packages; empty if it is not
    known."""
    if (file := root / COMMIT_FILE).exists():
        return file.read_text().strip()
    if not (root / ".git").exists():  # git would look for a repository around it
        return ""
    try:
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""
