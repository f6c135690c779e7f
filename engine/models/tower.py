"""Towers: what encodes images and videos. `TowerSpec` and its subclasses describe what differs between families."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from quire import kernels
from quire.engine.architecture.attention_spec import AttentionSpec
from quire.engine.architecture.model_spec import LayerSpec
from quire.engine.architecture.tower_spec import FINE, ConvolvedMergerSpec, GridTowerSpec, ResamplerSpec
from quire.engine.distributed.communicator import Parallel
from quire.engine.layers.grid_rotary import GridRotary
from quire.engine.layers.merger import ConvolvedMerger, Merger, Resampler
from quire.engine.layers.norm import make_norm, normed
from quire.engine.layers.patches import PatchEmbedding, places, windows
from quire.engine.layers.sending import send
from quire.engine.layers.stretched_positions import StretchedPositions
from quire.engine.models.encoder import EncoderLayer, by_slices
from quire.engine.protocol.media import EMBEDS, PIXELS, MediaItem


def send_arrays(arrays: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """The arrays of an item, which are on the host, as a tower on `device` takes them, and features as they are to be
    kept."""
    return {
        name: send(array, device) if name.startswith(PIXELS) or name == EMBEDS else array
        for name, array in arrays.items()
    }


class Tower(nn.Module):
    """The interface of all towers."""

    def forward(
        self, arrays: Mapping[str, Tensor], item: MediaItem, adapter: kernels.OneAdapter | None = None
    ) -> Tensor:
        """The features `[item.num_features, feature_width]` of one item, in the order of its runs' tokens, the same on
        every rank. `arrays` are those of the model's processor for this item alone, by their names: `PIXELS` on the
        tower's device, and all others, from which Python takes numbers, on the host (`send_arrays`).
        `adapter` changes the tower for this item; None: nothing does."""
        *_, features = self.encode(arrays, item, adapter)
        assert features is not None
        return features

    def encode(
        self, arrays: Mapping[str, Tensor], item: MediaItem, adapter: kernels.OneAdapter | None = None
    ) -> Iterator[Tensor | None]:
        """Compute the features of `forward` step by step: yields None after each of `TowerSpec.num_steps`, then the
        features. It never waits for the device."""
        raise NotImplementedError

    def complete(self) -> None:
        """Prepare for use. To be called once, when all weights are loaded."""

    def embedded(self, tokens: Tensor) -> Tensor:
        """The embeddings `[tokens, hidden_size]` of `MediaSpec.own_tokens`, given their numbers among these."""
        raise NotImplementedError


class GridTower(Tower):
    """See `GridTowerSpec`."""

    def __init__(self, spec: GridTowerSpec, parallel: Parallel) -> None:
        super().__init__()
        self._spec = spec
        attention = spec.layers[0].attention
        assert isinstance(attention, AttentionSpec)
        assert attention.rope is not None
        self._rotary = GridRotary(attention.rope, axes=3 if spec.turns_by_time else 2)
        self.patches = PatchEmbedding(spec.patch, spec.width)
        self.embedding_norm = make_norm(spec.embedding_norm, spec.width) if spec.embedding_norm else None
        self.positions = StretchedPositions(spec.positions, spec.width) if spec.positions else None
        self.layers = tower_layers(spec.layers, spec.width, parallel)
        self.norm = make_norm(spec.norm, spec.width) if spec.norm else None
        self.projector = Merger(spec.projector, parallel) if spec.projector else None
        self.merger: Merger | ConvolvedMerger | Resampler
        if isinstance(spec.merger, ConvolvedMergerSpec):
            self.merger = ConvolvedMerger(spec.merger, parallel)
        elif isinstance(spec.merger, ResamplerSpec):
            self.merger = Resampler(spec.merger, parallel)
        else:
            self.merger = Merger(spec.merger, parallel)
        levels = [] if spec.level_merger is None else [Merger(spec.level_merger, parallel) for _ in spec.levels]
        self.level_mergers = nn.ModuleList(levels)

    def encode(
        self, arrays: Mapping[str, Tensor], item: MediaItem, adapter: kernels.OneAdapter | None = None
    ) -> Iterator[Tensor | None]:
        """See `Tower`."""
        is_image = item.kind == "image"
        pixels = arrays["pixel_values" if is_image else "pixel_values_videos"]
        ((frames, rows, columns),) = arrays["image_grid_thw" if is_image else "video_grid_thw"].tolist()
        if len(pixels) != frames * rows * columns:  # found here, as kernels of a GPU that index beyond it end the rank
            raise ValueError(f"there are {len(pixels)} patches for a grid of {frames} x {rows} x {columns}")
        merge, where = self._spec.merge, places((frames, rows, columns), self._spec.merge)
        device = pixels.device.type
        count = self._spec.num_slices(item, device)
        yield None  # the arrays were read just before
        x = yield from by_slices(partial(self.patches, adapter=adapter), pixels, count)
        del arrays, pixels  # not needed while the layers wait for their steps
        x = normed(self.embedding_norm, x, adapter)
        if self.positions is not None:
            x = x + self.positions(where, rows, columns)
        size = rows * columns
        if self._spec.turns_by_time:
            where = torch.cat((torch.arange(frames).repeat_interleave(size)[None], where))
        cos_sin = send(self._rotary(where), x.device)
        frame_starts = torch.tensor([0, len(x)]) if self._spec.is_joint else torch.arange(frames + 1) * size
        starts, order = frame_starts, None
        if self._spec.window:
            order, starts = windows((frames, rows // merge, columns // merge), self._spec.window)
            starts, order = starts * merge**2, send(order, x.device)
            x, cos_sin = (torch.unflatten(each, 0, (-1, merge**2))[order].flatten(0, 1) for each in (x, cos_sin))
        yield None
        levels = dict[int, Tensor]()
        for number, layer in enumerate(self.layers.values()):
            assert isinstance(layer, EncoderLayer)
            own_starts = starts if self._spec.is_narrow(number) else frame_starts
            parts = self._spec.num_query_slices(item, device, self._spec.num_keys(item, number))
            yield from layer.sequence_steps(x, own_starts, cos_sin, count, parts, adapter)
            if number in self._spec.levels:
                level = self._spec.levels.index(number)
                merger = partial(self.level_mergers[level], adapter=adapter)
                levels[level] = yield from by_slices(merger, x, FINE * count, merge**2)
        merged = yield from by_slices(partial(self._merged, adapter=adapter), x, FINE * count, merge**2)
        if isinstance(self.merger, Resampler):
            projected = partial(self.merger.projected, adapter=adapter)
            merged = yield from by_slices(projected, self.merger.paired(merged, frames), FINE * count)
        features = torch.cat((merged, *(levels[level] for level in sorted(levels))), dim=-1)
        yield features if order is None else torch.empty_like(features).index_copy_(0, order, features)

    def _merged(self, x: Tensor, adapter: kernels.OneAdapter | None) -> Tensor:
        """The output of the layers → features without those of levels, or what a resampler makes pairs of."""
        x = normed(self.norm, x, adapter)
        x = x if self.projector is None else self.projector(x, adapter)
        out: Tensor = self.merger(x, adapter)
        return out


def tower_layers(layers: tuple[LayerSpec, ...], width: int, parallel: Parallel) -> nn.ModuleDict:
    """The layers of a tower by their numbers; each rank has those parts whole that ranks cannot divide evenly."""
    return nn.ModuleDict(
        {str(number): EncoderLayer(layer, width, parallel, is_post_norm=False) for number, layer in enumerate(layers)}
    )
