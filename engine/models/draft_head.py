"""A head that drafts for a decoder, its target. `DraftHeadSpec` describes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from quire.engine.architecture.draft_head_spec import DraftHeadSpec
from quire.engine.architecture.residual_spec import ConnectionSpec
from quire.engine.architecture.spec_parts import NormSpec
from quire.engine.distributed.communicator import Parallel
from quire.engine.layers.batch import Batch, SharedResults
from quire.engine.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from quire.engine.layers.from_spec import FromSpec
from quire.engine.layers.kv_cache import LayerCache
from quire.engine.layers.norm import Norm, make_norm
from quire.engine.layers.residual import make_merger
from quire.engine.layers.rotary import Rotary
from quire.engine.models.decoder import Decoder
from quire.engine.models.decoder_layer import DecoderLayer, LayerStep
from quire.engine.models.embedding_reader_layer import EmbeddingReaderLayer
from quire.engine.models.make_layers import layer_class


class _AroundLayers(nn.Module):
    """The modules of a head before and after its layers."""

    def __init__(self, arch: DraftHeadSpec, parallel: Parallel) -> None:
        super().__init__()
        width, own = arch.hidden_size, FromSpec(arch.head_parameters())
        self.embedding_norm, self.hidden_norm = _norm(arch.embedding_norm, width), _norm(arch.hidden_norm, width)
        self.projection = None
        if arch.projection_inputs:
            self.projection = own.column_parallel("heads.projection")
        self.embedding_projection = None
        if arch.joins == "sum":
            self.embedding_projection = own.column_parallel("heads.embedding_projection")
        self.merger = make_merger(arch.streams, width) if isinstance(arch.streams, ConnectionSpec) else None
        self.norm = _norm(arch.norm, width)
        self.head = ParallelLMHead(arch.draft_vocab_size, width, parallel) if arch.has_head else None
        """For logits; None: the target's."""


class DraftHead(nn.Module):
    """Layers that read a token and the target's hidden state at the position before it; or several heads of them, whose
    tokens are further ahead.

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
        self.heads = nn.ModuleDict({str(number): _AroundLayers(arch, parallel) for number in range(arch.num_heads)})
        self.layers = nn.ModuleDict(
            {str(number): layer_class(layer)(layer, width, parallel) for number, layer in enumerate(arch.layers)}
        )
        self.token_ids: Tensor | None = None
        """`[draft_vocab_size]`, int64: the token of each logit of its own head; None: all tokens, in order."""

    def hidden_states(self, output: Tensor) -> Tensor:
        """The input of the head, from the output of the target's last stage: `[tokens, …]` → `[tokens, hidden_size]`,
        or all residual streams where there are several, `[tokens, stream_width]`."""
        arch, (target,) = self.arch, self._target
        if not arch.reads_layers:
            return target.features(output) if arch.reads_normed else output
        streams, projection = output[:, arch.target_hidden_size :].contiguous(), self._around(0).projection
        return streams if arch.joins or projection is None else projection(streams)

    def forward(
        self, token_ids: Tensor, hidden: Tensor, batch: Batch, caches: Sequence[LayerCache], number: int = 0
    ) -> Tensor:
        """The residual streams after the layers of head `number`, `[tokens, stream_width]`. They are given the tokens
        that *follow* the batch's, `number` + 1 places behind them, and the hidden states at the batch's positions: the
        target's, or hidden states that were fed back. `caches` are the caches of all layers."""
        arch, (target,), around = self.arch, self._target, self._around(number)
        count = len(arch.layers) // arch.num_heads
        own = range(number * count, (number + 1) * count)
        embedding = target.embedding if self.embedding is None else self.embedding
        assert embedding is not None
        embedded: Tensor = embedding(token_ids)
        embedded = embedded if around.embedding_norm is None else around.embedding_norm(embedded)
        shape, hidden = hidden.shape, hidden.reshape(-1, arch.hidden_size)
        hidden = hidden if around.hidden_norm is None else around.hidden_norm(hidden)
        x, residual = hidden, None
        if around.embedding_projection is not None:
            assert around.projection is not None
            x = around.projection(hidden).view(shape)
            x = x + around.embedding_projection(embedded).repeat(1, x.shape[1] // embedded.shape[1])
        elif arch.joins is not None:
            assert around.projection is not None
            x = around.projection(
                torch.cat((embedded, hidden) if arch.joins == "embedding first" else (hidden, embedded), dim=-1)
            )
        batch = replace(batch, shared=SharedResults())
        cos_sin = {rope: rotary(batch.positions) for rope, rotary in self._rotary.items()}
        for each in own:
            layer = self.layers[str(each)]
            assert isinstance(layer, DecoderLayer)
            turns = None if layer.spec.attention is None else cos_sin[layer.spec.attention.rope]
            beside = embedded if isinstance(layer, EmbeddingReaderLayer) else None
            x, residual = layer(x, residual, LayerStep(batch, turns, caches[each], beside))
        return x if residual is None else residual + x

    def fed_back(self, x: Tensor) -> Tensor:
        """The replacement for the target's hidden state behind a draft of a single head, given the residual streams
        `[tokens, stream_width]` after its layers."""
        return self._features(x, 0) if self.arch.feeds_normed else x

    def logits(self, x: Tensor, number: int = 0) -> Tensor:
        """The residual streams `[rows, stream_width]` of head `number` → float32 `[rows, vocab_size]`, the same on each
        rank. Tokens that the head does not know have -inf."""
        features, head = self._features(x, number), self._around(number).head
        if head is None:
            return self._target[0].logits_of(features)
        out: Tensor = head(features)
        if self.arch.logit_multiplier != 1.0:
            out = out * self.arch.logit_multiplier
        if self.token_ids is None:
            return out
        return out.new_full((len(out), self.arch.vocab_size), -torch.inf).index_copy_(1, self.token_ids, out)

    def _features(self, x: Tensor, number: int) -> Tensor:
        around = self._around(number)
        x = x if around.merger is None else around.merger.merge(x)
        return x if around.norm is None else around.norm(x)

    def _around(self, number: int) -> _AroundLayers:
        found = self.heads[str(number)]
        assert isinstance(found, _AroundLayers)
        return found


def _norm(spec: NormSpec | None, size: int) -> Norm | None:
    return None if spec is None else make_norm(spec, size)
