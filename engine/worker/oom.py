"""A step for which there is no memory: a rank that is alone goes on without it; any other ends, and says what to do."""

from __future__ import annotations

import gc
import logging
import traceback
from collections.abc import Callable
from typing import TypeVar

import torch

from quire.engine.protocol.messages import SchedulerOutput

logger = logging.getLogger(__name__)

T = TypeVar("T")

_OOM_TEXTS = (
    "can't allocate memory",  # torch's allocator on CPUs
    "std::bad_alloc",  # compiled kernels
    "CUDA error: out of memory",  # whatever asks the driver itself
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
"""In the text of a `RuntimeError`."""
REMEDY = (
    "lower --max-num-batched-tokens, --max-num-seqs or the KV cache's share (--gpu-memory-utilization, "
    "--kv-cache-memory-bytes)"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this is all that is wrong: nothing was computed wrongly, and less would have been possible."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _OOM_TEXTS)


class OOMHandler:
    """Around every step of a rank that shares no exchange with others, which would wait for it.

    A step that fails has touched the state of its own requests alone. The core gives these up once it hears of it; what
    it has planned before that counts on them and is skipped, up to the plan that says so.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._reason = ""
        """Why steps are skipped; empty: they are not."""

    def run(
        self, plan: SchedulerOutput, step: Callable[[], T], skip: Callable[[], object], failed: Callable[[str], T]
    ) -> T:
        """`step`, or what `failed` makes of the reason why nothing of it counts.

        `skip` takes in what a plan says of the requests, without running it.
        """
        if self._reason and not plan.resumes:
            skip()
            return failed(self._reason)
        self._reason = ""
        try:
            return step()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            size = f"{plan.num_tokens:,} tokens of {plan.num_rows:,} requests"
            self._reason = f"out of memory on {self._device.type} in a step of {size}; {REMEDY}"
            logger.error("step %d fails, %s: %s", plan.step, self._reason, _line(error))
            traceback.clear_frames(error.__traceback__)  # they hold the step's tensors
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        return failed(self._reason)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:500]
