"""Capture decode steps once and replay them: the device receives a whole step at once, instead of operation by
operation.

A captured step reads its inputs from fixed addresses and has a fixed number of rows, so a batch is copied there and
padded. Padding rows have slot -1, for which nothing is stored, and attend to one key. Whatever the model allocates once
and changes between steps must be changed in place.
"""

from __future__ import annotations

import gc
import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from quire.engine.config.engine_config import EngineConfig
from quire.engine.config.memory_plan import format_bytes
from quire.engine.distributed.communicator import Parallel
from quire.engine.distributed.host_gather import all_gather_object
from quire.engine.layers.batch import Batch, KVBlocks
from quire.engine.layers.kv_cache import LayerCache
from quire.engine.models.decoder import Decoder
from quire.engine.worker import graph_recorders
from quire.engine.worker.graph_recorders import GraphRecorder, NotReplayable, Replay
from quire.kernels import HostMetadata, StateSegments

logger = logging.getLogger(__name__)


class DecodeGraphs:
    """Captured steps in which each request has one token, for the batch sizes in `EngineConfig.graphs`."""

    def __init__(
        self,
        model: Decoder,
        caches: Sequence[LayerCache],
        config: EngineConfig,
        device: torch.device,
        stage: int,
        parallel: Parallel,
    ) -> None:
        self._model, self._caches, self._device, self._parallel = model, caches, device, config.parallel
        self._sizes, self._disabled_reason = config.graphs.sizes, config.graphs.disabled_reason
        self._replays: dict[int, Replay] = {}
        self._is_last = stage == len(config.parallel.stages) - 1
        self._recorder = graph_recorders.make_recorder(device, parallel)
        self._inputs: _Inputs | None = None
        if self._sizes and self._recorder is not None:
            self._inputs = _Inputs(config, device, receives=stage > 0)
            arch, dtype = config.model.architecture, getattr(torch, config.model.dtype)
            width = arch.output_width if self._is_last else arch.stage_width
            self._output = torch.zeros(self._sizes[-1], width, dtype=dtype, device=device)

    @torch.inference_mode()
    def capture(self, *, bar: bool) -> bool:
        """Capture all sizes on all ranks of the grid, or none on any rank; in that case the log says why.

        Captures nothing yet if capturing costs no more than running a step.

        After each size the ranks agree whether to continue, so that no rank waits in a step for one that has given up.
        An error in a step's own collectives is raised: the other ranks wait there, and only the exit of this rank ends
        that.
        """
        recorder = self._recorder
        if recorder is not None and self._disabled_reason:
            logger.info("decode steps run without %s: %s", recorder.name, self._disabled_reason)
        if recorder is None or self._inputs is None or recorder.runs_on_capture:
            return False
        started, free = time.perf_counter(), _free_bytes(self._device)
        # The largest comes first: the smaller ones reuse its memory.
        sizes = tqdm(self._sizes[::-1], desc="CUDA graphs", unit="size", disable=not bar or None)
        with _without_garbage_collection(), sizes:
            for size in sizes:
                reported = all_gather_object(f"CUDA graph {size}", self._try_capture(size, recorder, self._inputs))
                failed = [rank for rank, reason in enumerate(reported) if reason]
                if failed:
                    break
        if failed:
            self.close()
            if len(reported) == 1 or dist.get_rank() == 0:
                where = f" on rank {failed[0]}" * (len(reported) > 1)
                reason = reported[failed[0]]
                logger.warning("decode steps run without CUDA graphs: capturing a step failed%s: %s", where, reason)
            return False
        logger.info(
            "captured %d CUDA graphs for decode steps of up to %d requests in %.1f s, using %s",
            len(self._sizes),
            self._sizes[-1],
            time.perf_counter() - started,
            format_bytes(max(0, free - _free_bytes(self._device))),
        )
        return True

    def _try_capture(self, size: int, recorder: GraphRecorder, inputs: _Inputs) -> str:
        """Capture the steps of `size` requests; returns why that failed, or ""."""
        step = self._step(size, inputs)
        try:
            reason = recorder.warm_up(step)
        except RuntimeError as error:
            if self._parallel.tensor_parallel_size > 1:
                raise
            return _first_line(error)
        if not reason:
            try:
                self._replays[size] = recorder.capture(step)
            except RuntimeError as error:
                return _first_line(error)
        return reason

    def _step(self, size: int, inputs: _Inputs) -> Callable[[], None]:
        batch, received = inputs.batch(size), inputs.received(size)

        def step() -> None:
            self._output[:size].copy_(self._model(received, batch, self._caches))

        return step

    def close(self) -> None:
        """Drop the captured steps, which keep the communicators that they use alive."""
        self._replays, self._inputs = {}, None

    def run(self, received: Tensor | None, batch: Batch) -> Tensor | None:
        """Replay the batch: the model's output `[tokens, hidden_size]`, or None if no captured step matches.

        On the last stage the next run overwrites the output.
        """
        rows = len(batch.token_ids)
        if (
            self._recorder is None
            or self._inputs is None
            or not 0 < rows == len(batch.sequence_lengths) <= self._sizes[-1]
        ):
            return None
        if batch.replica_tokens or batch.media_tokens is not None or batch.key_ends is not None:
            return None
        if batch.rope_positions is not None and batch.rope_positions.ndim > 1:
            return None  # of a prompt's last token
        size = self._sizes[bisect_left(self._sizes, rows)]
        self._inputs.fill(received, batch, size)
        if (replay := self._replays.get(size)) is not None:
            replay()
        else:
            self._capture_first_run(size, self._recorder, self._inputs)
        hidden = self._output[:rows]
        return hidden if self._is_last else hidden.clone()  # it may still be in transit while the next step runs

    def _capture_first_run(self, size: int, recorder: GraphRecorder, inputs: _Inputs) -> None:
        """Run the first step of this size and record it; if it cannot be replayed, record no other size."""
        try:
            self._replays[size] = recorder.capture(self._step(size, inputs))
        except NotReplayable as error:
            self.close()
            logger.info("decode steps run without %s: a step cannot be replayed: %s", recorder.name, error)


class _Inputs:
    """The input tensors of captured steps. Invariant: the content of every row is valid input."""

    def __init__(self, config: EngineConfig, device: torch.device, *, receives: bool) -> None:
        most, cache, longest = config.graphs.sizes[-1], config.cache, config.model.max_model_len
        self._longest = longest

        def full(value: int, *shape: int) -> Tensor:
            return torch.full(shape, value, dtype=torch.int64, device=device)

        self._token_ids, self._positions, self._lengths = full(0, most), full(0, most), full(1, most)
        self._token_mask = full(1, most)
        self._rope_positions = full(0, most) if config.model.architecture.has_rope_sections else None
        self._groups: dict[int, KVBlocks | tuple[Tensor, Tensor]] = {
            number: (full(-1, most), full(-1, most))
            if group.is_state
            else KVBlocks(full(-1, most), full(0, most, -(-longest // cache.block_size)))
            for number, group in enumerate(cache.groups)
        }
        """The blocks of each KV cache group, or the pages of states that are read and written."""
        self._starts = torch.arange(most + 1, device=device)
        self._no_slot, self._zero, self._one = full(-1, most), full(0, most), full(1, most)
        self._hidden: Tensor | None = None
        if receives:
            dtype = getattr(torch, config.model.dtype)
            self._hidden = torch.zeros(most, config.model.architecture.stage_width, dtype=dtype, device=device)

    def received(self, size: int) -> Tensor | None:
        return None if self._hidden is None else self._hidden[:size]

    def batch(self, size: int) -> Batch:
        """The first `size` rows; `host` holds values that are valid for every replay."""
        starts = self._starts[: size + 1]
        return Batch(
            token_ids=self._token_ids[:size],
            positions=self._positions[:size],
            sequence_lengths=self._lengths[:size],
            query_starts=starts,
            logits_indices=self._starts[:size],
            groups={
                number: KVBlocks(*(each[:size] for each in own))
                if isinstance(own, KVBlocks)
                else StateSegments(starts, starts, *(each[:size] for each in own))  # one segment for each row
                for number, own in self._groups.items()
            },
            host=HostMetadata(np.ones(size, np.int64), np.full(size, self._longest, np.int64)),
            token_mask=self._token_mask[:size],
            rope_positions=None if self._rope_positions is None else self._rope_positions[:size],
        )

    def fill(self, received: Tensor | None, batch: Batch, size: int) -> None:
        """Copy a batch in. The rows after it become padding, whose token and blocks may be any earlier values."""
        rows = len(batch.token_ids)
        parts = [
            (self._positions, batch.positions, self._zero),
            (self._lengths, batch.sequence_lengths, self._one),
            (self._token_mask, self._one[:rows], self._zero),
        ]
        if self._rope_positions is not None:
            along_axes = batch.positions if batch.rope_positions is None else batch.rope_positions
            parts.append((self._rope_positions, along_axes, self._zero))
        for number, group in batch.groups.items():
            own = self._groups[number]
            if isinstance(group, KVBlocks):
                parts.append((own[0], group.slot_mapping, self._no_slot))
                own[1][:rows, : group.block_tables.shape[1]].copy_(group.block_tables)
            else:
                parts += [(own[0], group.read, self._no_slot), (own[1], group.write, self._no_slot)]
        to, values = [self._token_ids[:rows]], [batch.token_ids]
        for place, part, padding in parts:
            to.append(place[:rows])
            values.append(part)
            if rows < size:
                to.append(place[rows:size])
                values.append(padding[: size - rows])
        torch._foreach_copy_(to, values)  # one kernel
        if self._hidden is not None:
            assert received is not None
            self._hidden[:rows].copy_(received)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _free_bytes(device: torch.device) -> int:
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else 0


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Disable garbage collection: no CUDA object may be destroyed during a capture."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
