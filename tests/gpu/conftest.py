"""Tests that need a GPU: `scripts/test -m gpu` on a machine with one.

QUIRE_GPU_TESTS_ON=cpu runs them without a GPU: `TRITON_INTERPRET=1 QUIRE_GPU_TESTS_ON=cpu scripts/test -m gpu
tests/gpu` (Triton's interpreter computes no bfloat16, which is left out there).
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from quire import kernels
from quire.kernels import backends, dispatch
from tests.fakes.interpreter import with_scales_of_8_bit_floats

DEVICE = torch.device(os.environ.get("QUIRE_GPU_TESTS_ON", "cuda"))
HERE = Path(__file__).parent
TYPES = [torch.float32, torch.bfloat16, torch.float16][:: 2 if DEVICE.type == "cpu" else 1]
_deselected = 0


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of this folder; without the device they are deselected, and the summary says so."""
    mine = [item for item in items if HERE in item.path.parents]
    for item in mine:
        item.add_marker("gpu")
        # Torch warns once about the mode in which a step that waits is an error: here the warning would be an error
        # itself.
        item.add_marker(pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning"))
    if DEVICE.type == "cuda" and not torch.cuda.is_available():
        global _deselected
        _deselected = len(mine) * (config.option.markexpr == "gpu")
        items[:] = [item for item in items if item not in mine]
        config.hook.pytest_deselected(items=mine)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _deselected:
        terminalreporter.write_line(f"tests/gpu: {_deselected} tests not run, as torch sees no CUDA device here")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Use the kernels of the device, as in a rank; a test's choices do not outlast it."""
    monkeypatch.setattr(dispatch, "PLATFORMS", {})
    monkeypatch.setattr(backends, "CHOSEN", {})
    torch.manual_seed(0)
    if DEVICE.type == "cpu":
        from quire.kernels import triton

        monkeypatch.setattr(dispatch, "PLATFORMS", {"cpu": triton})
        with_scales_of_8_bit_floats(monkeypatch)
    else:
        kernels.prepare(DEVICE)()
    return DEVICE
