"""One pipeline stage of a Llama-like decoder. What differs between families is in the `Architecture`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from quire.engine.architecture import Architecture
from quire.engine.layers.attention import Attention, Batch
from quire.engine.layers.embedding import VocabParallelEmbedding, VocabParallelHead
from quire.engine.layers.feed_forward import FeedForward
from quire.engine.layers.norm import RMSNorm
from quire.engine.layers.rotary import inverse_frequencies, rotations
from quire.engine.parallel import Parallel


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each normalized before and added to the residual stream after."""

    def __init__(self, arch: Architecture, parallel: Parallel) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(arch.hidden_size, arch.norm_eps)
        self.attention = Attention(arch, parallel)
        self.feed_forward_norm = RMSNorm(arch.hidden_size, arch.norm_eps)
        self.feed_forward = FeedForward(arch, parallel)

    def forward(
        self, x: Tensor, residual: Tensor | None, batch: Batch, turns: Tensor, cache: Tensor
    ) -> tuple[Tensor, Tensor]:
        """`x` is still to be added to `residual`, in the arguments and in what is returned."""
        if residual is None:
            x, residual = self.attention_norm(x), x
        else:
            x, residual = self.attention_norm.add(x, residual)
        x = self.attention(x, batch, turns, cache)
        x, residual = self.feed_forward_norm.add(x, residual)
        return self.feed_forward(x), residual


class Decoder(nn.Module):
    """The layers `layers` of a model: with the embedding if they are the first, norm and head if the last.

    Layers keep their number in the whole model as their name. Parameters are uninitialized.
    """

    def __init__(self, arch: Architecture, layers: range, parallel: Parallel) -> None:
        super().__init__()
        first, last = layers.start == 0, layers.stop == arch.num_layers
        vocabulary = (arch.vocab_size, arch.hidden_size, parallel)
        self._frequencies = inverse_frequencies(arch.rope, arch.head_dim)
        self.embedding = VocabParallelEmbedding(*vocabulary) if first else None
        self.layers = nn.ModuleDict({str(number): DecoderLayer(arch, parallel) for number in layers})
        if last:
            tied = self.embedding.weight if self.embedding is not None and arch.tie_embeddings else None
            self.norm = RMSNorm(arch.hidden_size, arch.norm_eps)
            self.head = VocabParallelHead(*vocabulary, tied)

    def forward(self, x: Tensor | None, batch: Batch, caches: Sequence[Tensor]) -> Tensor:
        """The residual stream `[tokens, hidden_size]` after this stage, from that of the stage before.

        The first stage takes None and starts from the batch's token ids. `caches` holds each layer's KV cache.
        """
        if x is None:
            assert self.embedding is not None
            x = self.embedding(batch.token_ids)
        residual = None
        turns = rotations(batch.positions, self._frequencies)
        for layer, cache in zip(self.layers.values(), caches, strict=True):
            x, residual = layer(x, residual, batch, turns, cache)
        assert x is not None
        return x if residual is None else residual + x

    def logits(self, x: Tensor) -> Tensor:
        """The last stage's `[rows, hidden_size]` → float32 `[rows, vocab_size]`, the same on every rank."""
        out: Tensor = self.head(self.norm(x))
        return out
