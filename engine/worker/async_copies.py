"""Asynchronous copies to the device and back. A sent tensor is available to all work launched later; a read follows all
work launched before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from quire.engine.layers import sending
from quire.engine.protocol.runner_output import RankOutput

Array = npt.NDArray[Any]


def send(values: Array, device: torch.device) -> Tensor:
    """Copy `values` to the device, as `sending.send` copies tensors; on a CPU the tensor shares their memory."""
    return sending.send(torch.from_numpy(values if values.flags.c_contiguous else values.copy()), device)


class HostCopy:
    """Asynchronous copies of tensors to the host. `arrays` waits for them, in any thread."""

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        self._tensors = tensors
        self._event: torch.cuda.Event | None = None
        if device.type != "cpu":
            self._tensors = [tensor.to("cpu", non_blocking=True) for tensor in tensors]  # pinned memory
            self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # blocking: the waiting thread does not spin
            self._event.record(torch.cuda.current_stream(device))

    def arrays(self) -> list[Array]:
        """Wait for the copies. Raises errors that occurred on the device."""
        if self._event is not None:
            self._event.synchronize()
        return [tensor.numpy() for tensor in self._tensors]


@dataclass(frozen=True)
class AsyncRead:
    """A part of a step's result: `fill` stores it, given the tensors as arrays."""

    tensors: Sequence[Tensor]
    fill: Callable[..., None]


class AsyncOutput:
    """The output of a step that may still be running on the device. The next step may be launched before `result` is
    called.

    One thread must call `result` in the order of the steps; it need not be the thread that launches them.
    """

    def __init__(self, result: RankOutput, readings: Sequence[AsyncRead], device: torch.device) -> None:
        """`result` holds everything known at launch; None: this rank reports no result, only that its step is
        complete."""
        self._result, self._readings = result, readings
        self._copy = HostCopy([tensor for reading in readings for tensor in reading.tensors], device)

    def result(self) -> RankOutput:
        """Wait for the device. Raises errors that occurred there."""
        arrays = self._copy.arrays()
        for reading in self._readings:
            count = len(reading.tensors)
            reading.fill(*arrays[:count])
            arrays = arrays[count:]
        return self._result
