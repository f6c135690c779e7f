"""The features of images and videos, on the ranks of the first stage. The scheduler decides what is encoded and what is
dropped (`MediaPlan`)."""

from __future__ import annotations

import logging
import mmap
import traceback
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from quire.engine.architecture.media_spec import TowerSpec
from quire.engine.distributed.communicator import Parallel
from quire.engine.models.tower import Tower, send_arrays
from quire.engine.protocol.media import EMBEDS, MediaData, MediaItem
from quire.engine.protocol.scheduler_output import MediaPlan
from quire.engine.worker.adapter_store import AdapterStore
from quire.engine.worker.media_rows import FeatureRange
from quire.engine.worker.oom import is_out_of_memory, release_memory
from quire.kernels import OneAdapter

logger = logging.getLogger(__name__)

_RAN, _FAILED, _NO_MEMORY = 1.0, 2.0, 3.0
"""What became of the steps of an item on the rank that ran them. Others that divide items have 0. Of several ranks, the
largest counts."""


class _Begun(NamedTuple):
    """An item whose tower has begun."""

    steps: Iterator[Tensor | None]
    """Has the state between two steps."""
    slot: int | None
    """Of the adapter that changes the tower."""
    adapter: bytes
    """Its digest."""


class EncoderCache:
    """Encoded items by digest. `tower` is called with one item at a time, so that features do not depend on others.

    The ranks share the computation of each item, unless the tower `divides_items`: then each item is one rank's
    (`TowerSpec.rank_of`), which computes it alone, and the others get the features from it.

    Groups of ranks that divide the tokens of a step each compute all items. Invariant: they have features of the same
    items, and zeros for the same ones, as all of them write keys and values of all tokens.
    """

    def __init__(
        self,
        tower: Tower,
        spec: TowerSpec,
        dtype: torch.dtype,
        device: torch.device,
        parallel: Parallel,
        adapters: AdapterStore | None = None,
        pcp: Parallel | None = None,
    ) -> None:
        """`spec` is the tower's, and `dtype` the features'. `parallel` are the ranks that share the tower, `pcp` this
        rank's counterparts in the groups that divide the tokens of a step. `adapters` may change the tower."""
        self._tower, self._device, self._parallel = tower, device, parallel
        self._spec, self._dtype, self._adapters = spec, dtype, adapters
        self._divides_items = spec.divides_items and parallel.size > 1
        self._pcp = pcp or Parallel()
        self._features: dict[bytes, Tensor] = {}
        """`[features, feature_width]` each."""
        self._begun: dict[bytes, _Begun] = {}
        """Items of this rank that later plans complete."""

    def update(self, plan: MediaPlan) -> dict[bytes, str]:
        """Apply a plan. Returns `EncoderOutput.failures`.

        Most errors depend on the item alone, whose data is not what the tower takes. Then all ranks that compute it
        fail at the same place, and none waits for another. If one of them cannot read the data, all learn it before
        they begin. A lack of memory in the tower may be of a rank alone, for which the others wait in a collective of
        the tower, so it is raised, unless a single rank computes the item. Ranks that divide items, and groups that
        divide the tokens of a step, tell each other afterwards what became of them: an item that one could not encode
        has failed on all.
        """
        self.free(plan)
        items = [item for item in plan.encoded if item.digest not in self._features]  # zeros: it could not be begun
        counts = [plan.num_steps if item is plan.encoded[-1] else None for item in items]
        outcomes = [
            self._run(item, count, plan.adapter_slots.get(item.digest)) if self._is_own(item) else 0.0
            for item, count in zip(items, counts, strict=True)
        ]
        for group, is_told in (self._parallel, self._divides_items), (self._pcp, self._pcp.size > 1):
            if is_told and items:
                group.wait_for_all()
                gathered = group.all_gather(torch.tensor(outcomes, device=self._device))
                outcomes = gathered.view(group.size, -1).amax(dim=0).tolist()
        assert all(outcomes), "each item is a rank's"
        failures = dict[bytes, str]()
        for item, count, outcome in zip(items, counts, outcomes, strict=True):
            make_zeros = partial(
                torch.zeros, item.num_features, self._spec.feature_width, dtype=self._dtype, device=self._device
            )
            if outcome != _RAN:
                self._begun.pop(item.digest, None)
                failures[item.digest] = _failure(item, outcome)
                self._features[item.digest] = make_zeros()
            elif self._divides_items and count is None:
                own = self._features.get(item.digest)
                self._features[item.digest] = self._parallel.all_reduce(make_zeros() if own is None else own)
        return failures

    def _is_own(self, item: MediaItem) -> bool:
        """Whether this rank computes an item."""
        return not self._divides_items or self._spec.rank_of(item, self._parallel.size) == self._parallel.rank

    def _run(self, item: MediaItem, num_steps: int | None, slot: int | None) -> float:
        """Call `_encode`, and return the outcome."""
        try:
            self._encode(item, num_steps, slot)
        except (dist.DistError, torch.AcceleratorError):
            raise
        except Exception as error:
            is_memory, is_shared = is_out_of_memory(error.__cause__ or error), self._parallel.size > 1
            if is_memory and is_shared and not self._divides_items and not isinstance(error, _NotRead):
                raise
            outcome = _NO_MEMORY if is_memory else _FAILED
            logger.error("%s:\n%s", _failure(item, outcome), "".join(traceback.format_exception(error)))
            traceback.clear_frames(error.__traceback__)  # they keep the tower's tensors alive
            if is_memory:
                release_memory(self._device)
            return outcome
        return _RAN

    def _encode(self, item: MediaItem, num_steps: int | None, slot: int | None) -> None:
        """Run `num_steps` of the tower for an item, or all that remain; `slot` is that of an adapter that changes it.
        Raises `_NotRead`, and `RuntimeError` if there are other features than the tower makes, or another number than
        the item has, or if the slot is empty, or has another adapter than the earlier steps had."""
        begun = self._begun.pop(item.digest, None) or self._begin(item, slot)
        if begun.slot is not None and self._digest_in(begun.slot) != begun.adapter:
            raise RuntimeError("the adapter that changes the tower has lost its slot before the item was encoded")
        steps = begun.steps
        if num_steps is not None:
            for _ in range(num_steps):
                paused = next(steps)
                assert paused is None, "the item has fewer steps left"
            self._begun[item.digest] = begun
            return
        *_, features = steps
        assert features is not None
        if features.shape != (expected := (item.num_features, self._spec.feature_width)):
            raise RuntimeError(f"the features of an item are {[*features.shape]}, but must be {[*expected]}")
        self._features[item.digest] = features

    def _digest_in(self, slot: int) -> bytes:
        assert self._adapters is not None
        return self._adapters.digest_in(slot)

    def _begin(self, item: MediaItem, slot: int | None) -> _Begun:
        """Raises `_NotRead` on all ranks that share the item if one of them cannot read the data."""
        assert item.data is not None, "no plan has begun the item"
        adapter: OneAdapter | None = None
        if slot is not None:
            assert self._adapters is not None
            if (adapter := self._adapters.in_slot(slot)) is None:
                raise RuntimeError("the adapter that changes the tower could not be placed")
        arrays, cause = dict[str, Tensor](), None
        try:
            arrays = send_arrays(arrays_of(item.data), self._device)
        except torch.AcceleratorError:
            raise
        except Exception as error:
            cause = error
        if self._parallel.size > 1 and not self._divides_items:
            num_failed = self._parallel.all_reduce(torch.full((1,), float(cause is not None), device=self._device))
            if num_failed.item() and cause is None:
                raise _NotRead("another rank could not read the arrays of an image or video")
        if cause is not None:
            raise _NotRead("the arrays of an image or video could not be read") from cause
        if (given := arrays.get(EMBEDS)) is None:
            steps = self._tower.encode(arrays, item, adapter)
        else:
            steps = iter((given.to(self._dtype, copy=True),))  # with memory of its own
        return _Begun(steps, slot, b"" if slot is None else self._digest_in(slot))

    def free(self, plan: MediaPlan) -> None:
        """Drop the features that `plan` frees. Digests may be unknown: of steps that were skipped."""
        for digest in plan.freed:
            self._features.pop(digest, None)
            self._begun.pop(digest, None)

    def read(self, ranges: Sequence[FeatureRange]) -> Tensor:
        """`[features, feature_width]`, one range after another."""
        return torch.cat([self._features[digest][begin:end] for digest, begin, end, _ in ranges])


def _failure(item: MediaItem, outcome: float) -> str:
    """What clients are told."""
    if outcome == _NO_MEMORY:
        size = f"{item.num_features:,} features"
        return f"out of memory while encoding the {item.kind} ({size}); use a smaller one"
    return f"the {item.kind} could not be encoded; the server's log shows the error"


class _NotRead(RuntimeError):
    """The data of an item cannot be read. All ranks raise it together."""


def arrays_of(data: MediaData) -> dict[str, Tensor]:
    """The arrays by name, on the host. Those in a file share its memory; it may be deleted meanwhile.

    Raises `RuntimeError` if the file cannot be read.
    """
    memory: mmap.mmap | bytearray = bytearray(data.content)
    if data.path:
        try:
            with Path(data.path).open("rb") as file:
                memory = mmap.mmap(file.fileno(), data.num_bytes, access=mmap.ACCESS_COPY)  # torch wants it writable
        except (OSError, ValueError) as error:
            raise RuntimeError(f"the arrays of an image or video cannot be read: {error}") from error
    found = {}
    for array in data.arrays:
        dtype = getattr(torch, array.dtype)
        count = torch.Size(array.shape).numel()
        if count:
            found[array.name] = torch.frombuffer(memory, dtype=dtype, count=count, offset=array.start).view(array.shape)
        else:
            found[array.name] = torch.empty(array.shape, dtype=dtype)
    return found
