"""Commands that run outside of the environment the tests run in."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

OWN_ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
"""Environment variables that lead no Python to the checkout."""


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
