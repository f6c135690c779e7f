"""Weights on their way from files to a GPU: through pinned memory, so that reading and sending go on side by side."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

PART_BYTES = 8 << 20
"""Of a pinned buffer. Each reading thread has two, which is all that a host needs besides its page cache."""


class PinnedStaging(threading.local):
    """Of each thread its own: while the GPU fetches one buffer, the thread fills the other."""

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._device = device
        if is_cuda:
            # A thread begins with the first GPU, and would take memory there on its way back from a stream.
            torch.cuda.set_device(device)
        self._buffers = [torch.empty(PART_BYTES, dtype=torch.uint8, pin_memory=is_cuda) for _ in range(2)]
        self._stream = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]
        self._fetched: list[torch.cuda.Event | None] = [None, None]
        self._next = 0

    def copy(self, target: Tensor, values: Tensor) -> None:
        """As `target.copy_(values)`, from the host's memory to the device; returns when it is done."""
        values = values.expand_as(target)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))  # where the target was made
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
            # Numbers of another type are sent as they are, and changed over there.
            target.copy_(buffer.to(self._device, non_blocking=True) if buffer.dtype != target.dtype else buffer, True)
            if self._stream is not None:
                self._fetched[number] = self._stream.record_event()
