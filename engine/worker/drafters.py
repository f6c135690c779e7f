"""Loads and makes the drafter of a rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.engine.architecture.draft_head_spec import DraftHeadSpec
from quire.engine.config.engine_config import EngineConfig
from quire.engine.distributed.communicator import Parallel
from quire.engine.layers.attention import LayerCache
from quire.engine.models.build import Model, load, load_draft_head
from quire.engine.models.decoder import Decoder
from quire.engine.models.draft_head import DraftHead
from quire.engine.worker.drafter import Drafter, DraftModel
from quire.engine.worker.head_drafter import HeadDrafter, SeveralHeadsDrafter
from quire.engine.worker.sampler import Sampler


def load_drafter(config: EngineConfig, parallel: Parallel, device: torch.device, target: Model) -> Decoder | DraftHead:
    """The weights of the drafter of `config`, which is that of `target`, on a rank of the last stage. `parallel` are
    the drafter's ranks."""
    drafter = config.drafter
    assert drafter is not None
    if not isinstance(drafter.model.architecture, DraftHeadSpec):
        return load(drafter, parallel.rank, parallel, device)
    assert isinstance(target, Decoder)
    return load_draft_head(config, drafter.model, parallel, device, target)


def make_drafter(
    config: EngineConfig,
    parallel: Parallel,
    device: torch.device,
    caches: Sequence[LayerCache],
    model: Decoder | DraftHead,
) -> Drafter:
    """The drafter of a rank, with its loaded model. `config` is `EngineConfig.drafter`, `parallel` its ranks."""
    sampler = Sampler(config.model.architecture.vocab_size, config.model.eos_token_ids, device)
    if isinstance(model, DraftHead):
        if model.arch.num_heads > 1:
            return SeveralHeadsDrafter(model, caches, parallel, sampler)
        return HeadDrafter(model, caches, parallel, sampler)
    return DraftModel(config, model, caches, parallel, sampler)
