"""Tensor parallelism on GPUs: NCCL, and symmetric memory for small all-reduces where it is correct and faster."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from quire.engine.distributed import symmetric_memory, watchdog
from quire.engine.distributed.communicator import GroupParallel
from quire.engine.distributed.symmetric_memory import MAX_BYTES, UNIT, AllReduceAlgorithm

logger = logging.getLogger(__name__)

T = TypeVar("T")

SIZES = tuple(1 << power for power in range(12, MAX_BYTES.bit_length()))
"""Sizes in bytes of the all-reduces that are measured; a size in between uses the algorithm of the next larger one."""
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_CHECKED = (UNIT, 48 * UNIT, 1 << 16, (1 << 20) - UNIT, MAX_BYTES)
_CHECK_SECONDS = 60.0
_MAX_TIME_RATIO = 0.95
"""An algorithm is used if it takes at most this fraction of NCCL's time."""


class CudaParallel(GroupParallel):
    """The ranks of an NCCL group. Invariant: all have the same `table`, so that all use the same algorithm."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, is_custom: bool = True) -> None:
        """`is_custom`: whether symmetric memory may be used, once `finalize` has verified it."""
        super().__init__(group)
        self._device, self._is_custom = device, is_custom
        self.table: dict[torch.dtype, list[AllReduceAlgorithm | None]] = {}
        """For each type, the algorithm for all-reduces of up to `SIZES[number]` bytes; None: NCCL."""

    def all_reduce(self, x: Tensor) -> Tensor:
        algorithm = self.algorithm(x.dtype, x.nbytes)
        if algorithm is None:
            return super().all_reduce(x)
        flat = x.reshape(-1)
        if flat.storage_offset() * flat.element_size() % UNIT:
            flat = flat.clone()
        return algorithm.run(flat).view(x.shape)

    def all_gather(self, x: Tensor) -> Tensor:
        parts = x.new_empty(self.size, *x.shape)
        try:
            dist.all_gather_into_tensor(parts.view(-1), x.reshape(-1), group=self._group)
        except RuntimeError as error:
            raise watchdog.collective_error("all_gather", x, self._group, error) from error
        return parts.movedim(0, -2).flatten(-2)

    def algorithm(self, dtype: torch.dtype, length: int) -> AllReduceAlgorithm | None:
        """The algorithm for an all-reduce of `length` bytes; None: NCCL."""
        algorithms = self.table.get(dtype)
        if algorithms is None or not 0 < length <= MAX_BYTES or length % UNIT:
            return None
        return algorithms[max(0, (length - 1).bit_length() - SIZES[0].bit_length() + 1)]

    def finalize(self) -> None:
        """Use symmetric memory for the types and sizes for which it is correct on all ranks, and faster."""
        if not self._is_custom:
            return
        algorithms, reason = self._algorithms()
        if not reason:
            right = self._correct_algorithms(algorithms)
            self.table = self._tables(right)
            reason = (
                ""
                if any(right.values())
                else f"none of {', '.join(algorithm.name for algorithm in algorithms)} gives NCCL's results"
            )
        if self.rank == 0 and reason:
            logger.warning("all-reduces of a stage: only NCCL, since %s", reason)
        elif self.rank == 0:
            for dtype, chosen in self.table.items():
                logger.info(
                    "all-reduces of a stage in %s: %s", str(dtype).removeprefix("torch."), describe_algorithms(chosen)
                )

    def _algorithms(self) -> tuple[list[AllReduceAlgorithm], str]:
        """The algorithms that all ranks support, or the reason why there are none."""
        algorithms: list[AllReduceAlgorithm] = []
        reason = symmetric_memory.unavailable_reason(
            self._all_gather_object(symmetric_memory.local_buffer(self._device))
        )
        if reason:
            return algorithms, reason
        try:
            memory = symmetric_memory.allocate(self._device)
        except Exception as error:  # drivers raise many types
            reason = _first_line(error)
        if reason := self._first_reason(reason):
            return algorithms, reason
        try:
            algorithms = symmetric_memory.share(memory, self._group)
        except Exception as error:
            reason = _first_line(error)
        names = self._all_gather_object([algorithm.name for algorithm in algorithms])
        return [
            algorithm for algorithm in algorithms if all(algorithm.name in others for others in names)
        ], self._first_reason(reason)

    def _tables(
        self, right: dict[torch.dtype, list[AllReduceAlgorithm]]
    ) -> dict[torch.dtype, list[AllReduceAlgorithm | None]]:
        """Build `table`. Types with the same correct algorithms share one measurement."""
        tables: dict[torch.dtype, list[AllReduceAlgorithm | None]] = {}
        for dtype, algorithms in right.items():
            like = next((other for other in tables if right[other] == algorithms), None)
            if algorithms:
                tables[dtype] = self._fastest(algorithms, dtype) if like is None else tables[like]
        return tables

    def _correct_algorithms(self, algorithms: list[AllReduceAlgorithm]) -> dict[torch.dtype, list[AllReduceAlgorithm]]:
        """For each type, the algorithms whose results match NCCL's, with the same bits on every rank."""
        right: dict[torch.dtype, list[AllReduceAlgorithm]] = {}
        for dtype in _DTYPES:
            right[dtype] = []
            for algorithm in algorithms:
                gathered = self._all_gather_object(self._check(algorithm, dtype))
                reasons = [f"rank {rank}: {reason}" for rank, (reason, _) in enumerate(gathered) if reason]
                if not reasons and len({bits for _, bits in gathered}) > 1:
                    reasons = ["the ranks' results differ"]
                if not reasons:
                    right[dtype].append(algorithm)
                elif self.rank == 0:
                    name = str(dtype).removeprefix("torch.")
                    logger.info("%s all-reduces of %s are not used: %s", algorithm.name, name, reasons[0])
        return right

    def _check(self, algorithm: AllReduceAlgorithm, dtype: torch.dtype) -> tuple[str, int]:
        """The problem with the algorithm's results for this type ("" if there is none), and a digest of their bits."""
        wrong, digest = "", 0
        for x in self._samples(dtype):
            try:
                total = algorithm.run(x)
            except RuntimeError as error:  # all ranks reject an unsupported type or size alike
                return _first_line(error), 0
            symmetric_memory.wait(
                f"rank {self.rank}: a {algorithm.name} all-reduce of {x.nbytes} bytes", _CHECK_SECONDS
            )
            expected = super().all_reduce(x.clone())
            wrong = wrong or _difference(total, expected, self.size)
            digest = zlib.crc32(total.cpu().view(torch.uint8).numpy().tobytes(), digest)
        return wrong, digest

    def _samples(self, dtype: torch.dtype) -> Iterator[Tensor]:
        noise = torch.Generator().manual_seed(self.rank)
        for length in _CHECKED:
            yield torch.randn(length // dtype.itemsize, generator=noise).to(self._device, dtype)

    def _fastest(self, algorithms: list[AllReduceAlgorithm], dtype: torch.dtype) -> list[AllReduceAlgorithm | None]:
        """The fastest algorithm for each of `SIZES`, by the slowest rank."""
        chosen: list[AllReduceAlgorithm | None] = []
        for size in SIZES:
            x = torch.zeros(size // dtype.itemsize, dtype=dtype, device=self._device)
            runs = [super().all_reduce, *(algorithm.run for algorithm in algorithms)]
            own = [symmetric_memory.measure(partial(run, x)) for run in runs]
            nccl, *others = (max(times) for times in zip(*self._all_gather_object(own), strict=True))
            best = min(others)
            chosen.append(algorithms[others.index(best)] if best < _MAX_TIME_RATIO * nccl else None)
        return chosen

    def _first_reason(self, reason: str) -> str:
        """The first nonempty reason of any rank."""
        return next((f"rank {rank}: {each}" for rank, each in enumerate(self._all_gather_object(reason)) if each), "")

    def _all_gather_object(self, own: T) -> list[T]:
        gathered: list[T] = [own] * self.size
        dist.all_gather_object(gathered, own, self._group)
        return gathered


def describe_algorithms(chosen: Sequence[AllReduceAlgorithm | None]) -> str:
    """The sizes for which each algorithm is used, as text."""
    names = ["NCCL" if algorithm is None else algorithm.name for algorithm in chosen]
    steps = zip(pairwise([*names, "NCCL"]), SIZES, strict=True)
    ends = [(name, size) for (name, after), size in steps if name != after]
    return ", ".join([*(f"{name} up to {size >> 10} KiB" for name, size in ends), "NCCL for the rest"])


def _difference(total: Tensor, expected: Tensor, size: int) -> str:
    """The problem with a sum of `size` summands of about 1; "" if it is correct within the type's precision."""
    step = size * torch.finfo(total.dtype).eps
    try:
        torch.testing.assert_close(total, expected, rtol=step, atol=4 * step)
    except AssertionError as error:
        return " ".join(str(error).split())
    return ""


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]
