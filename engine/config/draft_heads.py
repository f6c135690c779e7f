"""Resolves draft heads (the target's `ModelConfig` → the head's). No torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

from quire.engine.architecture.draft_head_spec import DraftHeadSpec
from quire.engine.architecture.families import draft_heads, of_text
from quire.engine.config.engine_config import ModelConfig
from quire.engine.protocol.errors import ConfigError
from quire.engine.repository import model_files


def mtp(target: ModelConfig) -> ModelConfig:
    """Return the head for multi-token prediction in the target's checkpoint, or several. Raises `ConfigError` if there
    is none.
    """
    if target.load_format not in ("safetensors", "pt", "dummy"):
        raise ConfigError(f"mtp is not supported with --load-format {target.load_format}")
    config = model_files.with_overrides(model_files.read_json(target.path / "config.json"), target.hf_overrides)
    names = None if target.load_format == "dummy" else model_files.tensor_names(target.path, target.load_format)
    return replace(
        target, architecture=draft_heads.mtp_head(of_text(config), target.architecture, names), packed_cache=0.0
    )


def eagle(
    method: Literal["eagle", "eagle3"], path: Path, load_format: Literal["safetensors", "pt"], target: ModelConfig
) -> ModelConfig:
    """Return the head in the folder `path`. Raises `ConfigError` if it is not supported or does not fit the target."""
    names = model_files.tensor_names(path, load_format)
    config = model_files.read_json(path / "config.json")
    try:
        arch = draft_heads.eagle_head(method, config, names, target.architecture)
    except ConfigError as error:
        raise ConfigError(f"{path / 'config.json'}: {error}") from None
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path / 'config.json'} has a value that {method} cannot use: {error}") from None
    return replace(
        target,
        path=path,
        architecture=arch,
        load_format="dummy" if target.load_format == "dummy" else load_format,
        hf_overrides={},
        packed_cache=0.0,
        quantized=None,
        quantized_outer=frozenset(),
    )


def with_aux_layers(target: ModelConfig, head: ModelConfig) -> ModelConfig:
    """Return the target with the layers that the head reads as its `aux_layers`."""
    assert isinstance(head.architecture, DraftHeadSpec)
    return replace(target, architecture=replace(target.architecture, aux_layers=head.architecture.reads_layers))
