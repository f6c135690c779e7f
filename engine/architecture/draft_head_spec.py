"""The description of a head that drafts: layers that continue a target's hidden states. No torch here.

At each position it reads the target's hidden state there and the *next* token, and predicts the token after that one.
Multi-token prediction (DeepSeek-V3, 2024) trains such a head with the model, and stores it in the model's checkpoint.
EAGLE (Li et al. 2024) and EAGLE-3 (Li et al. 2025) train it for a finished model, and store it in a checkpoint of its
own; EAGLE-3 reads the residual streams of three layers, projected, in place of the last layer's.

A checkpoint may have several heads for multi-token prediction, each of which predicts a token further ahead. Head n,
counted from 0, reads at each position a hidden state and the token n + 1 places after it, and predicts the token after
that one. The hidden state is the target's (MiMo-V2), or the previous head's (DeepSeek-V3's paper, Step 3.5).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from quire.engine.architecture.model_spec import ModelSpec
from quire.engine.architecture.residual_spec import ConnectionSpec
from quire.engine.architecture.spec_parts import MatrixShape, NormSpec, Parameters, Units, linear, norm


@dataclass(frozen=True, kw_only=True)
class DraftHeadSpec(ModelSpec):
    """One head that drafts, or several. `name` names the family whose layers they have, and `vocab_size` is the
    target's. The sizes of norms and projections are per head. If there are several heads, each has one layer."""

    method: Literal["mtp", "eagle", "eagle3"]
    target_layers: int
    target_hidden_size: int
    num_heads: int = 1
    is_chained: bool = False
    """Each head reads the residual stream of the head before it; otherwise all read the target's hidden state."""
    first_layer: int = 0
    """The number of the first layer in the names of its tensors."""
    reads_normed: bool = True
    """Whether it reads the target's output after its last norm; otherwise it reads the residual stream."""
    reads_layers: tuple[int, ...] = ()
    """The target's layers whose inputs it reads (`ModelSpec.aux_layers`); empty: the target's output."""
    hidden_norm: NormSpec | None = None
    """Applied to the hidden state; `embedding_norm` is applied to the embedded token."""
    joins: Literal["embedding first", "hidden first", "sum"] | None = None
    """How a projection combines the embedded token and the hidden state: it reads them side by side, or there is one
    projection for each, whose results are added, in all residual streams. None: the layer's attention reads both, and a
    projection combines the inputs of `reads_layers`."""
    projection_bias: bool = False
    draft_vocab_size: int = 0
    """Number of tokens that its own matrix computes logits for."""
    has_embedding: bool = False
    """Whether it has an embedding of its own; otherwise it uses the target's."""
    has_head: bool = False
    """The same for the matrix that computes logits; each of several heads has its own."""
    feeds_normed: bool = False
    """After a draft, the head's own output replaces the target's hidden state: true takes it after `norm`, false
    before."""
    stored_layer: str = ""
    """Prefix of the names of its layer's tensors, if it is not the same for all checkpoints."""

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.num_heads in (1, len(self.layers))

    @property
    def is_in_target(self) -> bool:
        """Whether the target's checkpoint has it."""
        return self.method == "mtp"

    @property
    def projection_inputs(self) -> int:
        """Features that the projection reads; 0: there is none."""
        if self.joins == "sum":
            return self.hidden_size
        return 2 * self.hidden_size if self.joins else len(self.reads_layers) * self.target_hidden_size

    @property
    def stage_width(self) -> int:
        """Features per token that are in memory beside the residual streams: the head's inputs."""
        read = self.stream_width + self.hidden_size if self.joins == "sum" else self.projection_inputs
        return self.hidden_size + read

    def outer_matrices(self, tp: int) -> tuple[MatrixShape, MatrixShape]:
        """See `ModelSpec`; matrices that it shares with its target have no rows."""
        rows = self.has_head * self.num_heads * -(-self.draft_vocab_size // tp)
        embedding = MatrixShape(self.has_embedding * -(-self.vocab_size // tp), self.hidden_size, module="embedding")
        return embedding, embedding._replace(rows=rows, module="head")

    def parameters_before(self) -> Parameters:
        """The embedding. In its target's checkpoint, a head may have a copy of the target's embedding."""
        if self.has_embedding or self.is_in_target:
            yield from linear("embedding", self.vocab_size, self.hidden_size, rows_of=self._tokens(self.vocab_size))

    def parameters_after(self, *, has_head: bool = True) -> Parameters:
        """Parameters of all heads, before and after their layers. The field `has_head` says if they have matrices for
        logits."""
        for _ in range(self.num_heads):
            yield from self.head_parameters()

    def head_parameters(self) -> Parameters:
        """Parameters of each head, before and after its layers."""
        hidden = self.hidden_size
        yield from norm("heads.embedding_norm", self.embedding_norm, hidden)
        yield from norm("heads.hidden_norm", self.hidden_norm, hidden)
        if inputs := self.projection_inputs:
            yield from linear("heads.projection", hidden, inputs, bias=self.projection_bias)
        if self.joins == "sum":
            yield from linear("heads.embedding_projection", hidden, hidden)
        if isinstance(self.streams, ConnectionSpec):
            yield from self.streams.last_parameters("heads.merger", hidden)
        yield from norm("heads.norm", self.norm, hidden)
        if self.has_head:
            size = self.draft_vocab_size
            yield from linear("heads.head", size, hidden, rows_of=self._tokens(size))

    def stage_parameters(self, stages: Sequence[range], stage: int, tp: int) -> int:
        """Parameters on one rank, without an embedding that is a copy of the target's."""
        count = sum(layer.num_parameters(self.hidden_size, tp) for layer in self.layers)
        embedding, _ = self.outer_matrices(tp)
        return count + sum(each.elements(tp) for each in self.parameters_after()) + embedding.elements

    @staticmethod
    def _tokens(number: int) -> Units:
        return Units(number, "tokens", "padding")
