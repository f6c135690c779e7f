"""The small operations against their formulas."""

from __future__ import annotations

import math

import pytest
import torch

from quire import kernels


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 2, 64), (17, 257)])
def test_rms_norm(shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape), torch.randn(shape[-1])
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-5), expected)


def test_add_rms_norm_returns_the_sum_too() -> None:
    x, residual, weight = torch.randn(4, 9), torch.randn(4, 9), torch.randn(9)
    normed, total = kernels.add_rms_norm(x, residual, weight, 1e-6)
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(normed, kernels.rms_norm(x + residual, weight, 1e-6))


@pytest.mark.parametrize("head_dim", [2, 6, 64])
def test_rotary_turns_pairs_as_complex_numbers(head_dim: int) -> None:
    angles = torch.randn(5, head_dim // 2)
    query, key = torch.randn(5, 4, head_dim), torch.randn(5, 2, head_dim)
    turned = kernels.rotary(query, key, torch.cat((angles.cos(), angles.sin()), -1))
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]
    for before, after in zip((query, key), turned, strict=True):
        pairs = torch.complex(*before.chunk(2, -1)) * turn
        torch.testing.assert_close(after, torch.cat((pairs.real, pairs.imag), -1))


def test_silu_mul() -> None:
    gate, up = torch.randn(3, 11), torch.randn(3, 11)
    expected = gate / (1 + (-gate).exp()) * up
    torch.testing.assert_close(kernels.silu_mul(torch.cat((gate, up), -1)), expected)


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_write_kv_touches_its_slots_only(block_size: int) -> None:
    cache = kernels.allocate_kv_cache(2, 48, 2, block_size, 5, torch.bfloat16, torch.device("cpu"))
    assert cache.shape == (2, 2, 48, 2, block_size, 5)
    assert not cache.any()
    key, value = torch.randn(2, 7, 2, 5).bfloat16()
    slots = torch.randperm(48 * block_size)[:7]
    kernels.write_kv(key, value, cache[1], slots)
    for token, slot in enumerate(slots.tolist()):
        block, offset = divmod(slot, block_size)
        assert torch.equal(cache[1, 0, block, :, offset], key[token])
        assert torch.equal(cache[1, 1, block, :, offset], value[token])
    assert not cache[0].any()
    assert cache.count_nonzero() <= math.prod(key.shape) * 2
