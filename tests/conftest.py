"""What all tests share."""

from __future__ import annotations

import os
import shutil
import signal

import pytest

from quire import kernels
from quire.kernels import cpu, dispatch


def pytest_configure(config: pytest.Config) -> None:
    """Before anything imports Triton, half of which is compiled by itself. On a GPU, it is not to be interpreted."""
    if config.option.markexpr != "gpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
    # A shell without job control has what it puts into the background ignore Ctrl-C, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def _cpu_kernels() -> None:
    """As in a worker: the compiled kernels serve wherever an operation is called."""
    kernels.prepare("cpu")()
    if "cpu" not in dispatch.PLATFORMS and shutil.which(os.environ.get("CXX", "c++")):
        cpu.load()  # raises: with a compiler here, kernels that do not compile are a failure
