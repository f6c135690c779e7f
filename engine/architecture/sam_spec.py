"""SAM's vision transformer (Kirillov et al. 2023), whose shrunk output is read by CLIP's layers (DeepSeek-OCR, 2025) or
by learned queries (DeepSeek-OCR 2, 2026).

Each tile is encoded by itself. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from quire.engine.architecture.encoder_spec import EncoderAttentionSpec
from quire.engine.architecture.media_spec import TowerWork
from quire.engine.architecture.model_spec import LayerSpec
from quire.engine.architecture.spec_parts import NormSpec, Parameter, Parameters, linear, norm, vector
from quire.engine.architecture.tower_spec import VisionTowerSpec
from quire.engine.architecture.vit_spec import ImagePositionsSpec
from quire.engine.protocol.media import MediaItem


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


def _relative(layer: LayerSpec) -> RelativeAttentionSpec:
    assert isinstance(layer.attention, RelativeAttentionSpec)
    return layer.attention


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

    def steps(self, item: MediaItem, device: str) -> Iterator[tuple[TowerWork, int]]:
        """See `TowerSpec`: behind those of the layers, the convolutions of the neck; the attention and the feed-forward
        layer of each reader."""
        yield from super().steps(item, device)
        tokens, linear = self.tokens_of(item), self._linear_work
        for name, patches in (("first", 1), ("second", 1), ("third", 4), ("fourth", 16)):
            yield TowerWork(tokens * linear[f"neck.{name}"] / patches), 1
        tokens = -(-tokens // self.patches_per_read)
        for number, layer in enumerate(self.readers):
            own, mixing = f"readers.{number}", tokens * super().mixing(layer, tokens)
            yield TowerWork(tokens * (linear[f"{own}.attention.qkv"] + linear[f"{own}.attention.output"]), mixing), 1
            yield TowerWork(tokens * linear[f"{own}.feed_forward"]), 1

    @property
    def state_width(self) -> int:
        """See `TowerSpec`: a key has features for each row and column of a tile, too."""
        attentions = [_relative(layer) for layer in self.layers]
        return super().state_width + max(2 * each.num_heads * each.side for each in attentions)

    @property
    def window_side(self) -> int:
        """Of the layers that have windows; 0: none has."""
        return max(_relative(layer).window_side for layer in self.layers)

    def is_narrow(self, layer: int) -> bool:
        """Whether attention is to the patches of a window."""
        return bool(_relative(self.layers[layer]).window_side)

    def num_keys(self, item: MediaItem, layer: int) -> int:
        """See `VisionTowerSpec`: of a tile as in training, or of a window."""
        attention = _relative(self.layers[layer])
        return min(self.tokens_of(item), (attention.window_side or attention.side) ** 2)

    def mixing(self, layer: LayerSpec, num_keys: int) -> float:
        """See `VisionTowerSpec`: the vectors for distances are multiplied by the query, and its products with them are
        further features."""
        attention = _relative(layer)
        heads, features = attention.num_heads, 2 * attention.side
        return super().mixing(layer, num_keys) + heads * features * (num_keys + attention.head_dim)

    @property
    def patches_per_read(self) -> int:
        """Patches for each token of the readers: these are shrunk patches."""
        return self.patches_per_feature

    def mergers(self, layer: int) -> Sequence[Sequence[str]]:
        """See `VisionTowerSpec`: none, as the neck reads squares of patches."""
        return []

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

    @property
    def patches_per_read(self) -> int:
        """See `SamTowerSpec`: there are as many queries, too."""
        return self.patches_per_feature // 2

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
