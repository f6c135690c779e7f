"""Capture decode steps once and replay them: the device receives a whole step at once, instead of operation by
operation.

A captured step reads its inputs from fixed addresses and has a fixed number of rows, so a batch is copied there and
padded. Padding rows have slot -1, for which nothing is stored, and attend to one key. Whatever the model allocates once
and changes between steps must be changed in place.

Steps in which rows have adapters are captured beside those in which none has, while requests run: once they have
occurred so often that capturing them pays, and again after layers have got other tensors for adapters.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from quire.engine.config.engine_config import EngineConfig
from quire.engine.config.memory_plan import format_bytes
from quire.engine.distributed.communicator import Parallel
from quire.engine.layers.batch import Batch, BatchAdapters, KVBlocks, RecentTokens
from quire.engine.layers.kv_cache import LayerCache
from quire.engine.models.decoder import Decoder
from quire.engine.worker import graph_recorders
from quire.engine.worker.graph_recorders import GraphRecorder, NotReplayable, Replay
from quire.kernels import AdapterRows, HostMetadata, StateSegments

logger = logging.getLogger(__name__)

_RUNS_BEFORE_CAPTURE = 16
"""Steps of a size with adapters that run before one is captured on a GPU. Capturing takes about as long as is lost in
so many steps without graphs (40 to 80 ms, and 3 to 5 ms each): so layers that get other tensors again and again at most
double this loss."""


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
        self._model, self._caches, self._device, self._parallel = model, caches, device, parallel
        self._sizes, self._disabled_reason = config.graphs.sizes, config.graphs.disabled_reason
        self._replays: dict[_Key, Replay | None] = {}
        """None: such a step cannot be captured."""
        self._eager_runs = Counter[_Key]()
        """Steps that might be captured, since layers have had these tensors for adapters. The same on all ranks that
        share steps, as are the keys of `_replays` on a GPU."""
        self.has_captured = False
        """Whether a step was captured, and its run so took longer than others, since this was set to False."""
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
        """
        recorder = self._recorder
        if recorder is not None and self._disabled_reason:
            logger.info("decode steps run without %s: %s", recorder.name, self._disabled_reason)
        if recorder is None or self._inputs is None or recorder.runs_on_capture:
            return False
        started, free = time.perf_counter(), graph_recorders.free_bytes(self._device)
        # The largest comes first: the smaller ones reuse its memory.
        capture = partial(self._try_capture, recorder, self._inputs, has_adapters=False)
        with tqdm(self._sizes[::-1], desc="CUDA graphs", unit="size", disable=not bar or None) as sizes:
            failure = graph_recorders.capture_together("CUDA graph", sizes, capture)
        if failure:
            self.close()
            if not dist.is_initialized() or dist.get_rank() == 0:
                logger.warning("decode steps run without CUDA graphs: %s", failure)
            return False
        logger.info(
            "captured %d CUDA graphs for decode steps of up to %d requests in %.1f s, using %s",
            len(self._sizes),
            self._sizes[-1],
            time.perf_counter() - started,
            format_bytes(max(0, free - graph_recorders.free_bytes(self._device))),
        )
        return True

    def _try_capture(self, recorder: GraphRecorder, inputs: _Inputs, size: int, *, has_adapters: bool) -> str:
        """Capture the steps of `size` requests; returns why that failed, or ""."""
        key, is_shared = _Key(size, has_adapters), self._parallel.size > 1
        replay = graph_recorders.try_capture(recorder, self._step(key, inputs), is_shared=is_shared)
        if isinstance(replay, str):
            return replay
        self._replays[key] = replay
        return ""

    def _step(self, key: _Key, inputs: _Inputs) -> Callable[[], None]:
        size, received = key.size, inputs.received(key.size)
        batch = inputs.batch(size, has_adapters=key.has_adapters)

        def step() -> None:
            self._output[:size].copy_(self._model(received, batch, self._caches))

        return step

    def close(self) -> None:
        """Drop the captured steps, which keep the communicators that they use alive."""
        self._replays, self._inputs = {}, None

    def on_assigned(self, *, is_changed: bool) -> None:
        """Drop the steps captured with adapters, after a plan has assigned some, if layers of any rank of this stage
        have other tensors or other largest ranks (`is_changed`).

        Ranks differ: each has its own experts, and only the first one adds some biases. They agree, as all of them are
        to replay a step, with the same padding, or none.
        """
        is_used = self._eager_runs or any(key.has_adapters for key in self._replays)
        if self._recorder is None or not is_used:
            return
        if self._is_any_rank(is_changed) if not self._recorder.runs_on_capture else is_changed:
            self._eager_runs.clear()
            # What cannot be captured is not tried again.
            self._replays = {key: own for key, own in self._replays.items() if own is None or not key.has_adapters}

    def _is_any_rank(self, is_own: bool) -> bool:
        """Whether it is so on any rank of this stage. Waits for the device."""
        if self._parallel.size == 1:
            return is_own
        return bool(self._parallel.all_reduce(torch.tensor([float(is_own)], device=self._device)).item())

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
        key = _Key(self._sizes[bisect_left(self._sizes, rows)], batch.adapters is not None)
        if key not in self._replays and not self._recorder.runs_on_capture:
            self._capture_when_needed(key, self._recorder, self._inputs)
            if key not in self._replays:
                return None
        first = partial(self._capture_first_run, key, self._recorder, self._inputs)
        if (replay := self._replays.get(key, first)) is None:
            return None
        self._inputs.fill(received, batch, key.size)
        replay()
        hidden = self._output[:rows]
        return hidden if self._is_last else hidden.clone()  # it may still be in transit while the next step runs

    def _capture_when_needed(self, key: _Key, recorder: GraphRecorder, inputs: _Inputs) -> None:
        """Capture steps that were not captured in advance, if this is the time: at most one size in a step, and the
        largest one first, whose memory the smaller ones reuse. All ranks of the stage do so in the same step."""
        self._eager_runs[key] += 1
        if self._eager_runs[key] < _RUNS_BEFORE_CAPTURE:
            return
        largest = key._replace(size=self._sizes[-1])
        key = key if largest in self._replays else largest
        self.has_captured = True
        inputs.clear(key.size)  # as the step runs
        with graph_recorders.without_garbage_collection():
            reason = self._try_capture(recorder, inputs, **key._asdict())
        if self._is_any_rank(bool(reason)):
            self._replays[key] = None
            reason = reason or "another rank could not"
            logger.warning("%s run without %s: capturing a step failed: %s", key, recorder.name, reason)

    def _capture_first_run(self, key: _Key, recorder: GraphRecorder, inputs: _Inputs) -> None:
        """Run the first such step and record it; if it cannot be replayed, record none of another size."""
        self.has_captured = True
        try:
            self._replays[key] = recorder.capture(self._step(key, inputs))
        except NotReplayable as error:
            if key.has_adapters:
                self._replays |= {_Key(size, True): None for size in self._sizes}
            else:
                self.close()
            logger.info("%s run without %s: a step cannot be replayed: %s", key, recorder.name, error)


class _Key(NamedTuple):
    """What differs between captured steps."""

    size: int
    """Rows."""
    has_adapters: bool
    """Whether rows may have adapters."""

    def __str__(self) -> str:
        return "decode steps with adapters" if self.has_adapters else "decode steps"


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
        self._recent = None if cache.recent is None else full(-1, most)
        self._starts = torch.arange(most + 1, device=device)
        self._order = self._slot_starts = full(0, 0)
        """As in `AdapterRows`."""
        if config.lora is not None:
            self._order, self._slot_starts = self._starts[:-1].clone(), full(0, config.lora.num_slots + 2)
        self._no_slot, self._zero, self._one = full(-1, most), full(0, most), full(1, most)
        self._hidden: Tensor | None = None
        if receives:
            dtype = getattr(torch, config.model.dtype)
            self._hidden = torch.zeros(most, config.model.architecture.stage_width, dtype=dtype, device=device)

    def received(self, size: int) -> Tensor | None:
        return None if self._hidden is None else self._hidden[:size]

    def batch(self, size: int, *, has_adapters: bool = False) -> Batch:
        """The first `size` rows; `host` holds values that are valid for every replay."""
        adapters = AdapterRows(self._order[:size], self._slot_starts)
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
            adapters=BatchAdapters(adapters, adapters, adapters) if has_adapters else None,
            recent=None if self._recent is None else RecentTokens(self._recent[:size]),
        )

    def clear(self, size: int) -> None:
        """Make the first `size` rows padding."""
        self._token_mask[:size].zero_()
        if self._recent is not None:
            self._recent[:size].fill_(-1)
        for own in self._groups.values():
            for each in own[:1] if isinstance(own, KVBlocks) else own:
                each[:size].fill_(-1)
        if len(self._order):
            self._order[:size].copy_(self._starts[:size])
            self._slot_starts.zero_()
            self._slot_starts[-1:].copy_(self._starts[size : size + 1])

    def fill(self, received: Tensor | None, batch: Batch, size: int) -> None:
        """Copy a batch in. The rows after it become padding, whose token and blocks may be any earlier values."""
        rows = len(batch.token_ids)
        to, values = [self._token_ids[:rows]], [batch.token_ids]
        parts = [
            (self._positions, batch.positions, self._zero),
            (self._lengths, batch.sequence_lengths, self._one),
            (self._token_mask, self._one[:rows], self._zero),
        ]
        if self._rope_positions is not None:
            along_axes = batch.positions if batch.rope_positions is None else batch.rope_positions
            parts.append((self._rope_positions, along_axes, self._zero))
        if batch.adapters is not None:  # padding rows are after those of none
            order, starts, *_ = batch.adapters.tokens
            parts.append((self._order, order, self._starts[rows:]))
            to += [self._slot_starts[:-1], self._slot_starts[-1:]]
            values += [starts[:-1], self._starts[size : size + 1]]
        if self._recent is not None:
            assert batch.recent is not None
            assert batch.recent.moves is None
            parts.append((self._recent, batch.recent.slots, self._no_slot))
        for number, group in batch.groups.items():
            own = self._groups[number]
            if isinstance(group, KVBlocks):
                parts.append((own[0], group.slot_mapping, self._no_slot))
                own[1][:rows, : group.block_tables.shape[1]].copy_(group.block_tables)
            else:
                parts += [(own[0], group.read, self._no_slot), (own[1], group.write, self._no_slot)]
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
