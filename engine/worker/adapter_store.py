"""The adapters that a rank has: in the host's memory, ready to be copied, and in slots of its device. The scheduler
decides which ones (`AdapterPlan`).

A thread reads adapters beside the steps, and another one helps if it takes very long. Pools of layers are made when an
adapter first changes the layer, and grow when an adapter does not fit, within the step that assigns it. Then they take
the whole reserve, for as many further adapters like this one as it has room for: so where all change the same layers,
nothing is copied again, and on a GPU no step is captured again. Adapters that change other layers have the rows without
an adapter given back, and take half of what is left.
"""

from __future__ import annotations

import functools
import logging
import operator
import threading
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from quire.engine.checkpoints.adapter_loader import (
    EMBEDDING,
    TOWER,
    AdaptedLayer,
    AdapterLoader,
    Change,
    LayerChange,
)
from quire.engine.config.engine_config import LoraConfig, ModelConfig
from quire.engine.layers.batch import Batch
from quire.engine.layers.row_changes import RowChanges
from quire.engine.layers.sending import send
from quire.engine.layers.weight import DenseWeights
from quire.engine.protocol.adapters import MAX_READS, AdapterPlan, AdapterPrepared, AdapterRef
from quire.engine.protocol.errors import ConfigError
from quire.engine.worker.oom import is_out_of_memory, release_memory
from quire.kernels import LowRankPool, OneAdapter

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT = 2.0
_PATIENCE = 60.0
"""Seconds after which the disk of an adapter counts as one that may not answer, and another thread reads the others."""
Prepared = dict[str, Change]
"""See `AdapterLoader.load`."""
OwnChange = TypeVar("OwnChange", RowChanges, DenseWeights)


class _Rows:
    """Rows of tensors: each adapter slot has some, one after another."""

    def __init__(self) -> None:
        self.taken: dict[int, range] = {}

    @property
    def num_taken(self) -> int:
        return sum(map(len, self.taken.values()))

    def find(self, count: int, size: int) -> range | None:
        """Where so many of `size` rows are free."""
        at = 0
        for own in sorted((own for own in self.taken.values() if own), key=lambda own: own.start):
            if own.start - at >= count:
                break
            at = own.stop
        else:
            if size - at < count:
                return None
        return range(at, at + count)

    def compact(self, *moves: tuple[Tensor, Tensor]) -> dict[int, int]:
        """Copy all that are taken to the front, of other tensors or of the same; returns by how much the rows of each
        slot move. If there is no memory for it, nothing has changed."""
        places, at = [], 0
        for slot, own in sorted(self.taken.items(), key=lambda item: item[1].start):
            places.append((slot, own, at))
            at += len(own)
        longest = max((len(own) for _, own, at in places if at < own.start), default=0)
        between = [old.new_empty(longest if old is new else 0, *old.shape[1:]) for old, new in moves]
        for slot, own, at in places:
            self.taken[slot] = range(at, at + len(own))
            for (old, new), scratch in zip(moves, between, strict=True):
                rows, to = old[own.start : own.stop], new[at : at + len(own)]
                if old is not new:
                    to.copy_(rows)
                elif at < own.start:  # the two may overlap
                    to.copy_(scratch[: len(own)].copy_(rows))
        return {slot: at - own.start for slot, own, at in places}


class LayerPool:
    """The pool of a layer, and which of its rows are taken. Its type is the narrowest that has the numbers of all its
    adapters, or was since it has last shrunk."""

    def __init__(self, layer: AdaptedLayer, num_slots: int, device: torch.device) -> None:
        self._layer, self._num_slots, self._device = layer, num_slots, device
        self._rows, self._vectors = _Rows(), _Rows()
        """Rank rows, and those of scales and biases."""
        self._held: dict[int, tuple[int, torch.dtype]] = {}
        """The largest rank of each adapter slot, and the type of its numbers."""

    @property
    def pool(self) -> LowRankPool | None:
        return self._layer.linear.pool

    @property
    def nbytes(self) -> int:
        """Bytes of what depends on the adapters."""
        return 0 if (pool := self.pool) is None else self._layer.nbytes(*self._sizes, pool.a.dtype)

    def device_bytes(self, change: LayerChange) -> int:
        """The most that a change takes, whatever the types of others."""
        return self._layer.nbytes(*_counts(change))

    def growth(self, change: LayerChange) -> int:
        """Bytes by which the pool must grow to have room for a change."""
        return self._layer.nbytes(*self._needed(change)) - self.nbytes

    def further_bytes(self, change: LayerChange) -> int:
        """Bytes by which it must grow then for another one of the same size and type."""
        return self._layer.nbytes(*_counts(change), self._needed(change)[2])

    def shrink(self) -> bool:
        """Keep no more than is taken; returns whether the pool has changed."""
        before = self.pool
        if not self._held or before is None:
            self._layer.linear.pool = None
            return before is not None
        largest, dtype = max(rank for rank, _ in self._held.values()), _widest(each for _, each in self._held.values())
        if (*self._sizes, before.a.dtype) != (*self._taken, dtype):
            self._resize(*self._taken, dtype)
        elif before.largest_rank > largest:
            self._layer.linear.pool = replace(before, largest_rank=largest)
        return self.pool is not before

    def assign(self, slot: int, change: LayerChange, copies: int) -> bool:
        """Copy a change to the device. A pool that must grow gets room for so many further ones of the same size.
        Returns whether its tensors or its largest rank have changed."""
        before, counts, sizes, needed = self.pool, _counts(change), self._sizes, self._needed(change)
        places = [rows.find(*each) for rows, *each in zip((self._rows, self._vectors), counts, sizes, strict=True)]
        is_same = before is not None and before.a.dtype == needed[2]
        if not is_same or None in places:
            if before is not None and is_same and needed[:2] == sizes:
                self._compact(before, before)
            else:
                self._resize(needed[0] + copies * counts[0], needed[1] + copies * counts[1], needed[2])
            places = [range(taken, taken + count) for taken, count in zip(self._taken, counts, strict=True)]
        rows, vectors = places
        pool = self.pool
        assert pool is not None
        assert rows is not None
        assert vectors is not None
        self._rows.taken[slot], self._vectors.taken[slot] = rows, vectors
        largest = int(change.spans[..., 1].max())
        self._held[slot] = largest, change.a.dtype
        if largest > pool.largest_rank:
            pool = self._layer.linear.pool = replace(pool, largest_rank=largest)
        own, spans = self._slots_of(slot), change.spans.clone()
        spans[..., 0] += rows.start
        pool.slots[own] = send(spans, self._device)
        if vectors:
            pool.vectors[own] = torch.arange(vectors.start, vectors.stop, device=self._device)
        for place, to, values in (
            (rows, pool.a, change.a),
            (rows, pool.b, change.b),
            (vectors, pool.scale, change.scale),
            (vectors, pool.bias, change.bias),
        ):
            if to is not None and values is not None:
                to[place.start : place.stop].copy_(values, non_blocking=True)
        return pool is not before

    def free(self, slot: int) -> None:
        """Let the slot change nothing."""
        if self._held.pop(slot, None) is None or (pool := self.pool) is None:
            return
        del self._rows.taken[slot], self._vectors.taken[slot]
        own = self._slots_of(slot)
        pool.slots[own], pool.vectors[own] = 0, -1

    @property
    def _sizes(self) -> tuple[int, int]:
        """Rank rows, and rows of scales and biases, that the pool has."""
        pool = self.pool
        return (0, 0) if pool is None else (len(pool.a), 0 if pool.scale is None else len(pool.scale))

    @property
    def _taken(self) -> tuple[int, int]:
        return self._rows.num_taken, self._vectors.num_taken

    def _needed(self, change: LayerChange) -> tuple[int, int, torch.dtype]:
        """The rows that the pool must have for a change in addition, and their type. Another type needs new tensors,
        which need not have rows that are free now."""
        rows, vectors = map(operator.add, self._taken, _counts(change))
        if (pool := self.pool) is None:
            return rows, vectors, change.a.dtype
        if (dtype := _widest((pool.a.dtype, change.a.dtype))) != pool.a.dtype:
            return rows, vectors, dtype
        return max(rows, self._sizes[0]), max(vectors, self._sizes[1]), dtype

    def _slots_of(self, slot: int) -> slice:
        count = self._layer.num_experts
        return slice(slot * count, (slot + 1) * count)

    def _resize(self, rows: int, vectors: int, dtype: torch.dtype) -> None:
        """Make new tensors of so many rows of this type, with those that are taken at the front."""
        layer, old = self._layer, self.pool
        pool = LowRankPool.allocate(
            self._num_slots * layer.num_experts,
            rows,
            layer.in_features,
            layer.widths,
            dtype,
            self._device,
            largest_rank=max((rank for rank, _ in self._held.values()), default=0),
        )
        if old is None:
            pool.vectors.fill_(-1)
        else:
            pool = replace(pool, slots=old.slots, vectors=old.vectors)
        if vectors:
            shape = vectors, sum(layer.widths)
            scale, bias = (torch.empty(shape, device=self._device) for _ in range(2))
            pool = replace(pool, scale=scale, bias=bias)
        if old is not None:
            self._compact(old, pool)
        layer.linear.pool = pool

    def _compact(self, old: LowRankPool, new: LowRankPool) -> None:
        """Move the rows that are taken to the front of a pool that has the slots of `old`, or is the same."""
        for slot, shift in self._rows.compact((old.a, new.a), (old.b, new.b)).items():
            new.slots[self._slots_of(slot), :, 0] += shift
        vectors = [(old.scale, new.scale), (old.bias, new.bias)]
        moves = ((was, now) for was, now in vectors if was is not None and now is not None)
        for slot, shift in self._vectors.compact(*moves).items():
            if self._vectors.taken[slot]:
                new.vectors[self._slots_of(slot)] += shift


def _counts(change: LayerChange) -> tuple[int, int]:
    """Rank rows, and rows of scales and biases."""
    return len(change.a), 0 if change.scale is None else len(change.scale)


def _widest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """The narrowest type that has the numbers of all of these."""
    return functools.reduce(torch.promote_types, dtypes)


class OwnTensors(Generic[OwnChange]):
    """The changes of a layer by adapters that have tensors of their own, which only steps with rows of theirs read."""

    def __init__(self, by_slot: dict[int, OwnChange], device: torch.device) -> None:
        self.by_slot: dict[int, OwnChange] = by_slot
        self._device = device

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.by_slot.values())

    def device_bytes(self, change: OwnChange) -> int:
        return change.nbytes

    growth = further_bytes = device_bytes

    def shrink(self) -> bool:
        return False

    def assign(self, slot: int, change: OwnChange, copies: int) -> bool:
        """Copy a change to the device. Returns False: no captured step reads it."""
        tensors = {name: each for name, each in vars(change).items() if each is not None}
        own = {name: each.to(self._device, non_blocking=True) for name, each in tensors.items()}
        self.by_slot[slot] = replace(change, **own)
        return False

    def free(self, slot: int) -> None:
        self.by_slot.pop(slot, None)


class AdapterStore:
    """A rank's adapters. `apply` is called by the thread of the steps."""

    def __init__(
        self,
        model: nn.Module,
        config: ModelConfig,
        lora: LoraConfig,
        stage: range,
        rank: int,
        device: torch.device,
        on_prepared: Callable[[AdapterPrepared], None],
        modules: Mapping[str, dict[int, DenseWeights]],
        *,
        survives: bool,
    ) -> None:
        """`model` has the layers `stage`. `on_prepared` is called in any thread, but not twice at a time. `modules` are
        the changes of those after the pooling, by their name in `AdapterLoader.dense`. `survives`: no other rank waits,
        so that `apply` need not raise if an adapter finds no memory."""
        self._make_loader = partial(
            AdapterLoader, model, config, stage, lora.device_bytes, pins_memory=device.type == "cuda"
        )
        self._loader = self._make_loader()
        self._rows = {f"{path}.weight": OwnTensors(each.changes, device) for path, each in self._loader.outer.items()}
        self._pools: dict[str, Any] = {  # each takes the changes that the loader has for its path
            **{path: LayerPool(each, lora.num_slots, device) for path, each in self._loader.layers.items()},
            **self._rows,
            **{path: OwnTensors(norm.changes, device) for path, norm in self._loader.norms.items()},
            **{path: OwnTensors[DenseWeights](each, device) for path, each in modules.items()},
        }
        self.num_slots, self._device_bytes = lora.num_slots, lora.device_bytes
        self._rank, self._device, self._survives = rank, device, survives
        self._on_prepared = on_prepared
        self.version = 0
        """Rises when layers of this rank have other tensors, or other largest ranks, which steps captured before do not
        know. A tower runs without graphs for items with adapters."""
        self._contents: dict[int, tuple[bytes, Collection[str]]] = {}
        """The digest of the adapter in each slot, and the paths of the layers that it changes."""
        self._prepared: dict[bytes, Prepared] = {}
        """Is changed by the threads that read, before the answer, and by `apply`, after it."""
        self._requests: SimpleQueue[AdapterRef | None] = SimpleQueue()
        self._answers = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._start(self._loader)

    def apply(self, plan: AdapterPlan) -> dict[bytes, str]:
        """Make a plan's changes. Returns `ModelRunnerOutput.adapter_failures`; raises instead if there is no memory for
        an adapter and this rank does not survive."""
        failures = dict[bytes, str]()
        for digest in plan.dropped:
            self._prepared.pop(digest, None)
        for adapter in plan.prepared:
            self._requests.put(adapter)
        for slot in plan.freed:
            self._free(slot)
        is_changed = False
        for slot, digest in plan.assigned:
            try:
                is_changed |= self._assign(slot, digest)
            except Exception as error:
                if not self._survives or not is_out_of_memory(error):
                    raise
                reason = f"out of memory on {self._device.type}: the adapter cannot be placed; lower --max-loras"
                logger.error("%s: %s", reason, " ".join(str(error).split())[:500])
                traceback.clear_frames(error.__traceback__)
                failures[digest] = reason
            else:
                continue
            self._free(slot)
            release_memory(self._device)
            is_changed = True
        self.version += is_changed
        return failures

    def changes_embedding(self, batch: Batch) -> bool:
        """Whether tokens of the batch have an embedding of their adapter, which captured steps do not look up."""
        embedding = self._rows.get(f"{EMBEDDING}.weight")
        if batch.adapters is None or embedding is None:
            return False
        return any(batch.adapters.tokens.count(slot) for slot in embedding.by_slot)

    def in_slot(self, slot: int) -> OneAdapter | None:
        """The adapter in a slot, for rows that all have it; None: there is none."""
        return OneAdapter(slot, self.num_slots) if slot in self._contents else None

    def digest_in(self, slot: int) -> bytes:
        """The digest of the adapter in a slot; empty: there is none."""
        return self._contents.get(slot, (b"", ()))[0]

    def close(self) -> None:
        """End the threads, except one that reads something large: it ends with the process."""
        for _ in self._threads:
            self._requests.put(None)
        for thread in self._threads:
            thread.join(_CLOSE_TIMEOUT)

    def _free(self, slot: int) -> None:
        for path in self._contents.pop(slot, (b"", ()))[1]:
            self._pools[path].free(slot)

    def _assign(self, slot: int, digest: bytes) -> bool:
        """Copy a prepared adapter to a free slot. Returns whether layers outside the tower have other tensors, or other
        largest ranks."""
        changes = self._prepared[digest]
        assert slot not in self._contents, f"slot {slot} is taken"
        self._contents[slot] = digest, tuple(changes)
        room, is_changed, is_short = self._room(changes), False, False
        if room < 0:  # other layers have room that these need
            is_short = True
            for path, pool in self._pools.items():
                is_changed |= pool.shrink() and not path.startswith(TOWER)
            room = self._room(changes)
        further: int = sum(self._pools[path].further_bytes(change) for path, change in changes.items())
        copies = min(self.num_slots - len(self._contents), max(0, room) // max(1, further)) >> is_short
        for path, change in changes.items():
            is_changed |= self._pools[path].assign(slot, change, copies) and not path.startswith(TOWER)
        return is_changed

    def _room(self, changes: Prepared) -> int:
        """Bytes that stay free if pools grow by what these changes need."""
        growth: int = sum(self._pools[path].growth(change) for path, change in changes.items())
        own: int = sum(pool.nbytes for pool in self._pools.values())
        return self._device_bytes - own - growth

    def _start(self, loader: AdapterLoader | None = None) -> None:
        """Start a thread that reads adapters, with a loader of its own."""
        if len(self._threads) == MAX_READS:
            return
        threads, started = torch.get_num_threads(), threading.Event()
        given = loader or self._make_loader(), started
        self._threads.append(threading.Thread(target=self._run, args=given, daemon=True, name="adapters"))
        self._threads[-1].start()
        started.wait()
        torch.set_num_threads(threads)  # new threads inherit the last value

    def _run(self, loader: AdapterLoader, started: threading.Event) -> None:
        """Read adapters, one after another."""
        torch.set_num_threads(1)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # else pinning memory would create a context on GPU 0
        started.set()
        while (adapter := self._requests.get()) is not None:
            late = threading.Timer(_PATIENCE, self._start)
            late.daemon = True
            late.start()
            answer = self._read(loader, adapter)
            late.cancel()
            with self._answers:
                self._on_prepared(answer)

    def _read(self, loader: AdapterLoader, adapter: AdapterRef) -> AdapterPrepared:
        answer = AdapterPrepared(adapter.digest, self._rank)
        try:
            changes = loader.load(adapter)
            answer.host_bytes = sum(each.nbytes for each in changes.values())
            answer.device_bytes = sum(self._pools[path].device_bytes(each) for path, each in changes.items())
            answer.changes_tower = any(path.startswith(TOWER) for path in changes)
            self._prepared[adapter.digest] = changes
        except ConfigError as error:
            answer.error, answer.is_invalid = str(error), not isinstance(error.__cause__, OSError)
        except Exception as error:
            logger.exception("adapter %s cannot be read", adapter.digest.hex())
            answer.error = f"{adapter.paths[0]} cannot be read: {type(error).__name__}: {error}"
            answer.is_invalid = not (isinstance(error, OSError) or is_out_of_memory(error))
        for path in adapter.paths:  # users know only the last one
            answer.error = answer.error.replace(path, adapter.paths[-1])
        return answer
