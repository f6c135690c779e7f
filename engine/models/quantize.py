"""The process of `quire quantize`: it builds the stages that GPTQ lets compute."""

from __future__ import annotations

from functools import partial

import torch

from quire.engine.checkpoints.quantize import run
from quire.engine.config.engine_config import EngineConfig
from quire.engine.distributed.communicator import Parallel
from quire.engine.models.build import load
from quire.engine.models.decoder import Decoder
from quire.engine.process import tool


def load_stage(config: EngineConfig, stage: int) -> Decoder:
    """A stage of the model on the CPU, not packed."""
    return load(config, stage, Parallel(), torch.device("cpu"), pack=False)


if __name__ == "__main__":
    tool.main(partial(run, load=load_stage))
