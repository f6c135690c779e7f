"""Calls of every kernel at the sizes of models, beside the small odd ones that `kernels.triton.check` makes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

import numpy as np
import torch
from torch import Tensor

from quire import kernels
from quire.engine.config import EngineOptions
from quire.engine.layers.attention import HostRows
from quire.kernels import reference

BLOCK = 16
Call = Callable[[Any], Any]
"""An operation of the module that it is given, on the same inputs each time; returns what is to be compared."""


@dataclass(frozen=True)
class Case:
    """What `kernels.paged_attention` is called with."""

    query: Tensor
    cache: Tensor
    tables: Tensor
    lengths: Tensor
    starts: Tensor
    options: dict[str, Any]

    def call(self, module: Any) -> Tensor:
        scale = self.query.shape[2] ** -0.5
        arguments = (self.query, self.cache, self.tables, self.lengths, self.starts, scale)
        return module.paged_attention(*arguments, **self.options)  # type: ignore[no-any-return]


def attention_case(
    requests: list[tuple[int, int]],
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    cache_dtype: torch.dtype | None = None,
    sides: int = 2,
    **options: Any,
) -> Case:
    """`requests` are tokens before and in this step; `heads` the query heads, KV heads and numbers in a head."""
    query_heads, kv_heads, head_dim = heads
    counts, lengths = np.array([new for _, new in requests]), np.array([sum(request) for request in requests])
    width = -(-int(lengths.max()) // BLOCK)
    blocks = len(requests) * width
    shape = (1, blocks, kv_heads, BLOCK, head_dim, cache_dtype or dtype, device)
    cache = kernels.allocate_kv_cache(*shape, sides=sides)[0]
    if cache_dtype is None or cache_dtype == dtype:
        cache.normal_()
    else:  # with what else stands in a row
        for start in range(0, blocks * BLOCK, 1 << 16):
            slots = torch.arange(start, min(start + (1 << 16), blocks * BLOCK), device=device)
            keys, values = (torch.randn(len(slots), kv_heads, head_dim, device=device).to(dtype) for _ in range(2))
            reference.write_kv(keys, values if sides == 2 else None, cache, slots)
    if "host" in inspect.signature(reference.paged_attention).parameters:
        options["host"] = HostRows(counts, lengths)
    return Case(
        torch.randn(int(counts.sum()), query_heads, head_dim, device=device, dtype=dtype),
        cache if sides == 2 else cache.expand(2, -1, -1, -1, -1),
        torch.randperm(blocks, device=device).view(len(requests), width),
        torch.from_numpy(lengths).to(device),
        torch.from_numpy(np.concatenate(([0], counts.cumsum()))).to(device),
        options,
    )


def sampler_arguments(rows: int, vocabulary: int, device: torch.device, **controls: float) -> tuple[Tensor, ...]:
    """Those of `kernels.sample`: logits on the device, controls on the host, pinned where that is a GPU."""
    chosen = {"temperature": 0.8, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | controls
    columns = [
        torch.full((rows,), value, dtype=torch.int64 if name == "top_k" else torch.float32)
        for name, value in chosen.items()
    ]
    hosts = [*columns, torch.arange(rows), torch.arange(rows)]
    if device.type == "cuda":
        hosts = [host.pin_memory() for host in hosts]
    return (torch.randn(rows, vocabulary, device=device) * 3, *hosts)


def calls(device: torch.device, dtype: torch.dtype, *, tiny: bool) -> Iterator[tuple[str, str, Call]]:
    """Operation, its sizes, and the call. The inputs of one are made when it is asked for."""
    yield from _elementwise(device, dtype, (7,) if tiny else (1, 64, 8192), (64, 160) if tiny else (4096, 14336))
    yield from _attention(device, dtype, tiny=tiny)
    yield from _experts(
        device, dtype, ((5, 4, 2, 32, 48),) if tiny else ((64, 8, 2, 4096, 1792), (2048, 64, 6, 2048, 1408))
    )
    if dtype == torch.float32:
        yield from _sampling(device, *((4, 999) if tiny else (64, 128_256)))


def _elementwise(
    device: torch.device, dtype: torch.dtype, rows: tuple[int, ...], sizes: tuple[int, int]
) -> Iterator[tuple[str, str, Call]]:
    hidden, inner = sizes
    for tokens in rows:
        x, residual = (torch.randn(tokens, hidden, device=device, dtype=dtype) for _ in range(2))
        weight = torch.rand(hidden, device=device, dtype=dtype)
        of = f"{tokens} × {hidden}"
        yield "rms_norm", of, lambda module, x=x, weight=weight: module.rms_norm(x, weight, 1e-6)
        yield (
            "add_rms_norm",
            of,
            lambda module, x=x, residual=residual, weight=weight: module.add_rms_norm(x, residual, weight, 1e-6),
        )
        gates = torch.randn(tokens, 2 * inner, device=device, dtype=dtype)
        for activation in ("silu", "gelu_tanh"):
            of = f"{tokens} × {inner}, {activation}"
            yield "act_mul", of, lambda module, gates=gates, name=activation: module.act_mul(gates, name)
        for rotary in (128, 64):
            yield "rotary_write_kv", f"{tokens} tokens, {rotary} of 128 turned", _write(device, dtype, tokens, rotary)


def _write(device: torch.device, dtype: torch.dtype, tokens: int, rotary: int) -> Call:
    qkv = torch.randn(tokens, 48, 128, device=device, dtype=dtype)
    angles = torch.randn(tokens, rotary // 2, device=device)
    turns = torch.cat((angles.cos(), angles.sin()), dim=1)
    blocks = -(-tokens // BLOCK) + 1
    slots = torch.randperm(blocks * BLOCK, device=device)[:tokens]

    def call(module: Any) -> Any:
        cache = kernels.allocate_kv_cache(1, blocks, 8, BLOCK, 128, dtype, device)[0]
        heads = qkv.clone().split_with_sizes([32, 8, 8], dim=1)
        return module.rotary_write_kv(*heads, turns, cache, slots), cache

    return call


def _attention(device: torch.device, dtype: torch.dtype, *, tiny: bool) -> Iterator[tuple[str, str, Call]]:
    decodes = [(37, 1)] * 3 if tiny else [(1000 + 13 * number, 1) for number in range(64)]
    mixed = [(0, 20), (9, 1), (30, 5)] if tiny else [(0, 700), (900, 1), (3000, 1), (500, 300), (4000, 1)]
    heads = ((4, 2, 16),) if tiny else ((32, 8, 128), (64, 8, 128), (16, 2, 64), (16, 8, 256), (32, 32, 80))
    for sizes in heads:
        for what, requests in (("decodes", decodes), ("prompts and decodes", mixed)):
            case = attention_case(requests, sizes, dtype, device)
            yield "paged_attention", f"{what}, heads {sizes}", case.call
    per_head = torch.randn(heads[0][0], device=device)
    for options in ({"window": 128}, {"softcap": 30.0}, {"sinks": per_head}, {"slopes": per_head.abs() / 100}):
        case = attention_case(mixed, heads[0], dtype, device, **options)
        yield "paged_attention", f"{', '.join(options)}, heads {heads[0]}", case.call
    latent = (8, 1, 24) if tiny else (32, 1, 576)
    for what, requests in (("decodes", decodes), ("prompts and decodes", mixed)):
        yield (
            "paged_attention",
            f"latent, {what}, heads {latent}",
            attention_case(requests, latent, dtype, device, sides=1).call,
        )
    for name in ("int8", "float8_e4m3fn"):
        case = attention_case(mixed, heads[0], dtype, device, cache_dtype=getattr(torch, name))
        yield "paged_attention", f"{name} cache, heads {heads[0]}", case.call


def quantized_caches() -> dict[str, torch.dtype]:
    """Of `--kv-cache-dtype`, what is not the model's own type: its name, and that of the cache's elements."""
    offered = get_args(get_type_hints(EngineOptions)["kv_cache_dtype"])
    types = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
    return {name: types[name] for name in offered if name in types}


def _experts(
    device: torch.device, dtype: torch.dtype, shapes: tuple[tuple[int, int, int, int, int], ...]
) -> Iterator[tuple[str, str, Call]]:
    for tokens, experts, top_k, hidden, inner in shapes:
        x = torch.randn(tokens, hidden, device=device, dtype=dtype)
        ids = torch.rand(tokens, experts, device=device).topk(top_k).indices
        shares = torch.rand(tokens, top_k, device=device)
        up = torch.randn(experts, 2 * inner, hidden, device=device, dtype=dtype) / hidden**0.5
        down = torch.randn(experts, hidden, inner, device=device, dtype=dtype) / inner**0.5
        of = f"{tokens} tokens, {top_k} of {experts} experts, {hidden} × {inner}"
        arguments = (x, shares, ids, up, down, "silu")
        yield "fused_experts", of, lambda module, arguments=arguments: module.fused_experts(*arguments)


def _sampling(device: torch.device, rows: int, vocabulary: int) -> Iterator[tuple[str, str, Call]]:
    for controls in ({"temperature": 0.0}, {}, {"top_p": 0.9}, {"top_k": 50, "top_p": 0.95}, {"min_p": 0.05}):
        logits, *hosts = sampler_arguments(rows, vocabulary, device, **controls)
        of = f"{rows} × {vocabulary}, {', '.join(f'{k} {v}' for k, v in controls.items()) or 'plain'}"
        yield "sample", of, lambda module, logits=logits, hosts=hosts: module.sample(logits.clone(), *hosts)
