"""Reads the tensors in a checkpoint's files. Nothing is read before it is accessed."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from quire.engine.config import model_files
from quire.engine.config.checkpoint_tensors import (
    FP8_SCALES,
    MXFP4_BLOCKS,
    MXFP4_SCALES,
    by_needed_name,
    dequantized,
)
from quire.engine.config.engine_config import ModelConfig
from quire.engine.config.model_files import TensorInfo
from quire.engine.models.dequantize import Fp8Slices, Mxfp4Slices, Sliceable
from quire.engine.protocol.errors import ConfigError

logger = logging.getLogger(__name__)


class CheckpointFiles(Protocol):
    """The checkpoint as it is stored."""

    headers: dict[str, TensorInfo]

    def view(self, info: TensorInfo) -> Tensor:
        """The tensor, backed by the file."""


class SafetensorsFiles:
    """A folder's *.safetensors."""

    def __init__(self, folder: Path) -> None:
        self.headers = model_files.read_headers(folder)
        self._files: dict[Path, Any] = {}

    def view(self, info: TensorInfo) -> Tensor:
        if info.file not in self._files:
            self._files[info.file] = safe_open(info.file, framework="pt")
        tensor: Tensor = self._files[info.file].get_tensor(info.name)
        return tensor


class TorchFiles:
    """A folder's pytorch_model*.bin; only tensors are unpickled."""

    def __init__(self, folder: Path) -> None:
        self.headers: dict[str, TensorInfo] = {}
        self._tensors: dict[str, Tensor] = {}
        for file in model_files.torch_files(folder):
            for name, tensor in _unpickled(file).items():
                self.headers[name] = TensorInfo(
                    file, _TYPES.get(tensor.dtype, str(tensor.dtype)), (*tensor.shape,), name
                )
                self._tensors[name] = tensor

    def view(self, info: TensorInfo) -> Tensor:
        return self._tensors[info.name]


_TYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float8_e4m3fn: "F8_E4M3"} | {
    torch.uint8: "U8"
}
"""safetensors' names."""


def _unpickled(file: Path) -> dict[str, Tensor]:
    try:
        try:
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap can only be used" not in str(error):
                raise
            logger.warning("%s: format older than torch 1.6; the complete file is kept in memory while loading", file)
            content = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise ConfigError(f"{file}: holds other things than tensors, which are not unpickled") from None
    except (RuntimeError, EOFError, OSError) as error:
        raise ConfigError(f"{file}: cannot be read: {str(error).splitlines()[0]}") from None
    if not isinstance(content, dict) or not all(isinstance(tensor, Tensor) for tensor in content.values()):
        raise ConfigError(f"{file}: tensors by name are expected (a state_dict)")
    return content


def open_files(folder: Path, load_format: str) -> CheckpointFiles:
    """The weights in a folder."""
    return TorchFiles(folder) if load_format == "pt" else SafetensorsFiles(folder)


class Checkpoint:
    """The checkpoint in dequantized form, with the names of a model with a head."""

    def __init__(self, model: ModelConfig, prefix: str, needed: Iterable[str]) -> None:
        self._files = open_files(model.path, model.load_format)
        self._quantized, self._dtype = model.quantized, getattr(torch, model.dtype)
        self._stored = by_needed_name(self._files.headers, prefix, set(needed))
        self.headers = dequantized(self._stored, model.quantized)

    def __getitem__(self, name: str) -> Sliceable:
        """The tensor; its slices have the stored type, or the model's type if it was quantized."""
        match self.headers[name].dtype:
            case "FP8":
                assert self._quantized is not None
                scales = self._view(name + FP8_SCALES)
                return Fp8Slices(self._view(name), scales, self._quantized.block, self._dtype)
            case "MXFP4":
                return Mxfp4Slices(self._view(name + MXFP4_BLOCKS), self._view(name + MXFP4_SCALES), self._dtype)
        return self._view(name)

    def _view(self, name: str) -> Tensor:
        return self._files.view(self._stored[name])
