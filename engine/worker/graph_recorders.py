"""How the steps of a device are kept to be replayed: CUDA graphs, and tapes of a CPU's operations."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode

from quire.engine.distributed.communicator import Parallel
from quire.kernels.cpu import op_replay

Replay = Callable[[], None]

_SYNCHRONIZES = "called a synchronizing CUDA operation"
"""What torch's warning says (c10/cuda/CUDAFunctions.cpp)."""


class NotReplayable(RuntimeError):
    """A step ran, but cannot be replayed; the text says why."""


class GraphRecorder(Protocol):
    """How a device keeps a step."""

    name: str
    """What the kept steps are called, in the plural."""
    runs: bool
    """Whether `capture` runs the step, so that steps can be kept as they come; it raises `NotReplayable` then.

    Else steps are captured beforehand, and ranks that exchange within them do so in `warm_up`, and not in `capture`.
    """

    def warm_up(self, step: Callable[[], None]) -> str:
        """Run `step` to its end, with all that is set up at the first time; why it cannot be kept, "" if it may be."""

    def capture(self, step: Callable[[], None]) -> Replay:
        """What `step` does, on the same memory. Raises `RuntimeError` where it cannot be kept, and says why."""


class CudaGraphRecorder:
    """CUDA graphs, which share one pool of memory: no two run at once.

    Before it is captured, a step runs, so that its kernels are compiled and what libraries set up is there; the first
    one twice, the second time to see whether it waits for the device.
    """

    name, runs = "CUDA graphs", False

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
            torch.cuda.empty_cache()  # during a capture, torch gives nothing back to make room
            # Other threads, NCCL's watchdog among them, may go on with what a capture forbids.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                step()
            except BaseException:
                with suppress(RuntimeError):  # which would say no more than that the capture has failed
                    graph.capture_end()
                # It may have left torch's allocator in the capture, which could give back no memory any more.
                with suppress(RuntimeError):
                    torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
                raise
            graph.capture_end()
        torch.cuda.synchronize()
        return graph.replay


@contextmanager
def _record_synchronizations(found_at: list[str]) -> Iterator[None]:
    """Add where the device is waited for. The step goes on: an error there would leave other ranks waiting for it."""
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
    """Tapes of the operations on tensors, replayed without the Python around them: for CPUs, where the kernels are."""

    name, runs = "tapes", True

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
    """Notes what a tape does not see: numbers that go from tensors to Python or back, and what shares memory unseen."""

    def __init__(self, found_at: list[str]) -> None:
        super().__init__()
        self._places = found_at

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = "data" if getattr(func, "__self__", None) is torch.Tensor.data else getattr(func, "__name__", "")
        if name in _NOT_REPLAYABLE:
            self._places.append(f"Python reads or makes a tensor by {name}")
        return func(*args, **(kwargs or {}))


def make_recorder(device: torch.device, parallel: Parallel) -> GraphRecorder | None:
    """For the ranks of a stage; None: no steps are kept."""
    if device.type == "cuda":
        return CudaGraphRecorder(device)
    return OpReplayRecorder() if op_replay.available() and parallel.supports_op_replay else None
