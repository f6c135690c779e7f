"""Models that transformers builds: a separate process, which may import torch, measures them."""

from __future__ import annotations

import ast
import importlib.util
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from quire.engine.architecture.model_spec import TransformersModelSpec
from quire.engine.protocol.errors import ConfigError

logger = logging.getLogger(__name__)

_MODULE = "quire.engine.models.transformers_backend.describe"
_AUTO = "models/auto/modeling_auto.py"
"""Where transformers maps model types to architectures."""
_CAUSAL, _SEEING = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES"
"""Its tables of architectures that generate text, from text, and from images and text."""
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
    media: bool = True
    """Whether a model that takes images is to take them."""
    trust_remote_code: bool = False
    hf_overrides: Mapping[str, Any] = field(default_factory=dict)


def knows(names: Sequence[str]) -> bool:
    """Whether transformers has one of these architectures, for any task."""
    tables = _tables().values()
    return not tables or any(name in built for table in tables for built in table.values() for name in names)


def architectures(model_type: str, *, with_headless: bool) -> list[str]:
    """Return the class that transformers builds for a `model_type` to generate text, if it has one; and, with
    `with_headless`, the one without a head.
    """
    tables = (_CAUSAL, *["MODEL_MAPPING_NAMES"] * with_headless)
    return [name for table in tables for name in _tables().get(table, {}).get(model_type, ())[:1]]


def check_known(names: Sequence[str], hf_config: Mapping[str, Any], trust_remote_code: bool) -> None:
    """Raise `ConfigError` if transformers lacks the model's architecture or activation. `describe` checks the rest."""
    if hf_config.get("auto_map") and trust_remote_code:
        return
    generating = [*chain(*_tables().get(_CAUSAL, {}).values()), *chain(*_tables().get(_SEEING, {}).values())]
    if generating and not {*names} & {*generating}:
        if hf_config.get("auto_map"):
            raise ConfigError("it requires its own Python code, which needs --trust-remote-code")
        if knows(names):
            raise ConfigError("it is not a causal language model of text in transformers")
        raise ConfigError("this version of transformers does not know it")
    activations = _activations()
    for name in ("hidden_act", "hidden_activation", "activation_function"):
        activation = hf_config.get(name)
        if activations and activation and str(activation) not in activations:
            raise ConfigError(f"it has no {name} {activation!r}")


@cache
def _tables() -> Mapping[str, Mapping[str, tuple[str, ...]]]:
    """transformers' tables from model types to architectures."""
    tables = dict[str, dict[str, tuple[str, ...]]]()
    for statement in _statements(_AUTO):
        match statement:
            case ast.Assign([ast.Name(table)], ast.Call(args=[ast.List(entries)])):
                pairs = [ast.literal_eval(each) for each in entries if isinstance(each, ast.Tuple)]
                tables[table] = {kind: (built,) if isinstance(built, str) else built for kind, built in pairs}
    return tables


def _activations() -> set[str]:
    """The names of transformers' activations."""
    for statement in _statements("activations.py"):
        match statement:
            case ast.Assign([ast.Name("ACT2CLS")], ast.Dict(keys)):
                return {str(key.value) for key in keys if isinstance(key, ast.Constant)}
    return set()


def _statements(file: str) -> Sequence[ast.stmt]:
    """A source file of transformers, which is read because importing it takes seconds; empty if it is not found."""
    spec = importlib.util.find_spec("transformers")
    path = Path(spec.origin).parent / file if spec is not None and spec.origin is not None else None
    return ast.parse(path.read_bytes()).body if path is not None and path.exists() else []


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
        raise ConfigError(f"transformers cannot build it ({last})")
    answer = pickle.loads(process.stdout)
    if isinstance(answer, str):
        raise ConfigError(answer)
    assert isinstance(answer, TransformersModelSpec)
    return answer
