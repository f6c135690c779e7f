"""Check each kernel of a platform against the reference, on the device that it will run on."""

from __future__ import annotations

import functools
import logging
import os
import types
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from quire.kernels import backends, coded_words, fp4, packed, quantized, reference
from quire.kernels.attention_config import AttentionConfig, AttentionLayer
from quire.kernels.cache import FP8_CAPABILITY, StateSegments
from quire.kernels.coded_words import CodedWords, RowRounding, pack_words, typed_codes
from quire.kernels.flashinfer import FlashInfer
from quire.kernels.fp4 import FP4_CAPABILITY, Fp4Weight
from quire.kernels.quantized import VALUES, QuantizedFormat, QuantizedWeight

logger = logging.getLogger(__name__)

Call = Callable[[Any], Any]
"""Calls an operation of the given module on fixed inputs; returns the result to compare."""


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
    """Return the kernels of a platform's module that agree with the reference, and what is wrong with each of the
    others, by name. Logs a warning for each of the others; the reference is used for them.
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
    every = chain(_calls(device, dtype, config), _calls_of_quantized(device, dtype, formats))
    calls = [each for each in every if each[0] in module.__all__]
    if "tiled_linear" in module.__all__:
        calls += _calls_of_packed(device, dtype)

    def problem(each: tuple[str, Call]) -> str:
        """What is wrong with the kernel; "" if it agrees with the reference."""
        name, call = each
        oracle = next(each for each in (reference, packed, quantized, coded_words, fp4) if hasattr(each, name))
        try:
            return _difference(name, call(module), call(oracle), dtype)
        except Exception as error:  # from a compiler or a driver
            return f"{type(error).__name__}: {error}".partition("\n")[0]

    if device.type == "cuda":
        # A new thread starts with device 0, whatever the process has selected; set_device takes an index.
        index = torch.empty(0, device=device).get_device()
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1), "check", torch.cuda.set_device, (index,)) as pool:
            results = list(pool.map(problem, calls))
    else:  # Triton's interpreter runs one kernel at a time
        results = [problem(each) for each in calls]
    found = dict.fromkeys((name for name, _ in calls), "")
    for (name, _), text in zip(calls, results, strict=True):
        found[name] = found[name] or text
    return found


def flashinfer_difference(device: torch.device, dtype: torch.dtype) -> str:
    """How FlashInfer's attention differs from the reference; "" if it agrees. Raises `FlashInferMissing`."""
    layer = AttentionLayer(8, 2, 128, 128**-0.5)
    config = AttentionConfig((layer,), cache_dtype=dtype)
    return FlashInfer(device).compare(backends.mixed_case(device, dtype, config, layer))


def _attend(case: Callable[..., Tensor], module: Any) -> Tensor:
    return case(module.paged_attention)


_LEAST_STEPS = {
    "coded_linear": 2e-4,  # inputs are rounded to 16 bits
    "coded_experts": 2e-4,
    "rounded_matmul": 2e-3,  # Hopper's tensor cores add products of 8-bit floats with 14 bits
    "rounded_fused_experts": 2**-5,  # so an input of the second matmul may be rounded to the next code
    "fp4_matmul": 2e-3,
    "fp4_fused_experts": 2**-5,
}


def tolerance(name: str, dtype: torch.dtype) -> float:
    """How far, relative and absolute, an operation of this name may differ from the reference."""
    return max(8 * torch.finfo(dtype).eps, _LEAST_STEPS.get(name, 2e-5))


def _difference(name: str, actual: Any, expected: Any, dtype: torch.dtype) -> str:
    """How `actual` differs from `expected` beyond the tolerance, or ""."""
    step = tolerance(name, dtype)
    try:
        torch.testing.assert_close(actual, expected, rtol=step, atol=step)
    except AssertionError as error:
        return " ".join(str(error).split())
    return ""


def _calls(device: torch.device, dtype: torch.dtype, config: AttentionConfig) -> Iterator[tuple[str, Call]]:
    """Yield the operations of `reference` on small inputs of odd sizes, and attention with the model's parameters."""
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
    # Whole numbers have exact scores, whose order does not depend on rounding.
    sides, shares = (blocks[:1, :, :1] * 2).round(), torch.randint(-4, 5, (20, 6), generator=noise).to(device).float()
    indexed = (query * 2).round(), shares, sides, *batch[1:]
    yield (
        "select_tokens",
        lambda module: [module.select_tokens(*indexed, *each) for each in ((7,), (30,), (5, 4), (30, 2))],
    )
    in_blocks = (query * 2).round(), *indexed[2:]
    yield (
        "select_blocks",
        lambda module: (module.select_blocks(*in_blocks, 16, 5, 1), module.select_blocks(*in_blocks, 24, 40, 2)),
    )
    slots, counts = torch.randint(640, (20, 33), generator=noise).to(device), torch.arange(20, device=device) + 14
    yield (
        "sparse_attention",
        lambda module: (
            module.sparse_attention(query, blocks, slots, counts, 0.1),
            module.sparse_attention(query, sides.expand(2, -1, -1, -1, -1), slots, counts, 0.1, options["sinks"]),
        ),
    )
    function, start = (torch.randn(shape, generator=noise).to(device) for shape in ((24, 320), (24,)))
    streams = random(5, 320)
    connections = (24, 3, 3), (8, 2, 0), (4, 1, 0)  # weights, their parts, and iterations
    yield (
        "mhc_pre",
        lambda module: [
            module.mhc_pre(streams, function[:rows] / 18, start[:rows], start[:parts], 4, 1e-6, 1e-6, steps)
            for rows, parts, steps in connections
        ],
    )
    written, mixing = function[:5, :4].contiguous(), function[:5, :16].reshape(5, 4, 4)
    yield (
        "mhc_post",
        lambda module: [module.mhc_post(key[:5, 0], streams, written, each) for each in (mixing, mixing[:, :0, :0])],
    )

    def compress(module: Any) -> list[Tensor]:
        caches = [torch.zeros(1, 40, 1, 4, size, dtype=dtype, device=device) for size in (40, 20)]
        for cache, ratio in zip(caches, (8, 4), strict=True):
            given = blocks[:1, :, :1], cos_sin[:ratio, :40].contiguous(), weight[: cache.shape[4]], 1e-6, cos_sin[:, :8]
            module.compress_tokens(*given, cache, torch.arange(20, device=device), *batch[1:], table)
        # Sums that are not normalized, of values without gates.
        caches.append(torch.zeros(1, 40, 1, 4, blocks.shape[4], dtype=dtype, device=device))
        sums = blocks[:1, :, :1], function[:4, : blocks.shape[4]].contiguous(), None, 0.0, cos_sin[:, :8]
        module.compress_tokens(*sums, caches[-1], torch.arange(20, device=device), *batch[1:], table)
        return caches

    yield "compress_tokens", compress
    for case in backends.check_cases(device, dtype, config):
        yield "paged_attention", functools.partial(_attend, case)
    segments = StateSegments(integers(0, 12, 19, 20), integers(0, 2, 3), integers(-1, 1, 2), integers(1, 0, 2))
    pages = torch.randn(3, 6, 80, 80, generator=noise).to(device), random(3, 3, 800)
    gates, tail = torch.rand(20, 6, generator=noise).to(device), random(800, 4)

    def convolve(module: Any) -> tuple[Tensor, ...]:
        kept = pages[1].clone()
        wide = query.flatten(1)[:, :400].repeat(1, 2)
        return (
            module.causal_conv(wide, tail, None, kept, segments),
            module.causal_conv(wide, tail, tail[:, 0].contiguous(), kept, segments, silu=False),
            kept,
        )

    def attend(module: Any) -> tuple[Tensor, ...]:
        kept = pages[0].clone()
        scanned = key, value, query, -gates, gates, kept, segments, 0.1
        return module.linear_attention(*scanned, 1e-6), module.linear_attention(*scanned, is_delta=False), kept

    def scan(module: Any) -> tuple[Tensor, Tensor]:
        kept, wide = pages[0][:, :1].clone(), query.flatten(1)
        given = wide[:, :80], wide[:, 80:160].float().sigmoid(), pages[0][0, 1].abs().neg(), key[:, 0], value[:, 0]
        return module.selective_scan(*given, kept, segments), kept

    yield "causal_conv", convolve
    yield "linear_attention", attend
    yield "selective_scan", scan

    def weigh(module: Any) -> tuple[Tensor, Tensor]:
        kept, wide = pages[0][:, :1, :3].abs(), query.flatten(1)
        given = wide[:, :80], wide[:, 80:160], -gates[0, 0].expand(80), pages[0][0, 1, 0], kept, segments
        return module.wkv(*given), kept

    yield "wkv", weigh
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
            module.route(scores, 12, "sigmoid", correction_bias=bias - 0.5, ineligible=0.0, **by_groups),
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
    yield "sample", lambda module: module.sample(logits.clone(), *controls, seeds, seeds)
    tokens32 = torch.arange(77, dtype=torch.int32, device=device)
    yield "uniform_noise", lambda module: module.uniform_noise(tokens, tokens.flip(0), tokens32)
    masks = torch.randint(-(2**31), 2**31, (2, 313), generator=noise).to(device, torch.int32)

    def mask(module: Any) -> Tensor:
        masked = logits.clone()
        module.apply_bitmask(masked, integers(4, 1), masks)
        return masked

    yield "apply_bitmask", mask


def _calls_of_quantized(
    device: torch.device, dtype: torch.dtype, formats: Collection[QuantizedFormat]
) -> Iterator[tuple[str, Call]]:
    """Yield the operations of `coded_words` and of `fp4` in the same way."""
    noise = torch.Generator().manual_seed(0)
    ids, shares = torch.tensor([[0], [1], [-1]], device=device), torch.rand(3, 1, generator=noise).to(device)
    least = {"fp8": FP8_CAPABILITY, "e2m1": FP4_CAPABILITY}
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else FP4_CAPABILITY

    def weight(form: QuantizedFormat, *shape: int) -> QuantizedWeight:
        groups = shape[-1] // (form.group or shape[-1])
        random = _random_codes(noise, form.values, groups, *shape, has_offsets=form.has_offsets)
        codes, scales = random.codes.to(device), random.scales.to(device)
        offsets = None if random.offsets is None else random.offsets.to(device)
        changed = replace(random, codes=codes, scales=scales, offsets=offsets, wide=form.wide)
        (*stack, _, inputs), rounding = shape, torch.tensor([1 / 32, 3.0], device=device)
        if form.has_rounding:
            changed = replace(changed, rounding=rounding.expand(*stack, 2))
        if form.has_order:
            columns = torch.rand(*stack, inputs, generator=noise).argsort()
            columns[..., 5] = inputs  # a column without an input
            changed = replace(changed, columns=columns.to(device))
        return changed

    for each in formats:
        form = replace(each, group=min(each.group, 256))  # larger ones are more blocks
        group = form.group or 32
        inputs = -(-256 // group) * group
        size = inputs if form.rounds_inputs else -(-64 // group) * group
        x, bias = (torch.randn(shape, generator=noise).to(device, dtype) for shape in ((3, inputs), (70,)))
        weights = [weight(form, *shape) for shape in ((70, inputs), (2, 2 * size, inputs), (2, inputs, size))]
        weights[1:] = _scaled(x, shares, ids, *weights[1:])
        is_widened = not form.rounds_inputs or capability < least.get(form.values, capability)
        if is_widened or form.values == "e2m1":  # which a layer is without the constant scale of its inputs
            packed_one, *packed_both = map(pack_words, weights)
            yield "coded_matmul", functools.partial(_multiply_words, x, packed_one, bias)
            yield "coded_fused_experts", functools.partial(_mix_words, x, shares, ids, *packed_both)
        if not is_widened and form.values == "e2m1":
            largest = torch.full((), 6.0 * 448 / 3, device=device)  # some inputs are cut off
            scaled = [replace(each, global_scale=largest.expand(each.codes.shape[:-2])) for each in weights]
            yield "round_fp4", functools.partial(_round_fp4, x, largest)
            yield "fp4_matmul", functools.partial(_multiply_fp4, x, fp4.pack_fp4(scaled[0]), bias)
            yield "fp4_fused_experts", functools.partial(_mix_fp4, x, shares, ids, *map(fp4.pack_fp4, scaled[1:]))
        elif not is_widened:
            one, gate_up, down = ((typed_codes(each), each.scales) for each in weights)
            rounding = RowRounding(one[0].dtype, one[1].shape[1])
            yield "round_rows", functools.partial(rounds, "round_rows", x, rounding)
            for name in ("rms_norm_rounded", "add_rms_norm_rounded", "act_mul_rounded"):
                yield name, functools.partial(rounds, name, x, rounding)
            yield "rounded_matmul", functools.partial(_multiply_rounded, x, *one, bias)
            yield "rounded_fused_experts", functools.partial(_mix_rounded, x, shares, ids, *gate_up, *down)


def _multiply_words(x: Tensor, weight: CodedWords, bias: Tensor, module: Any) -> Any:
    return module.coded_matmul(x, weight, bias)


def _mix_words(x: Tensor, shares: Tensor, ids: Tensor, gate_up: CodedWords, down: CodedWords, module: Any) -> Any:
    return module.coded_fused_experts(x, shares, ids, gate_up, down, "silu")


def _round_fp4(x: Tensor, global_scale: Tensor, module: Any) -> Any:
    codes, scales = module.round_fp4(x, global_scale)
    return scales.float(), fp4.widen_fp4(codes, scales)


def _multiply_fp4(x: Tensor, weight: Fp4Weight, bias: Tensor, module: Any) -> Any:
    return module.fp4_matmul(x, weight, bias)


def _mix_fp4(x: Tensor, shares: Tensor, ids: Tensor, gate_up: Fp4Weight, down: Fp4Weight, module: Any) -> Any:
    return module.fp4_fused_experts(x, shares, ids, gate_up, down, "silu")


def rounds(name: str, x: Tensor, rounding: RowRounding, module: Any) -> Any:
    """Call an operation that rounds its result."""
    if name == "round_rows":
        return rounded_as(x, *module.round_rows(x, *rounding))
    if name == "act_mul_rounded":
        both = torch.cat((x, x.flip(0)), dim=1)
        gated = rounded_as(reference.act_mul(both, "silu"), *module.act_mul_rounded(both, "silu", *rounding))
        plain = reference.activate(x, "relu2")
        return *gated, *rounded_as(plain, *module.act_mul_rounded(x, "relu2", *rounding, gated=False))
    weight, kept = x[0].abs() + 0.5, torch.empty_like(x)
    if name == "rms_norm_rounded":
        plain = reference.rms_norm(x, weight, 1e-6, 1.0)
        alone = rounded_as(plain, *module.rms_norm_rounded(x, weight, 1e-6, 1.0, *rounding))
        return *alone, *rounded_as(plain, *module.rms_norm_rounded(x, weight, 1e-6, 1.0, *rounding, kept)), kept
    plain, _ = reference.add_rms_norm(x, x.flip(0), weight, 1e-6)
    alone = rounded_as(plain, *module.add_rms_norm_rounded(x, x.flip(0), weight, 1e-6, 0.0, *rounding)[:2])
    codes, scales, total = module.add_rms_norm_rounded(x, x.flip(0), weight, 1e-6, 0.0, *rounding, kept)
    return *alone, *rounded_as(plain, codes, scales), total, kept


def rounded_as(plain: Tensor, codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """The scales of rounded rows, and whether each row is `plain` but for the rounding. Numbers near the middle between
    two codes may become either."""
    size = coded_words.ROUNDED_GROUP if scales.shape[1] > 1 else plain.shape[1]
    wide, exact = scales.repeat_interleave(size, dim=1)[:, : plain.shape[1]], plain.float()
    half = wide / 2 if codes.dtype == torch.int8 else torch.maximum(exact.abs() / 16, wide * 2**-10)
    allowed = 1.01 * half + 8 * torch.finfo(plain.dtype).eps * exact.abs()
    return scales, ((codes.float() * wide - exact).abs() <= allowed).all(dim=1)


def _multiply_rounded(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor, module: Any) -> Any:
    return module.rounded_matmul(x, codes, scales, bias)


def _mix_rounded(x: Tensor, shares: Tensor, ids: Tensor, *parts: Any) -> Any:
    """Inputs that are rounded there, and before."""
    *weights, module = parts
    codes, scales = coded_words.round_rows(x, weights[0].dtype, weights[1].shape[2])
    return (
        module.rounded_fused_experts(x, shares, ids, *weights, "silu"),
        module.rounded_fused_experts(codes, shares, ids, *weights, "silu", x_scales=scales, dtype=x.dtype),
    )


def _calls_of_packed(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    """Yield the operations of `packed` in the same way. Inputs that are packed are so by the reference."""
    noise = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=noise).to(device, dtype)

    x, weight, bias = random(5, 96), random(70, 96), random(70)
    yield "quantize_rows", lambda module: module.quantize_rows(x)
    yield "quantize_weight", lambda module: module.quantize_weight(weight)
    scales = torch.rand(5, generator=noise).to(device)
    yield "scale_rows", lambda module: module.scale_rows(x.clone(), scales, bias[:1].expand(96).contiguous(), dtype)
    per_word = _per_word(weight)
    yield "pack_tiles", lambda module: (module.pack_tiles(weight, per_word), module.pack_tiles(weight, per_word, True))
    yield "pack_int8_tiles", lambda module: (*module.pack_int8_tiles(weight), *module.pack_int8_tiles(weight, True))
    yield "pack_int4_tiles", lambda module: module.pack_int4_tiles(weight, 32)
    int8, int4 = packed.pack_int8_tiles(weight), packed.pack_int4_tiles
    yield "int8_linear", lambda module: module.int8_linear(x, *int8, bias, 70)
    yield "int4_linear", lambda module: module.int4_linear(x, int4(weight, 32), bias, 70)
    gate_up, down = random(3, 96, 96) / 10, random(3, 96, 48) / 7
    ids, shares = torch.randint(3, (5, 2), generator=noise).to(device), torch.rand(5, 2, generator=noise).to(device)
    for values, groups in (("int4", 3), ("nf4", 3), ("fp8", 3), ("int8", 1), ("uint8", 3)):
        random_codes = functools.partial(_random_codes, noise, values, groups, has_offsets=groups > 1)
        yield "coded_linear", functools.partial(_multiply_coded, x, bias, _with_unit_rows(random_codes(70, 96)))
        first, second = (random_codes(3, *part.shape[1:]) for part in (gate_up, down))
        first, second = _scaled(x, shares, ids, first, second)
        yield "coded_experts", functools.partial(_mix_coded, x, shares, ids, first, second)
    codes, factors = torch.randint(16, weight.shape, generator=noise).to(device, torch.uint8), random(2, 70, 3).float()
    yield (
        "pack_coded_tiles",
        lambda module: (
            module.pack_coded_tiles(codes, None, None, 8, 8, False, True),
            module.pack_coded_tiles(codes, *factors, 32, 8, True),
            module.pack_coded_tiles(codes, *factors, 32, 4, False),
        ),
    )
    for stored in (dtype, torch.bfloat16, torch.float16) if dtype == torch.float32 else (dtype,):
        yield "tiled_linear", functools.partial(_multiply_tiles, x, bias, weight.to(stored))
        yield "packed_experts", functools.partial(_mix_tiles, x, shares, ids, gate_up.to(stored), down.to(stored))


def _multiply_tiles(x: Tensor, bias: Tensor, weight: Tensor, module: Any) -> Any:
    return module.tiled_linear(x, packed.pack_tiles(weight, _per_word(weight)), bias, len(weight))


def _mix_tiles(x: Tensor, shares: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor, module: Any) -> Any:
    first = torch.stack([packed.pack_tiles(expert, _per_word(gate_up), True) for expert in gate_up])
    second = torch.stack([packed.pack_tiles(expert, _per_word(down)) for expert in down])
    return module.packed_experts(x, shares, ids, first, None, None, second, None, None, "silu")


def _per_word(weight: Tensor) -> int:
    return 2 if weight.dtype == torch.bfloat16 else 1


def _random_codes(noise: torch.Generator, values: str, groups: int, *shape: int, has_offsets: bool) -> QuantizedWeight:
    """A weight of few bits. Its numbers are about as often negative as positive: otherwise they would be nearly the
    same for all features, and for all experts."""
    table = VALUES[values]
    codes = torch.randint(min(120, len(table)), shape, generator=noise, dtype=torch.uint8)
    if len(table) == 256 and (table < 0).any():
        codes += 128 * torch.randint(2, shape, generator=noise, dtype=torch.uint8)
    largest, center = float(table[:120].abs().max()), table[codes.int()].mean().round()
    scales = torch.rand(*shape[:-1], groups, generator=noise) / largest / 10
    offsets = torch.randint(-8, 8, scales.shape, generator=noise) * min(largest / 8, 1.0) - center
    return QuantizedWeight(values, torch.float32, codes, scales, offsets if has_offsets else None)


def _with_unit_rows(weight: QuantizedWeight) -> QuantizedWeight:
    """A weight with other scales: the mean norm of its rows is 1, as is about the product with a normal input."""
    return replace(weight, scales=weight.scales / weight.dequantize().norm(dim=-1).mean())


def _scaled(
    x: Tensor, shares: Tensor, ids: Tensor, gate_up: QuantizedWeight, down: QuantizedWeight
) -> tuple[QuantizedWeight, QuantizedWeight]:
    """Weights of experts with other scales: the largest result is far above the tolerance, but an input of the second
    matmul that is rounded to the next code changes none by more than that."""
    target = 0.25 if gate_up.values == "e2m1" else 0.5  # codes of 4 bits are further apart
    gate_up = _with_unit_rows(gate_up)
    experts = gate_up.dequantize(), down.dequantize()
    largest = reference.fused_experts(x.float(), shares, ids, *experts, "silu").abs().max()
    return gate_up, replace(down, scales=down.scales * (target / largest))


def _multiply_coded(x: Tensor, bias: Tensor, weight: QuantizedWeight, module: Any) -> tuple[Any, Any]:
    def product(gated: bool) -> Any:
        tiles = quantized.pack_coded(weight, gated)
        form = weight.values, tiles.group, tiles.factors
        if gated:
            return module.coded_linear(x, tiles.tiles, tiles.scales, None, len(bias) // 2, *form, "silu")
        return module.coded_linear(x, tiles.tiles, tiles.scales, bias, len(bias), *form)

    return product(False), product(True)


def _mix_coded(
    x: Tensor, shares: Tensor, ids: Tensor, gate_up: QuantizedWeight, down: QuantizedWeight, module: Any
) -> Any:
    first, second = quantized.stack_coded(gate_up, True), quantized.stack_coded(down)
    return module.coded_experts(
        *(x, shares, ids, first.tiles, first.scales, None, second.tiles, second.scales, None, "silu"),
        *(gate_up.values, first.group, first.factors, second.group, second.factors),
    )
