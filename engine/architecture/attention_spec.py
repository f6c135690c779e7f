"""Descriptions of attention layers, and their requirements on a rank. No torch here; see
`quire.engine.architecture.model_spec`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quire.engine.architecture.spec_parts import (
    NormSpec,
    Parameter,
    Parameters,
    QueryScaleSpec,
    RopeSpec,
    Units,
    linear,
    norm,
    vector,
)
from quire.engine.protocol.errors import ConfigError

KEYS_AND_VALUES_AT_ONCE = 1 << 24
"""Maximum number of key and value elements that MLA computes from its cache at once, and of query elements with which
it attends to selected tokens at once."""
GATHERED_AT_ONCE = 1 << 26
"""Maximum number of query elements of all ranks that divide tokens with which MLA attends to the rows of the cache at
once, unless one request has more."""
SCORES_AT_ONCE = 1 << 22
"""Number of scores, in float32, that selecting tokens has in memory at once, and of slots of selected blocks."""


@dataclass(frozen=True, kw_only=True)
class BlockIndexerSpec:
    """Scores blocks of the tokens before a query, so that it attends only to the best ones (MiniMax-M3, 2026).

    A token has one key, of `head_dim` features, in a cache of its own on every rank. Each KV head has a query, and its
    heads attend to the blocks with its highest scores: the largest `query @ key` of a block's tokens. Queries and keys
    are normalized and rotated like the attention's.
    """

    head_dim: int
    norm: NormSpec
    """Applied to a head's query and, with a separate weight, to the key."""
    block_size: int
    """Tokens per block."""
    num_blocks: int
    """Maximum number of blocks that a query attends to."""
    num_local_blocks: int
    """How many of them are the query's own block and the blocks just before it, whatever their scores."""

    def __post_init__(self) -> None:
        if not 0 < self.num_local_blocks <= self.num_blocks or self.block_size < 1:
            raise ConfigError(
                f"{self.num_local_blocks} local blocks among {self.num_blocks} of {self.block_size} tokens are not "
                "supported: a query attends to its own block"
            )

    @property
    def top_k(self) -> int:
        """Maximum number of tokens that a query attends to."""
        return self.num_blocks * self.block_size

    def features(self, num_kv_heads: int) -> int:
        """Features per token that a rank uses for scoring."""
        return num_kv_heads * self.head_dim

    def workspace(self, length: int, num_kv_heads: int) -> int:
        """See `AttentionSpec`: scores, the selected blocks, and slots of 8 bytes, which are computed from numbers as
        long."""
        blocks = length * num_kv_heads * self.num_blocks
        return 4 * (SCORES_AT_ONCE + blocks) + 16 * min(SCORES_AT_ONCE, blocks * self.block_size)

    def parameters(self, width: int, kv_heads: Units) -> Parameters:
        queries = kv_heads.number * self.head_dim
        yield from linear("attention.indexer.query", queries, width, rows_of=kv_heads)
        yield from linear("attention.indexer.key", self.head_dim, width)


@dataclass(frozen=True, kw_only=True)
class GroupIndexerSpec:
    """Scores groups of the tokens before a query, so that it attends only to the best ones, and to the tokens after the
    last complete group (Qwen4-Exp, 2026).

    A token has one key, of `head_dim` features, in a cache of its own on every rank, where the group's key replaces its
    last token's key. A group's key is the mean of the tokens' keys, normalized, and rotated by the position of the
    first one. Its score is the sum over the heads of `relu(query @ key)`, and all heads attend to the same groups.
    """

    num_heads: int
    head_dim: int
    norm: NormSpec
    """Applied to a head's query and, with a separate weight, to a group's key."""
    size: int
    """Tokens per group."""
    num_groups: int
    """Maximum number of groups that a query attends to."""

    def __post_init__(self) -> None:
        if self.size < 1 or self.num_groups < 1:
            raise ConfigError(f"{self.num_groups} groups of {self.size} tokens are not possible")

    @property
    def top_k(self) -> int:
        """Maximum number of tokens that a query attends to."""
        return (self.num_groups + 1) * self.size - 1

    def features(self, num_kv_heads: int) -> int:
        """See `BlockIndexerSpec`; a group's features are divided among its tokens."""
        return self.num_heads * self.head_dim // self.size

    def workspace(self, length: int, num_kv_heads: int) -> int:
        """See `AttentionSpec`: scores, and slots of 8 bytes, which are computed from numbers as long."""
        return 32 * SCORES_AT_ONCE + 8 * length * self.top_k

    def parameters(self, width: int, kv_heads: Units) -> Parameters:
        sizes = {"q": self.num_heads * self.head_dim, "k": self.head_dim}
        yield from linear("attention.indexer.inputs", sizes, width)


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
    """Applied to each head's values, without a weight."""
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
    """Queries, keys and values are clamped to plus or minus this after their norm; 0: no limit."""
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
    """The number of an earlier layer whose keys and values are read; None: the layer computes its own."""
    input_size: int = 0
    """Number of features that queries, keys and values are computed from; 0: the hidden size."""
    indexer: BlockIndexerSpec | GroupIndexerSpec | None = None
    """Selects the tokens that a query attends to; None: it attends to all."""

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
        """Gates per head."""
        return {None: 0, "features": self.head_dim, "heads": 1}[self.output_gate]

    def kv_heads_per_rank(self, tp: int) -> int:
        """KV heads on each rank; with fewer heads than ranks, each head is replicated."""
        return max(1, self.num_kv_heads // tp)

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
        """Features per token that a rank uses for scoring."""
        return 0 if self.indexer is None else self.indexer.features(self.kv_heads_per_rank(tp))

    @property
    def tokens_per_key(self) -> int:
        """Tokens per key of an indexer."""
        return self.indexer.size if isinstance(self.indexer, GroupIndexerSpec) else 1

    def parameters(self, hidden: int) -> Parameters:
        """All parameters, of a layer whose input has `hidden` features."""
        width, has_keys = self.input_size or hidden, self.kv_source is None
        heads = Units(self.num_heads, "attention heads")
        kv_heads = Units(self.num_kv_heads, "KV heads", "copies")
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        rows = {"q": queries}
        if has_keys:
            rows["k"] = keys
        if has_keys and not self.values_are_keys:
            rows["v"] = self.num_kv_heads * self.value_dim
        if self.output_gate:
            rows["gate"] = self.num_heads * self.gate_dim
        units = {"q": heads, "k": kv_heads, "v": kv_heads, "gate": heads}
        yield from linear("attention.qkv", rows, width, rows_of=units, bias=self.qkv_bias)
        inner = self.num_heads * self.value_dim
        yield from linear("attention.output", hidden, inner, columns_of=heads, bias=self.output_bias)
        if self.indexer is not None:
            yield from self.indexer.parameters(width, kv_heads)
            yield from norm("attention.indexer.query_norm", self.indexer.norm, self.indexer.head_dim)
            yield from norm("attention.indexer.key_norm", self.indexer.norm, self.indexer.head_dim)
        if self.has_sinks:
            yield vector("attention", "sinks", self.num_heads, heads)
        if self.qk_norm is None:
            return
        for name, part, size in (("query_norm", "q", queries), ("key_norm", "k", keys))[: 1 + has_keys]:
            if self.qk_norm_over == "head":
                yield from norm(f"attention.{name}", self.qk_norm, self.head_dim)
            else:
                yield Parameter(f"attention.{name}", "weight", {part: (size,)}, units)


@dataclass(frozen=True, kw_only=True)
class IndexerSpec:
    """Scores the tokens before a query, so that it attends only to the best ones (DeepSeek-V3.2, 2025).

    A token has one key, of `head_dim` features, in a cache of its own. The score is the sum over the heads of
    `weight * relu(query @ key)`, with weights that are computed from the hidden state. Replicated on all ranks.

    With a `pool`, groups of tokens are scored (GLM-5.3, 2026). A group's key is the sum of its tokens' keys, weighted
    for each feature by the softmax of their gates over the group, with a bias for each place in it. A query attends to
    all tokens of the best groups, and to the tokens after the last complete group.
    """

    num_heads: int
    head_dim: int
    norm: NormSpec
    """Applied to the keys."""
    rope: RopeSpec
    """Applied to the first features of queries and keys."""
    rotates_last: bool = False
    """The checkpoint rotates the last features instead; loading reorders them."""
    pool: int = 1
    """Tokens per group."""

    def __post_init__(self) -> None:
        if self.rope.dim > self.head_dim:
            raise ConfigError(f"index_head_dim {self.head_dim} is less than the {self.rope.dim} rotary features")

    @property
    def row(self) -> int:
        """Features kept per token: its key and, with a pool, its gates."""
        return self.head_dim * (1 + (self.pool > 1))

    def parameters(self, hidden: int, q_lora_rank: int) -> Parameters:
        """All parameters. The parameters for the heads' weights and the gates are always float32."""
        module, size = "attention.indexer", self.head_dim
        yield from linear(f"{module}.query", self.num_heads * size, q_lora_rank)
        yield from linear(f"{module}.key", size, hidden)
        if self.pool > 1:
            yield from linear(f"{module}.gate", size, hidden, is_float32=True)
            yield Parameter(module, "position_bias", {"": (self.pool, size)}, is_float32=True)
        yield from norm(f"{module}.key_norm", self.norm, size)
        yield from linear(f"{module}.weights", self.num_heads, hidden, is_float32=True)


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
    """Applied to the key's rotary part before its rotation."""
    latent_multiplier: float = 1.0
    """Factor on the vector that keys and values are computed from, after its norm."""
    bias: bool = False
    query_scale: QueryScaleSpec | None = None
    window: int | None = None
    """See `AttentionSpec`."""
    output_gate: Literal["heads", "features", "queries"] | None = None
    """The output is multiplied by the sigmoid of a gate. "heads": one for each head, and "features": one for each
    feature, computed from the hidden state. "queries": one for each feature, computed together with the queries; both
    are computed from the normalized and the plain latent query (A.X K2)."""
    has_sinks: bool = False
    """See `AttentionSpec`."""
    top_k: int | None = None
    """Maximum number of tokens that a query attends to, chosen by the highest scores; None: all. With a pool, these
    are the tokens of `top_k // pool` groups and of an incomplete group."""
    indexer: IndexerSpec | None = None
    """Selects these tokens; None: the last earlier layer with an indexer selects them."""

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
        """Rows per head in the projection to queries."""
        return self.head_dim + (self.v_head_dim if self.output_gate == "queries" else 0)

    @property
    def gate_dim(self) -> int:
        """Gates per head that are computed from the hidden state."""
        return {"heads": 1, "features": self.v_head_dim}.get(self.output_gate or "", 0)

    @property
    def shares_selection(self) -> bool:
        """Whether the layer attends to the tokens that an earlier layer selected."""
        return self.top_k is not None and self.indexer is None

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
        """Features per token that every rank uses for scoring; a group's features are divided among its tokens."""
        return 0 if self.indexer is None else self.indexer.num_heads * self.indexer.head_dim // self.indexer.pool

    @property
    def tokens_per_key(self) -> int:
        """Tokens per key of an indexer."""
        return 1 if self.indexer is None else self.indexer.pool

    def parameters(self, hidden: int) -> Parameters:
        """See `AttentionSpec`. The projection up to keys and values is never quantized."""
        heads, row = Units(self.num_heads, "attention heads"), self.kv_lora_rank + self.rope.dim
        latents = {"kv": row} if self.q_lora_rank is None else {"q": self.q_lora_rank, "kv": row}
        yield from linear("attention.down", latents, hidden, bias=self.bias)
        if self.q_lora_rank is not None:
            yield from norm("attention.query_norm", self.norm, self.q_lora_rank)
        queries = self.num_heads * self.query_dim
        inputs = (self.q_lora_rank or hidden) * (2 if self.output_gate == "queries" else 1)
        yield from linear("attention.query", queries, inputs, rows_of=heads)
        yield from norm("attention.latent_norm", self.norm, self.kv_lora_rank)
        yield from norm("attention.rotary_norm", self.rotary_norm, self.rope.dim)
        up = self.num_heads * (self.qk_nope_head_dim + self.v_head_dim)
        yield from linear("attention.up", up, self.kv_lora_rank, rows_of=heads, is_quantizable=False)
        if self.indexer is not None:
            assert self.q_lora_rank is not None
            yield from self.indexer.parameters(hidden, self.q_lora_rank)
        if self.gate_dim:
            yield from linear("attention.gate", self.num_heads * self.gate_dim, hidden, rows_of=heads)
        if self.has_sinks:
            yield vector("attention", "sinks", self.num_heads, heads)
        inner = self.num_heads * self.v_head_dim
        yield from linear("attention.output", hidden, inner, columns_of=heads, bias=self.bias)


@dataclass(frozen=True, kw_only=True)
class CompressorSpec:
    """Compresses each group of `ratio` tokens to one entry (DeepSeek-V4, 2026): the sum of their vectors, weighted for
    each feature by the softmax of their gates over the group. A bias is added to the gate of each place in a group."""

    ratio: int
    overlaps: bool
    """An entry combines its own group and the group before, for which tokens have another vector and gate."""
    norm: NormSpec
    """Applied to the entries."""

    def __post_init__(self) -> None:
        if self.ratio < 1:
            raise ConfigError(f"a compression rate of {self.ratio} is not supported; it must be at least 1")

    @property
    def span(self) -> int:
        """Tokens that an entry is computed from."""
        return self.ratio * (1 + self.overlaps)

    def width(self, head_dim: int) -> int:
        """Features of a token's vectors for entries of `head_dim`; its gates have as many."""
        return (1 + self.overlaps) * head_dim

    def parameters(self, owner: str, head_dim: int, hidden: int) -> Parameters:
        """The parameters for entries of `head_dim`, in the module `owner`. The biases are always float32."""
        module, features = f"{owner}.compressor", self.width(head_dim)
        yield from linear(f"{module}.inputs", dict.fromkeys(("kv", "gate"), features), hidden)
        yield Parameter(module, "position_bias", {"": (self.ratio, features)}, is_float32=True)
        yield from norm(f"{module}.norm", self.norm, head_dim)


@dataclass(frozen=True, kw_only=True)
class EntryIndexerSpec:
    """Scores entries as `IndexerSpec` scores tokens. Keys are compressed like the entries. Replicated on all ranks."""

    num_heads: int
    head_dim: int
    top_k: int
    """Maximum number of entries that a query attends to."""


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
    """Applied to keys, and to the vector that queries are computed from."""
    query_norm: NormSpec
    """Applied to each head's query, without a weight."""
    window: int
    """Tokens that a query attends to, including its own."""
    output_groups: int
    """Number of groups that the heads are divided into. Their results are projected separately to `output_rank`
    features."""
    output_rank: int
    compressor: CompressorSpec | None = None
    """None: there are no entries."""
    indexer: EntryIndexerSpec | None = None
    """Selects entries; None: a query attends to all of them."""

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
        """Tokens per entry; 0: there are no entries."""
        return 0 if self.compressor is None else self.compressor.ratio

    @property
    def tokens_per_key(self) -> int:
        """Tokens per key of an indexer."""
        return 1 if self.indexer is None else self.compressor_ratio

    @property
    def kept_window(self) -> int:
        """Tokens whose vectors are kept: for the window, and for the entry of a query's own token."""
        return self.window if self.compressor is None else max(self.window, self.compressor.span)

    @property
    def inputs_width(self) -> int:
        """Values per token that compressors need: vectors and gates."""
        if self.compressor is None:
            return 0
        sizes = self.head_dim + (0 if self.indexer is None else self.indexer.head_dim)
        return 2 * self.compressor.width(sizes)

    def max_entries(self, length: int) -> int:
        """Maximum number of entries that a query attends to after `length` tokens."""
        if self.compressor is None:
            return 0
        count = length // self.compressor.ratio
        return count if self.indexer is None else min(count, self.indexer.top_k)

    def workspace(self, length: int, tp: int) -> int:
        """See `AttentionSpec`: the compressors' values for some groups, the slots of some queries, and scores."""
        return 32 * SCORES_AT_ONCE

    def kv_shape(self, tp: int) -> tuple[int, int, int]:
        """The vector of a token or entry on every rank."""
        return 1, 1, self.head_dim

    def index_shape(self) -> tuple[int, int, int] | None:
        """An entry's key in the indexer's cache of every rank."""
        return None if self.indexer is None else (1, 1, self.indexer.head_dim)

    def index_features(self, tp: int) -> int:
        """Features per token that a rank uses for scoring; an entry's features are divided among its tokens."""
        if self.indexer is None:
            return 0
        return self.indexer.num_heads * self.indexer.head_dim // self.compressor_ratio

    def parameters(self, hidden: int) -> Parameters:
        """See `AttentionSpec`. The projections of groups are never quantized."""
        heads = Units(self.num_heads, "attention heads")
        groups = Units(self.output_groups, "groups of the attention's output")
        features, inner = self.num_heads * self.head_dim, self.output_groups * self.output_rank
        yield from linear("attention.down", {"q": self.q_lora_rank, "kv": self.head_dim}, hidden)
        yield from norm("attention.query_norm", self.norm, self.q_lora_rank)
        yield from linear("attention.query", features, self.q_lora_rank, rows_of=heads)
        yield from norm("attention.key_norm", self.norm, self.head_dim)
        yield vector("attention", "sinks", self.num_heads, heads)
        group = features // self.output_groups
        yield from linear("attention.group_output", inner, group, rows_of=groups, is_quantizable=False)
        yield from linear("attention.output", hidden, inner, columns_of=groups)
        if (indexer := self.indexer) is not None:
            queries = indexer.num_heads * indexer.head_dim
            yield from linear("attention.indexer.query", queries, self.q_lora_rank)
            yield from linear("attention.indexer.weights", indexer.num_heads, hidden, is_float32=True)
        if self.compressor is not None:
            yield from self.compressor.parameters("attention", self.head_dim, hidden)
            if indexer is not None:
                yield from self.compressor.parameters("attention.indexer", indexer.head_dim, hidden)


AnyAttentionSpec = AttentionSpec | MLASpec | CompressedAttentionSpec
