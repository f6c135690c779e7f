"""What a model does with images and videos: its tower, and where its features go. No torch here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from quire.engine.architecture.spec_parts import Parameters
from quire.engine.protocol.media import MediaItem

_SLICE_ROWS = {"cpu": 256, "cuda": 16_384}
"""The tower's tokens in a slice. On a CPU, matmuls with so many rows are about as fast as larger ones."""
_SLICE_KEYS = {"cpu": 1024, "cuda": 16_384}
"""With so many keys, the attention of a slice has about as many multiplications as a matmul."""
_MIN_QUERIES = 32
"""In a slice of attention, however many keys there are."""


class TowerWork(NamedTuple):
    """Multiplications in a tower. The two kinds take different times, which depend on the machine."""

    linear: float = 0.0
    """Of inputs by weights."""
    attention: float = 0.0
    """Of queries by keys, and of weights of attention by values."""

    def plus(self, other: TowerWork, times: int = 1) -> TowerWork:
        """Add so many times the other."""
        return TowerWork(self.linear + times * other.linear, self.attention + times * other.attention)


NO_WORK = TowerWork()


@dataclass(frozen=True, kw_only=True)
class TowerSpec:
    """A tower, and the projector behind it. Each kind of tower is a subclass."""

    hidden_size: int
    """The decoder's: features of a token."""
    num_levels: int = 0
    """Layers of the decoder to whose outputs further features are added (DeepStack)."""
    level_layers: tuple[int, ...] = ()
    """Their numbers; empty: the first ones."""
    max_features: int | None = None
    """Features of the largest item that the model's processor makes by default; None: items may have any size."""
    divides_items: bool = False
    """Every rank of the first stage has the whole tower, and encodes items of its own. Otherwise the ranks divide the
    tower."""

    def rank_of(self, item: MediaItem, size: int) -> int:
        """The rank among `size` that encodes an item, if they divide items. It follows from the item alone, so that its
        next steps run where the first ones have run, and items that come one by one are divided, too."""
        return item.digest[0] % size

    @property
    def targets(self) -> tuple[int, ...]:
        """The decoder's layers of the levels, which the first pipeline stage must have."""
        return self.level_layers or tuple(range(self.num_levels))

    def tokens_of(self, item: MediaItem) -> int:
        """The tower's tokens for an item, at most."""
        return item.num_features * self.patches_per_feature

    def num_slices(self, item: MediaItem, device: str) -> int:
        """Slices into which the tower's tokens for an item are divided, so that each computation has few of them. They
        depend on the item alone, and so do its features."""
        return -(-self.tokens_of(item) // _SLICE_ROWS[device])

    def num_query_slices(self, item: MediaItem, device: str, num_keys: int) -> int:
        """The same for attention of each token to so many."""
        parts = min(_SLICE_ROWS[device] // _MIN_QUERIES, -(-num_keys // _SLICE_KEYS[device]))
        return parts * self.num_slices(item, device)

    def steps(self, item: MediaItem, device: str) -> Iterator[tuple[TowerWork, int]]:
        """The steps after each of which the computation of an item's features can pause, in order: the work of one, and
        how many of this kind follow each other. The work is an estimate from the item's size."""
        raise NotImplementedError

    def num_steps(self, item: MediaItem, device: str) -> int:
        """Their number."""
        return sum(count for _, count in self.steps(item, device))

    @property
    def state_width(self) -> int:
        """Numbers that are kept of each of the tower's tokens between two steps."""
        return 0

    @property
    def feature_width(self) -> int:
        """Numbers of a feature: for the embedding, then for each level."""
        return self.hidden_size * (1 + self.num_levels)

    @property
    def patches_per_feature(self) -> int:
        """Tokens of the tower that one feature is made of, at most."""
        return 1

    def patches_per_input(self, module: str) -> int:
        """Tokens of the tower that one input of a linear layer is made of."""
        return 1

    @property
    def layer_values(self) -> float:
        """Numbers that are in memory at once for each of the tower's tokens, in the layer with the most: a linear
        layer's input and output, the residual stream, and its norm."""
        linears = [(each.module, each.matrix(1)) for each in self.parameters() if each.is_quantizable]
        return max(
            ((2 * matrix.columns + matrix.rows) / self.patches_per_input(module) for module, matrix in linears),
            default=0.0,
        )

    def parameters(self) -> Parameters:
        """All parameters, with paths in the tower. Each rank has units whole that ranks cannot divide evenly."""
        raise NotImplementedError

    def rows(self, module: str, part: str) -> Sequence[range] | None:
        """The rows of a module's part among those that the checkpoint has for it, given the path without numbers. None:
        in order."""
        return None


@dataclass(frozen=True, kw_only=True)
class TransformersTowerSpec(TowerSpec):
    """The modules that compute features in a model that transformers builds. Every rank of the first stage has all."""

    modules: tuple[str, ...]
    """Paths in the model without its head."""
    num_parameters: int
    values_per_feature: float
    """As `layer_values`, measured; a feature counts as a token of the tower."""

    @property
    def layer_values(self) -> float:
        """See `TowerSpec`."""
        return self.values_per_feature

    def steps(self, item: MediaItem, device: str) -> Iterator[tuple[TowerWork, int]]:
        """See `TowerSpec`: one, as the modules are transformers' own."""
        yield TowerWork(float(self.num_parameters * item.num_features)), 1

    def parameters(self) -> Parameters:
        """None that Quire names: the decoder's are transformers' own."""
        return iter(())


@dataclass(frozen=True, kw_only=True)
class MediaSpec:
    """How a decoder takes images and videos."""

    tower: TowerSpec
    image_token_id: int
    """The token that a feature of an image replaces."""
    video_token_id: int | None = None
    """The token that a feature of a video replaces, which may be the same; None: no videos."""
    is_bidirectional: bool = False
    """The tokens of a run attend to each other in both directions."""
    joins_prompt: bool = False
    """With `is_bidirectional`: all tokens of a prompt with items are one run (PaliGemma)."""
    joins_text: bool = False
    """With `joins_prompt`: those of a prompt without items, too (ColPali)."""
    run_length: int | None = None
    """The tokens of each run; None: images differ."""
    is_causal_without_window: bool = False
    """With `is_bidirectional`: not in layers without a window (Gemma 4)."""
    layer_input_token_id: int | None = None
    """The token whose embedding gives the layers' own inputs (`LayerInputSpec`) at the tokens of a run; None: the token
    itself."""
    own_tokens: range | None = None
    """Tokens of text whose embeddings the tower has (Gemma 3n)."""
    place_axes: int = 0
    """Above 0: so many positions of a token, which only the rotary embedding reads. For text, all are its place in the
    prompt; the last three of a feature with a grid are its column, its row and the number of its image (Hunyuan VL)."""
    tokens_per_second: float = 0.0
    """Above 0: positions along time are multiplied by this and by `MediaItem.seconds_per_frame` (Qwen2.5-VL)."""

    def is_one_run(self, items: Sequence[object]) -> bool:
        """Whether all tokens of a prompt with these items attend to each other in both directions."""
        return self.joins_prompt and (self.joins_text or bool(items))
