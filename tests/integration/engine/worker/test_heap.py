"""The memory that a rank on CPU keeps between steps."""

from __future__ import annotations

import ctypes
import random
import subprocess
import sys

import pytest
import torch

from quire.engine.worker.heap import ActivationHeap

KEPT = 16 << 20
LAYERS, WIDTHS = 8, (512, 1536, 4096)
ROWS = 2 * KEPT // (LAYERS * 4 * max(WIDTHS))
"""With at most that many, a step allocates less than 2 * KEPT in all, so that the limit never doubles beyond that. With
more, it depends on the holes that the imports have left whether a freed block is used again within the step, and
whether the limit doubles once more."""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="this C library is not glibc")
@pytest.mark.parametrize(
    ("kept", "most_rows", "most_trims"),
    [
        pytest.param(KEPT, ROWS, 150, id="holes are returned"),  # without a limit it grows by 130 MiB (glibc 2.36)
        pytest.param(KEPT, 64, 30, id="what fits is kept"),
        pytest.param(1 << 20, ROWS, 150, id="what needs more gets it"),
    ],
)
def test_a_rank_keeps_what_its_steps_need(kept: int, most_rows: int, most_trims: int) -> None:
    """In a new process, whose heap it configures: a fork of another grows little even without a limit."""
    command = [sys.executable, "-m", __name__, str(kept), str(most_rows)]
    growth, trims = map(int, subprocess.check_output(command, text=True).split())
    assert growth < 4 * KEPT
    assert trims < most_trims


def run_steps(kept: int, most_rows: int) -> tuple[int, int]:
    """Run 300 steps with activations of up to 16 KiB a row; returns how much larger this process was than before, at
    most, and how often it has returned memory."""
    heap = ActivationHeap(kept)
    trims, trim = [], heap._trim
    assert trim is not None
    heap._trim = lambda pad: trims.append(trim(pad))
    rng, recordings, most = random.Random(0), [], 0
    before = heap.resident_bytes()
    for _ in range(300):
        rows = rng.randrange(1, most_rows)
        for layer in range(LAYERS):
            hidden = torch.ones(rows, rng.choice(WIDTHS))
            if layer % 4 == 3:
                recordings.append(torch.ones(64))
        del hidden
        heap.limit()
        most = max(most, heap.resident_bytes() - before)
    return most, len(trims)


if __name__ == "__main__":
    print(*run_steps(*map(int, sys.argv[1:])))
