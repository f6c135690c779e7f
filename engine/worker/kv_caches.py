"""The KV caches of a rank."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from quire import kernels
from quire.engine.architecture.attention_spec import CompressedAttentionSpec
from quire.engine.config.engine_config import EngineConfig
from quire.engine.config.kv_cache_groups import (
    KVCacheShape,
    LayerPlacement,
    cached_layers,
    count_planes,
    place_layers,
    recent_layers,
)
from quire.engine.layers.compressed import compressed_cache
from quire.engine.layers.kv_cache import LayerCache, RecentCache
from quire.engine.protocol.scheduler_output import SchedulerOutput
from quire.engine.worker.async_copies import send


class KVCaches:
    """The caches of a stage's layers on one rank, and on the last stage the drafter's caches."""

    def __init__(self, config: EngineConfig, stage: int, device: torch.device) -> None:
        planes = allocate_planes(config, stage, device)
        caches, num_layers = view_caches(config, stage, planes, device), len(config.parallel.stages[stage])
        self.layers, self.drafter = caches[:num_layers], caches[num_layers:]
        self.memory = {shape: own.transpose(1, 2).view(torch.uint8).view(-1) for shape, own in planes.items()}
        """The bytes of all planes of each shape: plane after plane, block after block."""
        self._is_state, self._device = [group.is_state for group in config.cache.groups], device

    def clear_new_blocks(self, plan: SchedulerOutput) -> None:
        """Zero new blocks that the rows will fill only in part: attention reads whole blocks, and these may still hold
        recurrent state."""
        if not any(self._is_state):
            return
        new = (row.new_block_ids[-len(self._is_state) :] for row in plan.scheduled)
        blocks = {block for ids in new for block, is_state in zip(ids, self._is_state, strict=False) if not is_state}
        if blocks:
            places = send(np.array(sorted(blocks), np.int64), self._device)
            for cache in (*self.layers, *self.drafter):
                if cache.memory is not None:
                    cache.memory.view(torch.uint8).index_fill_(1, places, 0)


def allocate_planes(config: EngineConfig, stage: int, device: torch.device) -> dict[KVCacheShape, Tensor]:
    """Allocate the planes of blocks of each shape on a rank of a stage, as in `quire.kernels.cache`. Encoders have
    none."""
    cache = config.cache
    if not cache.num_blocks:
        return {}
    specs, _ = cached_layers(config.model, config.parallel, config.scheduler.speculative, cache.block_size)
    return {
        shape: kernels.allocate_kv_cache(
            layers=count,
            num_blocks=cache.num_blocks,
            kv_heads=shape.num_heads,
            block_size=cache.block_size // shape.tokens_per_row,
            head_dim=shape.head_dim,
            dtype=kernels.kv_cache_dtype(cache.dtype),
            device=device,
            num_tensors=shape.num_tensors,
        )
        for shape, count in count_planes(specs, cache.groups, stage).items()
    }


def allocate_caches(config: EngineConfig, stage: int, device: torch.device) -> list[LayerCache]:
    """Allocate the planes, and return the caches in them: see `view_caches`."""
    return view_caches(config, stage, allocate_planes(config, stage, device), device)


def view_caches(
    config: EngineConfig, stage: int, planes: Mapping[KVCacheShape, Tensor], device: torch.device
) -> list[LayerCache]:
    """The KV caches of a stage's layers on one rank, in its planes, each of which layers of different groups share;
    memory for what is not quantized yet is allocated. On the last stage the caches of the drafter's layers follow.
    Encoders have none."""
    cache, tp, dtype = config.cache, config.parallel.tensor_parallel_size, getattr(torch, config.model.dtype)
    if not cache.num_blocks:
        return []
    specs, stages = cached_layers(config.model, config.parallel, config.scheduler.speculative, cache.block_size)

    def plane(place: LayerPlacement) -> Tensor:
        return planes[place.shape][place.plane]

    def index_plane(place: LayerPlacement | None) -> Tensor | None:
        if place is None or place.index_shape is None or place.index_plane is None:
            return None
        return planes[place.index_shape][place.index_plane]

    recent: dict[int, RecentCache] = {}
    if (blocks := cache.recent) is not None:
        slots, of_type = config.scheduler.max_num_seqs, kernels.kv_cache_dtype(blocks.dtype)
        for shape, numbers in recent_layers(config, stage):
            size = shape.num_heads, cache.block_size, shape.head_dim
            [memory] = kernels.allocate_kv_cache(1, blocks.number(slots, len(numbers)), *size, of_type, device)
            for count, number in enumerate(numbers):
                recent[number] = RecentCache(memory, blocks.others, count * slots * blocks.per_request)
    places = place_layers(specs, cache.groups, stage)
    architectures = [each.model.architecture for each in config.with_drafter]
    numbered = [(arch, number) for arch in architectures for number in range(arch.num_layers)]
    caches: list[LayerCache] = []
    for layer in stages[stage]:
        arch, number = numbered[layer]
        spec, place = arch.layers[number], places.get((layer, False))
        if isinstance(spec.attention, CompressedAttentionSpec):
            windows = places[layer, True]
            parts = compressed_cache(
                spec.attention, plane(windows), index_plane(place), cache.block_size, cache.blocks_per_page
            )
            entries_group = None if place is None else place.group
            kept = LayerCache(compressed=parts, group=windows.group, entries_group=entries_group)
        elif place is not None:
            kept = LayerCache(plane(place), place.group, keys=index_plane(place), recent=recent.get(layer))
        elif spec.kv_source is not None:
            source = layer - number + spec.kv_source
            kept = caches[source - stages[stage].start]._replace(state=None)
        else:
            kept = LayerCache()
        if spec.state is not None:
            paged = places[layer, True]
            shapes = spec.state.state_shape(tp), spec.state.input_shape(tp), dtype, spec.state.other_inputs
            pages = kernels.recurrent_states(plane(paged), cache.blocks_per_page, *shapes)
            kept = kept._replace(state=pages, state_group=paged.group)
        caches.append(kept)
    return caches
