"""SAM's vision transformer, and what reads its output. See `SamTowerSpec`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

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
from quire.engine.layers.norm import make_norm
from quire.engine.layers.patches import PatchEmbedding, patches_of
from quire.engine.models.encoder import EncoderAttention, EncoderLayer
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

    def forward(self, x: Tensor, starts: Tensor, cos_sin: Tensor, biases: Tensor | None) -> Tensor:
        """See `EncoderAttention`; sequences are square tiles of one size, row by row."""
        assert isinstance(self.spec, RelativeAttentionSpec)
        tiles = len(starts) - 1
        side = math.isqrt(len(x) // tiles)
        size = self.spec.window_side or side
        count, more = -(-side // size), -side % size
        x = F.pad(x.view(tiles, side, side, -1), (0, 0, 0, more, 0, more))
        x = x.view(tiles, count, size, count, size, -1).transpose(2, 3).reshape(tiles * (count * size) ** 2, -1)
        x = super().forward(x, starts, cos_sin, torch.tensor(size))
        x = x.view(tiles, count, count, size, size, -1).transpose(2, 3).reshape(tiles, side + more, side + more, -1)
        return x[:, :side, :side].flatten(0, 2)

    def mix(
        self, query: Tensor, key: Tensor, value: Tensor, starts: Tensor, biases: Tensor | None, cos_sin: Tensor | None
    ) -> Tensor:
        """The biases become products of further features: of the query with the vectors for each row and column, and
        of the key for its own row and column, which are 1."""
        assert biases is not None
        assert cos_sin is None
        size = int(biases)
        grid = torch.unflatten(query, 0, (-1, size, size))  # [windows, rows, columns, heads, head_dim]
        by_row = torch.einsum("wrchd,rkd->wrchk", grid, _by_distance(self.distances["rows"], size))
        by_column = torch.einsum("wrchd,ckd->wrchk", grid, _by_distance(self.distances["columns"], size))
        own = torch.eye(size, dtype=key.dtype, device=key.device)
        places = torch.cat((own.repeat_interleave(size, 0), own.repeat(size, 1)), dim=-1)  # [size², 2 size]
        query = torch.cat((grid * self.spec.scale, by_row, by_column), dim=-1).flatten(1, 2).transpose(1, 2)
        key, value = (torch.unflatten(each, 0, (-1, size**2)).transpose(1, 2) for each in (key, value))
        key = torch.cat((key, places.expand(*key.shape[:2], -1, -1)), dim=-1)
        return F.scaled_dot_product_attention(query, key, value, scale=1.0).transpose(1, 2).flatten(0, 1)


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

    def forward(self, x: Tensor) -> Tensor:
        """`[tiles, rows, columns, width]` → `[tiles, rows / 4, columns / 4, channels]`"""
        x = F.conv2d(x.permute(0, 3, 1, 2), self.first["weight"])
        x = F.conv2d(_normed(x, self.first_norm), self.second["weight"], padding=1)
        x = F.conv2d(_normed(x, self.second_norm), self.third["weight"], stride=2, padding=1)
        return F.conv2d(x, self.fourth["weight"], stride=2, padding=1).permute(0, 2, 3, 1)


def _normed(x: Tensor, norm: nn.Module) -> Tensor:
    """Over the channels of `[tiles, channels, rows, columns]`."""
    out: Tensor = norm(x.permute(0, 2, 3, 1).contiguous())
    return out.permute(0, 3, 1, 2)


class SamTower(Tower):
    """See `SamTowerSpec`."""

    reader_attention: type[EncoderAttention] = EncoderAttention
    """The attention of the readers."""

    def __init__(self, spec: SamTowerSpec, parallel: Parallel, *marks: str) -> None:
        """`marks` are the learned features."""
        super().__init__()
        self._patch_side, own = spec.patch_side, FromSpec(spec.parameters())
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

    def encode(self, arrays: Mapping[str, Tensor], item: MediaItem) -> Iterator[Tensor | None]:
        """See `Tower`: features of tiles come before those of the whole image, and a separator is behind them."""
        names = [name for name in ("pixel_values_local", "pixel_values") if name in arrays]
        views = [patches_of(arrays[name].flatten(0, -4), self._patch_side) for name in names]
        tiling = arrays.get("tile_grid")
        del arrays  # not needed while the layers wait for their steps
        grids = [grid for _, grid in views]
        starts = [torch.arange(tiles + 1) * rows * columns for tiles, rows, columns in grids]
        parts = [
            self.positions(torch.unflatten(self.patches(patches), 0, grid)).flatten(0, 1) for patches, grid in views
        ]
        del views
        for layer in self.layers.values():
            assert isinstance(layer, EncoderLayer)
            parts = [layer.attend(x, own, x, None) for x, own in zip(parts, starts, strict=True)]
            yield None
            parts = [layer.feed(x) for x in parts]
            yield None
        shrunk = [self.neck(torch.unflatten(x, 0, grid)) for x, grid in zip(parts, grids, strict=True)]
        del parts
        read = [self.begin(x) for x in shrunk]
        for layer in self.readers.values():
            assert isinstance(layer, EncoderLayer)
            read = [(layer.attend(x, starts, turns, mask), starts, turns, mask) for x, starts, turns, mask in read]
            yield None
            read = [(layer.feed(x), starts, turns, mask) for x, starts, turns, mask in read]
            yield None
        features = [self.end(x, each, tiling) for (x, *_), each in zip(read, shrunk, strict=True)]
        yield torch.cat((*features, self.marks["separator"][None]))

    def begin(self, shrunk: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Shrunk patches of tiles `[tiles, rows, columns, width]` → the arguments of readers, whose first one is their
        input `[tokens, width]`, tile by tile."""
        raise NotImplementedError

    def end(self, x: Tensor, shrunk: Tensor, tiling: Tensor | None) -> Tensor:
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

    def begin(self, shrunk: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """See `SamTower`."""
        x = shrunk.flatten(1, 2)
        tiles, count, _ = x.shape
        queries = self.queries["few" if count <= self._counts[0] else "many"]
        total = count + len(queries)
        x = torch.cat((x, queries.expand(tiles, -1, -1)), dim=1).flatten(0, 1)
        mask = torch.ones(total, total, dtype=torch.bool, device=x.device).tril()
        mask[:count, :count] = True
        cos_sin = self._rotary(torch.arange(total).repeat(1, tiles)).to(x.device)
        return x, torch.arange(tiles + 1) * total, cos_sin, mask

    def end(self, x: Tensor, shrunk: Tensor, tiling: Tensor | None) -> Tensor:
        """See `SamTower`."""
        tiles, rows, columns, _ = shrunk.shape
        queries = torch.unflatten(x, 0, (tiles, -1))[:, rows * columns :].flatten(0, 1)
        out: Tensor = self.projector(self.reader_norm(queries))
        return out


class TwofoldSamTower(SamTower):
    """See `TwofoldSamTowerSpec`."""

    def __init__(self, spec: TwofoldSamTowerSpec, parallel: Parallel) -> None:
        super().__init__(spec, parallel, "separator", "newline")
        self.reader_positions = ImagePositions(spec.reader_positions, spec.reader_width)
        self.reader_embedding_norm = make_norm(spec.reader_embedding_norm, spec.reader_width)

    def begin(self, shrunk: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """See `SamTower`."""
        x = self.reader_positions(shrunk)
        starts = torch.arange(len(x) + 1) * x.shape[1]
        return self.reader_embedding_norm(x.flatten(0, 1)), starts, x.new_empty(0), None

    def end(self, x: Tensor, shrunk: Tensor, tiling: Tensor | None) -> Tensor:
        """See `SamTower`."""
        read = self.reader_positions.patches(torch.unflatten(x, 0, (len(shrunk), -1)))
        features = self.projector(torch.cat((read, shrunk.flatten(1, 2)), dim=-1).flatten(0, 1))
        across, down = (1, 1) if tiling is None or len(shrunk) == 1 else tiling[0].tolist()
        side_by_side = torch.unflatten(features, 0, (down, across, *shrunk.shape[1:3])).transpose(1, 2)
        rows = side_by_side.flatten(2, 3).flatten(0, 1)
        return torch.cat((rows, self.marks["newline"].expand(len(rows), 1, -1)), dim=1).flatten(0, 1)
