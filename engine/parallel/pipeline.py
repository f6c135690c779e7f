"""The stages that the layers are cut into: hidden states move from one to the next."""

from __future__ import annotations

from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor


class Pipeline:
    """One stage among `size`. It talks to the rank of its own tensor-parallel position in the stages beside it.

    A message may wait to be received while the stage goes on: up to `size` of them, as many as plans are in flight.
    """

    def __init__(self, stage: int, size: int, rank: int, width: int, device: torch.device) -> None:
        """`rank` is this rank's in the whole grid, `width` the ranks of a stage."""
        self.stage, self.size = stage, size
        self._before, self._after, self._device = rank - width, rank + width, device
        self._sending: deque[tuple[dist.Work, Tensor]] = deque()

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.size - 1

    def send(self, message: Tensor) -> None:
        """Hand `message` to the next stage; it must not be changed any more."""
        while len(self._sending) >= self.size:
            self._sending.popleft()[0].wait()
        message = message.contiguous()
        work = dist.isend(message, self._after)
        assert work is not None
        self._sending.append((work, message))

    def drain(self) -> None:
        """Wait until everything sent has left."""
        while self._sending:
            self._sending.popleft()[0].wait()

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The next message of the stage before, whose shape and type both sides know from the plan."""
        message = torch.empty(shape, dtype=dtype, device=self._device)
        dist.recv(message, self._before)
        return message
