"""Commands that run outside of the environment the tests run in."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import pytest

OWN_ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
"""Environment variables that lead no Python to the checkout."""
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quire" / "clients"
"""Environments that tests share, one for each set of requirements."""


def run(command: Sequence[str], failure: str, *, cwd: Path | None = None, **variables: str) -> str:
    """What a command prints; the test fails when the command does, with its output."""
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


def environment(terminal: pytest.CaptureFixture[str], *requirements: str, beside_tests: bool = False) -> Path:
    """The Python of an environment with what pip installs for these arguments, made if it is not there; fails where it
    cannot be made. `beside_tests`: it has the packages of the tests' environment, too.
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
