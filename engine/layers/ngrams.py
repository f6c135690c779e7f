"""Embeddings of a token and the tokens before it (Qwen4-Exp, 2026), as described by
`quire.engine.architecture.residual_spec.NGramSpec`; replicated on all ranks, except the embedding.

The ids of the tokens before a step are kept beside the recurrent state of the layer, like the inputs of convolutions:
as digits that every type of activations has exactly, which a convolution with weights of 0 and 1 reads.
"""

from __future__ import annotations

from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire import kernels
from quire.engine.architecture.residual_spec import ID_DIGITS, NGramSpec
from quire.engine.distributed.communicator import Parallel
from quire.engine.layers.embedding import VocabParallelEmbedding
from quire.engine.layers.from_spec import FromSpec
from quire.engine.layers.residual import StreamNorm
from quire.kernels import RecurrentState, StateSegments

_LEAST = 1e-6
"""Lower bound of a gate's size before its root, as in the authors' code."""


class NGrams(nn.Module):
    """The contribution of the n-grams to the residual streams."""

    def __init__(self, spec: NGramSpec, hidden_size: int, parallel: Parallel) -> None:
        super().__init__()
        self._spec, self._hidden_size, streams = spec, hidden_size, spec.num_streams
        own = FromSpec(spec.parameters(hidden_size))
        self.embedding = VocabParallelEmbedding(spec.total_rows, spec.head_dim, parallel, spec.part_rows)
        self.key, self.value = own.column_parallel("ngrams.key"), own.column_parallel("ngrams.value")
        self.key_norm, self.query_norm, self.conv_norm = (StreamNorm(spec.norm, streams, hidden_size) for _ in range(3))
        self.conv = own.weight("ngrams", "conv")
        before, device = spec.tokens - 1, torch.get_default_device()
        with torch.device("cpu"):  # see `Rotary`
            rows = torch.tensor([spec.head_rows, [0, *accumulate(spec.head_rows)][:-1]])
            powers = 256 ** torch.arange(ID_DIGITS)
            taps = F.pad(torch.eye(before).flip(1).repeat_interleave(ID_DIGITS, dim=0), (0, 1))
        self._head_rows, self._first_rows = rows.to(device).unbind()
        self._powers, self._taps = powers.to(device), taps.to(device)
        """Place values of digits; and the weights that read the digits at each distance, but not the own token's."""

    def forward(
        self,
        x: Tensor,
        token_ids: Tensor,
        segments: StateSegments,
        state: RecurrentState,
        adapters: kernels.AdapterRows | None = None,
    ) -> Tensor:
        """The streams `[tokens, streams * hidden_size]` → the same; updates the inputs in `state`."""
        spec, (ids, inputs) = self._spec, state.others
        rows = self.embedding(self._rows_of(token_ids, ids, segments, x.dtype)).flatten(1)
        keys, queries = (
            torch.unflatten(each, -1, (spec.num_streams, -1))
            for each in (self.key_norm(self.key(rows, adapters)), self.query_norm(x))
        )
        gate = (keys * queries).sum(dim=-1, keepdim=True) * self._hidden_size**-0.5
        gate = gate.abs().clamp(min=_LEAST).sqrt() * gate.sign()
        values: Tensor = (gate.sigmoid() * self.value(rows, adapters)[:, None]).flatten(1)
        taps = self.conv.new_zeros(len(self.conv), spec.conv_span)
        taps[:, :: spec.tokens] = self.conv[:, 0]
        return values + kernels.causal_conv(self.conv_norm(values), taps, None, inputs, segments)

    def _rows_of(self, token_ids: Tensor, kept: Tensor, segments: StateSegments, dtype: torch.dtype) -> Tensor:
        """The row of each head, `[tokens, heads]`."""
        spec = self._spec
        seen = [token_ids, *self.ids_before(token_ids, kept, segments, dtype)]
        mixed, found, heads = token_ids * spec.multipliers[0], [], len(spec.head_rows) // (spec.tokens - 1)
        for place in range(1, spec.tokens):
            mixed = mixed ^ (seen[place] * spec.multipliers[place])
            found.append(mixed[:, None] % self._head_rows[(place - 1) * heads : place * heads])
        return torch.cat(found, dim=-1) + self._first_rows

    def ids_before(self, token_ids: Tensor, kept: Tensor, segments: StateSegments, dtype: torch.dtype) -> list[Tensor]:
        """The tokens at each distance before, `[tokens]` each. After an end of text, there are none."""
        spec = self._spec
        digits = ((token_ids + 1)[:, None] // self._powers % 256).to(dtype).repeat(1, spec.tokens - 1)
        read = kernels.causal_conv(digits, self._taps, None, kept, segments, silu=False)
        ids = (torch.unflatten(read, -1, (-1, ID_DIGITS)).long() * self._powers).sum(dim=-1) - 1
        ids = ids.where(ids >= 0, spec.end_token)
        found, is_over = [], torch.zeros_like(token_ids, dtype=torch.bool)
        for own in ids.unbind(1):
            found.append(own.masked_fill(is_over, spec.end_token))
            is_over = is_over | (own == spec.end_token)
        return found
