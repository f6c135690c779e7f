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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.engine.architecture.model_spec import TransformersModelSpec
from quire.engine.protocol.errors import ConfigError

logger = logging.getLogger(__name__)

_MODULE = "quire.engine.models.transformers_backend.describe"
_AUTO = "models/auto/modeling_auto.py"
"""Where transformers maps model types to architectures."""
_SECONDS = 300


@dataclass(frozen=True, kw_only=True)
class DescribeRequest:
    """A model folder, and the parallel layout to measure."""

    path: Path
    architecture: str | None = None
    """The class that transformers is to build; None: as in config.json."""
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    length: int | None = None
    """--max-model-len."""
    trust_remote_code: bool = False
    hf_overrides: Mapping[str, Any] = field(default_factory=dict)
    is_checked: bool = True
    """Whether to compare a small model of the same kind with transformers' own implementation."""
    is_verbose: bool = False
    """Whether errors include a traceback."""

    @property
    def is_single(self) -> bool:
        return self.tensor_parallel_size == self.pipeline_parallel_size == 1


def knows(names: Sequence[str]) -> bool:
    """Whether transformers has one of these architectures, for whatever task."""
    return _has(_source(_AUTO), *names)


def architectures(model_type: str, *, with_headless: bool) -> list[str]:
    """Return the class that transformers builds for a `model_type` to generate text, if it has one; and, with
    `with_headless`, the one without a head.
    """
    source = _source(_AUTO)
    tables = ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", *["MODEL_MAPPING_NAMES"] * with_headless)
    entries = (re.search(rf'"{re.escape(model_type)}", "(\w+)"', _table(source, name) or "") for name in tables)
    return [entry[1] for entry in entries if entry is not None]


def check_known(names: Sequence[str], hf_config: Mapping[str, Any], trust_remote_code: bool) -> None:
    """Raise `ConfigError` if transformers lacks the model's architecture or activation.

    Its tables are read from its source, as importing it takes seconds. What they do not say, `describe` finds out.
    """
    if hf_config.get("auto_map") and trust_remote_code:
        return
    source = _source(_AUTO)
    if not _has(_table(source, "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"), *names):
        if hf_config.get("auto_map"):
            raise ConfigError("it requires its own Python code, which needs --trust-remote-code")
        if _has(source, *names):
            raise ConfigError("it is not a causal language model of text in transformers")
        raise ConfigError("this version of transformers does not know it")
    activations = _table(_source("activations.py"), "ACT2CLS")
    for name in ("hidden_act", "hidden_activation", "activation_function"):
        activation = hf_config.get(name)
        if activation and not _has(activations, activation):
            raise ConfigError(f"it has no {name} {activation!r}")


def _source(file: str) -> str | None:
    """A source file of transformers, or None if it is not found."""
    spec = importlib.util.find_spec("transformers")
    path = Path(spec.origin).parent / file if spec is not None and spec.origin is not None else None
    return path.read_text(encoding="utf-8") if path is not None and path.exists() else None


def _table(source: str | None, name: str) -> str | None:
    found = re.search(rf"^{name} = .*?^[)}}]", source or "", re.DOTALL | re.MULTILINE)
    return None if found is None else found[0]


def _has(source: str | None, *names: object) -> bool:
    """Whether one of the names is in the source, or there is no source to tell."""
    return source is None or any(f'"{name}"' in source for name in names)


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
