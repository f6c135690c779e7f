"""MobileNetV5's encoder, and the projector behind it. See `MobileNetSpec`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire import kernels
from quire.engine.architecture.mobilenet_spec import (
    ACTIVATION,
    EDGE_STEPS,
    FUSION_STEPS,
    EdgeResidualSpec,
    MobileNetSpec,
)
from quire.engine.layers.from_spec import FromSpec
from quire.engine.layers.mobilenet import Convolutions2d, MobileNetBlock
from quire.engine.layers.norm import make_norm
from quire.engine.models.encoder import by_slices
from quire.engine.models.tower import Tower
from quire.engine.protocol.media import MediaItem


class MobileNetTower(Tower):
    """See `MobileNetSpec`; the same on all ranks."""

    def __init__(self, spec: MobileNetSpec) -> None:
        super().__init__()
        self._spec, own, inputs = spec, FromSpec(spec.parameters()), spec.stem
        self.ends = Convolutions2d(spec.ends())
        for number, blocks in enumerate(spec.stages):
            stage = nn.ModuleDict()
            for place, block in enumerate(blocks):
                stage[str(place)], inputs = MobileNetBlock(block, inputs), block.outputs
            self.add_module(f"stage_{number}", stage)
        self.fusion = MobileNetBlock(spec.fusion, spec.fused)
        self.feature_norm, self.token_norm = (make_norm(spec.norm, spec.width) for _ in range(2))
        self.tokens = nn.ParameterDict({"weight": own.weight("tokens")})
        self.projector = own.column_parallel("projector")
        self.projector.may_have_pool = False  # it also makes the embeddings of the tower's own tokens
        self.feature_norm.may_change = self.token_norm.may_change = False

    def encode(
        self, arrays: Mapping[str, Tensor], item: MediaItem, adapter: kernels.OneAdapter | None = None
    ) -> Iterator[Tensor | None]:
        """See `Tower`."""
        assert adapter is None
        x = arrays["pixel_values"].to(self.tokens["weight"].dtype)
        del arrays  # not needed while the blocks wait for their steps
        x = kernels.activate(self.ends.layer("stem", x, 2), ACTIVATION)
        yield None
        outputs: list[Tensor] = []
        for number in range(len(self._spec.stages)):
            blocks = zip(self._spec.stages[number], self.get_submodule(f"stage_{number}").children(), strict=True)
            for block_spec, block in blocks:
                assert isinstance(block, MobileNetBlock)
                parts = []
                for part in block.by_rows(x, EDGE_STEPS) if isinstance(block_spec, EdgeResidualSpec) else (block(x),):
                    parts.append(part)
                    yield None
                x = torch.cat(parts, dim=2)
            outputs = [*outputs[-1:], x]
        sizes = outputs[0].shape[2:]
        x = torch.cat([F.interpolate(each, sizes) for each in outputs], dim=1)
        del outputs
        # The fusion computes each place by itself, so rows can change places with images.
        x = (yield from by_slices(self.fusion, x.transpose(0, 2), FUSION_STEPS)).transpose(0, 2)
        x = _resized(x, self._spec.grid)
        features = self.ends.normed("grid_norm", x).flatten(2).mT.flatten(0, 1)
        yield self._project(self.feature_norm(features * self._spec.width**0.5))

    def embedded(self, tokens: Tensor) -> Tensor:
        """`[tokens]`, numbers of `MobileNetSpec.num_tokens`, → `[tokens, hidden_size]`"""
        out: Tensor = self.tokens["weight"][tokens]
        return out

    def complete(self) -> None:
        """See `Tower`: the tokens' vectors are replaced by their embeddings."""
        weight = self.tokens["weight"]
        weight.data = self._project(self.token_norm(weight.data))

    def _project(self, x: Tensor) -> Tensor:
        x = self.projector(x)
        out: Tensor = F.rms_norm(x.float(), x.shape[-1:], None, self._spec.norm.eps).to(x.dtype)
        return out


def _resized(x: Tensor, side: int) -> Tensor:
    """`[images, channels, rows, columns]` with so many rows and columns: means of squares, or interpolated."""
    if x.shape[2] % side or x.shape[3] % side:
        return F.interpolate(x, (side, side), mode="bilinear")
    return F.avg_pool2d(x, (x.shape[2] // side, x.shape[3] // side))
