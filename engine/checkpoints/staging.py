"""Copies weights from files to a GPU through pinned memory, so that reading and copying overlap."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

PART_BYTES = 8 << 20
"""Bytes of a pinned buffer. Each reader thread has two; the host needs no other memory but its page cache."""


class PinnedStaging(threading.local):
    """Two pinned buffers per thread: while the GPU copies one, the thread fills the other."""

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._device = device
        if is_cuda:
            # Otherwise leaving a stream context would create a CUDA context on GPU 0, the default of a new thread.
            torch.cuda.set_device(device)
        self._buffers = [torch.empty(PART_BYTES, dtype=torch.uint8, pin_memory=is_cuda) for _ in range(2)]
        self._stream = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]
        self._fetched: list[torch.cuda.Event | None] = [None, None]
        self._next = 0

    def copy(self, target: Tensor, values: Tensor) -> None:
        """Like `target.copy_(values)` from host memory to the device; returns when the copy has finished."""
        values = values.expand_as(target)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))  # the target was allocated on it
        self._send(target, values)
        if self._stream is not None:
            self._stream.synchronize()

    def _send(self, target: Tensor, values: Tensor) -> None:
        if values.dim() == 0:
            target, values = target[None], values[None]
        if not values.numel():
            return
        length = values[0].nbytes
        if length > PART_BYTES:
            for row, its_values in zip(target, values, strict=True):
                self._send(row, its_values)
            return
        rows = PART_BYTES // length
        for first in range(0, len(values), rows):
            self._send_part(target[first : first + rows], values[first : first + rows])

    def _send_part(self, target: Tensor, values: Tensor) -> None:
        number = self._next
        self._next = 1 - number
        if (fetched := self._fetched[number]) is not None:
            fetched.synchronize()
        buffer = self._buffers[number][: values.nbytes].view(values.dtype).view(values.shape)
        buffer.copy_(values)
        with torch.cuda.stream(self._stream):
            # Values of another dtype are converted on the device.
            target.copy_(buffer.to(self._device, non_blocking=True) if buffer.dtype != target.dtype else buffer, True)
            if self._stream is not None:
                self._fetched[number] = self._stream.record_event()
