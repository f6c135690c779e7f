"""From the vectors of neighbouring patches to features of the decoder."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quire import kernels
from quire.engine.architecture.tower_spec import ConvolvedMergerSpec, MergerSpec, ResamplerSpec
from quire.engine.distributed.communicator import Parallel
from quire.engine.layers.from_spec import FromSpec, if_divisible
from quire.engine.layers.mlp import MLP
from quire.engine.layers.norm import make_norm, normed
from quire.engine.layers.patches import PatchEmbedding


class Merger(nn.Module):
    """`down(activation(up(norm(x))))` of the vectors of neighbouring patches, one after another."""

    def __init__(self, spec: MergerSpec, parallel: Parallel) -> None:
        super().__init__()
        self._spec = spec
        own = FromSpec(spec.parameters("merger"), if_divisible(parallel, spec.inner))
        self.norm = None if spec.norm is None else make_norm(spec.norm, spec.norm_size)
        self.up, self.down = own.column_parallel("merger.up"), own.row_parallel("merger.down")

    def forward(self, x: Tensor, adapter: kernels.OneAdapter | None = None) -> Tensor:
        """`[patches, width]` → `[features, output]`"""
        x = normed(self.norm, x.reshape(-1, self._spec.norm_size), adapter)
        inner = self.up(x.reshape(-1, self._spec.width * self._spec.merged), adapter)
        out: Tensor = self.down(kernels.activate(inner, self._spec.activation), adapter)
        return out


class ConvolvedMerger(nn.Module):
    """See `ConvolvedMergerSpec`."""

    def __init__(self, spec: ConvolvedMergerSpec, parallel: Parallel) -> None:
        super().__init__()
        self._spec = spec
        self.convolution = PatchEmbedding(spec.convolution, spec.output)
        self.projection = FromSpec(spec.parameters("merger")).column_parallel("merger.projection")
        self.norm = make_norm(spec.norm, spec.output)
        inner = if_divisible(parallel, spec.feed_forward.intermediate_size)
        self.feed_forward = MLP(spec.feed_forward, spec.output, inner)

    def forward(self, x: Tensor, adapter: kernels.OneAdapter | None = None) -> Tensor:
        """`[patches, width]`, square by square → `[features, output]`"""
        squares = torch.unflatten(x, 0, (-1, self._spec.merge**2)).transpose(1, 2)  # as the convolution's weight
        x = self.projection(self.convolution(squares, adapter), adapter)
        out: Tensor = self.feed_forward(kernels.activate(normed(self.norm, x, adapter), "gelu"), adapter)
        return out


class ResamplerPart(nn.Module):
    """`norm(down(gelu(up(x))))`"""

    def __init__(self, spec: ResamplerSpec, own: FromSpec, module: str) -> None:
        super().__init__()
        self.up, self.down = own.column_parallel(f"{module}.up"), own.row_parallel(f"{module}.down")
        self.norm = make_norm(spec.norm, spec.inner)

    def forward(self, x: Tensor, adapter: kernels.OneAdapter | None = None) -> Tensor:
        return normed(self.norm, self.down(kernels.activate(self.up(x, adapter), "gelu"), adapter), adapter)


class Resampler(nn.Module):
    """See `ResamplerSpec`."""

    def __init__(self, spec: ResamplerSpec, parallel: Parallel) -> None:
        super().__init__()
        self._spec = spec
        own = FromSpec(spec.parameters("merger"), if_divisible(parallel, spec.inner))
        self.squares, self.frames = (ResamplerPart(spec, own, f"merger.{part}") for part in ("squares", "frames"))
        self.projection = own.column_parallel("merger.projection")
        self.norm = make_norm(spec.output_norm, spec.output)

    def forward(self, x: Tensor, adapter: kernels.OneAdapter | None = None) -> Tensor:
        """The first half: `[patches, width]`, square by square → `[squares, inner]`"""
        out: Tensor = self.squares(x.reshape(-1, self._spec.inner), adapter)
        return out

    def paired(self, x: Tensor, frames: int) -> Tensor:
        """Put squares `[squares, inner]`, frame by frame, beside those of the next frame: `[features, 2 * inner]`."""
        if frames > 1 and frames % 2:
            raise ValueError(f"videos must have an even number of frames, not {frames}")
        x = torch.unflatten(x, 0, (frames, -1))
        return torch.cat((x[::2], x[1::2] if frames > 1 else x), dim=-1).flatten(0, 1)

    def projected(self, pairs: Tensor, adapter: kernels.OneAdapter | None = None) -> Tensor:
        """The second half: `[features, 2 * inner]` → `[features, output]`"""
        return normed(self.norm, self.projection(self.frames(pairs, adapter), adapter), adapter)
