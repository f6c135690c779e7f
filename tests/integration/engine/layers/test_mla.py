"""Latent attention: both of its forms, divided over ranks, and its cache of a token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quire import kernels
from quire.engine.architecture import attention_spec
from quire.engine.architecture.spec_parts import NormSpec, RopeSpec
from quire.engine.distributed.communicator import Parallel
from quire.engine.layers.batch import AttentionMetadata, Batch, BatchAdapters, KVBlocks, Selection
from quire.engine.layers.kv_cache import LayerCache
from quire.engine.layers.mla import MLA
from quire.engine.layers.rotary import Rotary
from tests.fakes.ranks import on_ranks
from tests.integration.engine.layers.test_sharding import check, fill

HIDDEN, BLOCK = 24, 4
SPEC = attention_spec.MLASpec(
    num_heads=4,
    q_lora_rank=10,
    kv_lora_rank=16,
    qk_nope_head_dim=6,
    v_head_dim=5,
    scale=0.3,
    rope=RopeSpec(theta=100.0, dim=4),
    norm=NormSpec(eps=1e-6),
)


def batch_of(contexts: list[int], counts: list[int]) -> tuple[Batch, Tensor]:
    """Requests with so many tokens before and in this step, in shuffled blocks; and all slots of each, one by one."""
    width = max(-(-(context + count) // BLOCK) for context, count in zip(contexts, counts, strict=True))
    tables = torch.randperm(width * len(counts), generator=torch.Generator().manual_seed(0)).view(-1, width)
    rows = [torch.arange(context, context + count) for context, count in zip(contexts, counts, strict=True)]
    slots = [table[row // BLOCK] * BLOCK + row % BLOCK for table, row in zip(tables, rows, strict=True)]
    before = [torch.arange(context) for context in contexts]
    earlier = [table[row // BLOCK] * BLOCK + row % BLOCK for table, row in zip(tables, before, strict=True)]
    starts = torch.tensor([0, *counts]).cumsum(0)
    batch = Batch(
        token_ids=torch.cat(rows),
        positions=torch.cat(rows),
        sequence_lengths=torch.tensor(contexts) + torch.tensor(counts),
        query_starts=starts,
        logits_indices=starts[1:] - 1,
        groups={0: KVBlocks(torch.cat(slots), tables)},
    )
    return batch, torch.cat(earlier)


def cache_of(blocks: int, dtype: torch.dtype = torch.float32, spec: attention_spec.MLASpec = SPEC) -> Tensor:
    num_tensors, heads, head_dim = spec.kv_shape(1)
    return kernels.allocate_kv_cache(1, blocks, heads, BLOCK, head_dim, dtype, torch.device("cpu"), num_tensors)[0]


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.int8, 1e-4), (torch.float8_e4m3fn, 1e-4)]
)
def test_absorbed_and_plain_attention_are_equal(dtype: torch.dtype, tolerance: float) -> None:
    """With any contents of the cache, which both read alike."""
    layer = fill(MLA(SPEC, HIDDEN, Parallel()))
    assert isinstance(layer, MLA)
    batch, earlier = batch_of([0, 9, 30], [7, 1, 40])
    cache = cache_of(int(batch.attention(0).block_tables.max()) + 1, dtype)
    row = SPEC.kv_shape(1)[2]
    slots = torch.cat((earlier, batch.attention(0).slot_mapping))
    query = torch.randn(len(slots), 1, row)
    kernels.rotary_write_kv(query, torch.randn(len(slots), 1, row), None, torch.empty(len(slots), 0), cache, slots)
    query = torch.randn(len(batch.token_ids), SPEC.num_heads, SPEC.head_dim)
    absorbed = layer.absorbed(query, batch.attention(0), cache)
    torch.testing.assert_close(absorbed, layer.plain(query, batch.attention(0), cache), rtol=tolerance, atol=tolerance)


def test_both_forms_are_changed_by_adapters_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the adapter of each request, if it has one; also if they compute some heads or some tokens at a time."""
    layer = fill(MLA(SPEC, HIDDEN, Parallel()))
    assert isinstance(layer, MLA)
    width = layer.up.weight.shape[0]
    pool = kernels.LowRankPool.allocate(
        2, 6, 16, [width], torch.float32, torch.device("cpu"), 4, has_scale=True, has_bias=True
    )
    assert pool.scale is not None
    assert pool.bias is not None
    for slot, first in enumerate((4, 0)):
        rank = 2 + 2 * slot
        pool.assign(slot, first, [(torch.randn(rank, 16) * 0.3, torch.randn(width, rank) * 0.3)])
        pool.scale[slot], pool.bias[slot] = 1 + 0.3 * torch.rand(width), torch.randn(width)
    layer.up.pool = pool
    batch, _ = batch_of([0, 9, 30, 4], [7, 1, 40, 3])
    metadata, cache = batch.attention(0), cache_of(int(batch.attention(0).block_tables.max()) + 1)
    cache.normal_()
    query = torch.randn(len(batch.token_ids), SPEC.num_heads, SPEC.head_dim)
    slots = layer.up.slots(kernels.AdapterRows.of(torch.tensor([0] * 7 + [-1] + [1] * 43), 2))
    plain = layer.plain(query, metadata, cache, slots)
    torch.testing.assert_close(layer.absorbed(query, metadata, cache, slots), plain, rtol=1e-4, atol=1e-4)
    unchanged = layer.absorbed(query, metadata, cache)
    assert plain[7].allclose(unchanged[7], rtol=1e-4, atol=1e-4)
    assert (plain - unchanged).abs().amax((1, 2)).argmin() == 7
    monkeypatch.setattr(attention_spec, "KEYS_AND_VALUES_AT_ONCE", 2000)
    torch.testing.assert_close(layer.plain(query, metadata, cache, slots), plain, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(layer.absorbed(query, metadata, cache, slots), plain, rtol=1e-4, atol=1e-4)


def test_each_request_uses_the_cheaper_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = fill(MLA(SPEC, HIDDEN, Parallel()))
    assert isinstance(layer, MLA)
    many = layer._plain_from
    batch, _ = batch_of([0, 3, 0, 0, 2, 0], [many, 1, 2, many + 5, many, 1])
    cache = cache_of(int(batch.attention(0).block_tables.max()) + 1)
    x, turns = torch.randn(len(batch.token_ids), HIDDEN), Rotary(SPEC.rope, 100)(batch.positions)
    asked: list[list[int]] = []
    plain = MLA.plain

    def counted(layer: MLA, query: Tensor, metadata: AttentionMetadata, *rest: Any) -> Tensor:
        asked.append(metadata.host_metadata().counts.tolist())
        return plain(layer, query, metadata, *rest)

    monkeypatch.setattr(MLA, "plain", counted)
    mixed = layer(x, batch, turns, LayerCache(cache))
    assert asked == [[many], [many + 5, many]]
    at_once = 2 * (2 * many + 4) * SPEC.num_heads * SPEC.head_dim
    monkeypatch.setattr(attention_spec, "KEYS_AND_VALUES_AT_ONCE", at_once)
    torch.testing.assert_close(layer(x, batch, turns, LayerCache(cache)), mixed, rtol=1e-4, atol=1e-4)
    assert asked[2:] == [[many], [many + 5], [many]]
    layer._plain_from = 1 << 30
    torch.testing.assert_close(layer(x, batch, turns, LayerCache(cache)), mixed, rtol=1e-4, atol=1e-4)
    assert len(asked) == 5


def test_nothing_is_read_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device whose data must not be read."""
    layer = fill(MLA(SPEC, HIDDEN, Parallel())).to("meta")
    assert isinstance(layer, MLA)
    batch, _ = batch_of([0, 3, 0], [layer._plain_from, 1, layer._plain_from])
    cache = cache_of(int(batch.attention(0).block_tables.max()) + 1).to("meta")
    slot_mapping, tables, lengths, starts = (each.to("meta") for each in batch.attention(0)[:4])
    metadata = AttentionMetadata(slot_mapping, tables, lengths, starts, batch.host_metadata())
    monkeypatch.setattr(kernels, "paged_attention", lambda query, *_, **__: torch.empty_like(query))
    query = torch.empty(len(batch.token_ids), SPEC.num_heads, SPEC.head_dim, device="meta")
    mixed = layer._attend(query, metadata, cache, Selection())
    assert mixed.shape == (len(query), SPEC.num_heads, SPEC.v_head_dim)


class Prefill(nn.Module):
    """One request's prefill, as a function of its hidden states alone."""

    def __init__(self, spec: attention_spec.MLASpec, parallel: Parallel) -> None:
        super().__init__()
        self.attention, self.spec = MLA(spec, HIDDEN, parallel), spec

    def forward(self, x: Tensor) -> Tensor:
        batch, _ = batch_of([0], [len(x)])
        cache = cache_of(int(batch.attention(0).block_tables.max()) + 1, spec=self.spec)
        out: Tensor = self.attention(x, batch, Rotary(self.spec.rope, 100)(batch.positions), LayerCache(cache))
        return out


@pytest.mark.parametrize("latent_queries", [True, False])
@pytest.mark.parametrize("count", [3, 60])
def test_heads_are_cut_over_the_ranks(latent_queries: bool, count: int) -> None:
    spec = SPEC if latent_queries else replace(SPEC, q_lora_rank=None)
    check(lambda parallel: Prefill(spec, parallel), torch.randn(count, HIDDEN))


INDEXER = attention_spec.IndexerSpec(
    num_heads=3, head_dim=8, norm=NormSpec(eps=1e-6, kind="layer", bias=True), rope=SPEC.rope
)


class SparsePrefill(nn.Module):
    """Requests of 20 and 9 tokens that attend to `top_k` of them, after a step with all but their last tokens."""

    def __init__(self, top_k: int, parallel: Parallel) -> None:
        super().__init__()
        self.attention = MLA(replace(SPEC, top_k=top_k, indexer=INDEXER), HIDDEN, parallel)

        self._rows_of_a_block = BLOCK // parallel.context.size

    def forward(self, x: Tensor) -> Tensor:
        steps = batch_of([0, 0], [17, 8])[0], batch_of([17, 8], [3, 1])[0]
        blocks = int(steps[1].attention(0).block_tables.max()) + 1
        keys = kernels.allocate_kv_cache(1, blocks, 1, BLOCK, INDEXER.head_dim, torch.float32, x.device, 1)[0]
        cache, outs = LayerCache(cache_of(blocks)[:, :, :, : self._rows_of_a_block].contiguous(), keys=keys), []
        for step, part in zip(steps, x.split_with_sizes([25, 4]), strict=True):
            if self.attention.up.pool is not None:
                of_first, of_second = step.query_starts.diff().tolist()
                rows = kernels.AdapterRows.of(torch.tensor([1] * of_first + [0] * of_second), 2)
                step = replace(step, adapters=BatchAdapters(rows, rows, rows))
            outs.append(self.attention(part, step, Rotary(SPEC.rope, 100)(step.positions), cache))
        return torch.cat(outs)


@pytest.mark.parametrize("top_k", [5, 12, 18, 40])
def test_sparse_attention_with_heads_cut_over_the_ranks(top_k: int) -> None:
    check(lambda parallel: SparsePrefill(top_k, parallel), torch.randn(29, HIDDEN))


@pytest.mark.parametrize("has_adapters", [False, True])
def test_ranks_divide_the_rows_of_sparse_attention(has_adapters: bool) -> None:
    """With adapters of the projection of the latent; the rows of the longer request are gathered."""
    width = SPEC.num_heads * (SPEC.qk_nope_head_dim + SPEC.v_head_dim)
    changes = [(torch.randn(2, SPEC.kv_lora_rank), 0.3 * torch.randn(width, 2)) for _ in range(2)]

    def build(parallel: Parallel) -> nn.Module:
        layer = fill(SparsePrefill(5, parallel))
        assert isinstance(layer, SparsePrefill)
        if has_adapters:
            own = width // parallel.size
            pool = kernels.LowRankPool.allocate(2, 4, SPEC.kv_lora_rank, [own], torch.float32, torch.device("cpu"), 2)
            for slot, (a, b) in enumerate(changes):
                pool.assign(slot, 2 * slot, [(a, b[own * parallel.rank :][:own])])
            layer.attention.up.pool = pool
        return layer

    x = torch.randn(29, HIDDEN)
    [expected] = on_ranks(1, lambda parallel: build(parallel)(x))
    for result in on_ranks(2, lambda parallel: build(parallel)(x), context=2):
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


def test_a_selection_of_all_tokens_changes_nothing() -> None:
    x, results = torch.randn(29, HIDDEN), {}
    for top_k in (20, 19, 4):
        results[top_k] = fill(SparsePrefill(top_k, Parallel()))(x)
    torch.testing.assert_close(results[19][:-2], results[20][:-2], rtol=1e-5, atol=1e-5)  # the others see 18 or less
    assert not torch.allclose(results[19], results[20], rtol=1e-3, atol=1e-3)
    assert not torch.allclose(results[4], results[20], rtol=1e-3, atol=1e-3)


def test_a_token_takes_576_numbers_whatever_the_heads_and_ranks() -> None:
    """DeepSeek-V3's sizes: the paper's figure."""
    spec = replace(
        SPEC, num_heads=128, kv_lora_rank=512, qk_nope_head_dim=128, v_head_dim=128, rope=RopeSpec(theta=1e4, dim=64)
    )
    for tp in (1, 8, 128):
        assert torch.tensor(spec.kv_shape(tp)).prod() == 576


def test_parameters_are_as_many_as_described() -> None:
    indexed = replace(SPEC, top_k=8, indexer=INDEXER)
    for spec in (SPEC, replace(SPEC, q_lora_rank=None, bias=True), indexed, replace(indexed, indexer=None)):
        for size in (1, 2, 4):

            def count(parallel: Parallel, spec: attention_spec.MLASpec = spec) -> int:
                return sum(weight.numel() for weight in MLA(spec, HIDDEN, parallel).parameters())

            described = sum(each.elements(size) for each in spec.parameters(HIDDEN))
            assert on_ranks(size, count) == [described] * size
