"""Vision transformers that encode images and videos (Dosovitskiy et al. 2021). No torch here; sizes are in features."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal

from quire.engine.architecture.attention_spec import AttentionSpec
from quire.engine.architecture.encoder_spec import EncoderAttentionSpec
from quire.engine.architecture.feed_forward_spec import MLPSpec
from quire.engine.architecture.media_spec import TowerSpec, TowerWork
from quire.engine.architecture.model_spec import LayerSpec
from quire.engine.architecture.spec_parts import (
    Activation,
    NormSpec,
    Parameter,
    Parameters,
    RopeSpec,
    Units,
    linear,
    norm,
    vector,
)
from quire.engine.protocol.errors import ConfigError
from quire.engine.protocol.media import MediaItem

FINE = 2
"""Feed-forward layers, and mergers behind all layers, cost about twice as much as queries, keys and values. So they
have twice as many slices, which are half as large."""


@dataclass(frozen=True, kw_only=True)
class PatchSpec:
    """The embedding of a patch of pixels: a convolution whose stride is its size."""

    shape: tuple[int, ...]
    """Of a patch, as in the checkpoint's weight behind the output features: channels, frames if there are several,
    rows, columns; a single number for a linear layer."""
    bias: bool = True

    @property
    def pixels(self) -> int:
        return math.prod(self.shape)

    def parameters(self, module: str, width: int) -> Parameters:
        yield Parameter(module, "weight", {"": (width, *self.shape)})
        if self.bias:
            yield vector(module, "bias", width)


@dataclass(frozen=True, kw_only=True)
class MergerSpec:
    """Two linear layers from the vectors of `merged` patches, one after another, to a feature of the decoder."""

    width: int
    """Of a patch's vector."""
    merged: int
    """Patches that become one feature."""
    output: int
    inner: int
    """Between the layers."""
    norm: NormSpec | None
    """Of the input."""
    normalizes_merged: bool = False
    """The norm is over all merged vectors together, instead of over each."""
    activation: Activation = "gelu"
    bias: bool = True

    @property
    def norm_size(self) -> int:
        return self.width * (self.merged if self.normalizes_merged else 1)

    @property
    def units(self) -> Units:
        return Units(self.inner, "merger columns")

    def parameters(self, module: str) -> Parameters:
        yield from norm(f"{module}.norm", self.norm, self.norm_size)
        yield from linear(f"{module}.up", self.inner, self.width * self.merged, rows_of=self.units, bias=self.bias)
        yield from linear(f"{module}.down", self.output, self.inner, columns_of=self.units, bias=self.bias)


@dataclass(frozen=True, kw_only=True)
class ConvolvedMergerSpec:
    """A convolution over squares of patches, and then a gated feed-forward layer behind a projection (GLM-4.5V,
    2025)."""

    width: int
    """Of a patch's vector."""
    merge: int
    """Rows and columns of patches in a square."""
    output: int
    norm: NormSpec
    """Between the projection and the feed-forward layer, with a GELU behind it."""
    feed_forward: MLPSpec

    @property
    def convolution(self) -> PatchSpec:
        return PatchSpec(shape=(self.width, self.merge, self.merge))

    def parameters(self, module: str) -> Parameters:
        yield from self.convolution.parameters(f"{module}.convolution", self.output)
        yield from linear(f"{module}.projection", self.output, self.output)
        yield from norm(f"{module}.norm", self.norm, self.output)
        yield from self.feed_forward.parameters(self.output, f"{module}.feed_forward")


@dataclass(frozen=True, kw_only=True)
class ResamplerSpec:
    """Two linear layers, with a GELU between and a norm behind them, for the vectors of the patches of a square, one
    after another; two more of this kind for two squares at the same place in successive frames; then a projection and
    a norm (ERNIE 4.5 VL). An image is its own next frame."""

    width: int
    """Of a patch's vector."""
    merged: int
    """Patches in a square."""
    output: int
    norm: NormSpec
    """Behind two layers."""
    output_norm: NormSpec

    @property
    def inner(self) -> int:
        """Features of a square."""
        return self.width * self.merged

    @property
    def units(self) -> Units:
        return Units(self.inner, "merger columns")

    def parameters(self, module: str) -> Parameters:
        for part, columns in (("squares", self.inner), ("frames", 2 * self.inner)):
            up, down = f"{module}.{part}.up", f"{module}.{part}.down"
            yield from linear(up, self.inner, columns, rows_of=self.units, bias=True)
            yield from linear(down, self.inner, self.inner, columns_of=self.units, bias=True)
            yield from norm(f"{module}.{part}.norm", self.norm, self.inner)
        yield from linear(f"{module}.projection", self.output, self.inner, bias=True)
        yield from norm(f"{module}.norm", self.output_norm, self.output)


@dataclass(frozen=True, kw_only=True)
class StretchedPositionsSpec:
    """A learned grid of position vectors, stretched to the picture's size (Qwen3-VL, GLM-4.5V)."""

    side: int
    """Rows and columns of the grid."""
    kind: Literal["linear", "cubic"] = "linear"
    """Linear interpolation, with the grid's corners in the picture's; or cubic (Keys 1981), with the borders of the
    grid's cells at the picture's borders."""

    def parameters(self, module: str, width: int) -> Parameters:
        yield from linear(module, self.side**2, width, is_quantizable=False)


@dataclass(frozen=True, kw_only=True)
class VisionTowerSpec(TowerSpec):
    """Patches that are embedded as vectors, and attend to each other in layers. Each kind of tower is a subclass, with
    what comes before and after the layers."""

    width: int
    """Of a patch's vector in the layers."""
    patch: PatchSpec
    layers: tuple[LayerSpec, ...]
    """With `EncoderAttentionSpec` and `MLPSpec`."""

    def steps(self, item: MediaItem, device: str) -> Iterator[tuple[TowerWork, int]]:
        """See `TowerSpec`: the arrays; slices of the embedding of patches; positions; slices of queries, keys and
        values, of attention and of the feed-forward layer in each layer; slices of the mergers."""
        tokens, count = self.tokens_of(item), self.num_slices(item, device)

        def sliced(modules: Sequence[str], number: int, attention: float = 0.0) -> tuple[TowerWork, int]:
            linear = sum(self._linear_work[module] for module in modules)
            return TowerWork(tokens * linear / number, tokens * attention / number), number

        # To copy the arrays takes about half as long as their product with the weight, and positions a quarter.
        (embedding, _), (half, _), (quarter, _) = (sliced(["patches"], number) for number in (count, 2, 4))
        yield from ((half, 1), (embedding, count), (quarter, 1))
        for number, layer in enumerate(self.layers):
            own, num_keys = f"layers.{number}", self.num_keys(item, number)
            mixing, num_query_slices = self.mixing(layer, num_keys), self.num_query_slices(item, device, num_keys)
            yield sliced([f"{own}.attention.qkv"], count)
            yield sliced([f"{own}.attention.output"], num_query_slices, mixing)
            yield sliced([f"{own}.feed_forward"], FINE * count)
            yield from (sliced(modules, FINE * count) for modules in self.mergers(number))

    @cached_property
    def _linear_work(self) -> Mapping[str, float]:
        """Multiplications by the parameters of each module, and of those in it, for each of the tower's tokens."""
        work = defaultdict[str, float](float)
        for each in self.parameters():
            for module in accumulate(each.module.split("."), "{}.{}".format):
                work[module] += each.elements(1) / self.patches_per_input(each.module)
        return work

    def num_keys(self, item: MediaItem, layer: int) -> int:
        """The tokens that each of an item's tokens attends to in a layer, at most."""
        return self.tokens_of(item)

    def mixing(self, layer: LayerSpec, num_keys: int) -> float:
        """Multiplications in a layer's attention of a token to so many."""
        attention = layer.attention
        assert isinstance(attention, AttentionSpec)
        return 2.0 * attention.num_heads * attention.head_dim * num_keys

    def mergers(self, layer: int) -> Sequence[Sequence[str]]:
        """What computes features from the output of a layer: the modules of each computation, one after another."""
        return [["projector"]] if layer == len(self.layers) - 1 else []

    @property
    def state_width(self) -> int:
        """See `TowerSpec`: the vector, its query, key and value, and less than a vector for its positions."""
        attention = self.layers[0].attention
        assert isinstance(attention, AttentionSpec)
        return 2 * self.width + 3 * attention.num_heads * attention.head_dim

    def parameters(self) -> Parameters:
        """See `TowerSpec`."""
        yield from self.patch.parameters("patches", self.width)
        for number, layer in enumerate(self.layers):
            for each in layer.parameters(self.width):
                yield each._replace(module=f"layers.{number}.{each.module}")

    def rows(self, module: str, part: str) -> Sequence[range] | None:
        """Queries and keys whose neighbouring features rotate are reordered into halves."""
        attention = self.layers[0].attention
        assert isinstance(attention, AttentionSpec)
        rope = attention.rope
        if rope is None or not rope.is_interleaved or module != "layers.attention.qkv" or part == "v":
            return None
        heads = range(0, attention.num_heads * attention.head_dim, attention.head_dim)
        ends = [(head, head + rope.dim, head + attention.head_dim) for head in heads]
        return [
            each for start, turned, end in ends for each in (*_pairs(start, turned), range(turned, end)) if len(each)
        ]


def _pairs(start: int, end: int) -> tuple[range, range]:
    return range(start, end, 2), range(start + 1, end, 2)


@dataclass(frozen=True, kw_only=True)
class GridTowerSpec(VisionTowerSpec):
    """A tower for pictures of any size: patches are turned by their row and column, and squares of neighbouring ones
    become a feature (Qwen2-VL, Wang et al. 2024). Patches come square by square; those of a frame attend to each
    other."""

    merge: int
    """Rows and columns of patches in a square."""
    merger: MergerSpec | ConvolvedMergerSpec | ResamplerSpec
    projector: MergerSpec | None = None
    """Of each patch, before the merger."""
    turns_by_time: bool = False
    """Patches are turned by their frame, too (MiniMax-M3)."""
    is_joint: bool = False
    """The patches of all frames attend to each other."""
    embedding_norm: NormSpec | None = None
    """Of embedded patches."""
    positions: StretchedPositionsSpec | None = None
    norm: NormSpec | None = None
    """After the layers."""
    window: int = 0
    """Rows and columns of squares in a window (Qwen2.5-VL); 0: attention is to the whole frame."""
    full_layers: tuple[int, ...] = ()
    """The layers with attention to the whole frame in spite of `window`."""
    levels: tuple[int, ...] = ()
    """The layers whose output gives the features of the decoder's first layers, in their order (DeepStack)."""
    level_merger: MergerSpec | None = None
    """Of each of the levels."""

    def __post_init__(self) -> None:
        assert len(self.levels) == self.num_levels
        if wrong := [number for number in self.levels if number not in range(len(self.layers))]:
            raise ConfigError(f"deepstack_visual_indexes has {wrong}, but vision_config's depth is {len(self.layers)}")

    def is_narrow(self, layer: int) -> bool:
        """Whether attention is to the tokens of a window."""
        return bool(self.window) and layer not in self.full_layers

    def num_keys(self, item: MediaItem, layer: int) -> int:
        """See `VisionTowerSpec`: of a frame, or of a window."""
        frames = 1 if self.is_joint else max(1, sum(run.grid[0] for run in item.runs))
        size = -(-self.tokens_of(item) // frames)
        return min(size, (self.window * self.merge) ** 2) if self.is_narrow(layer) else size

    def mergers(self, layer: int) -> Sequence[Sequence[str]]:
        """See `VisionTowerSpec`; a resampler has two halves."""
        found = [[f"level_mergers.{self.levels.index(layer)}"]] if layer in self.levels else []
        if layer < len(self.layers) - 1:
            return found
        if isinstance(self.merger, ResamplerSpec):
            return [*found, ["projector", "merger.squares"], ["merger.frames", "merger.projection"]]
        return [*found, ["projector", "merger"]]

    @property
    def patches_per_feature(self) -> int:
        """See `TowerSpec`."""
        return self.merge**2 * (2 if isinstance(self.merger, ResamplerSpec) else 1)

    def patches_per_input(self, module: str) -> int:
        """See `TowerSpec`."""
        return self.merge**2 if module.startswith(("merger.", "level_mergers.")) else 1

    def parameters(self) -> Parameters:
        """See `TowerSpec`."""
        yield from super().parameters()
        yield from norm("embedding_norm", self.embedding_norm, self.width)
        if self.positions is not None:
            yield from self.positions.parameters("positions", self.width)
        yield from norm("norm", self.norm, self.width)
        if self.projector is not None:
            yield from self.projector.parameters("projector")
        yield from self.merger.parameters("merger")
        for number in range(self.num_levels):
            assert self.level_merger is not None
            yield from self.level_merger.parameters(f"level_mergers.{number}")


def tower_layer(
    width: int,
    heads: int,
    feed_forward: MLPSpec,
    norm: NormSpec,
    *,
    rope: RopeSpec | None = None,
    bias: bool = True,
    **changes: object,
) -> LayerSpec:
    """A layer with `heads` that together have the features of a patch's vector; `changes` are fields of its
    attention."""
    if width % heads:
        raise ConfigError(f"vision_config: hidden size {width} is not a multiple of the number of heads, {heads}")
    attention = {"num_heads": heads, "num_kv_heads": heads, "head_dim": width // heads, "rope": rope}
    attention |= {"scale": (width // heads) ** -0.5, "qkv_bias": bias, "output_bias": bias}
    return LayerSpec(
        attention=EncoderAttentionSpec(**{**attention, **changes}),  # type: ignore[arg-type]
        feed_forward=feed_forward,
        attention_norm=norm,
        feed_forward_norm=norm,
    )
