"""Attention without a cache against a loop over queries."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire import kernels
from quire.kernels import reference


def by_hand(
    query: Tensor, key: Tensor, value: Tensor, lengths: list[int], scale: float, biases: Tensor | None
) -> Tensor:
    output, start = torch.empty_like(query), 0
    for length in lengths:
        for i in range(length):
            for head in range(query.shape[1]):
                scores = key[start : start + length, head].double() @ query[start + i, head].double() * scale
                if biases is not None:
                    reach = biases.shape[1] // 2
                    scores += torch.tensor([biases[head, j - i + reach] for j in range(length)], dtype=torch.float64)
                mixed = scores.softmax(0) @ value[start : start + length, head].double()
                output[start + i, head] = mixed.to(query.dtype)
        start += length
    return output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("lengths", [[], [1], [7], [3, 1, 12, 5]])
def test_sequences_see_themselves_only(lengths: list[int], biased: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    heads, head_dim, reach = 3, 16, 14
    query, key, value = (torch.randn(sum(lengths), heads, head_dim).to(dtype) for _ in range(3))
    biases = torch.randn(heads, 2 * reach + 1).to(dtype) if biased else None
    starts = torch.tensor([0, *lengths]).cumsum(0)
    expected = by_hand(query, key, value, lengths, 0.3, biases)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    found = kernels.attention(query, key, value, starts, 0.3, biases)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_views_of_one_tensor_and_a_sequence_alone() -> None:
    """As the layer calls it: parts of one product; and a sequence gives the same to the bit beside any others."""
    torch.manual_seed(0)
    x = torch.randn(40, 3, 4, 8)
    query, key, value = x.unbind(1)
    together = kernels.attention(query, key, value, torch.tensor([0, 11, 29, 40]), 0.5)
    alone = kernels.attention(query[11:29], key[11:29], value[11:29], torch.tensor([0, 18]), 0.5)
    assert torch.equal(together[11:29], alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "turned"), [(2, 2, 72, 72), (4, 2, 80, 40), (3, 1, 6, 2)])
def test_queries_and_keys_are_rotated(
    heads: int, kv_heads: int, head_dim: int, turned: int, dtype: torch.dtype
) -> None:
    """Sequences longer than a tile of rows and a block of keys, with heads that are no whole vectors."""
    torch.manual_seed(0)
    lengths = [201, 64, 1, 70]
    tokens, starts = sum(lengths), torch.tensor([0, *lengths]).cumsum(0)
    query = torch.randn(tokens, heads, head_dim).to(dtype)
    key, value = torch.randn(2, tokens, kv_heads, head_dim).to(dtype)
    angles = torch.randn(tokens, turned // 2)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    found = kernels.attention(query, key, value, starts, 0.2, None, cos_sin)
    expected = reference.attention(query, key, value, starts, 0.2, None, cos_sin)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
