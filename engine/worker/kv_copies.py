"""Copies between the KV caches of a rank and the arena of a KV store, in a thread beside the steps.

An entry is copied in a few operations (`quire.engine.config.kv_layout.KVSlices`), without Python's lock. On a GPU,
these run on a stream of their own, and the bytes pass through pinned memory.
"""

from __future__ import annotations

import logging
import mmap
import os
import sys
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from quire.engine.cluster.security import Dropped
from quire.engine.config.engine_config import EngineConfig
from quire.engine.config.kv_cache_groups import KVCacheShape
from quire.engine.config.kv_layout import KVSlices, kv_layout, rank_copies
from quire.engine.kv_store.arena import open_arena
from quire.engine.protocol.kv_ranks import KVRuns, RankPlace
from quire.engine.protocol.kv_store import KVCopied, KVCopy, KVCopyPlan, RemoteArena
from quire.engine.worker.arena_link import BATCH_BYTES, ArenaLink, ArenaTransfer

logger = logging.getLogger(__name__)

_BATCH_BYTES = 32 << 20
"""Bytes of a batch. After each batch, finished copies are reported, and the next ones chosen."""
_WATCHDOG_SHARE = 0.5
"""A batch of copies to or from another host takes no longer than this part of --watchdog-seconds."""
_CLOSE_TIMEOUT = 2.0
_PARTS = 4
"""Number of parts in which the layers of a step's entries are copied during the step."""
_ALL_LAYERS = range(sys.maxsize)


class PendingCopy(NamedTuple):
    """A copy to be made, or the part of it for some layers."""

    arena: str
    copy: KVCopy
    is_store: bool
    ready: torch.cuda.Event | None
    """On a GPU: the event before which the copy must not begin, the end of earlier steps or of these layers."""
    layers: range = _ALL_LAYERS
    """Numbers of layers in the order of the model."""

    @property
    def is_last(self) -> bool:
        """Whether this is the last part; the others come before it."""
        return self.layers.stop == sys.maxsize


class KVCopies:
    """The copies of a rank. Those that requests wait for come first: loads, then blocks that other replicas will
    load."""

    def __init__(
        self,
        config: EngineConfig,
        rank: int,
        memory: Mapping[KVCacheShape, Tensor],
        device: torch.device,
        staging: KVStaging | None,
        on_copied: Callable[[KVCopied], None],
    ) -> None:
        """`memory` has the bytes of all planes of each shape, see `KVCaches`. `on_copied` is called in the copies'
        thread."""
        self._rank, self._memory, self._device, self._on_copied = rank, memory, device, on_copied
        self._num_blocks, self._kinds = config.cache.num_blocks, kv_layout(config).kinds
        self._slices, self._staging = rank_copies(config, rank), staging
        parallel = config.parallel
        self._is_remote = rank not in parallel.ranks_of(parallel.first_node)
        """Whether the arena is on another host."""
        self._token, self._max_seconds = parallel.cluster_token, parallel.watchdog_seconds * _WATCHDOG_SHARE
        self._dropped = Dropped("copies between KV cache and store failed")
        self._path, self._arena = "", torch.empty(0, dtype=torch.uint8)
        self._link: ArenaLink | None = None
        """The connection to an arena on another host."""
        self._newest = ""
        """The arena of the last plan. No other one stays mapped, because its store may have ended."""
        self._remote: RemoteArena | None = None
        """How to reach the arena of the last plan with copies, if it is on another host."""
        self._loads, self._parts, self._stores = (deque[PendingCopy]() for _ in range(3))
        self._step, self._num_computed = KVCopyPlan(""), 0
        """The last plan, whose step computes the blocks of its `step_stores`, and the number of layers whose copies
        have been given to the thread."""
        self._failed = set[int]()
        """Numbers of the copies of which some part has failed."""
        own = config.parallel.stages[config.parallel.stage_of(rank)]
        self._first_layer = own.start
        self._marks = {len(own) * part // _PARTS for part in range(1, _PARTS + 1)}
        """Layers in the stage at which a part ends. A drafter's layers come after the last one."""
        self._changed, self._is_closed = threading.Condition(), False
        threads, started = torch.get_num_threads(), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), daemon=True, name="kv-copies")
        self._thread.start()
        started.wait()
        torch.set_num_threads(threads)  # new threads inherit the last value

    def begin(self, plan: KVCopyPlan) -> Callable[[int], None] | None:
        """Begin the copies of a plan, after the steps that have been launched. Returns the function to call during the
        plan's step (`Batch.on_layer`), after which `end_step` must be called; None: neither is needed."""
        ready = self._ready()
        with self._changed:
            self._newest = plan.arena
            if plan.arena:
                self._remote = plan.remote
            self._loads.extend(PendingCopy(plan.arena, copy, False, ready) for copy in plan.loads)
            self._stores.extend(PendingCopy(plan.arena, copy, True, ready) for copy in plan.stores)
            self._changed.notify()
        self._step, self._num_computed = plan, 0
        return self._on_layer if plan.step_stores else None

    def _on_layer(self, number: int) -> None:
        if number + 1 in self._marks:
            self._store_layers(self._first_layer + number + 1)

    def end_step(self) -> None:
        """Begin the copies of the step's remaining layers, all of which have been launched."""
        if self._step.step_stores:
            self._store_layers(sys.maxsize)

    def _store_layers(self, end: int) -> None:
        """Begin the copies of the step's layers with numbers before `end`."""
        layers, ready, arena = range(self._num_computed, end), self._ready(), self._step.arena
        self._num_computed = end
        with self._changed:
            self._parts.extend(PendingCopy(arena, copy, True, ready, layers) for copy in self._step.step_stores)
            self._changed.notify()

    def _ready(self) -> torch.cuda.Event | None:
        """On a GPU: an event at the end of all work that has been launched."""
        if self._staging is None:
            return None
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record(torch.cuda.current_stream(self._device))
        return ready

    def close(self) -> None:
        """End the thread after its current batch. Further copies are not made."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(_CLOSE_TIMEOUT)

    @torch.inference_mode()
    def _run(self, started: threading.Event) -> None:
        torch.set_num_threads(1)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        started.set()
        while (batch := self._next()) is not None:
            if not batch:
                self._unmap()  # without the lock: unmapping much memory takes seconds
                continue
            numbers = [each.copy.number for each in batch if each.is_last]
            try:
                self._copy(batch)
            except Exception as error:
                if isinstance(error, OSError):  # the store has ended
                    self._dropped.add(repr(error))
                else:
                    logger.exception("copies between KV cache and store failed")
                self._failed.update(each.copy.number for each in batch)
            if numbers or self._is_remote:  # remote copies may be slow: the report shows progress
                self._on_copied(KVCopied(self._rank, numbers, [each for each in numbers if each in self._failed]))
                self._failed.difference_update(numbers)
        if self._link is not None:
            self._link.close()

    def _next(self) -> list[PendingCopy] | None:
        """Wait for copies, and take a batch with one direction and one arena. Empty: unmap the arena; None: closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_copies or self._is_closed or self._path not in ("", self._newest))
            if self._is_closed:
                return None
            if not self._has_copies:
                return []
            pending, batch, size = self._loads or self._parts or self._stores, list[PendingCopy](), 0
            arena, ready = pending[0].arena, pending[0].ready
            limit = _BATCH_BYTES
            if self._is_remote:
                limit = BATCH_BYTES if self._link is None else self._link.batch_bytes
            while pending and (pending[0].arena, pending[0].ready) == (arena, ready):
                size += self._size_of(pending[0])
                if batch and size > limit:
                    break
                batch.append(pending.popleft())
            return batch

    @property
    def _has_copies(self) -> bool:
        return bool(self._loads or self._parts or self._stores)

    def _copy(self, batch: list[PendingCopy]) -> None:
        """Make the copies of a batch, and note those that fail. Raises `OSError` if the arena does not exist, and other
        errors if something else fails."""
        path, remote = batch[0].arena, self._remote
        if self._path != path or (self._link is not None and self._link.remote != remote):
            self._unmap()
            if self._is_remote:
                assert remote is not None
                self._link = ArenaLink(remote, self._rank, self._token, self._max_seconds)
            else:
                self._arena = _map(path)
            self._path = path
        if self._link is not None:
            return self._copy_remotely(self._link, batch)
        slices = [
            (memory, self._arena.as_strided(memory.shape, strides, start))
            for pending in batch
            for memory, strides, start in self._views(pending)
        ]
        self._move(slices, batch)

    def _copy_remotely(self, link: ArenaLink, batch: list[PendingCopy]) -> None:
        """Make the copies of a batch through a buffer on this host, and note those that fail."""
        is_store = batch[0].is_store
        buffer = torch.empty(sum(map(self._size_of, batch)), dtype=torch.uint8)
        content, start = buffer.numpy().data, 0
        copies, transfers, slices = list[PendingCopy](), list[ArenaTransfer](), list[list[tuple[Tensor, Tensor]]]()
        for pending in batch:
            runs, own, begin = list[KVRuns](), list[tuple[Tensor, Tensor]](), start
            for memory, (layer_step, row_step, _), entry_start in self._views(pending):
                layers, rows, size = memory.shape
                own.append((memory, buffer[start : start + memory.numel()].view(memory.shape)))
                runs.append(KVRuns(entry_start - pending.copy.offset, layers, layer_step, rows, row_step, size))
                start += memory.numel()
            if runs:
                place = RankPlace(pending.arena, pending.copy.kind, pending.copy.offset, runs)
                copies.append(pending)
                transfers.append(ArenaTransfer.of(place, content[begin:start]))
                slices.append(own)
        if is_store:
            self._move([each for own in slices for each in own], batch)
        failed = link.copy(transfers, is_store=is_store)
        if not is_store:
            self._move([each for number, own in enumerate(slices) if number not in failed for each in own], batch)
        if failed:
            self._dropped.add(f"the store is at {link.remote.address}: {next(iter(failed.values()))}")
            self._failed.update(copies[number].copy.number for number in failed)

    def _move(self, slices: list[tuple[Tensor, Tensor]], batch: list[PendingCopy]) -> None:
        """Copy slices of the device's memory to slices on this host, or back."""
        is_store = batch[0].is_store
        if self._staging is not None:
            self._staging.copy(slices, batch[-1].ready, is_store=is_store)
            return
        for memory, entry in slices:
            if is_store:
                entry.copy_(memory)
            else:
                memory.copy_(entry)

    def _unmap(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None
        self._path, self._arena = "", torch.empty(0, dtype=torch.uint8)

    def _views(self, pending: PendingCopy) -> Iterator[tuple[Tensor, tuple[int, int, int], int]]:
        """The slices of an entry: as a view of the device's memory, `[layers, rows, bytes]`, and as strides and offset
        in the arena."""
        copy, kind = pending.copy, self._kinds[pending.copy.kind]
        assert len(copy.blocks) == len(kind.groups)
        assert all(0 <= block < self._num_blocks for block in copy.blocks)
        assert self._is_remote or 0 <= copy.offset <= len(self._arena) - kind.size
        for own, first, number in self._slices_of(pending):
            shape = number, own.rows.number, own.size
            start = own.memory_start + first * own.layers.memory + copy.blocks[own.group] * own.block_stride
            memory = self._memory[own.shape].as_strided(shape, (own.layers.memory, own.rows.memory, 1), start)
            start = copy.offset + own.entry_start + first * own.layers.entry
            yield memory, (own.layers.entry, own.rows.entry, 1), start

    def _size_of(self, pending: PendingCopy) -> int:
        """Bytes that are copied of an entry."""
        return sum(number * own.rows.number * own.size for own, _, number in self._slices_of(pending))

    def _slices_of(self, pending: PendingCopy) -> Iterator[tuple[KVSlices, int, int]]:
        """The slices of an entry; for each, the first layer that is copied, and the number of layers."""
        slices = self._slices[pending.copy.kind]
        for own in slices.stores if pending.is_store else slices.loads:
            first, end = (bisect_left(own.numbers, each) for each in (pending.layers.start, pending.layers.stop))
            if first < end:
                yield own, first, end - first


class KVStaging:
    """Buffers between a GPU and the arena: on the device, and pinned on the host."""

    @staticmethod
    def of(config: EngineConfig, rank: int, device: torch.device) -> KVStaging | None:
        """Allocate the buffers for a rank's copies; None: it is a CPU, or there is no store."""
        if config.kv_store is None or device.type == "cpu":
            return None
        return KVStaging(max(_BATCH_BYTES, *(each.size for each in rank_copies(config, rank))), device)

    def __init__(self, size: int, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._on_device = torch.empty(size, dtype=torch.uint8, device=device)
        self._on_host = torch.empty(size, dtype=torch.uint8).pin_memory()

    def copy(self, slices: list[tuple[Tensor, Tensor]], ready: torch.cuda.Event | None, *, is_store: bool) -> None:
        """Copy slices of the device's memory to slices of the arena, or back, after the event `ready`. Returns when
        that is done."""
        sizes = [memory.numel() for memory, _ in slices]
        on_device, on_host = self._on_device[: sum(sizes)], self._on_host[: sum(sizes)]
        parts = [
            (memory, own.view_as(memory), staged.view_as(entry), entry)
            for (memory, entry), own, staged in zip(
                slices, torch.split(on_device, sizes), torch.split(on_host, sizes), strict=True
            )
        ]
        if not is_store:
            for _, _, staged, entry in parts:
                staged.copy_(entry)
        with torch.cuda.stream(self._stream):
            if ready is not None:
                self._stream.wait_event(ready)
            if is_store:
                for memory, own, _, _ in parts:
                    own.copy_(memory)
                on_host.copy_(on_device, non_blocking=True)
            else:
                on_device.copy_(on_host, non_blocking=True)
                for memory, own, _, _ in parts:
                    memory.copy_(own)
            ended = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # blocking: the thread does not spin
            ended.record(self._stream)
        ended.synchronize()
        if is_store:
            for _, _, staged, entry in parts:
                entry.copy_(staged)


def _map(path: str) -> Tensor:
    """Map an arena for as long as the tensor or a view of it exists."""
    descriptor = open_arena(path)
    try:
        return torch.frombuffer(mmap.mmap(descriptor, 0), dtype=torch.uint8)
    finally:
        os.close(descriptor)
