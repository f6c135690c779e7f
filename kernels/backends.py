"""Whose paged attention serves: the platform's own, or one that was asked for by name or is faster here."""

from __future__ import annotations

import functools
import logging
import statistics
import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.kernels import reference
from quire.kernels.cache import FP8_CAPABILITY, allocate_kv_cache
from quire.kernels.flashinfer import FlashInfer, FlashInferMissing, FlashInferWrong

logger = logging.getLogger(__name__)

AttentionBackend = Literal["auto", "triton", "flashinfer", "reference"]


class BackendUnavailable(ValueError):
    """A backend was asked for by name and cannot serve. The text says why, and what to do."""


class HostRows(NamedTuple):
    """Numbers of a step's requests where Python reads them without waiting for the device, int64 `[requests]`."""

    counts: npt.NDArray[np.int64]
    """Tokens of each in this step: the differences of `Batch.query_starts`."""
    lengths: npt.NDArray[np.int64]
    """`Batch.sequence_lengths`."""
    plans: dict[Hashable, object] | None = None
    """What a backend has worked out for this one step, which its layers share; it begins empty. None: the numbers are
    bounds, as in what a CUDA graph records, or of a part of the step, and nothing may be planned by them."""


@dataclass(frozen=True)
class AttentionLayer:
    """What a kind of layers asks of paged attention, on one rank."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int = 0
    softcap: float = 0.0
    has_sinks: bool = False
    has_slopes: bool = False
    is_latent: bool = False
    """Keys and values are the same memory."""


@dataclass(frozen=True)
class AttentionNeeds:
    """What a model asks of paged attention, and by whom it is to be computed."""

    layers: tuple[AttentionLayer, ...] = ()
    """Each kind once."""
    block_size: int = 16
    cache_dtype: torch.dtype = torch.float32
    backend: AttentionBackend = "auto"


Attention = Callable[..., Tensor | None]
"""`reference.paged_attention`, also given `host`; None where it leaves the call to the platform's own."""

CHOSEN: dict[str, Attention] = {}
"""Device type → what is asked before the platform's own."""


def choose(
    device: torch.device, dtype: torch.dtype, needs: AttentionNeeds, own: Callable[..., Tensor], problem: str = ""
) -> Attention | None:
    """Who is to be asked before the platform's `own` paged attention, for queries of `dtype`.

    `problem` is what is wrong with the Triton kernel, so that `own` is the reference; "" where it is right. One line
    of the log says who serves and why. Raises `BackendUnavailable` where the backend asked for cannot serve.
    """
    backend = needs.backend
    if backend == "reference":
        logger.info("attention on %s: by the reference, as asked (slow)", device)
        return _reference
    if device.type == "cpu":
        if backend != "auto":
            raise BackendUnavailable(f"--attention-backend {backend} needs a GPU; leave it out, or take reference")
        return None
    if device.type == "cuda" and needs.cache_dtype == torch.float8_e4m3fn:
        capability = torch.cuda.get_device_capability(device)
        if capability < FP8_CAPABILITY:
            raise BackendUnavailable(
                f"--kv-cache-dtype fp8 needs a GPU of compute capability {FP8_CAPABILITY[0]}.{FP8_CAPABILITY[1]} or "
                f"more, and {device} has {capability[0]}.{capability[1]}; use --kv-cache-dtype int8, or auto"
            )
    if backend == "triton" and problem:
        raise BackendUnavailable(
            f"--attention-backend triton: its kernel does not work on {device}: {problem}; take auto, or reference"
        )
    if backend == "triton" or not needs.layers:
        logger.info("attention on %s: by %s%s", device, _own_name(problem), ", as asked" * (backend == "triton"))
        return None
    try:
        return _with_flashinfer(device, dtype, needs, own, problem)
    except FlashInferMissing as error:
        if backend == "flashinfer":
            raise BackendUnavailable(
                f"--attention-backend flashinfer: {error}; take triton, or leave the flag out"
            ) from None
        level = logging.WARNING if isinstance(error, FlashInferWrong) else logging.INFO
        logger.log(level, "attention on %s: by %s (flashinfer is not used: %s)", device, _own_name(problem), error)
        return None


def _own_name(problem: str) -> str:
    return "the reference" if problem else "triton"


def _reference(*args: Any, host: HostRows | None = None, **options: Any) -> Tensor:
    return reference.paged_attention(*args, **options)


def _with_flashinfer(
    device: torch.device, dtype: torch.dtype, needs: AttentionNeeds, own: Callable[..., Tensor], problem: str
) -> FlashInfer | None:
    """It, for the prompts, the decodes, or both. Raises `FlashInferMissing` where it can serve no layer."""
    lacks = {layer: FlashInfer.lacks(layer, dtype, needs.cache_dtype) for layer in needs.layers}
    fit = [layer for layer, lack in lacks.items() if not lack]
    left = ", ".join(sorted({lack for lack in lacks.values() if lack}))
    if not fit:
        raise FlashInferMissing(f"it does not serve {left}")
    found = FlashInfer(device)
    for layer in fit:
        for queries in (1, 17):
            if wrong := found.compare(_case(device, dtype, needs, layer, [(40, 1), (0, queries), (600, 1)])):
                raise FlashInferWrong(f"it fails its self-check: {wrong}")
    try:
        times = [_compare_times(device, dtype, needs, layer, own, found) for layer in fit]
    except Exception as error:  # whatever a compiler or a driver finds at sizes that were not tried before
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise FlashInferWrong(f"it cannot be timed: {text}"[:400]) from error
    parts, chosen = [], []
    for number, kind in enumerate(("prompts", "decodes")):
        theirs, ours = (sum(each[number][who] for each in times) for who in (0, 1))
        serves = needs.backend == "flashinfer" or theirs < ours
        chosen.append(serves)
        parts.append(
            f"{kind} by {'flashinfer' if serves else _own_name(problem)} "
            f"(flashinfer {1e3 * theirs:.3f} ms, {_own_name(problem)} {1e3 * ours:.3f} ms)"
        )
    found.serves_prompts, found.serves_decodes = chosen
    why = "as asked" if needs.backend == "flashinfer" else "the faster of a layer of each kind"
    rest = f"; {_own_name(problem)} serves what flashinfer does not: {left}" if left else ""
    logger.info("attention on %s: %s, %s%s", device, ", ".join(parts), why, rest)
    return found if found.serves_prompts or found.serves_decodes else None


@dataclass(frozen=True)
class AttentionCase:
    """A call of paged attention."""

    args: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, float]
    options: dict[str, Any]
    host: HostRows


def _case(
    device: torch.device,
    dtype: torch.dtype,
    needs: AttentionNeeds,
    layer: AttentionLayer,
    requests: list[tuple[int, int]],
) -> AttentionCase:
    """Random numbers for requests of (context, queries), their blocks shuffled."""
    noise = torch.Generator().manual_seed(0)
    counts = np.array([count for _, count in requests])
    lengths = np.array([sum(request) for request in requests])
    width = -(-int(lengths.max()) // needs.block_size)
    tables = torch.randperm(len(requests) * width, generator=noise).view(-1, width).to(device)
    cache = allocate_kv_cache(
        layers=1,
        num_blocks=len(requests) * width,
        kv_heads=layer.kv_heads,
        block_size=needs.block_size,
        head_dim=layer.head_dim,
        dtype=needs.cache_dtype,
        device=device,
        sides=1 if layer.is_latent else 2,
    )[0]
    for some in torch.split(torch.arange(cache.shape[1] * needs.block_size, device=device), 1 << 14):
        key, value = torch.randn(2, len(some), layer.kv_heads, layer.head_dim, device=device).to(dtype)
        reference.write_kv(key, None if layer.is_latent else value, cache, some)
    query = torch.randn(int(counts.sum()), layer.heads, layer.head_dim, generator=noise).to(device, dtype)
    starts = torch.from_numpy(np.concatenate(([0], counts.cumsum()))).to(device)
    options: dict[str, Any] = {"window": layer.window, "softcap": layer.softcap}
    if layer.has_sinks:
        options["sinks"] = torch.linspace(-1.0, 2.0, layer.heads, device=device)
    if layer.has_slopes:
        options["slopes"] = 2.0 ** -torch.linspace(1.0, 8.0, layer.heads, device=device)
    cache = cache.expand(2, *cache.shape[1:]) if layer.is_latent else cache
    args = (query, cache, tables, torch.from_numpy(lengths).to(device), starts, layer.scale)
    return AttentionCase(args, options, HostRows(counts, lengths, {}))


def check_cases(
    device: torch.device, dtype: torch.dtype, needs: AttentionNeeds
) -> Iterator[Callable[[Callable[..., Tensor]], Tensor]]:
    """Small mixed batches of the model's own layers, each to be called with the operation to try."""
    for layer in needs.layers:
        case = _case(device, dtype, needs, layer, [(0, 19), (700, 1), (31, 5), (3, 1)])
        yield functools.partial(_run, case)


def _run(case: AttentionCase, operation: Callable[..., Tensor]) -> Tensor:
    return operation(*case.args, **case.options)


TIMED_PROMPTS = [(2048, 2048)]
TIMED_DECODES = [(1023, 1)] * 64
"""Requests of (context, queries), as they are timed at start."""


def _compare_times(
    device: torch.device,
    dtype: torch.dtype,
    needs: AttentionNeeds,
    layer: AttentionLayer,
    own: Callable[..., Tensor],
    found: FlashInfer,
) -> list[tuple[float, float]]:
    """Seconds of one layer, by FlashInfer and by the platform's own: of prompts, and of decodes."""
    times = []
    for requests in (TIMED_PROMPTS, TIMED_DECODES):
        case = _case(device, dtype, needs, layer, requests)
        theirs = functools.partial(found, *case.args, **case.options, host=case.host)
        assert theirs() is not None, "it declines the call"
        times.append((_seconds(theirs, device), _seconds(functools.partial(_run, case, own), device)))
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return times


def _seconds(call: Callable[[], object], device: torch.device, rounds: int = 5) -> float:
    """The median of some rounds of four calls, after one that compiles and warms up."""
    call()
    taken = []
    for _ in range(rounds):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        for _ in range(4):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append((time.perf_counter() - started) / 4)
    return statistics.median(taken)
