"""A cache of 4-bit numbers: its bytes, and what a query sees of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire import kernels
from quire.kernels import check, cpu, examples
from quire.kernels.attention_config import AttentionLayer
from quire.kernels.cache import INT4, allocate_kv_cache
from quire.kernels.examples import Inputs
from tests.integration.kernels.conftest import platforms_only
from tests.integration.kernels.test_attention import dense

CPU = torch.device("cpu")
LENGTH = 75


def published(cache: Tensor, block: int, head: int, size: int, block_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values of a block, float32 `[2, block_size, size]`, and the steps between their codes, read byte by byte
    as docs/design/kv-cache.md says."""
    memory = cache[0, block, head].numpy().tobytes()
    half, sides, steps = size * block_size // 2, [], []
    for start, rows, columns in ((0, size, block_size), (half + 4 * size, block_size, size)):
        codes = np.frombuffer(memory, np.uint8, half, start).reshape(rows, columns // 2)
        scale, offset = np.frombuffer(memory, np.float16, 2 * rows, start + half).astype(np.float32).reshape(2, rows, 1)
        numbers = np.concatenate([codes % 16, codes // 16], axis=1) * scale + offset
        is_key = not start
        sides.append(numbers.T if is_key else numbers)
        steps.append((scale.T if is_key else scale) + np.zeros_like(sides[-1]))
    keys, values = (torch.from_numpy(np.ascontiguousarray(side)) for side in sides)
    return keys, values, torch.from_numpy(np.stack(steps))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "block_size", "options"),
    [
        (4, 2, 64, 16, {}),
        (2, 2, 20, 4, {"window": 9}),
        (3, 1, 32, 32, {"softcap": 2.0, "sinks": torch.tensor([0.5, -1.0, 2.0])}),
    ],
)
def test_queries_see_their_own_block_exactly(
    heads: int, kv_heads: int, size: int, block_size: int, options: dict[str, Any]
) -> None:
    """And earlier ones as codes, in whatever steps the tokens come; large features of keys cost the others nothing."""
    random, blocks = torch.Generator().manual_seed(0), -(-LENGTH // block_size)
    key, value = torch.randn(2, LENGTH, kv_heads, size, generator=random)
    key += 30 * (torch.arange(size) == 3)
    query = torch.randn(LENGTH, heads, size, generator=random)
    table, places = (torch.randperm(blocks + 2, generator=random)[:blocks] for _ in range(2))
    results = []
    for counts in ([LENGTH], [1] * LENGTH, [block_size - 1, 2, 0, LENGTH - block_size - 1]):
        cache = allocate_kv_cache(1, blocks + 2, kv_heads, block_size, size, INT4, CPU)[0].fill_(255)
        recent = torch.zeros(2, blocks + 2, kv_heads, block_size, size)
        parts, end = [], 0
        for count in filter(None, counts):
            at, end = torch.arange(end, end + count), end + count
            slots, own = (each[at // block_size] * block_size + at % block_size for each in (table, places))
            given = query[at], key[at], value[at], torch.empty(count, 0)
            turned = kernels.rotary_write_kv(*given, recent, own)
            kernels.quantize_kv(recent, cache, own, slots)
            batch = table[None], torch.tensor([end]), torch.tensor([0, count]), size**-0.5
            parts.append(kernels.int4_attention(turned, cache, *batch, recent, own, **options))
        results.append(torch.cat(parts))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-5, atol=1e-5)
    seen_key, seen_value = key.clone(), value.clone()
    for number, page in enumerate(table[: LENGTH // block_size].tolist()):
        rows = slice(number * block_size, (number + 1) * block_size)
        for head in range(kv_heads):
            seen_key[rows, head], seen_value[rows, head], steps = published(cache, page, head, size, block_size)
            error = torch.stack([(seen_key - key)[rows, head], (seen_value - value)[rows, head]]).abs()
            assert (error <= 0.51 * steps + 0.02 * (torch.stack([key[rows, head], value[rows, head]]).abs() > 16)).all()
    for start in range(0, LENGTH, block_size):
        rows, before = slice(start, start + block_size), slice(0, start)
        keys, values = torch.cat((seen_key[before], key[rows])), torch.cat((seen_value[before], value[rows]))
        expected = dense(query[rows], keys, values, **options).float()
        torch.testing.assert_close(results[0][rows], expected, rtol=1e-4, atol=1e-4)


@platforms_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("layer", "block_size", "requests"),
    [
        (AttentionLayer(6, 2, 64, 0.1), 16, [(0, 1), (0, 17), (15, 1), (16, 1), (31, 2), (1100, 1), (1200, 3)]),
        (AttentionLayer(8, 1, 128, 0.1), 32, [(0, 70), (1900, 1), (2100, 40)]),
        (AttentionLayer(6, 1, 80, 0.1, 37, softcap=20.0), 16, [(40, 1), (90, 70), (300, 1), (3, 40)]),
        (AttentionLayer(3, 3, 20, 0.2, 7, has_sinks=True, has_alibi=True), 10, [(0, 9), (29, 1), (70, 25)]),
        (AttentionLayer(4, 2, 32, 0.2, has_own_sinks=True, num_biases=40), 128, [(31, 1), (132, 1), (40, 200)]),
        (AttentionLayer(2, 2, 96, 0.2), 8, [(31, 1), (32, 1), (40, 90), (700, 1)]),
        (AttentionLayer(2, 1, 128, 0.2), 512, [(31, 1), (512, 1), (40, 600)]),
    ],
)
def test_kernels_equal_the_reference(
    layer: AttentionLayer, block_size: int, requests: list[tuple[int, int]], dtype: torch.dtype
) -> None:
    """In pieces of few and of many rows, over one and several items, and blocks of all sizes."""
    for example in examples.int4_cache(Inputs(CPU, dtype), requests, layer, block_size):
        assert not check.difference(example, cpu, dtype)
