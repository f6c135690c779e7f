"""Capture the layers of a tower once and replay them, for pictures of so few patches that launching a layer's kernels
one by one takes longer than they do.

A captured layer has a fixed number of rows at fixed addresses. A picture's patches are copied there and back, so that
items may take turns between two layers. The rows behind them are a sequence of their own.
"""

from __future__ import annotations

import logging
import time
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from quire import kernels
from quire.engine.architecture.tower_spec import VisionTowerSpec
from quire.engine.config.engine_config import EngineConfig
from quire.engine.config.memory_plan import format_bytes
from quire.engine.distributed.communicator import Parallel
from quire.engine.layers.sending import send
from quire.engine.models.encoder import EncoderLayer
from quire.engine.models.tower import Tower
from quire.engine.worker import graph_recorders
from quire.engine.worker.graph_recorders import Replay

logger = logging.getLogger(__name__)

_BLOCK = 16
_ROWS_PER_SEQUENCE = 16
"""There is room for as many sequences as have so many rows each on average; more are not replayed."""


class TowerGraphs:
    """Captured layers of a tower, for the numbers of rows in `GraphConfig.tower_sizes`."""

    def __init__(self, tower: Tower | None, config: EngineConfig, device: torch.device, parallel: Parallel) -> None:
        """`parallel` are the ranks that share the tower; None: this rank has none."""
        self._device, self._sizes, self._layers = device, config.graphs.tower_sizes, list[EncoderLayer]()
        spec, self._is_shared = config.model.architecture.media, False
        self._recorder = graph_recorders.make_recorder(device, parallel)
        self._replays: dict[tuple[int, int], Replay] = {}
        """By number of rows and layer."""
        self._rows: dict[int, _TowerRows] = {}
        self._placed: tuple[object, ...] = ()
        """The rows that were filled last, and with what."""
        if tower is not None and spec is not None and self._recorder is not None:
            assert isinstance(spec.tower, VisionTowerSpec)
            layers = tower.get_submodule("layers").children()
            self._layers = [layer for layer in layers if isinstance(layer, EncoderLayer)]
            self._is_shared = parallel.size > 1 and not spec.tower.divides_items
            make = partial(torch.zeros, self._sizes[-1], dtype=getattr(torch, config.model.dtype), device=device)
            first = self._layers[0].attention
            x, turns = make(spec.tower.width), make(first.spec.rope.dim if first.spec.rope else 0, dtype=torch.float32)
            blocks = self._sizes[-1] // _BLOCK + _num_sequences(self._sizes[-1])
            cache = x.new_zeros(2, blocks, first.num_kv_heads, _BLOCK, first.spec.head_dim)
            self._rows = {size: _TowerRows(x[:size], turns[:size], cache) for size in self._sizes}

    @torch.inference_mode()
    def capture(self) -> bool:
        """Capture all layers for all sizes on all ranks of the grid, or none on any rank; in that case the log says
        why."""
        started, free = time.perf_counter(), graph_recorders.free_bytes(self._device)
        failure = graph_recorders.capture_together("CUDA graph of a tower", self._sizes[::-1], self._try_capture)
        is_first = not dist.is_initialized() or dist.get_rank() == 0
        if failure:
            self.close()
            if is_first:
                logger.warning("images are encoded without CUDA graphs: %s", failure)
            return False
        self._placed = ()
        for number, layer in enumerate(self._layers):
            layer.replay = partial(self._replay, number)
        if is_first:
            logger.info(
                "captured %d CUDA graphs for images of up to %s patches in %.1f s, using %s",
                len(self._replays),
                f"{self._sizes[-1]:,}",
                time.perf_counter() - started,
                format_bytes(max(0, free - graph_recorders.free_bytes(self._device))),
            )
        return True

    def _try_capture(self, size: int) -> str:
        """Capture all layers for so many rows; returns why that failed, or ""."""
        if not self._layers:
            return ""
        assert self._recorder is not None
        rows = self._rows[size]
        if difference := rows.compare(self._layers[0].attention.num_heads):
            return f"attention differs: {difference}"
        for number, layer in enumerate(self._layers):
            replay = graph_recorders.try_capture(self._recorder, partial(rows.run, layer), is_shared=self._is_shared)
            if isinstance(replay, str):
                return replay
            self._replays[size, number] = replay
        return ""

    def _replay(self, number: int, x: Tensor, starts: Tensor, cos_sin: Tensor | None) -> bool:
        """See `EncoderLayer.replay`. Whether a layer is replayed depends on the item alone, and so do its features."""
        size = next((size for size in self._sizes if len(x) <= size), 0)
        if not size or len(starts) > _num_sequences(size):
            return False
        rows, placed = self._rows[size], (size, starts, cos_sin)
        if not self._placed or any(a is not b for a, b in zip(self._placed, placed, strict=True)):
            self._placed = ()
            rows.place(starts, cos_sin)
            self._placed = placed
        rows.x[: len(x)].copy_(x)
        self._replays[size, number]()
        x.copy_(rows.x[: len(x)])
        return True

    def close(self) -> None:
        """Drop the captured layers, which keep the communicators that they use alive."""
        self._replays, self._rows, self._placed = {}, {}, ()
        for layer in self._layers:
            layer.replay = None


def _num_sequences(size: int) -> int:
    """At most, with the one behind a picture's."""
    return size // _ROWS_PER_SEQUENCE + 1


class _TowerRows(kernels.SequenceKV):
    """The inputs of captured layers for a number of rows, and the keys and values of sequences of them."""

    def __init__(self, x: Tensor, cos_sin: Tensor, cache: Tensor) -> None:
        """`x` `[rows, width]` is also the output. `cos_sin` may have no columns; `cache` is as of `paged_attention`."""
        self.x, self._cos_sin, self._cache = x, cos_sin, cache
        rows, self._count = len(x), _num_sequences(len(x))
        self._width = -(-rows // _BLOCK)
        sizes = rows, rows, self._count, self._count + 1, self._count * self._width
        self._numbers = torch.zeros(sum(sizes), dtype=torch.int64, device=x.device)
        self._slots, self._ends, self._lengths, self._starts, tables = self._numbers.split_with_sizes(sizes)
        self._tables = tables.view(self._count, self._width)
        self.place(torch.tensor([0, rows]), self._cos_sin)

    def place(self, starts: Tensor, cos_sin: Tensor | None) -> None:
        """Set where sequences begin, `[sequences + 1]` on the host, and the positions of their rows. Sequences behind
        the one of padding are empty."""
        used = int(starts[-1])
        starts = F.pad(starts, (0, self._count + 1 - len(starts)), value=len(self.x))
        blocks = kernels.SequenceBlocks.of(starts, _BLOCK)
        tables = F.pad(blocks.tables, (0, self._width - blocks.tables.shape[1])).clamp(max=self._cache.shape[1] - 1)
        parts = blocks.slots, blocks.ends, blocks.lengths, starts, tables.flatten()
        self._numbers.copy_(send(torch.cat(parts), self._numbers.device))
        self.x[used:].zero_()  # else they would grow from picture to picture, until they are not finite
        if self._cos_sin.shape[1]:
            assert cos_sin is not None
            self._cos_sin[:used].copy_(cos_sin)

    def run(self, layer: EncoderLayer) -> None:
        """The step that is captured."""
        self.x.copy_(layer.forward_with(self.x, self, self._cos_sin))

    def write(self, query: Tensor, key: Tensor, value: Tensor, first: int, cos_sin: Tensor | None) -> Tensor:
        """See `SequenceKV`; all rows at once."""
        return kernels.rotary_write_kv(query, key, value, self._cos_sin, self._cache, self._slots)

    def attend(self, query: Tensor, first: int, scale: float) -> Tensor:
        """See `SequenceKV`; all rows at once."""
        sequences = self._tables, self._lengths, self._starts
        return kernels.paged_attention(query, self._cache, *sequences, scale, ends=self._ends)

    def compare(self, num_heads: int) -> str:
        """How attention of random numbers differs from that without a cache, beyond the type's precision; or ""."""
        used, (_, _, kv_heads, _, head_dim) = len(self.x) - 5, self._cache.shape
        starts, scale = torch.tensor(sorted({0, used // 16, used // 2, used})), head_dim**-0.5
        generator = torch.Generator().manual_seed(0)
        numbers = torch.randn(len(self.x), num_heads + 2 * kv_heads, head_dim, generator=generator).to(self.x)
        angles = torch.randn(used, self._cos_sin.shape[1] // 2, generator=generator).to(self._cos_sin)
        cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
        query, key, value = numbers.split_with_sizes((num_heads, kv_heads, kv_heads), dim=1)
        try:
            self.place(starts, cos_sin)
            found = self.attend(self.write(query, key, value, 0, None), 0, scale)[:used]
            plain, turns = kernels.sequence_kv(query, starts, kv_heads, head_dim), cos_sin if cos_sin.shape[1] else None
            turned = plain.write(query[:used], key[:used], value[:used], 0, turns)
            step = 8 * torch.finfo(found.dtype).eps
            torch.testing.assert_close(found, plain.attend(turned, 0, scale), rtol=step, atol=step)
        except Exception as error:  # from a compiler, a driver or the comparison
            return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]
        return ""
