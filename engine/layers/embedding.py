"""Embedding and head, with the vocabulary sharded over the ranks of a stage."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from quire import kernels
from quire.engine.distributed.communicator import Parallel
from quire.engine.layers.linear import Linear
from quire.engine.layers.weight import Shard, Weight


def vocab_weight(vocab_size: int, parallel: Parallel, *columns: int) -> Weight:
    """This rank's rows `[ceil(vocab_size / ranks), *columns]`; those of the last ranks are padded."""
    rows = -(-vocab_size // parallel.size)
    start = min(parallel.rank * rows, vocab_size)
    return Weight((rows, *columns), Shard((vocab_size, *columns), start, min(rows, vocab_size - start)))


class VocabParallelEmbedding(nn.Module):
    """Token ids to vectors; each rank looks up the ids in its shard, and the ranks' results are summed."""

    def __init__(self, vocab_size: int, hidden_size: int, parallel: Parallel) -> None:
        super().__init__()
        self._parallel = parallel
        self.weight = vocab_weight(vocab_size, parallel, hidden_size)

    def forward(self, token_ids: Tensor) -> Tensor:
        """`[tokens]` → `[tokens, hidden_size]`, the same on every rank."""
        if self._parallel.size == 1:
            return F.embedding(token_ids, self.weight)
        rows = len(self.weight)
        local = token_ids - self._parallel.rank * rows
        foreign = (local < 0) | (local >= rows)
        vectors = F.embedding(local.masked_fill(foreign, 0), self.weight)
        return self._parallel.all_reduce(vectors.masked_fill_(foreign[:, None], 0.0))


class ParallelLMHead(Linear):
    """Vectors to logits. A tied head shares the embedding's weight."""

    def __init__(
        self, vocab_size: int, hidden_size: int, parallel: Parallel, tied: Weight | None = None, *, bias: bool = False
    ) -> None:
        super().__init__()
        self._parallel, self._vocab_size, self._tied = parallel, vocab_size, tied is not None
        self.weight = vocab_weight(vocab_size, parallel, hidden_size) if tied is None else tied
        self.bias = vocab_weight(vocab_size, parallel) if bias else None

    @property
    def may_be_quantized(self) -> bool:
        return not self._tied

    def pack(self, quantization: kernels.Quantization | None) -> None:
        """Pack as every linear layer does; a tied weight is kept for the embedding. Weights of 4 bits become int8, as
        logits need the precision."""
        weight = self.weight.data
        super().pack("int8" if quantization else None)
        if self._tied:
            self.weight.data = weight

    def forward(self, x: Tensor) -> Tensor:
        """`[rows, hidden_size]` → float32 logits `[rows, vocab_size]`, the same on every rank."""
        logits = self._parallel.all_gather(self.product(x, self.bias))
        return logits[:, : self._vocab_size].float()
