"""SAM's vision transformer (Kirillov et al. 2023), whose shrunk output is read by CLIP's layers (DeepSeek-OCR, 2025) or
by learned queries (DeepSeek-OCR 2, 2026).

Each tile is encoded by itself. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.engine.architecture.encoder_spec import EncoderAttentionSpec
from quire.engine.architecture.model_spec import LayerSpec
from quire.engine.architecture.spec_parts import NormSpec, Parameter, Parameters, linear, norm, vector
from quire.engine.architecture.tower_spec import VisionTowerSpec
from quire.engine.architecture.vit_spec import ImagePositionsSpec


@dataclass(frozen=True, kw_only=True)
class RelativeAttentionSpec(EncoderAttentionSpec):
    """The patches of a square tile, or of each of its windows, attend to each other. Scores have a bias: products of
    the query and vectors for the distance in rows and in columns to the key."""

    side: int
    """Rows, and columns, that there are vectors for; for other sizes, these are interpolated."""
    window_side: int = 0
    """Rows, and columns, of a window. Incomplete ones are filled up with zeros. 0: there are no windows."""

    def parameters(self, hidden: int) -> Parameters:
        """See `AttentionSpec`."""
        yield from super().parameters(hidden)
        for axis in ("rows", "columns"):
            yield Parameter("attention.distances", axis, {"": (2 * self.side - 1, self.head_dim)})


@dataclass(frozen=True, kw_only=True)
class SamTowerSpec(VisionTowerSpec):
    """See the module. `layers` have `RelativeAttentionSpec`. What reads their shrunk output is a subclass."""

    patch_side: int
    """Pixels along the side of a patch."""
    positions: ImagePositionsSpec
    channels: tuple[int, int, int, int]
    """Outputs of the convolutions behind the layers: of each patch; of 3 x 3 patches; of these from every other row and
    column on; and once more. The first two have norms behind them."""
    neck_norm: NormSpec
    readers: tuple[LayerSpec, ...]
    """Layers for the shrunk patches."""

    @property
    def reader_width(self) -> int:
        return self.channels[-1]

    @property
    def projected_width(self) -> int:
        """Numbers that a feature is made of."""
        return self.reader_width

    def num_steps(self, num_features: int, device: str) -> int:
        """See `TowerSpec`: attentions and feed-forward layers."""
        return 2 * (len(self.layers) + len(self.readers))

    @property
    def patches_per_feature(self) -> int:
        """See `TowerSpec`: the neck shrinks squares of 4 by 4 patches to one."""
        return 16

    def parameters(self) -> Parameters:
        """See `TowerSpec`."""
        yield from super().parameters()
        yield from self.positions.parameters(self.width)
        sizes = zip(self.channels, (self.width, *self.channels), (1, 3, 3, 3), strict=False)
        for name, (rows, columns, side) in zip(("first", "second", "third", "fourth"), sizes, strict=True):
            yield Parameter(f"neck.{name}", "weight", {"": (rows, columns, side, side)})
        for name, size in (("first_norm", self.channels[0]), ("second_norm", self.channels[1])):
            yield from norm(f"neck.{name}", self.neck_norm, size)
        for number, layer in enumerate(self.readers):
            for each in layer.parameters(self.reader_width):
                yield each._replace(module=f"readers.{number}.{each.module}")
        yield from linear("projector", self.hidden_size, self.projected_width, bias=True)
        yield vector("marks", "separator", self.hidden_size)


@dataclass(frozen=True, kw_only=True)
class QueriedSamTowerSpec(SamTowerSpec):
    """Queries stand behind the shrunk patches: patches attend to all patches, queries to these and to queries up to
    themselves."""

    reader_norm: NormSpec
    """After the readers."""
    queries: tuple[int, int]
    """Numbers of queries, whose outputs are the features: for tiles of at most so many shrunk patches as there are
    queries in the first set, and for others."""

    def parameters(self) -> Parameters:
        """See `TowerSpec`."""
        yield from super().parameters()
        for name, count in zip(("few", "many"), self.queries, strict=True):
            yield Parameter("queries", name, {"": (count, self.reader_width)})
        yield from norm("reader_norm", self.reader_norm, self.reader_width)


@dataclass(frozen=True, kw_only=True)
class TwofoldSamTowerSpec(SamTowerSpec):
    """Shrunk patches, and the readers' output for each of them, are a feature together; there is a learned feature at
    the end of each row of the whole image, and of its tiles side by side."""

    reader_positions: ImagePositionsSpec
    reader_embedding_norm: NormSpec
    """Of shrunk patches with positions."""

    @property
    def projected_width(self) -> int:
        """See `SamTowerSpec`."""
        return 2 * self.reader_width

    def parameters(self) -> Parameters:
        """See `TowerSpec`."""
        yield from super().parameters()
        for each in self.reader_positions.parameters(self.reader_width):
            yield each._replace(module="reader_positions")
        yield from norm("reader_embedding_norm", self.reader_embedding_norm, self.reader_width)
        yield vector("marks", "newline", self.hidden_size)
