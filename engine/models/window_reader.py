"""From patches to fewer features by learned queries. See `WindowReaderSpec`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire import kernels
from quire.engine.architecture.vit_spec import WindowReaderSpec
from quire.engine.distributed.communicator import Parallel
from quire.engine.layers.from_spec import FromSpec, if_divisible
from quire.engine.layers.mlp import MLP
from quire.engine.layers.norm import make_norm, normed
from quire.engine.models.encoder import EncoderAttention


class CrossAttention(nn.Module):
    """Attention of the queries of each window to its patches, with the heads sharded over the ranks."""

    def __init__(self, own: FromSpec, module: str, head_dim: int) -> None:
        super().__init__()
        self._head_dim = head_dim
        self.query, self.kv = own.column_parallel(f"{module}.query"), own.column_parallel(f"{module}.kv")
        self.output = own.row_parallel(f"{module}.output")

    def forward(self, x: Tensor, patches: Tensor, adapter: kernels.OneAdapter | None) -> Tensor:
        """`[windows, queries, width]` and `[windows, patches, width]` → `[windows, queries, width]`"""
        windows = len(x)
        query, key, value = (
            each.reshape(windows, -1, each.shape[-1] // self._head_dim, self._head_dim).transpose(1, 2)
            for each in (
                self.query(x.flatten(0, 1), adapter),
                *self.kv(patches.flatten(0, 1), adapter).chunk(2, dim=-1),
            )
        )
        mixed = F.scaled_dot_product_attention(query, key, value)
        out: Tensor = self.output(mixed.transpose(1, 2).flatten(2).flatten(0, 1), adapter)
        return torch.unflatten(out, 0, (windows, -1))


class WindowReader(nn.Module):
    """One reader."""

    def __init__(self, spec: WindowReaderSpec, width: int, parallel: Parallel, own: FromSpec, module: str) -> None:
        """`own` and `module` give its parameters."""
        super().__init__()
        self._spec, attention = spec, spec.attention
        self.norm = make_norm(spec.norm, width)
        self.tokens = nn.ParameterDict({kind: own.weight(f"{module}.tokens", kind) for kind in ("queries", "places")})
        self.input_norm, self.attention_norm = (make_norm(spec.inner_norm, width) for _ in range(2))
        self.attention = EncoderAttention(attention, width, if_divisible(parallel, attention.num_heads))
        self.cross = CrossAttention(own, f"{module}.cross", attention.head_dim)
        self.cross_norm, self.feed_forward_norm = (make_norm(spec.inner_norm, width) for _ in range(2))
        inner = if_divisible(parallel, spec.feed_forward.intermediate_size)
        self.feed_forward = MLP(spec.feed_forward, width, inner)
        self.down = own.column_parallel(f"{module}.down")

    def forward(self, x: Tensor, sample: int | None, adapter: kernels.OneAdapter | None) -> Tensor:
        """`[tiles, rows, columns, width]` → `[tiles, rows, columns, hidden_size]`; `sample` is the number of the patch
        in a square that is added to a query, None: an average."""
        spec, tiles = self._spec, len(x)
        x = normed(self.norm, x, adapter)
        count = spec.grid // spec.window
        side = count * spec.queries
        if sample is None:
            few = F.interpolate(x.permute(0, 3, 1, 2), (side, side), mode="area").permute(0, 2, 3, 1)
        else:
            few = x[:, sample // 2 :: 2, sample % 2 :: 2]
        patches = _windows(x, spec.window) + self.tokens["places"]
        queries = normed(self.input_norm, _windows(few, spec.queries) + self.tokens["queries"], adapter)
        starts = torch.arange(len(queries) + 1) * queries.shape[1]
        flat = queries.flatten(0, 1)
        flat = normed(self.attention_norm, flat + self.attention(flat, starts, flat, None, adapter), adapter)
        crossed = self.cross(torch.unflatten(flat, 0, (len(queries), -1)), patches, adapter).flatten(0, 1)
        flat = normed(self.cross_norm, flat + crossed, adapter)
        flat = normed(self.feed_forward_norm, flat + self.feed_forward(flat, adapter), adapter)
        out: Tensor = self.down(flat, adapter).view(tiles, count, count, spec.queries, spec.queries, -1)
        return out.transpose(2, 3).reshape(tiles, side, side, -1)


def _windows(x: Tensor, size: int) -> Tensor:
    """`[tiles, rows, columns, width]` → `[windows, size * size, width]`"""
    tiles, rows, columns, _ = x.shape
    cut = x.reshape(tiles, rows // size, size, columns // size, size, -1).transpose(2, 3)
    return cut.flatten(0, 2).flatten(1, 2)


class WindowReaders(nn.Module):
    """All readers, each for its output of the tower's layers."""

    def __init__(self, spec: WindowReaderSpec, width: int, hidden_size: int, parallel: Parallel) -> None:
        """`width` is that of all outputs together."""
        super().__init__()
        divided = if_divisible(parallel, spec.attention.num_heads)
        own = FromSpec(spec.parameters(width, hidden_size), divided)
        width //= spec.num_averaged + spec.num_sampled

        def readers(kind: str, count: int) -> nn.ModuleList:
            modules = [f"projector.{kind}.{number}" for number in range(count)]
            return nn.ModuleList([WindowReader(spec, width, parallel, own, module) for module in modules])

        self.averaged = readers("averaged", spec.num_averaged)
        self.sampled = readers("sampled", spec.num_sampled)

    def forward(self, x: Tensor, adapter: kernels.OneAdapter | None = None) -> Tensor:
        """`[tiles, rows, columns, width]` → `[tiles, rows, columns, levels * hidden_size]`"""
        readers = [(each, None) for each in self.averaged] + [(each, at) for at, each in enumerate(self.sampled)]
        outputs = x.chunk(len(readers), dim=-1)
        return torch.cat([each(own, at, adapter) for (each, at), own in zip(readers, outputs, strict=True)], dim=-1)
