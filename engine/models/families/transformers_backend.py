"""Models that transformers builds: a separate process, which may import torch, measures them."""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from quire.engine.models.model_spec import TransformersModelSpec
from quire.engine.protocol.errors import ConfigError

logger = logging.getLogger(__name__)

_MODULE = "quire.engine.models.transformers_backend.describe"
_SECONDS = 300


@dataclass(frozen=True, kw_only=True)
class DescribeRequest:
    """A model folder, and the parallel layout to measure."""

    path: Path
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    length: int | None = None
    """--max-model-len."""
    trust_remote_code: bool = False
    is_checked: bool = True
    """Whether to compare a small model of the same kind with transformers' own implementation."""
    is_verbose: bool = False
    """Whether errors include a traceback."""

    @property
    def is_single(self) -> bool:
        return self.tensor_parallel_size == self.pipeline_parallel_size == 1


def describe(request: DescribeRequest) -> TransformersModelSpec:
    """Measure the model and check that it runs as in transformers. Raises `ConfigError` with the reason if it does not.

    Takes a few seconds, mostly for imports.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-P", "-m", _MODULE]  # -P: import nothing from the current folder
    try:
        process = subprocess.run(
            command, input=pickle.dumps(request), env=environment, capture_output=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{request.path}: transformers did not build this model within {_SECONDS} s") from None
    if process.returncode or not process.stdout:
        errors = process.stderr.decode(errors="replace").strip()
        last = errors.splitlines()[-1] if errors else f"exit status {process.returncode}"
        raise ConfigError(f"transformers cannot build it ({errors if request.is_verbose else last})")
    answer = pickle.loads(process.stdout)
    if isinstance(answer, str):
        raise ConfigError(answer)
    assert isinstance(answer, TransformersModelSpec)
    return answer
