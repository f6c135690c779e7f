"""torch's own products of rounded inputs (cuBLASLt on GPUs), where they are faster than the platform's kernel.

A rank times both when it starts, as it does with attention backends. A row's product does not depend on the other rows,
but the number of rows decides which of the two computes it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection

import torch
from torch import Tensor

from quire.kernels import backends, coded_words
from quire.kernels.quantized import QuantizedFormat

logger = logging.getLogger(__name__)

CHOSEN: dict[tuple[str, torch.dtype], int] = {}
"""Type of the device and of the weights → the least number of rows that torch multiplies."""
TIMED_ROWS = (1024, 256, 64, 32)
_INPUTS, _FEATURES = 4096, 4096
"""The weight that is timed."""
_MULTIPLE = 16
"""cuBLASLt supports numbers of inputs and of features that are multiples of this."""


def is_chosen(x: Tensor, codes: Tensor, scales: Tensor) -> bool:
    """Whether torch multiplies these rows by this weight; the arguments are as in `coded_words.rounded_matmul`."""
    least = CHOSEN.get((x.device.type, codes.dtype))
    fits = scales.shape[1] == 1 and not any(size % _MULTIPLE for size in codes.shape)
    return least is not None and fits and len(x) >= least


def rounded_matmul(
    x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, x_scales: Tensor, dtype: torch.dtype
) -> Tensor:
    """`coded_words.rounded_matmul` of inputs that are rounded already, with a scale for each row."""
    if codes.dtype != torch.int8:
        out: Tensor = torch._scaled_mm(x, codes.T, x_scales, scales.T, bias=bias, out_dtype=dtype)
        return out
    product = torch._int_mm(x, codes.T).mul(x_scales).mul_(scales.T)
    return (product if bias is None else product.add_(bias)).to(dtype)


def choose(
    device: torch.device, dtype: torch.dtype, formats: Collection[QuantizedFormat], own: Callable[..., Tensor]
) -> None:
    """Time both products of each kind of weights with inputs of `dtype`; `own` is the platform's. Logs a line for each.

    Products that torch does not support on this device, or computes in another way, are not used.
    """
    for name in sorted({form.values for form in formats if form.rounds_inputs and form.group == 0}):
        kind = torch.int8 if name == "int8" else torch.float8_e4m3fn
        CHOSEN.pop((device.type, kind), None)
        try:
            texts, least = _compare(device, dtype, kind, own)
        except Exception as error:  # from a library or a driver
            text = " ".join(f"{type(error).__name__}: {error}".split())[:400]
            logger.info("%s products on %s: triton (torch's is not used: %s)", name, device, text)
            continue
        where = "triton" if least is None else f"torch from {least} rows"
        if least is not None:
            CHOSEN[device.type, kind] = least
        logger.info(
            "%s products on %s: %s, by the time of %d x %d (%s)",
            name,
            device,
            where,
            _FEATURES,
            _INPUTS,
            ", ".join(texts),
        )


def _compare(
    device: torch.device, dtype: torch.dtype, kind: torch.dtype, own: Callable[..., Tensor]
) -> tuple[list[str], int | None]:
    """The times as text, and the least number of rows from which torch is faster; None: it is not."""
    noise = torch.Generator().manual_seed(0)
    codes = (torch.randn(_FEATURES, _INPUTS, generator=noise) * 32).clamp(-127, 127).to(kind).to(device)
    scales = (torch.rand(_FEATURES, 1, generator=noise) + 0.5).to(device) / _INPUTS
    x = torch.randn(TIMED_ROWS[0], _INPUTS, generator=noise).to(device, dtype)
    rows, x_scales = coded_words.round_rows(x, kind, 1)
    bias = torch.randn(_FEATURES, generator=noise).to(device, dtype)
    few = slice(0, TIMED_ROWS[-1])
    calls = [
        functools.partial(product, rows[few], codes, scales, bias, x_scales[few], dtype)
        for product in (rounded_matmul, coded_words.rounded_matmul)
    ]
    torch.testing.assert_close(calls[0](), calls[1](), rtol=2e-2, atol=2e-2)
    texts, least = list[str](), None
    for count in TIMED_ROWS:
        given = rows[:count], codes, scales, None, x_scales[:count], dtype
        theirs, ours = (_seconds(functools.partial(product, *given), device) for product in (rounded_matmul, own))
        texts.append(f"{count} rows: torch {1e3 * theirs:.3f} ms, triton {1e3 * ours:.3f} ms")
        if theirs >= ours:
            break
        least = count
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return texts, least


_CALLS = 16


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call as in a decode step: on GPUs in a CUDA graph, without the time that a launch takes."""
    if device.type != "cuda":
        return backends.seconds(call, device)
    call()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_CALLS):
            call()
    return backends.seconds(graph.replay, device) / _CALLS
