"""A vision transformer (Dosovitskiy et al. 2021) over an image or its tiles, and a projector to the decoder's features.

CLIP, SigLIP, Pixtral and InternViT are such towers. Each tile is encoded by itself: its patches attend to each other.
No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from quire.engine.architecture.attention_spec import AttentionSpec
from quire.engine.architecture.encoder_spec import EncoderAttentionSpec
from quire.engine.architecture.feed_forward_spec import MLPSpec
from quire.engine.architecture.spec_parts import (
    Activation,
    NormSpec,
    Parameter,
    Parameters,
    Units,
    linear,
    norm,
    vector,
)
from quire.engine.architecture.tower_spec import VisionTowerSpec
from quire.engine.protocol.errors import ConfigError
from quire.engine.protocol.media import MediaItem

_MAX_JOINED = 4
"""Frames whose patches become one feature, if they are joined."""


@dataclass(frozen=True, kw_only=True)
class ImagePositionsSpec:
    """What is added to the patches of an image, whose places are numbered row by row."""

    grid: int
    """Patches along each side of the images in training."""
    kind: Literal["learned", "bicubic", "bilinear", "antialiased", "antialiased bicubic", "fractional", "axes"] | None
    """"learned": a vector for each patch of the grid, so that images must have its size. "bicubic", "bilinear",
    "antialiased": other sizes get interpolations, "antialiased" bilinear ones. "fractional": others get the vector at
    the same fraction of the height and width (Dehghani et al. 2023). "axes": a vector for each column and
    one for each row (Gemma 4). None: there are none."""
    class_token: Literal["first", "last"] | None = None
    """A learned token, before or after the patches, which the projector does not read."""
    leading_ones: int = 0
    """Dimensions of size 1 that the checkpoint has before those of the positions."""
    unused: int = 0
    """Vectors before these in the checkpoint, which are not used."""
    is_square: bool = False
    """The checkpoint has a dimension for the rows of the grid and one for its columns."""

    def parameters(self, width: int) -> Parameters:
        """All parameters, for patches of `width` features."""
        ones, has_class = (1,) * self.leading_ones, self.class_token is not None
        if has_class:
            yield Parameter("positions", "class_token", {"": (*ones, *ones, width)})
        if self.kind:
            shape = (*ones, self.unused + self.grid**2 + has_class)
            if self.kind == "axes" or self.is_square:
                shape = (*ones, 2 if self.kind == "axes" else self.grid, self.grid)
            yield Parameter("positions", "weight", {"": (*shape, width)})


@dataclass(frozen=True, kw_only=True)
class ProjectorSpec:
    """Makes features of the decoder's size: it merges squares of patches into one, then applies linear layers."""

    side: int = 1
    """Patches along the side of such a square."""
    merging: Literal["patches", "channels", "mean"] = "patches"
    """The features of a square are concatenated patch by patch, row by row, or feature by feature; or averaged."""
    patch_norm: NormSpec | None = None
    """Applied to patches before they are merged."""
    multiplier: float = 1.0
    """Factor on merged features."""
    standardizes: bool = False
    """Merged features are shifted and scaled, each by numbers of its own."""
    merged_size: int = 0
    """Above 0: a linear layer without bias reduces the features of a square to so many."""
    activates_merged: bool = False
    """The activation is applied to these, too."""
    norm: NormSpec | None = None
    """Applied to merged features."""
    inner_size: int = 0
    """Features between two linear layers; 0: there is only one."""
    activation: Activation = "gelu"
    """Applied to them."""
    is_gated: bool = False
    """The first layer has twice the outputs: features, then the gates whose activation multiplies them."""
    bias: bool = True

    @property
    def num_merged(self) -> int:
        """Patches that one feature is made of."""
        return self.side**2

    def parameters(self, width: int, hidden: int) -> Parameters:
        """All parameters, from patches of `width` features to `hidden` ones."""
        size = width if self.merging == "mean" else width * self.side**2
        yield from norm("projector.patch_norm", self.patch_norm, width)
        if self.standardizes:
            yield from (vector("projector", kind, size) for kind in ("shift", "scale"))
        if self.merged_size:
            yield from linear("projector.merged", self.merged_size, size)
            size = self.merged_size
        yield from norm("projector.norm", self.norm, size)
        if self.inner_size:
            units = Units(self.inner_size, "projector columns")
            rows = {"up": self.inner_size, "gate": self.inner_size} if self.is_gated else {"up": self.inner_size}
            yield from linear("projector.up", rows, size, rows_of=units, bias=self.bias)
            yield from linear("projector.down", hidden, self.inner_size, columns_of=units, bias=self.bias)
        else:
            yield from linear("projector.down", hidden, size, bias=self.bias)


@dataclass(frozen=True, kw_only=True)
class ConvolutionsSpec:
    """Makes features of the decoder's size by two convolutions over squares of 3 patches, each of which halves rows and
    columns and doubles the features, and a linear layer (Step 3.7)."""

    bias: bool = False
    """Of the linear layer."""

    @property
    def num_merged(self) -> int:
        """Patches that one feature is made of."""
        return 16

    def parameters(self, width: int, hidden: int) -> Parameters:
        """All parameters, from patches of `width` features to `hidden` ones."""
        for module, size in (("projector.first", width), ("projector.second", 2 * width)):
            yield Parameter(module, "weight", {"": (2 * size, size, 3, 3)})
            yield vector(module, "bias", 2 * size)
        yield from linear("projector.down", hidden, 4 * width, bias=self.bias)


@dataclass(frozen=True, kw_only=True)
class FramedSpec:
    """Makes features of the decoder's size by convolutions over squares of patches; there is a learned feature at the
    end of each row, one before and one behind all (Hunyuan VL)."""

    side: int
    """Patches along the side of such a square."""
    activation: Activation
    """Between the convolutions, the first of which doubles the features of a patch; the second doubles these."""
    norm: NormSpec
    """Of patches, and of features."""

    @property
    def num_merged(self) -> int:
        """Patches that one feature is made of."""
        return self.side**2

    def parameters(self, width: int, hidden: int) -> Parameters:
        """All parameters, from patches of `width` features to `hidden` ones."""
        yield from norm("projector.patch_norm", self.norm, width)
        yield Parameter("projector.first", "weight", {"": (2 * width, width, self.side, self.side)})
        yield Parameter("projector.second", "weight", {"": (4 * width, 2 * width, 1, 1)})
        for module, size in (("projector.first", 2 * width), ("projector.second", 4 * width)):
            yield vector(module, "bias", size)
        yield from linear("projector.down", hidden, 4 * width, bias=True)
        for kind, size in (("newline", 4 * width), ("begin", hidden), ("end", hidden)):
            yield vector("projector.marks", kind, size)
        yield from norm("projector.norm", self.norm, hidden)


@dataclass(frozen=True, kw_only=True)
class WindowReaderSpec:
    """Reduces the patches of a tile window by window: learned queries, to which averages or samples of the patches are
    added, attend to each other and then to the window's patches (Granite Vision 4, after BLIP-2's Q-Former). There is
    a reader for each part of features, which reads its own output of the tower's layers."""

    grid: int
    """Patches along a tile's side."""
    window: int
    """Patches along a window's side."""
    queries: int
    """Queries along its side."""
    num_averaged: int
    """The first so many readers add averages of patches to their queries."""
    num_sampled: int
    """The readers behind these add one patch of each square of two rows and columns: the first one's is the first patch
    of the square, and so on, row by row."""
    attention: EncoderAttentionSpec
    feed_forward: MLPSpec
    inner_norm: NormSpec
    """Before the attention, and after each of the three parts of the layer."""
    norm: NormSpec
    """Of the patches."""

    def __post_init__(self) -> None:
        if self.grid % self.window:
            raise ConfigError(f"downsample_rate: {self.grid} patches are not a multiple of {self.window}, the window")
        if self.num_sampled and (self.grid % 2 or 2 * self.queries != self.window):
            raise ConfigError(f"downsample_rate {self.queries}/{self.window} is not supported: it must be one half")

    @property
    def num_merged(self) -> int:
        """Patches that one feature is made of, at most."""
        return -(-(self.window**2) // self.queries**2)

    def parameters(self, width: int, hidden: int) -> Parameters:
        """All parameters, from patches of `width` features in all outputs to `hidden` features of each reader."""
        width //= self.num_averaged + self.num_sampled
        for kind, count in (("averaged", self.num_averaged), ("sampled", self.num_sampled)):
            for number in range(count):
                for each in self._reader(width, hidden):
                    yield each._replace(module=f"projector.{kind}.{number}.{each.module}")

    def _reader(self, width: int, hidden: int) -> Parameters:
        yield from norm("norm", self.norm, width)
        yield Parameter("tokens", "queries", {"": (1, self.queries**2, width)})
        yield Parameter("tokens", "places", {"": (1, self.window**2, width)})
        for module in ("input_norm", "attention_norm", "cross_norm", "feed_forward_norm"):
            yield from norm(module, self.inner_norm, width)
        yield from self.attention.parameters(width)
        heads = Units(self.attention.num_heads, "heads of the projector")
        yield from linear("cross.query", width, width, rows_of=heads, bias=True)
        yield from linear("cross.kv", {"k": width, "v": width}, width, rows_of=heads, bias=True)
        yield from linear("cross.output", width, width, columns_of=heads, bias=True)
        yield from self.feed_forward.parameters(width, "feed_forward")
        yield from linear("down", hidden, width, bias=True)


@dataclass(frozen=True, kw_only=True)
class AnyResolutionSpec:
    """An image is one tile of its own, then tiles of a larger copy, whose features become one picture without the
    copy's padding, with a learned feature at the end of each row (LLaVA-NeXT, 2024)."""

    sizes: tuple[tuple[int, int], ...]
    """Height and width in pixels that such a copy, with padding, may have."""
    tile: int
    """Pixels along a tile's side."""
    max_tiles: int = 0
    """Above 0: more features than so many tiles have are reduced by bilinear interpolation (LLaVA-OneVision)."""
    video_side: int = 0
    """Above 0: frames of a video are reduced to a grid of so many features along each side."""


@dataclass(frozen=True, kw_only=True)
class ViTSpec(VisionTowerSpec):
    """See the module."""

    side: int
    """Pixels along the side of a patch."""
    pixels: Literal["images", "grids", "patches", "placed patches"] = "images"
    """What the model's processor returns: images, whose features are behind those of their parts, if they have some
    (Step 3.7); patches of images of any size one after another, with the frames, rows and columns of each (Kimi K2.5);
    patches with padding (SigLIP 2); or these with their places, and with values from 0 to 1, which the tower spreads
    over -1 to 1 (Gemma 4)."""
    joins_frames: bool = False
    """The patches of a grid's frames attend to each other, and have positions along time, which are computed sines and
    cosines; the projector reads their mean (Kimi K2.5). Otherwise each frame is by itself."""
    rotary: Literal["alternating", "by turns", "rows first", "columns first", "columns first, in halves"] = (
        "alternating"
    )
    """Which pairs of a head's features rotary positions turn by the row, and which by the column. "alternating": even
    ones by the row, all with frequencies of their own (Pixtral). "by turns": even ones by the column, odd ones by the
    row, with the same frequency (Kimi K2.5). "rows first", "columns first": the first half of them by the row, or by
    the column (Llama 4). "in halves": pairs are halves of half a head (Gemma 4). With a class token, which has no
    place, rows and columns are counted from 1."""
    positions: ImagePositionsSpec
    embedding_norm: NormSpec | None = None
    """Applied to tokens before the layers."""
    outputs: tuple[int, ...]
    """The projector reads the tokens after so many layers, concatenated."""
    norm: NormSpec | None = None
    """Applied to these."""
    projector: ProjectorSpec | ConvolutionsSpec | FramedSpec | WindowReaderSpec
    any_resolution: AnyResolutionSpec | None = None
    multiplier: float = 1.0
    """Factor on features: a decoder that multiplies embedded tokens may multiply features, too (Granite)."""

    def __post_init__(self) -> None:
        if not self.outputs or not all(0 <= each <= len(self.layers) for each in self.outputs):
            raise ConfigError(f"vision_feature_layer: there are {len(self.layers)} layers, but it names {self.outputs}")

    def num_keys(self, item: MediaItem, layer: int) -> int:
        """See `VisionTowerSpec`: of a tile, if all have about the size of those in training."""
        tokens, positions = self.tokens_of(item), self.positions
        if self.pixels != "images" or positions.kind not in ("learned", "fractional"):
            return tokens
        return min(tokens, positions.grid**2 + (positions.class_token is not None))

    @property
    def patches_per_feature(self) -> int:
        """See `TowerSpec`. At any resolution, padding has no features, and those of many tiles are reduced."""
        if self.any_resolution is not None:
            return max(4, self.projector.num_merged)
        return self.projector.num_merged * (_MAX_JOINED if self.joins_frames else 1)

    def patches_per_input(self, module: str) -> int:
        """See `TowerSpec`."""
        return self.projector.num_merged if module.startswith("projector.") else 1

    def rows(self, module: str, part: str) -> Sequence[range] | None:
        """See `TowerSpec`: a head's pairs become halves of it."""
        if self.rotary != "columns first, in halves":
            return super().rows(module, part)
        attention = self.layers[0].attention
        assert isinstance(attention, AttentionSpec)
        heads = {"layers.attention.query_norm": 1, "layers.attention.key_norm": 1}
        if part in ("q", "k"):
            heads["layers.attention.qkv"] = attention.num_heads if part == "q" else attention.num_kv_heads
        if module not in heads:
            return None
        starts, quarter = range(0, heads[module] * attention.head_dim, attention.head_dim), attention.head_dim // 4
        return [range(at, at + quarter) for head in starts for at in (head + quarter * n for n in (0, 2, 1, 3))]

    def parameters(self) -> Parameters:
        """See `TowerSpec`."""
        yield from super().parameters()
        yield from self.positions.parameters(self.width)
        yield from norm("embedding_norm", self.embedding_norm, self.width)
        yield from norm("norm", self.norm, self.width)
        yield from self.projector.parameters(self.width * len(self.outputs), self.hidden_size)
        if self.any_resolution is not None:
            yield vector("any_resolution", "newline", self.hidden_size)
