"""Residual paths other than the plain one, and their parts. No torch here; sizes are in features."""

from __future__ import annotations

from dataclasses import dataclass

from quire.engine.architecture.attention_spec import AttentionSpec
from quire.engine.architecture.feed_forward_spec import MLPSpec
from quire.engine.architecture.spec_parts import (
    ALL,
    Activation,
    NormSpec,
    Parameter,
    Parameters,
    Shape,
    Units,
    linear,
    norm,
    vector,
)
from quire.engine.protocol.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class NormedResidualSpec:
    """The outputs of mixers and feed-forward layer are added to their normalized inputs, times a factor, in place of
    the residual stream (Bloom's `apply_residual_connection_post_layernorm`, MiniMax)."""

    mixer_multiplier: float = 1.0
    feed_forward_multiplier: float = 1.0


@dataclass(frozen=True, kw_only=True)
class EmbeddingReaderSpec:
    """The attention reads the embedded token beside the normalized residual stream (EAGLE-3)."""


@dataclass(frozen=True, kw_only=True)
class SharedBlockSpec:
    """A layer's attention and feed-forward layer belong to a block, whose weights several layers share (Zamba2).

    The attention reads the residual stream beside the embedded token, and the feed-forward layer reads the attention's
    output. The result is projected and added to the input of the layer's state, but not to the residual stream. Each
    layer has adapters of its own for the projections of both (Hu et al. 2021).
    """

    source: int
    """The first layer with this block."""
    use: int
    """The number of this layer among all that have a block."""
    norm: NormSpec
    """Applied to both inputs."""
    rank: int
    """Rank of the adapters; 0: there are none (Zamba)."""
    adapts_attention: bool
    is_held: bool = True
    """The block counts among the layer's parameters."""

    def parameters(self, hidden: int, attention: AttentionSpec, feed_forward: MLPSpec) -> Parameters:
        """Parameters of the block, if it counts here, and the layer's own parameters that go with it."""
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
class LayerInputSpec:
    """An input of each layer's own for each token (Gemma 3n): a row of an embedding, and the embedded token projected
    and normalized. A layer multiplies it by a gate, and adds it, projected and normalized, to the residual stream."""

    size: int
    vocab_size: int
    """Tokens beyond it have the row of token 0."""
    activation: Activation
    """The gate's activation."""
    norm: NormSpec

    def parameters(self, hidden: int) -> Parameters:
        """Parameters of a layer; they are replicated."""
        yield from linear("layer_input.gate", self.size, hidden)
        yield from linear("layer_input.projection", hidden, self.size)
        yield from norm("layer_input.norm", self.norm, hidden)

    def outer_parameters(self, hidden: int, num_layers: int) -> Parameters:
        """Parameters before the layers."""
        inputs, rows = num_layers * self.size, Units(self.vocab_size, "tokens", "padding")
        yield from linear("layer_inputs.embedding", self.vocab_size, inputs, rows_of=rows)
        yield from linear("layer_inputs.projection", inputs, hidden)
        yield from norm("layer_inputs.norm", self.norm, self.size)


@dataclass(frozen=True, kw_only=True)
class ScaledResidualSpec:
    """After the plain layer, its own input is added to the residual stream, and all of it is multiplied by a number
    from the checkpoint (Gemma 4)."""

    layer_input: LayerInputSpec | None

    def parameters(self, hidden: int) -> Parameters:
        """The number, and the parameters of the layer's input."""
        yield vector("", "scalar", 1)
        if self.layer_input is not None:
            yield from self.layer_input.parameters(hidden)


@dataclass(frozen=True, kw_only=True)
class LaurelSpec:
    """A learned residual of low rank (Menghani et al. 2024): the attention's input plus `norm(up(down(input)))` is
    added to the residual stream after attention, and the sum is divided by the square root of 2."""

    rank: int
    norm: NormSpec

    def parameters(self, hidden: int) -> Parameters:
        """Parameters of a layer; they are replicated."""
        yield from linear("laurel.down", self.rank, hidden)
        yield from linear("laurel.up", hidden, self.rank)
        yield from norm("laurel.norm", self.norm, hidden)


@dataclass(frozen=True, kw_only=True)
class AltUpSpec:
    """Alternating updates (Baykal et al. 2023): there are several residual streams. A layer predicts all of them from
    all, computes one, and corrects the others by the result. Its own input is added to all but the first. Before the
    layers the streams are projections of the embedded token, and after them their projections are averaged.
    """

    num_streams: int
    active: int
    """The stream that is computed."""
    norm: NormSpec
    """Applied to the stream that coefficients are computed from."""
    scales_output: bool
    """The factor of the layer's input is scaled by a vector from the checkpoint."""
    laurel: LaurelSpec
    layer_input: LayerInputSpec

    def __post_init__(self) -> None:
        if not 0 <= self.active < self.num_streams or self.num_streams < 2:
            raise ConfigError(
                f"altup_active_idx {self.active} is not one of altup_num_inputs {self.num_streams} streams"
            )

    def parameters(self, hidden: int) -> Parameters:
        """Parameters of a layer; they are replicated. The streams' parameters are never quantized."""
        yield from self.layer_input.parameters(hidden)
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
        yield from self.laurel.parameters(hidden)

    def projections(self, module: str, hidden: int) -> Parameters:
        """Parameters before the layers, or after them."""
        rows = {str(number): hidden for number in range(self.num_streams - 1)}
        yield from linear(module, rows, hidden, is_quantizable=False)


@dataclass(frozen=True, kw_only=True)
class HyperConnectionSpec:
    """Manifold-constrained hyper-connections (Xie et al. 2026): there are several residual streams, all of them the
    embedded token before the layers. The input of an attention or a feed-forward layer is a sum of the streams, and
    its output is added to each of them, after they are mixed. The weights of all three are computed from the streams,
    in float32. The mixing weights are made doubly stochastic, by dividing rows and columns by their sums
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
    """Applied to all streams together before weights are computed from them; without a weight."""

    def __post_init__(self) -> None:
        if self.num_streams < 1:
            raise ConfigError(f"hc_mult {self.num_streams} must be at least 1")

    @property
    def num_weights(self) -> int:
        """Weights of a token before and after an attention or a feed-forward layer."""
        return self.num_streams * (2 + (self.num_streams if self.iterations else 0))

    @property
    def num_scales(self) -> int:
        """Factors on these weights: one each for inputs, for outputs and, if there is any, for the mixing."""
        return 3 if self.iterations else 2

    def parameters(self, hidden: int) -> Parameters:
        """Parameters of a layer; they are always float32."""
        for name in ("attention", "feed_forward"):
            yield from self.connection(f"{name}_connection", self.num_weights, self.num_scales, hidden)

    def last_parameters(self, module: str, hidden: int) -> Parameters:
        """Parameters after the layers."""
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


ID_DIGITS = 3
"""Digits of a token's id. They have 8 bits, which all types of activations represent exactly; 0: there is no token."""


@dataclass(frozen=True, kw_only=True)
class NGramSpec:
    """An addition to the residual streams before anything else in a layer, from embeddings of a token and the tokens
    just before it (Qwen4-Exp, 2026).

    For each number of tokens from 2 on, several heads hash them to rows of an embedding. Tokens before a sequence, or
    before an end of text, count as `end_token`. The rows of all heads together are projected to a value, and to a key
    for each stream. A stream gets the value times a gate, which is computed from the products of its features with the
    key, and a causal convolution of that, normalized. Replicated on all ranks, except the embedding.
    """

    size: int
    """Features of the rows of all heads together."""
    multipliers: tuple[int, ...]
    """Multipliers of a token and of the tokens before it."""
    head_rows: tuple[int, ...]
    """Rows of the embedding for each head. Heads for the same number of tokens follow one another."""
    total_rows: int
    """Rows of the embedding, including unused rows at the end."""
    parts: int
    """Number of tensors in the checkpoint. They have equally many rows, except the last ones."""
    end_token: int
    num_streams: int
    conv_size: int
    """Inputs that the convolution sees, including its token's own. They are as far apart as the longest n-gram has
    tokens."""
    norm: NormSpec
    """Applied to each stream, to its keys, and to the convolution's inputs."""

    @property
    def head_dim(self) -> int:
        """Features of a row."""
        return self.size // len(self.head_rows)

    @property
    def tokens(self) -> int:
        """Number of tokens in the longest n-gram."""
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
        """The inputs that a layer keeps of a request, as tokens and channels: the digits of tokens' ids, once for each
        place that they are read from, and the convolution's inputs."""
        before = self.tokens - 1
        return (before, before * ID_DIGITS), (self.conv_span - 1, self.num_streams * hidden)

    def parameters(self, hidden: int) -> Parameters:
        """Parameters of a layer."""
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


@dataclass(frozen=True, kw_only=True)
class GatedConnectionSpec:
    """Hyper-connections with a gate for each feature (Qwen4-Exp, 2026): there are several residual streams, all of them
    the embedded token before the layers. Each is normalized and multiplied by the sigmoid of a gate, of low rank, and
    their mean is the input of an attention or a feed-forward layer. Its output is added to each stream, with a weight
    that is twice a sigmoid. After the layers the same mean goes to the head."""

    num_streams: int
    rank: int
    norm: NormSpec
    """Applied to each stream, with weights of its own."""
    ngrams: NGramSpec | None = None
    """N-grams that the layer adds to the streams first; its state keeps what they read of earlier tokens."""

    def __post_init__(self) -> None:
        if self.num_streams < 1 or self.rank < 1:
            raise ConfigError(f"hc_count {self.num_streams} and hc_lowrank {self.rank} must be at least 1")

    def parameters(self, hidden: int) -> Parameters:
        """Parameters of a layer; they are replicated, except an embedding. The projection to the weights of outputs is
        always float32."""
        for module in ("attention_connection", "feed_forward_connection"):
            yield from self.connection(module, hidden)
        if self.ngrams is not None:
            yield from self.ngrams.parameters(hidden)

    def connection(self, module: str, hidden: int) -> Parameters:
        yield from self._gates(module, hidden)
        yield from linear(f"{module}.outputs", self.num_streams, self.num_streams * hidden, is_float32=True)

    def last_parameters(self, module: str, hidden: int) -> Parameters:
        """Parameters after the layers; they are always float32."""
        for each in self._gates(module, hidden):
            yield each._replace(is_float32=True, is_quantizable=False)

    def _gates(self, module: str, hidden: int) -> Parameters:
        width = self.num_streams * hidden
        yield from norm(f"{module}.norm", self.norm, width)
        yield from linear(f"{module}.down", self.rank, width)
        yield from linear(f"{module}.up", width, self.rank)


ConnectionSpec = HyperConnectionSpec | GatedConnectionSpec
ResidualSpec = (
    NormedResidualSpec | EmbeddingReaderSpec | SharedBlockSpec | ScaledResidualSpec | AltUpSpec | ConnectionSpec
)
"""The residual path of a layer that is not the plain one; `quire.engine.models.make_layers` chooses its class."""
