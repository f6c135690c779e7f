"""Pools the hidden states of each prompt, which may arrive in chunks, into one vector, or into one of each token."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.engine.checkpoints.loader import load_dense
from quire.engine.config.engine_config import ModelConfig
from quire.engine.config.pooling import Dense, Mode, Norm, Pooling
from quire.engine.layers.batch import Batch
from quire.engine.layers.weight import DenseWeights
from quire.engine.models.build import Model
from quire.engine.protocol.runner_output import ModelRunnerOutput
from quire.engine.worker.async_copies import Array, AsyncRead
from quire.engine.worker.input_batch import InputBatch, StepRows
from quire.kernels import AdapterRows


@dataclass
class _PoolState:
    """Running totals over the chunks of a prompt. Sums are float64, so that the result does not depend on the
    chunks."""

    count: int
    first: Tensor
    largest: Tensor
    sum: Tensor
    weighted: Tensor
    """The sum with the weights 1, 2, 3, …"""

    @staticmethod
    def of(x: Tensor, position: int) -> _PoolState:
        """The totals of `x` `[tokens, hidden_size]`, which starts at `position`."""
        wide = x.double()
        weights = torch.arange(position + 1, position + len(x) + 1, dtype=wide.dtype, device=x.device)
        return _PoolState(len(x), x[0].clone(), x.amax(dim=0), wide.sum(dim=0), weights @ wide)

    def extend(self, more: _PoolState) -> None:
        self.count += more.count
        self.largest = torch.maximum(self.largest, more.largest)
        self.sum += more.sum
        self.weighted += more.weighted


class PoolingRunner:
    """The last stage's part of a step of a pooling model: the vector of each prompt that the step completes, or the
    vectors of its tokens. The modules after the model compute in float32."""

    def __init__(self, config: ModelConfig, pooling: Pooling, model: Model, device: torch.device) -> None:
        self._model, self._pooling = model, pooling
        self._modules = [
            (module, None if isinstance(module, str) else load_dense(config, module, device))
            for module in pooling.modules[: -1 if pooling.is_normalized else None]  # the server normalizes
        ]
        self.changes: dict[str, dict[int, DenseWeights]] = {
            f"pooling.{each}": {} for each in range(len(pooling.weighted))
        }
        """The weights that modules have instead with the adapters in these slots; see `AdapterLoader.dense`."""
        self._states: dict[int, _PoolState] = {}
        """States of the prompts that have started, by slot."""
        self._vectors: dict[int, bytearray] = {}
        """The vectors of such prompts' tokens, on the host."""

    def pool(
        self, rows: StepRows, batch: Batch, hidden: Tensor, input_batch: InputBatch, result: ModelRunnerOutput | None
    ) -> list[AsyncRead]:
        """Pool the model's output on the first rank; every rank has the same output. Call this before
        `input_batch.advance`."""
        if result is None:
            return []
        if self._pooling.is_multi_vector:
            return [self._read_tokens(self._model.features(hidden).float(), rows, batch, input_batch, result)]
        if self._pooling.needs_all_tokens:
            pooled = self._pool_chunks(self._model.features(hidden).float(), rows, input_batch)
        elif len(rows.sampling):
            pooled = self._model.features(hidden[batch.logits_indices]).float()
        else:
            pooled = None
        if pooled is None:
            return []

        def fill(vectors: Array) -> None:
            result.vectors = {row: vectors[at].tobytes() for at, row in enumerate(rows.sampling.tolist())}

        adapters = None if batch.adapters is None else batch.adapters.sampling
        return [AsyncRead([self._finish(pooled, adapters)], fill)]

    def _read_tokens(
        self, x: Tensor, rows: StepRows, batch: Batch, input_batch: InputBatch, result: ModelRunnerOutput
    ) -> AsyncRead:
        """Read the vectors of all tokens, given `x` `[tokens, hidden_size]`; results are read in the order of steps."""
        ends, slots, counts = set(rows.sampling.tolist()), rows.slots.tolist(), rows.counts.tolist()
        begins = [not input_batch.num_computed_tokens[slot] for slot in slots]

        def fill(vectors: Array) -> None:
            at = 0
            for row, (slot, count) in enumerate(zip(slots, counts, strict=True)):
                if begins[row]:
                    self._vectors[slot] = bytearray()
                self._vectors[slot] += vectors[at : at + count].tobytes()
                at += count
                if row in ends:
                    result.vectors[row] = bytes(self._vectors.pop(slot))

        return AsyncRead([self._finish(x, batch.adapters_of())], fill)

    def _pool_chunks(self, x: Tensor, rows: StepRows, input_batch: InputBatch) -> Tensor | None:
        """`[rows, size]`, the totals of the rows that complete their prompt, given `x` `[tokens, hidden_size]` of all
        rows; None if there are none."""
        ends, pooled = set(rows.sampling.tolist()), []
        parts = torch.split(x, rows.counts.tolist())
        for row, (slot, part) in enumerate(zip(rows.slots.tolist(), parts, strict=True)):
            position = int(input_batch.num_computed_tokens[slot])
            seen = self._states.pop(slot, None)
            seen = seen if position else None  # a prompt begins again after a preemption
            kept = self._kept(part, slot, position, input_batch)
            if len(kept) and seen is None:
                seen = _PoolState.of(kept, position)
            elif len(kept) and seen is not None:
                seen.extend(_PoolState.of(kept, position))
            if row in ends:
                assert seen is not None, "a prompt without tokens to pool"
                pooled.append(torch.cat([_vector(mode, seen, part[-1]) for mode in self._pooling.modes]))
            elif seen is not None:
                self._states[slot] = seen
        return torch.stack(pooled) if pooled else None

    def _kept(self, part: Tensor, slot: int, position: int, input_batch: InputBatch) -> Tensor:
        """The rows of a chunk that are pooled; see `Pooling.pools_items`."""
        if not self._pooling.pools_items or input_batch.media is None:
            return part
        near = input_batch.media.around_items(slot, position, len(part))
        return part if near is None else part[torch.from_numpy(near).to(part.device)]

    def _finish(self, x: Tensor, adapters: AdapterRows | None) -> Tensor:
        changes = iter(self.changes.values())
        for module, weights in self._modules:
            if weights is None or isinstance(module, str):
                x = F.normalize(x, dim=-1)
                continue
            given, x = x, _apply(module, x, *weights)
            for slot, own in next(changes).items():
                if adapters is not None and adapters.count(slot):
                    rows = adapters.of_slot(slot)
                    x[rows] = _apply(module, given[rows], own.weight, own.bias)
        return x


def _apply(module: Dense | Norm, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if isinstance(module, Norm):
        return F.layer_norm(x, (module.size,), weight, bias, module.eps)
    return _activate(module, F.linear(x, weight, bias))


def _vector(mode: Mode, seen: _PoolState, last: Tensor) -> Tensor:
    match mode:
        case "cls":
            return seen.first
        case "max":
            return seen.largest
        case "mean":
            return (seen.sum / seen.count).float()
        case "mean_sqrt_len":
            return (seen.sum / math.sqrt(seen.count)).float()
        case "weightedmean":
            return (seen.weighted / (seen.count * (seen.count + 1) / 2)).float()
        case "lasttoken":
            return last


def _activate(module: Dense, x: Tensor) -> Tensor:
    match module.activation:
        case "Identity":
            return x
        case "Tanh":
            return x.tanh()
        case "ReLU":
            return x.relu()
        case "GELU":
            return F.gelu(x)
        case "Sigmoid":
            return x.sigmoid()
