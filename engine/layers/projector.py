"""From a tower's patches to features of the decoder's size."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire import kernels
from quire.engine.architecture.vit_spec import AnyResolutionSpec, ConvolutionsSpec, FramedSpec, ProjectorSpec
from quire.engine.distributed.communicator import Parallel
from quire.engine.layers.from_spec import FromSpec, if_divisible
from quire.engine.layers.norm import make_norm, normed
from quire.engine.layers.weight import Weight, whole


class Projector(nn.Module):
    """See `ProjectorSpec`."""

    def __init__(self, spec: ProjectorSpec, width: int, hidden_size: int, parallel: Parallel) -> None:
        super().__init__()
        self._spec = spec
        own = FromSpec(spec.parameters(width, hidden_size), if_divisible(parallel, spec.inner_size or 1))
        size = width if spec.merging == "mean" else width * spec.side**2
        self.patch_norm = make_norm(spec.patch_norm, width) if spec.patch_norm else None
        self.shift = self.scale = None
        if spec.standardizes:
            self.shift, self.scale = own.weight("projector", "shift"), own.weight("projector", "scale")
        self.merged = own.column_parallel("projector.merged") if spec.merged_size else None
        self.norm = make_norm(spec.norm, spec.merged_size or size) if spec.norm else None
        self.up = own.column_parallel("projector.up") if spec.inner_size else None
        self.down = own.row_parallel("projector.down") if spec.inner_size else own.column_parallel("projector.down")

    @property
    def side(self) -> int:
        """Rows and columns of patches in the square that one feature is made of."""
        return self._spec.side

    def forward(self, x: Tensor, adapter: kernels.OneAdapter | None = None) -> Tensor:
        """`[tiles, rows, columns, width]` → `[tiles, rows / side, columns / side, hidden_size]`"""
        x = normed(self.patch_norm, x, adapter)
        x = merged(x, self._spec.side, self._spec.merging)
        *shape, _ = x.shape
        x, dtype = x.flatten(0, 2), x.dtype
        if self._spec.multiplier != 1.0:  # in float32, as numbers may become too large for half precision
            x = x.float() * self._spec.multiplier
        if self.shift is not None and self.scale is not None:
            x = (x.float() - self.shift.float()) * self.scale.float()
        x = x.to(dtype)
        if self.merged is not None:
            x = self.merged(x, adapter)
            x = kernels.activate(x, self._spec.activation) if self._spec.activates_merged else x
        x = normed(self.norm, x, adapter)
        if self.up is not None:
            x = self.up(x, adapter)
            if self._spec.is_gated:
                x = kernels.act_mul(torch.cat(x.chunk(2, dim=-1)[::-1], dim=-1), self._spec.activation)
            else:
                x = kernels.activate(x, self._spec.activation)
        return torch.unflatten(self.down(x, adapter), 0, shape)


class Convolution(nn.Module):
    """Over squares of 3 rows and columns, from every other row and column on; replicated on all ranks."""

    def __init__(self, own: FromSpec, module: str) -> None:
        super().__init__()
        self.weight, self.bias = own.weight(module), own.weight(module, "bias")

    def forward(self, x: Tensor) -> Tensor:
        """`[tiles, in, rows, columns]` → `[tiles, out, rows / 2, columns / 2]`, rounded up"""
        return F.conv2d(x, self.weight, self.bias, stride=2, padding=1)


class Convolutions(nn.Module):
    """See `ConvolutionsSpec`."""

    def __init__(self, spec: ConvolutionsSpec, width: int, hidden_size: int) -> None:
        super().__init__()
        own = FromSpec(spec.parameters(width, hidden_size))
        self.first, self.second = Convolution(own, "projector.first"), Convolution(own, "projector.second")
        self.down = own.column_parallel("projector.down")

    def forward(self, x: Tensor, adapter: kernels.OneAdapter | None = None) -> Tensor:
        """`[tiles, rows, columns, width]` → `[tiles, rows / 4, columns / 4, hidden_size]`, rounded up"""
        x = self.second(self.first(x.permute(0, 3, 1, 2))).permute(0, 2, 3, 1)
        *shape, _ = x.shape
        return torch.unflatten(self.down(x.flatten(0, 2), adapter), 0, shape)


class Framed(nn.Module):
    """See `FramedSpec`; replicated on all ranks."""

    def __init__(self, spec: FramedSpec, width: int, hidden_size: int) -> None:
        super().__init__()
        own = FromSpec(spec.parameters(width, hidden_size))
        self._spec = spec
        self.patch_norm = make_norm(spec.norm, width)
        self.first, self.second = Convolution(own, "projector.first"), Convolution(own, "projector.second")
        self.down = own.column_parallel("projector.down")
        self.marks = nn.ParameterDict({kind: own.weight("projector.marks", kind) for kind in _MARKS})
        self.norm = make_norm(spec.norm, hidden_size)

    def forward(self, x: Tensor, adapter: kernels.OneAdapter | None = None) -> Tensor:
        """An image `[1, rows, columns, width]` → `[1, 1, features, hidden_size]`"""
        assert len(x) == 1
        x = normed(self.patch_norm, x, adapter).permute(0, 3, 1, 2)
        x = F.conv2d(x, self.first.weight, self.first.bias, stride=self._spec.side)
        x = F.conv2d(kernels.activate(x, self._spec.activation), self.second.weight, self.second.bias)[0]
        x = x.permute(1, 2, 0)  # [rows, columns, 4 * width]
        x = torch.cat((x, self.marks["newline"].expand(len(x), 1, -1)), dim=1).flatten(0, 1)
        x = torch.cat((self.marks["begin"][None], self.down(x, adapter), self.marks["end"][None]))
        return normed(self.norm, x, adapter)[None, None]


_MARKS = ("newline", "begin", "end")


def merged(x: Tensor, side: int, merging: str) -> Tensor:
    """Merge squares of patches as `ProjectorSpec.merging` says: `[tiles, rows, columns, width]` → `[tiles, rows / side,
    columns / side, features]`. Rows and columns that complete no square are dropped."""
    if side == 1:
        return x
    rows, columns = x.shape[1] // side, x.shape[2] // side
    cut = x[:, : rows * side, : columns * side].reshape(len(x), rows, side, columns, side, -1)
    match merging:
        case "patches":
            return cut.permute(0, 1, 3, 2, 4, 5).flatten(3)
        case "channels":
            return cut.permute(0, 1, 3, 5, 2, 4).flatten(3)
    return cut.mean(dim=(2, 4))


class AnyResolution(nn.Module):
    """See `AnyResolutionSpec`."""

    def __init__(self, spec: AnyResolutionSpec, hidden_size: int) -> None:
        super().__init__()
        self._spec = spec
        self.newline = Weight((hidden_size,), whole(hidden_size))

    def image(self, x: Tensor, height: int, width: int) -> Tensor:
        """`[tiles, rows, columns, hidden_size]` of an image of `height` and `width` pixels → `[features,
        hidden_size]`"""
        whole_image, tiles = x[0].flatten(0, 1), x[1:]
        if not len(tiles):
            return torch.cat((whole_image, self.newline[None]))
        down, across = (size // self._spec.tile for size in self._copy_size(height, width))
        assert down * across == len(tiles)
        picture = torch.unflatten(tiles, 0, (down, across)).transpose(1, 2).flatten(2, 3).flatten(0, 1)
        picture = _without_padding(picture, height, width)
        rows, columns, _ = picture.shape
        if self._spec.max_tiles:
            excess = math.sqrt(rows * columns / (self._spec.max_tiles * x.shape[1] ** 2))
            if excess > 1.1:
                picture = resized(picture[None], int(rows // excess), int(columns // excess))[0]
        newlines = self.newline.expand(len(picture), 1, -1)
        return torch.cat((whole_image, torch.cat((picture, newlines), dim=1).flatten(0, 1)))

    def video(self, x: Tensor) -> Tensor:
        """`[frames, rows, columns, hidden_size]` → `[features, hidden_size]`"""
        frames = resized(x, self._spec.video_side, self._spec.video_side)
        return torch.cat((frames.flatten(0, 2), self.newline[None]))

    def _copy_size(self, height: int, width: int) -> tuple[int, int]:
        """The height and width of the copy: that which shows most of the image's pixels, with the least padding."""

        def shown(size: tuple[int, int]) -> tuple[int, int]:
            scale = min(size[1] / width, size[0] / height)
            pixels = min(int(width * scale) * int(height * scale), width * height)
            return pixels, pixels - size[0] * size[1]

        return max(self._spec.sizes, key=shown)


def _without_padding(picture: Tensor, height: int, width: int) -> Tensor:
    """Cut what the padding to the size of the copy gave, from `[rows, columns, size]`, for an image of this size."""
    rows, columns, _ = picture.shape
    if width / height > columns / rows:
        cut = (rows - int(round(height * (columns / width), 7))) // 2
        return picture[cut : rows - cut]
    cut = (columns - int(round(width * (rows / height), 7))) // 2
    return picture[:, cut : columns - cut]


def resized(pictures: Tensor, rows: int, columns: int) -> Tensor:
    """Interpolate `[pictures, rows, columns, size]` bilinearly."""
    resized = F.interpolate(pictures.permute(0, 3, 1, 2), size=(rows, columns), mode="bilinear")
    return resized.permute(0, 2, 3, 1)
