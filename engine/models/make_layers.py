"""Chooses the class of each layer by the type of its residual path."""

from __future__ import annotations

from collections.abc import Iterator

from quire.engine.architecture.attention_spec import AttentionSpec
from quire.engine.architecture.feed_forward_spec import MLPSpec
from quire.engine.architecture.model_spec import LayerSpec, ModelSpec
from quire.engine.architecture.residual_spec import (
    AltUpSpec,
    EmbeddingReaderSpec,
    GatedConnectionSpec,
    HyperConnectionSpec,
    NormedResidualSpec,
    ScaledResidualSpec,
    SharedBlockSpec,
)
from quire.engine.distributed.communicator import Parallel
from quire.engine.distributed.expert_group import ExpertGroup
from quire.engine.layers.shared_block import SharedBlock
from quire.engine.models.decoder_layer import DecoderLayer, FeedForwardLayer
from quire.engine.models.embedding_reader_layer import EmbeddingReaderLayer
from quire.engine.models.gemma_layers import AltUpLayer, ScaledResidualLayer
from quire.engine.models.normed_residual_layer import NormedResidualLayer
from quire.engine.models.shared_block_layer import SharedBlockLayer
from quire.engine.models.streams_layer import StreamsLayer


def make_layers(
    arch: ModelSpec, layers: range, parallel: Parallel, experts: ExpertGroup | None = None
) -> Iterator[tuple[int, DecoderLayer]]:
    """Yield the given layers of a model with their numbers. The first layer with a shared block creates the block."""
    blocks: dict[int, SharedBlock] = {}
    for number in layers:
        spec, width = arch.layers[number], arch.hidden_size
        if not isinstance(block := spec.residual, SharedBlockSpec):
            yield number, layer_class(spec)(spec, width, parallel, experts)
            continue
        if (source := block.source) not in blocks:
            assert isinstance(spec.attention, AttentionSpec)
            assert isinstance(spec.feed_forward, MLPSpec)
            blocks[source] = SharedBlock(block, spec.attention, spec.feed_forward, width, parallel)
        yield number, SharedBlockLayer(spec, width, parallel, blocks[source])


_CLASSES: dict[type, type[DecoderLayer]] = {
    NormedResidualSpec: NormedResidualLayer,
    EmbeddingReaderSpec: EmbeddingReaderLayer,
    ScaledResidualSpec: ScaledResidualLayer,
    AltUpSpec: AltUpLayer,
    HyperConnectionSpec: StreamsLayer,
    GatedConnectionSpec: StreamsLayer,
}


def layer_class(spec: LayerSpec) -> type[DecoderLayer]:
    """The class of a layer without a shared block."""
    if spec.residual is None:
        return DecoderLayer if spec.mixers else FeedForwardLayer
    return _CLASSES[type(spec.residual)]
