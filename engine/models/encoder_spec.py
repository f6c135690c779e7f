"""An encoder as numbers: what it is beside what `quire.engine.models.model_spec` describes. No torch here.

BERT and its relatives are one stack, in which every token of a prompt sees every other one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.engine.models.model_spec import AttentionSpec, ModelSpec


@dataclass(frozen=True, kw_only=True)
class EncoderAttentionSpec(AttentionSpec):
    """Every token of a prompt sees every other one. Nothing is kept."""

    def kv_shape(self, tp: int) -> tuple[int, int, int]:
        """See `AttentionSpec`."""
        return 0, self.kv_heads_per_rank(tp), self.head_dim


@dataclass(frozen=True, kw_only=True)
class EncoderSpec(ModelSpec):
    """The numbers that fix every shape of an encoder.

    The norms behind attention and feed-forward are of the residual stream, to which these have been added; `norm` is of
    the embeddings. There is no head.
    """

    padding_id: int | None = None
    """With RoBERTa's positions: only other tokens than this one count, and this one's position is its id. The first
    `position_offset` positions are no other token's."""
    token_types: int = 0
    """Rows of the token type embedding, of which the first is added to every token; 0: there is none."""
    relative_buckets: int = 0
    """MPNet's: buckets of distances, for each of which every head has a bias on its scores; 0: none."""

    def stage_parameters(self, stages: Sequence[range], stage: int, tp: int) -> int:
        """See `ModelSpec`; an encoder is one stage."""
        biases = self.relative_buckets * self.layers[0].attention.num_heads // tp
        return super().stage_parameters(stages, stage, tp) + self.token_types * self.hidden_size + biases
