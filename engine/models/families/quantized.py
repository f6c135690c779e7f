"""Quantized checkpoints, which are dequantized to the model's data type. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from quire.engine.protocol.errors import ConfigError


@dataclass(frozen=True)
class QuantizedCheckpoint:
    """How a checkpoint's quantized tensors are stored; its other tensors are as in any checkpoint."""

    method: Literal["fp8", "mxfp4"]
    """fp8: 8-bit floats and a scale for each block (DeepSeek-V3); mxfp4: 4-bit floats in groups of 32 (gpt-oss)."""
    block: tuple[int, int] = (128, 128)
    """Rows and columns that share an fp8 scale."""


def quantized(config: Mapping[str, Any]) -> QuantizedCheckpoint | None:
    """The quantization in config.json, if any. Raises `ConfigError` if the method is not supported."""
    settings = config.get("quantization_config")
    if not settings:
        return None
    if not isinstance(settings, Mapping):
        raise ConfigError(f"quantization_config must be an object, got {settings!r}")
    method = settings.get("quant_method", "unknown")
    if method == "mxfp4":
        return QuantizedCheckpoint("mxfp4")
    if method == "fp8":
        block = settings.get("weight_block_size")
        if isinstance(block, list) and len(block) == 2 and all(isinstance(size, int) and size > 0 for size in block):
            return QuantizedCheckpoint("fp8", (block[0], block[1]))
        method = f"fp8 with weight_block_size {block}"
    raise ConfigError(
        f"this checkpoint is quantized ({method}), which is not supported; use the full-precision one "
        "(supported: mxfp4, and fp8 with two numbers as weight_block_size)"
    )
