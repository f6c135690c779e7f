"""The sizes of an encoder, in addition to those of `quire.engine.models.model_spec`. No torch.

In BERT-like models every token of a prompt attends to all others, or to those near it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.engine.models.attention_spec import AttentionSpec
from quire.engine.models.model_spec import ModelSpec
from quire.engine.models.spec_parts import NormSpec


@dataclass(frozen=True, kw_only=True)
class EncoderAttentionSpec(AttentionSpec):
    """Bidirectional attention inside a prompt. There is no KV cache."""

    reach: int | None = None
    """The largest distance from a query to the keys that it attends to, on both sides; None: all keys."""

    def kv_shape(self, tp: int) -> tuple[int, int, int]:
        """See `AttentionSpec`."""
        return 0, self.kv_heads_per_rank(tp), self.head_dim


@dataclass(frozen=True, kw_only=True)
class EncoderSpec(ModelSpec):
    """The sizes that determine every shape of an encoder.

    `norm` normalizes the embeddings. There is no head.
    """

    is_post_norm: bool = True
    """A layer's post-norms normalize the residual stream after the addition of attention or feed-forward (BERT).
    Otherwise norms are before these, as in decoders.
    """
    final_norm: NormSpec | None = None
    """After the last layer."""

    padding_id: int | None = None
    """RoBERTa: padding tokens have this id and position. Other tokens are numbered from `position_offset`, without
    counting padding."""
    token_types: int = 0
    """Rows of the token type embedding; row 0 is added to every token. 0: no such embedding."""
    relative_buckets: int = 0
    """MPNet: buckets of relative distances, each with a bias per head on the attention scores; 0: none."""

    @property
    def num_heads(self) -> int:
        attention = self.layers[0].attention
        assert attention is not None
        return attention.num_heads

    def stage_parameters(self, stages: Sequence[range], stage: int, tp: int) -> int:
        """See `ModelSpec`; an encoder has a single stage."""
        biases = self.relative_buckets * self.num_heads // tp
        final = self.final_norm.num_parameters(self.hidden_size) if self.final_norm is not None else 0
        return super().stage_parameters(stages, stage, tp) + self.token_types * self.hidden_size + biases + final
