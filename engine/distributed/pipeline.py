"""Pipeline parallelism: hidden states move from one stage to the next."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from quire.engine.distributed import watchdog
from quire.engine.distributed.communicator import UNLIMITED

EAGER_BYTES = 4 << 20
"""Maximum size of messages for which receives are posted before their plan has arrived."""
_EAGER_TAG = 1


class Pipeline:
    """One stage among `size`. It communicates with the rank in the same tensor-parallel position of the adjacent
    stages.

    Sends are asynchronous: up to `size` of them may be in progress, one for each plan in flight. Gloo transfers nothing
    until it knows that the receiver has posted a receive. Therefore `post_ahead` posts receives of up to `EAGER_BYTES`,
    which is more than most decode steps send, so that a message takes one trip through the network instead of three.
    For larger messages, with `post_receive`, they arrive while this stage continues, too.
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
        """`rank` is this rank's number in the grid, `width` the number of ranks in a stage.

        Received tensors are on `device`; `transfer_device` is the device that messages are sent from and received on
        (default: `device`).
        """
        self.stage, self.size = stage, size
        self._previous, self._next = rank - width, rank + width
        self._device, self._transfer_device = device, transfer_device or device
        self._sending: deque[tuple[dist.Work, Tensor]] = deque()
        self._receiving: deque[tuple[dist.Work, Tensor]] = deque()
        self._posted_ahead: deque[tuple[dist.Work, Tensor]] = deque()
        self.waited = 0.0
        """Seconds for which a CPU has waited for the previous stage."""
        self._sent = 0.0
        """Seconds that sends have taken a CPU."""

    @property
    def spent(self) -> float:
        """Seconds for which a CPU has sent and received, including waiting."""
        return self.waited + self._sent

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.size - 1

    def send(self, message: Tensor) -> None:
        """Send `message` to the next stage; it must not be changed afterwards."""
        begun = time.perf_counter()
        while len(self._sending) >= self.size:
            self._wait_sent()
        message = message.to(self._transfer_device).contiguous()
        work = dist.isend(message, self._next, tag=_EAGER_TAG if self._is_eager(message.nbytes) else 0)
        assert work is not None
        self._sending.append((work, message))
        self._sent += time.perf_counter() - begun

    def drain(self) -> None:
        """Wait until all sends have completed."""
        while self._sending:
            self._wait_sent()

    def _wait_sent(self) -> None:
        work, message = self._sending.popleft()
        _wait(work, f"rank {self._next} to take hidden states", message)

    def _is_eager(self, num_bytes: int) -> bool:
        """Return whether the receiver has posted a receive for a message of this size ahead, as both sides know."""
        return self._transfer_device.type == "cpu" and num_bytes <= EAGER_BYTES

    def post_ahead(self) -> None:
        """Post receives for the previous stage's next small messages, one for each plan in flight."""
        while len(self._posted_ahead) < self.size and not self.is_first and self._transfer_device.type == "cpu":
            message = torch.empty(EAGER_BYTES, dtype=torch.uint8)
            work = dist.irecv(message, self._previous, tag=_EAGER_TAG)
            assert work is not None
            self._posted_ahead.append((work, message))

    def post_receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Post a receive for the previous stage's next message. May be called from another thread.

        Both sides know its shape and type from the plan. Small messages need no call.
        """
        if self._is_eager(math.prod(shape) * dtype.itemsize):
            return
        message = torch.empty(shape, dtype=dtype, device=self._transfer_device)
        work = dist.irecv(message, self._previous)
        assert work is not None
        self._receiving.append((work, message))

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, *, is_patient: bool = False) -> Tensor:
        """The next message from the previous stage. `is_patient`: the first stage encodes images or videos before it
        sends, for which only the core's limit of a step allows the time, so a CPU waits without one."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if self._is_eager(num_bytes):
            self.post_ahead()
            work, buffer = self._posted_ahead.popleft()
            message = buffer[:num_bytes].view(dtype).view(shape)
            with contextlib.suppress(RuntimeError):  # the previous stage may have ended behind this message
                self.post_ahead()
            return self._arrived(work, message, is_patient)
        if not self._receiving:
            self.post_receive(shape, dtype)
        work, message = self._receiving.popleft()
        assert (message.shape, message.dtype) == (shape, dtype), "stages must run the same plans in the same order"
        return self._arrived(work, message, is_patient)

    def _arrived(self, work: dist.Work, message: Tensor, is_patient: bool) -> Tensor:
        begun = time.perf_counter()
        _wait(work, f"hidden states from rank {self._previous}", message, UNLIMITED if is_patient else None)
        self.waited += time.perf_counter() - begun
        return message.to(self._device)


def _wait(work: dist.Work, what: str, message: Tensor, limit: timedelta | None = None) -> None:
    """`limit` is instead of that of all messages."""
    try:
        work.wait() if limit is None else work.wait(limit)
    except RuntimeError as error:
        raise watchdog.CollectiveError(f"waiting for {what} ({list(message.shape)}): {error}") from error
