"""The step-time model: predicts how long a step takes, and how many prompt tokens fit into a given time.

The time is modelled as linear in the step's load. The coefficients are the non-negative least-squares fit of the
measured steps, with exponential decay. Steps with and without prompt tokens decay separately, so that an hour of
decodes does not erase the cost of a prompt token. Errors are relative to the step's duration, so that long steps do not
dominate short ones. Outliers (a page fault, another process) are clipped.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from quire.engine.architecture.media_spec import NO_WORK, TowerWork

_DECAY = 0.98
"""Factor by which a step's weight decays with each later step of its kind: about the last 50 count."""
_WARM_UP = 2
"""Number of initial steps to ignore: they compile, allocate and read weights for the first time."""
_OUTLIER_FACTOR = 3.0
"""A step's time is clipped to this multiple of its prediction, unless more than `_MAX_OUTLIERS` in a row exceed it."""
_MAX_OUTLIERS = 4
_OUTLIERS_AFTER = 16
_DECODE_STRIDE = 16
"""Of consecutive decode-only steps, only one in this many is learned from: they are alike, and learning takes time."""
_SWEEPS = 8
_SCALE = (1.0, 1 / 256, 1 / 32, 1 / 2**14, 1 / 2**18, 1 / 2**30, 1 / 2**30)
"""Scale of each feature, which brings them to the same order of magnitude."""


class StepLoad(NamedTuple):
    """The amount of work in a step."""

    prompt_tokens: int
    """Tokens of all rows except decodes."""
    decodes: int
    decode_context: int
    """KV tokens that the decodes read."""
    prompt_context: float
    """KV tokens that the prompt tokens read: the sum of their positions."""
    tower_linear: float = 0.0
    """Of `TowerWork`."""
    tower_attention: float = 0.0

    @property
    def tower_work(self) -> TowerWork:
        return TowerWork(self.tower_linear, self.tower_attention)

    @property
    def is_decodes_only(self) -> bool:
        return not (self.prompt_tokens or any(self.tower_work))


class StepTimeModel:
    """Predicts the seconds of a step: a fixed cost plus a cost per unit of each `StepLoad` field."""

    def __init__(self) -> None:
        self._coefficients = [0.0] * len(_SCALE)
        self._sums = {kind: _Sums() for kind in (False, True)}
        """Sums of the steps with only decodes (False) and of the others (True)."""
        self.max_prompt_tokens_seen = 0
        """Largest number of prompt tokens in a measured step; predictions far beyond it are unreliable."""
        self._known_work = NO_WORK
        """Of a tower, in measured steps, the most of each kind."""
        self._num_steps = 0
        self._num_outliers = 0
        """Consecutive steps that took far longer than predicted."""
        self._num_decode_only = 0
        """Consecutive steps with only decodes."""
        self._is_fitted = True

    @property
    def is_ready(self) -> bool:
        """Whether the cost of prompt tokens is known."""
        return self._sums[True].weight > 1.5 and self.max_prompt_tokens_seen > 0

    def can_predict(self, load: StepLoad) -> bool:
        """Whether the costs of such a step are known."""
        return self.is_ready and self._knows(load.tower_work)

    def _knows(self, work: TowerWork) -> bool:
        """Whether the cost of each kind of work has been measured."""
        return all(known or not own for known, own in zip(self._known_work, work, strict=True))

    def learn(self, load: StepLoad, seconds: float) -> None:
        """Learn from a step with this load that took `seconds`."""
        self._num_steps += 1
        self._num_decode_only = self._num_decode_only + 1 if load.is_decodes_only else 0
        is_alike = (
            self._num_steps > _DECODE_STRIDE
            and self._num_decode_only > 0
            and self._num_decode_only % _DECODE_STRIDE != 1
        )
        if self._num_steps <= _WARM_UP or seconds <= 0.0 or is_alike:
            return
        may_clip = self._num_steps > _OUTLIERS_AFTER and self._knows(load.tower_work)
        if may_clip and 0.0 < (expected := _OUTLIER_FACTOR * self.predict(load)) < seconds:
            self._num_outliers += 1
            if self._num_outliers <= _MAX_OUTLIERS:
                seconds = expected
        else:
            self._num_outliers = 0
        features = [count * scale for count, scale in zip((1, *load), _SCALE, strict=True)]
        self.max_prompt_tokens_seen = max(self.max_prompt_tokens_seen, load.prompt_tokens)
        self._known_work = TowerWork(*map(max, self._known_work, load.tower_work))
        self._sums[not load.is_decodes_only].add([feature / seconds for feature in features])
        self._is_fitted = False

    def predict(self, load: StepLoad) -> float:
        """Return the predicted seconds of a step with this load."""
        self._fit()
        counts = zip(self._coefficients, (1, *load), _SCALE, strict=True)
        return sum(coefficient * count * scale for coefficient, count, scale in counts)

    def prompt_tokens_within(
        self, seconds: float, decodes: int, decode_context: int, position: int, tower: TowerWork = NO_WORK
    ) -> float:
        """Prompt tokens, starting at `position`, that fit into `seconds` next to these decodes and a tower's work; may
        be infinite."""
        left = seconds - self.predict(StepLoad(0, decodes, decode_context, 0.0, *tower))
        if left <= 0.0:
            return 0.0
        # token n costs each + growth * (position + n): solve  growth / 2 n² + slope n = left
        each, growth = self._coefficients[1] * _SCALE[1], self._coefficients[4] * _SCALE[4]
        slope = each + growth * position
        divisor = slope + math.sqrt(slope * slope + 2 * growth * left)
        return 2 * left / divisor if divisor else math.inf

    def prompt_seconds(self, start: int, end: int) -> float:
        """The time for a prompt's tokens from `start` to `end`, beside the step's other costs."""
        self._fit()
        each, growth = self._coefficients[1] * _SCALE[1], self._coefficients[4] * _SCALE[4]
        return (end - start) * (each + growth * (start + end) / 2)

    def tower_seconds(self, work: TowerWork) -> float:
        """The time of a step of a tower, beside the step's other costs; infinite while it is not known."""
        if not self._knows(work):
            return math.inf
        self._fit()
        counts = zip(self._coefficients[5:], work, _SCALE[5:], strict=True)
        return sum(coefficient * count * scale for coefficient, count, scale in counts)

    def efficient_prompt_tokens(self, overhead: float) -> float:
        """Minimum tokens of a prompt-only step at which the fixed cost is at most this share of its time."""
        self._fit()
        each = self._coefficients[1] * _SCALE[1]
        return self._coefficients[0] / each / overhead if each else math.inf

    def _fit(self) -> None:
        """Fit by coordinate descent from the previous coefficients, which stay non-negative."""
        if self._is_fitted:
            return
        self._is_fitted = True
        without, with_prompts = self._sums[False], self._sums[True]
        rows = zip(without.matrix, with_prompts.matrix, strict=True)
        matrix = [[a + b for a, b in zip(*pair, strict=True)] for pair in rows]
        vector = [a + b for a, b in zip(without.vector, with_prompts.vector, strict=True)]
        coefficients = self._coefficients
        for _ in range(_SWEEPS):
            for i, row in enumerate(matrix):
                if row[i] > 0.0:
                    rest = sum(a * c for a, c in zip(row, coefficients, strict=True)) - row[i] * coefficients[i]
                    coefficients[i] = max(0.0, (vector[i] - rest) / row[i])


class _Sums:
    """Normal equations of steps whose features are divided by their seconds, so that each right-hand side is 1."""

    def __init__(self) -> None:
        size = len(_SCALE)
        self.weight = 0.0
        self.matrix = [[0.0] * size for _ in range(size)]
        self.vector = [0.0] * size

    def add(self, features: list[float]) -> None:
        self.weight = self.weight * _DECAY + 1.0
        self.vector = [_DECAY * total + x for total, x in zip(self.vector, features, strict=True)]
        for row, x in zip(self.matrix, features, strict=True):
            row[:] = [_DECAY * total + x * y for total, y in zip(row, features, strict=True)]
