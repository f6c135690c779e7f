"""What a model does with images and videos: its tower, and where its features go. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.engine.architecture.spec_parts import Parameters

_SLICE_ROWS = {"cpu": 256, "cuda": 16_384}
"""The tower's tokens in a slice. On a CPU, matmuls with so many rows are about as fast as larger ones."""
_SLICE_KEYS = {"cpu": 512, "cuda": 16_384}
"""With so many keys, the attention of a slice costs about as much as a matmul."""
_MIN_QUERIES = 32
"""In a slice of attention, however many keys there are."""


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

    @property
    def targets(self) -> tuple[int, ...]:
        """The decoder's layers of the levels, which the first pipeline stage must have."""
        return self.level_layers or tuple(range(self.num_levels))

    def num_slices(self, num_features: int, device: str) -> int:
        """Slices into which the tower's tokens for an item are divided, so that each computation has few of them. They
        depend on the item alone, and so do its features."""
        return -(-num_features * self.patches_per_feature // _SLICE_ROWS[device])

    def num_query_slices(self, num_features: int, device: str) -> int:
        """The same for attention to all tokens of an item."""
        most = _SLICE_ROWS[device] // _MIN_QUERIES
        parts = min(most, -(-num_features * self.patches_per_feature // _SLICE_KEYS[device]))
        return parts * self.num_slices(num_features, device)

    def num_steps(self, num_features: int, device: str) -> int:
        """Steps of about the same cost, after each of which the computation of an item's features can pause."""
        return 1

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
