"""Ranks as processes of a host."""

from __future__ import annotations

import subprocess
import sys

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
