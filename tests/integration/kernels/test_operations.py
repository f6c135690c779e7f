"""The small operations against their formulas."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quire import kernels
from quire.kernels import reference
from quire.kernels.cache import LARGEST, QuantizedRows, dequantize, row_size
from tests.integration.kernels.conftest import platforms_only, reference_only

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
STEPS = {torch.int8: 1 / 126, torch.float8_e4m3fn: 1 / 13}
"""The widest step between the numbers of a quantized row, in parts of its largest: e4m3's is 32 of 448, at the top."""


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 2, 64), (17, 257)])
def test_rms_norm(shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape), torch.randn(shape[-1])
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-5), expected)


def test_add_rms_norm_returns_the_sum_too() -> None:
    x, residual, weight = torch.randn(4, 9), torch.randn(4, 9), torch.randn(9)
    normed, total = kernels.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(normed, total / (total.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight)


@platforms_only
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (33, 896), (5, 3, 80), (2, 3, 2, 17)])
def test_norms_are_those_of_the_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, residual = (torch.randn(shape) * 3).to(dtype), torch.randn(shape).to(dtype)
    weight = torch.randn(shape[-1]).to(dtype)
    torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))
    found, expected = (module.add_rms_norm(x, residual, weight, 1e-6) for module in (kernels, reference))
    torch.testing.assert_close(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 2, 64), (17, 257)])
def test_norms_with_an_offset_are_float32_to_the_end(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, residual, weight = ((torch.randn(size) * 2).to(dtype) for size in (shape, shape, shape[-1:]))
    normed, total = kernels.add_rms_norm(x, residual, weight, 1e-5, 1.0)
    assert torch.equal(total, x + residual)
    for found, of in ((normed, total), (kernels.rms_norm(x, weight, 1e-5, 1.0), x)):
        wide = of.double()
        exact = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * (weight.double() + 1.0)
        assert found.dtype == dtype
        # Only the result is rounded: by half a step, and float32's own error.
        torch.testing.assert_close(found.double(), exact, rtol=0.5 * torch.finfo(dtype).eps + 2e-6, atol=1e-6)


@reference_only
@pytest.mark.parametrize("dtype", LARGEST)
def test_quantized_rows_of_one_element_in_a_cache_of_one_row(dtype: torch.dtype) -> None:
    cache = kernels.allocate_kv_cache(1, 1, 1, 1, 1, dtype, torch.device("cpu"))[0]
    reference.write_kv(torch.full((1, 1, 1), 3.0), torch.full((1, 1, 1), -2.0), cache, torch.tensor([0]))
    assert dequantize(cache).flatten().tolist() == [3.0, -2.0]


@platforms_only
def test_rms_norm_of_heads_inside_of_wider_rows() -> None:
    qkv, weight = torch.randn(7, 9, 33), torch.randn(33)
    for part in qkv.split_with_sizes([5, 2, 2], dim=1):
        torch.testing.assert_close(kernels.rms_norm(part, weight, 1e-6), reference.rms_norm(part, weight, 1e-6))


def turns(tokens: int, rotary_dim: int) -> Tensor:
    angles = torch.randn(tokens, rotary_dim // 2)
    return torch.cat((angles.cos(), angles.sin()), -1)


@pytest.mark.parametrize(
    ("head_dim", "rotary_dim"), [(2, 2), (6, 6), (64, 64), (64, 32), (80, 20), (128, 78), (7, 2), (5, 0), (96, 0)]
)
def test_rotary_rotates_pairs_as_complex_numbers(head_dim: int, rotary_dim: int) -> None:
    cache = kernels.allocate_kv_cache(1, 2, 2, 3, head_dim, torch.float32, torch.device("cpu"))[0]
    query, key, value = torch.randn(5, 4, head_dim), torch.randn(5, 2, head_dim), torch.randn(5, 2, head_dim)
    rotations = turns(5, rotary_dim)
    turn = torch.complex(*rotations.tensor_split(2, -1))[:, None]
    turned = kernels.rotary_write_kv(query, key, value, rotations, cache, torch.arange(5))
    written = cache[0].transpose(1, 2).flatten(0, 1)[:5]
    for before, after in ((query, turned), (key, written)):
        pairs = torch.complex(*before[..., :rotary_dim].tensor_split(2, -1)) * turn
        torch.testing.assert_close(after[..., :rotary_dim], torch.cat((pairs.real, pairs.imag), -1))
        assert torch.equal(after[..., rotary_dim:], before[..., rotary_dim:])
    assert torch.equal(cache[1].transpose(1, 2).flatten(0, 1)[:5], value)


@platforms_only
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("of_cache", [*FLOATS, *LARGEST])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(6, 6), (80, 80), (128, 128), (80, 34), (33, 10), (64, 0)])
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_rotary_write_kv_is_that_of_the_reference(
    dtype: torch.dtype, of_cache: torch.dtype, head_dim: int, rotary_dim: int, block_size: int
) -> None:
    """With queries, keys and values as split() gives them, all slots shuffled, and a head of zeros."""
    qkv = torch.randn(7, 4 + 2 * 2, head_dim).to(dtype)
    qkv[3, 4] = 0.0
    query, key, value = qkv.split_with_sizes([4, 2, 2], dim=1)
    slots, rotations = torch.randperm(9 * block_size)[:7], turns(7, rotary_dim)
    results = []
    for module in (kernels, reference):
        cache = kernels.allocate_kv_cache(2, 9, 2, block_size, head_dim, of_cache, torch.device("cpu"))
        turned = module.rotary_write_kv(query, key, value, rotations, cache[1], slots)
        assert turned.dtype == dtype
        assert not cache[0].any()
        results.append((turned, cache[1]))
    (turned, cache), (expected, filled) = results
    torch.testing.assert_close(turned, expected)
    if of_cache in LARGEST:  # a key that was rounded another way may be the next number
        assert torch.equal(cache[1].view(torch.uint8), filled[1].view(torch.uint8))
        cache, filled = dequantize(cache), dequantize(filled)
        torch.testing.assert_close(cache, filled, rtol=0.0, atol=filled.abs().max().item() * STEPS[of_cache])
    else:  # one step of the coarser of the two types
        step = max(torch.finfo(kind).eps for kind in (dtype, of_cache))
        torch.testing.assert_close(cache, filled, rtol=2 * step, atol=1e-5)


@pytest.mark.parametrize("of_cache", [torch.float32, *LARGEST])
@pytest.mark.parametrize("slots", [[5, -1, 0, -1], [-1, 0, -1, 7], [-1, -1, -1, -1], []])
def test_a_token_without_a_slot_is_not_stored(slots: list[int], of_cache: torch.dtype) -> None:
    stored = [number for number, slot in enumerate(slots) if slot >= 0]
    query, key, value = torch.randn(3, len(slots), 2, 12)
    rotations, start = turns(len(slots), 8), torch.randint(1, 99, (2, 3, 2, 4, row_size(12, of_cache)))
    caches = []

    def as_cache(numbers: Tensor) -> Tensor:
        return numbers.to(torch.uint8).view(of_cache) if of_cache in LARGEST else numbers.to(of_cache)

    for module in (kernels, reference):
        cache = as_cache(start)
        turned = module.rotary_write_kv(query, key, value, rotations, cache, torch.tensor(slots, dtype=torch.int64))
        torch.testing.assert_close(turned, reference.rotary(query, key, rotations)[0])
        expected = as_cache(start)
        of_stored = (x[stored] for x in (query, key, value, rotations))
        module.rotary_write_kv(*of_stored, expected, torch.tensor([slots[number] for number in stored]).long())
        assert torch.equal(cache.view(torch.uint8), expected.view(torch.uint8))
        caches.append(cache)
    before, after = (
        QuantizedRows.of(x).values.view(torch.uint8) if of_cache in LARGEST else x for x in (as_cache(start), caches[1])
    )
    changed = (before != after).any(-1).any(0).any(1).flatten().nonzero().flatten().tolist()
    assert changed == sorted(slot for slot in slots if slot >= 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, *LARGEST])
def test_keys_that_are_values_are_stored_once_and_read_again(dtype: torch.dtype) -> None:
    cache = kernels.allocate_kv_cache(1, 5, 1, 4, 20, dtype, torch.device("cpu"), num_tensors=1)[0]
    query, key, turns = torch.randn(7, 3, 12), torch.randn(7, 1, 20), torch.randn(7, 8)
    table = torch.tensor([3, 1])
    slots = table.repeat_interleave(4)[:7] * 4 + torch.arange(7) % 4
    turned = kernels.rotary_write_kv(query, key, None, turns, cache, slots)
    expected_query, expected_key = reference.rotary(query, key, turns)
    torch.testing.assert_close(turned, expected_query)
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 0.02, torch.int8: 0.05, torch.float8_e4m3fn: 0.07}[dtype]
    found = kernels.read_kv(cache[0], table, 7, torch.float32)
    torch.testing.assert_close(found, expected_key, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("head_dim", [1, 33, 64])
@pytest.mark.parametrize("dtype", LARGEST)
def test_quantized_rows_are_within_half_a_step(dtype: torch.dtype, head_dim: int) -> None:
    zeros, tiny = torch.zeros(1, 3, head_dim), torch.full((1, 3, head_dim), 1e-44)
    rows = torch.cat((torch.randn(50, 3, head_dim) * 10, zeros, tiny))
    cache = kernels.allocate_kv_cache(1, 4, 3, 16, head_dim, dtype, torch.device("cpu"))[0]
    kernels.rotary_write_kv(rows, rows, -rows, torch.empty(len(rows), 0), cache, torch.arange(len(rows)))
    found = dequantize(cache).transpose(2, 3).flatten(1, 2)[:, : len(rows)]
    largest = rows.abs().amax(-1, keepdim=True)
    step = largest / 127 if dtype == torch.int8 else (rows.abs() / 8).maximum(largest / 448 / 512)
    assert ((found[0] - rows).abs() <= step * 0.5001 + 1e-44).all()
    assert torch.equal(found[1], -found[0])


def test_every_8_bit_float_is_written_and_read_as_torch_does() -> None:
    """Beside 448, which makes the scale 1: all numbers of the type, and the numbers half way between two of them."""
    exact = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    halves = (exact[1:] + exact[:-1]) / 2
    numbers = torch.cat((exact, halves, halves * (1 + 2e-7), halves * (1 - 2e-7)))
    rows = torch.stack((numbers, numbers.new_full(numbers.shape, 448.0)), -1)[:, None]
    for sign in (1, -1):
        results = []
        for module in (kernels, reference):
            cache = kernels.allocate_kv_cache(1, len(rows), 1, 1, 2, torch.float8_e4m3fn, torch.device("cpu"))[0]
            module.rotary_write_kv(rows, rows, sign * rows, torch.empty(len(rows), 0), cache, torch.arange(len(rows)))
            results.append(cache.view(torch.uint8))
        assert torch.equal(*results)
        cache = results[0].view(torch.float8_e4m3fn)
        assert torch.equal(dequantize(cache)[1, : len(exact), 0, 0, 0], sign * exact)
        query, length = torch.zeros(1, 1, 2), torch.ones(1, dtype=torch.int64)
        for number in range(len(exact)):  # one key, whose value comes back as it is
            table, starts = torch.tensor([[number]]), torch.tensor([0, 1])
            out = kernels.paged_attention(query, cache, table, length, starts, 1.0)
            assert out[0, 0].tolist() == [sign * exact[number].item(), sign * 448.0]


FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda x: x / (1 + (-x).exp()),
    "gelu": lambda x: x * torch.special.erfc(-x / math.sqrt(2)) / 2,
    "gelu_tanh": lambda x: x * (1 + (math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)).tanh()) / 2,
    "relu": lambda x: x.where(x > 0, 0.0),
    "relu2": lambda x: x.where(x > 0, 0.0) ** 2,
}
NOT_GATED: dict[str, Callable[[Tensor], Tensor]] = {
    **FORMULAS,
    "quick_gelu": lambda x: x / (1 + (-1.702 * x).exp()),
}
GATED = [*FORMULAS, "swiglu_oai", "silu_7", "silu_16", "silu_clamped"]


def activated(both: Tensor, activation: str) -> Tensor:
    """The formula of `kernels.act_mul`, in float64."""
    gate, up = both.double().chunk(2, dim=-1)
    match activation:
        case "swiglu_oai":
            gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
            return gate / (1 + (-1.702 * gate).exp()) * (up + 1)
        case "silu_7" | "silu_16":
            limit = float(activation.removeprefix("silu_"))
            return FORMULAS["silu"](gate).clamp(max=limit) * up.clamp(-limit, limit)
        case "silu_clamped":
            return FORMULAS["silu"](gate.clamp(max=10.0)) * up.clamp(-10.0, 10.0)
    return FORMULAS[activation](gate) * up


@platforms_only
@pytest.mark.parametrize("activation", GATED)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(1, 2), (3, 22), (9, 2 * 4864), (2, 3, 66)])
def test_act_mul_is_that_of_the_reference(shape: tuple[int, ...], dtype: torch.dtype, activation: str) -> None:
    x = (torch.randn(shape) * 8).to(dtype)  # no product leaves float16
    tolerance = 1e-6 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps  # the reference rounds in between
    found, expected = (module.act_mul(x, activation) for module in (kernels, reference))
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=1e-4)  # torch's gelu is off by 1e-7 · gate · up
    if activation in FORMULAS:
        found, expected = (module.activate(x, activation) for module in (kernels, reference))
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=1e-5)


@pytest.mark.parametrize("activation", GATED)
def test_activations_are_their_formulas(activation: str) -> None:
    gate = torch.cat((torch.linspace(-12, 12, 4001), torch.tensor([0.0, 1e-20, -1e-20, 150.0, -150.0])))
    both = torch.cat((gate, torch.randn(len(gate)) * 6))
    found = kernels.act_mul(both, activation).double()
    torch.testing.assert_close(found, activated(both, activation), rtol=1e-6, atol=3e-5)


@pytest.mark.parametrize("activation", NOT_GATED)
def test_activations_without_gates_are_their_formulas(activation: str) -> None:
    x = torch.cat((torch.linspace(-12, 12, 4001), torch.tensor([0.0, 1e-20, -1e-20, 150.0, -150.0])))
    exact = NOT_GATED[activation](x.double())
    torch.testing.assert_close(kernels.activate(x, activation).double(), exact, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("activation", GATED)
def test_a_gate_that_is_no_number_shows(activation: str) -> None:
    assert kernels.act_mul(torch.tensor([[torch.nan, 1.0, 2.0, 3.0]]), activation).isnan().tolist() == [[True, False]]


def test_an_unknown_activation_is_an_error() -> None:
    with pytest.raises((KeyError, RuntimeError), match="swoosh"):
        kernels.act_mul(torch.randn(2, 4), "swoosh")


@reference_only
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_write_kv_touches_its_slots_only(block_size: int) -> None:
    cache = kernels.allocate_kv_cache(2, 48, 2, block_size, 5, torch.bfloat16, torch.device("cpu"))
    assert cache.shape == (2, 2, 48, 2, block_size, 5)
    assert not cache.any()
    key, value = torch.randn(2, 7, 2, 5).bfloat16()
    slots = torch.randperm(48 * block_size)[:7]
    reference.write_kv(key, value, cache[1], slots)
    for token, slot in enumerate(slots.tolist()):
        block, offset = divmod(slot, block_size)
        assert torch.equal(cache[1, 0, block, :, offset], key[token])
        assert torch.equal(cache[1, 1, block, :, offset], value[token])
    assert not cache[0].any()
    assert cache.count_nonzero() <= math.prod(key.shape) * 2


class _MallocInfo(ctypes.Structure):
    """mallinfo2(3)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks"),
            *("uordblks", "fordblks", "keepcost"),
        )
    ]


@platforms_only
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="this C library is not glibc")
def test_a_call_leaves_nothing_in_memory() -> None:
    """torch's own conversion of the activation's name did."""
    libc, x, used = ctypes.CDLL(None), torch.randn(1, 8), list[int]()
    libc.mallinfo2.restype = _MallocInfo
    for count in (100, 5000):
        for _ in range(count):
            kernels.act_mul(x, "silu")
        used.append(libc.mallinfo2().uordblks)
    assert used[1] - used[0] < 100_000
