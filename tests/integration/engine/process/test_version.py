"""The commit of a checkout, and of packages built from one."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from quire.engine.process.version import COMMIT_FILE, commit


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    identity = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.org")
    (tmp_path / "file").write_text("one")
    for arguments in (("init",), ("add", "."), (*identity, "commit", "--message", "One"), ("tag", "v1")):
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True, capture_output=True)
    return tmp_path


def test_the_commit_of_a_checkout(checkout: Path) -> None:
    head = subprocess.check_output(["git", "-C", str(checkout), "rev-parse", "HEAD"], text=True)
    found = commit(checkout)
    assert len(found) == 12
    assert head.startswith(found)
    (checkout / "file").write_text("two")
    assert commit(checkout) == f"{found}-dirty"


def test_a_repository_around_installed_packages_is_another_project(checkout: Path) -> None:
    packages = checkout / ".venv" / "site-packages"
    packages.mkdir(parents=True)
    assert commit(packages) == ""


def test_what_was_built_from_a_commit_names_it(checkout: Path) -> None:
    (checkout / COMMIT_FILE).parent.mkdir(parents=True)
    (checkout / COMMIT_FILE).write_text("0123abc\n")
    assert commit(checkout) == "0123abc"


def test_without_git_there_is_none(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(checkout))
    assert commit(checkout) == ""
