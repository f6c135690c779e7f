"""Descriptions of layers with a recurrent state, and their requirements on a rank. No torch here; see
`quire.engine.architecture.model_spec`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from quire.engine.architecture.spec_parts import (
    Activation,
    NormSpec,
    Parameter,
    Parameters,
    Units,
    convolution,
    linear,
    norm,
    vector,
)
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
        """The number of units that ranks divide: there cannot be more ranks."""

    @abstractmethod
    def state_shape(self, tp: int) -> tuple[int, int, int]:
        """The state's matrices on a rank: how many, rows (key features) and columns (value features)."""

    @abstractmethod
    def parameters(self, hidden: int) -> Parameters:
        """All parameters, of a layer whose input has `hidden` features."""

    def input_shape(self, tp: int) -> tuple[int, int]:
        """The kept inputs of the convolution on a rank: tokens and channels."""
        # The convolution has the same channels whatever the size of the hidden state.
        convolutions = [each for each in self.parameters(1) if (each.module, each.kind) == ("state.conv", "weight")]
        return self.conv_size - 1, sum(channels for each in convolutions for channels, *_ in each.shapes(tp))

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
    """Applied to each head's output before its gate."""
    beta_scale: float = 1.0
    """The largest weight of an update; with 2 a state may change its sign (Grazzi et al. 2024)."""
    gate: Literal["silu", "sigmoid"] = "silu"
    """The activation of the output's gates."""
    has_joint_input: bool = False
    """The checkpoint has the weights of updates and decays in one matrix with queries, keys, values and gates."""

    def state_shape(self, tp: int) -> tuple[int, int, int]:
        return self.num_value_heads // tp, self.key_head_dim, self.value_head_dim

    def parameters(self, hidden: int) -> Parameters:
        heads, keys = self.num_value_heads, self.num_key_heads * self.key_head_dim
        of_values, of_keys = Units(heads, "value heads"), Units(self.num_key_heads, "key heads")
        units = {"q": of_keys, "k": of_keys, "v": of_values, "z": of_values, "b": of_values, "a": of_values}
        convolved, gates = {"q": keys, "k": keys, "v": self.width}, {"b": heads, "a": heads}
        inputs = {**convolved, "z": self.width, **(gates if self.has_joint_input else {})}
        yield from linear("state.input", inputs, hidden, rows_of=units)
        if not self.has_joint_input:
            yield from linear("state.gates", gates, hidden, rows_of=units)
        yield from convolution("state.conv", convolved, self.conv_size, units)
        yield vector("state", "decay", heads, of_values)
        yield vector("state", "step_bias", heads, of_values)
        yield from norm("state.norm", self.norm, self.value_head_dim)
        yield from linear("state.output", hidden, self.width, columns_of=of_values)


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

    def parameters(self, hidden: int) -> Parameters:
        units = Units(self.width, "channels")
        yield from linear("state.input", dict.fromkeys("bcx", self.width), hidden, rows_of=units, bias=self.bias)
        yield from convolution("state.conv", {"": self.width}, self.conv_size, {"": units}, bias=self.bias)
        yield from linear("state.output", hidden, self.width, columns_of=units, bias=self.bias)


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
    """Applied to the features of each group; None: the output is only gated."""
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

    def parameters(self, hidden: int) -> Parameters:
        heads, keys = Units(self.num_value_heads, "state-space heads"), self.groups * self.state_size
        groups = Units(self.groups, "groups of state-space heads", "copies of one")
        units = {"z": heads, "x": heads, "b": groups, "c": groups, "dt": heads}
        convolved = {"x": self.width, "b": keys, "c": keys}
        inputs = {"z": self.width, **convolved, "dt": self.num_value_heads}
        yield from linear("state.input", inputs, hidden, rows_of=units, bias=self.input_bias)
        yield from convolution("state.conv", convolved, self.conv_size, units, bias=self.conv_bias)
        for name in ("decay", "skip", "step_bias"):
            yield vector("state", name, self.num_value_heads, heads)
        yield from norm("state.norm", self.norm, self.width, heads)
        yield from linear("state.output", hidden, self.width, columns_of=heads, bias=self.output_bias)


@dataclass(frozen=True, kw_only=True)
class KimiDeltaSpec(ValueHeadsSpec):
    """Kimi Delta Attention (2025): the gated delta rule with a decay for each key feature, after a causal convolution.

    Keys and values have the same size, and each head has its own.
    """

    rank: int | None
    """Size of the vectors that decays and output gates are computed from; None: they are computed from the hidden
    state."""
    lower_bound: float | None = None
    """Decays are this times a sigmoid, rather than minus a softplus."""
    norm: NormSpec
    """Applied to each head's output before its gate."""
    has_rate_grid: bool = False
    """The checkpoint has the heads' rates as `[1, 1, heads, 1]`."""

    def state_shape(self, tp: int) -> tuple[int, int, int]:
        return self.num_value_heads // tp, self.value_head_dim, self.value_head_dim

    def parameters(self, hidden: int) -> Parameters:
        heads, width = Units(self.num_value_heads, "heads of Kimi Delta Attention"), self.width
        gates = dict.fromkeys("fg", width) if self.rank is None else dict.fromkeys(("f_a", "g_a"), self.rank)
        inputs = {**dict.fromkeys("qkv", width), "b": self.num_value_heads, **gates}
        units = dict.fromkeys([*"qkvb", *(gates if self.rank is None else ())], heads)
        yield from linear("state.input", inputs, hidden, rows_of=units)
        if self.rank is not None:
            yield from linear("state.decay_up", width, self.rank, rows_of=heads)
            yield from linear("state.gate_up", width, self.rank, rows_of=heads)
        yield from convolution("state.conv", dict.fromkeys("qkv", width), self.conv_size, dict.fromkeys("qkv", heads))
        grid = (1, 1, self.num_value_heads, 1) if self.has_rate_grid else (self.num_value_heads,)
        yield Parameter("state", "decay", {"": grid}, {"": heads}, dim=2 if self.has_rate_grid else 0)
        yield vector("state", "step_bias", width, heads)
        yield from norm("state.norm", self.norm, self.value_head_dim)
        yield from linear("state.output", hidden, width, columns_of=heads)


@dataclass(frozen=True, kw_only=True)
class LightningSpec(ValueHeadsSpec):
    """Lightning attention (Qin et al. 2024): linear attention with a constant decay for each head, whose rates resemble
    ALiBi's slopes. Queries, keys and values go through silu; the output is normalized over all heads and gated."""

    rate: float
    """Factor on the heads' rates."""
    norm: NormSpec
    output_multiplier: float = 1.0

    def state_shape(self, tp: int) -> tuple[int, int, int]:
        return self.num_value_heads // tp, self.value_head_dim, self.value_head_dim

    def parameters(self, hidden: int) -> Parameters:
        heads = Units(self.num_value_heads, "heads of lightning attention")
        yield from linear("state.input", dict.fromkeys(("q", "k", "v", "gate"), self.width), hidden, rows_of=heads)
        yield from norm("state.norm", self.norm, self.width, heads)
        yield from linear("state.output", hidden, self.width, columns_of=heads)


@dataclass(frozen=True, kw_only=True)
class MLSTMSpec(ValueHeadsSpec):
    """xLSTM's matrix memory (Beck et al. 2024): linear attention with a decay for each head and an exponential gate of
    its inputs, divided by the result of the same attention for values of 1, at least 1. The output is normalized and
    gated."""

    key_head_dim: int
    norm: NormSpec
    """Applied to each head's output, with a weight for each feature of all heads."""
    gate_cap: float
    """The gates of inputs and decays become `cap * tanh(gate / cap)` before their exponential and sigmoid."""

    def state_shape(self, tp: int) -> tuple[int, int, int]:
        return self.num_value_heads // tp, self.key_head_dim, self.value_head_dim + 1

    def parameters(self, hidden: int) -> Parameters:
        heads, keys = Units(self.num_value_heads, "heads of the xLSTM"), self.num_value_heads * self.key_head_dim
        inputs = {"q": keys, "k": keys, "v": self.width, "ogate_preact": self.width}
        yield from linear("state.input", inputs, hidden, rows_of=heads)
        yield from linear("state.gates", dict.fromkeys("if", self.num_value_heads), hidden, rows_of=heads, bias=True)
        yield vector("state.norm", "weight", self.width, heads)
        yield from linear("state.output", hidden, self.width, columns_of=heads)


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
    """Applied to that vector, keys and queries."""
    conv_bias: bool = True
    bias: bool = False

    @property
    def num_heads(self) -> int:
        return self.width

    def state_shape(self, tp: int) -> tuple[int, int, int]:
        return 1, self.state_size, self.width // tp

    def parameters(self, hidden: int) -> Parameters:
        width, units = self.width, Units(self.width, "channels of Mamba")
        yield from linear("state.input", dict.fromkeys("xz", width), hidden, rows_of=units, bias=self.bias)
        yield from convolution("state.conv", {"": width}, self.conv_size, {"": units}, bias=self.conv_bias)
        yield from linear("state.select", self.rank + 2 * self.state_size, width, columns_of=units)
        for name, size in (("step", self.rank), ("key", self.state_size), ("query", self.state_size)):
            yield from norm(f"state.{name}_norm", self.norm, size)
        yield from linear("state.step", width, self.rank, rows_of=units, bias=True)
        yield Parameter("state", "decay", {"": (width, self.state_size)}, {"": units})
        yield vector("state", "skip", width, units)
        yield from linear("state.output", hidden, width, columns_of=units, bias=self.bias)


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

    def parameters(self, hidden: int) -> Parameters:
        width, size, keys = self.width, self.group_width, self.state_size
        heads = Units(self.groups, "heads of Mamba")
        yield from linear("state.input", dict.fromkeys("xz", width), hidden, rows_of=heads, bias=self.bias)
        yield from convolution("state.conv", {"": width}, self.conv_size, {"": heads}, bias=self.conv_bias)
        for module, kind, shape in (
            ("state.select", "weight", (self.rank + 2 * keys, size)),
            ("state.step", "weight", (size, self.rank)),
            ("state", "step_bias", (size,)),
            ("state", "decay", (size, keys)),
            ("state", "skip", (size,)),
        ):
            yield Parameter(module, kind, {"": (self.groups, *shape)}, {"": heads})
        yield from linear("state.output", hidden, width, columns_of=heads, bias=self.bias)


@dataclass(frozen=True, kw_only=True)
class RGLRUSpec(RecurrentSpec):
    """A real-gated linear recurrent unit (De et al. 2024, "Griffin"), after a causal convolution: each channel has a
    single number as its state, with a decay that depends on the token. The gates of inputs and decays are computed
    from blocks of channels; the output is multiplied by an activation of the hidden state. All linear layers have
    biases."""

    width: int
    """Channels."""
    blocks: int
    """Number of blocks of channels; gates are computed from the channels of a block."""
    activation: Activation

    def __post_init__(self) -> None:
        if self.blocks < 1 or self.width % self.blocks:
            raise ConfigError(
                f"{self.width} channels of the recurrent unit cannot be divided into {self.blocks} blocks"
            )

    @property
    def num_heads(self) -> int:
        return self.blocks

    def state_shape(self, tp: int) -> tuple[int, int, int]:
        return 1, 1, self.width // tp

    def parameters(self, hidden: int) -> Parameters:
        size, blocks = self.width // self.blocks, {"": Units(self.blocks, "blocks of the recurrent unit")}
        yield from linear("state.input", dict.fromkeys("xy", self.width), hidden, rows_of=blocks[""], bias=True)
        yield from convolution("state.conv", {"": self.width}, self.conv_size, blocks, bias=True)
        for name in ("input", "decay"):
            yield Parameter(f"state.{name}_gate", "weight", {"": (self.blocks, size, size)}, blocks)
            yield Parameter("state", f"{name}_bias", {"": (self.blocks, size)}, blocks)
        yield vector("state", "decay", self.width, blocks[""])
        yield from linear("state.output", hidden, self.width, columns_of=blocks[""], bias=True)


@dataclass(frozen=True, kw_only=True)
class RWKVSpec(RecurrentSpec):
    """A layer of RWKV-4 (Peng et al. 2023): weighted means of values, whose weights decay with the distance, and then a
    feed-forward layer, both gated. They read mixes of each token with the one before it, which is a state, too. The
    layer's input is the residual stream, and its output what both parts add to it."""

    width: int
    """Channels of keys and values."""
    inner_size: int
    """Inner features of the feed-forward layer."""
    norm: NormSpec
    """Applied to both parts' inputs."""
    hidden_size: int

    @property
    def num_heads(self) -> int:
        return self.width

    def state_shape(self, tp: int) -> tuple[int, int, int]:
        return 1, 3, self.width // tp

    def input_shape(self, tp: int) -> tuple[int, int]:
        """The last token's inputs of both parts."""
        return 2, self.hidden_size

    def parameters(self, hidden: int) -> Parameters:
        channels, inner = Units(self.width, "channels of RWKV"), Units(self.inner_size, "feed-forward columns")
        for name in ("norm", "inner_norm"):
            yield from norm(f"state.{name}", self.norm, hidden)
        for name in ("mix_key", "mix_value", "mix_receptance", "inner_mix_key", "inner_mix_receptance"):
            yield Parameter("state", name, {"": (1, 1, hidden)})
        for name in ("decay", "bonus"):
            yield vector("state", name, self.width, channels)
        for name in ("key", "value", "receptance"):
            yield from linear(f"state.{name}", self.width, hidden, rows_of=channels)
        yield from linear("state.output", hidden, self.width, columns_of=channels)
        yield from linear("state.inner_key", self.inner_size, hidden, rows_of=inner)
        yield from linear("state.inner_receptance", hidden, hidden)
        yield from linear("state.inner_value", hidden, self.inner_size, columns_of=inner)


class KeptTensor(NamedTuple):
    """One state of a layer that transformers builds."""

    kind: str
    """conv or recurrent."""
    number: int
    """Its number among the layer's states of this kind."""
    module: str
    """Path of the module that uses it."""
    shape: tuple[int, ...]
    """The shape on one rank, for one request."""
    is_float32: bool
    """Whether the state is float32 whatever the model's type; otherwise it has that type."""


@dataclass(frozen=True, kw_only=True)
class TransformersStateSpec(RecurrentSpec):
    """The states of a layer as transformers builds it, one after another in one row of float32. Sizes are per rank, in
    the layout in which the layer was measured; the layer's parameters are counted elsewhere."""

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

    def parameters(self, hidden: int) -> Parameters:
        return iter(())
