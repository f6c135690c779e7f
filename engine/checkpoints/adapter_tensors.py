"""Reads the matrices of an adapter from its file."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from quire.engine.architecture.adapter_spec import Piece, Runs
from quire.engine.architecture.quantization.gguf import SCHEMES
from quire.engine.architecture.quantization.method import DTYPES
from quire.engine.checkpoints.quantized_tensors.gguf import GgufReader
from quire.engine.protocol.errors import ConfigError
from quire.engine.repository.adapter_folder import AdapterFolder

_KEPT = 1 << 28
"""Bytes of tensors that are kept, as the experts of a stack are pieces of the same ones."""


class AdapterTensors:
    """The pieces of an adapter's tensors."""

    def __init__(self, adapter: AdapterFolder, read: Callable[[str], bytearray]) -> None:
        self._adapter, self._read = adapter, read
        self._kept: OrderedDict[str, Tensor] = OrderedDict()

    def __getitem__(self, piece: Piece) -> Tensor:
        """The piece as a matrix, in the type of the file, or in float32 if that is quantized. Raises `ConfigError`
        naming the tensor if it has changed since the adapter was opened, or has numbers that are not finite."""
        tensor = self._tensor(piece.tensor)
        if piece.index is not None:
            tensor = tensor[piece.index]
        matrix = _at(_at(tensor.reshape(len(tensor) if tensor.dim() else 1, -1), piece.rows, 0), piece.columns, 1)
        return matrix.mT if piece.is_transposed else matrix

    def _tensor(self, name: str) -> Tensor:
        if name in self._kept:
            self._kept.move_to_end(name)
            return self._kept[name]
        stored = self._adapter.tensors[name]
        content = torch.frombuffer(self._read(name), dtype=torch.uint8)
        if stored.dtype in SCHEMES:
            scheme = SCHEMES[stored.dtype]
            rows = content.view(*stored.shape[:-1], -1)
            reader = GgufReader(scheme, "", stored.shape, {".weight": rows})
            tensor = reader[tuple(slice(0, size) for size in stored.shape)]
        else:
            tensor = content.view(getattr(torch, DTYPES[stored.dtype])).view(stored.shape)
        if not tensor.isfinite().all():
            raise ConfigError(f"{self._adapter.file}: {name} has values that are NaN or infinite")
        self._kept[name] = tensor
        while len(self._kept) > 1 and sum(each.nbytes for each in self._kept.values()) > _KEPT:
            self._kept.popitem(last=False)
        return tensor


@contextmanager
def open_tensors(adapter: AdapterFolder) -> Iterator[AdapterTensors]:
    """The tensors of an adapter; its file stays open meanwhile."""
    with adapter.reading() as read:
        yield AdapterTensors(adapter, read)


def indices(runs: Runs) -> slice | Tensor:
    """What selects these places of a dimension."""
    if len(runs) == 1:
        return slice(runs[0].start, runs[0].stop, runs[0].step)
    return torch.cat([torch.arange(run.start, run.stop, run.step) for run in runs])


def _at(matrix: Tensor, runs: Runs, dim: int) -> Tensor:
    own = indices(runs)
    return matrix[own] if dim == 0 else matrix[:, own]
