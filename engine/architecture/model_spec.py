"""A decoder's description: what each of its layers consists of, and what that requires on a rank. No torch here.

`quire.engine.architecture.families` derives a `ModelSpec` from Hugging Face's `config.json`; `quire.engine.models`
builds the modules. Each layer has its own description (equal ones are one object), so that windows, dense first layers
and layers without positions are not special cases. Sizes are in features and parameters; `hidden` is the model's hidden
size."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from typing import Literal

from quire.engine.architecture.attention_spec import AnyAttentionSpec, AttentionSpec
from quire.engine.architecture.recurrent_spec import RecurrentSpec
from quire.engine.architecture.spec_parts import (
    ALL,
    Activation,
    GatedActivation,
    MatrixShape,
    NormSpec,
    Parameter,
    Parameters,
    Shape,
    Units,
    layout_errors,
    linear,
    matrices,
    norm,
    vector,
)
from quire.engine.protocol.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class MLPSpec:
    """`down(activation(gate(x)) * up(x))`, or without a gate `down(activation(up(x)))`."""

    intermediate_size: int
    activation: GatedActivation = "silu"
    is_gated: bool = True
    bias: bool = False
    output_bias: bool | None = None
    """Whether `down` has a bias; None: as the others."""
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

    def activations(self, tp: int) -> int:
        """Values of a token that a rank has at once inside: gates, ups and their products, and with sparsity as many
        again in float32, counted twice."""
        return 3 * self.width(tp) * (3 if self.sparsity else 1)

    @property
    def has_output_bias(self) -> bool:
        return self.bias if self.output_bias is None else self.output_bias

    def parameters(self, hidden: int, module: str = "feed_forward") -> Parameters:
        """All parameters, of a layer whose input has `hidden` features."""
        size, units = self.intermediate_size, Units(self.intermediate_size, "feed-forward columns")
        rows = {"gate": size, "up": size} if self.is_gated else {"up": size}
        yield from linear(f"{module}.gate_up", rows, hidden, rows_of=units, bias=self.bias)
        yield from linear(f"{module}.down", hidden, size, columns_of=units, bias=self.has_output_bias)


@dataclass(frozen=True, kw_only=True)
class MoESpec:
    """A mixture of experts: a router chooses `top_k` of `num_experts` MLPs for each token."""

    num_experts: int
    top_k: int
    intermediate_size: int
    """Inner features of each expert."""
    activation: GatedActivation = "silu"
    is_gated: bool = True
    """See `MLPSpec`."""
    latent_size: int = 0
    """Features that the hidden state is projected to for the experts, whose sum is projected back (Nemotron 3); 0: they
    have the hidden state's own."""
    scoring: Literal["softmax", "sigmoid", "topk_softmax", "sparse_mixer", "sqrt_softplus"] = "softmax"
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
    ineligible_score: float = -math.inf
    """What the scores of experts that are not eligible become."""
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
    table_size: int = 0
    """Above 0: a token's experts are those that a table of the checkpoint has for its id, of so many ids; scores are
    only their weights (DeepSeek-V4)."""

    def __post_init__(self) -> None:
        eligible = self.num_experts // self.groups * self.top_groups
        least = 2 if self.group_score == "top2_sum" else 1
        if self.num_experts % self.groups or self.num_experts // self.groups < least or not 0 < self.top_k <= eligible:
            raise ConfigError(
                f"cannot choose {self.top_k} of {eligible} experts ({self.num_experts} in {self.groups} groups, of "
                f"which {self.top_groups} are eligible)"
            )

    @property
    def experts_per_rank(self) -> tuple[int, Units | None]:
        """The number of experts on a rank, and what ranks divide of each; None: nothing."""
        return self.num_experts, Units(self.intermediate_size, "feed-forward columns of an expert")

    def width(self, tp: int) -> int:
        """Inner features of a token on one rank."""
        _, units = self.experts_per_rank
        size = self.intermediate_size // (1 if units is None else tp)
        return self.top_k * size + (0 if self.shared is None else self.shared.width(tp))

    def activations(self, tp: int) -> int:
        """See `MLPSpec`."""
        return 3 * self.width(tp)

    def parameters(self, hidden: int) -> Parameters:
        """See `MLPSpec`. The router is on all ranks, and never quantized; what decides the routing is always float32,
        and tables are int32."""
        module, count = "feed_forward", self.num_experts
        yield from linear(f"{module}.router", count, hidden, is_float32=True, bias=self.router_bias)
        for name in ("correction_bias", "expert_scale"):
            if getattr(self, name):
                yield Parameter(f"{module}.router", name, {"": (count,)}, is_float32=True)
        if self.table_size:
            yield Parameter(f"{module}.router", "table", {"": (self.table_size, self.top_k)}, is_float32=True)
        for name in ("router.norm", "input_norm", "output_norm", "shared_input_norm", "shared_output_norm"):
            yield from norm(f"{module}.{name}", self.norm, hidden)
        yield from self.expert_parameters(hidden)
        if self.latent_size:
            yield from linear(f"{module}.latent_down", self.latent_size, hidden)
            yield from linear(f"{module}.latent_up", hidden, self.latent_size)
        if self.shared is not None:
            yield from self.shared.parameters(hidden, f"{module}.shared")
        if self.shared_gate:
            yield from linear(f"{module}.shared_gate", 1, hidden, is_float32=True)

    def expert_matrices(self, hidden: int, tp: int) -> Iterator[MatrixShape]:
        """The weights of these experts on one rank."""
        return matrices(self.expert_parameters(hidden), tp)

    def expert_parameters(self, hidden: int) -> Parameters:
        """Those of the experts that tokens are routed to."""
        inputs, size = self.latent_size or hidden, self.intermediate_size
        rows = {"gate": size, "up": size} if self.is_gated else {"up": size}
        number, units = self.experts_per_rank
        gate_up, down = "feed_forward.experts.gate_up", "feed_forward.experts.down"
        yield from linear(gate_up, rows, inputs, rows_of=units, bias=self.bias, number=number)
        yield from linear(down, inputs, size, columns_of=units, bias=self.bias, number=number)


@dataclass(frozen=True, kw_only=True)
class ExpertParallelMoESpec(MoESpec):
    """A mixture whose experts are distributed over ranks as a whole; sizes are those of one rank."""

    num_local_experts: int
    """Experts on each rank, including copies."""

    @property
    def experts_per_rank(self) -> tuple[int, Units | None]:
        return self.num_local_experts, None


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

    def parameters(self, hidden: int) -> Parameters:
        """Those of a layer, which are replicated."""
        yield from linear("layer_input.gate", self.size, hidden)
        yield from linear("layer_input.projection", hidden, self.size)
        yield from norm("layer_input.norm", self.norm, hidden)

    def outer_parameters(self, hidden: int, num_layers: int) -> Parameters:
        """Those before the layers."""
        inputs, rows = num_layers * self.size, Units(self.vocab_size, "tokens", "padding")
        yield from linear("layer_inputs.embedding", self.vocab_size, inputs, rows_of=rows)
        yield from linear("layer_inputs.projection", inputs, hidden)
        yield from norm("layer_inputs.norm", self.norm, self.size)


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
    """Of the adapters; 0: there are none (Zamba)."""
    adapts_attention: bool
    is_held: bool = True
    """The block counts among the layer's parameters."""

    def parameters(self, hidden: int, attention: AttentionSpec, feed_forward: MLPSpec) -> Parameters:
        """Those of the block, if it counts here, and those of the layer's own that go with it."""
        if self.is_held:
            for each in (*attention.parameters(hidden), *feed_forward.parameters(hidden)):
                yield each._replace(module=f"block.{each.module}")
            yield from norm("block.attention_norm", self.norm, attention.input_size)
            yield from norm("block.feed_forward_norm", self.norm, hidden)
        yield from linear("block_output", hidden, hidden)
        if not (rank := self.rank):
            return
        size, columns = feed_forward.intermediate_size, Units(feed_forward.intermediate_size, "feed-forward columns")
        gate_up = {"gate": size, "up": size}
        yield from linear("feed_forward_adapter.down", {"gate_up": rank}, hidden)
        yield from linear("feed_forward_adapter.up.gate_up", gate_up, rank, rows_of=columns)
        if self.adapts_attention:
            yield from linear("attention_adapter.down", dict.fromkeys("qkv", rank), attention.input_size)
            heads = Units(attention.num_heads, "attention heads")
            kv_heads = Units(attention.num_kv_heads, "KV heads", "copies")
            for part, units in {"q": heads, "k": kv_heads, "v": kv_heads}.items():
                rows = units.number * attention.head_dim
                yield from linear(f"attention_adapter.up.{part}", rows, rank, rows_of=units)


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

    def parameters(self, hidden: int) -> Parameters:
        """Those of a layer, which are replicated and never quantized."""
        module, count = "alt_up", self.num_streams
        yield from norm(f"{module}.norm", self.norm, hidden)
        for name, rows, columns in (
            ("router", count, hidden),
            ("prediction", count**2, count),
            ("correction", count, count),
        ):
            yield from linear(f"{module}.{name}", rows, columns, is_quantizable=False)
        if self.scales_output:
            yield vector(module, "scale", hidden)

    def projections(self, module: str, hidden: int) -> Parameters:
        """Those before the layers, or after them."""
        rows = {str(number): hidden for number in range(self.num_streams - 1)}
        yield from linear(module, rows, hidden, is_quantizable=False)


@dataclass(frozen=True, kw_only=True)
class HyperConnectionSpec:
    """Manifold-constrained hyper-connections (Xie et al. 2026): there are several residual streams, all of them the
    embedded token before the layers. The input of an attention or a feed-forward layer is a sum of the streams, and
    its output is added to each of them, after they are mixed. The weights of all three are computed from the streams,
    in float32. Those of the mixing are made doubly stochastic, by dividing rows and columns by their sums
    `iterations` times; without iterations, streams are not mixed (Hunyuan 4). After the layers there is a last sum."""

    num_streams: int
    iterations: int
    eps: float
    """Added to weights and to sums."""
    magnitude: float = 2.0
    """The largest weight of an output in a stream."""
    output_eps: float = 0.0
    """Added to these weights."""
    averages: bool = False
    """After the layers, the streams are averaged (GLM-5.3)."""
    norm: NormSpec
    """Of the streams together that weights are computed from; without a weight."""

    def __post_init__(self) -> None:
        if self.num_streams < 1:
            raise ConfigError(f"hc_mult {self.num_streams} must be at least 1")

    @property
    def num_weights(self) -> int:
        """Weights of a token before and after an attention or a feed-forward layer."""
        return self.num_streams * (2 + (self.num_streams if self.iterations else 0))

    @property
    def num_scales(self) -> int:
        """Factors on these weights: on those of inputs, of outputs, and of the mixing."""
        return 3 if self.iterations else 2

    def parameters(self, hidden: int) -> Parameters:
        """Those of a layer, which are always float32."""
        for name in ("attention", "feed_forward"):
            yield from self.connection(f"{name}_connection", self.num_weights, self.num_scales, hidden)

    def last_parameters(self, module: str, hidden: int) -> Parameters:
        """Those after the layers."""
        if not self.averages:
            yield from self.connection(module, self.num_streams, 1, hidden)

    def connection(self, module: str, weights: int, scales: int, hidden: int) -> Parameters:
        shapes: dict[str, Shape] = {
            "function": (weights, self.num_streams * hidden),
            "base": (weights,),
            "scale": (scales,),
        }
        for kind, shape in shapes.items():
            yield Parameter(module, kind, {"": shape}, is_float32=True)


@dataclass(frozen=True, kw_only=True)
class GatedConnectionSpec:
    """Hyper-connections with a gate for each feature (Qwen4-Exp, 2026): there are several residual streams, all of them
    the embedded token before the layers. Each is normalized and multiplied by the sigmoid of a gate, of low rank, and
    their mean is the input of an attention or a feed-forward layer. Its output is added to each stream, with a weight
    that is twice a sigmoid. After the layers the same mean goes to the head."""

    num_streams: int
    rank: int
    norm: NormSpec
    """Of each stream, with weights of its own."""

    def __post_init__(self) -> None:
        if self.num_streams < 1 or self.rank < 1:
            raise ConfigError(f"hc_count {self.num_streams} and hc_lowrank {self.rank} must be at least 1")

    def parameters(self, hidden: int) -> Parameters:
        """Those of a layer, which are replicated. What the weights of outputs are computed with is always float32."""
        for module in ("attention_connection", "feed_forward_connection"):
            yield from self.connection(module, hidden)

    def connection(self, module: str, hidden: int) -> Parameters:
        yield from self._gates(module, hidden)
        yield from linear(f"{module}.outputs", self.num_streams, self.num_streams * hidden, is_float32=True)

    def last_parameters(self, module: str, hidden: int) -> Parameters:
        """Those after the layers, which are always float32."""
        for each in self._gates(module, hidden):
            yield each._replace(is_float32=True, is_quantizable=False)

    def _gates(self, module: str, hidden: int) -> Parameters:
        width = self.num_streams * hidden
        yield from norm(f"{module}.norm", self.norm, width)
        yield from linear(f"{module}.down", self.rank, width)
        yield from linear(f"{module}.up", width, self.rank)


@dataclass(frozen=True, kw_only=True)
class NGramSpec:
    """What a layer adds to the residual streams before anything else, from embeddings of a token and those just before
    it (Qwen4-Exp, 2026).

    For each number of tokens from 2 on, several heads hash them to rows of an embedding. What precedes a sequence, or
    an end of text, counts as `end_token`. The rows of all heads together are projected to a value, and to a key for
    each stream. A stream gets the value times a gate, which is computed from the products of its features with the key,
    and a causal convolution of that, normalized. Replicated on all ranks, except the embedding.
    """

    size: int
    """Features of the rows of all heads together."""
    multipliers: tuple[int, ...]
    """Of a token, and of those before it."""
    head_rows: tuple[int, ...]
    """Rows of the embedding that the heads have, those of the same number of tokens one after another."""
    total_rows: int
    """With unused ones at the end."""
    parts: int
    """Tensors in the checkpoint, with as many rows each, but for the last ones."""
    end_token: int
    num_streams: int
    conv_size: int
    """Inputs that the convolution sees, including its token's own, which are as far apart as there are tokens in the
    longest n-gram."""
    norm: NormSpec
    """Of each stream, of its keys, and of the convolution's inputs."""

    @property
    def head_dim(self) -> int:
        """Features of a row."""
        return self.size // len(self.head_rows)

    @property
    def tokens(self) -> int:
        """Those of the longest n-gram."""
        return len(self.multipliers)

    @property
    def conv_span(self) -> int:
        """Tokens from the first to the last that the convolution sees."""
        return (self.conv_size - 1) * self.tokens + 1

    @property
    def part_rows(self) -> dict[str, int]:
        """Rows of the embedding in each of the checkpoint's tensors."""
        most = -(-self.total_rows // self.parts)
        starts = range(0, self.total_rows, most)
        return {str(number): min(most, self.total_rows - start) for number, start in enumerate(starts)}

    def kept_inputs(self, hidden: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """What a layer keeps of a request, in tokens and channels: the digits of tokens' ids, once for each place that
        they are read from, and the convolution's inputs."""
        before = self.tokens - 1
        return (before, before * ID_DIGITS), (self.conv_span - 1, self.num_streams * hidden)

    def embedded_parameters(self, tp: int) -> int:
        return -(-self.total_rows // tp) * self.head_dim

    def parameters(self, hidden: int) -> Parameters:
        """Those of a layer."""
        width, rows = self.num_streams * hidden, Units(self.total_rows, "rows", "padding")
        yield Parameter(
            "ngrams.embedding",
            "weight",
            {part: (size, self.head_dim) for part, size in self.part_rows.items()},
            {ALL: rows},
        )
        yield from linear("ngrams.key", width, self.size)
        yield from linear("ngrams.value", hidden, self.size)
        for name in ("key_norm", "query_norm", "conv_norm"):
            yield from norm(f"ngrams.{name}", self.norm, width)
        yield Parameter("ngrams", "conv", {"": (width, 1, self.conv_size)})


ConnectionSpec = HyperConnectionSpec | GatedConnectionSpec
ID_DIGITS = 3
"""Digits of a token's id, of 8 bits, which all types of activations have exactly; 0: there is no token."""


@dataclass(frozen=True, kw_only=True)
class LaurelSpec:
    """A learned residual of low rank (Menghani et al. 2024): the attention's input plus `norm(up(down(input)))` is
    averaged with the residual stream after attention, with the size of one of them."""

    rank: int
    norm: NormSpec

    def parameters(self, hidden: int) -> Parameters:
        """Those of a layer, which are replicated."""
        yield from linear("laurel.down", self.rank, hidden)
        yield from linear("laurel.up", hidden, self.rank)
        yield from norm("laurel.norm", self.norm, hidden)


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """Mixers of tokens (attention, a recurrent state, or both in parallel) and a feed-forward layer, each with norms
    before and after (None: none), added to the residual stream. Either may be missing."""

    attention: AnyAttentionSpec | None
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
    hyper: ConnectionSpec | None = None
    """The model's, if there is one."""
    ngrams: NGramSpec | None = None
    laurel: LaurelSpec | None = None
    block: SharedBlockSpec | None = None
    """What attention and feed-forward layer are of; None: they are the layer's own."""
    reads_embedding: bool = False
    """The attention reads the embedded token beside the normalized residual stream (EAGLE-3)."""

    def __post_init__(self) -> None:
        # n-grams are added to the residual streams, and what they read of earlier tokens is kept beside the state
        assert self.ngrams is None or (self.hyper is not None and self.state is not None)
        # Each residual path is a class of its own (`engine/models/make_layers.py`).
        others = self.hyper, self.normed_residuals, self.block
        own = None if self.layer_input is None and self.alt_up is None and not self.has_scalar else self
        assert sum(path is not None for path in (*others, own)) + self.reads_embedding <= 1
        assert (self.laurel is None) == (self.alt_up is None)
        assert self.alt_up is None or (self.layer_input is not None and not self.has_scalar)
        assert not self.is_parallel or (self.alt_up is None and all(path is None for path in others))

    @property
    def kv_source(self) -> int | None:
        """See `AttentionSpec`."""
        return self.attention.kv_source if isinstance(self.attention, AttentionSpec) else None

    @property
    def mixers(self) -> list[AnyAttentionSpec | RecurrentSpec]:
        return [each for each in (self.attention, self.state) if each is not None]

    @property
    def parts(self) -> list[AnyAttentionSpec | RecurrentSpec | MLPSpec | MoESpec]:
        return [*self.mixers, *([] if self.feed_forward is None else [self.feed_forward])]

    def parameters(self, hidden: int) -> Parameters:
        """All parameters, with paths in the layer. A block that layers share is where it is held."""
        for name in ("attention_norm", "attention_post_norm", "feed_forward_norm", "feed_forward_post_norm"):
            yield from norm(name, getattr(self, name), hidden)
        if self.has_scalar:
            yield vector("", "scalar", 1)
        for part in (self.layer_input, self.alt_up, self.hyper, self.ngrams, self.laurel):
            if part is not None:
                yield from part.parameters(hidden)
        if self.block is not None:
            assert isinstance(self.attention, AttentionSpec)
            assert isinstance(self.feed_forward, MLPSpec)
            yield from self.block.parameters(hidden, self.attention, self.feed_forward)
        for mixer_or_mlp in self.parts:
            if self.block is None or mixer_or_mlp is self.state:
                yield from mixer_or_mlp.parameters(hidden)

    def matrices(self, hidden: int, tp: int) -> Sequence[MatrixShape]:
        """The weights of linear layers on one rank that may be quantized."""
        return _sizes(self, hidden, tp)[0]

    def num_parameters(self, hidden: int, tp: int) -> int:
        """Parameters on one rank."""
        return _sizes(self, hidden, tp)[1]


# Planning asks for the same few layers again and again.
@cache
def _parameters(layer: LayerSpec, hidden: int) -> Sequence[Parameter]:
    return tuple(layer.parameters(hidden))


@cache
def _sizes(layer: LayerSpec, hidden: int, tp: int) -> tuple[Sequence[MatrixShape], int]:
    """The matrices, and the number of parameters."""
    parameters = _parameters(layer, hidden)
    return tuple(matrices(parameters, tp)), sum(each.elements(tp) for each in parameters)


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
    has_sinusoids: bool = False
    """Positions, counted from `position_offset` on, are added to embedded tokens as sines and cosines, which are
    computed (Vaswani et al. 2017)."""
    embedding_norm: NormSpec | None = None
    """After the embedding."""
    embedding_multiplier: float = 1.0
    logit_multiplier: float = 1.0
    logit_softcap: float = 0.0
    head_bias: bool = False
    layer_input: LayerInputSpec | None = None
    alt_up: AltUpSpec | None = None
    hyper: ConnectionSpec | None = None
    separate_experts: bool = False
    """The checkpoint has the experts one by one, where others of the architecture stack them."""
    aux_layers: tuple[int, ...] = ()
    """Layers whose input, all residual streams, a head that drafts reads (EAGLE-3); `num_layers` stands for the output
    of the last one. Inputs travel to the last stage beside what the stages pass on."""

    def __post_init__(self) -> None:
        if not self.layers:
            raise ConfigError("num_hidden_layers must be at least 1")

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def stream_width(self) -> int:
        """Features of a token in the residual streams between layers."""
        streams = self.alt_up or self.hyper
        return self.hidden_size * (1 if streams is None else streams.num_streams)

    @property
    def stage_width(self) -> int:
        """Features of a token that a stage passes to the next one: the residual streams, the layers' own inputs, the
        embedded token if layers read it, and `passed_aux_width`."""
        passed = 0 if self.layer_input is None else self.num_layers * self.layer_input.size
        return self.stream_width + passed + self.passes_embedding * self.hidden_size + self.passed_aux_width

    @property
    def aux_width(self) -> int:
        """Features of a token in the inputs of `aux_layers`, which follow those of the last stage's output."""
        return len(self.aux_layers) * self.stream_width

    @property
    def output_width(self) -> int:
        """Features of a token in the output of the last stage."""
        return self.hidden_size + self.aux_width

    @property
    def passed_aux_width(self) -> int:
        """The same of what stages pass on: only the last one has the output of the last layer."""
        return sum(number < self.num_layers for number in self.aux_layers) * self.stream_width

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
        if self.layer_input is None:
            return 0
        embedding, *_ = self.layer_input.outer_parameters(self.hidden_size, self.num_layers)
        return embedding.elements(tp)

    def parameters_before(self) -> Parameters:
        """All parameters before the layers."""
        hidden, rows = self.hidden_size, Units(self.vocab_size, "tokens", "padding")
        yield from linear("embedding", self.vocab_size, hidden, rows_of=rows)
        if self.position_embeddings:
            yield from linear("positions", self.position_embeddings, hidden)
        yield from norm("embedding_norm", self.embedding_norm, hidden)
        if self.layer_input is not None:
            yield from self.layer_input.outer_parameters(hidden, self.num_layers)
        if self.alt_up is not None:
            yield from self.alt_up.projections("expansion", hidden)

    def parameters_after(self, *, has_head: bool = True) -> Parameters:
        """All parameters after the layers; a tied head is the embedding."""
        hidden, rows = self.hidden_size, Units(self.vocab_size, "tokens", "padding")
        if self.alt_up is not None:
            yield from self.alt_up.projections("merger", hidden)
        if self.hyper is not None:
            yield from self.hyper.last_parameters("merger", hidden)
        yield from norm("norm", self.norm, hidden)
        if has_head:
            yield from linear("head", self.vocab_size, hidden, rows_of=rows, bias=self.head_bias)

    def stage_parameters(self, stages: Sequence[range], stage: int, tp: int) -> int:
        """Parameters on one rank of a stage; a tied head is stored again if the first and last stage differ."""
        is_first, is_last = stage == 0, stage == len(stages) - 1
        count = sum(layer.num_parameters(self.hidden_size, tp) for _, layer in self.held_layers(stages[stage]))
        if is_first:
            count += sum(each.elements(tp) for each in self.parameters_before())
        for each in self.parameters_after() if is_last else ():
            is_embedding = (each.module, each.kind) == ("head", "weight") and self.tie_embeddings
            count += 0 if is_embedding and is_first else each.elements(tp)
        return count

    def num_float32_parameters(self, stages: Sequence[range], stage: int) -> int:
        """Parameters on one rank of a stage that have 32 bits, whatever the model's type."""
        layers = (_parameters(self.layers[number], self.hidden_size) for number in stages[stage])
        after = self.parameters_after() if stage == len(stages) - 1 else ()
        return sum(each.elements(1) for each in chain(*layers, after) if each.is_float32)

    def layout_errors(self, tp: int) -> list[str]:
        """What `tp` ranks cannot divide."""
        errors: dict[str, None] = {}
        for layer in dict.fromkeys(self.layers):
            errors |= layout_errors(_parameters(layer, self.hidden_size), tp)
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

    def matrices(self, hidden: int, tp: int) -> Sequence[MatrixShape]:
        return self.linears

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
    attention_calls: tuple[int, ...]
    """The layers whose caches the calls of attention in a step use, in order. A layer that runs several times, or that
    calls attention several times, is as many layers here, of which the first has the weights."""
    has_key_biases: bool = False
    """Scores have biases by key, which are among the features of the keys in the KV cache."""
    continues_by_token: bool = False
    """Layers with recurrent states read them only if they get one token: what continues a request runs one token after
    another."""

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
