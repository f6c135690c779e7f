"""The compiled kernels, for the tests that have them."""

from __future__ import annotations

import os
import shutil

import pytest

from quire import kernels
from quire.kernels import cpu, dispatch
from tests.fakes import kept_objects


@pytest.fixture(autouse=True, scope="session")
def cpu_kernels() -> None:
    """As in a worker: all operations run with the compiled kernels."""
    command = shutil.which(os.environ.get("CXX", "c++"))
    with pytest.MonkeyPatch.context() as patch:
        if command:
            patch.setenv("CXX", str(kept_objects.compiler(command)))  # the wheel's test has the same sources
        kernels.prepare("cpu")()
        if "cpu" not in dispatch.PLATFORMS and command:
            cpu.load()  # raises: with a compiler here, kernels that do not compile are a failure
