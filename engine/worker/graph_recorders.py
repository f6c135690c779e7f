"""How a device captures and replays a step: CUDA graphs, or op replay on a CPU."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode

from quire.engine.distributed.communicator import Parallel
from quire.engine.distributed.host_gather import all_gather_object
from quire.kernels.cpu import op_replay

Replay = Callable[[], None]

_SYNCHRONIZES = "called a synchronizing CUDA operation"
"""The text of torch's warning (c10/cuda/CUDAFunctions.cpp)."""


class NotReplayable(RuntimeError):
    """A step ran, but cannot be replayed; the text says why."""


class GraphRecorder(Protocol):
    """How a device captures a step."""

    name: str
    """The name of captured steps in logs."""
    runs_on_capture: bool
    """Whether `capture` also runs the step, so that steps are captured when they first occur; it then raises
    `NotReplayable`.

    Otherwise steps are captured in advance, and their collectives run in `warm_up` but not in `capture`.
    """

    def warm_up(self, step: Callable[[], None]) -> str:
        """Run `step` to its end, including all lazy initialization; returns why it cannot be captured, or ""."""

    def capture(self, step: Callable[[], None]) -> Replay:
        """Return a function that replays `step` on the same memory. Raises `RuntimeError` with the reason if that is
        impossible."""


class CudaGraphRecorder:
    """CUDA graphs that share one memory pool: no two of them run at once.

    A step runs before it is captured, so that its kernels are compiled and libraries are initialized. The first step
    runs twice; the second run checks whether it waits for the device.
    """

    name, runs_on_capture = "CUDA graphs", False

    def __init__(self, device: torch.device) -> None:
        self._device, self._pool = device, torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._is_checked = False

    def warm_up(self, step: Callable[[], None]) -> str:
        synchronizations: list[str] = []
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            step()
            if not self._is_checked:
                with _record_synchronizations(synchronizations):
                    step()
                self._is_checked = True
            torch.cuda.synchronize()
        return next(iter(synchronizations), "")

    def capture(self, step: Callable[[], None]) -> Replay:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            torch.cuda.empty_cache()  # torch frees no cached memory during a capture
            # Other threads, such as NCCL's watchdog, may make calls that a capture forbids.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                step()
            except BaseException:
                with suppress(RuntimeError):  # it would only report that the capture failed
                    graph.capture_end()
                # torch's allocator may still be in capture mode, in which it can free no memory.
                with suppress(RuntimeError):
                    torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
                raise
            graph.capture_end()
        torch.cuda.synchronize()
        return graph.replay


@contextmanager
def _record_synchronizations(found_at: list[str]) -> Iterator[None]:
    """Append each place that waits for the device to `found_at`. The step continues: an exception would leave other
    ranks waiting."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as reported:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
            found_at += [
                f"{each.message} at {each.filename}:{each.lineno}"
                for each in reported
                if _SYNCHRONIZES in str(each.message)
            ]


class OpReplayRecorder:
    """Records the operations on tensors and replays them without the surrounding Python code: for CPUs, where the
    kernels are available."""

    name, runs_on_capture = "op replay", True

    def warm_up(self, step: Callable[[], None]) -> str:
        return ""

    def capture(self, step: Callable[[], None]) -> Replay:
        accesses: list[str] = []
        with op_replay.OpReplay() as recording, _PythonAccesses(accesses):
            step()
        if reason := next(iter(accesses), recording.reason):
            raise NotReplayable(reason)
        return recording.replay


_NOT_REPLAYABLE = {
    *("item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__", "__contains__"),
    *("tensor", "as_tensor", "apply_", "map_", "map2_", "data", "data_ptr", "__dlpack__"),
}


class _PythonAccesses(TorchFunctionMode):
    """Detects accesses that op replay cannot record: numbers that pass between tensors and Python, and hidden aliases
    of memory."""

    def __init__(self, found_at: list[str]) -> None:
        super().__init__()
        self._places = found_at

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = "data" if getattr(func, "__self__", None) is torch.Tensor.data else getattr(func, "__name__", "")
        if name in _NOT_REPLAYABLE:
            self._places.append(f"Python reads or makes a tensor by {name}")
        return func(*args, **(kwargs or {}))


def make_recorder(device: torch.device, parallel: Parallel) -> GraphRecorder | None:
    """The recorder for the ranks of a stage; None: steps are not captured."""
    if device.type == "cuda":
        return CudaGraphRecorder(device)
    return OpReplayRecorder() if parallel.supports_op_replay else None


def capture_together(key: str, sizes: Iterable[int], capture: Callable[[int], str]) -> str:
    """Call `capture`, which returns the reason if it fails, for all sizes on all ranks of the grid, until it fails on
    any rank; returns where and why, or "".

    After each size the ranks agree whether to continue, so that no rank waits in a step for one that has given up.
    """
    with without_garbage_collection():
        for size in sizes:
            reported = all_gather_object(f"{key} {size}", capture(size))
            for rank, reason in enumerate(reported):
                if reason:
                    return f"capturing a step failed{f' on rank {rank}' * (len(reported) > 1)}: {reason}"
    return ""


def try_capture(recorder: GraphRecorder, step: Callable[[], None], *, is_shared: bool) -> Replay | str:
    """Capture a step, or return why that failed.

    An error in a step's own collectives, if ranks share it, is raised: the other ranks wait there, and only the exit of
    this rank ends that.
    """
    try:
        if reason := recorder.warm_up(step):
            return reason
    except RuntimeError as error:
        if is_shared:
            raise
        return _first_line(error)
    try:
        return recorder.capture(step)
    except RuntimeError as error:
        return _first_line(error)


def free_bytes(device: torch.device) -> int:
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else 0


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Disable garbage collection: no CUDA object may be destroyed during a capture."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
