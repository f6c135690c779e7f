"""A head that drafts for a decoder, its target. `DraftHeadSpec` describes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from quire.engine.distributed.communicator import Parallel
from quire.engine.layers.attention import Batch, LayerCache, Selection
from quire.engine.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from quire.engine.layers.linear import ColumnParallelLinear, Partition
from quire.engine.layers.norm import Norm, make_norm
from quire.engine.layers.rotary import Rotary
from quire.engine.models import attention_spec
from quire.engine.models.decoder import Decoder, DecoderLayer
from quire.engine.models.draft_head_spec import DraftHeadSpec
from quire.engine.models.spec_parts import NormSpec


class DraftHead(nn.Module):
    """Layers that read a token and the target's hidden state at the position before it.

    It uses embedding and head of `target`, which is the last stage, unless it has its own. Parameters are
    uninitialized.
    """

    def __init__(self, arch: DraftHeadSpec, max_length: int, parallel: Parallel, target: Decoder) -> None:
        super().__init__()
        self.arch, self._target = arch, [target]  # it is no child of this module
        width = arch.hidden_size
        self._rotary = {
            each.attention.rope: Rotary(each.attention.rope, max_length) for each in arch.layers if each.attention
        }
        shares_embedding = not arch.has_embedding and target.embedding is not None
        self.embedding = None if shares_embedding else VocabParallelEmbedding(arch.vocab_size, width, parallel)
        """Its own, or a copy of the target's, which is in another stage; None: the target's."""
        self.embedding_norm, self.hidden_norm = _norm(arch.embedding_norm, width), _norm(arch.hidden_norm, width)
        self.projection = None
        if arch.projection_inputs:
            outputs = Partition("", width, 0, width)
            self.projection = ColumnParallelLinear(arch.projection_inputs, [outputs], bias=arch.projection_bias)
        self.layers = nn.ModuleDict(
            {str(number): DecoderLayer(layer, width, parallel) for number, layer in enumerate(arch.layers)}
        )
        self.norm = _norm(arch.norm, width)
        self.head = ParallelLMHead(arch.draft_vocab_size, width, parallel) if arch.has_head else None
        self.token_ids: Tensor | None = None
        """`[draft_vocab_size]`, int64: the tokens that the logits of its own head are of; None: all, in order."""

    def hidden_states(self, output: Tensor) -> Tensor:
        """What the head reads of the output of the target's last stage: `[tokens, …]` → `[tokens, hidden_size]`."""
        arch, (target,) = self.arch, self._target
        if not arch.reads_layers:
            return target.features(output)
        streams = output[:, arch.target_hidden_size :].contiguous()
        return streams if self.projection is None else self.projection(streams)

    def forward(self, token_ids: Tensor, hidden: Tensor, batch: Batch, caches: Sequence[LayerCache]) -> Tensor:
        """The residual stream after the layers, `[tokens, hidden_size]`, of the tokens that *follow* the batch's, and
        the hidden states at the batch's positions: the target's, or those that were fed back."""
        arch, (target,) = self.arch, self._target
        embedding = target.embedding if self.embedding is None else self.embedding
        assert embedding is not None
        embedded: Tensor = embedding(token_ids)
        embedded = embedded if self.embedding_norm is None else self.embedding_norm(embedded)
        hidden = hidden if self.hidden_norm is None else self.hidden_norm(hidden)
        x, residual, beside = hidden, None, embedded
        if arch.joins is not None:
            assert self.projection is not None
            x = self.projection(
                torch.cat((embedded, hidden) if arch.joins == "embedding first" else (hidden, embedded), dim=-1)
            )
        if any(isinstance(each.attention, attention_spec.MLASpec) and each.attention.top_k for each in arch.layers):
            batch = replace(batch, selection=Selection())
        cos_sin = {rope: rotary(batch.positions) for rope, rotary in self._rotary.items()}
        for layer, cache in zip(self.layers.values(), caches, strict=True):
            assert isinstance(layer, DecoderLayer)
            turns = None if layer.spec.attention is None else cos_sin[layer.spec.attention.rope]
            x, residual = layer(x, residual, batch, turns, cache, beside if layer.spec.reads_embedding else None)
        return x if residual is None else residual + x

    def fed_back(self, x: Tensor) -> Tensor:
        """What stands for the target's hidden state behind a draft, given the residual stream `[tokens, hidden_size]`
        after the layers."""
        return self._features(x) if self.arch.feeds_normed else x

    def logits(self, x: Tensor) -> Tensor:
        """The residual stream `[rows, hidden_size]` → float32 `[rows, vocab_size]`, the same on every rank. Tokens that
        the head does not know have -inf."""
        if self.head is None:
            return self._target[0].logits_of(self._features(x))
        out: Tensor = self.head(self._features(x))
        if self.arch.logit_multiplier != 1.0:
            out = out * self.arch.logit_multiplier
        if self.token_ids is None:
            return out
        return out.new_full((len(out), self.arch.vocab_size), -torch.inf).index_copy_(1, self.token_ids, out)

    def _features(self, x: Tensor) -> Tensor:
        return x if self.norm is None else self.norm(x)


def _norm(spec: NormSpec | None, size: int) -> Norm | None:
    return None if spec is None else make_norm(spec, size)
