"""The features of images and videos, on the ranks of the first stage. The scheduler decides what is encoded and what is
dropped (`MediaPlan`)."""

from __future__ import annotations

import logging
import mmap
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from quire.engine.models.tower import Tower
from quire.engine.protocol.media import MediaData, MediaItem
from quire.engine.protocol.scheduler_output import MediaPlan
from quire.engine.worker.media_rows import FeatureRange
from quire.engine.worker.oom import is_out_of_memory, release_memory

logger = logging.getLogger(__name__)


class EncoderCache:
    """Encoded items by digest. `tower` is called with one item at a time, so that features do not depend on others."""

    def __init__(
        self, tower: Tower, width: int, dtype: torch.dtype, device: torch.device, *, is_single_rank: bool
    ) -> None:
        """Features have `width` numbers of `dtype`. `is_single_rank`: this rank encodes without others, which would
        wait for it if it failed alone."""
        self._tower, self._device, self._is_single_rank = tower, device, is_single_rank
        self._width, self._dtype = width, dtype
        self._features: dict[bytes, Tensor] = {}
        """`[features, feature_width]` each."""
        self._begun: dict[bytes, Iterator[Tensor | None]] = {}
        """Items that later plans complete; each iterator has the state between two layers."""

    def update(self, plan: MediaPlan) -> dict[bytes, str]:
        """Apply a plan. Returns `EncoderOutput.failures`.

        Most errors depend on the item alone, whose data is not what the tower takes. Then all ranks that share the
        tower fail at the same place, and none waits for another. Errors that may be of a rank alone are raised, unless
        it is a single one.
        """
        self.free(plan)
        failures = dict[bytes, str]()
        for item in plan.encoded:
            if item.digest in self._features:
                continue  # zeros: it could not be begun
            try:
                self._encode(item, plan.num_sublayers if item is plan.encoded[-1] else None)
            except (dist.DistError, torch.AcceleratorError):
                raise
            except Exception as error:
                is_memory = is_out_of_memory(error)
                if not self._is_single_rank and (is_memory or isinstance(error.__cause__, OSError)):
                    raise
                if is_memory:
                    size = f"{item.num_features:,} features"
                    failures[item.digest] = f"out of memory while encoding the {item.kind} ({size}); use a smaller one"
                else:
                    failures[item.digest] = f"the {item.kind} could not be encoded; the server's log shows the error"
                logger.error("%s:\n%s", failures[item.digest], "".join(traceback.format_exception(error)))
                traceback.clear_frames(error.__traceback__)  # they keep the tower's tensors alive
            if item.digest in failures:
                if is_memory:
                    release_memory(self._device)
                shape = item.num_features, self._width
                self._features[item.digest] = torch.zeros(shape, dtype=self._dtype, device=self._device)
        return failures

    def _encode(self, item: MediaItem, num_sublayers: int | None) -> None:
        """Run `num_sublayers` of the tower for an item, or all that remain. Raises `RuntimeError` if the data cannot be
        read, or if the tower returns another number of features than the item has."""
        layers = self._begun.pop(item.digest, None)
        if layers is None:
            assert item.data is not None
            arrays = {name: array.to(self._device) for name, array in arrays_of(item.data).items()}
            layers = self._tower.encode(arrays, item)
            del arrays
        if num_sublayers is not None:
            for _ in range(num_sublayers):
                paused = next(layers)
                assert paused is None, "the item has fewer sublayers left"
            self._begun[item.digest] = layers
            return
        *_, features = layers
        assert features is not None
        if len(features) != item.num_features:
            expected = f"{item.num_features} tokens of the prompt stand for it"
            raise RuntimeError(f"the tower returned {len(features)} features of an item, but {expected}")
        self._features[item.digest] = features

    def free(self, plan: MediaPlan) -> None:
        """Drop the features that `plan` frees. Digests may be unknown: of steps that were skipped."""
        for digest in plan.freed:
            self._features.pop(digest, None)
            self._begun.pop(digest, None)

    def read(self, ranges: Sequence[FeatureRange]) -> Tensor:
        """`[features, feature_width]`, one range after another."""
        return torch.cat([self._features[digest][begin:end] for digest, begin, end, _ in ranges])


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
