"""Layers that share blocks of attention and a feed-forward layer (Zamba)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from quire.engine.architecture.attention_spec import AttentionSpec
from quire.engine.architecture.feed_forward_spec import MLPSpec
from quire.engine.architecture.model_spec import LayerSpec
from quire.engine.architecture.residual_spec import SharedBlockSpec
from quire.engine.distributed.communicator import Parallel
from quire.engine.layers.from_spec import FromSpec
from quire.engine.layers.shared_block import SharedBlock, attention_adapter, feed_forward_adapter
from quire.engine.models.decoder_layer import DecoderLayer, LayerStep, apply


class SharedBlockLayer(DecoderLayer):
    """A recurrent state that reads the residual stream plus the output of a block for it and the embedded token."""

    def __init__(self, spec: LayerSpec, hidden_size: int, parallel: Parallel, block: SharedBlock) -> None:
        super().__init__(replace(spec, attention=None, feed_forward=None), hidden_size, parallel)
        assert isinstance(spec.residual, SharedBlockSpec)
        assert isinstance(spec.attention, AttentionSpec)
        assert isinstance(spec.feed_forward, MLPSpec)
        self.spec, self.block = spec, block
        own = FromSpec(spec.residual.parameters(hidden_size, spec.attention, spec.feed_forward), parallel)
        self.attention_adapter = attention_adapter(spec.residual, own)
        self.feed_forward_adapter = feed_forward_adapter(spec.residual, own)
        self.block_output = own.column_parallel("block_output")

    def forward(self, x: Tensor, residual: Tensor | None, step: LayerStep) -> tuple[Tensor, Tensor | None]:
        """See `DecoderLayer`. `step.own` is the embedded token."""
        assert self.state is not None
        assert step.own is not None
        batch, cache, adapters = step.batch, step.cache, step.batch.adapters_of()
        x = x if residual is None else residual + x
        place = batch, step.cos_sin, cache
        block = self.block(torch.cat((x, step.own), dim=-1), *place, self.attention_adapter, self.feed_forward_adapter)
        normed = apply(self.attention_norm, x + self.block_output(block, adapters))
        return self._recur(normed, step), x
