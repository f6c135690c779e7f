"""Check each kernel of a platform against the reference, on the device that it will run on."""

from __future__ import annotations

import logging
import os
import types
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from quire.kernels import backends, examples
from quire.kernels.attention_config import AttentionConfig, AttentionLayer
from quire.kernels.cache import INT4
from quire.kernels.examples import Example, Inputs, tolerance
from quire.kernels.flashinfer import FlashInfer
from quire.kernels.quantized import QuantizedFormat

logger = logging.getLogger(__name__)

FORMATS = (
    QuantizedFormat("uint4", 128, has_offsets=True),
    QuantizedFormat("e2m1", 32),
    QuantizedFormat("nf4", 64, wide=True),
    QuantizedFormat("fp8", 128),
    QuantizedFormat("int4", 32, has_order=True),
    QuantizedFormat("int8", has_rounding=True),
    QuantizedFormat("int8", rounds_inputs=True),
    QuantizedFormat("fp8", rounds_inputs=True),
    QuantizedFormat("fp8", 128, rounds_inputs=True),
    QuantizedFormat("e2m1", 16, rounds_inputs=True),
)
"""One of each kind."""


def passing(
    module: types.ModuleType,
    device: torch.device,
    dtype: torch.dtype,
    config: AttentionConfig,
    formats: Collection[QuantizedFormat] = FORMATS,
) -> tuple[types.SimpleNamespace, dict[str, str]]:
    """Return the kernels of a platform's module that agree with the reference, and the problem with each of the others,
    by name. Logs a warning for each of the others; the reference is used for them.
    """
    found = differences(module, device, dtype, config, formats)
    problems = {name: problem for name, problem in found.items() if problem}
    for name, problem in problems.items():
        logger.warning("the kernel %s is not used on %s, the slower reference is: %s", name, device, problem)
    passed = {name: getattr(module, name) for name in found if name not in problems}
    logger.info("kernels on %s: %s", device, ", ".join(passed) or "none")
    return types.SimpleNamespace(**passed), problems


def differences(
    module: types.ModuleType,
    device: torch.device,
    dtype: torch.dtype,
    config: AttentionConfig,
    formats: Collection[QuantizedFormat] = FORMATS,
) -> dict[str, str]:
    """Call every operation of a platform's module that a model with such attention and weights needs, and return how
    each differs from the reference; "" if it agrees.

    On a GPU the kernels are compiled in parallel: one takes about a second the first time on a host.
    """
    every = _examples(Inputs(device, dtype), config, formats)
    calls = [each for each in every if each.operation in module.__all__]
    if "tiled_linear" in module.__all__:
        calls += examples.packed_matmuls(Inputs(device, dtype))

    def problem(example: Example) -> str:
        """The problem with the kernel; "" if it agrees with the reference."""
        try:
            return difference(example, module, dtype)
        except Exception as error:  # from a compiler or a driver
            return f"{type(error).__name__}: {error}".partition("\n")[0]

    if device.type == "cuda":
        # A new thread starts with device 0, whatever the process has selected; set_device takes an index.
        index = torch.empty(0, device=device).get_device()
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1), "check", torch.cuda.set_device, (index,)) as pool:
            results = list(pool.map(problem, calls))
    else:  # Triton's interpreter runs one kernel at a time
        results = [problem(each) for each in calls]
    found = dict.fromkeys((each.operation for each in calls), "")
    for each, text in zip(calls, results, strict=True):
        found[each.operation] = found[each.operation] or text
    return found


def flashinfer_difference(device: torch.device, dtype: torch.dtype) -> str:
    """How FlashInfer's attention differs from the reference; "" if it agrees. Raises `FlashInferMissing`."""
    layer = AttentionLayer(8, 2, 128, 128**-0.5)
    config = AttentionConfig((layer,), cache_dtype=dtype)
    return FlashInfer(device).compare(backends.mixed_case(device, dtype, config, layer))


def difference(example: Example, module: Any, dtype: torch.dtype) -> str:
    """How a module's result differs from the reference's beyond the tolerance, or ""."""
    step = tolerance(example.operation, dtype)
    try:
        torch.testing.assert_close(example.call(module), example.expected(), rtol=step, atol=step)
    except AssertionError as error:
        return " ".join(str(error).split())
    return ""


def _examples(inputs: Inputs, config: AttentionConfig, formats: Collection[QuantizedFormat]) -> Iterator[Example]:
    """Calls on small inputs of odd sizes, and attention with the model's parameters."""
    requests, heads = [(599, 1), (36, 1), (1, 18)], (6, 2, 80)
    latent, per_request = AttentionLayer(6, 1, 80, 0.1, has_sinks=True, is_mla=True), AttentionLayer(*heads, 0.1)
    yield from examples.norms(inputs, 3, 200)
    yield examples.activation(inputs, 3, 100, "silu")
    yield examples.cache_write(inputs, 20, heads, 80, inputs.dtype)
    for layer in (per_request, replace(per_request, window=500, softcap=20.0, has_sinks=True)):
        yield examples.attention(inputs, requests, layer)
    for layer in config.layers:
        requests_of_model = [(0, 19), (700, 1), (31, 5), (3, 1)]
        requests_of_model += [(0, 1)] * layer.is_partial  # no key of it is here
        if config.cache_dtype == INT4:
            yield from examples.int4_cache(inputs, requests_of_model, layer, config.block_size)
        else:
            yield examples.attention(inputs, requests_of_model, layer, config.cache_dtype, config.block_size)
    tokens, blocks = ((7, 1), (30, 1), (5, 4), (30, 2)), ((16, 5, 1), (24, 40, 2))
    yield from examples.selection(inputs, requests, (6, 80), tokens, blocks)
    for layer in (per_request, latent):
        yield examples.sparse_attention(inputs, requests, layer, 33)
    yield from examples.hyper_connections(inputs, 5, 80, iterations=3)
    yield examples.compression(inputs, requests, (40, 8, 1), rotary_dim=8)
    yield examples.compression(inputs, requests, (20, 4, 2), rotary_dim=8)
    yield examples.compression(inputs, requests, (80, 4, 1), rotary_dim=8, gated=False, normed=False)
    yield from examples.recurrent(inputs, 20, heads=(2, 6, 80), state_size=80)
    yield examples.fused_experts(inputs, 3, (5, 2, 200, 48))
    yield examples.fused_experts(inputs, 3, (5, 2, 200, 48), has_changes=True)
    yield from examples.low_rank(inputs, 21, 200, (72, 40), (3, 0, 16, 1, 35))
    by_groups: dict[str, Any] = {"groups": 5, "top_groups": 2, "group_score": "top2_sum", "has_bias": True}
    yield examples.route(inputs, 5, 40, 3, "softmax")
    yield examples.route(inputs, 5, 40, 4, "topk_softmax", scale=2.0)
    yield examples.route(inputs, 5, 40, 6, "sigmoid", renormalize=True, **by_groups)
    yield examples.route(inputs, 5, 40, 12, "sigmoid", ineligible=0.0, **by_groups)
    yield from examples.on_logits(inputs, 6, 9999, longest=600, num_top=5)
    yield examples.sample(
        inputs,
        rows=6,
        vocabulary=9999,
        temperature=[1.0, 0.7, 1.0, 0.0, 1.0, 1.0],
        top_k=[0, 5, 0, 9, 9, 4000],
        top_p=[1.0, 1.0, 0.3, 0.7, 0.7, 0.9],
        min_p=[0.0, 0.0, 0.0, 0.0, 0.0, 0.01],
    )
    yield examples.uniform_noise(inputs)
    for each in formats:
        form = replace(each, group=min(each.group, 256))  # larger ones are more blocks
        group = form.group or 32
        hidden = -(-256 // group) * group
        inner = hidden if form.rounds_inputs else -(-64 // group) * group
        yield from examples.quantized_matmuls(inputs, form, (3,), hidden, features=70)
        yield from examples.quantized_experts(inputs, form, (3,), (2, 1, hidden, inner))
    yield examples.activation(inputs, 3, 100, "quick_gelu", gated=False)
    yield examples.fused_experts(inputs, 3, (5, 2, 200, 48), "relu2", gated=False, has_changes=True)
    yield from examples.sequences(inputs, (70, 1, 19, 110), heads, rotary_dim=16)
    yield from examples.int4_cache(inputs, requests, per_request)
