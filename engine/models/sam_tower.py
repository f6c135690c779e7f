"""SAM's vision transformer, and what reads its output. See `SamTowerSpec`."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire import kernels
from quire.engine.architecture.encoder_spec import EncoderAttentionSpec
from quire.engine.architecture.model_spec import LayerSpec
from quire.engine.architecture.sam_spec import (
    QueriedSamTowerSpec,
    RelativeAttentionSpec,
    SamTowerSpec,
    TwofoldSamTowerSpec,
)
from quire.engine.distributed.communicator import Parallel
from quire.engine.layers.from_spec import FromSpec
from quire.engine.layers.grid_rotary import GridRotary
from quire.engine.layers.image_positions import ImagePositions
from quire.engine.layers.norm import make_norm, normed
from quire.engine.layers.patches import PatchEmbedding, patches_of, windows
from quire.engine.layers.sending import send
from quire.engine.models.encoder import EncoderAttention, EncoderLayer, by_slices
from quire.engine.models.tower import Tower
from quire.engine.protocol.media import MediaItem


def _vectors(own: FromSpec, module: str, *kinds: str) -> nn.ParameterDict:
    """Parameters without a computation of their own; replicated on all ranks."""
    return nn.ParameterDict({kind: own.weight(module, kind) for kind in kinds})


class RelativeAttention(EncoderAttention):
    """See `RelativeAttentionSpec`."""

    def __init__(self, spec: EncoderAttentionSpec, hidden_size: int, parallel: Parallel) -> None:
        super().__init__(spec, hidden_size, parallel)
        self.distances = _vectors(FromSpec(spec.parameters(hidden_size)), "attention.distances", "rows", "columns")


class RelativeKV(kernels.SequenceKV):
    """Keys and values of square tiles, or of their windows, as sequences of patches in any order. Incomplete windows
    are filled up with what the layer computes of zeros.

    The biases become products of further features: of the query with the vectors for each row and column, and of the
    key for its own row and column, which are 1.
    """

    def __init__(
        self,
        attention: RelativeAttention,
        x: Tensor,
        starts: Tensor,
        places: Tensor,
        adapter: kernels.OneAdapter | None,
    ) -> None:
        """`x` is the layer's input `[patches, width]`. `starts` are of sequences, and `places` `[2, patches]` on its
        device the rows and columns of the patches in them."""
        assert isinstance(attention.spec, RelativeAttentionSpec)
        window, distances, self._places = attention.spec.window_side, attention.distances, places
        _, key, value = (each.transpose(0, 1) for each in attention.project(x.new_zeros(1, x.shape[1]), adapter))
        self._sequences: list[tuple[int, int, int, Tensor, Tensor]] = []
        """Of each: first row, end, rows and columns; keys and values `[heads, size², features]`."""
        self._vectors: dict[int, tuple[Tensor, Tensor]] = {}
        """`_by_distance` for rows and for columns, by the number of these in a sequence."""
        for start, end in pairwise(starts.tolist()):
            size = window or math.isqrt(end - start)
            if size not in self._vectors:
                rows, columns = (_by_distance(distances[axis], size) for axis in ("rows", "columns"))
                self._vectors[size] = rows, columns
            own = torch.eye(size, dtype=key.dtype, device=key.device)
            features = torch.cat((own.repeat_interleave(size, 0), own.repeat(size, 1)), dim=-1)
            keys = torch.cat((key.expand(-1, size**2, -1), features.expand(len(key), -1, -1)), dim=-1)
            self._sequences.append((start, end, size, keys, value.repeat(1, size**2, 1)))

    def write(self, query: Tensor, key: Tensor, value: Tensor, first: int, cos_sin: Tensor | None) -> Tensor:
        """See `SequenceKV`."""
        for rows, size, keys, values in self._within(first, len(query)):
            row, column = self._places[:, first:][:, rows]
            slots = row * size + column
            keys[:, slots, : key.shape[2]] = key[rows].transpose(0, 1)
            values[:, slots] = value[rows].transpose(0, 1)
        return query

    def attend(self, query: Tensor, first: int, scale: float) -> Tensor:
        """See `SequenceKV`."""
        output = torch.empty_like(query)
        for rows, size, keys, values in self._within(first, len(query)):
            parts = [query[rows] * scale]
            for vectors, own in zip(self._vectors[size], self._places[:, first:][:, rows], strict=True):
                parts.append(torch.einsum("qhd,qkd->qhk", query[rows], vectors[own]))  # [rows, size, head_dim] of these
            queries = torch.cat(parts, dim=-1).transpose(0, 1)
            mixed = F.scaled_dot_product_attention(queries[None], keys[None], values[None], scale=1.0)
            output[rows] = mixed[0].transpose(0, 1)
        return output

    def _within(self, first: int, count: int) -> Iterator[tuple[slice, int, Tensor, Tensor]]:
        """The sequences with some of `count` rows from `first` on: which of these they have, and what `_sequences`
        says."""
        for start, end, size, keys, values in self._sequences:
            low, high = max(start, first), min(end, first + count)
            if low < high:
                yield slice(low - first, high - first), size, keys, values


def _views(x: Tensor, grids: Sequence[tuple[int, int, int]]) -> list[Tensor]:
    """`[patches, width]` → `[tiles, rows, columns, width]` each"""
    parts = x.split_with_sizes([math.prod(grid) for grid in grids])
    return [torch.unflatten(part, 0, grid) for part, grid in zip(parts, grids, strict=True)]


def _windowed(grids: Sequence[tuple[int, int, int]], side: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For patches tile by tile and row by row: their order window by window, where each window and each tile begins in
    it and the last one ends, and the row and column in its tile of each patch in this order."""
    orders, windows_, tiles_, places_, first = [], [torch.zeros(1).long()], [torch.zeros(1).long()], [], 0
    for tiles, rows, columns in grids:
        order, starts = windows((tiles, rows, columns), side or max(rows, columns))
        place = order % (rows * columns)
        places_.append(torch.stack((place // columns, place % columns)))
        orders.append(order + first)
        windows_.append(starts[1:] + first)
        tiles_.append(torch.arange(1, tiles + 1) * rows * columns + first)
        first += tiles * rows * columns
    return torch.cat(orders), torch.cat(windows_), torch.cat(tiles_), torch.cat(places_, dim=1)


def _by_distance(vectors: Tensor, size: int) -> Tensor:
    """The vectors of distances `[2 * side - 1, head_dim]` for each query's and key's row, `[size, size, head_dim]`."""
    if len(vectors) != 2 * size - 1:
        stretched = F.interpolate(vectors.float().T[None], 2 * size - 1, mode="linear")
        vectors = stretched[0].T.to(vectors.dtype)
    rows = torch.arange(size, device=vectors.device)
    return vectors[rows[:, None] - rows + size - 1]


class ReaderAttention(EncoderAttention):
    """With a mask `[tokens, tokens]` in place of biases: what a token of a sequence attends to."""

    def mix(
        self, query: Tensor, key: Tensor, value: Tensor, starts: Tensor, biases: Tensor | None, cos_sin: Tensor | None
    ) -> Tensor:
        """See `EncoderAttention`; sequences have the same length."""
        if cos_sin is not None:
            query, key = kernels.rotary(query, key, cos_sin)
        query, key, value = (
            torch.unflatten(each, 0, (len(starts) - 1, -1)).transpose(1, 2) for each in (query, key, value)
        )
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=biases, scale=self.spec.scale, enable_gqa=True
        )
        return out.transpose(1, 2).flatten(0, 1)


class Neck(nn.Module):
    """Convolutions that shrink the patches of a tile; replicated on all ranks."""

    def __init__(self, spec: SamTowerSpec) -> None:
        super().__init__()
        own = FromSpec(spec.parameters())
        self.first, self.second = _vectors(own, "neck.first", "weight"), _vectors(own, "neck.second", "weight")
        self.third, self.fourth = _vectors(own, "neck.third", "weight"), _vectors(own, "neck.fourth", "weight")
        self.first_norm = make_norm(spec.neck_norm, spec.channels[0])
        self.second_norm = make_norm(spec.neck_norm, spec.channels[1])

    def steps(self, views: Sequence[Tensor], adapter: kernels.OneAdapter | None) -> Generator[None, None, list[Tensor]]:
        """Return, of `[tiles, rows, columns, width]` each, `[tiles, rows / 4, columns / 4, channels]`. Pauses after
        each convolution."""
        views = [F.conv2d(x.permute(0, 3, 1, 2), self.first["weight"]) for x in views]
        yield
        views = [F.conv2d(_over_channels(self.first_norm, x, adapter), self.second["weight"], padding=1) for x in views]
        yield
        views = [
            F.conv2d(_over_channels(self.second_norm, x, adapter), self.third["weight"], stride=2, padding=1)
            for x in views
        ]
        yield
        views = [F.conv2d(x, self.fourth["weight"], stride=2, padding=1).permute(0, 2, 3, 1) for x in views]
        yield
        return views


def _over_channels(norm: nn.Module, x: Tensor, adapter: kernels.OneAdapter | None) -> Tensor:
    """`normed` over the channels of `[tiles, channels, rows, columns]`."""
    return normed(norm, x.permute(0, 2, 3, 1).contiguous(), adapter).permute(0, 3, 1, 2)


class SamTower(Tower):
    """See `SamTowerSpec`."""

    reader_attention: type[EncoderAttention] = EncoderAttention
    """The attention of the readers."""

    def __init__(self, spec: SamTowerSpec, parallel: Parallel, *marks: str) -> None:
        """`marks` are the learned features."""
        super().__init__()
        self._spec, self._patch_side, own = spec, spec.patch_side, FromSpec(spec.parameters())
        self.patches = PatchEmbedding(spec.patch, spec.width)
        self.positions = ImagePositions(spec.positions, spec.width)
        self.layers = self._layers(spec.layers, spec.width, parallel, RelativeAttention)
        self.neck = Neck(spec)
        self.readers = self._layers(spec.readers, spec.reader_width, parallel, self.reader_attention)
        self.projector = own.column_parallel("projector")
        self.marks = _vectors(own, "marks", *marks)

    @staticmethod
    def _layers(
        specs: Sequence[LayerSpec], width: int, parallel: Parallel, attention: type[EncoderAttention]
    ) -> nn.ModuleDict:
        layers = [EncoderLayer(each, width, parallel, is_post_norm=False, attention=attention) for each in specs]
        return nn.ModuleDict({str(number): layer for number, layer in enumerate(layers)})

    def encode(
        self, arrays: Mapping[str, Tensor], item: MediaItem, adapter: kernels.OneAdapter | None = None
    ) -> Iterator[Tensor | None]:
        """See `Tower`: features of tiles come before those of the whole image, and a separator is behind them."""
        names = [name for name in ("pixel_values_local", "pixel_values") if name in arrays]
        views = [patches_of(arrays[name].flatten(0, -4), self._patch_side) for name in names]
        tiling = arrays.get("tile_grid")
        del arrays  # not needed while the layers wait for their steps
        grids, patches = [grid for _, grid in views], torch.cat([patches.flatten(1) for patches, _ in views])
        device = patches.device.type
        count = self._spec.num_slices(item, device)
        del views
        yield None
        x = yield from by_slices(partial(self.patches, adapter=adapter), patches, count)
        del patches
        side = self._spec.window_side
        order, window_starts, tile_starts, where = _windowed(grids, side)
        order, where = send(order, x.device), send(where, x.device)
        where_in_window = where % side if side else where
        x = torch.cat([self.positions(part).flatten(0, 1) for part in _views(x, grids)])[order]
        yield None
        for number, layer in enumerate(self.layers.values()):
            assert isinstance(layer, EncoderLayer)
            attention = layer.attention
            assert isinstance(attention, RelativeAttention)
            is_narrow = self._spec.is_narrow(number)
            starts, places = (window_starts, where_in_window) if is_narrow else (tile_starts, where)
            num_query_slices = self._spec.num_query_slices(item, device, self._spec.num_keys(item, number))
            kv = RelativeKV(attention, x, starts, places, adapter)
            yield from layer.steps(x, kv, None, count, num_query_slices, adapter)
        x = torch.empty_like(x).index_copy_(0, order, x)
        shrunk = yield from self.neck.steps(_views(x, grids), adapter)
        del x
        read = [self.begin(x, adapter) for x in shrunk]
        for layer in self.readers.values():
            assert isinstance(layer, EncoderLayer)
            read = [
                (layer.attend(x, starts, turns, mask, adapter), starts, turns, mask) for x, starts, turns, mask in read
            ]
            yield None
            read = [(layer.feed(x, adapter), starts, turns, mask) for x, starts, turns, mask in read]
            yield None
        features = [self.end(x, each, tiling, adapter) for (x, *_), each in zip(read, shrunk, strict=True)]
        yield torch.cat((*features, self.marks["separator"][None]))

    def begin(
        self, shrunk: Tensor, adapter: kernels.OneAdapter | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Shrunk patches of tiles `[tiles, rows, columns, width]` → the arguments of readers, whose first one is their
        input `[tokens, width]`, tile by tile."""
        raise NotImplementedError

    def end(self, x: Tensor, shrunk: Tensor, tiling: Tensor | None, adapter: kernels.OneAdapter | None) -> Tensor:
        """The output of the readers `[tokens, width]` → features `[features, hidden_size]`. `tiling` are the columns
        and rows of the tiles `[1, 2]`, if there are several."""
        raise NotImplementedError


class QueriedSamTower(SamTower):
    """See `QueriedSamTowerSpec`."""

    reader_attention = ReaderAttention

    def __init__(self, spec: QueriedSamTowerSpec, parallel: Parallel) -> None:
        super().__init__(spec, parallel, "separator")
        self._counts = spec.queries
        self.queries = _vectors(FromSpec(spec.parameters()), "queries", "few", "many")
        self.reader_norm = make_norm(spec.reader_norm, spec.reader_width)
        attention = spec.readers[0].attention
        assert attention is not None
        assert attention.rope is not None
        self._rotary = GridRotary(attention.rope, axes=1)

    def begin(
        self, shrunk: Tensor, adapter: kernels.OneAdapter | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """See `SamTower`."""
        x = shrunk.flatten(1, 2)
        tiles, count, _ = x.shape
        queries = self.queries["few" if count <= self._counts[0] else "many"]
        total = count + len(queries)
        x = torch.cat((x, queries.expand(tiles, -1, -1)), dim=1).flatten(0, 1)
        mask = torch.ones(total, total, dtype=torch.bool, device=x.device).tril()
        mask[:count, :count] = True
        cos_sin = send(self._rotary(torch.arange(total).repeat(1, tiles)), x.device)
        return x, torch.arange(tiles + 1) * total, cos_sin, mask

    def end(self, x: Tensor, shrunk: Tensor, tiling: Tensor | None, adapter: kernels.OneAdapter | None) -> Tensor:
        """See `SamTower`."""
        tiles, rows, columns, _ = shrunk.shape
        queries = torch.unflatten(x, 0, (tiles, -1))[:, rows * columns :].flatten(0, 1)
        out: Tensor = self.projector(normed(self.reader_norm, queries, adapter), adapter)
        return out


class TwofoldSamTower(SamTower):
    """See `TwofoldSamTowerSpec`."""

    def __init__(self, spec: TwofoldSamTowerSpec, parallel: Parallel) -> None:
        super().__init__(spec, parallel, "separator", "newline")
        self.reader_positions = ImagePositions(spec.reader_positions, spec.reader_width)
        self.reader_embedding_norm = make_norm(spec.reader_embedding_norm, spec.reader_width)

    def begin(
        self, shrunk: Tensor, adapter: kernels.OneAdapter | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """See `SamTower`."""
        x = self.reader_positions(shrunk)
        starts = torch.arange(len(x) + 1) * x.shape[1]
        return normed(self.reader_embedding_norm, x.flatten(0, 1), adapter), starts, None, None

    def end(self, x: Tensor, shrunk: Tensor, tiling: Tensor | None, adapter: kernels.OneAdapter | None) -> Tensor:
        """See `SamTower`."""
        read = self.reader_positions.patches(torch.unflatten(x, 0, (len(shrunk), -1)))
        features = self.projector(torch.cat((read, shrunk.flatten(1, 2)), dim=-1).flatten(0, 1), adapter)
        across, down = (1, 1) if tiling is None or len(shrunk) == 1 else tiling[0].tolist()
        side_by_side = torch.unflatten(features, 0, (down, across, *shrunk.shape[1:3])).transpose(1, 2)
        rows = side_by_side.flatten(2, 3).flatten(0, 1)
        return torch.cat((rows, self.marks["newline"].expand(len(rows), 1, -1)), dim=1).flatten(0, 1)
