"""MobileNetV5's encoder, and the projector behind it (Gemma 3n, 2025): convolutions, and attention whose heads share
keys and values. The outputs of the last two stages become one grid of features. No torch here.

The blocks are MobileNetV4's (Qin et al. 2024) with RMS norms over channels. All ranks compute the whole tower.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from quire.engine.architecture.media_spec import TowerSpec, TowerWork
from quire.engine.architecture.spec_parts import Activation, NormSpec, Parameter, Parameters, linear, norm, vector
from quire.engine.protocol.media import MediaItem

NORM = NormSpec(eps=1e-6)
"""Of channels."""
ACTIVATION: Activation = "gelu_tanh"
FUSION_STEPS = 8
"""The fusion has about so many times the multiplications of a late block. It is computed in as many slices of rows."""
EDGE_STEPS = 5
"""The same of a block with `EdgeResidualSpec`."""


def _convolution(module: str, outputs: int, inputs: int, side: int = 1) -> Parameters:
    """A convolution over squares of `side` by `side` places, without bias, and the norm behind it."""
    yield Parameter(module, "weight", {"": (outputs, inputs, side, side)})
    yield from norm(f"{module}_norm", NORM, outputs)


@dataclass(frozen=True, kw_only=True)
class BlockSpec:
    """A block of a stage. Each kind is a subclass."""

    outputs: int
    """Channels. If there are as many as in the input, and no stride, the input is added to the output."""
    stride: int = 1
    """Above 1: of so many rows, and columns, there is one in the output."""

    def inner(self, inputs: int) -> int:
        """The most channels inside the block."""
        return max(inputs, self.outputs)

    def parameters(self, inputs: int) -> Parameters:
        """All parameters, for so many channels of the input."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class EdgeResidualSpec(BlockSpec):
    """A convolution that expands the channels, and one over single places that reduces them."""

    side: int
    """Of the squares of the first convolution, which has the stride."""
    expansion: int

    def inner(self, inputs: int) -> int:
        """See `BlockSpec`."""
        return inputs * self.expansion

    def parameters(self, inputs: int) -> Parameters:
        """See `BlockSpec`."""
        yield from _convolution("edge", self.inner(inputs), inputs, self.side)
        yield from _convolution("reduction", self.outputs, self.inner(inputs))


@dataclass(frozen=True, kw_only=True)
class InvertedResidualSpec(BlockSpec):
    """The channels are expanded and reduced at single places; before, and in between, there may be convolutions of each
    channel by itself, the last of which has the stride."""

    start: int = 0
    """Side of the squares of the first such convolution; 0: there is none."""
    middle: int = 0
    """The same of the second one."""
    expansion: int
    is_residual: bool = True
    """The output is multiplied by a learned number for each channel, and the input may be added; or neither."""

    def inner(self, inputs: int) -> int:
        """See `BlockSpec`."""
        return inputs * self.expansion

    def parameters(self, inputs: int) -> Parameters:
        """See `BlockSpec`."""
        if self.start:
            yield from _convolution("start", inputs, 1, self.start)
        yield from _convolution("expansion", self.inner(inputs), inputs)
        if self.middle:
            yield from _convolution("middle", self.inner(inputs), 1, self.middle)
        yield from _convolution("projection", self.outputs, self.inner(inputs))
        if self.is_residual:
            yield vector("scale", "weight", self.outputs)


@dataclass(frozen=True, kw_only=True)
class MobileAttentionSpec(BlockSpec):
    """Places attend to each other. All heads have the same keys and values, of places that a convolution of each
    channel by itself may have reduced."""

    num_heads: int
    head_dim: int
    side: int
    """Of the squares of that convolution."""
    reduction: int = 1
    """Its stride; 1: there is none."""

    def inner(self, inputs: int) -> int:
        """See `BlockSpec`."""
        return self.num_heads * self.head_dim

    def parameters(self, inputs: int) -> Parameters:
        """See `BlockSpec`."""
        yield from norm("norm", NORM, inputs)
        yield Parameter("query", "weight", {"": (self.inner(inputs), inputs, 1, 1)})
        for name in ("key", "value"):
            if self.reduction > 1:
                yield from _convolution(f"{name}_reduction", inputs, 1, self.side)
            yield Parameter(name, "weight", {"": (self.head_dim, inputs, 1, 1)})
        yield Parameter("output", "weight", {"": (self.outputs, self.inner(inputs), 1, 1)})
        yield vector("scale", "weight", self.outputs)


def _multiplications(block: BlockSpec, inputs: int, side: int) -> int:
    """By the parameters of a block with so many rows and columns inside."""
    strided = ("middle", "projection") if isinstance(block, InvertedResidualSpec) else ()
    return sum(
        each.elements(1) * (side // block.stride if each.module.startswith(strided) else side) ** 2
        for each in block.parameters(inputs)
    )


@dataclass(frozen=True, kw_only=True)
class MobileNetSpec(TowerSpec):
    """See the module."""

    side: int
    """Pixels along the sides of an image as the model's processor makes it."""
    stem: int
    """Channels of the first convolution, which halves rows and columns."""
    stages: tuple[tuple[BlockSpec, ...], ...]
    width: int
    """Channels of the grid."""
    grid: int
    """Its rows and columns."""
    norm: NormSpec
    """Of a feature before the projector, of its output, where it has no weight, and of the tokens."""
    num_tokens: int
    """Tokens of text whose embeddings the projector makes, too (`MediaSpec.own_tokens`)."""

    @property
    def fusion(self) -> InvertedResidualSpec:
        """What makes the grid of the concatenated outputs of the last two stages."""
        return InvertedResidualSpec(outputs=self.width, expansion=2, is_residual=False)

    @property
    def fused(self) -> int:
        """Channels of these outputs."""
        return sum(stage[-1].outputs for stage in self.stages[-2:])

    def steps(self, item: MediaItem, device: str) -> Iterator[tuple[TowerWork, int]]:
        """See `TowerSpec`: the first convolution, blocks or their slices, and slices of the fusion."""
        images, inputs = item.num_features / self.grid**2, 3
        (_, side, outputs), *sizes, (_, last, _) = self._sizes()
        yield TowerWork(images * 9 * inputs * outputs * side**2), 1
        inputs, blocks = outputs, [block for stage in self.stages for block in stage]
        for block, (inner, side, outputs) in zip(blocks, sizes, strict=True):
            linear, attention = images * _multiplications(block, inputs, side), 0.0
            if isinstance(block, MobileAttentionSpec):
                attention = images * 2 * inner * side**2 * (side // block.reduction) ** 2
            count = EDGE_STEPS if isinstance(block, EdgeResidualSpec) else 1
            yield TowerWork(linear / count, attention), count
            inputs = outputs
        fusion = images * _multiplications(self.fusion, self.fused, last)
        yield TowerWork(fusion / FUSION_STEPS), FUSION_STEPS

    @property
    def state_width(self) -> int:
        """See `TowerSpec`: a block's input, and the last but one stage's output."""
        places = max(outputs * side**2 for _, side, outputs in self._sizes())
        return 2 * places // self.grid**2

    @property
    def layer_values(self) -> float:
        """See `TowerSpec`: also what a block has inside, its norm and its activation."""
        blocks = 4 * max(inner * side**2 for inner, side, _ in self._sizes()) / self.grid**2
        return max(super().layer_values, blocks)

    def _sizes(self) -> Iterator[tuple[int, int, int]]:
        """Of each block: channels inside, rows and columns of them, and channels of the output."""
        side, inputs = self.side // 2, self.stem
        yield self.stem, side, self.stem
        for block in (block for stage in self.stages for block in stage):
            inside = side if isinstance(block, InvertedResidualSpec) else side // block.stride
            side = side // block.stride
            yield block.inner(inputs), inside, block.outputs
            inputs = block.outputs
        yield self.fusion.inner(self.fused), 2 * side, self.width

    def ends(self) -> Parameters:
        """The parameters of the first convolution, and of the norm of the grid."""
        yield Parameter("stem", "weight", {"": (self.stem, 3, 3, 3)})
        yield vector("stem", "bias", self.stem)
        yield from norm("stem_norm", NORM, self.stem)
        yield from norm("grid_norm", NORM, self.width)

    def parameters(self) -> Parameters:
        """See `TowerSpec`."""
        for each in self.ends():
            yield each._replace(module=f"ends.{each.module}")
        inputs = self.stem
        for stage, blocks in enumerate(self.stages):
            for number, block in enumerate(blocks):
                for each in block.parameters(inputs):
                    yield each._replace(module=f"stage_{stage}.{number}.{each.module}")
                inputs = block.outputs
        for each in self.fusion.parameters(self.fused):
            yield each._replace(module=f"fusion.{each.module}")
        yield from norm("feature_norm", self.norm, self.width)
        yield Parameter("tokens", "weight", {"": (self.num_tokens, self.width)})
        yield from norm("token_norm", self.norm, self.width)
        yield from linear("projector", self.hidden_size, self.width)
