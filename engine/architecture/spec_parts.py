"""What the descriptions of several kinds of layers have in common. No torch here; sizes are in features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from quire.engine.protocol.errors import ConfigError

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]
GatedActivation = Activation | Literal["swiglu_oai", "silu_7", "silu_16", "silu_clamped"]
"""With gates alone: swiglu_oai is gpt-oss's, `min(gate, 7) * sigmoid(1.702 gate) * (clamp(up, ±7) + 1)`; silu_7 and
silu_16 are Step 3.5's, `min(silu(gate), 7) * clamp(up, ±7)`; silu_clamped is DeepSeek-V4's,
`silu(min(gate, 10)) * clamp(up, ±10)`."""


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
    gate_rank: int = 0
    """Above 0: the result `y` is multiplied by a gate of low rank, `sigmoid(up(silu(down(y))))` (A.X K2)."""

    def num_parameters(self, size: int) -> int:
        return size * (self.has_weight + self.bias + 2 * self.gate_rank)


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
        if self.dim % 2 or self.dim < (0 if self.kind == "none" else 2):
            raise ConfigError(f"rotary positions need an even number of features, at least 2; heads have {self.dim}")


@dataclass(frozen=True, kw_only=True)
class QueryScaleSpec:
    """A factor on the queries that grows with their position p: `1 + weight * log(1 + (p + offset) // every)`
    (Llama 4)."""

    weight: float
    every: int
    offset: int = 0
