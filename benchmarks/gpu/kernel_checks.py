"""Every kernel against the reference on the device, in all types, with the errors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gpu import kernel_calls
from gpu.kernel_calls import Call
from gpu.lab import Lab, free_memory
from gpu.records import Check, Note, Record
from quire import kernels
from quire.kernels import dispatch, reference

TYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass
class Errors:
    """Of one kernel in one type, over all of its calls."""

    calls: int = 0
    largest: float = 0.0
    """Absolute."""
    ratio: float = 0.0
    """The largest error over what is allowed there."""
    worst: str = ""
    failures: list[str] = field(default_factory=list)

    def take(self, sizes: str, error: float, ratio: float) -> None:
        self.calls += 1
        self.largest = max(self.largest, error)
        if ratio > self.ratio:
            self.ratio, self.worst = ratio, sizes
        if not ratio <= 1:
            self.failures.append(f"{sizes}: error {error:.2g}, {ratio:.2f} of what is allowed")

    @property
    def text(self) -> str:
        shown = f"{self.calls} calls, largest error {self.largest:.2g}, {self.ratio:.2f} of what is allowed"
        shown += f" ({self.worst})" if self.worst else ""
        return "; ".join([shown, *self.failures])


def check(lab: Lab) -> Iterator[Record]:
    """A check for each kernel and type; what the reference serves is said."""
    device = torch.device(lab.device)
    torch.manual_seed(0)
    kernels.prepare(device, torch.bfloat16)()
    for dtype in TYPES:
        found: dict[str, Errors] = {}
        for operation, sizes, call in _all_calls(device, dtype, tiny=lab.tiny):
            for name, module in _implementations(operation, lab.device):
                errors = found.setdefault(f"{name} {operation}", Errors())
                try:
                    errors.take(sizes, *compare(call(module), call(reference), dtype))
                except Exception as error:  # whatever a compiler or a driver finds
                    first = str(error).partition("\n")[0]
                    errors.failures.append(f"{sizes}: {type(error).__name__}: {first}")
        free_memory(lab.device)
        for name, errors in found.items():
            yield Check(f"{name}, {str(dtype)[6:]}", not errors.failures, errors.text)
    yield Note(served(lab.device))


def _all_calls(device: torch.device, dtype: torch.dtype, *, tiny: bool) -> Iterator[tuple[str, str, Call]]:
    """The self-check's of a rank, then larger ones."""
    if not tiny:
        from quire.kernels.triton import check as ranks

        for operation, call in ranks.calls(device, dtype):
            yield operation, "small", call
    yield from kernel_calls.calls(device, dtype, tiny=tiny)


def _implementations(operation: str, device: str) -> list[tuple[str, Any]]:
    """Triton's on a GPU, and what has been chosen there if that is another."""
    modules: list[Any] = [dispatch.PLATFORMS.get(device)]
    if device == "cuda":
        from quire.kernels import triton

        modules.insert(0, triton)
    found: dict[int, tuple[str, Any]] = {}
    for module in modules:
        function = getattr(module, operation, None)
        if function is not None:
            found.setdefault(id(function), (function.__module__.split(".")[2], module))
    return list(found.values())


def served(device: str) -> str:
    """Which module each operation is chosen from."""
    platform = dispatch.PLATFORMS.get(device)
    names = [name for name in kernels.__all__ if hasattr(reference, name)]
    chosen = {name: getattr(platform, name, None) for name in names}
    shown = [f"{name} {function.__module__}" for name, function in chosen.items() if function is not None]
    plain = [name for name, function in chosen.items() if function is None]
    return f"served by: {', '.join(shown) or 'nothing'}; by the reference: {', '.join(plain) or 'nothing'}"


def compare(found: Any, expected: Any, dtype: torch.dtype) -> tuple[float, float]:
    """The largest error, and the largest over what is allowed: 8 steps of the type, of the number and of 1.

    Whole numbers must be equal.
    """
    pairs = list(zip(_tensors(found), _tensors(expected), strict=True))
    error = ratio = 0.0
    for one, other in pairs:
        assert one.shape == other.shape, f"{list(one.shape)} instead of {list(other.shape)}"
        if not one.numel():
            continue
        if not one.is_floating_point():
            wrong = int((one != other).sum())
            error, ratio = max(error, float(wrong)), max(ratio, float("inf") if wrong else 0.0)
            continue
        step = max(8 * torch.finfo(dtype).eps, 2e-5)
        difference = (one.float() - other.float()).abs()
        allowed = step * (1 + other.float().abs())
        share = (difference / allowed).nan_to_num(nan=float("inf"))
        error, ratio = max(error, float(difference.max())), max(ratio, float(share.max()))
    return error, ratio


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    else:
        for part in value:
            yield from _tensors(part)
