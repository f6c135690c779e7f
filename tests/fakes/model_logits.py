"""Checkpoints as configurations, and a model's logits without an engine. No transformers here: it imports slowly."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quire import kernels
from quire.engine.architecture.attention_spec import CompressedAttentionSpec
from quire.engine.architecture.model_spec import LayerSpec, ModelSpec
from quire.engine.config.engine_config import EngineConfig
from quire.engine.config.kv_cache_groups import cache_specs, count_blocks_per_page
from quire.engine.config.options import EngineOptions
from quire.engine.config.resolve import resolve
from quire.engine.distributed.communicator import Parallel
from quire.engine.distributed.expert_group import ExpertCommunicator, ExpertGroup
from quire.engine.layers.batch import Batch, KVBlocks
from quire.engine.layers.compressed import compressed_cache
from quire.engine.layers.kv_cache import LayerCache
from quire.engine.models.build import load_model
from quire.engine.models.encoder import Encoder
from quire.engine.protocol.media import MediaItem
from quire.engine.worker.media_rows import MediaRows
from tests.fakes.ranks import on_ranks

CPU = torch.device("cpu")


def configure(folder: Path, **options: Any) -> EngineConfig:
    options = {"packed_cache": "off", **options}  # loading is tested
    return resolve(EngineOptions(model=str(folder), device="cpu", kv_cache_memory_bytes=1 << 22, **options))


def check_logits(
    model: Any, configs: Iterable[EngineConfig], *, tolerance: float, num_tokens: int = 40, vocabulary: int = 131
) -> None:
    """Check that in each of these layouts, logits equal transformers' `model`, up to this part of their norm."""
    tokens = torch.randint(0, vocabulary, (num_tokens,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = model(tokens[None]).logits[0]
    for config in configs:
        for result in on_ranks(config.parallel.tensor_parallel_size, partial(logits, config, tokens)):
            assert (result - expected).norm() <= tolerance * expected.norm(), config.parallel


def logits(
    config: EngineConfig,
    tokens: Tensor,
    parallel: Parallel,
    beside: Sequence[Tensor] = (),
    media: Sequence[tuple[Mapping[str, Tensor], MediaItem]] = (),
) -> Tensor:
    """One request's logits at every position, all stages one after the other in this process; the requests `beside` it
    come before it in the batch. `media` are its images, with their arrays."""
    arch, hidden, requests = config.model.architecture, None, [*beside, tokens]
    lengths = torch.tensor([len(each) for each in requests])
    starts, numbers = F.pad(lengths.cumsum(0), (1, 0)), torch.arange(len(requests))
    positions = torch.cat([torch.arange(len(each)) for each in requests])
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    first_blocks = F.pad(((lengths + 3) // 4).cumsum(0), (1, 0))
    blocks = int(first_blocks[-1])
    tables = first_blocks[:-1, None] + torch.arange((int(lengths.max()) + 3) // 4)
    tables = tables.clamp(max=blocks - 1)  # blocks beyond a request's own are not read
    rows = numbers.repeat_interleave(lengths)
    spread = config.parallel.experts
    experts = None if spread is None else ExpertGroup(spread, parallel, ExpertCommunicator(), ExpertCommunicator())
    page = blocks_per_page(arch, config.model.dtype)
    groups: dict[int, KVBlocks | kernels.StateSegments] = {**in_pages(tables, rows, positions, page)}
    groups[2] = kernels.StateSegments(starts, F.pad(numbers + 1, (1, 0)), torch.full_like(numbers, -1), numbers)
    batch = Batch(
        token_ids=torch.cat(requests),
        positions=positions,
        sequence_lengths=lengths,
        query_starts=starts,
        logits_indices=torch.arange(len(positions)),
        groups=groups,
    )
    if media:
        assert not beside
        assert arch.media is not None
        rows_with_media = MediaRows(1, arch.media, arch.vocab_size, has_axes=arch.has_rope_sections)
        rows_with_media.add(0, [item for _, item in media], len(tokens))
        fields, _ = rows_with_media.step(np.array([0]), np.array([0]), np.array([len(tokens)]))
        changes: dict[str, Any] = {name: torch.from_numpy(values) for name, values in fields.items()}
        batch = replace(batch, **changes)
    for stage, layers in enumerate(config.parallel.stages):
        decoder = load_model(config, stage * parallel.size + parallel.rank, parallel, CPU, experts=experts)
        own_batch = batch
        if media and stage == 0:
            assert not isinstance(decoder, Encoder)
            assert decoder.tower is not None
            own_batch = replace(batch, media_features=torch.cat([decoder.tower(*each) for each in media]))
        caches: list[LayerCache] = []
        for number in layers:
            source = arch.layers[number].kv_source
            own = layer_cache(arch.layers[number], parallel.size, blocks, dtype, page, len(requests))
            caches.append(own if source is None else own._replace(memory=caches[layers.index(source)].memory))
        hidden = decoder(hidden, own_batch, caches)
    assert hidden is not None
    assert not isinstance(decoder, Encoder)
    return decoder.logits(hidden)[-len(tokens) :]


def in_pages(tables: Tensor, rows: Tensor, positions: Tensor, blocks_per_page: int) -> dict[int, KVBlocks]:
    """The groups of requests with these block tables, whose blocks of four tokens are numbered from 0 on. If there are
    pages, each of these blocks takes one, and blocks of entries are behind them."""
    count, entries = int(tables.max()) + 1, tables
    tables = tables * max(blocks_per_page, 1)
    groups = {0: KVBlocks(tables[rows, positions // 4] * 4 + positions % 4, tables)}
    if blocks_per_page:
        entries = entries + count * blocks_per_page
        groups[1] = KVBlocks(entries[rows, positions // 4] * 4 + positions % 4, entries)
    return groups


def blocks_per_page(arch: ModelSpec, dtype: str) -> int:
    """Blocks of entries that take as much memory as one of tokens; 0: the model has no entries."""
    if not any(isinstance(layer.attention, CompressedAttentionSpec) for layer in arch.layers):
        return 0
    return count_blocks_per_page(cache_specs(arch, 1, arch.max_position, dtype, 4), 4, dtype)


def layer_cache(
    spec: LayerSpec, tp: int, blocks: int, dtype: torch.dtype, blocks_per_page: int = 1, requests: int = 1
) -> LayerCache:
    """The cache of a layer, with blocks of four tokens, and a state for each of the requests."""
    memory = keys = state = None
    if isinstance(spec.attention, CompressedAttentionSpec):
        count, size = blocks * (blocks_per_page + 1), spec.attention.head_dim
        memory = kernels.allocate_kv_cache(1, count, 1, 1, size, dtype, CPU, 1)[0]
        if spec.attention.indexer is not None:
            keys = kernels.allocate_kv_cache(1, count, 1, 1, spec.attention.indexer.head_dim, dtype, CPU, 1)[0]
        return LayerCache(
            compressed=compressed_cache(spec.attention, memory, keys, 4, blocks_per_page), entries_group=1
        )
    if spec.attention is not None:
        memory = _plane(spec.attention.kv_shape(tp), blocks, dtype)
        if (index_shape := spec.attention.index_shape()) is not None:
            keys = _plane(index_shape, blocks, dtype)
    if spec.state is not None:
        matrices = torch.zeros(requests, *spec.state.state_shape(tp))
        shapes = spec.state.input_shape(tp), *spec.state.other_inputs
        inputs, *others = (torch.zeros(requests, *shape, dtype=dtype) for shape in shapes)
        state = kernels.RecurrentState(matrices, inputs, tuple(others))
    return LayerCache(memory, state=state, state_group=2, keys=keys)


def _plane(shape: tuple[int, int, int], blocks: int, dtype: torch.dtype) -> Tensor:
    num_tensors, kv_heads, row = shape
    return kernels.allocate_kv_cache(1, blocks, kv_heads, 4, row, dtype, CPU, num_tensors)[0]
