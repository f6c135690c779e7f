"""Check each Triton kernel against the reference at startup, on the device that it will run on."""

from __future__ import annotations

import functools
import logging
import os
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from quire.kernels import backends, reference
from quire.kernels import triton as kernels
from quire.kernels.attention_config import AttentionConfig

logger = logging.getLogger(__name__)

Call = Callable[[Any], Any]
"""Calls an operation of the given module on fixed inputs; returns the result to compare."""


def passing(
    device: torch.device, dtype: torch.dtype, config: AttentionConfig
) -> tuple[types.SimpleNamespace, dict[str, str]]:
    """Return the kernels that agree with the reference, and what is wrong with each of the others, by name.

    Logs a warning for each of the others; the reference is used for them. On a GPU the kernels are compiled in
    parallel: one takes about a second the first time on a host.
    """
    calls = list(_calls(device, dtype, config))
    if device.type == "cuda":
        # A new thread starts with device 0, whatever the process has selected; set_device takes an index.
        index = torch.empty(0, device=device).get_device()
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1), "check", torch.cuda.set_device, (index,)) as pool:
            results = list(pool.map(lambda each: _problem(each[1], dtype), calls))
    else:  # Triton's interpreter runs one kernel at a time
        results = [_problem(call, dtype) for _, call in calls]
    problems: dict[str, str] = {}
    for (name, _), problem in zip(calls, results, strict=True):
        if problem:
            problems.setdefault(name, problem)
    for name, problem in problems.items():
        logger.warning("the Triton kernel %s is not used on %s, the slower reference is: %s", name, device, problem)
    passed = {name: getattr(kernels, name) for name, _ in calls if name not in problems}
    logger.info("Triton kernels on %s: %s", device, ", ".join(passed) or "none")
    return types.SimpleNamespace(**passed), problems


def _attend(case: Callable[..., Tensor], module: Any) -> Tensor:
    return case(module.paged_attention)


def _problem(call: Call, dtype: torch.dtype) -> str:
    """What is wrong with the kernel; "" if it agrees with the reference."""
    try:
        return _difference(call(kernels), call(reference), dtype)
    except Exception as error:  # from a compiler or a driver
        return f"{type(error).__name__}: {error}".partition("\n")[0]


def _difference(actual: Any, expected: Any, dtype: torch.dtype) -> str:
    """How `actual` differs from `expected` beyond the precision of the type, or ""."""
    step = max(8 * torch.finfo(dtype).eps, 2e-5)
    try:
        torch.testing.assert_close(actual, expected, rtol=step, atol=step)
    except AssertionError as error:
        return " ".join(str(error).split())
    return ""


def _calls(device: torch.device, dtype: torch.dtype, config: AttentionConfig) -> Iterator[tuple[str, Call]]:
    """Yield every operation of the platform on small inputs of odd sizes, and attention with the model's parameters."""
    noise = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=noise).to(device, dtype)

    def integers(*numbers: int) -> Tensor:
        return torch.tensor(numbers, device=device)

    x, residual, weight = random(3, 200), random(3, 200), random(200)
    yield "rms_norm", lambda module: module.rms_norm(x, weight, 1e-6)
    yield "add_rms_norm", lambda module: module.add_rms_norm(x, residual, weight, 1e-6)
    yield "act_mul", lambda module: module.act_mul(x, "silu")

    blocks = random(2, 40, 2, 16, 80)
    query, key, value = random(20, 6, 80), random(20, 2, 80), random(20, 2, 80)
    cos_sin = random(20, 80).float()

    def write(module: Any) -> tuple[Tensor, Tensor]:
        cache = blocks.clone()
        return module.rotary_write_kv(query, key, value, cos_sin, cache, torch.arange(20, device=device) * 3), cache

    yield "rotary_write_kv", write
    table = torch.arange(40, device=device).flip(0).repeat(3, 1)
    batch = blocks, table, integers(600, 37, 19), integers(0, 1, 2, 20)
    options = {"window": 500, "softcap": 20.0, "sinks": random(6).float()}
    yield (
        "paged_attention",
        lambda module: (
            module.paged_attention(query, *batch, 0.1),
            module.paged_attention(query, *batch, 0.1, **options),
        ),
    )
    for case in backends.check_cases(device, dtype, config):
        yield "paged_attention", functools.partial(_attend, case)
    ids = torch.randint(-1, 6, (3, 2), generator=noise).to(device)
    experts = random(5, 96, 200) / 14, random(5, 200, 48) / 7
    shares = torch.rand(3, 2, generator=noise).to(device)
    yield "fused_experts", lambda module: module.fused_experts(x, shares, ids, *experts, "silu")
    scores, bias = torch.randn(5, 40, generator=noise).to(device), torch.randn(40, generator=noise).to(device)
    by_groups = {"groups": 5, "top_groups": 2, "group_score": "top2_sum"}
    yield (
        "route",
        lambda module: (
            module.route(scores, 3, "softmax"),
            module.route(scores, 4, "topk_softmax", scale=2.0),
            module.route(scores, 6, "sigmoid", renormalize=True, correction_bias=bias, **by_groups),
        ),
    )
    logits = torch.randn(6, 9999, generator=noise).to(device)
    tokens = integers(0, 9998, 5000, 17, 3, 4096)
    yield "score_tokens", lambda module: module.score_tokens(logits, tokens, 5)
    history = torch.randint(9999, (600,), generator=noise).to(device, torch.int32)
    history[20:70:3] = 5

    def penalize(module: Any) -> Tensor:
        changed = logits.clone()
        spans, factors = integers(10, 40, 600, 0, 0, 30).view(2, 3), torch.tensor([[1.3, 0.5, 0.25], [0.7, 1.0, -1.0]])
        module.penalize(changed, history, integers(4, 1), spans, factors.to(device), 590)
        return changed

    yield "penalize", penalize
    controls = (
        torch.tensor([1.0, 0.7, 1.0, 0.0, 1.0, 1.0]),
        torch.tensor([0, 5, 0, 9, 9, 4000]),
        torch.tensor([1.0, 1.0, 0.3, 0.7, 0.7, 0.9]),
        torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.01]),
    )
    seeds = torch.arange(6)
    yield "sample", lambda module: module.sample(logits, *controls, seeds, seeds)
