"""A decoder's description: what each of its layers consists of, and what that requires on a rank. No torch here.

`quire.engine.models.families` derives a `ModelSpec` from Hugging Face's `config.json`; `quire.engine.models` builds the
modules. Each layer has its own description (equal ones are one object), so that windows, dense first layers and layers
without positions are not special cases. Sizes are in features and parameters; `hidden` is the model's hidden size.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from quire.engine.protocol.errors import ConfigError

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]


KEYS_AND_VALUES_AT_ONCE = 1 << 24
"""Maximum number of key and value elements that MLA computes from its cache at once, and of elements of queries with
which it attends to selected tokens at once."""
SCORES_AT_ONCE = 1 << 22
"""Number of scores, in float32, that selecting tokens has in memory at once."""


class MatrixShape(NamedTuple):
    """`number` weights `[rows, columns]` of linear layers on one rank."""

    rows: int
    columns: int
    number: int = 1
    module: str = ""
    """The layer's module that has them, such as attention.qkv."""
    inputs: int = 0
    """Columns of the whole weight, of which the rank has some; 0: it has all."""

    @property
    def elements(self) -> int:
        return self.rows * self.columns * self.number


@dataclass(frozen=True, kw_only=True)
class NormSpec:
    """Normalization: by root mean square (Zhang & Sennrich 2019), or by mean and variance (Ba et al. 2016)."""

    eps: float
    kind: Literal["rms", "layer"] = "rms"
    bias: bool = False
    offset: float = 0.0
    """Added to the weight: Gemma stores weights minus 1."""
    has_weight: bool = True

    def num_parameters(self, size: int) -> int:
        return size * (self.has_weight + self.bias)


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Rotary position embedding (Su et al. 2021) of a head's first `dim` features. `kind` is transformers'
    rope_type, or none: the features are not rotated."""

    theta: float
    dim: int
    kind: Literal["default", "none", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional"] = "default"
    factor: float = 1.0
    original_max_position: int = 0
    """Positions in training, before the context was extended."""
    low_freq_factor: float = 0.0
    high_freq_factor: float = 0.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    amplitude: float = 1.0
    """Factor on cosines and sines; scores are multiplied by its square."""
    rotated_pairs: int = 0
    """Pairs that proportional positions rotate; the others stay as they are."""
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    is_interleaved: bool = False
    """The checkpoint rotates neighbouring features. Loading reorders them into halves, which leaves dot products
    unchanged."""

    def __post_init__(self) -> None:
        if self.dim % 2 or self.dim < 2:
            raise ConfigError(f"rotary positions need an even number of features, at least 2; heads have {self.dim}")


@dataclass(frozen=True, kw_only=True)
class QueryScaleSpec:
    """A factor on the queries that grows with their position p: `1 + weight * log(1 + (p + offset) // every)`
    (Llama 4)."""

    weight: float
    every: int
    offset: int = 0


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
    alibi: float = 0.0
    """Scores decrease with the distance (Press et al. 2022), by slopes multiplied by this; 0: no ALiBi."""
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: NormSpec | None = None
    output_multiplier: float = 1.0
    """Factor on the layer's output."""
    output_gate: bool = False
    """The output is multiplied by the sigmoid of a gate, which is computed like the queries."""
    qk_norm_over: Literal["head", "each head", "all heads"] = "head"
    """"head": each head's features, with the same weight for all heads; "each head": with a weight for each head;
    "all heads": the features of all heads together."""
    norm_after_rope: bool = False
    """Queries and keys are rotated before they are normalized."""
    kv_source: int | None = None
    """The number of the layer before whose keys and values are read, and none are computed; None: the layer's own."""
    input_size: int = 0
    """Features that queries, keys and values are computed from; 0: those of the hidden state."""

    @property
    def value_dim(self) -> int:
        return self.v_head_dim or self.head_dim

    def kv_heads_per_rank(self, tp: int) -> int:
        """KV heads on each rank; with fewer heads than ranks, each head is replicated."""
        return max(1, self.num_kv_heads // tp)

    def matrices(self, hidden: int, tp: int) -> Iterator[MatrixShape]:
        heads = self.num_heads // tp
        yield MatrixShape(self._qkv_rows(tp), self.input_size or hidden, 1, "attention.qkv")
        yield MatrixShape(hidden, heads * self.value_dim, 1, "attention.output", self.num_heads * self.value_dim)

    def _qkv_rows(self, tp: int) -> int:
        queries = self.num_heads // tp * (1 + self.output_gate) * self.head_dim
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
        return count + self.has_sinks * heads

    def workspace(self, length: int, tp: int) -> int:
        """Elements that attention over a sequence of `length` needs in addition to the tokens' own."""
        return 0

    def kv_shape(self, tp: int) -> tuple[int, int, int]:
        """A token's entry in the KV cache of a rank: sides (keys and values), heads, elements per head."""
        return 2, self.kv_heads_per_rank(tp), self.head_dim

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
    """

    num_heads: int
    head_dim: int
    norm: NormSpec
    """Of the keys."""
    rope: RopeSpec
    """Of the first features of queries and keys."""

    def __post_init__(self) -> None:
        if self.rope.dim > self.head_dim:
            raise ConfigError(f"index_head_dim {self.head_dim} is less than the {self.rope.dim} rotary features")

    def matrices(self, hidden: int, q_lora_rank: int) -> Iterator[MatrixShape]:
        yield MatrixShape(self.num_heads * self.head_dim, q_lora_rank, 1, "attention.indexer.query")
        yield MatrixShape(self.head_dim, hidden, 1, "attention.indexer.key")

    def num_other_parameters(self, hidden: int) -> int:
        """Parameters other than the matrices."""
        return self.num_float32_parameters(hidden) + self.norm.num_parameters(self.head_dim)

    def num_float32_parameters(self, hidden: int) -> int:
        """Parameters that are always float32: those that the heads' weights are computed with."""
        return self.num_heads * hidden


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
    bias: bool = False
    query_scale: QueryScaleSpec | None = None
    window: int | None = None
    output_gate: bool = False
    """Each head's output is multiplied by the sigmoid of a gate."""
    top_k: int | None = None
    """Tokens that a query attends to at most, those with the highest scores; None: all."""
    indexer: IndexerSpec | None = None
    """What selects them; None: the last layer before that has an indexer."""

    def __post_init__(self) -> None:
        if self.indexer is not None and self.q_lora_rank is None:
            raise ConfigError("sparse attention (index_topk) needs q_lora_rank")

    @property
    def head_dim(self) -> int:
        return self.qk_nope_head_dim + self.rope.dim

    @property
    def shares_selection(self) -> bool:
        """Whether the layer attends to what a layer before has selected."""
        return self.top_k is not None and self.indexer is None

    def matrices(self, hidden: int, tp: int) -> Iterator[MatrixShape]:
        heads = self.num_heads // tp
        yield MatrixShape((self.q_lora_rank or 0) + self.kv_lora_rank + self.rope.dim, hidden, 1, "attention.down")
        yield MatrixShape(heads * self.head_dim, self.q_lora_rank or hidden, 1, "attention.query")
        if self.output_gate:
            yield MatrixShape(heads, hidden, 1, "attention.gate")
        yield MatrixShape(hidden, heads * self.v_head_dim, 1, "attention.output", self.num_heads * self.v_head_dim)
        if self.indexer is not None:
            yield from self.indexer.matrices(hidden, self.q_lora_rank or 0)

    def num_other_parameters(self, hidden: int, tp: int) -> int:
        """Parameters other than the matrices; the up-projection to keys and values is included, as it is never
        quantized."""
        count = self.num_heads // tp * (self.qk_nope_head_dim + self.v_head_dim) * self.kv_lora_rank
        count += self.bias * ((self.q_lora_rank or 0) + self.kv_lora_rank + self.rope.dim + hidden)
        count += 0 if self.indexer is None else self.indexer.num_other_parameters(hidden)
        return count + self.norm.num_parameters(self.kv_lora_rank) + self.norm.num_parameters(self.q_lora_rank or 0)

    def workspace(self, length: int, tp: int) -> int:
        """See `AttentionSpec`: the sequence's vectors, and the padded keys and values of some heads. Sparse attention
        needs queries, results and scores."""
        row, heads = self.kv_lora_rank + self.rope.dim, self.num_heads // tp
        needed = length * row + 3 * min(KEYS_AND_VALUES_AT_ONCE, 2 * length * heads * self.head_dim)
        if self.top_k is None or length <= self.top_k:
            return needed
        return max(needed, 3 * min(KEYS_AND_VALUES_AT_ONCE, length * heads * row)) + 4 * SCORES_AT_ONCE

    def kv_shape(self, tp: int) -> tuple[int, int, int]:
        """A token's entry in the KV cache of every rank: one vector, which is the key and value of all heads."""
        return 1, 1, self.kv_lora_rank + self.rope.dim

    def index_shape(self) -> tuple[int, int, int] | None:
        """A token's entry in the indexer's cache of every rank."""
        return None if self.indexer is None else (1, 1, self.indexer.head_dim)

    def layout_errors(self, tp: int) -> Iterator[str]:
        """What `tp` ranks cannot divide."""
        if self.num_heads % tp:
            yield f"{self.num_heads} attention heads"


@dataclass(frozen=True, kw_only=True)
class RecurrentSpec(ABC):
    """A layer with a recurrent state of fixed size for each request: float32 matrices, and the last inputs of a causal
    convolution. The base of all kinds."""

    conv_size: int = 1
    """Tokens that the convolution sees, including its own; 1: there is none."""

    @property
    @abstractmethod
    def num_heads(self) -> int:
        """What the ranks share: there can be no more of them."""

    @abstractmethod
    def state_shape(self, tp: int) -> tuple[int, int, int]:
        """The state's matrices on a rank: how many, rows (key features) and columns (value features)."""

    @abstractmethod
    def channels(self, tp: int) -> int:
        """Features on a rank that the convolution applies to."""

    @abstractmethod
    def matrices(self, hidden: int, tp: int) -> Iterator[MatrixShape]:
        """The weights of linear layers on one rank."""

    @abstractmethod
    def num_other_parameters(self, hidden: int, tp: int) -> int:
        """Parameters other than the matrices."""

    @abstractmethod
    def layout_errors(self, tp: int) -> Iterator[str]:
        """What `tp` ranks cannot divide."""

    def input_shape(self, tp: int) -> tuple[int, int]:
        """The kept inputs of the convolution on a rank: tokens and channels."""
        return self.conv_size - 1, self.channels(tp)

    def state_bytes(self, tp: int, width: int) -> int:
        """Size of a request's state on a rank, for activations of `width` bytes."""
        return 4 * math.prod(self.state_shape(tp)) + math.prod(self.input_shape(tp)) * width

    def workspace(self, length: int, tp: int) -> int:
        """See `AttentionSpec`."""
        return 0


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNetSpec(RecurrentSpec):
    """Linear attention by the gated delta rule (Yang et al. 2024), after a causal convolution."""

    num_value_heads: int
    """Each key head belongs to several value heads, one after another."""
    num_key_heads: int
    key_head_dim: int
    value_head_dim: int
    norm: NormSpec
    """Of each head's output, before its gate."""
    beta_scale: float = 1.0
    """The largest weight of an update; with 2 a state may change its sign (Grazzi et al. 2024)."""

    @property
    def num_heads(self) -> int:
        return self.num_value_heads

    def state_shape(self, tp: int) -> tuple[int, int, int]:
        return self.num_value_heads // tp, self.key_head_dim, self.value_head_dim

    def channels(self, tp: int) -> int:
        """Queries, keys and values."""
        return (2 * self.num_key_heads * self.key_head_dim + self.num_value_heads * self.value_head_dim) // tp

    def matrices(self, hidden: int, tp: int) -> Iterator[MatrixShape]:
        inner = self.num_value_heads * self.value_head_dim
        yield MatrixShape(self.channels(tp) + inner // tp, hidden, 1, "state.input")
        yield MatrixShape(2 * self.num_value_heads // tp, hidden, 1, "state.gates")
        yield MatrixShape(hidden, inner // tp, 1, "state.output", inner)

    def num_other_parameters(self, hidden: int, tp: int) -> int:
        return self.channels(tp) * self.conv_size + 2 * self.num_value_heads // tp + self.value_head_dim

    def layout_errors(self, tp: int) -> Iterator[str]:
        if self.num_value_heads % tp:
            yield f"{self.num_value_heads} value heads"
        if self.num_key_heads % tp:
            yield f"{self.num_key_heads} key heads"


@dataclass(frozen=True, kw_only=True)
class ShortConvSpec(RecurrentSpec):
    """A gated convolution (LFM2, 2025): `output(c * conv(b * x))`, with b, c and x computed from the hidden state."""

    width: int
    """Features of each of the three."""
    bias: bool = False

    @property
    def num_heads(self) -> int:
        return self.width

    def state_shape(self, tp: int) -> tuple[int, int, int]:
        return 0, 0, 0

    def channels(self, tp: int) -> int:
        return self.width // tp

    def matrices(self, hidden: int, tp: int) -> Iterator[MatrixShape]:
        yield MatrixShape(3 * self.width // tp, hidden, 1, "state.input")
        yield MatrixShape(hidden, self.width // tp, 1, "state.output", self.width)

    def num_other_parameters(self, hidden: int, tp: int) -> int:
        return self.width // tp * self.conv_size + self.bias * (4 * self.width // tp + hidden)

    def layout_errors(self, tp: int) -> Iterator[str]:
        if self.width % tp:
            yield f"{self.width} channels"


@dataclass(frozen=True, kw_only=True)
class Mamba2Spec(RecurrentSpec):
    """Mamba-2's state space (Dao & Gu 2024): linear attention with a decay for each head, after a causal convolution.

    A head's values are weighted by a step, which also determines the decay; keys and queries (B and C) are shared by
    the heads of a group. The output is gated and normalized.
    """

    num_value_heads: int
    value_head_dim: int
    groups: int
    state_size: int
    """Features of a key."""
    norm: NormSpec | None
    """Over the features of each group; None: the output is gated only."""
    norm_before_gate: bool = False
    conv_bias: bool = True
    input_bias: bool = False
    output_bias: bool = False
    step_limits: tuple[float, float] = (0.0, math.inf)
    multipliers: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    """Factors on gates, values, keys, queries and steps."""
    output_multiplier: float = 1.0

    def __post_init__(self) -> None:
        if self.groups < 1 or self.num_value_heads % self.groups:
            raise ConfigError(f"{self.num_value_heads} state-space heads cannot be divided into {self.groups} groups")

    @property
    def num_heads(self) -> int:
        return self.num_value_heads

    @property
    def width(self) -> int:
        """Features of all heads."""
        return self.num_value_heads * self.value_head_dim

    def state_shape(self, tp: int) -> tuple[int, int, int]:
        return self.num_value_heads // tp, self.state_size, self.value_head_dim

    def channels(self, tp: int) -> int:
        """Values, keys and queries; the keys and queries of a single group are replicated."""
        return self.width // tp + 2 * max(1, self.groups // tp) * self.state_size

    def matrices(self, hidden: int, tp: int) -> Iterator[MatrixShape]:
        rows = self.width // tp + self.channels(tp) + self.num_value_heads // tp
        yield MatrixShape(rows, hidden, 1, "state.input")
        yield MatrixShape(hidden, self.width // tp, 1, "state.output", self.width)

    def num_other_parameters(self, hidden: int, tp: int) -> int:
        heads, channels, inner = self.num_value_heads // tp, self.channels(tp), self.width // tp
        count = channels * (self.conv_size + self.conv_bias) + 3 * heads + (self.norm is not None) * inner
        return count + self.input_bias * (inner + channels + heads) + self.output_bias * hidden

    def layout_errors(self, tp: int) -> Iterator[str]:
        if self.num_value_heads % tp:
            yield f"{self.num_value_heads} state-space heads"
        if self.groups % tp and self.groups > 1:
            yield f"{self.groups} groups of state-space heads"


@dataclass(frozen=True, kw_only=True)
class KimiDeltaSpec(RecurrentSpec):
    """Kimi Delta Attention (2025): the gated delta rule with a decay for each key feature, after a causal convolution.

    Keys and values have the same size, and each head has its own.
    """

    num_value_heads: int
    value_head_dim: int
    rank: int | None
    """Size of the vectors that decays and output gates are computed from; None: from the hidden state."""
    lower_bound: float | None = None
    """Decays are this times a sigmoid, rather than minus a softplus."""
    norm: NormSpec
    """Of each head's output, before its gate."""
    has_rate_grid: bool = False
    """The checkpoint has the heads' rates as `[1, 1, heads, 1]`."""

    @property
    def num_heads(self) -> int:
        return self.num_value_heads

    @property
    def width(self) -> int:
        """Features of all heads."""
        return self.num_value_heads * self.value_head_dim

    def state_shape(self, tp: int) -> tuple[int, int, int]:
        return self.num_value_heads // tp, self.value_head_dim, self.value_head_dim

    def channels(self, tp: int) -> int:
        """Queries, keys and values."""
        return 3 * self.width // tp

    def matrices(self, hidden: int, tp: int) -> Iterator[MatrixShape]:
        gates = 2 * self.width // tp if self.rank is None else 2 * self.rank
        yield MatrixShape(self.channels(tp) + self.num_value_heads // tp + gates, hidden, 1, "state.input")
        if self.rank is not None:
            yield MatrixShape(self.width // tp, self.rank, 1, "state.decay_up")
            yield MatrixShape(self.width // tp, self.rank, 1, "state.gate_up")
        yield MatrixShape(hidden, self.width // tp, 1, "state.output", self.width)

    def num_other_parameters(self, hidden: int, tp: int) -> int:
        vectors = self.num_value_heads // tp + self.width // tp + self.value_head_dim
        return self.channels(tp) * self.conv_size + vectors

    def layout_errors(self, tp: int) -> Iterator[str]:
        if self.num_value_heads % tp:
            yield f"{self.num_value_heads} heads of Kimi Delta Attention"


@dataclass(frozen=True, kw_only=True)
class LightningSpec(RecurrentSpec):
    """Lightning attention (Qin et al. 2024): linear attention with a constant decay for each head, of rates like those
    of ALiBi's slopes. Queries, keys and values go through silu; the output is normalized over all heads and gated."""

    num_value_heads: int
    value_head_dim: int
    rate: float
    """Factor on the heads' rates."""
    norm: NormSpec
    output_multiplier: float = 1.0

    @property
    def num_heads(self) -> int:
        return self.num_value_heads

    @property
    def width(self) -> int:
        """Features of all heads."""
        return self.num_value_heads * self.value_head_dim

    def state_shape(self, tp: int) -> tuple[int, int, int]:
        return self.num_value_heads // tp, self.value_head_dim, self.value_head_dim

    def channels(self, tp: int) -> int:
        return 0

    def matrices(self, hidden: int, tp: int) -> Iterator[MatrixShape]:
        yield MatrixShape(4 * self.width // tp, hidden, 1, "state.input")
        yield MatrixShape(hidden, self.width // tp, 1, "state.output", self.width)

    def num_other_parameters(self, hidden: int, tp: int) -> int:
        return self.width // tp

    def layout_errors(self, tp: int) -> Iterator[str]:
        if self.num_value_heads % tp:
            yield f"{self.num_value_heads} heads of lightning attention"


@dataclass(frozen=True, kw_only=True)
class MambaSpec(RecurrentSpec):
    """Mamba's selective state space (Gu & Dao 2023), after a causal convolution: each channel has a state of its own,
    with a decay for each of its elements."""

    width: int
    """Channels."""
    state_size: int
    rank: int
    """Size of the vector that steps are computed from."""
    norm: NormSpec | None = None
    """Of that vector, keys and queries."""
    conv_bias: bool = True
    bias: bool = False

    @property
    def num_heads(self) -> int:
        return self.width

    def state_shape(self, tp: int) -> tuple[int, int, int]:
        return 1, self.state_size, self.width // tp

    def channels(self, tp: int) -> int:
        return self.width // tp

    def matrices(self, hidden: int, tp: int) -> Iterator[MatrixShape]:
        yield MatrixShape(2 * self.width // tp, hidden, 1, "state.input")
        yield MatrixShape(self.rank + 2 * self.state_size, self.width // tp, 1, "state.select", self.width)
        yield MatrixShape(self.width // tp, self.rank, 1, "state.step")
        yield MatrixShape(hidden, self.width // tp, 1, "state.output", self.width)

    def num_other_parameters(self, hidden: int, tp: int) -> int:
        # weights and biases of the convolution, rates, skips, biases of steps
        count = self.width // tp * (self.conv_size + self.conv_bias + self.state_size + 2)
        count += self.bias * (2 * self.width // tp + hidden)
        return count + (self.norm is not None) * (self.rank + 2 * self.state_size)

    def layout_errors(self, tp: int) -> Iterator[str]:
        if self.width % tp:
            yield f"{self.width} channels of Mamba"


@dataclass(frozen=True, kw_only=True)
class MLPSpec:
    """`down(activation(gate(x)) * up(x))`, or without a gate `down(activation(up(x)))`."""

    intermediate_size: int
    activation: Activation = "silu"
    is_gated: bool = True
    bias: bool = False
    gate_multiplier: float = 1.0
    """Factor on the gate before its activation."""
    output_multiplier: float = 1.0
    is_adapted: bool = False
    """An adapter's output is added to what is computed from the input."""
    sparsity: float = 0.0
    """The share of the gate's features that are 0: those below that quantile of a normal distribution with their mean
    and deviation. The others are what they exceed it by (Gemma 3n)."""

    def width(self, tp: int) -> int:
        """Inner features of a token on one rank."""
        return self.intermediate_size // tp

    def matrices(self, hidden: int, tp: int) -> Iterator[MatrixShape]:
        yield MatrixShape((1 + self.is_gated) * self.intermediate_size // tp, hidden, 1, "feed_forward.gate_up")
        yield MatrixShape(hidden, self.intermediate_size // tp, 1, "feed_forward.down", self.intermediate_size)

    def num_other_parameters(self, hidden: int, tp: int) -> int:
        """Parameters other than the matrices."""
        return self.bias * ((1 + self.is_gated) * self.intermediate_size // tp + hidden)

    def layout_errors(self, tp: int) -> Iterator[str]:
        """What `tp` ranks cannot divide."""
        if self.intermediate_size % tp:
            yield f"{self.intermediate_size} feed-forward columns"


@dataclass(frozen=True, kw_only=True)
class MoESpec:
    """A mixture of experts: a router chooses `top_k` of `num_experts` MLPs for each token."""

    num_experts: int
    top_k: int
    intermediate_size: int
    """Inner features of each expert."""
    activation: Activation | Literal["swiglu_oai"] = "silu"
    """swiglu_oai is gpt-oss's: `min(gate, 7) * sigmoid(1.702 gate) * (clamp(up, ±7) + 1)`."""
    is_gated: bool = True
    """See `MLPSpec`."""
    latent_size: int = 0
    """Features that the hidden state is projected to for the experts, whose sum is projected back (Nemotron 3); 0: they
    have the hidden state's own."""
    scoring: Literal["softmax", "sigmoid", "topk_softmax", "sparse_mixer"] = "softmax"
    """topk_softmax: the softmax over the chosen experts' logits. sparse_mixer: experts are chosen one after another,
    each with its softmax among those not yet chosen whose logits are close to its own (Liu et al. 2024)."""
    sparse_mixer_distance: float = 0.0
    """The largest relative distance of logits that are close."""
    renormalize: bool = False
    """Scale the chosen weights to sum to 1."""
    scale: float = 1.0
    groups: int = 1
    """Only experts of the `top_groups` best groups are eligible (DeepSeek)."""
    top_groups: int = 1
    group_score: Literal["max", "top2_sum"] = "max"
    correction_bias: bool = False
    """Each expert has a bias that is used for the choice only."""
    router_bias: bool = False
    bias: bool = False
    """The experts' own linear layers have biases."""
    weighs_inputs: bool = False
    """The weight of the only chosen expert is a factor on its input, not on its output (Llama 4)."""
    shared: MLPSpec | None = None
    """The shared expert, which every token uses."""
    shared_gate: bool = False
    """Multiply the shared output by `sigmoid(x @ gate)`."""
    norm: NormSpec | None = None
    """Of inputs and outputs, with other weights for the experts than for the shared expert, and of the router's inputs,
    which are then divided by their number's root (Gemma 4); None: there are none."""
    expert_scale: bool = False
    """The weight of each expert is multiplied by a number of the checkpoint."""

    def __post_init__(self) -> None:
        eligible = self.num_experts // self.groups * self.top_groups
        least = 2 if self.group_score == "top2_sum" else 1
        if self.num_experts % self.groups or self.num_experts // self.groups < least or not 0 < self.top_k <= eligible:
            raise ConfigError(
                f"cannot choose {self.top_k} of {eligible} experts ({self.num_experts} in {self.groups} groups, of "
                f"which {self.top_groups} are eligible)"
            )

    def experts_per_rank(self, tp: int) -> tuple[int, int]:
        """The number of experts on a rank, and the inner features of each."""
        return self.num_experts, self.intermediate_size // tp

    def width(self, tp: int) -> int:
        """Inner features of a token on one rank."""
        _, size = self.experts_per_rank(tp)
        return self.top_k * size + (0 if self.shared is None else self.shared.width(tp))

    def matrices(self, hidden: int, tp: int) -> Iterator[MatrixShape]:
        (number, size), features = self.experts_per_rank(tp), self.latent_size or hidden
        yield MatrixShape((1 + self.is_gated) * size, features, number, "feed_forward.experts.gate_up")
        yield MatrixShape(features, size, number, "feed_forward.experts.down", self.intermediate_size)
        if self.latent_size:
            yield MatrixShape(features, hidden, 1, "feed_forward.latent_down")
            yield MatrixShape(hidden, features, 1, "feed_forward.latent_up")
        for each in () if self.shared is None else self.shared.matrices(hidden, tp):
            yield each._replace(module=each.module.replace("feed_forward.", "feed_forward.shared."))

    def num_other_parameters(self, hidden: int, tp: int) -> int:
        """Parameters other than the matrices; the router is included, as it is never sharded or quantized."""
        number, size = self.experts_per_rank(tp)
        count = self.num_experts * (hidden + self.router_bias + self.correction_bias)
        count += self.bias * number * ((1 + self.is_gated) * size + (self.latent_size or hidden))
        count += self.shared_gate * hidden
        count += 5 * (0 if self.norm is None else self.norm.num_parameters(hidden))
        count += self.expert_scale * self.num_experts
        return count if self.shared is None else count + self.shared.num_other_parameters(hidden, tp)

    def num_float32_parameters(self, hidden: int) -> int:
        """Parameters that are always float32: those that decide the routing."""
        return self.num_experts * (hidden + self.correction_bias + self.expert_scale) + self.shared_gate * hidden

    def layout_errors(self, tp: int) -> Iterator[str]:
        """What `tp` ranks cannot divide."""
        if self.intermediate_size % tp:
            yield f"{self.intermediate_size} feed-forward columns of an expert"
        if self.shared is not None:
            yield from self.shared.layout_errors(tp)


@dataclass(frozen=True, kw_only=True)
class ExpertParallelMoESpec(MoESpec):
    """A mixture whose experts are distributed over ranks as a whole; sizes are those of one rank."""

    num_local_experts: int
    """Experts on each rank, including copies."""

    def experts_per_rank(self, tp: int) -> tuple[int, int]:
        return self.num_local_experts, self.intermediate_size

    def layout_errors(self, tp: int) -> Iterator[str]:
        """What `tp` ranks cannot divide."""
        if self.shared is not None:
            yield from self.shared.layout_errors(tp)


@dataclass(frozen=True, kw_only=True)
class LayerInputSpec:
    """An input of each layer's own for each token (Gemma 3n): a row of an embedding, and the embedded token projected
    and normalized. A layer multiplies it by a gate, and adds it, projected and normalized, to the residual stream."""

    size: int
    vocab_size: int
    """Tokens beyond it have the row of token 0."""
    activation: Activation
    """Of the gate."""
    norm: NormSpec

    def matrices(self, hidden: int) -> Iterator[MatrixShape]:
        """Those of a layer, which are replicated."""
        yield MatrixShape(self.size, hidden, 1, "layer_input.gate")
        yield MatrixShape(hidden, self.size, 1, "layer_input.projection")


@dataclass(frozen=True, kw_only=True)
class SharedBlockSpec:
    """A layer's attention and feed-forward layer are those of a block, whose weights several layers share (Zamba2).

    The attention reads the residual stream beside the embedded token, and the feed-forward layer reads the attention's
    output. The result is projected and added to the input of the layer's state, but not to the residual stream. Each
    layer has adapters of its own for the projections of both (Hu et al. 2021).
    """

    source: int
    """The first layer with this block."""
    use: int
    """The number of this layer among all that have a block."""
    norm: NormSpec
    """Of both inputs."""
    rank: int
    """Of the adapters."""
    adapts_attention: bool
    is_held: bool = True
    """The block counts among the layer's parameters."""

    def matrices(self, hidden: int, tp: int, attention: AttentionSpec, feed_forward: MLPSpec) -> Iterator[MatrixShape]:
        """Those of the layer's own."""
        yield MatrixShape(hidden, hidden, 1, "block_output")
        yield MatrixShape(self.rank, hidden, 1, "feed_forward_adapter.down")
        yield MatrixShape(2 * feed_forward.intermediate_size // tp, self.rank, 1, "feed_forward_adapter.up.gate_up")
        if self.adapts_attention:
            yield MatrixShape(3 * self.rank, attention.input_size, 1, "attention_adapter.down")
            heads = attention.num_heads, *[attention.num_kv_heads] * 2
            for part, number in zip("qkv", heads, strict=True):
                rows = max(1, number // tp) * attention.head_dim
                yield MatrixShape(rows, self.rank, 1, f"attention_adapter.up.{part}")


@dataclass(frozen=True, kw_only=True)
class AltUpSpec:
    """Alternating updates (Baykal et al. 2023): there are several residual streams. A layer predicts all of them from
    all, computes one, and corrects the others by what it has computed. Its own input is added to all but the first.
    Before the layers the streams are projections of the embedded token, and after them their projections are averaged.
    """

    num_streams: int
    active: int
    """The stream that is computed."""
    norm: NormSpec
    """Of the stream that coefficients are computed from."""
    scales_output: bool
    """What the layer's input is multiplied with is scaled by a vector of the checkpoint."""

    def __post_init__(self) -> None:
        if not 0 <= self.active < self.num_streams or self.num_streams < 2:
            raise ConfigError(
                f"altup_active_idx {self.active} is not one of altup_num_inputs {self.num_streams} streams"
            )

    def num_parameters(self, hidden: int) -> int:
        """Parameters in a layer."""
        coefficients = self.num_streams**2 * (1 + self.num_streams)
        return coefficients + (self.num_streams + 1 + self.scales_output) * hidden

    def num_projections(self, hidden: int) -> int:
        """Parameters before the layers, and as many after them."""
        return (self.num_streams - 1) * hidden**2


@dataclass(frozen=True, kw_only=True)
class LaurelSpec:
    """A learned residual of low rank (Menghani et al. 2024): the attention's input plus `norm(up(down(input)))` is
    averaged with the residual stream after attention, with the size of one of them."""

    rank: int
    norm: NormSpec

    def matrices(self, hidden: int) -> Iterator[MatrixShape]:
        """Those of a layer, which are replicated."""
        yield MatrixShape(self.rank, hidden, 1, "laurel.down")
        yield MatrixShape(hidden, self.rank, 1, "laurel.up")


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """Mixers of tokens (attention, a recurrent state, or both in parallel) and a feed-forward layer, each with norms
    before and after (None: none), added to the residual stream. Either may be missing."""

    attention: AttentionSpec | MLASpec | None
    state: RecurrentSpec | None = None
    feed_forward: MLPSpec | MoESpec | None
    attention_norm: NormSpec | None
    """Before the mixers."""
    attention_post_norm: NormSpec | None = None
    feed_forward_norm: NormSpec | None
    feed_forward_post_norm: NormSpec | None = None
    is_parallel: bool = False
    """Both read the same residual stream; without a feed_forward_norm, they read the same normalized one."""
    residual_multiplier: float = 1.0
    """Factor on what is added to the residual stream."""
    normed_residuals: tuple[float, float] | None = None
    """The mixers' output is added to their normalized input times the first, that of the feed-forward layer to its
    normalized input times the second; None: to the residual stream."""
    has_scalar: bool = False
    """The layer's output, the residual stream, is multiplied by a number of the checkpoint (Gemma 4)."""
    layer_input: LayerInputSpec | None = None
    """The model's, if there is one."""
    alt_up: AltUpSpec | None = None
    """The model's, if there is one."""
    laurel: LaurelSpec | None = None
    block: SharedBlockSpec | None = None
    """What attention and feed-forward layer are of; None: they are the layer's own."""

    @property
    def kv_source(self) -> int | None:
        """See `AttentionSpec`."""
        return self.attention.kv_source if isinstance(self.attention, AttentionSpec) else None

    @property
    def mixers(self) -> list[AttentionSpec | MLASpec | RecurrentSpec]:
        return [each for each in (self.attention, self.state) if each is not None]

    @property
    def parts(self) -> list[AttentionSpec | MLASpec | RecurrentSpec | MLPSpec | MoESpec]:
        return [*self.mixers, *([] if self.feed_forward is None else [self.feed_forward])]

    @property
    def _held_parts(self) -> list[AttentionSpec | MLASpec | RecurrentSpec | MLPSpec | MoESpec]:
        """The parts whose parameters count among the layer's."""
        is_held = self.block is None or self.block.is_held
        return [part for part in self.parts if is_held or part is self.state]

    @property
    def norms(self) -> list[NormSpec]:
        norms = (self.attention_norm, self.attention_post_norm, self.feed_forward_norm, self.feed_forward_post_norm)
        added = (None if each is None else each.norm for each in (self.layer_input, self.laurel))
        return [norm for norm in (*norms, *added) if norm is not None]

    def matrices(self, hidden: int, tp: int) -> Iterator[MatrixShape]:
        """The linear layers' weights on one rank."""
        for part in self._held_parts:
            is_shared = self.block is not None and part is not self.state
            for each in part.matrices(hidden, tp):
                yield each._replace(module=f"block.{each.module}") if is_shared else each
        if self.block is not None:
            assert isinstance(self.attention, AttentionSpec)
            assert isinstance(self.feed_forward, MLPSpec)
            yield from self.block.matrices(hidden, tp, self.attention, self.feed_forward)
        if self.layer_input is not None:
            yield from self.layer_input.matrices(hidden)
        if self.laurel is not None:
            yield from self.laurel.matrices(hidden)

    def num_parameters(self, hidden: int, tp: int) -> int:
        """Parameters on one rank."""
        count = sum(each.elements for each in self.matrices(hidden, tp))
        count += sum(part.num_other_parameters(hidden, tp) for part in self._held_parts)
        if self.block is not None and self.block.is_held and isinstance(self.attention, AttentionSpec):
            count += self.block.norm.num_parameters(self.attention.input_size + hidden)
        count += 0 if self.alt_up is None else self.alt_up.num_parameters(hidden)
        return count + sum(norm.num_parameters(hidden) for norm in self.norms) + self.has_scalar


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The sizes that determine every shape of a decoder."""

    name: str
    """The name in config.json's `architectures`."""
    hidden_size: int
    vocab_size: int
    max_position: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec | None
    """Before the head."""
    tie_embeddings: bool
    position_embeddings: int = 0
    """Learned positions (0: none), of which the first `position_offset` are unused."""
    position_offset: int = 0
    embedding_norm: NormSpec | None = None
    """After the embedding."""
    embedding_multiplier: float = 1.0
    logit_multiplier: float = 1.0
    logit_softcap: float = 0.0
    head_bias: bool = False
    layer_input: LayerInputSpec | None = None
    alt_up: AltUpSpec | None = None

    def __post_init__(self) -> None:
        if not self.layers:
            raise ConfigError("num_hidden_layers must be at least 1")

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def stream_width(self) -> int:
        """Features of a token in the residual streams between layers."""
        return self.hidden_size * (1 if self.alt_up is None else self.alt_up.num_streams)

    @property
    def stage_width(self) -> int:
        """Features of a token that a stage passes to the next one: the residual streams, the layers' own inputs, and
        the embedded token if layers read it."""
        passed = 0 if self.layer_input is None else self.num_layers * self.layer_input.size
        return self.stream_width + passed + self.passes_embedding * self.hidden_size

    @property
    def passes_embedding(self) -> bool:
        """Whether layers read the embedded tokens."""
        return any(layer.block is not None for layer in self.layers)

    def held_layers(self, stage: range) -> list[tuple[int, LayerSpec]]:
        """The layers of a stage by their number; of those that share a block, the first one holds it."""
        found, blocks = [], set[int]()
        for number in stage:
            layer = self.layers[number]
            if (block := layer.block) is not None:
                layer = replace(layer, block=replace(block, is_held=block.source not in blocks))
                blocks.add(block.source)
            found.append((number, layer))
        return found

    def with_expert_parallelism(self, ranks: int, num_redundant_experts: int) -> ModelSpec:
        """The same model with the experts of each layer, and copies of some, distributed evenly over `ranks`."""

        def of(layer: LayerSpec) -> LayerSpec:
            mixture = layer.feed_forward
            if not isinstance(mixture, MoESpec):
                return layer
            count = (mixture.num_experts + num_redundant_experts) // ranks
            return replace(layer, feed_forward=ExpertParallelMoESpec(**vars(mixture), num_local_experts=count))

        changed = {layer: of(layer) for layer in set(self.layers)}
        return replace(self, layers=tuple(changed[layer] for layer in self.layers))

    def vocab_per_rank(self, tp: int) -> int:
        """Rows of the embedding and the head on each rank; those of the last rank are padded."""
        return -(-self.vocab_size // tp)

    def outer_matrices(self, tp: int) -> tuple[MatrixShape, MatrixShape]:
        """The weights of the embedding and of the head on one rank; the module of a tied head is the embedding."""
        embedding = MatrixShape(self.vocab_per_rank(tp), self.hidden_size, module="embedding")
        return embedding, embedding if self.tie_embeddings else embedding._replace(module="head")

    def embedded_parameters(self, tp: int) -> int:
        """Parameters on one rank that are embeddings of tokens, other than the model's."""
        spec = self.layer_input
        return 0 if spec is None else -(-spec.vocab_size // tp) * self.num_layers * spec.size

    def stage_parameters(self, stages: Sequence[range], stage: int, tp: int) -> int:
        """Parameters on one rank of a stage; a tied head is stored again if the first and last stage differ."""
        embedding = self.vocab_per_rank(tp) * self.hidden_size
        first, last = stage == 0, stage == len(stages) - 1
        count = sum(layer.num_parameters(self.hidden_size, tp) for _, layer in self.held_layers(stages[stage]))
        if first:
            count += embedding + self.position_embeddings * self.hidden_size
            count += 0 if self.embedding_norm is None else self.embedding_norm.num_parameters(self.hidden_size)
            if self.layer_input is not None:
                size = self.layer_input.size
                count += self.embedded_parameters(tp) + self.num_layers * size * self.hidden_size
                count += self.layer_input.norm.num_parameters(size)
        if self.alt_up is not None:
            count += (first + last) * self.alt_up.num_projections(self.hidden_size)
        if last:
            count += 0 if self.tie_embeddings and first else embedding
            count += self.head_bias * self.vocab_per_rank(tp)
            count += self.norm.num_parameters(self.hidden_size) if self.norm is not None else 0
        return count

    def layout_errors(self, tp: int) -> list[str]:
        """What `tp` ranks cannot divide."""
        errors: dict[str, None] = {}
        for layer in dict.fromkeys(self.layers):
            errors |= dict.fromkeys(error for part in layer.parts for error in part.layout_errors(tp))
        return list(errors)

    def check_divides(self, tp: int) -> None:
        """Reject a tensor-parallel size that does not divide heads and feed-forward layers evenly."""
        if problems := self.layout_errors(tp):
            most = max(mixer.num_heads for layer in self.layers for mixer in layer.mixers)
            fits = [str(size) for size in range(1, most + 1) if not self.layout_errors(size)]
            raise ConfigError(
                f"--tensor-parallel-size {tp} does not divide this model's {' and '.join(problems)}; "
                f"sizes that do: {', '.join(fits)}"
            )


@dataclass(frozen=True, kw_only=True)
class TransformersLayerSpec(LayerSpec):
    """A layer as transformers builds it. Sizes are those of one rank, in the layout in which it was measured."""

    attention_norm: NormSpec | None = None
    feed_forward_norm: NormSpec | None = None
    linears: tuple[MatrixShape, ...]
    others: int
    """Parameters other than the linear layers' matrices."""

    def matrices(self, hidden: int, tp: int) -> Iterator[MatrixShape]:
        yield from self.linears

    def num_parameters(self, hidden: int, tp: int) -> int:
        return sum(each.elements for each in self.linears) + self.others


@dataclass(frozen=True, kw_only=True)
class TransformersModelSpec(ModelSpec):
    """A model as transformers builds it, measured in one tensor-parallel layout. Sizes are those of one rank."""

    layers: tuple[TransformersLayerSpec, ...]
    embedding: MatrixShape
    """The embedding's weight, if its vocabulary is sharded as Quire does; else empty."""
    head: MatrixShape
    before: int
    """Parameters before the layers on a rank, including the embedding's."""
    after: int
    """Parameters after the layers."""
    read_directly: frozenset[str] = frozenset()
    """Linear layers whose weights the model reads directly, with `*` for layer numbers: they are not packed."""

    def vocab_per_rank(self, tp: int) -> int:
        return self.head.rows

    def outer_matrices(self, tp: int) -> tuple[MatrixShape, MatrixShape]:
        return self.embedding, self.head

    def stage_parameters(self, stages: Sequence[range], stage: int, tp: int) -> int:
        count = sum(self.layers[number].num_parameters(self.hidden_size, tp) for number in stages[stage])
        if stage == 0:
            count += self.before
        if stage == len(stages) - 1:
            count += self.after + (self.tie_embeddings and stage > 0) * self.head.elements
        return count

    def layout_errors(self, tp: int) -> list[str]:
        """None: layouts that do not fit were rejected when the model was measured."""
        return []
