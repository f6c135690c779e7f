"""How long a step takes, learned from the steps that ran, and how many prompt tokens fit into one.

The time is taken to be linear in what the step does. The coefficients are the non-negative least squares of the steps
seen, old ones being forgotten. Steps with and without prompt tokens are forgotten apart: an hour of decodes must not
wipe out what a prompt token costs. Errors count relative to the step's length, so that long steps do not drown short
ones, and a step that was far too long by its prediction (a page fault, another process) counts as a shorter one.
"""

from __future__ import annotations

import math
from typing import NamedTuple

_MEMORY = 0.98
"""What is left of a step's weight after another of its kind: about the last 50 count."""
_WARM_UP = 2
"""First steps that are not learned from: they compile, allocate and read weights for the first time."""
_SURPRISE = 3.0
"""A step counts as at most so many times as long as it was predicted, unless several in a row took longer."""
_SURPRISES = 4
_SURPRISED_AFTER = 16
_EVERY = 16
"""Of steps in a row without prompt tokens, one in so many is learned from: they are alike, and learning takes time."""
_SWEEPS = 8
_SCALE = (1.0, 1 / 256, 1 / 32, 1 / 2**14, 1 / 2**18)
"""Of the features, which brings them to the same order of magnitude."""


class StepLoad(NamedTuple):
    """What a step does."""

    prompt_tokens: int
    """Tokens of all rows but the decodes."""
    decodes: int
    decode_context: int
    """KV tokens that the decodes read."""
    prompt_context: float
    """KV tokens that the prompt tokens read: the sum of their positions."""


class StepTimeModel:
    """Seconds of a step: fixed + so much for each count of its `StepLoad`."""

    def __init__(self) -> None:
        self._coefficients = [0.0] * len(_SCALE)
        self._sums = {kind: _Sums() for kind in (False, True)}
        """Of the steps without and with prompt tokens."""
        self.most_prompt_tokens = 0
        """Of a step that was learned from: far beyond, predictions are guesses."""
        self._seen = 0
        self._surprises = 0
        """Steps in a row that took far longer than predicted."""
        self._without_prompts = 0
        """Steps in a row."""
        self._is_fitted = True

    @property
    def is_ready(self) -> bool:
        """Whether it knows what prompt tokens cost."""
        return self._sums[True].weight > 1.5

    def learn(self, load: StepLoad, seconds: float) -> None:
        """A step with this load took so long."""
        self._seen += 1
        self._without_prompts = 0 if load.prompt_tokens else self._without_prompts + 1
        is_alike = self._seen > _EVERY and self._without_prompts > 0 and self._without_prompts % _EVERY != 1
        if self._seen <= _WARM_UP or seconds <= 0.0 or is_alike:
            return
        if self._seen > _SURPRISED_AFTER and 0.0 < (expected := _SURPRISE * self.predict(load)) < seconds:
            self._surprises += 1
            if self._surprises <= _SURPRISES:
                seconds = expected
        else:
            self._surprises = 0
        features = [count * scale for count, scale in zip((1, *load), _SCALE, strict=True)]
        self.most_prompt_tokens = max(self.most_prompt_tokens, load.prompt_tokens)
        self._sums[load.prompt_tokens > 0].add([feature / seconds for feature in features])
        self._is_fitted = False

    def predict(self, load: StepLoad) -> float:
        """Seconds that such a step will take."""
        self._fit()
        counts = zip(self._coefficients, (1, *load), _SCALE, strict=True)
        return sum(coefficient * count * scale for coefficient, count, scale in counts)

    def prompt_tokens_within(self, seconds: float, decodes: int, decode_context: int, position: int) -> float:
        """Tokens of a prompt, from `position` on, that take so long at most beside these decodes; may be infinite."""
        left = seconds - self.predict(StepLoad(0, decodes, decode_context, 0.0))
        if left <= 0.0:
            return 0.0
        # token n costs each + growth * (position + n): solve  growth / 2 n² + slope n = left
        each, growth = self._coefficients[1] * _SCALE[1], self._coefficients[4] * _SCALE[4]
        slope = each + growth * position
        divisor = slope + math.sqrt(slope * slope + 2 * growth * left)
        return 2 * left / divisor if divisor else math.inf

    def paying_prompt_tokens(self, overhead: float) -> float:
        """The least tokens of a step of prompts alone of which the fixed cost is at most this share."""
        self._fit()
        each = self._coefficients[1] * _SCALE[1]
        return self._coefficients[0] / each / overhead if each else math.inf

    def _fit(self) -> None:
        """Coordinate descent from the last coefficients; none falls below 0."""
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
    """The normal equations of steps whose features are divided by their seconds, so that each right side is 1."""

    def __init__(self) -> None:
        size = len(_SCALE)
        self.weight = 0.0
        self.matrix = [[0.0] * size for _ in range(size)]
        self.vector = [0.0] * size

    def add(self, features: list[float]) -> None:
        self.weight = self.weight * _MEMORY + 1.0
        self.vector = [_MEMORY * total + x for total, x in zip(self.vector, features, strict=True)]
        for row, x in zip(self.matrix, features, strict=True):
            row[:] = [_MEMORY * total + x * y for total, y in zip(row, features, strict=True)]
