"""Out-of-memory handling. A single rank skips the failed step and continues; with several ranks, the rank exits and
reports a remedy."""

from __future__ import annotations

import gc
import logging
import traceback
from collections.abc import Callable
from typing import TypeVar

import torch

from quire.engine.protocol.scheduler_output import SchedulerOutput

logger = logging.getLogger(__name__)

T = TypeVar("T")

_OOM_TEXTS = (
    "can't allocate memory",  # torch's allocator on CPUs
    "std::bad_alloc",  # compiled kernels
    "CUDA error: out of memory",  # direct calls of the driver
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
"""Texts of a `RuntimeError` that mean out of memory."""
REMEDY = (
    "lower --max-num-batched-tokens, --max-num-seqs or the KV cache's share (--gpu-memory-utilization, "
    "--kv-cache-memory-bytes)"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error is only a lack of memory: no result is wrong, and a smaller step would have succeeded."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _OOM_TEXTS)


class OOMHandler:
    """Wraps every step of a rank that has no collectives with other ranks, which would wait for it.

    A step that fails has changed only the state of its own requests. The core aborts these when it receives the
    failure. Plans that it made before depend on them and are skipped, up to the first plan with `clears_failure`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._reason = ""
        """Why steps are skipped; empty: they are not."""

    def run(
        self, plan: SchedulerOutput, step: Callable[[], T], skip: Callable[[], object], failed: Callable[[str], T]
    ) -> T:
        """Run `step`, or return `failed(reason)` if the step runs out of memory or must be skipped.

        `skip` applies a plan's changes to the request state, without running the plan.
        """
        if self._reason and not plan.clears_failure:
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
            logger.error("step %d failed: %s: %s", plan.step, self._reason, _line(error))
            traceback.clear_frames(error.__traceback__)  # the frames keep the step's tensors alive
        release_memory(self._device)
        return failed(self._reason)

    def attempt(self, name: str, call: Callable[[], T]) -> T | None:
        """Return the result of a part of a step that the step can do without, or None if it runs out of memory."""
        try:
            return call()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            logger.warning("out of memory on %s: no %s in this step: %s", self._device.type, name, _line(error))
            traceback.clear_frames(error.__traceback__)
        release_memory(self._device)
        return None


def release_memory(device: torch.device) -> None:
    """Give back the memory that nothing refers to any longer. Not in an `except` block, whose error refers to much."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:500]
