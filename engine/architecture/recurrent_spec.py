"""Descriptions of layers with a recurrent state, and what they require on a rank. No torch here; see
`quire.engine.architecture.model_spec`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from quire.engine.architecture.spec_parts import Activation, MatrixShape, NormSpec
from quire.engine.protocol.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class RecurrentSpec(ABC):
    """A layer with a recurrent state of fixed size for each request: float32 matrices, and the last inputs of a causal
    convolution. The base of all kinds."""

    conv_size: int = 1
    """Tokens that the convolution sees, including its own; 1: there is none."""
    other_inputs: tuple[tuple[int, int], ...] = ()
    """The kept inputs of other convolutions in the layer, which every rank has: tokens and channels."""

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
        inputs = sum(math.prod(shape) for shape in (self.input_shape(tp), *self.other_inputs))
        return 4 * math.prod(self.state_shape(tp)) + inputs * width

    def workspace(self, length: int, tp: int) -> int:
        """See `AttentionSpec`."""
        return 0


@dataclass(frozen=True, kw_only=True)
class ValueHeadsSpec(RecurrentSpec):
    """A layer with a state for each head of its values."""

    num_value_heads: int
    value_head_dim: int

    @property
    def num_heads(self) -> int:
        return self.num_value_heads

    @property
    def width(self) -> int:
        """Features of all heads."""
        return self.num_value_heads * self.value_head_dim


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNetSpec(ValueHeadsSpec):
    """Linear attention by the gated delta rule (Yang et al. 2024), after a causal convolution."""

    num_key_heads: int
    """Each belongs to several value heads, one after another."""
    key_head_dim: int
    norm: NormSpec
    """Of each head's output, before its gate."""
    beta_scale: float = 1.0
    """The largest weight of an update; with 2 a state may change its sign (Grazzi et al. 2024)."""
    gate: Literal["silu", "sigmoid"] = "silu"
    """The activation of the output's gates."""
    has_joint_input: bool = False
    """The checkpoint has the weights of updates and decays in one matrix with queries, keys, values and gates."""

    def state_shape(self, tp: int) -> tuple[int, int, int]:
        return self.num_value_heads // tp, self.key_head_dim, self.value_head_dim

    def channels(self, tp: int) -> int:
        """Queries, keys and values."""
        return (2 * self.num_key_heads * self.key_head_dim + self.width) // tp

    def matrices(self, hidden: int, tp: int) -> Iterator[MatrixShape]:
        inner, heads = self.channels(tp) + self.width // tp, 2 * self.num_value_heads // tp
        yield MatrixShape(inner + (heads if self.has_joint_input else 0), hidden, 1, "state.input")
        if not self.has_joint_input:
            yield MatrixShape(heads, hidden, 1, "state.gates")
        yield MatrixShape(hidden, self.width // tp, 1, "state.output", self.width)

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
class Mamba2Spec(ValueHeadsSpec):
    """Mamba-2's state space (Dao & Gu 2024): linear attention with a decay for each head, after a causal convolution.

    A head's values are weighted by a step, which also determines the decay; keys and queries (B and C) are shared by
    the heads of a group. The output is gated and normalized.
    """

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
class KimiDeltaSpec(ValueHeadsSpec):
    """Kimi Delta Attention (2025): the gated delta rule with a decay for each key feature, after a causal convolution.

    Keys and values have the same size, and each head has its own.
    """

    rank: int | None
    """Size of the vectors that decays and output gates are computed from; None: from the hidden state."""
    lower_bound: float | None = None
    """Decays are this times a sigmoid, rather than minus a softplus."""
    norm: NormSpec
    """Of each head's output, before its gate."""
    has_rate_grid: bool = False
    """The checkpoint has the heads' rates as `[1, 1, heads, 1]`."""

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
class LightningSpec(ValueHeadsSpec):
    """Lightning attention (Qin et al. 2024): linear attention with a constant decay for each head, of rates like those
    of ALiBi's slopes. Queries, keys and values go through silu; the output is normalized over all heads and gated."""

    rate: float
    """Factor on the heads' rates."""
    norm: NormSpec
    output_multiplier: float = 1.0

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
class MLSTMSpec(ValueHeadsSpec):
    """xLSTM's matrix memory (Beck et al. 2024): linear attention with a decay for each head and an exponential gate of
    its inputs, divided by what the same attention gives for values of 1, at least 1. The output is normalized and
    gated."""

    key_head_dim: int
    norm: NormSpec
    """Of each head's output, with a weight for each feature of all heads."""
    gate_cap: float
    """The gates of inputs and decays become `cap * tanh(gate / cap)` before their exponential and sigmoid."""

    def state_shape(self, tp: int) -> tuple[int, int, int]:
        return self.num_value_heads // tp, self.key_head_dim, self.value_head_dim + 1

    def channels(self, tp: int) -> int:
        return 0

    def matrices(self, hidden: int, tp: int) -> Iterator[MatrixShape]:
        inner = 2 * (self.num_value_heads * self.key_head_dim + self.width) // tp
        yield MatrixShape(inner, hidden, 1, "state.input")
        yield MatrixShape(2 * self.num_value_heads // tp, hidden, 1, "state.gates")
        yield MatrixShape(hidden, self.width // tp, 1, "state.output", self.width)

    def num_other_parameters(self, hidden: int, tp: int) -> int:
        return 2 * self.num_value_heads // tp + self.width // tp

    def layout_errors(self, tp: int) -> Iterator[str]:
        if self.num_value_heads % tp:
            yield f"{self.num_value_heads} heads of the xLSTM"


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
        return count + (0 if self.norm is None else self.norm.num_parameters(self.rank + 2 * self.state_size))

    def layout_errors(self, tp: int) -> Iterator[str]:
        if self.width % tp:
            yield f"{self.width} channels of Mamba"


@dataclass(frozen=True, kw_only=True)
class GroupedMambaSpec(MambaSpec):
    """The same with groups of channels, each of which has its own vector, keys and queries (Zamba)."""

    groups: int

    def __post_init__(self) -> None:
        if self.groups < 1 or self.width % self.groups:
            raise ConfigError(f"{self.width} channels of Mamba cannot be divided among {self.groups} heads")

    @property
    def num_heads(self) -> int:
        return self.groups

    @property
    def group_width(self) -> int:
        """Channels of a group."""
        return self.width // self.groups

    def state_shape(self, tp: int) -> tuple[int, int, int]:
        return self.groups // tp, self.state_size, self.group_width

    def matrices(self, hidden: int, tp: int) -> Iterator[MatrixShape]:
        yield MatrixShape(2 * self.width // tp, hidden, 1, "state.input")
        yield MatrixShape(hidden, self.width // tp, 1, "state.output", self.width)

    def num_other_parameters(self, hidden: int, tp: int) -> int:
        own = 2 * (self.rank + self.state_size)  # what vectors, keys and queries, and steps are computed with
        return super().num_other_parameters(hidden, tp) + self.width // tp * own

    def layout_errors(self, tp: int) -> Iterator[str]:
        if self.groups % tp:
            yield f"{self.groups} heads of Mamba"


@dataclass(frozen=True, kw_only=True)
class RGLRUSpec(RecurrentSpec):
    """A real-gated linear recurrent unit (De et al. 2024, "Griffin"), after a causal convolution: each channel has a
    single number as its state, with a decay that depends on the token. The gates of inputs and decays are computed
    from blocks of channels; the output is multiplied by an activation of the hidden state. All linear layers have
    biases."""

    width: int
    """Channels."""
    blocks: int
    """Their number; gates are computed from the channels of a block."""
    activation: Activation

    def __post_init__(self) -> None:
        if self.blocks < 1 or self.width % self.blocks:
            raise ConfigError(
                f"{self.width} channels of the recurrent unit cannot be divided into {self.blocks} blocks"
            )

    @property
    def num_heads(self) -> int:
        return self.blocks

    @property
    def block_width(self) -> int:
        """Channels of a block."""
        return self.width // self.blocks

    def state_shape(self, tp: int) -> tuple[int, int, int]:
        return 1, 1, self.width // tp

    def channels(self, tp: int) -> int:
        return self.width // tp

    def matrices(self, hidden: int, tp: int) -> Iterator[MatrixShape]:
        yield MatrixShape(2 * self.width // tp, hidden, 1, "state.input")
        yield MatrixShape(hidden, self.width // tp, 1, "state.output", self.width)

    def num_other_parameters(self, hidden: int, tp: int) -> int:
        # biases of the input, the convolution with its bias, both gates with theirs, decays
        return self.width // tp * (2 + self.conv_size + 1 + 2 * (self.block_width + 1) + 1) + hidden

    def layout_errors(self, tp: int) -> Iterator[str]:
        if self.blocks % tp:
            yield f"{self.blocks} blocks of the recurrent unit"


@dataclass(frozen=True, kw_only=True)
class RWKVSpec(RecurrentSpec):
    """A layer of RWKV-4 (Peng et al. 2023): weighted means of values, whose weights decay with the distance, and then a
    feed-forward layer, both gated. They read mixes of each token with the one before it, which is a state, too. The
    layer's input is the residual stream, and its output what both parts add to it."""

    width: int
    """Channels of keys and values."""
    inner_size: int
    """Of the feed-forward layer."""
    norm: NormSpec
    """Of both parts' inputs."""
    hidden_size: int

    @property
    def num_heads(self) -> int:
        return self.width

    def state_shape(self, tp: int) -> tuple[int, int, int]:
        return 1, 3, self.width // tp

    def channels(self, tp: int) -> int:
        return self.hidden_size

    def input_shape(self, tp: int) -> tuple[int, int]:
        """The last token's inputs of both parts."""
        return 2, self.hidden_size

    def matrices(self, hidden: int, tp: int) -> Iterator[MatrixShape]:
        for name in ("key", "value", "receptance"):
            yield MatrixShape(self.width // tp, hidden, 1, f"state.{name}")
        yield MatrixShape(hidden, self.width // tp, 1, "state.output", self.width)
        yield MatrixShape(self.inner_size // tp, hidden, 1, "state.inner_key")
        yield MatrixShape(hidden, self.inner_size // tp, 1, "state.inner_value", self.inner_size)
        yield MatrixShape(hidden, hidden, 1, "state.inner_receptance")

    def num_other_parameters(self, hidden: int, tp: int) -> int:
        return 2 * self.width // tp + 5 * hidden + 2 * self.norm.num_parameters(hidden)

    def layout_errors(self, tp: int) -> Iterator[str]:
        if self.width % tp:
            yield f"{self.width} channels of RWKV"
        if self.inner_size % tp:
            yield f"{self.inner_size} feed-forward columns"


class KeptTensor(NamedTuple):
    """One state of a layer that transformers builds."""

    kind: str
    """conv or recurrent."""
    number: int
    """Among the layer's states of this kind."""
    module: str
    """Path of the module that uses it."""
    shape: tuple[int, ...]
    """On one rank, for one request."""
    is_float32: bool
    """Whatever the type of the model; else it has that type."""


@dataclass(frozen=True, kw_only=True)
class TransformersStateSpec(RecurrentSpec):
    """The states of a layer as transformers builds it, one after another in one row of float32. Sizes are those of one
    rank, in the layout in which the layer was measured; the layer's parameters are counted elsewhere."""

    tensors: tuple[KeptTensor, ...]

    def places(self) -> Iterator[tuple[KeptTensor, slice]]:
        """Each state, and where in the row it lies."""
        start = 0
        for tensor in self.tensors:
            end = start + math.prod(tensor.shape)
            yield tensor, slice(start, end)
            start = end

    @property
    def num_heads(self) -> int:
        return 1

    def state_shape(self, tp: int) -> tuple[int, int, int]:
        return 1, 1, sum(math.prod(tensor.shape) for tensor in self.tensors)

    def channels(self, tp: int) -> int:
        return 0

    def matrices(self, hidden: int, tp: int) -> Iterator[MatrixShape]:
        return iter(())

    def num_other_parameters(self, hidden: int, tp: int) -> int:
        return 0

    def layout_errors(self, tp: int) -> Iterator[str]:
        return iter(())
