"""Descriptions of attention layers, and what they require on a rank. No torch here; see
`quire.engine.architecture.model_spec`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from quire.engine.architecture.spec_parts import MatrixShape, NormSpec, QueryScaleSpec, RopeSpec
from quire.engine.protocol.errors import ConfigError

KEYS_AND_VALUES_AT_ONCE = 1 << 24
"""Maximum number of key and value elements that MLA computes from its cache at once, and of elements of queries with
which it attends to selected tokens at once."""
SCORES_AT_ONCE = 1 << 22
"""Number of scores, in float32, that selecting tokens has in memory at once, and of slots of selected blocks."""


@dataclass(frozen=True, kw_only=True)
class BlockIndexerSpec:
    """Scores blocks of the tokens before a query, so that it attends only to the best ones (MiniMax-M3, 2026).

    A token has one key, of `head_dim` features, in a cache of its own on every rank. Each KV head has a query, and its
    heads attend to the blocks with its highest scores: the largest `query @ key` of a block's tokens. Queries and keys
    are normalized and rotated like those of the attention.
    """

    head_dim: int
    norm: NormSpec
    """Of a head's query, and with another weight of the key."""
    block_size: int
    """Tokens of a block."""
    num_blocks: int
    """Blocks that a query attends to at most."""
    num_local_blocks: int
    """Those of them that are the query's own and the ones just before, whatever their scores."""

    def __post_init__(self) -> None:
        if not 0 < self.num_local_blocks <= self.num_blocks or self.block_size < 1:
            raise ConfigError(
                f"{self.num_local_blocks} local blocks among {self.num_blocks} of {self.block_size} tokens are not "
                "supported: a query attends to its own block"
            )

    @property
    def top_k(self) -> int:
        """Tokens that a query attends to at most."""
        return self.num_blocks * self.block_size

    def features(self, num_kv_heads: int) -> int:
        """Features of a token that a rank scores it with."""
        return num_kv_heads * self.head_dim

    def matrices(self, hidden: int, num_kv_heads: int) -> Iterator[MatrixShape]:
        yield MatrixShape(self.features(num_kv_heads), hidden, 1, "attention.indexer.query")
        yield MatrixShape(self.head_dim, hidden, 1, "attention.indexer.key")

    def workspace(self, length: int, num_kv_heads: int) -> int:
        """See `AttentionSpec`: scores, the selected blocks, and slots of 8 bytes, which are computed from numbers as
        long."""
        blocks = length * num_kv_heads * self.num_blocks
        return 4 * (SCORES_AT_ONCE + blocks) + 16 * min(SCORES_AT_ONCE, blocks * self.block_size)


@dataclass(frozen=True, kw_only=True)
class GroupIndexerSpec:
    """Scores groups of the tokens before a query, so that it attends only to the best ones, and to the tokens after the
    last complete group (Qwen4-Exp, 2026).

    A token has one key, of `head_dim` features, in a cache of its own on every rank, where the group's key replaces
    that of its last token. A group's key is the mean of the tokens' keys, normalized, and rotated by the position of
    the first one. Its score is the sum over the heads of `relu(query @ key)`, and all heads attend to the same groups.
    """

    num_heads: int
    head_dim: int
    norm: NormSpec
    """Of a head's query, and with another weight of a group's key."""
    size: int
    """Tokens of a group."""
    num_groups: int
    """Groups that a query attends to at most."""

    def __post_init__(self) -> None:
        if self.size < 1 or self.num_groups < 1:
            raise ConfigError(f"{self.num_groups} groups of {self.size} tokens are not possible")

    @property
    def top_k(self) -> int:
        """Tokens that a query attends to at most."""
        return (self.num_groups + 1) * self.size - 1

    def features(self, num_kv_heads: int) -> int:
        """See `BlockIndexerSpec`; those of a group are divided among its tokens."""
        return self.num_heads * self.head_dim // self.size

    def matrices(self, hidden: int, num_kv_heads: int) -> Iterator[MatrixShape]:
        yield MatrixShape((self.num_heads + 1) * self.head_dim, hidden, 1, "attention.indexer.inputs")

    def workspace(self, length: int, num_kv_heads: int) -> int:
        """See `AttentionSpec`: scores, and slots of 8 bytes, which are computed from numbers as long."""
        return 32 * SCORES_AT_ONCE + 8 * length * self.top_k


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Grouped-query attention (Ainslie et al. 2023) with `num_kv_heads` heads of keys and values."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: RopeSpec | None
    v_head_dim: int = 0
    """Features of a head's values, at most head_dim; 0: head_dim. The cache pads them."""
    values_are_keys: bool = False
    """Values are the keys before their norm and rotation."""
    value_norm: NormSpec | None = None
    """Of each head's values; without a weight."""
    query_scale: QueryScaleSpec | None = None
    window: int | None = None
    """Keys that a query attends to, including its own; None: all."""
    is_chunked: bool = False
    """A query attends only to keys of its own chunk of `window` tokens (Llama 4)."""
    softcap: float = 0.0
    """Scores become `softcap * tanh(score / softcap)`; 0: unchanged."""
    has_sinks: bool = False
    """Each head has a logit that takes part in the softmax without a value."""
    has_own_sinks: bool = False
    """Each query has such logits of its own."""
    num_biases: int = 0
    """Keys, up to a query's own, whose scores get a bias that depends on the query and the distance."""
    alibi: float = 0.0
    """Scores decrease with the distance (Press et al. 2022), by slopes multiplied by this; 0: no ALiBi."""
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: NormSpec | None = None
    clip: float = 0.0
    """Queries, keys and values are limited to this, in both directions, after their norm; 0: they are not."""
    output_multiplier: float = 1.0
    """Factor on the layer's output."""
    output_gate: Literal["features", "heads"] | None = None
    """The output is multiplied by the sigmoid of a gate, one for each feature or each head, which is computed like the
    queries."""
    qk_norm_over: Literal["head", "each head", "all heads"] = "head"
    """"head": each head's features, with the same weight for all heads; "each head": with a weight for each head;
    "all heads": the features of all heads together."""
    norm_after_rope: bool = False
    """Queries and keys are rotated before they are normalized."""
    kv_source: int | None = None
    """The number of the layer before whose keys and values are read, and none are computed; None: the layer's own."""
    input_size: int = 0
    """Features that queries, keys and values are computed from; 0: those of the hidden state."""
    indexer: BlockIndexerSpec | GroupIndexerSpec | None = None
    """What selects the tokens that a query attends to; None: it attends to all."""

    def __post_init__(self) -> None:
        if self.indexer is not None and self.rope is not None and self.rope.dim > self.indexer.head_dim:
            raise ConfigError(
                f"index_head_dim {self.indexer.head_dim} is less than the {self.rope.dim} rotary features"
            )

    @property
    def top_k(self) -> int | None:
        """Tokens that a query attends to at most, if they are selected."""
        return None if self.indexer is None else self.indexer.top_k

    @property
    def value_dim(self) -> int:
        return self.v_head_dim or self.head_dim

    @property
    def gate_dim(self) -> int:
        """Gates of a head."""
        return {None: 0, "features": self.head_dim, "heads": 1}[self.output_gate]

    def kv_heads_per_rank(self, tp: int) -> int:
        """KV heads on each rank; with fewer heads than ranks, each head is replicated."""
        return max(1, self.num_kv_heads // tp)

    def matrices(self, hidden: int, tp: int) -> Iterator[MatrixShape]:
        heads = self.num_heads // tp
        yield MatrixShape(self._qkv_rows(tp), self.input_size or hidden, 1, "attention.qkv")
        if self.indexer is not None:
            yield from self.indexer.matrices(hidden, self.kv_heads_per_rank(tp))
        yield MatrixShape(hidden, heads * self.value_dim, 1, "attention.output", self.num_heads * self.value_dim)

    def _qkv_rows(self, tp: int) -> int:
        queries = self.num_heads // tp * (self.head_dim + self.gate_dim)
        if self.kv_source is not None:
            return queries
        sides = self.head_dim + (0 if self.values_are_keys else self.value_dim)
        return queries + self.kv_heads_per_rank(tp) * sides

    def num_other_parameters(self, hidden: int, tp: int) -> int:
        """Parameters other than the matrices."""
        heads, kv_heads = self.num_heads // tp, self.kv_heads_per_rank(tp)
        count = self.qkv_bias * self._qkv_rows(tp) + self.output_bias * hidden
        if self.qk_norm is not None:
            has_keys = self.kv_source is None
            normed = 1 + has_keys if self.qk_norm_over == "head" else heads + has_keys * kv_heads
            count += self.qk_norm.num_parameters(normed * self.head_dim)
        if self.indexer is not None:
            count += 2 * self.indexer.norm.num_parameters(self.indexer.head_dim)
        return count + self.has_sinks * heads

    def workspace(self, length: int, tp: int) -> int:
        """Elements that attention over a sequence of `length` needs in addition to the tokens' own."""
        if self.indexer is None or length <= self.indexer.top_k:
            return 0
        return self.indexer.workspace(length, self.kv_heads_per_rank(tp))

    def kv_shape(self, tp: int) -> tuple[int, int, int]:
        """A token's entry in the KV cache of a rank: sides (keys and values), heads, elements per head."""
        return 2, self.kv_heads_per_rank(tp), self.head_dim

    def index_shape(self) -> tuple[int, int, int] | None:
        """A token's entry in the indexer's cache of every rank."""
        return None if self.indexer is None else (1, 1, self.indexer.head_dim)

    def index_features(self, tp: int) -> int:
        """Features of a token that a rank scores it with."""
        return 0 if self.indexer is None else self.indexer.features(self.kv_heads_per_rank(tp))

    @property
    def tokens_per_key(self) -> int:
        """Tokens with a key of an indexer."""
        return self.indexer.size if isinstance(self.indexer, GroupIndexerSpec) else 1

    def layout_errors(self, tp: int) -> Iterator[str]:
        """What `tp` ranks cannot divide."""
        if self.num_heads % tp:
            yield f"{self.num_heads} attention heads"
        if self.num_kv_heads % tp and tp % self.num_kv_heads:
            yield f"{self.num_kv_heads} KV heads"


@dataclass(frozen=True, kw_only=True)
class IndexerSpec:
    """Scores the tokens before a query, so that it attends only to the best ones (DeepSeek-V3.2, 2025).

    A token has one key, of `head_dim` features, in a cache of its own. The score is the sum over the heads of
    `weight * relu(query @ key)`, with weights that are computed from the hidden state. Replicated on all ranks.

    With a `pool`, groups of tokens are scored (GLM-5.3, 2026). A group's key is the sum of its tokens' keys, weighted
    for each feature by the softmax of their gates over the group, with a bias for each place in it. A query attends to
    all tokens of the best groups, and to those after the last complete group.
    """

    num_heads: int
    head_dim: int
    norm: NormSpec
    """Of the keys."""
    rope: RopeSpec
    """Of the first features of queries and keys."""
    rotates_last: bool = False
    """In the checkpoint, these are the last ones; loading reorders them."""
    pool: int = 1
    """Tokens of a group."""

    def __post_init__(self) -> None:
        if self.rope.dim > self.head_dim:
            raise ConfigError(f"index_head_dim {self.head_dim} is less than the {self.rope.dim} rotary features")

    @property
    def row(self) -> int:
        """Features that are kept of a token: its key, and with a pool its gates."""
        return self.head_dim * (1 + (self.pool > 1))

    def matrices(self, hidden: int, q_lora_rank: int) -> Iterator[MatrixShape]:
        yield MatrixShape(self.num_heads * self.head_dim, q_lora_rank, 1, "attention.indexer.query")
        yield MatrixShape(self.head_dim, hidden, 1, "attention.indexer.key")

    def num_other_parameters(self, hidden: int) -> int:
        """Parameters other than the matrices."""
        return self.num_float32_parameters(hidden) + self.norm.num_parameters(self.head_dim)

    def num_float32_parameters(self, hidden: int) -> int:
        """Parameters that are always float32: those that the heads' weights and the gates are computed with, and the
        biases of gates."""
        return self.num_heads * hidden + (self.pool > 1) * (hidden + self.pool) * self.head_dim


@dataclass(frozen=True, kw_only=True)
class MLASpec:
    """Multi-head latent attention (DeepSeek-V2, 2024): one vector per token determines the keys and values of all
    heads.

    The cache holds that vector, of `kv_lora_rank` elements, and the rotary part of the key, which all heads share.
    """

    num_heads: int
    q_lora_rank: int | None
    """Size of the vector that queries are computed from; None: they are computed from the hidden state."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    """Features of a head's queries and keys that are not rotated; another `rope.dim` are."""
    v_head_dim: int
    scale: float
    rope: RopeSpec
    norm: NormSpec
    rotary_norm: NormSpec | None = None
    """Of the key's rotary part, before its rotation."""
    latent_multiplier: float = 1.0
    """Factor on the vector that keys and values are computed from, after its norm."""
    bias: bool = False
    query_scale: QueryScaleSpec | None = None
    window: int | None = None
    """See `AttentionSpec`."""
    output_gate: Literal["heads", "features", "queries"] | None = None
    """The output is multiplied by the sigmoid of a gate. "heads": one for each head, and "features": one for each
    feature, computed from the hidden state. "queries": one for each feature, which is computed together with the
    queries, and both from the latent query, normalized and as it is (A.X K2)."""
    has_sinks: bool = False
    """See `AttentionSpec`."""
    top_k: int | None = None
    """Tokens that a query attends to at most, those with the highest scores; None: all. With a pool, those of
    `top_k // pool` groups and of an incomplete one."""
    indexer: IndexerSpec | None = None
    """What selects them; None: the last layer before that has an indexer."""

    def __post_init__(self) -> None:
        if self.indexer is not None and self.q_lora_rank is None:
            raise ConfigError("sparse attention (index_topk) needs q_lora_rank")
        assert self.q_lora_rank is not None or self.output_gate != "queries"
        assert self.window is None or self.top_k is None

    @property
    def head_dim(self) -> int:
        return self.qk_nope_head_dim + self.rope.dim

    @property
    def query_dim(self) -> int:
        """Rows of a head in the projection to queries."""
        return self.head_dim + (self.v_head_dim if self.output_gate == "queries" else 0)

    @property
    def gate_dim(self) -> int:
        """Gates of a head that are computed from the hidden state."""
        return {"heads": 1, "features": self.v_head_dim}.get(self.output_gate or "", 0)

    def query_inputs(self, hidden: int) -> int:
        """Features that queries are computed from."""
        return (self.q_lora_rank or hidden) * (2 if self.output_gate == "queries" else 1)

    @property
    def shares_selection(self) -> bool:
        """Whether the layer attends to what a layer before has selected."""
        return self.top_k is not None and self.indexer is None

    def matrices(self, hidden: int, tp: int) -> Iterator[MatrixShape]:
        heads = self.num_heads // tp
        yield MatrixShape((self.q_lora_rank or 0) + self.kv_lora_rank + self.rope.dim, hidden, 1, "attention.down")
        yield MatrixShape(heads * self.query_dim, self.query_inputs(hidden), 1, "attention.query")
        if self.gate_dim:
            yield MatrixShape(heads * self.gate_dim, hidden, 1, "attention.gate")
        yield MatrixShape(hidden, heads * self.v_head_dim, 1, "attention.output", self.num_heads * self.v_head_dim)
        if self.indexer is not None:
            yield from self.indexer.matrices(hidden, self.q_lora_rank or 0)

    def num_other_parameters(self, hidden: int, tp: int) -> int:
        """Parameters other than the matrices; the up-projection to keys and values is included, as it is never
        quantized."""
        count = self.num_heads // tp * (self.qk_nope_head_dim + self.v_head_dim) * self.kv_lora_rank
        count += self.bias * ((self.q_lora_rank or 0) + self.kv_lora_rank + self.rope.dim + hidden)
        count += 0 if self.indexer is None else self.indexer.num_other_parameters(hidden)
        count += self.has_sinks * self.num_heads // tp
        count += 0 if self.rotary_norm is None else self.rotary_norm.num_parameters(self.rope.dim)
        return count + self.norm.num_parameters(self.kv_lora_rank) + self.norm.num_parameters(self.q_lora_rank or 0)

    def workspace(self, length: int, tp: int) -> int:
        """See `AttentionSpec`: the sequence's vectors, and the padded keys and values of some heads. Sparse attention
        needs queries, results and scores."""
        row, heads = self.kv_lora_rank + self.rope.dim, self.num_heads // tp
        needed = length * row + 3 * min(KEYS_AND_VALUES_AT_ONCE, 2 * length * heads * self.head_dim)
        if self.top_k is None or length <= self.top_k:
            return needed
        slots = 0 if self.indexer is None or self.indexer.pool == 1 else 28 * SCORES_AT_ONCE
        return max(needed, 3 * min(KEYS_AND_VALUES_AT_ONCE, length * heads * row)) + 4 * SCORES_AT_ONCE + slots

    def kv_shape(self, tp: int) -> tuple[int, int, int]:
        """A token's entry in the KV cache of every rank: one vector, which is the key and value of all heads."""
        return 1, 1, self.kv_lora_rank + self.rope.dim

    def index_shape(self) -> tuple[int, int, int] | None:
        """A token's entry in the indexer's cache of every rank."""
        return None if self.indexer is None else (1, 1, self.indexer.row)

    def index_features(self, tp: int) -> int:
        """Features of a token that every rank scores it with; those of a group are divided among its tokens."""
        return 0 if self.indexer is None else self.indexer.num_heads * self.indexer.head_dim // self.indexer.pool

    @property
    def tokens_per_key(self) -> int:
        """Tokens with a key of an indexer."""
        return 1 if self.indexer is None else self.indexer.pool

    def layout_errors(self, tp: int) -> Iterator[str]:
        """What `tp` ranks cannot divide."""
        if self.num_heads % tp:
            yield f"{self.num_heads} attention heads"


@dataclass(frozen=True, kw_only=True)
class CompressorSpec:
    """Compresses each group of `ratio` tokens to one entry (DeepSeek-V4, 2026): the sum of their vectors, weighted for
    each feature by the softmax of their gates over the group. A bias is added to the gate of each place in a group."""

    ratio: int
    overlaps: bool
    """An entry is of its own group and of the one before, for which tokens have another vector and gate."""
    norm: NormSpec
    """Of the entries."""

    def __post_init__(self) -> None:
        if self.ratio < 1:
            raise ConfigError(f"a compression rate of {self.ratio} is not supported; it must be at least 1")

    @property
    def span(self) -> int:
        """Tokens that an entry is computed from."""
        return self.ratio * (1 + self.overlaps)

    def width(self, head_dim: int) -> int:
        """Features of a token's vectors, and as many of its gates, for entries of `head_dim`."""
        return (1 + self.overlaps) * head_dim

    def num_other_parameters(self, head_dim: int) -> int:
        """Parameters other than the matrices."""
        return self.num_float32_parameters(head_dim) + self.norm.num_parameters(head_dim)

    def num_float32_parameters(self, head_dim: int) -> int:
        """Parameters that are always float32: the biases."""
        return self.ratio * self.width(head_dim)


@dataclass(frozen=True, kw_only=True)
class EntryIndexerSpec:
    """Scores entries as `IndexerSpec` does tokens; their keys are compressed like them. Replicated on all ranks."""

    num_heads: int
    head_dim: int
    top_k: int
    """Entries that a query attends to at most."""


@dataclass(frozen=True, kw_only=True)
class CompressedAttentionSpec:
    """Attention to the tokens of a window and to compressed entries of all tokens (DeepSeek-V4, 2026).

    One vector of `head_dim` for each token or entry is the key and value of all heads. Its last `rope.dim` features are
    rotated, an entry's by the position of its first token; the same features of results are rotated back, so that they
    depend on distances. A query attends to an entry when its own token or one before is the last of the entry's group.
    """

    num_heads: int
    head_dim: int
    q_lora_rank: int
    """Size of the vector that queries are computed from."""
    scale: float
    rope: RopeSpec
    norm: NormSpec
    """Of keys, and of what queries are computed from."""
    query_norm: NormSpec
    """Of each head's query; without a weight."""
    window: int
    """Tokens that a query attends to, including its own."""
    output_groups: int
    """The heads are divided into so many groups, whose results are projected separately to `output_rank` features."""
    output_rank: int
    compressor: CompressorSpec | None = None
    """None: there are no entries."""
    indexer: EntryIndexerSpec | None = None
    """What selects entries; None: a query attends to all of them."""

    def __post_init__(self) -> None:
        if self.rope.dim > self.head_dim:
            raise ConfigError(f"head_dim {self.head_dim} is less than the {self.rope.dim} rotary features")
        if self.indexer is not None and self.compressor is None:
            raise ConfigError("an indexer needs entries to select from")
        if self.num_heads % self.output_groups:
            raise ConfigError(f"{self.num_heads} heads cannot be divided into o_groups {self.output_groups}")
        if self.indexer is not None and self.rope.dim > self.indexer.head_dim:
            raise ConfigError(
                f"index_head_dim {self.indexer.head_dim} is less than the {self.rope.dim} rotary features"
            )

    @property
    def compressor_ratio(self) -> int:
        """Tokens of an entry; 0: there are no entries."""
        return 0 if self.compressor is None else self.compressor.ratio

    @property
    def tokens_per_key(self) -> int:
        """Tokens with a key of an indexer."""
        return 1 if self.indexer is None else self.compressor_ratio

    @property
    def kept_window(self) -> int:
        """Tokens of which vectors are kept: for the window, and for the entry of a query's own token."""
        return self.window if self.compressor is None else max(self.window, self.compressor.span)

    @property
    def inputs_width(self) -> int:
        """Values of a token that compressors need: vectors and gates."""
        if self.compressor is None:
            return 0
        sizes = self.head_dim + (0 if self.indexer is None else self.indexer.head_dim)
        return 2 * self.compressor.width(sizes)

    def max_entries(self, length: int) -> int:
        """Entries that a query attends to at most, after `length` tokens."""
        if self.compressor is None:
            return 0
        count = length // self.compressor.ratio
        return count if self.indexer is None else min(count, self.indexer.top_k)

    def matrices(self, hidden: int, tp: int) -> Iterator[MatrixShape]:
        inner = self.output_groups * self.output_rank
        yield MatrixShape(self.q_lora_rank + self.head_dim, hidden, 1, "attention.down")
        yield MatrixShape(self.num_heads * self.head_dim // tp, self.q_lora_rank, 1, "attention.query")
        yield MatrixShape(hidden, inner // tp, 1, "attention.output", inner)
        if self.compressor is not None:
            rows = 2 * self.compressor.width(self.head_dim)
            yield MatrixShape(rows, hidden, 1, "attention.compressor.inputs")
        if self.compressor is not None and self.indexer is not None:
            rows = 2 * self.compressor.width(self.indexer.head_dim)
            yield MatrixShape(rows, hidden, 1, "attention.indexer.compressor.inputs")
            queries = self.indexer.num_heads * self.indexer.head_dim
            yield MatrixShape(queries, self.q_lora_rank, 1, "attention.indexer.query")

    def num_other_parameters(self, hidden: int, tp: int) -> int:
        """Parameters other than the matrices; the projections of groups are included, as they are never quantized."""
        count = self.output_rank * self.num_heads * self.head_dim // tp + self.num_heads // tp
        count += self.norm.num_parameters(self.q_lora_rank + self.head_dim)
        if self.compressor is not None:
            count += self.compressor.num_other_parameters(self.head_dim)
        if self.compressor is not None and self.indexer is not None:
            count += self.compressor.num_other_parameters(self.indexer.head_dim) + self.indexer.num_heads * hidden
        return count

    def num_float32_parameters(self, hidden: int) -> int:
        """Parameters that are always float32."""
        if self.compressor is None:
            return 0
        count = self.compressor.num_float32_parameters(self.head_dim)
        if self.indexer is not None:
            count += self.compressor.num_float32_parameters(self.indexer.head_dim) + self.indexer.num_heads * hidden
        return count

    def workspace(self, length: int, tp: int) -> int:
        """See `AttentionSpec`: what compressors need of some groups, the slots of some queries, and scores."""
        return 32 * SCORES_AT_ONCE

    def kv_shape(self, tp: int) -> tuple[int, int, int]:
        """The vector of a token or entry on every rank."""
        return 1, 1, self.head_dim

    def index_shape(self) -> tuple[int, int, int] | None:
        """An entry's key in the indexer's cache of every rank."""
        return None if self.indexer is None else (1, 1, self.indexer.head_dim)

    def index_features(self, tp: int) -> int:
        """Features of a token that a rank scores it with; those of an entry are divided among its tokens."""
        if self.indexer is None:
            return 0
        return self.indexer.num_heads * self.indexer.head_dim // self.compressor_ratio

    def layout_errors(self, tp: int) -> Iterator[str]:
        """What `tp` ranks cannot divide."""
        if self.num_heads % tp:
            yield f"{self.num_heads} attention heads"
        if self.output_groups % tp:
            yield f"{self.output_groups} groups of the attention's output"


AnyAttentionSpec = AttentionSpec | MLASpec | CompressedAttentionSpec
