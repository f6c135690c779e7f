"""Checkpoints as configurations, and a model's logits without an engine. No transformers here: it imports slowly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire import kernels
from quire.engine.config.engine_config import EngineConfig
from quire.engine.config.options import EngineOptions
from quire.engine.config.resolve import resolve
from quire.engine.distributed.communicator import Parallel
from quire.engine.distributed.expert_group import ExpertCommunicator, ExpertGroup
from quire.engine.layers.attention import Batch, LayerCache
from quire.engine.models.encoder import Encoder
from quire.engine.models.loader import load_model
from quire.engine.models.model_spec import LayerSpec

CPU = torch.device("cpu")


def configure(folder: Path, **options: Any) -> EngineConfig:
    options = {"packed_cache": "off", **options}  # loading is what is tested
    return resolve(EngineOptions(model=str(folder), device="cpu", kv_cache_memory_bytes=1 << 22, **options))


def logits(config: EngineConfig, tokens: Tensor, parallel: Parallel) -> Tensor:
    """One request's logits at every position, all stages one after the other in this process."""
    arch, count, hidden = config.model.architecture, len(tokens), None
    positions = torch.arange(count)
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    blocks = -(-count // 4)
    spread = config.parallel.experts
    experts = None if spread is None else ExpertGroup(spread, parallel, ExpertCommunicator(), ExpertCommunicator())
    batch = Batch(
        token_ids=tokens,
        positions=positions,
        slot_mapping=positions,
        block_tables=torch.arange(blocks)[None],
        sequence_lengths=torch.tensor([count]),
        query_starts=torch.tensor([0, count]),
        logits_indices=positions,
        segments=kernels.StateSegments(*map(torch.tensor, ([0, count], [0, 1], [-1], [0]))),
    )
    for stage, layers in enumerate(config.parallel.stages):
        decoder = load_model(config, stage * parallel.size + parallel.rank, parallel, CPU, experts=experts)
        caches: list[LayerCache] = []
        for number in layers:
            source = arch.layers[number].kv_source
            own = layer_cache(arch.layers[number], parallel.size, blocks, dtype)
            caches.append(own if source is None else own._replace(memory=caches[layers.index(source)].memory))
        hidden = decoder(hidden, batch, caches)
    assert hidden is not None
    assert not isinstance(decoder, Encoder)
    return decoder.logits(hidden)


def layer_cache(spec: LayerSpec, tp: int, blocks: int, dtype: torch.dtype) -> LayerCache:
    """The cache of a layer, with blocks of four tokens."""
    memory = keys = state = None
    if spec.attention is not None:
        memory = _plane(spec.attention.kv_shape(tp), blocks, dtype)
        if (index_shape := spec.attention.index_shape()) is not None:
            keys = _plane(index_shape, blocks, dtype)
    if spec.state is not None:
        matrices = torch.zeros(1, *spec.state.state_shape(tp))
        state = kernels.RecurrentState(matrices, torch.zeros(1, *spec.state.input_shape(tp), dtype=dtype))
    return LayerCache(memory, state=state, keys=keys)


def _plane(shape: tuple[int, int, int], blocks: int, dtype: torch.dtype) -> Tensor:
    num_tensors, kv_heads, row = shape
    return kernels.allocate_kv_cache(1, blocks, kv_heads, 4, row, dtype, CPU, num_tensors)[0]
