"""Dispatch of operations: to the platform of the first argument, else to the reference."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Collection
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from quire.kernels import backends, check, coded_words, cpu, int4_kv, reference, scaled_matmul
from quire.kernels.attention_config import AttentionConfig, HostMetadata
from quire.kernels.cache import INT4
from quire.kernels.quantized import QuantizedFormat

logger = logging.getLogger(__name__)

PLATFORMS: dict[str, object] = {}
"""Device type → the namespace whose functions replace the reference's by name."""

P = ParamSpec("P")
R = TypeVar("R")


def by_device(operation: Callable[Concatenate[Tensor, P], R]) -> Callable[Concatenate[Tensor, P], R]:
    """Wrap a reference `operation` so that it calls the platform's implementation if there is one."""

    @functools.wraps(operation)
    def dispatch(first: Tensor, /, *args: P.args, **kwargs: P.kwargs) -> R:
        platform = PLATFORMS.get(first.device.type)
        chosen: Callable[Concatenate[Tensor, P], R] = getattr(platform, operation.__name__, operation)
        return chosen(first, *args, **kwargs)

    return dispatch


def prepare(
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
    config: AttentionConfig | None = None,
    formats: Collection[QuantizedFormat] = check.FORMATS,
    *,
    complete: bool = True,
) -> Callable[[], None]:
    """Load the device's kernels in the background; call the returned function to wait for them. If not `complete`, CPU
    kernels that only special layers and formats need are not loaded: see `cpu.load`.

    If a kernel cannot be compiled, or a GPU kernel disagrees with the reference for `dtype`, the model's `config` or
    the `formats` of its weights, a warning is logged and the reference is used instead. The returned function raises
    `backends.BackendUnavailable` if the backend that `config` requests cannot be used, and re-raises any other error.
    """
    device, config = torch.device(device), config or AttentionConfig()
    if device.type == "cuda":
        device = torch.empty(0, device=device).device  # with its index
    if device.type == "cpu":
        load = functools.partial(_load_cpu, complete=complete)
    else:
        load = functools.partial(_load_triton, dtype=dtype, formats=formats)
    failures: list[Exception] = []

    def run() -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # a new thread starts with device 0, whatever the process has selected
            load(device, config)
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=run, name="prepare-kernels")
    thread.start()

    def wait() -> None:
        thread.join()
        if failures:
            raise failures[0]

    return wait


def _load_cpu(device: torch.device, config: AttentionConfig, complete: bool) -> None:
    _choose(device, torch.float32, config)
    if "cpu" in PLATFORMS:
        return
    try:
        cpu.load(complete=complete)
    except cpu.CannotBuild as error:
        logger.warning("the CPU kernels cannot be compiled; using the slower reference: %s", error)
    else:
        PLATFORMS["cpu"] = cpu


def _load_triton(
    device: torch.device, config: AttentionConfig, dtype: torch.dtype, formats: Collection[QuantizedFormat]
) -> None:
    problem = ""
    try:
        from quire.kernels import triton
    except ImportError as error:
        problem = f"Triton cannot be imported: {error}"
        logger.warning("the GPU kernels need Triton; using the slower reference: %s", error)
    else:
        PLATFORMS[device.type], problems = check.passing(triton, device, dtype, config, formats)
        problem = problems.get("int4_attention" if config.cache_dtype == INT4 else "paged_attention", "")
    if device.type == "cuda":
        scaled_matmul.choose(device, dtype, formats, _rounded_matmul)
    _choose(device, dtype, config, problem)


def _choose(device: torch.device, dtype: torch.dtype, config: AttentionConfig, problem: str = "") -> None:
    chosen = backends.choose(device, dtype, config, _paged_attention, problem)
    backends.CHOSEN.pop(device.type, None)
    if chosen is not None:
        backends.CHOSEN[device.type] = chosen


def paged_attention(query: Tensor, *batch: Any, host: HostMetadata | None = None, **options: Any) -> Tensor:
    """`reference.paged_attention`, computed by the backend that `prepare` selected.

    `host` holds the batch's numbers on the host, for backends that plan a step there. The plans are stored in
    `host.plans`, so they belong to one step and are shared by its layers.
    """
    chosen = backends.CHOSEN.get(query.device.type)
    out = chosen(query, *batch, host=host, **options) if chosen is not None else None
    return _paged_attention(query, *batch, **options) if out is None else out


def int4_attention(query: Tensor, *batch: Any, **options: Any) -> Tensor:
    """`int4_kv.int4_attention`, by the platform or, if `prepare` was asked for it, by the reference."""
    is_reference = backends.CHOSEN.get(query.device.type) is backends.reference_attention
    return (int4_kv.int4_attention if is_reference else _int4_attention)(query, *batch, **options)


def rounded_matmul(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    x_scales: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`coded_words.rounded_matmul`, by the faster implementation."""
    if not scaled_matmul.is_chosen(x, codes, scales):
        return _rounded_matmul(x, codes, scales, bias, x_scales, dtype)
    dtype = dtype or x.dtype
    if x_scales is None:
        x, x_scales = _round_rows(x, codes.dtype, 1)
    return scaled_matmul.rounded_matmul(x, codes, scales, bias, x_scales, dtype)


_paged_attention = by_device(reference.paged_attention)
_int4_attention = by_device(int4_kv.int4_attention)
_rounded_matmul = by_device(coded_words.rounded_matmul)
_round_rows = by_device(coded_words.round_rows)
