"""Loads the drafter of a rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from quire.engine.architecture.draft_head_spec import DraftHeadSpec
from quire.engine.config.engine_config import EngineConfig
from quire.engine.distributed.communicator import Parallel
from quire.engine.distributed.parallel_state import ParallelState
from quire.engine.layers.kv_cache import LayerCache
from quire.engine.models.build import Model, load, load_draft_head
from quire.engine.models.decoder import Decoder
from quire.engine.worker.drafter import Drafter, DraftModel
from quire.engine.worker.head_drafter import HeadDrafter, SeveralHeadsDrafter
from quire.engine.worker.sampler import Sampler


def load_drafter(
    config: EngineConfig, parallel_state: ParallelState, device: torch.device, target: Model
) -> Callable[[Sequence[LayerCache]], Drafter] | None:
    """Load the weights of the drafter of `config`, for this rank's `target`. Returns the function that makes the
    drafter from its KV caches; None: this rank has no drafter."""
    drafter, parallel = config.drafter, parallel_state.tp
    if drafter is None or not parallel_state.pipeline.is_last:
        return None
    if parallel.rank >= drafter.parallel.tensor_parallel_size:
        return None
    if drafter.parallel.tensor_parallel_size == 1:
        parallel = Parallel()
    sampler = Sampler(drafter.model.architecture.vocab_size, drafter.model.eos_token_ids, device)
    if not isinstance(drafter.model.architecture, DraftHeadSpec):
        model = load(drafter, parallel.rank, parallel, device)
        return partial(DraftModel, drafter, model, parallel=parallel, sampler=sampler)
    assert isinstance(target, Decoder)
    head = load_draft_head(config, drafter.model, parallel, device, target)
    kind = HeadDrafter if head.arch.num_heads == 1 else SeveralHeadsDrafter
    return partial(kind, head, parallel=parallel, sampler=sampler)
