"""Commands that run outside of the environment the tests run in."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

OWN_ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
"""Environment variables that lead no Python to the checkout."""
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quire" / "clients"
"""Environments that tests share, one for each set of requirements, and other folders that are made once."""


def run(command: Sequence[str], failure: str, *, cwd: Path | None = None, **variables: str) -> str:
    """The output of a command; if the command fails, the test fails with its output."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env=OWN_ENVIRONMENT | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.fail(f"{failure}:\n{done.stdout}", pytrace=False)
    return done.stdout


def made_once(name: str, *inputs: str, make: Callable[[Path], None]) -> Path:
    """A folder that `make` has filled, in this run or an earlier one: once for these inputs."""
    folder = CACHE / f"{name}-{hashlib.sha256(repr(inputs).encode()).hexdigest()[:16]}"
    stamp = folder / "complete"
    CACHE.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another test may be making it
        if not stamp.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            stamp.touch()
    return folder


def environment(terminal: pytest.CaptureFixture[str], *requirements: str, beside_tests: bool = False) -> Path:
    """The Python of an environment with the packages that pip installs for these arguments, made if it does not exist;
    fails where it cannot be made. `beside_tests`: it has the packages of the tests' environment, too.
    """
    wanted = " ".join(requirements)
    packages = sysconfig.get_path("purelib") if beside_tests else ""
    key = hashlib.sha256(f"{wanted} {sys.version}{packages}".encode()).hexdigest()[:16]
    folder = CACHE / key
    python, stamp = folder / "bin" / "python", folder / "installed"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another test may be making it
        if not stamp.exists():
            with terminal.disabled():
                print(f"\nmaking an environment for {wanted} in {folder} …", flush=True)
            run([sys.executable, "-m", "venv", "--clear", str(folder)], f"no environment can be made for {wanted}")
            if packages:
                (own,) = (folder / "lib").glob("python*/site-packages")
                (own / "tests.pth").write_text(packages)
            run(
                [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements],
                f"{wanted} cannot be installed; this test needs a package index (PIP_INDEX_URL names another one)",
            )
            stamp.touch()
    return python


def environment_of_links(folder: Path, requirements: Iterable[str]) -> None:
    """Make an environment in `folder` that has the packages that these requirements need, and no other: links to the
    files of the tests' environment. It has no pip, and programs of none of the packages."""
    run([sys.executable, "-m", "venv", "--without-pip", str(folder)], "no environment can be made")
    (packages,) = (folder / "lib").glob("python*/site-packages")
    for name in needed_packages(requirements):
        for path in metadata.distribution(name).files or ():
            if ".." not in path.parts:
                linked = packages / path
                linked.parent.mkdir(parents=True, exist_ok=True)
                _link(Path(str(path.locate())), linked)


def needed_packages(requirements: Iterable[str]) -> set[str]:
    """The names of the installed packages that these requirements need."""
    seen: set[tuple[str, str]] = set()
    remaining = [(Requirement(text), "") for text in requirements]
    while remaining:
        requirement, extra = remaining.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        for wanted in ("", *requirement.extras):
            key = (canonicalize_name(requirement.name), wanted)
            if key not in seen:
                seen.add(key)
                needs = metadata.distribution(requirement.name).requires or ()
                remaining += [(Requirement(text), wanted) for text in needs]
    return {name for name, _ in seen}


def _link(path: Path, linked: Path) -> None:
    try:
        os.link(path, linked)
    except OSError:  # on another file system
        shutil.copy2(path, linked)
