"""A vision transformer over an image, its tiles or the frames of a video. Family differences are in `ViTSpec`."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from quire import kernels
from quire.engine.architecture.attention_spec import AttentionSpec
from quire.engine.architecture.tower_spec import FINE
from quire.engine.architecture.vit_spec import ConvolutionsSpec, FramedSpec, ViTSpec, WindowReaderSpec
from quire.engine.distributed.communicator import Parallel
from quire.engine.layers.clipped import ClippedColumnParallelLinear
from quire.engine.layers.grid_rotary import AlternatingGridRotary, GridRotary, TurnsGridRotary
from quire.engine.layers.image_positions import ImagePositions, of_frames
from quire.engine.layers.norm import make_norm, normed
from quire.engine.layers.patches import PatchEmbedding, patches_of, places
from quire.engine.layers.projector import AnyResolution, Convolutions, Framed, Projector
from quire.engine.layers.sending import send
from quire.engine.models.encoder import EncoderLayer, by_slices, slices
from quire.engine.models.tower import Tower, tower_layers
from quire.engine.models.window_reader import WindowReaders
from quire.engine.protocol.media import MediaItem

Grid = tuple[int, int, int]
"""Tiles, and each one's rows and columns of patches."""


class ViTTower(Tower):
    """See `ViTSpec`."""

    def __init__(self, spec: ViTSpec, parallel: Parallel) -> None:
        super().__init__()
        self._spec, width = spec, spec.width
        attention = spec.layers[0].attention
        assert isinstance(attention, AttentionSpec)
        self._rotary: AlternatingGridRotary | TurnsGridRotary | GridRotary | None = None
        if attention.rope is not None:
            match spec.rotary:
                case "alternating":
                    self._rotary = AlternatingGridRotary(attention.rope)
                case "by turns":
                    self._rotary = TurnsGridRotary(attention.rope)
                case _:
                    self._rotary = GridRotary(attention.rope)
        self.patches = PatchEmbedding(spec.patch, width)
        self.positions = ImagePositions(spec.positions, width)
        self.embedding_norm = make_norm(spec.embedding_norm, width) if spec.embedding_norm else None
        self.layers = tower_layers(spec.layers, width, parallel)
        self.norm = make_norm(spec.norm, width) if spec.norm else None
        size = width * len(spec.outputs)
        self.projector: Projector | Convolutions | Framed | WindowReaders
        if isinstance(spec.projector, ConvolutionsSpec):
            self.projector = Convolutions(spec.projector, size, spec.hidden_size)
        elif isinstance(spec.projector, FramedSpec):
            self.projector = Framed(spec.projector, size, spec.hidden_size)
        elif isinstance(spec.projector, WindowReaderSpec):
            self.projector = WindowReaders(spec.projector, size, spec.hidden_size, parallel)
        else:
            self.projector = Projector(spec.projector, size, spec.hidden_size, parallel)
        resolution = spec.any_resolution
        self.any_resolution = None if resolution is None else AnyResolution(resolution, spec.hidden_size)

    def encode(
        self, arrays: Mapping[str, Tensor], item: MediaItem, adapter: kernels.OneAdapter | None = None
    ) -> Iterator[Tensor | None]:
        """See `Tower`."""
        spec, (pixels, grids) = self._spec, zip(*self._pictures(arrays, item), strict=True)
        sizes, patches = arrays.get("image_sizes"), torch.cat([each.flatten(1) for each in pixels])
        device = patches.device.type
        count = spec.num_slices(item, device)
        del arrays, pixels  # not needed while the layers wait for their steps
        yield None
        x = yield from by_slices(partial(self.patches, adapter=adapter), patches, count)
        del patches
        embedded = zip(x.split_with_sizes([math.prod(grid) for grid in grids]), grids, strict=True)
        tokens, turns, lengths = zip(*(self._embed(*each, adapter) for each in embedded), strict=True)
        x, cos_sin, starts = torch.cat(tokens), torch.cat(turns), F.pad(torch.cat(lengths).cumsum(0), (1, 0))
        outputs = {0: x.clone()} if 0 in spec.outputs else {}
        del tokens, turns
        yield None
        for number, layer in enumerate(self.layers.values(), start=1):
            assert isinstance(layer, EncoderLayer)
            num_query_slices = spec.num_query_slices(item, device, spec.num_keys(item, number - 1))
            yield from layer.sequence_steps(x, starts, cos_sin, count, num_query_slices, adapter)
            if number in spec.outputs:
                outputs[number] = x.clone()
        found = [normed(self.norm, outputs[number], adapter) for number in spec.outputs]
        tokens = torch.cat(found, dim=-1).split_with_sizes([int(each.sum()) for each in lengths])
        del x, outputs, found
        parts = yield from self._project([*map(self._patches, tokens, grids)], FINE * count, adapter)
        if self.any_resolution is None:
            features = torch.cat([each.flatten(0, 2) for each in parts])
        elif item.kind == "video":
            features = self.any_resolution.video(parts[0])
        else:
            assert sizes is not None
            ((height, width),) = sizes.tolist()
            levels = parts[0].chunk(1 + self._spec.num_levels, dim=-1)
            features = torch.cat([self.any_resolution.image(each, height, width) for each in levels], dim=-1)
        yield features if self._spec.multiplier == 1.0 else features * self._spec.multiplier

    def complete(self) -> None:
        """See `Tower`."""
        for each in self.modules():
            if isinstance(each, ClippedColumnParallelLinear):
                each.read_bounds()

    def _pictures(self, arrays: Mapping[str, Tensor], item: MediaItem) -> Iterator[tuple[Tensor, Grid]]:
        """Patches `[patches, …]` row by row, without padding, and their grid."""
        spec, side = self._spec, self._spec.side
        pixels = arrays["pixel_values_videos" if "pixel_values_videos" in arrays else "pixel_values"]
        if spec.pixels == "images":
            mask = arrays.get("pixel_attention_mask")
            if mask is not None and not mask.all():
                raise ValueError("tiles with padding are not supported")
            for images in (arrays["pixel_values_local"], pixels) if "pixel_values_local" in arrays else (pixels,):
                images = images.flatten(0, -4)  # [tiles, channels, height, width]
                height, width = images.shape[2:]
                if spec.any_resolution is None and "image_sizes" in arrays:
                    ((height, width),) = arrays["image_sizes"].tolist()
                yield patches_of(images[..., :height, :width], side)
            return
        if spec.pixels == "grids":
            grids = arrays[f"{item.kind}_grid_thw"].tolist()
            parts = pixels.split_with_sizes([math.prod(grid) for grid in grids])
            yield from ((part, tuple(grid)) for part, grid in zip(parts, grids, strict=True))
            return
        pictures = pixels.flatten(0, -3)  # [tiles, patches, …]
        if spec.pixels == "placed patches":
            where = arrays[f"{item.kind}_position_ids"].flatten(0, -3)  # [tiles, patches, 2]
            sizes = (where.amax(dim=1).flip(1) + 1).tolist()
            pictures = 2 * pictures - 1
        else:
            sizes = arrays["spatial_shapes"].tolist()
        for picture, (rows, columns) in zip(pictures, sizes, strict=True):
            yield picture[: rows * columns], (1, rows, columns)

    def _embed(self, x: Tensor, grid: Grid, adapter: kernels.OneAdapter | None) -> tuple[Tensor, Tensor, Tensor]:
        """Embedded patches of a grid → the input of the layers: tokens `[tokens, width]`, their rotary positions, and
        how many of them attend to each other, one after another."""
        spec, (tiles, rows, columns) = self._spec, grid
        x = self.positions(x.view(tiles, rows, columns, -1))
        lengths = torch.full((tiles,), x.shape[1])
        if spec.joins_frames and tiles > 1:
            x, lengths = (
                x + send(of_frames(tiles, x.shape[2]), x.device).to(x.dtype)[:, None],
                lengths.sum(dim=0, keepdim=True),
            )
        cos_sin = x.new_empty(0)
        if self._rotary is not None:
            where = places((1, rows, columns), 1)
            if spec.rotary.startswith("columns first"):
                where = where.flip(0)
            if spec.positions.class_token is not None:
                where = F.pad(where + 1, (1, 0) if spec.positions.class_token == "first" else (0, 1))
            cos_sin = send(self._rotary(where.repeat(1, tiles)), x.device)
        return normed(self.embedding_norm, x.flatten(0, 1), adapter), cos_sin, lengths

    def _patches(self, tokens: Tensor, grid: Grid) -> Tensor:
        """The outputs of the layers for a grid `[tokens, …]` → what the projector reads, `[tiles, rows, columns, …]`"""
        tiles, rows, columns = grid
        x = self.positions.patches(torch.unflatten(tokens, 0, (tiles, -1)))
        if self._spec.joins_frames:
            x = x.float().mean(dim=0, keepdim=True).to(x.dtype)
        return torch.unflatten(x, 1, (rows, columns))

    def _project(
        self, pictures: Sequence[Tensor], count: int, adapter: kernels.OneAdapter | None
    ) -> Generator[None, None, list[Tensor]]:
        """`[tiles, rows, columns, …]` each → features `[tiles, rows, columns, hidden_size]`. Pauses after each of
        `count` slices: of tiles, or of their bands, if a feature is made of a square of patches alone."""
        sides = [self.projector.side if isinstance(self.projector, Projector) else x.shape[1] for x in pictures]
        batches = [
            torch.unflatten(x[:, : x.shape[1] // side * side], 1, (-1, side)).flatten(0, 1)
            for x, side in zip(pictures, sides, strict=True)
        ]
        firsts = [0, *accumulate(map(len, batches))]
        parts: list[list[Tensor]] = [[] for _ in batches]
        for begin, end in slices(firsts[-1], count):
            for batch, first, found in zip(batches, firsts, parts, strict=False):
                if len(piece := batch[max(0, begin - first) : max(0, end - first)]):
                    found.append(self.projector(piece, adapter))
            yield
        return [
            torch.unflatten(torch.cat(found), 0, (len(x), -1)).flatten(1, 2)
            for x, found in zip(pictures, parts, strict=True)
        ]
