"""A decoder's description: what each of its layers consists of, and what that requires on a rank. No torch here.

`quire.engine.architecture.families` derives a `ModelSpec` from Hugging Face's `config.json`; `quire.engine.models`
builds the modules. Each layer has its own description (equal ones are one object), so that windows, dense first layers
and layers without positions are not special cases. Sizes are in features and parameters; `hidden` is the model's hidden
size."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from quire.engine.architecture.attention_spec import AnyAttentionSpec, AttentionSpec, CompressedAttentionSpec, MLASpec
from quire.engine.architecture.recurrent_spec import RecurrentSpec
from quire.engine.architecture.spec_parts import Activation, GatedActivation, MatrixShape, NormSpec
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

    def matrices(self, hidden: int, tp: int) -> Iterator[MatrixShape]:
        yield MatrixShape((1 + self.is_gated) * self.intermediate_size // tp, hidden, 1, "feed_forward.gate_up")
        yield MatrixShape(hidden, self.intermediate_size // tp, 1, "feed_forward.down", self.intermediate_size)

    def num_other_parameters(self, hidden: int, tp: int) -> int:
        """Parameters other than the matrices."""
        inner = (1 + self.is_gated) * self.intermediate_size // tp
        return self.bias * inner + self.has_output_bias * hidden

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

    def experts_per_rank(self, tp: int) -> tuple[int, int]:
        """The number of experts on a rank, and the inner features of each."""
        return self.num_experts, self.intermediate_size // tp

    def width(self, tp: int) -> int:
        """Inner features of a token on one rank."""
        _, size = self.experts_per_rank(tp)
        return self.top_k * size + (0 if self.shared is None else self.shared.width(tp))

    def activations(self, tp: int) -> int:
        """See `MLPSpec`."""
        return 3 * self.width(tp)

    def matrices(self, hidden: int, tp: int) -> Iterator[MatrixShape]:
        yield from self.expert_matrices(hidden, tp)
        if self.latent_size:
            yield MatrixShape(self.latent_size, hidden, 1, "feed_forward.latent_down")
            yield MatrixShape(hidden, self.latent_size, 1, "feed_forward.latent_up")
        for each in () if self.shared is None else self.shared.matrices(hidden, tp):
            yield each._replace(module=each.module.replace("feed_forward.", "feed_forward.shared."))

    def expert_matrices(self, hidden: int, tp: int) -> Iterator[MatrixShape]:
        """Those of the experts that tokens are routed to."""
        (number, size), features = self.experts_per_rank(tp), self.latent_size or hidden
        yield MatrixShape((1 + self.is_gated) * size, features, number, "feed_forward.experts.gate_up")
        yield MatrixShape(features, size, number, "feed_forward.experts.down", self.intermediate_size)

    def num_other_parameters(self, hidden: int, tp: int) -> int:
        """Parameters other than the matrices; the router is included, as it is never sharded or quantized."""
        number, size = self.experts_per_rank(tp)
        count = self.num_experts * (hidden + self.router_bias + self.correction_bias)
        count += self.bias * number * ((1 + self.is_gated) * size + (self.latent_size or hidden))
        count += self.shared_gate * hidden
        count += 5 * (0 if self.norm is None else self.norm.num_parameters(hidden))
        count += self.expert_scale * self.num_experts + self.table_size * self.top_k
        return count if self.shared is None else count + self.shared.num_other_parameters(hidden, tp)

    def num_float32_parameters(self, hidden: int) -> int:
        """Parameters that are always float32: those that decide the routing. Tables have int32."""
        count = self.num_experts * (hidden + self.correction_bias + self.expert_scale) + self.table_size * self.top_k
        return count + self.shared_gate * hidden

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
    """Of the adapters; 0: there are none (Zamba)."""
    adapts_attention: bool
    is_held: bool = True
    """The block counts among the layer's parameters."""

    def matrices(self, hidden: int, tp: int, attention: AttentionSpec, feed_forward: MLPSpec) -> Iterator[MatrixShape]:
        """Those of the layer's own."""
        yield MatrixShape(hidden, hidden, 1, "block_output")
        if not self.rank:
            return
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

    def matrices(self, hidden: int) -> Iterator[MatrixShape]:
        """Those of a layer: none, as they are never quantized."""
        yield from ()

    def num_float32_parameters(self, hidden: int) -> int:
        """Parameters in a layer that are always float32: all."""
        return self.num_other_parameters(hidden)

    def num_other_parameters(self, hidden: int) -> int:
        """Parameters in a layer other than the matrices."""
        return 2 * (self.num_weights * (self.num_streams * hidden + 1) + self.num_scales)

    def num_last_parameters(self, hidden: int) -> int:
        """Parameters after the layers; all are float32."""
        return 0 if self.averages else self.num_streams * (self.num_streams * hidden + 1) + 1


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

    def matrices(self, hidden: int) -> Iterator[MatrixShape]:
        """Those of a layer, which are replicated."""
        width = self.num_streams * hidden
        for name in ("attention", "feed_forward"):
            yield MatrixShape(self.rank, width, 1, f"{name}_connection.down")
            yield MatrixShape(width, self.rank, 1, f"{name}_connection.up")

    def num_float32_parameters(self, hidden: int) -> int:
        """Parameters in a layer that are always float32: those that the weights of outputs are computed with."""
        return 2 * self.num_streams**2 * hidden

    def num_other_parameters(self, hidden: int) -> int:
        """Parameters in a layer other than the matrices."""
        width = self.num_streams * hidden
        return self.num_float32_parameters(hidden) + 2 * self.norm.num_parameters(width)

    def num_last_parameters(self, hidden: int) -> int:
        """Parameters after the layers; all are float32."""
        width = self.num_streams * hidden
        return 2 * self.rank * width + self.norm.num_parameters(width)


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

    def matrices(self, hidden: int) -> Iterator[MatrixShape]:
        yield MatrixShape(self.num_streams * hidden, self.size, 1, "ngrams.key")
        yield MatrixShape(hidden, self.size, 1, "ngrams.value")

    def embedded_parameters(self, tp: int) -> int:
        return -(-self.total_rows // tp) * self.head_dim

    def num_other_parameters(self, hidden: int, tp: int) -> int:
        """Parameters other than the matrices."""
        width = self.num_streams * hidden
        return self.embedded_parameters(tp) + 3 * self.norm.num_parameters(width) + self.conv_size * width


ConnectionSpec = HyperConnectionSpec | GatedConnectionSpec
ID_DIGITS = 3
"""Digits of a token's id, of 8 bits, which all types of activations have exactly; 0: there is no token."""


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

    @property
    def _held_parts(self) -> list[AnyAttentionSpec | RecurrentSpec | MLPSpec | MoESpec]:
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
        if self.hyper is not None:
            yield from self.hyper.matrices(hidden)
        if self.ngrams is not None:
            yield from self.ngrams.matrices(hidden)

    def num_parameters(self, hidden: int, tp: int) -> int:
        """Parameters on one rank."""
        count = sum(each.elements for each in self.matrices(hidden, tp))
        count += sum(part.num_other_parameters(hidden, tp) for part in self._held_parts)
        if self.block is not None and self.block.is_held and isinstance(self.attention, AttentionSpec):
            count += self.block.norm.num_parameters(self.attention.input_size + hidden)
        count += 0 if self.alt_up is None else self.alt_up.num_parameters(hidden)
        count += 0 if self.hyper is None else self.hyper.num_other_parameters(hidden)
        count += 0 if self.ngrams is None else self.ngrams.num_other_parameters(hidden, tp)
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
        if self.hyper is not None:
            count += last * self.hyper.num_last_parameters(self.hidden_size)
        if last:
            count += 0 if self.tie_embeddings and first else embedding
            count += self.head_bias * self.vocab_per_rank(tp)
            count += self.norm.num_parameters(self.hidden_size) if self.norm is not None else 0
        return count

    def num_float32_parameters(self, stages: Sequence[range], stage: int) -> int:
        """Parameters on one rank of a stage that have 32 bits, whatever the model's type."""
        hidden, count = self.hidden_size, 0
        for layer in (self.layers[number] for number in stages[stage]):
            if isinstance(layer.feed_forward, MoESpec):
                count += layer.feed_forward.num_float32_parameters(hidden)
            if isinstance(layer.attention, CompressedAttentionSpec):
                count += layer.attention.num_float32_parameters(hidden)
            elif isinstance(layer.attention, MLASpec) and layer.attention.indexer is not None:
                count += layer.attention.indexer.num_float32_parameters(hidden)
            count += 0 if layer.hyper is None else layer.hyper.num_float32_parameters(hidden)
        is_last = stage == len(stages) - 1
        return count + (self.hyper.num_last_parameters(hidden) if is_last and self.hyper is not None else 0)

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
