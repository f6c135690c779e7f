"""Pools the hidden states of each prompt, which may arrive in chunks, into one vector."""

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
from quire.engine.models.build import Model
from quire.engine.protocol.runner_output import ModelRunnerOutput
from quire.engine.worker.async_copies import Array, AsyncRead
from quire.engine.worker.input_batch import InputBatch, StepRows


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
    """The last stage's part of a step of a pooling model: one vector for each prompt that the step completes. The
    modules after the model compute in float32."""

    def __init__(self, config: ModelConfig, pooling: Pooling, model: Model, device: torch.device) -> None:
        self._model, self._modes, self._needs_all_tokens = model, pooling.modes, pooling.needs_all_tokens
        self._modules = [
            (module, None if isinstance(module, str) else load_dense(config, module, device))
            for module in pooling.modules[: -1 if pooling.is_normalized else None]  # the server normalizes
        ]
        self._states: dict[int, _PoolState] = {}
        """States of the prompts that have started, by slot."""

    def pool(
        self, rows: StepRows, batch: Batch, hidden: Tensor, input_batch: InputBatch, result: ModelRunnerOutput | None
    ) -> list[AsyncRead]:
        """Pool the model's output on the first rank; every rank has the same output. Call this before
        `input_batch.advance`."""
        if result is None:
            return []
        if self._needs_all_tokens:
            pooled = self._pool_chunks(self._model.features(hidden).float(), rows, input_batch)
        elif len(rows.sampling):
            pooled = self._model.features(hidden[batch.logits_indices]).float()
        else:
            pooled = None
        if pooled is None:
            return []

        def fill(vectors: Array) -> None:
            result.vectors = {row: vectors[at].tobytes() for at, row in enumerate(rows.sampling.tolist())}

        return [AsyncRead([self._finish(pooled)], fill)]

    def _pool_chunks(self, x: Tensor, rows: StepRows, input_batch: InputBatch) -> Tensor | None:
        """`[rows, size]`, the totals of the rows that complete their prompt, given `x` `[tokens, hidden_size]` of all
        rows; None if there are none."""
        ends, pooled = set(rows.sampling.tolist()), []
        parts = torch.split(x, rows.counts.tolist())
        for row, (slot, part) in enumerate(zip(rows.slots.tolist(), parts, strict=True)):
            position = int(input_batch.num_computed_tokens[slot])
            seen = _PoolState.of(part, position)
            if position:
                before = self._states.pop(slot)
                before.extend(seen)
                seen = before
            if row in ends:
                pooled.append(torch.cat([_vector(mode, seen, part[-1]) for mode in self._modes]))
            else:
                self._states[slot] = seen
        return torch.stack(pooled) if pooled else None

    def _finish(self, x: Tensor) -> Tensor:
        for module, weights in self._modules:
            if weights is None or isinstance(module, str):
                x = F.normalize(x, dim=-1)
            elif isinstance(module, Norm):
                x = F.layer_norm(x, (module.size,), *weights, module.eps)
            else:
                x = _activate(module, F.linear(x, *weights))
        return x


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
