"""Parts that the descriptions of several kinds of layers have in common. No torch here; sizes are in features."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from quire.engine.protocol.errors import ConfigError

Activation = Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2"]
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
    """Columns of the whole weight, if the rank has only some of them; 0: it has all."""

    @property
    def elements(self) -> int:
        return self.rows * self.columns * self.number


Shape = tuple[int, ...]
ALL = "*"
"""All parts of a parameter."""


class Units(NamedTuple):
    """Equal units of a dimension, such as heads, that tensor-parallel ranks divide among themselves."""

    number: int
    name: str
    """The name in error messages."""
    spare: Literal["none", "copies", "copies of one", "padding", "whole"] = "none"
    """How units that do not divide evenly are distributed. "none": that is an error. "copies": with fewer units than
    ranks, each unit is replicated on several ranks; "copies of one": only a single unit is replicated. "padding": the
    last ranks have fewer units. "whole": every rank has all units."""

    def share(self, size: int, tp: int) -> int:
        """A rank's share of a dimension of `size`."""
        if self.spare == "padding":
            return -(-size // tp)
        if not self.number:  # a part of size 0, as in some configs
            return 0
        if self.spare == "whole" and self.number % tp:
            return size
        return max(1, self.number // tp) * (size // self.number)

    def start(self, size: int, rank: int, tp: int) -> int:
        """Where a rank's share of a dimension of `size` begins; it is not padded."""
        return rank * self.number // tp * (size // self.number) if self.number else 0

    def is_divisible(self, tp: int) -> bool:
        if self.number % tp == 0:
            return True
        match self.spare:
            case "copies":
                return tp % self.number == 0
            case "copies of one":
                return self.number == 1
        return self.spare in ("padding", "whole")


class Parameter(NamedTuple):
    """A parameter of a module, in the whole model."""

    module: str
    """Path in the layer, or in the model, such as attention.qkv."""
    kind: str
    """Its name in the module: weight, bias, …"""
    parts: Mapping[str, Shape]
    """Shapes of the matrices or vectors that are stacked in it, by name; for experts, of a single expert."""
    units: Mapping[str, Units] = {}
    """The units that ranks divide in each part, or in all parts as one under `ALL`; every rank has all other parts."""
    dim: int = 0
    """The dimension that they divide."""
    number: int = 1
    """Experts that a rank has."""
    is_float32: bool = False
    """It has 32 bits, whatever the model's type."""
    is_quantizable: bool = False
    """It is the matrix of a linear layer that may be quantized."""

    def shapes(self, tp: int) -> Iterator[Shape]:
        """The shape of each part on one of `tp` ranks, or of all as one."""
        if ALL in self.units:
            rows, (_, *rest) = sum(rows for rows, *_ in self.parts.values()), next(iter(self.parts.values()))
            yield (self.units[ALL].share(rows, tp), *rest)
            return
        for part, shape in self.parts.items():
            if part in self.units:
                own = self.units[part].share(shape[self.dim], tp)
                shape = (*shape[: self.dim], own, *shape[self.dim + 1 :])
            yield shape

    def elements(self, tp: int) -> int:
        """Number of elements on one of `tp` ranks."""
        return self.number * sum(map(math.prod, self.shapes(tp)))

    def matrix(self, tp: int) -> MatrixShape:
        """The parameter as the weight of a linear layer on one of `tp` ranks."""
        (_, whole), (_, columns) = next(iter(self.parts.values())), next(self.shapes(tp))
        rows = sum(rows for rows, _ in self.shapes(tp))
        return MatrixShape(rows, columns, self.number, self.module, whole if self.dim == 1 else 0)


Parameters = Iterator[Parameter]


def without_number(module: str) -> tuple[str, int | None]:
    """A module's path without the number of its layer, and that number."""
    found = re.search(r"\.(\d+)", module)
    return (module, None) if found is None else (re.sub(r"\.\d+", "", module), int(found[1]))


def linear(
    module: str,
    rows: int | Mapping[str, int],
    columns: int,
    *,
    rows_of: Units | Mapping[str, Units] | None = None,
    columns_of: Units | None = None,
    bias: bool = False,
    number: int = 1,
    is_float32: bool = False,
    is_quantizable: bool = True,
) -> Parameters:
    """The weight and bias of a linear layer. Ranks divide the rows, of all parts or of the parts in `rows_of`, or the
    columns; if they divide columns, each has the whole bias. A weight that is always float32 is never quantized."""
    parts = {"": rows} if isinstance(rows, int) else rows
    units = rows_of if isinstance(rows_of, Mapping) else dict.fromkeys(parts, rows_of) if rows_of is not None else {}
    divided = units if columns_of is None else dict.fromkeys(parts, columns_of)
    weights = {part: (size, columns) for part, size in parts.items()}
    yield Parameter(
        module,
        "weight",
        weights,
        divided,
        dim=0 if columns_of is None else 1,
        number=number,
        is_float32=is_float32,
        is_quantizable=is_quantizable and not is_float32,
    )
    if bias:
        yield Parameter(module, "bias", {part: (size,) for part, size in parts.items()}, units, number=number)


BOUNDS = ("input_min", "input_max", "output_min", "output_max")


def bounds(module: str, parts: Iterable[str]) -> Parameters:
    """The bounds to which a linear layer clamps its inputs and outputs, of each part its own (Gemma 4)."""
    for kind in BOUNDS:
        yield Parameter(module, kind, dict.fromkeys(parts, (1,)))


def convolution(
    module: str, channels: Mapping[str, int], size: int, units: Mapping[str, Units], *, bias: bool = False
) -> Parameters:
    """The weight and bias of a causal convolution of each channel."""
    yield Parameter(module, "weight", {part: (number, 1, size) for part, number in channels.items()}, units)
    if bias:
        yield Parameter(module, "bias", {part: (number,) for part, number in channels.items()}, units)


def vector(module: str, kind: str, size: int, units: Units | None = None) -> Parameter:
    return Parameter(module, kind, {"": (size,)}, {} if units is None else {"": units})


def matrices(parameters: Iterable[Parameter], tp: int) -> Iterator[MatrixShape]:
    """The weights of linear layers on one rank that may be quantized."""
    return (each.matrix(tp) for each in parameters if each.is_quantizable)


def layout_errors(parameters: Iterable[Parameter], tp: int) -> dict[str, None]:
    """The units that `tp` ranks cannot divide, each once, in order."""
    units = dict.fromkeys(units for each in parameters for units in each.units.values())
    return dict.fromkeys(f"{each.number} {each.name}" for each in units if not each.is_divisible(tp))


@dataclass(frozen=True, kw_only=True)
class NormSpec:
    """Normalization: by root mean square (Zhang & Sennrich 2019), or by mean and variance (Ba et al. 2016); or a factor
    for each feature alone, without normalization (Touvron et al. 2021)."""

    eps: float
    kind: Literal["rms", "layer", "scale"] = "rms"
    bias: bool = False
    offset: float = 0.0
    """Added to the weight: Gemma stores weights minus 1."""
    has_weight: bool = True
    gate_rank: int = 0
    """Above 0: the result `y` is multiplied by a gate of low rank, `sigmoid(up(silu(down(y))))` (A.X K2)."""


def norm(module: str, spec: NormSpec | None, size: int, units: Units | None = None) -> Parameters:
    """The parameters of a norm of `size` features, whose `units` ranks may divide; `spec` None: there is no norm."""
    if spec is None:
        return
    if spec.gate_rank:
        yield from linear(f"{module}.gate_down", spec.gate_rank, size, is_quantizable=False)
        yield from linear(f"{module}.gate_up", size, spec.gate_rank, is_quantizable=False)
        module = f"{module}.norm"
    if spec.has_weight:
        yield vector(module, "weight", size, units)
    if spec.bias:
        yield vector(module, "bias", size, units)


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
    sections: tuple[int, ...] = ()
    """Pairs that turn by the position along time, height and width, as tokens of images have three positions (M-RoPE,
    Qwen2-VL); empty: all turn by a token's only position."""
    has_mixed_sections: bool = False
    """The axes take turns, time first, and time has the pairs that are left when an axis has all of its own
    (Qwen3-VL). Otherwise the pairs of an axis are side by side."""
    has_time_last: bool = False
    """Height and width, which have as many pairs each, take turns, and then come those of time (ERNIE 4.5 VL)."""
    splits_features: bool = False
    """`sections` are halves of the numbers of features, side by side, that turn by each axis, so that the two of a pair
    may turn by different ones; there may be four axes, which `MediaSpec.place_axes` describes (Hunyuan VL)."""

    def __post_init__(self) -> None:
        if self.dim % 2 or self.dim < (0 if self.kind == "none" else 2):
            raise ConfigError(f"rotary positions need an even number of features, at least 2; heads have {self.dim}")
        is_whole = self.has_mixed_sections or 2 * sum(self.sections) == self.dim
        counts = (3, 4) if self.splits_features else (3,)
        if self.sections and (len(self.sections) not in counts or not is_whole):
            raise ConfigError(
                f"mrope_section {[*self.sections]} is not {' or '.join(map(str, counts))} parts of {self.dim // 2} "
                "pairs of features"
            )
        if self.has_time_last and len({*self.sections[1:]}) > 1:
            raise ConfigError(f"mrope_section has {self.sections[1]} pairs for height and {self.sections[2]} for width")

    @property
    def axes(self) -> tuple[int, ...]:
        """With `sections`: the axis of each pair; 0 is time, 1 height, 2 width. With `splits_features`: of each
        feature."""
        if self.splits_features:
            return tuple(axis for axis, number in enumerate(self.sections) for _ in range(2 * number))
        time, height, width = self.sections
        if self.has_time_last:
            return (1, 2) * height + (0,) * time
        if not self.has_mixed_sections:
            return (0,) * time + (1,) * height + (2,) * width
        ends = (0, 3 * height, 3 * width)
        return tuple(pair % 3 if pair < ends[pair % 3] else 0 for pair in range(self.dim // 2))


@dataclass(frozen=True, kw_only=True)
class QueryScaleSpec:
    """A factor on the queries that grows with their position p: `1 + weight * log(1 + (p + offset) // every)`
    (Llama 4)."""

    weight: float
    every: int
    offset: int = 0
