"""Compares a checkpoint's headers with the tensors that the model needs, before any weight is read. No torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from quire.engine.config.engine_config import ModelConfig
from quire.engine.config.model_files import TensorInfo
from quire.engine.models.families import FAMILIES
from quire.engine.models.families.quantized import QuantizedCheckpoint
from quire.engine.models.families.tensors import checkpoint_tensors
from quire.engine.protocol.errors import ConfigError

FP8_SCALES, MXFP4_BLOCKS, MXFP4_SCALES = "_scale_inv", "_blocks", "_scales"
"""Suffixes of quantized tensors' names."""
MXFP4_GROUP = 32
"""Values that share a scale."""
_DTYPES = ("F32", "BF16", "F16", "FP8", "MXFP4")
_NAMED_PROBLEMS = 8


def check_model(model: ModelConfig, headers: Mapping[str, TensorInfo]) -> None:
    """Raise `ConfigError` naming the tensors of one of Quire's own models that are missing or do not fit."""
    needed = checkpoint_tensors(model.architecture, has_head=model.pooling is None)
    stored = by_needed_name(headers, FAMILIES[model.architecture.name].prefix, needed)
    check_tensors(model, needed, dequantized(stored, model.quantized))


def check_tensors(model: ModelConfig, needed: Mapping[str, tuple[int, ...]], headers: Mapping[str, TensorInfo]) -> None:
    """Raise `ConfigError` unless the (dequantized) headers have all needed tensors, in these shapes."""
    problems = []
    for name, expected in needed.items():
        if name not in headers:
            problems.append(f"{name} is missing")
        elif headers[name].shape != expected:
            problems.append(f"{name} has the shape {list(headers[name].shape)}, expected {list(expected)}")
        elif headers[name].dtype not in _DTYPES:
            without = f" without a matching {name}{FP8_SCALES}" * (model.quantized is not None)
            problems.append(f"{name} is of type {headers[name].dtype}{without}, which is not supported")
    if problems:
        more = f"; and {len(problems) - _NAMED_PROBLEMS} more" if len(problems) > _NAMED_PROBLEMS else ""
        raise ConfigError(
            f"{model.path}: the weights do not match config.json: {'; '.join(problems[:_NAMED_PROBLEMS])}{more}"
        )


def by_needed_name(headers: Mapping[str, TensorInfo], prefix: str, needed: Collection[str]) -> dict[str, TensorInfo]:
    """The headers under the names that are needed: a checkpoint of the model without its head lacks their prefix, and
    in the first ones of BERT, converted from TensorFlow, norms have a gamma and a beta."""
    is_bare = not any(name.startswith(prefix) for name in headers)

    def needed_name(name: str) -> str:
        new = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
        return next((each for each in (name, new, prefix + new) if each in needed), prefix + name if is_bare else name)

    return {needed_name(name): info for name, info in headers.items()}


def dequantized(headers: Mapping[str, TensorInfo], quantized: QuantizedCheckpoint | None) -> dict[str, TensorInfo]:
    """The headers with quantized tensors, if their scales match, replaced by the tensors that they represent."""
    found = dict(headers)
    for name, info in headers.items() if quantized else ():
        assert quantized is not None
        if quantized.method == "fp8" and info.dtype == "F8_E4M3" and len(info.shape) == 2:
            blocks = tuple(-(-size // block) for size, block in zip(info.shape, quantized.block, strict=True))
            if name + FP8_SCALES in headers and headers[name + FP8_SCALES].shape == blocks:
                del found[name + FP8_SCALES]
                found[name] = replace(info, dtype="FP8")
        if quantized.method == "mxfp4" and name.endswith(MXFP4_BLOCKS) and len(info.shape) == 4:
            whole = name.removesuffix(MXFP4_BLOCKS)
            experts, rows, groups, size = info.shape
            scales = headers.get(whole + MXFP4_SCALES)
            if scales is not None and scales.shape == info.shape[:-1] and 2 * size == MXFP4_GROUP:
                del found[name], found[whole + MXFP4_SCALES]
                found[whole] = replace(info, dtype="MXFP4", shape=(experts, groups * MXFP4_GROUP, rows))
    return found
