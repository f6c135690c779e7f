"""Selection of the paged attention backend: the platform's own, one requested by name, or the faster one."""

from __future__ import annotations

import functools
import logging
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quire.kernels import examples, reference
from quire.kernels.attention_config import AttentionCase, AttentionConfig, AttentionLayer, HostMetadata
from quire.kernels.cache import FP8_CAPABILITY
from quire.kernels.examples import Inputs
from quire.kernels.flashinfer import FlashInfer, FlashInferMissing, FlashInferWrong

logger = logging.getLogger(__name__)


class BackendUnavailable(ValueError):
    """The requested backend cannot be used. The message gives the reason and the remedy."""


Attention = Callable[..., Tensor | None]
"""`reference.paged_attention` with the additional argument `host`; returns None to decline the call."""

CHOSEN: dict[str, Attention] = {}
"""Device type → the backend that is tried before the platform's own."""


def choose(
    device: torch.device, dtype: torch.dtype, config: AttentionConfig, own: Callable[..., Tensor], problem: str = ""
) -> Attention | None:
    """Return the backend to try before the platform's `own` paged attention for queries of `dtype`, if any.

    `problem` describes the error of the Triton kernel, in which case `own` is the reference; "" if there is none. Logs
    the selected backend and the reason in one line. Raises `BackendUnavailable` if the requested backend cannot be
    used.
    """
    backend = config.backend
    if backend == "reference":
        logger.info("attention on %s: reference, as requested (slow)", device)
        return reference_attention
    if device.type == "cpu":
        if backend != "auto":
            raise BackendUnavailable(f"--attention-backend {backend} needs a GPU; omit the flag or use reference")
        return None
    if device.type == "cuda" and config.cache_dtype == torch.float8_e4m3fn:
        capability = torch.cuda.get_device_capability(device)
        if capability < FP8_CAPABILITY:
            raise BackendUnavailable(
                f"--kv-cache-dtype fp8 needs a GPU of compute capability {FP8_CAPABILITY[0]}.{FP8_CAPABILITY[1]} or "
                f"higher; {device} has {capability[0]}.{capability[1]}. Use --kv-cache-dtype int8 or auto"
            )
    if backend == "triton" and problem:
        raise BackendUnavailable(
            f"--attention-backend triton: the kernel does not work on {device}: {problem}; use auto or reference"
        )
    if backend == "triton" or not config.layers:
        logger.info("attention on %s: %s%s", device, _own_name(problem), ", as requested" * (backend == "triton"))
        return None
    try:
        return _with_flashinfer(device, dtype, config, own, problem)
    except FlashInferMissing as error:
        if backend == "flashinfer":
            raise BackendUnavailable(f"--attention-backend flashinfer: {error}; use triton or omit the flag") from None
        level = logging.WARNING if isinstance(error, FlashInferWrong) else logging.INFO
        logger.log(level, "attention on %s: %s (flashinfer is not used: %s)", device, _own_name(problem), error)
        return None


def _own_name(problem: str) -> str:
    return "the reference" if problem else "triton"


def reference_attention(*args: Any, host: HostMetadata | None = None, **options: Any) -> Tensor:
    """The backend `reference`."""
    return reference.paged_attention(*args, **options)


def _with_flashinfer(
    device: torch.device, dtype: torch.dtype, config: AttentionConfig, own: Callable[..., Tensor], problem: str
) -> FlashInfer | None:
    """Return FlashInfer set up for prefill, decode or both; None if it is faster at neither.

    Raises `FlashInferMissing` if it supports none of the layers.
    """
    unsupported = {layer: FlashInfer.unsupported(layer, dtype, config.cache_dtype) for layer in config.layers}
    supported = [layer for layer, feature in unsupported.items() if not feature]
    features = ", ".join(sorted({feature for feature in unsupported.values() if feature}))
    if not supported:
        raise FlashInferMissing(f"{features} not supported")
    flashinfer = FlashInfer(device)
    for layer in supported:
        for queries in (1, 17):
            if difference := flashinfer.compare(mixed_case(device, dtype, config, layer, queries)):
                raise FlashInferWrong(f"self-check failed: {difference}")
    try:
        times = [_compare_times(device, dtype, config, layer, own, flashinfer) for layer in supported]
    except Exception as error:  # a compiler or driver may fail at sizes that were not tried before
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise FlashInferWrong(f"timing failed: {text}"[:400]) from error
    parts, chosen = [], []
    for number, kind in enumerate(("prefill", "decode")):
        flashinfer_time, own_time = (sum(each[number][i] for each in times) for i in (0, 1))
        is_chosen = config.backend == "flashinfer" or flashinfer_time < own_time
        chosen.append(is_chosen)
        parts.append(
            f"{kind} by {'flashinfer' if is_chosen else _own_name(problem)} "
            f"(flashinfer {1e3 * flashinfer_time:.3f} ms, {_own_name(problem)} {1e3 * own_time:.3f} ms)"
        )
    flashinfer.handles_prefill, flashinfer.handles_decode = chosen
    reason = "as requested" if config.backend == "flashinfer" else "by the time of one layer of each kind"
    rest = f"; {_own_name(problem)} for what flashinfer does not support: {features}" if features else ""
    logger.info("attention on %s: %s, %s%s", device, ", ".join(parts), reason, rest)
    return flashinfer if flashinfer.handles_prefill or flashinfer.handles_decode else None


def _case(
    device: torch.device,
    dtype: torch.dtype,
    config: AttentionConfig,
    layer: AttentionLayer,
    requests: list[tuple[int, int]],
) -> AttentionCase:
    inputs = Inputs(device, dtype, torch.Generator(device).manual_seed(0))
    return examples.attention_case(inputs, requests, layer, config.cache_dtype, config.block_size)


def mixed_case(
    device: torch.device, dtype: torch.dtype, config: AttentionConfig, layer: AttentionLayer, queries: int = 17
) -> AttentionCase:
    """A small batch to compare a backend with the reference: two decodes, and a prompt of `queries` tokens."""
    return _case(device, dtype, config, layer, [(40, 1), (0, queries), (600, 1)])


TIMED_PROMPTS = [(2048, 2048)]
TIMED_DECODES = [(1023, 1)] * 64
"""Requests of (context, queries) that are timed at startup."""


def _compare_times(
    device: torch.device,
    dtype: torch.dtype,
    config: AttentionConfig,
    layer: AttentionLayer,
    own: Callable[..., Tensor],
    flashinfer: FlashInfer,
) -> list[tuple[float, float]]:
    """Seconds per layer for prefill and for decode, each as (FlashInfer, the platform's own)."""
    times = []
    for requests in (TIMED_PROMPTS, TIMED_DECODES):
        case = _case(device, dtype, config, layer, requests)
        call = functools.partial(flashinfer, *case.args, **case.options, host=case.host)
        assert call() is not None, "it declines the call"
        times.append((seconds(call, device), seconds(functools.partial(own, *case.args, **case.options), device)))
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return times


def seconds(call: Callable[[], object], device: torch.device, rounds: int = 5) -> float:
    """The median seconds per call over `rounds` of four calls, after one warm-up call."""
    call()
    times = []
    for _ in range(rounds):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        for _ in range(4):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append((time.perf_counter() - started) / 4)
    return statistics.median(times)
