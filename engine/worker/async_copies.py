"""To the device and back without waiting: what is sent is there for all that is launched later, what is read comes
behind all that was launched before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from quire.engine.protocol.messages import ModelRunnerOutput

Array = npt.NDArray[Any]


def send(values: Array, device: torch.device) -> Tensor:
    """`values` on the device; on the CPU that is their own memory.

    torch gives pinned memory to nobody else before the copy from it has run.
    """
    host = torch.from_numpy(values if values.flags.c_contiguous else values.copy())
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


class HostCopy:
    """Tensors on their way to the host. `arrays` waits for them, in any thread."""

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        self._tensors = tensors
        self._event: torch.cuda.Event | None = None
        if device.type != "cpu":
            self._tensors = [tensor.to("cpu", non_blocking=True) for tensor in tensors]  # pinned memory
            self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # who waits holds no core
            self._event.record(torch.cuda.current_stream(device))

    def arrays(self) -> list[Array]:
        """Raises what went wrong on the device."""
        if self._event is not None:
            self._event.synchronize()
        return [tensor.numpy() for tensor in self._tensors]


@dataclass(frozen=True)
class AsyncRead:
    """A part of a step's result: `fill` puts it in, given the tensors as arrays."""

    tensors: Sequence[Tensor]
    fill: Callable[..., None]


class AsyncOutput:
    """A step that the device has still to do, or has done. The next one may be launched before its result is asked for.

    Results are to be asked for in the order of steps, by one thread, which need not be the one that launches.
    """

    def __init__(self, result: ModelRunnerOutput | None, readings: Sequence[AsyncRead], device: torch.device) -> None:
        """`result` is what is known beforehand; None: this rank has none to tell, only that its part is done."""
        self._result, self._readings = result, readings
        self._copy = HostCopy([tensor for reading in readings for tensor in reading.tensors], device)

    def result(self) -> ModelRunnerOutput | None:
        """Wait for the device, which may raise what went wrong there."""
        arrays = self._copy.arrays()
        for reading in self._readings:
            count = len(reading.tensors)
            reading.fill(*arrays[:count])
            arrays = arrays[count:]
        return self._result
