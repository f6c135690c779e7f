"""The tensors of a GGUF model, by the names of its published form."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from quire.engine.architecture.quantization.gguf import SCHEMES
from quire.engine.repository import gguf, gguf_architectures, gguf_folder
from quire.engine.repository.model_files import TensorInfo, read_json

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GgufFiles:
    """The file that a folder of `gguf_folder.write` belongs to."""

    def __init__(self, folder: Path) -> None:
        model = gguf.read(gguf_folder.file_of(folder))
        self._tensors = gguf_architectures.hf_tensors(model, read_json(folder / "config.json"))
        self._bytes = {file: torch.from_numpy(np.memmap(file, np.uint8, mode="c")) for file in model.files}
        self.headers = {
            name: TensorInfo(each.file, each.dtype, each.shape, name) for name, each in self._tensors.items()
        }

    def view(self, info: TensorInfo) -> Tensor:
        """Backed by the file, but for norms of Gemma. Quantized tensors are uint8 `[…, out, bytes]`."""
        tensor = self._tensors[info.name]
        content = self._bytes[tensor.file][tensor.start : tensor.start + tensor.bytes]
        if tensor.dtype in SCHEMES:
            return content.view(*tensor.shape[:-1], tensor.row_bytes)
        assert len(content) == math.prod(tensor.shape) * gguf.PLAIN[tensor.dtype]
        plain = content.view(_DTYPES[tensor.dtype]).view(tensor.shape)
        return plain - tensor.added if tensor.added else plain
