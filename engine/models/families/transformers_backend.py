"""Models that transformers builds: a separate process, which may import torch, measures them."""

from __future__ import annotations

import importlib.util
import logging
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


def find_missing(names: Sequence[str], hf_config: Mapping[str, Any], trust_remote_code: bool) -> str | None:
    """Return what transformers does not have and the model needs: its architecture, activation or rope scaling.

    transformers' tables are read from its source, as importing it takes seconds. None if nothing is missing, or if it
    cannot be said without building the model.
    """
    if trust_remote_code and hf_config.get("auto_map"):
        return None
    if not _has("models/auto/modeling_auto.py", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", names):
        return f"architecture {', '.join(names) or '(none in config.json)'}"
    for name in ("hidden_act", "hidden_activation", "activation_function"):
        activation = hf_config.get(name)
        if activation and not _has("activations.py", "ACT2CLS", [activation]):
            return f"{name} {activation!r}"
    return None


def _has(file: str, table: str, names: Sequence[object]) -> bool:
    """Whether one of the names stands in a table of transformers, or the table is not found."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        return True
    try:
        source = (Path(spec.origin).parent / file).read_text(encoding="utf-8")
    except OSError:
        return True
    found = re.search(rf"^{table} = .*?^[)}}]", source, re.DOTALL | re.MULTILINE)
    return found is None or any(f'"{name}"' in found[0] for name in names)


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
