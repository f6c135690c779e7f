"""Speculative decoding: which requests get drafts, and how many.

Drafts are guesses of a request's next tokens: by n-grams, here, and also by a model, in
`quire.engine.scheduler.model_drafts`. A row with drafts samples at the place of each, with the noise of that place, so
that a draft counts exactly when it is the token that would have been sampled: the answer is the same, and only the
number of steps is lower (see `quire.engine.scheduler.scheduler`).

Drafts are used when they pay. The expected number of tokens of a step follows from how often recent guesses were right,
including unused guesses; its time is measured. Of the possible numbers of drafts, the one with the highest expected
rate is chosen: 0 where a step with more tokens takes longer in proportion.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from heapq import merge
from itertools import accumulate, islice
from typing import Literal

from quire.engine.config.engine_config import SpeculativeConfig
from quire.engine.protocol.scheduler_output import SchedulerOutput
from quire.engine.scheduler.ngram import RECENT_MATCH, UNKNOWN, Acceptance, RecentTexts, TokenLookup
from quire.engine.scheduler.request import Request

MAX_ROWS = 32
"""With more rows, the processor is busy without drafts, and looking for them takes time."""
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of tokens for which step times are measured; a step belongs to the next larger one."""
_SMOOTHING = 0.2
"""Weight of a new measurement."""
Kind = Literal["plain", "checks", "makes", "catches up"]
"""Measured times: of steps with one token for each row; of steps with drafts; of steps with about as many drafts as a
model makes at their end; and the extra time of a step in which a draft model catches up, by the number of tokens that
it catches up with."""
_MAX_AGE = 512
"""Steps after which a measurement with drafts is forgotten. Unknown times are assumed to be short, so that they are
tried."""
_MAX_AGE_PLAIN = 64
"""The same for plain steps, which are measured again at once: drafts must be better than they are."""
_WARM_UP: Mapping[Kind, int] = {"plain": 3, "checks": 1, "makes": 1, "catches up": 1}
"""First steps of a size to ignore: they may compile, or record a graph."""
_OUTLIER_FACTOR = 3.0
"""A measurement is clipped to this multiple of the expected time."""
MIN_CHANCE = 0.1
"""Probability to count below which a draft is not worth a place in a step, however little time the place seems to
take."""
MIN_GAIN = 1.05
"""Expected gain below which there are no drafts, as they cost time outside of the step, too."""


class StepTimes:
    """Measured seconds of steps without prompts, by `Kind` and number of tokens."""

    def __init__(self, max_age_plain: int = _MAX_AGE_PLAIN) -> None:
        self._max_age_plain = max_age_plain
        self._seconds: dict[tuple[Kind, int], float] = {}
        """By kind and size (a place in `SIZES`), like the dictionaries below."""
        self._tokens: dict[tuple[Kind, int], int] = {}
        """Tokens of the last step."""
        self._learned_at: dict[tuple[Kind, int], int] = {}
        self._num_seen: dict[tuple[Kind, int], int] = {}
        self._num_steps = 0

    def learn(self, kind: Kind, num_tokens: int, seconds: float) -> None:
        """Record that a step took `seconds`."""
        self._num_steps += 1
        key = kind, bisect_left(SIZES, num_tokens)
        self._num_seen[key] = self._num_seen.get(key, 0) + 1
        if (known := self._seconds.get(key)) is not None:
            self._seconds[key] = known + _SMOOTHING * (min(seconds, _OUTLIER_FACTOR * known) - known)
        elif self._num_seen[key] > _WARM_UP[kind]:
            self._seconds[key] = seconds
        self._tokens[key], self._learned_at[key] = num_tokens, self._num_steps
        for old, step in self._learned_at.items():
            if step < self._num_steps - (self._max_age_plain if old[0] == "plain" else _MAX_AGE):
                self._seconds.pop(old, None)

    def plain(self, num_rows: int) -> float | None:
        """Return the seconds of a plain step; None if they are not known."""
        return self._seconds.get(("plain", bisect_left(SIZES, num_rows)))

    def catch_up(self, num_rows: int) -> float:
        """Return the time per token with which a draft model catches up, as a multiple of the time of a plain step; 0
        if that is not known."""
        found = [key for key in self._seconds if key[0] == "catches up"]
        if not found or (base := self.plain(num_rows)) is None:
            return 0.0
        largest = max(found)
        return self._seconds[largest] / self._tokens[largest] / base

    def relative(self, kind: Kind, num_rows: int, sizes: Iterable[float]) -> list[float]:
        """Return the times of steps of this kind and these numbers of tokens, as multiples of the time of a plain step;
        empty if that is not known.

        Between known sizes the time is interpolated; beyond the largest one it is assumed to be constant.
        """
        if (base := self.plain(num_rows)) is None:
            return []
        known, seconds = [num_rows], [base]
        for tokens, time in self._known(kind, num_rows):
            known.append(tokens)
            seconds.append(time)
        found = []
        for size in sizes:
            place = bisect_right(known, size)  # of the next larger one
            time = seconds[max(0, place - 1)]
            if 0 < place < len(known):
                step = known[place] - known[place - 1]
                time += (size - known[place - 1]) / step * (seconds[place] - time)
            found.append(time / base)
        return found

    def knows(self, kind: Kind, num_rows: int) -> bool:
        """Whether `relative` has more than plain steps to go by."""
        return bool(self._known(kind, num_rows))

    def _known(self, kind: Kind, num_rows: int) -> list[tuple[int, float]]:
        """The measured steps of this kind and of more than `num_rows` tokens: tokens and seconds."""
        keys = ((kind, size) for size in range(len(SIZES) + 1))
        known = [(self._tokens[key], self._seconds[key]) for key in keys if key in self._seconds]
        return [(tokens, seconds) for tokens, seconds in known if tokens > num_rows]


class SpeculationManager:
    """Makes the drafts of each plan, by n-grams.

    `state_block_size`: the block size of a model with recurrent states. There drafts end with the block of the last
    known token, and drafts that count are computed again in the next step.
    """

    def __init__(self, config: SpeculativeConfig, max_sampled_tokens: int, state_block_size: int | None = None) -> None:
        self.config, self.max_sampled_tokens, self.state_block_size = config, max_sampled_tokens, state_block_size
        self.times = StepTimes()
        self.recent, self.acceptance = RecentTexts(), Acceptance()
        self._last_result_at: float | None = None

    def draft(self, decodes: Sequence[Request], num_others: int = 0) -> dict[Request, list[int]]:
        """Return the drafts of these requests; requests without drafts are left out.

        The step has `num_others` rows of one token besides.
        """
        return {request: drafts for request, (drafts, _) in self.look_up(decodes, num_others).items()}

    def look_up(self, decodes: Sequence[Request], num_others: int) -> dict[Request, tuple[list[int], list[float]]]:
        """Return the n-gram drafts of these requests that pay, and the probabilities of each to count."""
        num_rows, num_tokens = len(decodes) + num_others, self.num_tokens(decodes, num_others)
        room = self.max_sampled_tokens - num_tokens
        if not decodes or num_rows > MAX_ROWS or room <= 0:
            return {}
        most = num_tokens + min(room, len(decodes) * self.config.num_lookup_tokens)
        sizes = [size for size in SIZES if num_tokens < size < most] + [most]
        counts = [size - num_tokens for size in sizes]
        times = self._relative_times(num_rows, num_tokens, sizes)
        if not times or not any(
            num_rows + count > MIN_GAIN * time * num_rows for count, time in zip(counts, times, strict=True)
        ):
            return {}
        proposals, chances = [], []
        for request in decodes:
            drafts, chance = self.propose(request)
            if likely := [each for each in chance if each >= MIN_CHANCE]:
                proposals.append((request, drafts))
                chances.append(likely)
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
        found, left = {}, best_count
        for (request, drafts), chance in zip(proposals, chances, strict=True):
            count = min(left, sum(each >= least for each in chance))
            if count:
                found[request], left = (drafts[:count], chance[:count]), left - count
        return found

    def num_tokens(self, decodes: Sequence[Request], num_others: int) -> int:
        """Return the tokens of a step with these decodes and `num_others` rows of one token, without drafts."""
        if self.state_block_size is None:
            return len(decodes) + num_others
        return num_others + sum(max(1, request.num_pending_tokens) for request in decodes)

    def _relative_times(self, num_rows: int, num_tokens: int, sizes: Sequence[float]) -> list[float]:
        """Return the times of steps with drafts as multiples of the time of the `num_tokens` alone, if known."""
        base, *times = self.times.relative("checks", num_rows, [num_tokens, *sizes]) or (1.0,)
        return [time / base for time in times]

    def on_result(self, plan: SchedulerOutput, now: float | None) -> None:
        """Record that the result of a plan arrived at this time, in seconds; None: the step failed.

        Only steps of decodes are measured.
        """
        last, self._last_result_at = self._last_result_at, now
        if last is None or now is None or not plan.num_rows:
            return
        has_prompts = plan.new or any(row.has_prompt_tokens for row in plan.scheduled)
        if not has_prompts:
            self.learn_time(plan, now - last)

    def learn_time(self, plan: SchedulerOutput, seconds: float) -> None:
        """Record how long a step of decodes took."""
        if (kind := self.kind(plan)) is not None:
            self.times.learn(kind, plan.num_tokens, seconds)

    def kind(self, plan: SchedulerOutput) -> Kind | None:
        """Return the kind of a step of decodes; None: another one, such as one with tokens that a grammar forces."""
        if plan.num_draft_tokens:
            return "checks"
        return "plain" if plan.num_tokens == plan.num_rows else None

    def on_finish(self, request: Request, num_running: int) -> None:
        """Remember the answer of a finished request for requests that repeat it, unless so many run that none has
        drafts."""
        if num_running <= MAX_ROWS:
            begin = max(0, request.num_prompt_tokens - RECENT_MATCH)
            self.recent.add(request.token_ids[begin:], request.core_request.cache_salt)

    def propose(self, request: Request) -> tuple[list[int], list[float]]:
        """Return the tokens expected next, and each one's probability to count. They are computed once for the same
        tokens, as a step may ask several times."""
        lookup = request.lookup
        if lookup is None:
            asked = request.core_request
            predicted, salt = asked.params.predicted_token_ids, asked.cache_salt
            lookup = request.lookup = TokenLookup(
                self.config.prompt_lookup_min, predicted, self.recent, salt, self.acceptance
            )
            prompt = request.token_ids[: request.num_prompt_tokens]
            for item in asked.media:  # images are not repeated, whatever token stands for their features
                prompt[item.offset : item.end] = [UNKNOWN] * item.length
            lookup.extend(prompt)  # the predicted tokens follow it
        lookup.extend(request.token_ids)
        if (most := self.max_drafts(request)) <= 0:
            return [], []
        if lookup.proposed is None:
            found = lookup.propose(self.config.num_lookup_tokens)
            lookup.proposed = found, lookup.chances(len(found))
        drafts, chances = lookup.proposed
        return drafts[:most], chances[:most]

    def max_drafts(self, request: Request) -> int:
        """Return how many drafts a request has room for; 0 or less: none."""
        most = request.max_tokens - len(request.token_ids) - 1
        return most if self.state_block_size is None else min(most, -len(request.token_ids) % self.state_block_size)
