"""Compare every kernel with the reference on the device, in all types, and report the errors."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gpu import kernel_calls
from gpu.lab import Lab, free_memory
from gpu.records import Check, Note, Record
from quire import kernels
from quire.kernels import dispatch, fp4, reference
from quire.kernels.examples import Example, tolerance

TYPES = (torch.bfloat16, torch.float16, torch.float32)
_PROCESSES, _THREADS = 8, 8
_CHOSEN = threading.Lock()
"""FlashInfer plans and runs steps one by one, as in a rank."""


@dataclass
class Errors:
    """The errors of one kernel in one type over all of its calls."""

    calls: int = 0
    largest: float = 0.0
    """The largest absolute error."""
    ratio: float = 0.0
    """The largest error relative to its tolerance."""
    worst: str = ""
    failures: list[str] = field(default_factory=list)

    def take(self, sizes: str, error: float, ratio: float) -> None:
        self.calls += 1
        self.largest = max(self.largest, error)
        if ratio > self.ratio:
            self.ratio, self.worst = ratio, sizes
        if not ratio <= 1:
            self.failures.append(f"{sizes}: error {error:.2g}, {ratio:.2f} of the tolerance")

    @property
    def text(self) -> str:
        shown = f"{self.calls} calls, largest error {self.largest:.2g}, {self.ratio:.2f} of the tolerance"
        shown += f" ({self.worst})" if self.worst else ""
        return "; ".join([shown, *self.failures])


def check(lab: Lab) -> Iterator[Record]:
    """Yield a check for each kernel and type; a kernel that is not called fails. Notes the kernels that the reference
    computes.

    On a GPU each operation has its own process, because after an illegal memory access all calls in a process fail.
    """
    yield _with_flashinfer(torch.device(lab.device))
    operations = dict.fromkeys(
        example.operation for example in kernel_calls.calls(torch.device("cpu"), torch.float32, tiny=True)
    )
    check_one, met = functools.partial(_check_operation, lab), set[str]()
    with contextlib.ExitStack() as stack:
        each: Any = map
        if lab.device == "cuda":
            spawn = multiprocessing.get_context("spawn")
            each = stack.enter_context(ProcessPoolExecutor(_PROCESSES, spawn, max_tasks_per_child=1)).map
        for found in each(check_one, operations):
            for name, errors in found.items():
                yield Check(name, not errors.failures, errors.text)
                met.add(name.partition(",")[0].split()[-1])
    unmet = set(_triton_names()) - met if lab.device == "cuda" else set[str]()
    if unmet and torch.cuda.get_device_capability() < fp4.FP4_CAPABILITY:
        unmet -= {"round_fp4", "fp4_matmul", "fp4_fused_experts"}
        yield Note("products of 4-bit floats (fp4) are not checked: they need compute capability 10.0 or higher")
    yield Check("every Triton kernel is called here", not unmet, ", ".join(sorted(unmet)) or "none is left out")
    yield Note(served(lab.device))


def _with_flashinfer(device: torch.device) -> Note:
    """Prepare the kernels, with FlashInfer for the checked attention if it is installed."""
    layers = tuple(kernels.AttentionLayer(*heads, heads[2] ** -0.5) for heads in kernel_calls.HEADS)
    wanted = kernels.AttentionConfig(layers, cache_dtype=torch.bfloat16, backend="flashinfer")
    try:
        kernels.prepare(device, torch.bfloat16, wanted)()
    except kernels.BackendUnavailable as error:
        kernels.prepare(device, torch.bfloat16)()
        return Note(str(error))
    return Note("the selected backend is FlashInfer where it is supported")


def _check_operation(lab: Lab, operation: str) -> dict[str, Errors]:
    """The errors by module, operation and type."""
    device, found = torch.device(lab.device), dict[str, Errors]()
    torch.manual_seed(0)
    for dtype in TYPES:
        try:
            if lab.device == "cuda" and not found and operation == "paged_attention":
                _with_flashinfer(device)
            errors_of = _check_type(device, dtype, operation, tiny=lab.tiny)
            found |= {f"{name}, {str(dtype)[6:]}": errors for name, errors in errors_of.items()}
            free_memory(lab.device)
        except Exception as error:  # the device is lost; keep the results so far
            first = str(error).partition("\n")[0]
            found[f"device after {operation}, {str(dtype)[6:]}"] = Errors(failures=[f"{type(error).__name__}: {first}"])
            break
    return found


def _check_type(device: torch.device, dtype: torch.dtype, only: str = "", *, tiny: bool) -> dict[str, Errors]:
    """The errors by module and operation. On a GPU, several run at once, because most of the time is compilation."""
    results: dict[str, Errors] = {}
    work = [
        (example, results.setdefault(f"{name} {example.operation}", Errors()), module)
        for example in kernel_calls.calls(device, dtype, tiny=tiny)
        if only in ("", example.operation)
        for name, module in _implementations(example.operation, device.type)
    ]

    def run(example: Example, errors: Errors, module: Any) -> None:
        try:
            with _CHOSEN if module is kernels else contextlib.nullcontext():
                found = example.call(module)
            ratios = compare(found, example.expected(), tolerance(example.operation, dtype))
            errors.take(example.sizes, *ratios)
        except Exception as error:  # from a compiler or a driver
            first = str(error).partition("\n")[0]
            errors.failures.append(f"{example.sizes}: {type(error).__name__}: {first}")

    with ThreadPoolExecutor(_THREADS if device.type == "cuda" else 1) as pool:
        for done in [pool.submit(run, *each) for each in work]:
            done.result()
    return results


def _triton_names() -> list[str]:
    from quire.kernels import triton

    return list(triton.__all__)


def _implementations(operation: str, device: str) -> list[tuple[str, Any]]:
    """Triton and the selected attention backend on a GPU; the CPU kernels on a CPU."""
    if device == "cpu":
        platform = dispatch.PLATFORMS.get(device)
        return [("cpu", platform)] if hasattr(platform, operation) else []
    from quire.kernels import triton

    found: list[tuple[str, Any]] = [("triton", triton)] if operation in triton.__all__ else []
    return [*found, ("chosen", kernels)] if operation == "paged_attention" else found


def served(device: str) -> str:
    """The module that each operation comes from."""
    platform = dispatch.PLATFORMS.get(device)
    names = [name for name in kernels.__all__ if hasattr(reference, name)]
    chosen = {name: getattr(platform, name, None) for name in names}
    shown = [f"{name} {function.__module__}" for name, function in chosen.items() if function is not None]
    plain = [name for name, function in chosen.items() if function is None]
    return f"served by: {', '.join(shown) or 'nothing'}; by the reference: {', '.join(plain) or 'nothing'}"


def compare(found: Any, expected: Any, step: float) -> tuple[float, float]:
    """The largest error, and the largest error relative to the tolerance `step`; integers must be equal."""
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
        difference = (one.float() - other.float()).abs().masked_fill(one == other, 0.0)  # infinities, too
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
