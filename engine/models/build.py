"""Builds a stage's model, or a draft head, and has its parameters loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor, nn

from quire.engine.architecture import encoder_spec
from quire.engine.architecture.draft_head_spec import DraftHeadSpec
from quire.engine.architecture.model_spec import TransformersModelSpec
from quire.engine.architecture.quantization.online import Online
from quire.engine.checkpoints import surplus
from quire.engine.checkpoints.checkpoint_files import Checkpoint, open_files
from quire.engine.checkpoints.loader import load_parameters, needed_tensors
from quire.engine.checkpoints.packed_cache import PackedCache
from quire.engine.config.engine_config import EngineConfig, ModelConfig
from quire.engine.distributed.communicator import Parallel
from quire.engine.distributed.expert_group import ExpertGroup
from quire.engine.layers.weight import without_memory
from quire.engine.models.decoder import Decoder
from quire.engine.models.draft_head import DraftHead
from quire.engine.models.encoder import Encoder
from quire.engine.process import log
from quire.engine.protocol.errors import ConfigError

if TYPE_CHECKING:
    from quire.engine.models.transformers_backend.decoder import TransformersDecoder

Model: TypeAlias = "Decoder | TransformersDecoder | Encoder"
_OUTSIDE_HEADS = ("d2t", "t2d", "model.d2t", "model.t2d", "model.embed_tokens.weight", "lm_head.weight")
"""Tensors of EAGLE's checkpoints that are read otherwise, or are copies of the target's."""


def build(model: ModelConfig, layers: range, parallel: Parallel, experts: ExpertGroup | None = None) -> Model:
    """The model, or a stage of it, uninitialized; embedding models have no head."""
    arch = model.architecture
    if isinstance(arch, TransformersModelSpec):
        from quire.engine.models.transformers_backend.decoder import TransformersDecoder  # slow to import

        return TransformersDecoder.of(model, arch, layers, parallel, torch.get_default_device())
    if isinstance(arch, encoder_spec.EncoderSpec):
        return Encoder(arch, parallel)
    decoder = Decoder(arch, layers, model.position_len, parallel, experts)
    if model.pooling is not None and hasattr(decoder, "head"):
        del decoder.head
    return decoder


def load(
    config: EngineConfig,
    rank: int,
    parallel: Parallel,
    device: torch.device,
    *,
    experts: ExpertGroup | None = None,
    pack: bool = True,
) -> Decoder:
    """Like `load_model`, for a decoder."""
    decoder = load_model(config, rank, parallel, device, experts=experts, pack=pack)
    assert isinstance(decoder, Decoder)
    return decoder


def load_model(
    config: EngineConfig,
    rank: int,
    parallel: Parallel,
    device: torch.device,
    *,
    experts: ExpertGroup | None = None,
    pack: bool = True,
) -> Model:
    """The model of this rank's stage on `device`, with its weights.

    `rank` is its number in the replica. See `load_parameters`, which also raises `ConfigError`. Rank 0 warns of tensors
    that no rank uses; rank 0 of the host's first replica shows a progress bar.
    """
    model, stage = config.model, config.parallel.stages[config.parallel.stage_of(rank)]
    with _uninitialized(model, device):
        decoder = build(model, stage, parallel, experts)
    cache = unused = None
    if isinstance(decoder, Decoder | Encoder):
        if pack and model.load_format != "dummy" and device.type == "cpu":
            cache = PackedCache.of(config, rank)
    else:
        decoder.find(None if model.load_format == "dummy" else Checkpoint(model, "", {}).names)
        if isinstance(model.quantized, Online):
            model = replace(model, quantized=decoder.quantized_online(model.quantized))
        unused = decoder.surplus

    def report(names: set[str]) -> None:
        found = surplus.unused_names(names, model) if unused is None else unused
        speculative = config.scheduler.speculative
        if speculative is not None and speculative.method == "mtp":  # layers after the model's are the head's
            found = [name for name in found if surplus.layer_of(name) < model.architecture.num_layers]
        surplus.report(found, model)

    is_first = config.parallel.is_first_local_replica
    load_parameters(
        decoder,
        model,
        device,
        num_local_ranks=config.parallel.num_local_ranks,
        pack=pack,
        bar=rank == 0 and is_first and not log.is_json(),
        warns=parallel.rank == 0 and is_first,
        cache=cache,
        report=report if rank == 0 else None,
    )
    if isinstance(decoder, Decoder) and decoder.tower is not None:
        with torch.no_grad():
            decoder.tower.complete()
    return decoder


def load_draft_head(
    config: EngineConfig,
    model: ModelConfig,
    parallel: Parallel,
    device: torch.device,
    target: Decoder,
    *,
    pack: bool = True,
) -> DraftHead:
    """The head `model`, whose architecture is a `DraftHeadSpec`, with its weights, for `target`: the last stage of the
    model of `config`. An embedding that neither the head nor this stage has is read again."""
    arch = model.architecture
    assert isinstance(arch, DraftHeadSpec)
    with _uninitialized(model, device):
        head = DraftHead(arch, model.position_len, parallel, target)
    load_part = partial(load_parameters, device=device, num_local_ranks=config.parallel.num_local_ranks, pack=pack)
    embedding = None if arch.has_embedding or arch.is_in_target else head.embedding
    if embedding is not None:
        load_part(nn.ModuleDict({"embedding": embedding}), config.model)
        head.embedding = None  # the head's checkpoint does not have it
    known = {*needed_tensors(head, model), *_OUTSIDE_HEADS}

    def report(names: set[str]) -> None:
        surplus.report(sorted(names - known), model)

    load_part(head, model, report=report if parallel.rank == 0 and not arch.is_in_target else None)
    if embedding is not None:
        head.embedding = embedding
    if arch.has_head and arch.draft_vocab_size < arch.vocab_size:
        head.token_ids = _draft_tokens(model, arch).to(device)
    return head


def _draft_tokens(model: ModelConfig, arch: DraftHeadSpec) -> Tensor:
    """The token of each logit of the head, `[draft_vocab_size]`: its checkpoint has the tokens' distances from 0, 1, 2,
    …"""
    numbers = torch.arange(arch.draft_vocab_size)
    if model.load_format == "dummy":
        return numbers
    files = open_files(model.path, model.load_format)
    info = files.headers.get("d2t") or files.headers["model.d2t"]
    tokens = numbers + files.view(info).long() if info.shape == numbers.shape else numbers[:0]
    if (
        not len(tokens)
        or int(tokens.min()) < 0
        or int(tokens.max()) >= arch.vocab_size
        or len({*tokens.tolist()}) < len(tokens)
    ):
        raise ConfigError(
            f"{info.file}: d2t, of shape {list(info.shape)}, does not give {arch.draft_vocab_size} different tokens "
            f"below {arch.vocab_size}"
        )
    return tokens


@contextmanager
def _uninitialized(model: ModelConfig, device: torch.device) -> Iterator[None]:
    """Create parameters on `device`, in the model's type and without memory."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, model.dtype))
    try:
        with device, without_memory():
            yield
    finally:
        torch.set_default_dtype(before)
