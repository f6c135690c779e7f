"""A decoder as numbers: what each of its layers is made of, and what that takes on a rank. No torch here.

`quire.engine.models.families` makes an `ModelSpec` of Hugging Face's `config.json`; `quire.engine.models` builds
modules. Every layer has a description of its own (equal ones are one object), so that windows, dense first layers or
layers without positions are no special cases anywhere. Sizes are in features and parameters; `hidden` is the model's
width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from quire.engine.protocol.errors import ConfigError

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]


KEYS_AND_VALUES_AT_ONCE = 1 << 24
"""Numbers of keys and values that latent attention makes of its cache at once."""


class MatrixShape(NamedTuple):
    """`number` weights `[rows, columns]` of linear layers on one rank."""

    rows: int
    columns: int
    number: int = 1


@dataclass(frozen=True, kw_only=True)
class NormSpec:
    """Normalization: by root mean square (Zhang & Sennrich 2019), or by mean and variance (Ba et al. 2016)."""

    eps: float
    kind: Literal["rms", "layer"] = "rms"
    bias: bool = False
    offset: float = 0.0
    """Added to the weight: Gemma's are stored less 1."""

    def parameters(self, size: int) -> int:
        return size * (1 + self.bias)


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Rotary positions (Su et al. 2021) of a head's first `dim` features. `kind` is transformers' rope_type."""

    theta: float
    dim: int
    kind: Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"] = "default"
    factor: float = 1.0
    original_max_position: int = 0
    """Positions that the model was trained with before it was stretched."""
    low_freq_factor: float = 0.0
    high_freq_factor: float = 0.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    amplitude: float = 1.0
    """Factor on cosines and sines, and so its square on scores."""
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    is_interleaved: bool = False
    """The checkpoint's pairs are neighbours. Loading reorders them to halves, which no dot product notices."""

    def __post_init__(self) -> None:
        if self.dim % 2 or self.dim < 2:
            raise ConfigError(f"rotary positions turn pairs of features, and heads have {self.dim} to turn")


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Grouped-query attention (Ainslie et al. 2023) over `num_kv_heads` heads of keys and values."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: RopeSpec | None
    window: int | None = None
    """Keys that a query sees, its own included; None: all."""
    softcap: float = 0.0
    """Scores become `softcap * tanh(score / softcap)`; 0: they stay."""
    has_sinks: bool = False
    """A logit for each head that takes part in the softmax and has no value."""
    alibi: float = 0.0
    """Scores fall with the distance (Press et al. 2022), by slopes times this; 0: they do not."""
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: NormSpec | None = None
    qk_norm_over: Literal["head", "each head", "all heads"] = "head"
    """A head's features with one weight for all heads, or one for each; or the features of all heads together."""

    def kv_heads_per_rank(self, tp: int) -> int:
        """KV heads held by each rank; with fewer heads than ranks, each head is replicated."""
        return max(1, self.num_kv_heads // tp)

    def matrices(self, hidden: int, tp: int) -> Iterator[MatrixShape]:
        heads = self.num_heads // tp
        yield MatrixShape((heads + 2 * self.kv_heads_per_rank(tp)) * self.head_dim, hidden)
        yield MatrixShape(hidden, heads * self.head_dim)

    def vectors(self, hidden: int, tp: int) -> int:
        """Parameters beside the matrices."""
        heads, kv_heads = self.num_heads // tp, self.kv_heads_per_rank(tp)
        count = self.qkv_bias * (heads + 2 * kv_heads) * self.head_dim + self.output_bias * hidden
        if self.qk_norm is not None:
            normed = 2 if self.qk_norm_over == "head" else heads + kv_heads
            count += self.qk_norm.parameters(normed * self.head_dim)
        return count + self.has_sinks * heads

    def workspace(self, length: int, tp: int) -> int:
        """Numbers that are held beside the tokens' own while a sequence of `length` is attended to."""
        return 0

    def kv_shape(self, tp: int) -> tuple[int, int, int]:
        """What the KV cache of a rank holds of each token: keys and values, heads, numbers of a head."""
        return 2, self.kv_heads_per_rank(tp), self.head_dim

    def layout_errors(self, tp: int) -> Iterator[str]:
        """What `tp` ranks cannot share."""
        if self.num_heads % tp:
            yield f"{self.num_heads} attention heads"
        if self.num_kv_heads % tp and tp % self.num_kv_heads:
            yield f"{self.num_kv_heads} KV heads"


@dataclass(frozen=True, kw_only=True)
class MLASpec:
    """Multi-head latent attention (DeepSeek-V2, 2024): keys and values of all heads come out of one vector a token.

    The cache holds that vector, `latent_dim` numbers, and the rotary part of the key, which all heads share.
    """

    num_heads: int
    query_latent_dim: int | None
    """Queries come out of a vector of this size; None: out of the hidden state."""
    latent_dim: int
    plain_dim: int
    """Features of a head's queries and keys that are not turned; `rope.dim` more are."""
    value_dim: int
    scale: float
    rope: RopeSpec
    norm: NormSpec
    bias: bool = False
    window: int | None = None

    @property
    def head_dim(self) -> int:
        return self.plain_dim + self.rope.dim

    def matrices(self, hidden: int, tp: int) -> Iterator[MatrixShape]:
        heads = self.num_heads // tp
        yield MatrixShape((self.query_latent_dim or 0) + self.latent_dim + self.rope.dim, hidden)
        yield MatrixShape(heads * self.head_dim, self.query_latent_dim or hidden)
        yield MatrixShape(hidden, heads * self.value_dim)

    def vectors(self, hidden: int, tp: int) -> int:
        """Parameters beside the matrices; what makes keys and values is among them, as it is never quantized."""
        count = self.num_heads // tp * (self.plain_dim + self.value_dim) * self.latent_dim
        count += self.bias * ((self.query_latent_dim or 0) + self.latent_dim + self.rope.dim + hidden)
        return count + self.norm.parameters(self.latent_dim) + self.norm.parameters(self.query_latent_dim or 0)

    def workspace(self, length: int, tp: int) -> int:
        """See `AttentionSpec`: the sequence's vectors, and keys and values of some heads, which are made and padded."""
        return length * (self.latent_dim + self.rope.dim) + 3 * min(
            KEYS_AND_VALUES_AT_ONCE, 2 * length * self.num_heads // tp * self.head_dim
        )

    def kv_shape(self, tp: int) -> tuple[int, int, int]:
        """What the KV cache of every rank holds of each token: one vector, which is key and value of all heads."""
        return 1, 1, self.latent_dim + self.rope.dim

    def layout_errors(self, tp: int) -> Iterator[str]:
        """What `tp` ranks cannot share."""
        if self.num_heads % tp:
            yield f"{self.num_heads} attention heads"


@dataclass(frozen=True, kw_only=True)
class MLPSpec:
    """`down(activation(gate(x)) * up(x))`, or without a gate `down(activation(up(x)))`."""

    size: int
    activation: Activation = "silu"
    is_gated: bool = True
    bias: bool = False

    def width(self, tp: int) -> int:
        """Inner features of a token on one rank."""
        return self.size // tp

    def matrices(self, hidden: int, tp: int) -> Iterator[MatrixShape]:
        yield MatrixShape((1 + self.is_gated) * self.size // tp, hidden)
        yield MatrixShape(hidden, self.size // tp)

    def vectors(self, hidden: int, tp: int) -> int:
        """Parameters beside the matrices."""
        return self.bias * ((1 + self.is_gated) * self.size // tp + hidden)

    def layout_errors(self, tp: int) -> Iterator[str]:
        """What `tp` ranks cannot share."""
        if self.size % tp:
            yield f"{self.size} feed-forward columns"


@dataclass(frozen=True, kw_only=True)
class MoESpec:
    """A mixture of experts: a router chooses `top_k` of `num_experts` gated feed-forwards for each token."""

    num_experts: int
    top_k: int
    size: int
    """Inner features of each expert."""
    activation: Activation | Literal["swiglu_oai"] = "silu"
    """swiglu_oai is gpt-oss's: `min(gate, 7) * sigmoid(1.702 gate) * (clamp(up, ±7) + 1)`."""
    scoring: Literal["softmax", "sigmoid", "topk_softmax"] = "softmax"
    """topk_softmax: the softmax of the chosen ones' logits."""
    renormalize: bool = False
    """Make the chosen weights sum to 1."""
    scale: float = 1.0
    groups: int = 1
    """Only experts of the `top_groups` best groups are eligible (DeepSeek)."""
    top_groups: int = 1
    group_score: Literal["max", "top2_sum"] = "max"
    correction_bias: bool = False
    """A bias of each expert that counts for choosing only."""
    router_bias: bool = False
    bias: bool = False
    """Of the experts' own linear layers."""
    shared: MLPSpec | None = None
    """What every token passes, beside its experts."""
    shared_gate: bool = False
    """Weigh the shared output by `sigmoid(x @ gate)`."""

    def __post_init__(self) -> None:
        eligible = self.num_experts // self.groups * self.top_groups
        least = 2 if self.group_score == "top2_sum" else 1
        if self.num_experts % self.groups or self.num_experts // self.groups < least or not 0 < self.top_k <= eligible:
            raise ConfigError(
                f"{self.top_k} experts cannot be chosen of {eligible} ({self.num_experts} in {self.groups} groups, of "
                f"which {self.top_groups} are eligible)"
            )

    def held(self, tp: int) -> tuple[int, int]:
        """How many experts a rank has, and the inner features that it has of each."""
        return self.num_experts, self.size // tp

    def width(self, tp: int) -> int:
        """Inner features of a token on one rank."""
        _, size = self.held(tp)
        return self.top_k * size + (0 if self.shared is None else self.shared.width(tp))

    def matrices(self, hidden: int, tp: int) -> Iterator[MatrixShape]:
        number, size = self.held(tp)
        yield MatrixShape(2 * size, hidden, number)
        yield MatrixShape(hidden, size, number)
        if self.shared is not None:
            yield from self.shared.matrices(hidden, tp)

    def vectors(self, hidden: int, tp: int) -> int:
        """Parameters beside the matrices; the router is among them, as it is never cut or quantized."""
        number, size = self.held(tp)
        count = self.num_experts * (hidden + self.router_bias + self.correction_bias)
        count += self.bias * number * (2 * size + hidden) + self.shared_gate * hidden
        return count if self.shared is None else count + self.shared.vectors(hidden, tp)

    def wide(self, hidden: int) -> int:
        """Parameters that are float32 whatever the model is: what decides where a token goes."""
        return self.num_experts * (hidden + self.correction_bias) + self.shared_gate * hidden

    def layout_errors(self, tp: int) -> Iterator[str]:
        """What `tp` ranks cannot share."""
        if self.size % tp:
            yield f"{self.size} feed-forward columns of an expert"
        if self.shared is not None:
            yield from self.shared.layout_errors(tp)


@dataclass(frozen=True, kw_only=True)
class ExpertParallelMoESpec(MoESpec):
    """A mixture whose experts are spread over ranks as a whole; sizes are those of one rank."""

    places: int
    """Experts that each rank has, copies included."""

    def held(self, tp: int) -> tuple[int, int]:
        return self.places, self.size

    def layout_errors(self, tp: int) -> Iterator[str]:
        """What `tp` ranks cannot share."""
        if self.shared is not None:
            yield from self.shared.layout_errors(tp)


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """Attention and a feed-forward, each with norms before and after (None: none), added to the residual stream."""

    attention: AttentionSpec | MLASpec
    feed_forward: MLPSpec | MoESpec
    attention_norm: NormSpec | None
    attention_post_norm: NormSpec | None = None
    feed_forward_norm: NormSpec | None
    feed_forward_post_norm: NormSpec | None = None
    is_parallel: bool = False
    """Both start from the same residual stream; without a feed_forward_norm, even from the same normalized one."""
    residual_multiplier: float = 1.0
    """On what is added to the residual stream."""

    @property
    def norms(self) -> list[NormSpec]:
        norms = (self.attention_norm, self.attention_post_norm, self.feed_forward_norm, self.feed_forward_post_norm)
        return [norm for norm in norms if norm is not None]

    def matrices(self, hidden: int, tp: int) -> Iterator[MatrixShape]:
        """The linear layers' weights on one rank."""
        yield from self.attention.matrices(hidden, tp)
        yield from self.feed_forward.matrices(hidden, tp)

    def parameters(self, hidden: int, tp: int) -> int:
        """Parameters on one rank."""
        count = sum(rows * columns * number for rows, columns, number in self.matrices(hidden, tp))
        count += self.attention.vectors(hidden, tp) + self.feed_forward.vectors(hidden, tp)
        return count + sum(norm.parameters(hidden) for norm in self.norms)


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The numbers that fix every shape of a decoder."""

    name: str
    """As config.json's `architectures` names it."""
    hidden_size: int
    vocab_size: int
    max_position: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec | None
    """Before the head."""
    tie_embeddings: bool
    position_embeddings: int = 0
    """Learned positions (0: none), of which the first `position_offset` are no token's."""
    position_offset: int = 0
    embedding_multiplier: float = 1.0
    logit_multiplier: float = 1.0
    logit_softcap: float = 0.0
    head_bias: bool = False

    def __post_init__(self) -> None:
        if not self.layers:
            raise ConfigError("num_hidden_layers must be at least 1")

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def spread(self, ranks: int, redundant: int) -> ModelSpec:
        """The same with the experts of each layer, and `redundant` copies, spread evenly over `ranks`."""

        def of(layer: LayerSpec) -> LayerSpec:
            mixture = layer.feed_forward
            if not isinstance(mixture, MoESpec):
                return layer
            places = (mixture.num_experts + redundant) // ranks
            return replace(layer, feed_forward=ExpertParallelMoESpec(**vars(mixture), places=places))

        made = {layer: of(layer) for layer in set(self.layers)}
        return replace(self, layers=tuple(made[layer] for layer in self.layers))

    def vocab_per_rank(self, tp: int) -> int:
        """Rows of the embedding and the head on each rank; the last rank's are padded."""
        return -(-self.vocab_size // tp)

    def stage_parameters(self, stages: Sequence[range], stage: int, tp: int) -> int:
        """Parameters of one rank of a stage; a tied head is stored again when first and last stage differ."""
        embedding = self.vocab_per_rank(tp) * self.hidden_size
        first, last = stage == 0, stage == len(stages) - 1
        count = sum(self.layers[number].parameters(self.hidden_size, tp) for number in stages[stage])
        if first:
            count += embedding + self.position_embeddings * self.hidden_size
        if last:
            count += 0 if self.tie_embeddings and first else embedding
            count += self.head_bias * self.vocab_per_rank(tp)
            count += self.norm.parameters(self.hidden_size) if self.norm is not None else 0
        return count

    def layout_errors(self, tp: int) -> list[str]:
        """What `tp` ranks cannot share."""
        found: dict[str, None] = {}
        for layer in dict.fromkeys(self.layers):
            found |= dict.fromkeys((*layer.attention.layout_errors(tp), *layer.feed_forward.layout_errors(tp)))
        return list(found)

    def check_divides(self, tp: int) -> None:
        """Refuse a tensor-parallel size that does not cut heads and feed-forward evenly."""
        if problems := self.layout_errors(tp):
            most = max(layer.attention.num_heads for layer in self.layers)
            fits = [str(size) for size in range(1, most + 1) if not self.layout_errors(size)]
            raise ConfigError(
                f"--tensor-parallel-size {tp} does not divide this model's {' and '.join(problems)}; "
                f"sizes that do: {', '.join(fits)}"
            )


@dataclass(frozen=True, kw_only=True)
class TransformersLayerSpec(LayerSpec):
    """A layer as transformers builds it. Sizes are those of one rank, for the layout that it was measured in."""

    attention_norm: NormSpec | None = None
    feed_forward_norm: NormSpec | None = None
    linears: tuple[MatrixShape, ...]
    others: int
    """Parameters beside the linear layers' matrices."""

    def matrices(self, hidden: int, tp: int) -> Iterator[MatrixShape]:
        yield from self.linears

    def parameters(self, hidden: int, tp: int) -> int:
        return sum(rows * columns * number for rows, columns, number in self.linears) + self.others


@dataclass(frozen=True, kw_only=True)
class TransformersModelSpec(ModelSpec):
    """A model as transformers builds it, measured in one tensor-parallel layout, whose ranks its sizes are of."""

    layers: tuple[TransformersLayerSpec, ...]
    head_rows: int
    """Of the head, on a rank."""
    before: int
    """Parameters before the layers, on a rank; a tied head's are among them."""
    after: int
    """Those after the layers."""
    read_directly: frozenset[str] = frozenset()
    """Linear layers whose weights the model uses by itself, layer numbers as `*`: they are not packed."""

    def vocab_per_rank(self, tp: int) -> int:
        return self.head_rows

    def stage_parameters(self, stages: Sequence[range], stage: int, tp: int) -> int:
        count = sum(self.layers[number].parameters(self.hidden_size, tp) for number in stages[stage])
        if stage == 0:
            count += self.before
        if stage == len(stages) - 1:
            count += self.after + (self.tie_embeddings and stage > 0) * self.head_rows * self.hidden_size
        return count

    def layout_errors(self, tp: int) -> list[str]:
        """None: what does not fit was refused when it was measured."""
        return []
