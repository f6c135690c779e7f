"""Op replay: record operations on tensors, and run them again without the Python code around them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.weak import WeakTensorKeyDictionary


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # there is no torch.compile to keep out, and the import of torch._dynamo would take seconds


class OpReplay(_Mode):
    """The operations on tensors that this thread runs within `with`.

    A replay reads tensors that existed before in place. A result of one operation that is an argument of another is a
    *value*, which every replay recomputes. Values that Python read from tensors, and decisions it made, stay as
    recorded.

    `with` writes a Python function with a line for each operation, which drops each value after its last use.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reason = ""
        """After `with`: why the operations cannot be replayed, or ""."""
        self._lines: list[str] = []
        self._constants: list[Any] = []  # c0, c1, … in the lines: operations, and arguments that are not values
        self._last_uses: list[int] = []  # of v0, v1, …: the line
        self._numbers = WeakTensorKeyDictionary()  # the number of each value that still exists
        self._run: Callable[[], None] | None = None

    def __enter__(self) -> Self:
        if any(isinstance(mode, OpReplay) for mode in _get_current_dispatch_mode_stack()):
            raise RuntimeError("operations are recorded by one OpReplay at a time")
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._numbers = WeakTensorKeyDictionary()
        if not self.reason:
            for number, line in enumerate(self._last_uses):
                self._lines[line] += f"; v{number} = None"
            parameters = ", ".join(f"c{number}" for number in range(len(self._constants)))
            body = "\n  ".join(self._lines or ["pass"])
            made: dict[str, Any] = {}
            exec(f"def make({parameters}):\n def run():\n  {body}\n return run", made)
            self._run = made["make"](*self._constants)
        self._lines, self._constants, self._last_uses = [], [], []

    def replay(self) -> None:
        """Run all operations again. Raises `RuntimeError` if there is a `reason` not to, and the operations' errors."""
        if self._run is None:
            raise RuntimeError(f"these operations cannot be replayed: {self.reason}")
        self._run()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = list(_tensors((args, kwargs)))
        has_values = any(tensor in self._numbers for tensor in given)
        if _is_different_each_time(func, args, kwargs):
            self._refuse(func)
        try:
            if func._can_decompose() and not func._schema.is_mutable:
                with _InnerOperations(self._refuse):
                    func.decompose(*args, **kwargs)
            result = func(*args, **kwargs)
        except Exception:
            self._refuse(func)
            raise
        results = result if isinstance(result, (tuple, list)) else [] if result is None else [result]
        if not all(isinstance(each, Tensor) for each in results):
            self._refuse(func)  # it returns a number to Python
        if not self.reason and not self._is_view_of_given(func, has_values, given, results):
            self._record(func, args, kwargs, given, result)
        return result

    def _refuse(self, func: Any) -> None:
        self.reason = self.reason or str(func._schema.name)

    def _record(self, func: Any, args: Any, kwargs: Any, given: Sequence[Tensor], result: Any) -> None:
        line = len(self._lines)
        words = [self._write(each, line) for each in args]
        words += [f"{name}={self._write(each, line)}" for name, each in kwargs.items()]
        call = f"{self._constant(func._op)}({', '.join(words)})"
        here = {id(tensor) for tensor in given if tensor not in self._numbers}
        targets = [
            "_" if id(tensor) in here else self._value(tensor, line)
            for tensor in (result if isinstance(result, (tuple, list)) else [])
        ]
        if targets:
            call = f"{', '.join(targets)}, = {call}"
        elif isinstance(result, Tensor) and id(result) not in here:
            call = f"{self._value(result, line)} = {call}"
        self._lines.append(call)

    def _write(self, argument: Any, line: int) -> str:
        if isinstance(argument, Tensor) and argument in self._numbers:
            return self._value(argument, line)
        if isinstance(argument, (list, tuple)) and any(True for _ in _tensors(argument)):
            return f"[{', '.join(self._write(each, line) for each in argument)}]"
        return self._constant(argument)

    def _constant(self, value: Any) -> str:
        self._constants.append(value)
        return f"c{len(self._constants) - 1}"

    def _value(self, tensor: Tensor, line: int) -> str:
        number = self._numbers.setdefault(tensor, len(self._last_uses))  # type: ignore[no-untyped-call]
        self._last_uses += [line] * (number == len(self._last_uses))
        self._last_uses[number] = line
        return f"v{number}"

    def _is_view_of_given(
        self, func: Any, has_values: bool, given: Sequence[Tensor], results: Sequence[Tensor]
    ) -> bool:
        """Whether the operation only returned views of one tensor that existed before: they live as long as it does."""
        if has_values or func._schema.is_mutable or not results or len({id(tensor) for tensor in given}) != 1:
            return False
        storage = _storage(given[0])
        return storage is not None and all(_storage(tensor) == storage for tensor in results)


class _InnerOperations(_Mode):
    """Reports operations of an operation, at any depth, whose result or its shape depends on tensor values: its view,
    sizes and numbers may depend on them."""

    def __init__(self, report: Callable[[Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._report = report

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _reads_values(func, args):
            self._report(func)
        with self:
            result = func.decompose(*args, **kwargs)
        return func(*args, **kwargs) if result is NotImplemented else result


def _tensors(arguments: Any) -> Iterator[Tensor]:
    if isinstance(arguments, Tensor):
        yield arguments
    elif isinstance(arguments, (list, tuple, dict)):
        for each in arguments.values() if isinstance(arguments, dict) else arguments:
            yield from _tensors(each)


def _storage(tensor: Tensor) -> int | None:
    """The identity of a tensor's memory; None for tensors of oneDNN, whose memory torch does not know."""
    return None if tensor.is_mkldnn else tensor.untyped_storage()._cdata


def _is_different_each_time(func: Any, args: Any, kwargs: Any) -> bool:
    """Operations with object arguments (such as torch's collectives, which Python waits for), tensors that Python
    filled with its own numbers, in-place changes of a tensor's storage or view, which would accumulate over replays,
    and operations that read values."""
    return (
        any(isinstance(each, torch.ScriptObject) for each in (*args, *kwargs.values()))
        or any(isinstance(each, (torch.UntypedStorage, torch.TypedStorage)) for each in args)
        or torch.Tag.inplace_view in func.tags
        or func._schema.name == "aten::lift_fresh"
        or _reads_values(func, args)
    )


def _reads_values(func: Any, args: Any) -> bool:
    """Whether the result or its shape depends on tensor values; indexing by integers does not count."""
    if torch.Tag.data_dependent_output in func.tags:
        return True
    if torch.Tag.dynamic_output_shape not in func.tags:
        return False
    indices = [tensor for each in args if isinstance(each, (list, tuple)) for tensor in _tensors(each)]
    return not indices or any(tensor.dtype in (torch.bool, torch.uint8) for tensor in indices)
