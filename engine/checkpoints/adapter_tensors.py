"""Reads the matrices of an adapter from its file, and changes tensors of its base by them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from quire.engine.architecture.adapter_spec import LowRank, Piece, Runs, TensorChange
from quire.engine.architecture.quantization.gguf import SCHEMES
from quire.engine.architecture.quantization.method import DTYPES
from quire.engine.checkpoints.quantized_tensors.gguf import GgufReader
from quire.engine.protocol.errors import ConfigError
from quire.engine.repository.adapter_folder import AdapterFolder

_KEPT = 1 << 28
"""Bytes of tensors that are kept, as the experts of a stack are pieces of the same ones."""
_AT_ONCE = 1 << 24
"""Weights that are widened to float32 at once."""


class AdapterTensors:
    """The pieces of an adapter's tensors."""

    def __init__(self, adapter: AdapterFolder, read: Callable[[str], bytearray]) -> None:
        self._adapter, self._read = adapter, read
        self._kept: OrderedDict[str, Tensor] = OrderedDict()
        self._num_bytes = 0
        """Of those that are kept."""

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
        self._num_bytes += tensor.nbytes
        while len(self._kept) > 1 and self._num_bytes > _KEPT:
            self._num_bytes -= self._kept.popitem(last=False)[1].nbytes
        return tensor


@contextmanager
def open_tensors(adapter: AdapterFolder) -> Iterator[AdapterTensors]:
    """The tensors of an adapter; its file stays open meanwhile."""
    with adapter.reading() as read:
        yield AdapterTensors(adapter, read)


def changed(tensor: Tensor, change: TensorChange, tensors: AdapterTensors) -> Tensor:
    """A tensor of the base's checkpoint with its change, in its type."""
    if change.replacement is None:
        result = tensor.reshape(change.shape).clone()
    else:
        result = tensors[change.replacement].reshape(change.shape).to(tensor.dtype, copy=True)
    if change.new_rows is not None:
        tokens, values = change.new_rows
        result[torch.tensor(tokens)] = tensors[values].to(result.dtype)
    for each in change.low_rank:
        matrix = result if each.expert is None else result[each.expert]
        _add(matrix.mT if change.is_transposed else matrix.flatten(1), each, tensors)
    return result


def _add(matrix: Tensor, change: LowRank, tensors: AdapterTensors) -> None:
    """Add a low-rank change to a matrix `[out, in]`, a few rows at a time, in float32."""
    up, down = tensors[change.up].float(), tensors[change.down].float()
    magnitude = None if change.magnitude is None else tensors[change.magnitude].float()
    own = indices(change.rows)
    places = torch.arange(len(matrix))[own]
    step = max(1, _AT_ONCE // matrix.shape[1])

    def sums() -> Iterator[tuple[Tensor, Tensor, slice]]:
        for start in range(0, len(places), step):
            rows = slice(start, start + step)
            yield places[rows], matrix[places[rows]].float() + change.scaling * (up[rows] @ down), rows

    norms = torch.zeros(matrix.shape[1])
    if change.has_column_norms:
        for _, values, _ in sums():
            norms += values.square().sum(0)
    for at, values, rows in sums():
        if magnitude is not None and change.has_column_norms:
            values *= magnitude[:, 0] / norms.sqrt()
        elif magnitude is not None:
            values *= magnitude[rows] / values.norm(dim=1, keepdim=True)
        matrix[at] = values.to(matrix.dtype)


def indices(runs: Runs) -> slice | Tensor:
    """What selects these places of a dimension."""
    if len(runs) == 1:
        return slice(runs[0].start, runs[0].stop, runs[0].step)
    return torch.cat([torch.arange(run.start, run.stop, run.step) for run in runs])


def _at(matrix: Tensor, runs: Runs, dim: int) -> Tensor:
    own = indices(runs)
    return matrix[own] if dim == 0 else matrix[:, own]
