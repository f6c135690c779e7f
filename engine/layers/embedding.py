"""Embedding and head, with the vocabulary sharded over the ranks of a stage."""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor, nn

from quire import kernels
from quire.engine.distributed.communicator import Parallel
from quire.engine.layers.linear import Linear
from quire.engine.layers.quantized import QuantizedParameters
from quire.engine.layers.row_changes import RowChanges
from quire.engine.layers.weight import Shard, Weight


def vocab_weight(vocab_size: int, parallel: Parallel, *columns: int, parts: Mapping[str, int] | None = None) -> Weight:
    """This rank's rows `[ceil(vocab_size / ranks), *columns]`; the last ranks' are padded. The checkpoint may
    have them in `parts` with so many rows, one after another."""
    rows = -(-vocab_size // parallel.size)
    first = min(parallel.rank * rows, vocab_size)
    last, start, shards = min(first + rows, vocab_size), 0, []
    for name, count in ({"": vocab_size} if parts is None else parts).items():
        begin, end = max(first, start), max(first, start, min(last, start + count))
        if end > begin or parts is None:
            shards.append(Shard((count, *columns), begin - start, end - begin, offset=begin - first, part=name))
        start += count
    return Weight((rows, *columns), *shards)


class VocabParallelEmbedding(nn.Module):
    """Token ids to vectors; each rank looks up the ids in its shard, and the ranks' results are summed."""

    def __init__(
        self, vocab_size: int, hidden_size: int, parallel: Parallel, parts: Mapping[str, int] | None = None
    ) -> None:
        super().__init__()
        self._parallel = parallel
        self.weight = vocab_weight(vocab_size, parallel, hidden_size, parts=parts)
        (self._rows, self._width), self._dtype = self.weight.shape, self.weight.dtype
        self.quantized: QuantizedParameters | None = None
        """In place of the weight, if it is kept as the checkpoint stores it."""
        self.packed: kernels.PackedEmbedding | None = None
        """That weight, once it is loaded."""
        self.changes: dict[int, RowChanges] = {}
        """Its changes by the adapters in these slots."""

    def pack(self, quantization: kernels.Quantization | None) -> None:
        """Pack a weight that is kept as the checkpoint stores it; another one stays as it is."""
        if self.quantized is not None:
            self.packed = kernels.pack_embedding(self.quantized.weight())

    def forward(self, token_ids: Tensor, adapters: kernels.AdapterRows | None = None) -> Tensor:
        """`[…, tokens]` → `[…, tokens, hidden_size]`, the same on every rank; with `adapters`, `[tokens]` →
        `[tokens, hidden_size]`."""
        if self._parallel.size == 1:
            return self._changed(self._vectors(token_ids), token_ids, adapters)
        local = token_ids - self._parallel.rank * self._rows
        foreign = (local < 0) | (local >= self._rows)
        local = local.masked_fill(foreign, 0)
        vectors = self._changed(self._vectors(local), local, adapters)
        return self._parallel.all_reduce(vectors.masked_fill_(foreign[..., None], 0.0))

    def _changed(self, vectors: Tensor, rows: Tensor, adapters: kernels.AdapterRows | None) -> Tensor:
        """The vectors of these rows, changed in place."""
        for slot, change in self.changes.items():
            if adapters is not None and adapters.count(slot):
                own = adapters.of_slot(slot)
                vectors[own] = change.vectors(rows[own], vectors[own])
        return vectors

    def _vectors(self, rows: Tensor) -> Tensor:
        if self.packed is None:
            return F.embedding(rows, self.weight).to(self._dtype)
        vectors = self.packed.rows(rows.flatten())[:, : self._width]
        return vectors.to(self._dtype).view(*rows.shape, self._width)


class TiedLinear(Linear):
    """A linear layer that may have the weight of an embedding."""

    may_have_pool = False

    def __init__(self) -> None:
        super().__init__()
        self.shares_weight = False
        """Whether an embedding has the same weight."""
        self._embeddings: list[VocabParallelEmbedding] = []  # it is a child of the model already

    def share(self, weight: Weight, embedding: VocabParallelEmbedding | None) -> None:
        """Multiply by the weight of an embedding, which may have it quantized if it is one of ours."""
        self.weight, self.shares_weight = weight, True
        self._embeddings = [] if embedding is None else [embedding]

    @property
    def may_be_quantized(self) -> bool:
        return not self.shares_weight

    def pack(self, quantization: kernels.Quantization | None) -> None:
        """Pack as every linear layer does; a shared weight is kept for the embedding, and one that the embedding packs
        is multiplied as it is. Weights of 4 bits become int8 if they are shared."""
        if any(each.quantized is not None for each in self._embeddings):
            return
        weight = self.weight.data
        super().pack(quantization and "int8" if self.shares_weight else quantization)
        if self.shares_weight:
            self.weight.data = weight

    def product(
        self,
        x: Tensor | kernels.RoundedRows,
        bias: Tensor | None = None,
        adapters: kernels.AdapterRows | kernels.OneAdapter | None = None,
    ) -> Tensor:
        packed = next((each.packed for each in self._embeddings), None)
        if packed is None:
            return super().product(x, bias, adapters)
        assert isinstance(x, Tensor)
        assert adapters is None
        return packed(x, bias)


class ParallelLMHead(TiedLinear):
    """Vectors to logits. A tied head shares the embedding's weight."""

    may_have_pool = True

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        parallel: Parallel,
        tied: VocabParallelEmbedding | None = None,
        *,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self._parallel, self._vocab_size = parallel, vocab_size
        if tied is None:
            self.weight = vocab_weight(vocab_size, parallel, hidden_size)
        else:
            self.share(tied.weight, tied)
        self.bias = vocab_weight(vocab_size, parallel) if bias else None
        self.num_rows, self.width = self.weight.shape
        self.changes: dict[int, RowChanges] = {}
        """Rows that the adapters in these slots replace."""

    def pack(self, quantization: kernels.Quantization | None) -> None:
        """Weights of 4 bits become int8, as logits need the precision."""
        super().pack(quantization and "int8")

    def forward(self, x: Tensor, adapters: kernels.AdapterRows | None = None) -> Tensor:
        """`[rows, hidden_size]` → float32 logits `[rows, vocab_size]`, the same on every rank."""
        out = self.product(x, self.bias)
        for slot, change in self.changes.items():
            if adapters is not None and adapters.count(slot):
                own = adapters.of_slot(slot)
                bias = None if self.bias is None else self.bias[change.numbers]
                out[own[:, None], change.numbers] = F.linear(x[own], change.rows, bias).to(out.dtype)
        logits = self._parallel.all_gather(self._changed(out, x, adapters))
        return logits[:, : self._vocab_size].float()
