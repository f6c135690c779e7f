"""The blocks of MobileNetV5, as described by `quire.engine.architecture.mobilenet_spec`; replicated on all ranks.

Images are `[images, channels, rows, columns]`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire import kernels
from quire.engine.architecture.mobilenet_spec import (
    ACTIVATION,
    NORM,
    BlockSpec,
    EdgeResidualSpec,
    InvertedResidualSpec,
    MobileAttentionSpec,
)
from quire.engine.architecture.spec_parts import Parameters
from quire.engine.layers.from_spec import FromSpec


class Convolutions2d(nn.Module):
    """Convolutions and norms by their names in a spec."""

    def __init__(self, parameters: Parameters) -> None:
        super().__init__()
        listed = [*parameters]
        own = FromSpec(listed)
        for name in dict.fromkeys(each.module for each in listed):
            kinds = {each.kind: own.weight(name, each.kind) for each in listed if each.module == name}
            self.add_module(name, nn.ParameterDict(kinds))

    def _own(self, name: str) -> nn.ParameterDict:
        own = self.get_submodule(name)
        assert isinstance(own, nn.ParameterDict)
        return own

    def convolved(self, name: str, x: Tensor, stride: int = 1) -> Tensor:
        """One place of the output for each `stride` rows and columns of the input, which gets zeros around it, one more
        below and at the right if their number is odd. A weight for one channel is applied to each by itself."""
        own, padded = self._own(name), self.padded(name, x, stride)
        weight = own["weight"]
        return F.conv2d(padded, weight, own.get("bias"), stride, groups=x.shape[1] // weight.shape[1])

    def padded(self, name: str, x: Tensor, stride: int) -> Tensor:
        """The input of a convolution with the zeros around it."""
        side, padding = self._own(name)["weight"].shape[-1], list[int]()
        for size in reversed(x.shape[2:]):
            total = max(0, (-(-size // stride) - 1) * stride + side - size)
            padding += (total // 2, total - total // 2)
        return F.pad(x, padding) if any(padding) else x

    def normed(self, name: str, x: Tensor) -> Tensor:
        """Over channels."""
        weight = self._own(name)["weight"]
        out = F.rms_norm(x.movedim(1, -1).float(), (len(weight),), weight.float(), NORM.eps)
        return out.to(x.dtype).movedim(-1, 1)

    def layer(self, name: str, x: Tensor, stride: int = 1, *, is_active: bool = False) -> Tensor:
        """A convolution, its norm, and the activation if it has one."""
        x = self.normed(f"{name}_norm", self.convolved(name, x, stride))
        return kernels.activate(x, ACTIVATION) if is_active else x


class MobileNetBlock(Convolutions2d):
    """See `BlockSpec` and its subclasses."""

    def __init__(self, spec: BlockSpec, inputs: int) -> None:
        super().__init__(spec.parameters(inputs))
        self._spec = spec
        is_fusion = isinstance(spec, InvertedResidualSpec) and not spec.is_residual
        self._is_residual = spec.stride == 1 and spec.outputs == inputs and not is_fusion

    def forward(self, x: Tensor) -> Tensor:
        match self._spec:
            case EdgeResidualSpec():
                return torch.cat([*self.by_rows(x, 1)], dim=2)
            case InvertedResidualSpec() as spec:
                out = self._inverted(spec, x)
            case MobileAttentionSpec() as spec:
                out = self._attend(spec, x)
            case _:
                raise AssertionError(self._spec)
        if "scale" in self._modules:
            out = out * self._own("scale")["weight"][:, None, None]
        return out + x if self._is_residual else out

    def by_rows(self, x: Tensor, count: int) -> Iterator[Tensor]:
        """The output of a block with `EdgeResidualSpec`, in `count` slices of its rows."""
        spec, weight = self._spec, self._own("edge")["weight"]
        assert isinstance(spec, EdgeResidualSpec)
        rows, padded = -(-x.shape[2] // spec.stride), self.padded("edge", x, spec.stride)
        for begin, end in pairwise(rows * number // count for number in range(count + 1)):
            part = padded[:, :, begin * spec.stride : (end - 1) * spec.stride + spec.side]
            part = self.normed("edge_norm", F.conv2d(part, weight, None, spec.stride))
            part = self.layer("reduction", kernels.activate(part, ACTIVATION))
            yield part + x[:, :, begin:end] if self._is_residual else part

    def _inverted(self, spec: InvertedResidualSpec, x: Tensor) -> Tensor:
        if spec.start:
            x = self.layer("start", x, 1 if spec.middle else spec.stride)
        x = self.layer("expansion", x, is_active=True)
        if spec.middle:
            x = self.layer("middle", x, spec.stride, is_active=True)
        return self.layer("projection", x)

    def _attend(self, spec: MobileAttentionSpec, x: Tensor) -> Tensor:
        x = self.normed("norm", x)
        query = torch.unflatten(self.convolved("query", x).flatten(2), 1, (spec.num_heads, spec.head_dim))
        key, value = (
            self.convolved(name, self.layer(f"{name}_reduction", x, spec.reduction) if spec.reduction > 1 else x)
            .flatten(2)
            .mT[:, None]
            .expand(-1, spec.num_heads, -1, -1)
            for name in ("key", "value")
        )
        out = F.scaled_dot_product_attention(query.mT, key, value, scale=spec.head_dim**-0.5)
        return self.convolved("output", torch.unflatten(out.mT.flatten(1, 2), 2, x.shape[2:]))
