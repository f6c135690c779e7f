"""Reads the tensors in a checkpoint's files. Nothing is read before it is accessed."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from quire.engine.architecture.families import FAMILIES
from quire.engine.architecture.families.tensors import NeededTensor, StackSlice, stacked_experts
from quire.engine.architecture.model_spec import ModelSpec
from quire.engine.architecture.quantization.method import DTYPES, Scheme, Shape
from quire.engine.architecture.quantization.online import OnlineScheme
from quire.engine.checkpoints.checkpoint import StoredSlice
from quire.engine.checkpoints.gguf_files import GgufFiles
from quire.engine.checkpoints.quantized_tensors import READERS
from quire.engine.checkpoints.quantized_tensors.online import OnlineReader
from quire.engine.checkpoints.quantized_tensors.reader import Reader, Sliceable
from quire.engine.config.checkpoint_tensors import by_needed_name, check_tensors, logical_names, with_stacks
from quire.engine.config.engine_config import ModelConfig
from quire.engine.protocol.errors import ConfigError
from quire.engine.repository import model_files
from quire.engine.repository.model_files import TensorInfo

logger = logging.getLogger(__name__)


class CheckpointFiles(Protocol):
    """A checkpoint in its stored form."""

    headers: dict[str, TensorInfo]

    def view(self, info: TensorInfo) -> Tensor:
        """The tensor, backed by the file."""


class SafetensorsFiles:
    """A folder's *.safetensors."""

    def __init__(self, folder: Path, load_format: str) -> None:
        self.headers = model_files.read_headers(folder, load_format)
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
    if load_format == "gguf":
        return GgufFiles(folder)
    return TorchFiles(folder) if load_format == "pt" else SafetensorsFiles(folder, load_format)


class SeparatedExperts:
    """A checkpoint with stacks of experts as one that has the experts one by one: `ModelSpec.separate_experts`."""

    def __init__(self, files: CheckpointFiles, arch: ModelSpec) -> None:
        slices = stacked_experts(arch)
        named = by_needed_name(files.headers, FAMILIES[arch.name].prefix, {each.stack for each in slices.values()})
        self._files, self.headers = files, dict(files.headers)
        self._slices: dict[str, tuple[TensorInfo, StackSlice]] = {}
        for name, place in slices.items():
            if (stack := named.get(place.stack)) is None:
                continue
            self.headers.pop(stack.name, None)
            pairs = zip(name, place.stack, strict=False)
            common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            own = stack.name.removesuffix(place.stack[common:]) + name[common:]  # the file's name may lack the prefix
            _, *rest = place.shape
            columns = rest[:-1] if place.is_transposed else rest[1:]
            shape = (sum(map(len, place.rows)), *columns)
            self.headers[own] = TensorInfo(stack.file, stack.dtype, shape, own)
            self._slices[own] = stack, place

    def view(self, info: TensorInfo) -> Tensor:
        if info.name not in self._slices:
            return self._files.view(info)
        stack, (_, shape, expert, rows, is_transposed) = self._slices[info.name]
        whole = self._files.view(stack).view(shape)[expert]
        whole = whole.T if is_transposed else whole
        parts = [whole[each.start : each.stop : each.step] for each in rows]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def open_model(model: ModelConfig) -> CheckpointFiles:
    """The weights of a model; stacks of experts are separated if the model has its experts one by one."""
    files = open_files(model.path, model.load_format)
    return SeparatedExperts(files, model.architecture) if model.architecture.separate_experts else files


class Checkpoint:
    """The tensors that a model needs, by the names of a model with a head; quantized tensors appear as the weights that
    they stand for."""

    def __init__(self, model: ModelConfig, prefix: str, needed: Mapping[str, NeededTensor]) -> None:
        """Raises `ConfigError` naming the tensors that are missing or have another shape."""
        self._files, self._model = open_model(model), model
        self.headers = with_stacks(by_needed_name(self._files.headers, prefix, needed), needed)
        self._quantized = check_tensors(model, needed, self.headers)

    @property
    def names(self) -> set[str]:
        """The names of all tensors; the tensors of a quantized weight are replaced by the weight's name."""
        return logical_names(self.headers, self._model.quantized)

    def scheme(self, name: str) -> Scheme | None:
        """How a needed tensor is quantized; None: it is not."""
        if name not in self._quantized:
            return None
        scheme, module, _ = self._quantized[name]
        return scheme.of_embedding() if module == self._model.embedding_name else scheme

    def dtype(self, name: str) -> str:
        """The type of a needed tensor; "quantized" if it is."""
        return "quantized" if name in self._quantized else DTYPES[self.headers[name].dtype]

    def file(self, name: str) -> Path:
        """The file that a needed tensor, or its codes, are in."""
        info = self.headers[name] if name not in self._quantized else next(iter(self._quantized[name].tensors.values()))
        return info.file

    def reader(self, name: str, shape: Shape) -> Reader[Any]:
        """The reader of a quantized tensor; `shape` is the weight's shape."""
        scheme, module, tensors = self._quantized[name]
        views = {each: self._files.view(info) for each, info in tensors.items()}
        if isinstance(scheme, OnlineScheme) and scheme.stored is not None:
            stored = READERS[type(scheme.stored)](scheme.stored, module, shape, views)
            return OnlineReader(scheme, module, shape, views, stored)
        return READERS[type(scheme)](scheme, module, shape, views)

    def __getitem__(self, stored: StoredSlice) -> Sliceable:
        """The tensor, or the codes or factors of a quantized one; other slices have the stored type, or float32."""
        if stored.name not in self._quantized:
            info = self.headers[stored.name]
            return self._files.view(info).reshape(info.shape)
        reader = self.reader(stored.name, stored.shape)
        return reader if stored.part is None else reader.part(stored.part, stored.group)
