"""Every Triton kernel, and FlashInfer, against the reference on the device, in every type."""

from __future__ import annotations

import importlib.util
import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from quire import kernels
from quire.kernels import backends, check, reference
from quire.kernels.attention_config import AttentionConfig, AttentionLayer
from quire.kernels.coded_words import pack_words
from quire.kernels.flashinfer import FlashInfer
from quire.kernels.fp4 import FP4_CAPABILITY
from quire.kernels.quantized import QuantizedWeight
from tests.gpu.conftest import DEVICE, TYPES
from tests.integration.kernels import test_attention, test_hyper_connections, test_sampling

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, where the CPU rehearses

KINDS = [
    AttentionLayer(32, 8, 128, 128**-0.5),
    AttentionLayer(14, 2, 64, 0.125),
    AttentionLayer(16, 8, 256, 0.0625, window=128, softcap=50.0),
    AttentionLayer(64, 8, 64, 0.125, window=128, has_sinks=True),
    AttentionLayer(32, 32, 80, 0.1, has_alibi=True),
    AttentionLayer(16, 8, 256, 0.0625, window=128, has_ends=True),
    AttentionLayer(16, 1, 576, 0.07, is_mla=True),
    AttentionLayer(48, 8, 128, 128**-0.5, window=512, has_own_sinks=True, num_biases=512),
    AttentionLayer(32, 8, 128, 1 / 128, num_biases=1024),
    AttentionLayer(16, 1, 128, 128**-0.5, is_partial=True),
    AttentionLayer(128, 1, 576, 0.07, is_mla=True, is_partial=True),
]
MIXED = [(0, 1), (0, 170), (40, 1), (5, 3), (1500, 1), (2600, 130), (511, 1)]
DECODES = [(length, 1) for length in (0, 15, 511, 512, 4095, 9000)]


def close(found: Any, expected: Any, dtype: torch.dtype) -> None:
    step = 2e-5 if dtype == torch.float32 else 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(found, expected, rtol=step, atol=step)


def random(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, device=device).to(dtype)


@pytest.mark.parametrize("dtype", TYPES)
def test_every_kernel_passes_the_check_of_a_rank(
    dtype: torch.dtype, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    from quire.kernels import triton

    caplog.set_level(logging.WARNING)
    passing, problems = check.passing(triton, device, dtype, AttentionConfig(tuple(KINDS), 16, dtype))
    assert not problems
    has_fp4 = device.type != "cuda" or torch.cuda.get_device_capability(device) >= FP4_CAPABILITY
    lacking = set[str]() if has_fp4 else {"round_fp4", "fp4_matmul", "fp4_fused_experts"}
    assert set(vars(passing)) == set(triton.__all__) - lacking
    assert not caplog.text


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(1, 1), (5, 2, 64), (3, 4096), (257, 1023), (2, 16384)])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norms(shape: tuple[int, ...], offset: float, dtype: torch.dtype, device: torch.device) -> None:
    x, residual, weight = (random(device, dtype, *size) for size in (shape, shape, shape[-1:]))
    close(kernels.rms_norm(x, weight, 1e-6, offset), reference.rms_norm(x, weight, 1e-6, offset), dtype)
    found, expected = (module.add_rms_norm(x, residual, weight, 1e-6, offset) for module in (kernels, reference))
    close(found, expected, dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    "activation", ["silu", "gelu", "gelu_tanh", "relu", "relu2", "swiglu_oai", "silu_7", "silu_16"]
)
def test_activations(activation: str, dtype: torch.dtype, device: torch.device) -> None:
    x = random(device, dtype, 33, 2 * 1100) * 4
    close(kernels.act_mul(x, activation), reference.act_mul(x, activation), dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("cache_dtype", [None, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(128, 128), (80, 32), (64, 0), (256, 256)])
def test_rotary_write_kv(
    head_dim: int, rotary_dim: int, cache_dtype: torch.dtype | None, dtype: torch.dtype, device: torch.device
) -> None:
    query, key, value = random(device, dtype, 70, 8, head_dim).split_with_sizes([4, 2, 2], dim=1)
    slots, turns = torch.randperm(9 * 16, device=device)[:70], torch.randn(70, rotary_dim, device=device)
    results = []
    for module in (kernels, reference):
        cache = kernels.allocate_kv_cache(1, 9, 2, 16, head_dim, cache_dtype or dtype, device)[0]
        turned = module.rotary_write_kv(query, key, value, turns, cache, slots)
        table = torch.arange(9, device=device)
        rows = [reference.read_kv(side, table, 9 * 16, torch.float32) for side in cache]
        results.append((turned, rows))
    close(results[0][0], results[1][0], dtype)
    for found, expected in zip(results[0][1], results[1][1], strict=True):
        # A number at the border of two steps of a quantized cache may go either way.
        step = {torch.int8: 0.04, torch.float8_e4m3fn: 0.3}.get(cache_dtype or dtype, 8 * torch.finfo(dtype).eps)
        torch.testing.assert_close(found, expected, rtol=step, atol=step)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("cache_dtype", [None, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("requests", [MIXED, DECODES], ids=["mixed", "decodes"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.heads}-{kind.kv_heads}-{kind.head_dim}")
def test_paged_attention(
    kind: AttentionLayer,
    requests: list[tuple[int, int]],
    cache_dtype: torch.dtype | None,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    if DEVICE.type == "cpu":  # the interpreter is slow
        requests = [(min(length, 600), min(count, 20)) for length, count in requests]
    case = backends._case(device, dtype, AttentionConfig((kind,), 16, cache_dtype or dtype), kind, requests)
    found, expected = (m.paged_attention(*case.args, **case.options) for m in (kernels, reference))
    close(found, expected, dtype)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(14, 2, 16), (6, 1, 80), (3, 3, 33)])
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_attention_is_dense_attention(
    heads: int, kv_heads: int, head_dim: int, block_size: int, device: torch.device
) -> None:
    options = test_attention.of_heads(heads, *test_attention.ALL, window=10)
    case = test_attention.build([(0, 1), (0, 17), (40, 1), (5, 3)], heads, kv_heads, head_dim, block_size, **options)

    def moved(*args: Any, **options: Any) -> Tensor:
        there = [each.to(device) if isinstance(each, Tensor) else each for each in args]
        given: dict[str, Any] = {
            name: each.to(device) if isinstance(each, Tensor) else each for name, each in options.items()
        }
        return kernels.paged_attention(*there, **given).cpu()

    close(case.run(moved), case.expected, torch.float32)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 8, 2), (13, 7, 3), (1500, 16, 4)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_experts(
    tokens: int, experts: int, top_k: int, has_bias: bool, dtype: torch.dtype, device: torch.device
) -> None:
    x, weights = random(device, dtype, tokens, 256), torch.rand(tokens, top_k, device=device)
    ids = torch.randint(-2, experts + 2, (tokens, top_k), device=device)  # others' too
    matrices = random(device, dtype, experts, 384, 256) / 16, random(device, dtype, experts, 256, 192) / 14
    biases = (random(device, dtype, experts, 384), random(device, dtype, experts, 256)) if has_bias else ()
    found, expected = (m.fused_experts(x, weights, ids, *matrices, "silu", *biases) for m in (kernels, reference))
    close(found, expected, dtype)


def same_bits(alone: Tensor, together: Tensor) -> bool:
    """Always true in a rehearsal: the matrix products of the interpreter are numpy's, which depend on their size."""
    return DEVICE.type == "cpu" or torch.equal(alone, together)


def test_attention_does_not_depend_on_the_batch(device: torch.device) -> None:
    case = test_attention.build([(0, 1), (0, 17), (40, 1), (5, 3), (1100, 1), (600, 9)], 4, 2, 16, 16)
    query, cache, tables = (each.to(device) for each in (case.query, case.cache, case.tables))

    def run(first: int, last: int) -> Tensor:
        counts, lengths = case.counts[first:last], torch.tensor(case.lengths[first:last], device=device)
        starts, begin = torch.tensor([0, *counts]).cumsum(0).to(device), sum(case.counts[:first])
        rows = query[begin : begin + sum(counts)]
        return kernels.paged_attention(rows, cache, tables[first:last], lengths, starts, 0.25)

    parts = [run(number, number + 1) for number in range(len(case.counts))]
    assert same_bits(torch.cat(parts), run(0, len(parts)))


def test_a_token_of_hyper_connections_does_not_depend_on_others(device: torch.device) -> None:
    given = [each.to(device) for each in test_hyper_connections.weights(4, 300)]
    mhc_pre: Any = kernels.mhc_pre
    x, eps = random(device, torch.float32, 23, 1200), test_hyper_connections.EPS
    together = mhc_pre(x, *given, 4, *eps, 20)
    after = kernels.mhc_post(together[0], x, *together[1:])
    for rows in (slice(0, 1), slice(5, 8), slice(17, 23)):
        alone = mhc_pre(x[rows], *given, 4, *eps, 20)
        assert all(same_bits(one, all_of[rows]) for one, all_of in zip(alone, together, strict=True))
        assert same_bits(kernels.mhc_post(alone[0], x[rows], *alone[1:]), after[rows])


@pytest.mark.parametrize(("least", "inputs"), [(1, 1100), (17, 140), (65, 140)])
def test_a_row_of_a_quantized_matmul_does_not_depend_on_others_of_its_class(
    least: int, inputs: int, device: torch.device
) -> None:
    from quire.kernels import triton

    codes, scales = torch.randint(16, (40, inputs), dtype=torch.uint8), torch.rand(40, inputs // 20) + 0.1
    packed = pack_words(QuantizedWeight("e2m1", torch.float32, codes.to(device), scales.to(device)))
    x = random(device, torch.float32, least + 15, inputs)
    assert same_bits(triton.coded_matmul(x[:least], packed), triton.coded_matmul(x, packed)[:least])


@pytest.mark.parametrize("kind", ["normal", "flat", "peaked", "ties", "holes"])
@pytest.mark.parametrize("width", [1003, 128_256])
def test_draws_are_those_of_the_reference(kind: str, width: int, device: torch.device) -> None:
    """A sum in another order may fall on the other side of a threshold: nearly all results are the same."""
    rows = 24 if DEVICE.type == "cpu" else 256
    width = min(width, 5003) if DEVICE.type == "cpu" else width
    pick = torch.randint(0, 2, (3, rows)).bool()
    controls = (
        torch.rand(rows) * 2 + 0.05,
        torch.where(pick[0], torch.randint(1, width, (rows,)), 0),
        torch.where(pick[1], torch.rand(rows) * 0.99 + 0.01, 1.0),
        torch.where(pick[2], torch.rand(rows) ** 4, 0.0),
        torch.randint(-(2**63), 2**63 - 1, (rows,)),
        torch.arange(rows),
    )
    logits = test_sampling.shaped(kind, rows, width)
    found = kernels.sample(logits.to(device), *controls).cpu()
    same = (found == reference.sample(logits, *controls)).float().mean()
    assert same >= 0.99


@pytest.mark.parametrize("dtype", TYPES[-1:])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.heads}-{kind.kv_heads}-{kind.head_dim}")
@pytest.mark.parametrize("requests", [MIXED, DECODES], ids=["mixed", "decodes"])
def test_flashinfer(
    kind: AttentionLayer, requests: list[tuple[int, int]], dtype: torch.dtype, device: torch.device
) -> None:
    if importlib.util.find_spec("flashinfer") is None:
        pytest.skip("FlashInfer is not installed: pip install 'quire-llm[flashinfer]'")
    found = FlashInfer(device)
    if lack := found.unsupported(kind, dtype, dtype):
        with pytest.raises(backends.BackendUnavailable, match=lack):
            backends.choose(
                torch.device("cuda"),
                dtype,
                AttentionConfig((kind,), 16, dtype, "flashinfer"),
                reference.paged_attention,
            )
        return
    config = AttentionConfig((kind,), 16, dtype)
    for _ in range(2):
        assert found.compare(backends._case(device, dtype, config, kind, requests)) == ""


def test_flashinfer_does_not_wait_for_the_device(device: torch.device) -> None:
    if device.type == "cpu" or importlib.util.find_spec("flashinfer") is None:
        pytest.skip("FlashInfer and a GPU are needed")
    kind, dtype = KINDS[0], torch.bfloat16
    found, config = FlashInfer(device), AttentionConfig(tuple(KINDS[:1]), 16, torch.bfloat16)
    for requests in (MIXED, DECODES):
        found.compare(backends._case(device, dtype, config, kind, requests))  # compiled, and the wrappers made
        case = backends._case(device, dtype, config, kind, requests)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            found(*case.args, **case.options, host=case.host)
        finally:
            torch.cuda.set_sync_debug_mode("default")
