"""The process of `quire quantize`: it builds the stages that GPTQ lets compute."""

from __future__ import annotations

import os
import pickle
import signal
import sys

import torch

from quire.engine.checkpoints.quantize import run
from quire.engine.config.engine_config import EngineConfig
from quire.engine.config.quantize_request import QuantizeRequest
from quire.engine.distributed.communicator import Parallel
from quire.engine.models.build import load
from quire.engine.models.decoder import Decoder
from quire.engine.protocol.errors import ConfigError


def load_stage(config: EngineConfig, stage: int) -> Decoder:
    """A stage of the model on the CPU, not packed."""
    return load(config, stage, Parallel(), torch.device("cpu"), pack=False)


def _end(*_: object) -> None:
    """Leave no folder behind."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(143)


def main() -> None:
    """Run a request; an error of the user's is printed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which then terminates this process
    signal.signal(signal.SIGTERM, _end)
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    request: QuantizeRequest = pickle.load(sys.stdin.buffer)
    try:
        run(request, load_stage)
    except ConfigError as error:
        print(error, end="", file=output, flush=True)


if __name__ == "__main__":
    main()
