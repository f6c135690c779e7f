"""The stages that the layers are cut into: hidden states move from one to the next."""

from __future__ import annotations

from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor

from quire.engine.distributed import watchdog


class Pipeline:
    """One stage among `size`. It talks to the rank of its own tensor-parallel position in the stages beside it.

    A message leaves while this stage goes on: up to `size` of them, as many as plans are in flight. Gloo moves nothing
    before the receiver has a place for it: what is `post_receive`ed comes in while this stage goes on, too.
    """

    def __init__(
        self,
        stage: int,
        size: int,
        rank: int,
        width: int,
        device: torch.device,
        transfer_device: torch.device | None = None,
    ) -> None:
        """`rank` is this rank's in the whole grid, `width` the ranks of a stage.

        What is received comes to lie on `device`, and `transfer_device` is where it is sent from and to (default:
        there).
        """
        self.stage, self.size = stage, size
        self._previous, self._next = rank - width, rank + width
        self._device, self._transfer_device = device, transfer_device or device
        self._sending: deque[tuple[dist.Work, Tensor]] = deque()
        self._receiving: deque[tuple[dist.Work, Tensor]] = deque()

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.size - 1

    def send(self, message: Tensor) -> None:
        """Hand `message` to the next stage; it must not be changed any more."""
        while len(self._sending) >= self.size:
            self._wait_sent()
        message = message.to(self._transfer_device).contiguous()
        work = dist.isend(message, self._next)
        assert work is not None
        self._sending.append((work, message))

    def drain(self) -> None:
        """Wait until everything sent has left."""
        while self._sending:
            self._wait_sent()

    def _wait_sent(self) -> None:
        work, message = self._sending.popleft()
        _wait(work, f"rank {self._next} to take hidden states", message)

    def post_receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Have a place for the next message of the stage before that is not expected yet; another thread may do this.

        Its shape and type are known on both sides from the plan.
        """
        message = torch.empty(shape, dtype=dtype, device=self._transfer_device)
        work = dist.irecv(message, self._previous)
        assert work is not None
        self._receiving.append((work, message))

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The next message of the stage before."""
        if not self._receiving:
            self.post_receive(shape, dtype)
        work, message = self._receiving.popleft()
        assert (message.shape, message.dtype) == (shape, dtype), "stages run the same plans in the same order"
        _wait(work, f"hidden states from rank {self._previous}", message)
        return message.to(self._device)


def _wait(work: dist.Work, what: str, message: Tensor) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise watchdog.CollectiveError(f"waiting for {what} ({list(message.shape)}): {error}") from error
