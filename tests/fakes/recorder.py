"""Stand-ins for CUDA graphs on CPU, and modes that forbid Python code that would wait for a GPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from quire.engine.worker.graph_recorders import Replay


class CallAgain:
    """Replays a step by calling it. For ranks that meet in Python code, which no graph could keep."""

    name, runs_on_capture = "CUDA graphs", False

    def __init__(self) -> None:
        self.captured = self.replayed = 0

    def warm_up(self, step: Callable[[], None]) -> str:
        step()
        return ""

    def capture(self, step: Callable[[], None]) -> Replay:
        self.captured += 1

        def replay() -> None:
            self.replayed += 1
            step()

        return replay


class Recording(CallAgain):
    """As a graph does, replays the operations on the very memory that they had, and nothing of the Python around."""

    def capture(self, step: Callable[[], None]) -> Replay:
        tape: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Any]]] = []

        class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                out = func(*args, **(kwargs or {}))
                tape.append((func, args, kwargs or {}, tree_flatten(out)[0]))
                return out

        with Recorder():  # type: ignore[no-untyped-call]
            step()

        def again() -> None:
            for func, args, kwargs, outs in tape:
                for old, new in zip(outs, tree_flatten(func(*args, **kwargs))[0], strict=True):
                    if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)

        return super().capture(again)


_OF_PYTHON = {
    *("item", "tolist", "numpy", "cpu", "__array__", "__bool__", "__int__", "__float__", "__index__"),
    *("tensor", "new_tensor", "as_tensor", "from_numpy", "pin_memory"),
}


class _NoPython(TorchFunctionMode):
    """Forbids converting tensors to Python numbers and back."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        assert name not in _OF_PYTHON, f"{name} waits for the device"
        return func(*args, **(kwargs or {}))


class _NoSizesFromData(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Forbids operations whose sizes or Python results depend on numbers on the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags)
        name = func.overloadpacket.__name__
        indexes = name in ("index", "index_put", "index_put_", "_index_put_impl_")
        if indexes:  # by numbers, the sizes are known
            places = [index for index in args[1] if index is not None]
            assert not any(place.dtype in (torch.bool, torch.uint8) for place in places), "a mask has to be counted"
        assert indexes or not tags, f"{func} waits for the device"
        assert name != "lift_fresh", "a constant has to be copied to the device"
        return func(*args, **(kwargs or {}))


class NoWaiting(ExitStack):
    """A step that a CUDA graph could keep, as far as a CPU can show it; otherwise raises `AssertionError`."""

    def __enter__(self) -> Self:
        for mode in (_NoPython(), _NoSizesFromData()):  # type: ignore[no-untyped-call]
            self.enter_context(mode)
        return super().__enter__()
