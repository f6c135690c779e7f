"""Speculative decoding: which requests get drafts, and how many.

A drafter guesses the next tokens of a request: this module's by n-grams, that of `quire.engine.scheduler.model_drafts`
by a model. A row with drafts samples at the place of each, with the noise of that
place, so that a draft counts exactly when it is the token that would have been sampled: the answer is the same, and
only the number of steps is lower (see `quire.engine.scheduler.scheduler`).

Drafts are used when they pay. The expected number of tokens of a step follows from how often recent guesses were right,
also those that were not used; its time is measured. Of the possible numbers of drafts, the one with the highest
expected rate is chosen, which is none where a step with more tokens takes longer in proportion.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from heapq import merge
from itertools import accumulate, islice

import numpy as np

from quire.engine.config.engine_config import SpeculativeConfig
from quire.engine.protocol.scheduler_output import SchedulerOutput
from quire.engine.scheduler.ngram import RECENT_MATCH, RecentTexts, TokenLookup
from quire.engine.scheduler.request import Request

MAX_ROWS = 32
"""With more rows, the processor is busy without drafts, and looking for them takes time."""
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of tokens for which step times are measured; a step belongs to the next larger one."""
_SMOOTHING = 0.2
"""Weight of a new measurement."""
_MAX_AGE = {False: 64, True: 512}
"""Steps after which a measurement without or with drafts is forgotten. Without drafts it is measured again at once: it
is what drafts must be better than. With drafts, what is not known is assumed to be cheap, and so tried."""
_WARM_UP = {False: 3, True: 1}
"""First steps of a size to ignore, without and with drafts: they may compile, or record a graph."""
_OUTLIER_FACTOR = 3.0
"""A measurement is clipped to this multiple of the expected time."""
MIN_CHANCE = 0.1
"""Probability to count below which a draft is not worth a place in a step, however little that seems to take."""
MIN_GAIN = 1.05
"""Expected gain below which there are no drafts, as they cost time outside of the step, too."""


class StepTimes:
    """Measured seconds of steps without prompts, by their number of tokens, without and with drafts."""

    def __init__(self, max_age: Mapping[bool, int] = _MAX_AGE) -> None:
        self._max_age = max_age
        self._seconds: dict[tuple[bool, int], float] = {}
        self._tokens: dict[tuple[bool, int], int] = {}
        """Tokens of the last step of each size."""
        self._learned_at: dict[tuple[bool, int], int] = {}
        self._num_seen: dict[tuple[bool, int], int] = {}
        self._num_steps = 0

    def learn(self, num_tokens: int, seconds: float, *, has_drafts: bool) -> None:
        """Record that a step took `seconds`."""
        self._num_steps += 1
        key = has_drafts, bisect_left(SIZES, num_tokens)
        self._num_seen[key] = self._num_seen.get(key, 0) + 1
        if (known := self._seconds.get(key)) is not None:
            self._seconds[key] = known + _SMOOTHING * (min(seconds, _OUTLIER_FACTOR * known) - known)
        elif self._num_seen[key] > _WARM_UP[has_drafts]:
            self._seconds[key] = seconds
        self._tokens[key], self._learned_at[key] = num_tokens, self._num_steps
        for old in [key for key, step in self._learned_at.items() if step < self._num_steps - self._max_age[key[0]]]:
            self._seconds.pop(old, None)

    def relative(self, num_rows: int, sizes: Iterable[float]) -> list[float]:
        """Return the times of steps with drafts and these numbers of tokens, as multiples of the time without drafts;
        empty if that is not known.

        Between known sizes the time is interpolated; beyond the largest one it is assumed to be constant.
        """
        base = self._seconds.get((False, bisect_left(SIZES, num_rows)))
        if base is None:
            return []
        points = [
            (self._tokens[key], seconds)
            for key, seconds in sorted(self._seconds.items())
            if key[0] and self._tokens[key] > num_rows
        ]
        known, seconds = zip((num_rows, base), *points, strict=True)
        return [float(time) for time in np.interp(list(sizes), known, seconds) / base]


class SpeculationManager:
    """Makes the drafts of each plan.

    `state_block_size`: the block size of a model with recurrent states. There drafts end with the block of the last
    known token, and those that count are computed again in the next step.
    """

    def __init__(self, config: SpeculativeConfig, max_sampled_tokens: int, state_block_size: int | None = None) -> None:
        self.config, self.max_sampled_tokens, self.state_block_size = config, max_sampled_tokens, state_block_size
        self.times = StepTimes()
        self.recent = RecentTexts()
        self._last_result_at: float | None = None

    def draft(self, decodes: Sequence[Request], num_others: int = 0) -> dict[Request, list[int]]:
        """Return the drafts of these requests; requests without drafts are left out.

        The step has `num_others` rows of one token besides.
        """
        num_rows, num_tokens = len(decodes) + num_others, self.num_tokens(decodes, num_others)
        room = self.max_sampled_tokens - num_tokens
        if not decodes or num_rows > MAX_ROWS or room <= 0:
            return {}
        most = num_tokens + min(room, len(decodes) * self.config.num_speculative_tokens)
        sizes = [size for size in SIZES if num_tokens < size < most] + [most]
        counts = [size - num_tokens for size in sizes]
        times = self._relative_times(num_rows, num_tokens, sizes)
        if not times or not any(
            num_rows + count > MIN_GAIN * time * num_rows for count, time in zip(counts, times, strict=True)
        ):
            return {}
        proposals, chances = [], []
        for request in decodes:
            drafts, probability = self.propose(request)
            chance = [each for place in range(len(drafts)) if (each := probability ** (place + 1)) >= MIN_CHANCE]
            if chance:
                proposals.append((request, drafts))
                chances.append(chance)
        if not proposals:
            return {}
        ordered = list(islice(merge(*chances, reverse=True), room))
        gains = [0.0, *accumulate(ordered)]
        counts = [min(count, len(ordered)) for count in counts]
        if self.state_block_size is not None:
            loads = [size + gains[count] for size, count in zip(sizes, counts, strict=True)]
            times = self._relative_times(num_rows, num_tokens, loads)
        best, best_count = MIN_GAIN, 0
        for count, time in zip(counts, times, strict=True):
            rate = (num_rows + gains[count]) / (num_rows * time)
            if rate > best:
                best, best_count = rate, count
        if not best_count:
            return {}
        least = ordered[best_count - 1]
        drafts_of, left = {}, best_count
        for (request, drafts), chance in zip(proposals, chances, strict=True):
            count = min(left, sum(each >= least for each in chance))
            if count:
                drafts_of[request], left = drafts[:count], left - count
        return drafts_of

    def num_tokens(self, decodes: Sequence[Request], num_others: int) -> int:
        """Return the tokens of a step with these decodes and `num_others` rows of one token, without drafts."""
        if self.state_block_size is None:
            return len(decodes) + num_others
        return num_others + sum(max(1, request.num_pending_tokens) for request in decodes)

    def _relative_times(self, num_rows: int, num_tokens: int, sizes: Sequence[float]) -> list[float]:
        """Return the times of steps with drafts as multiples of the time of the `num_tokens` alone, if known."""
        base, *times = self.times.relative(num_rows, [num_tokens, *sizes]) or (1.0,)
        return [time / base for time in times]

    def on_result(self, plan: SchedulerOutput, now: float | None) -> None:
        """Record that the result of a plan arrived at this time, in seconds; None: the step failed.

        Only steps of decodes are measured, and those without drafts only if each row has one token.
        """
        last, self._last_result_at = self._last_result_at, now
        if last is None or now is None or not plan.num_rows:
            return
        has_drafts, has_prompts = (
            plan.num_draft_tokens > 0,
            plan.new or any(r.has_prompt_tokens for r in plan.scheduled),
        )
        if not has_prompts and (has_drafts or plan.num_tokens == plan.num_rows):
            self.times.learn(plan.num_tokens, now - last, has_drafts=has_drafts)

    def on_finish(self, request: Request, num_running: int) -> None:
        """Remember the answer of a finished request for those that repeat it, unless so many run that nothing has
        drafts."""
        if num_running <= MAX_ROWS:
            begin = max(0, request.num_prompt_tokens - RECENT_MATCH)
            self.recent.add(request.token_ids[begin:], request.core_request.cache_salt)

    def propose(self, request: Request) -> tuple[list[int], float]:
        """Return the tokens expected next, and the probability of each to be right if those before it are."""
        lookup = request.lookup
        if lookup is None:
            asked = request.core_request
            predicted, salt = asked.params.predicted_token_ids, asked.cache_salt
            lookup = request.lookup = TokenLookup(self.config.prompt_lookup_min, predicted, self.recent, salt)
        lookup.extend(request.token_ids)
        most = self.max_drafts(request)
        drafts = lookup.propose(most) if most > 0 else []
        return drafts, lookup.probability

    def max_drafts(self, request: Request) -> int:
        """Return the maximum drafts of a request; 0 or less: none."""
        most = min(self.config.num_speculative_tokens, request.max_tokens - len(request.token_ids) - 1)
        return most if self.state_block_size is None else min(most, -len(request.token_ids) % self.state_block_size)
