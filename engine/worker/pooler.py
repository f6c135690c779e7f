"""Pools the hidden states of each prompt, which may arrive in chunks, into one vector."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.engine.config.pooling import Dense, Mode, Norm, Pooling
from quire.engine.worker.input_batch import InputBatch, StepRows

Weights = tuple[Tensor, Tensor | None]
"""Weight and bias of a dense module, whose weight is `[out, in]`, or of a norm."""


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


class Pooler:
    """The modules after the model, in float32. `weights` are those of dense modules and norms."""

    def __init__(self, pooling: Pooling, weights: list[Weights]) -> None:
        self._modes = pooling.modes
        self.needs_all_tokens = pooling.needs_all_tokens
        modules = (
            pooling.modules[:-1] if pooling.is_normalized else pooling.modules
        )  # the server does the normalization
        given = iter(weights)
        self._modules = [(module, None if module == "normalize" else next(given)) for module in modules]
        self._states: dict[int, _PoolState] = {}
        """By slot, for the prompts that have started."""

    def pool_last(self, x: Tensor) -> Tensor:
        """`[rows, size]`, the vectors of prompts whose last tokens have the hidden states `x` `[rows, hidden_size]`."""
        return self._finish(x.float())

    def pool(self, x: Tensor, rows: StepRows, input_batch: InputBatch) -> Tensor | None:
        """`[rows, size]`, the vectors of the rows that complete their prompt; None if there are none.

        `x` `[tokens, hidden_size]` covers all rows. Call this before `input_batch.advance`.
        """
        ends, pooled = set(rows.sampling.tolist()), []
        parts = torch.split(x.float(), rows.counts.tolist())
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
        return self._finish(torch.stack(pooled)) if pooled else None

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
