"""What all tests share."""

from __future__ import annotations

import pytest

from quire import kernels


@pytest.fixture(autouse=True, scope="session")
def _cpu_kernels() -> None:
    """As in a worker: the compiled kernels serve wherever an operation is called."""
    kernels.prepare("cpu")()
