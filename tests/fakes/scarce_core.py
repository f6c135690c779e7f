"""The real engine core, but for a memory that does not suffice for sequences of more than so many tokens.

Run as `python -m tests.fakes.scarce_core TOKENS`, with what `quire.engine.core.engine_core` reads from standard input.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import Any

from quire.engine.config.engine_config import EngineConfig
from quire.engine.core import engine_core
from quire.engine.core.launch import Endpoints


def start(config: EngineConfig, endpoints: Endpoints, log_level: str, most: int) -> subprocess.Popen[bytes]:
    """In place of `quire.engine.core.launch.start_core`."""
    command = [sys.executable, "-m", "tests.fakes.scarce_core", str(most)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(pickle.dumps((config, endpoints, log_level)))
    process.stdin.flush()
    return process


def limit(most: int) -> None:
    from quire.engine.models.decoder import DecoderLayer

    forward = DecoderLayer.forward

    def scarce(layer: Any, x: Any, residual: Any, batch: Any, *rest: Any) -> Any:
        if int(batch.sequence_lengths.max()) > most:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory")
        return forward(layer, x, residual, batch, *rest)

    DecoderLayer.forward = scarce  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    limit(int(sys.argv[1]))
    engine_core.main()
