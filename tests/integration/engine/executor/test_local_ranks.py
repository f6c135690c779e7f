"""Ranks as processes of a host."""

from __future__ import annotations

import multiprocessing
import os
import selectors
import subprocess
import sys

from quire.engine.executor.local_ranks import LocalRanks

_START = """
import sys
from quire.engine.executor import factory
from quire.engine.config.options import EngineOptions
from quire.engine.config.resolve import resolve

if __name__ == "__main__":
    config = resolve(EngineOptions(device="cpu", tensor_parallel_size=2, max_model_len=64, max_num_seqs=2))
    factory.start(config, "warning", lambda: None).close()
    assert "torch" not in sys.modules
"""


def test_only_ranks_import_torch() -> None:
    """The process that starts them must keep answering other hosts, which take its silence for its end."""
    subprocess.run([sys.executable, "-c", _START], check=True, timeout=120)


def test_a_rank_that_has_just_ended_is_no_error() -> None:
    """Its fork server has waited for it, and has not told the exit code yet, so that it still counts as alive."""
    process = multiprocessing.get_context("fork").Process(target=str)
    process.start()
    assert process.pid is not None
    os.waitpid(process.pid, 0)
    assert process.is_alive()
    ranks = LocalRanks.__new__(LocalRanks)
    ranks._selector, ranks._usage, ranks._pipes = selectors.DefaultSelector(), None, []
    ranks._processes = {0: process}
    ranks.kill()
