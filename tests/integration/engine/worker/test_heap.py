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


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="this C library is not glibc")
def test_steps_of_all_sizes_leave_no_holes() -> None:
    """In a process of its own, whose heap it configures; without `limit` it grows by 370 MiB (glibc 2.36)."""
    growth = int(subprocess.check_output([sys.executable, "-m", __name__], text=True))
    assert growth < 2 * KEPT


def run_steps() -> int:
    """Run steps with activations of up to 13 MiB; returns how much larger this process was than before, at most."""
    heap = ActivationHeap(KEPT)
    rng, recordings, most = random.Random(0), [], 0
    before = heap.resident_bytes()
    for _ in range(1000):
        rows = rng.randrange(1, 400)
        for layer in range(8):
            hidden = torch.ones(rows, rng.choice([512, 1536, 4096]))
            if layer % 4 == 3:
                recordings.append(torch.ones(64))
        del hidden
        heap.limit()
        most = max(most, heap.resident_bytes() - before)
    return most


if __name__ == "__main__":
    print(run_steps())
