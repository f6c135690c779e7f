"""Models that transformers builds: what they take is asked of a process of its own, which may import torch."""

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

_ANSWERS = "quire.engine.models.transformers_backend.describe"
_SECONDS = 300


@dataclass(frozen=True, kw_only=True)
class DescribeRequest:
    """A model folder, and the layout that it is to be served in."""

    path: Path
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    length: int | None = None
    """--max-model-len."""
    trust_remote_code: bool = False
    is_checked: bool = True
    """Whether a small model of the kind is compared with transformers' own."""
    is_verbose: bool = False
    """Whether a traceback is wanted rather than a refusal."""

    @property
    def is_single(self) -> bool:
        return self.tensor_parallel_size == self.pipeline_parallel_size == 1


def describe(request: DescribeRequest) -> TransformersModelSpec:
    """Measure the model, and see that it is served as transformers would run it; raises `ConfigError` with the reason.

    Takes some seconds, most of them for imports.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-P", "-m", _ANSWERS]  # -P: nothing of the current folder
    try:
        done = subprocess.run(
            command, input=pickle.dumps(request), env=environment, capture_output=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{request.path}: transformers did not build this model within {_SECONDS} s") from None
    if done.returncode or not done.stdout:
        said = done.stderr.decode(errors="replace").strip()
        last = said.splitlines()[-1] if said else f"exit status {done.returncode}"
        raise ConfigError(f"transformers cannot build it ({said if request.is_verbose else last})")
    answer = pickle.loads(done.stdout)
    if isinstance(answer, str):
        raise ConfigError(answer)
    assert isinstance(answer, TransformersModelSpec)
    return answer
