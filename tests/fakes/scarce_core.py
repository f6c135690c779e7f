"""The real engine core, but without enough memory for sequences of more than a number of tokens.

This number is in the environment.
"""

from __future__ import annotations

import os
from typing import Any

from quire.engine.core import engine_core
from quire.engine.core.launch import CoreArgs
from quire.engine.process.supervisor import Process, start_process

_MOST = "QUIRE_TEST_TOKENS"


def start(args: CoreArgs, folder: str, most: int) -> Process:
    """Replaces `quire.engine.core.launch.start_core`."""
    return start_process("tests.fakes.scarce_core", (args, folder), env={"PYTHONPATH": os.getcwd(), _MOST: str(most)})


def limit(most: int) -> None:
    from quire.engine.models.decoder_layer import DecoderLayer

    forward = DecoderLayer.forward

    def scarce(layer: Any, x: Any, residual: Any, step: Any) -> Any:
        if int(step.batch.sequence_lengths.max()) > most:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory")
        return forward(layer, x, residual, step)

    DecoderLayer.forward = scarce  # type: ignore[method-assign, assignment]


def main() -> None:
    limit(int(os.environ[_MOST]))
    engine_core.main()
