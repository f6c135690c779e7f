"""Speculative decoding with the drafts of a model, which the workers make at the end of a step (see
`quire.engine.worker.drafter`), and with n-grams beside them.

When a plan is made, the number of drafts to make after it is chosen, like the number of n-gram drafts, by the expected
rate: the share of a request's recent drafts that were right, and the measured times of steps, which include making
drafts. Where the model is behind (`quire.engine.scheduler.catch_up`), the tokens that it must compute before it drafts
are spread over the remaining steps. No drafts are made where n-grams are expected to go on and promise as many tokens,
or where drafts do not pay; then some are tried once in a while. When the next plan is made, a request gets whichever of
its drafts promise more tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, takewhile

from quire.engine.config.engine_config import EngineConfig, SpeculativeConfig
from quire.engine.protocol.scheduler_output import CATCH_UP_TOKENS, SchedulerOutput
from quire.engine.scheduler.catch_up import CatchUp
from quire.engine.scheduler.ngram import Acceptance
from quire.engine.scheduler.request import Request
from quire.engine.scheduler.speculation import (
    MAX_ROWS,
    MIN_CHANCE,
    MIN_GAIN,
    SIZES,
    Kind,
    SpeculationManager,
    StepTimes,
)

_MAX_AGE_PLAIN = 256
"""See `StepTimes`. Measuring a plain step takes two steps: the first one may still check drafts."""
_TRY_AFTER = 64, 256
"""Steps without drafts after which some are made, to learn whether they have become better; and the maximum of that
number, which doubles with each try that fails."""
_NUM_TRIED = 2
_DECIDE_EVERY = 8
"""Plans without drafts, of as many rows, for which a decision holds: deciding takes a part of a short step's time."""
_NOTHING: tuple[list[int], list[float]] = [], []
"""The drafts and chances of a request that looks up nothing; see `SpeculationManager.look_up`."""
_AS_MATCHED = 4
"""`Acceptance` counts by the length of a match. A model's drafts have no match and are all counted at this length,
which only determines the expectation before any results are known: 4 in 5 are right."""
_MIN_MEASURED = 16
"""Tokens of a step with which a model catches up, below which their time is not separated from the other tokens'
time."""
_MAX_STOPS, _STOP_DECAY = 1 / 16, 0.99
"""Share of recent rows that end with a stop token, above which the core waits for results, and the factor by which a
row counts less with each later one. A row that is chained to such a row is computed in vain: a whole step, while
waiting for a result takes a small part of one."""


class ModelSpeculationManager(SpeculationManager):
    """Decides how many drafts the workers make, and keeps them until the next plan."""

    def __init__(
        self,
        config: SpeculativeConfig,
        max_sampled_tokens: int,
        state_block_size: int | None = None,
        *,
        ranks_wait_for_cpu: bool = False,
    ) -> None:
        """`ranks_wait_for_cpu`: several ranks compute on CPUs, so that all wait for a rank whose core makes a plan."""
        super().__init__(config, max_sampled_tokens, state_block_size)
        self._ranks_wait_for_cpu = ranks_wait_for_cpu
        self.times = StepTimes(_MAX_AGE_PLAIN)
        self._drafts: dict[Request, tuple[int, list[int]]] = {}
        """The last drafts of each request, and its number of tokens when they were made."""
        self._overall_made = Acceptance()
        """Counters of the model's drafts, over all requests."""
        self._made: dict[Request, Acceptance] = {}
        """The counters of each request."""
        self._num_without, self._try_after = 0, _TRY_AFTER[0]
        """Plans since the last one with drafts, and their number at which some are tried."""
        behind = (1 << 30) if config.model is None else config.model.min_window
        self._catch_up = CatchUp(0 if config.reads_hidden_states else behind)  # a head cannot
        self._declined: tuple[int, int] | None = None
        """Rows, and those that can have drafts, of the last plan for which no drafts pay."""
        self._stops = 0.0
        """The share of recent rows with drafts that end with a stop token."""

    def num_drafts(self, requests: Sequence[Request], num_rows: int, *, has_prompts: bool) -> int | None:
        """Return `SchedulerOutput.num_drafts` of a plan with `num_rows`, of which these can have drafts afterwards."""
        if num_rows > MAX_ROWS:
            return None
        depth = self._choose_depth(requests, num_rows)
        # Prompts are followed, as catching up later delays other requests. A head cannot catch up.
        if depth or has_prompts or self.config.reads_hidden_states:
            return depth
        return None

    def _choose_depth(self, requests: Sequence[Request], num_rows: int) -> int:
        if not requests or (room := self.max_sampled_tokens - num_rows) <= 0:
            return 0
        if self._declined == (num_rows, len(requests)) and self._num_without % _DECIDE_EVERY:
            self._num_without += 1
            return 0
        self._declined = None
        most = min(self.config.num_speculative_tokens, room // len(requests))
        lookups = self.look_up(requests, num_rows - len(requests))
        # For each request: how many model drafts are expected to count, by their number, and how many n-grams.
        options: list[tuple[list[float], float]] = []
        for request in requests:
            _, chances = lookups.get(request, _NOTHING)
            going_on = chances[-1] if chances else 0.0  # if this step's drafts are right
            options.append((_promises(self.probability(request), most), sum(chances) * going_on))
        base = num_rows + sum(looked_up for _, looked_up in options)
        gains, late = self._gains(requests, options, most)
        if not any(gains):
            return 0
        repeated = gains if self.state_block_size is not None else [0.0] * most
        sizes = [num_rows + depth * len(requests) + again for depth, again in enumerate(repeated, 1)]
        times, each = self.times.relative("makes", num_rows, sizes), self.times.catch_up(num_rows)
        if not times:  # plain steps are to be measured first
            return 0
        best, best_depth, limit, surest = MIN_GAIN, 0, 0.0, max(promises[1] for promises, _ in options)
        for depth, (time, gain, tokens) in enumerate(zip(times, gains, late, strict=True), 1):
            time += each * tokens
            rate = (base + gain) / (base * time)
            most_right = sum(max(0.0, depth - looked_up) for _, looked_up in options)
            limit = max(limit, (base + most_right) / (base * time))
            if rate > best and surest**depth >= MIN_CHANCE:
                best, best_depth = rate, depth
        if best_depth:
            self._num_without, self._try_after = 0, _TRY_AFTER[0]
            return best_depth
        self._num_without += 1
        if self._num_without <= self._try_after or limit <= MIN_GAIN:
            self._declined = None if lookups else (num_rows, len(requests))
            return 0
        self._num_without, self._try_after = 0, min(2 * self._try_after, _TRY_AFTER[1])
        return min(_NUM_TRIED, most)

    def _gains(
        self, requests: Sequence[Request], options: Sequence[tuple[list[float], float]], most: int
    ) -> tuple[list[float], list[float]]:
        """Return by how many tokens 1 to `most` drafts of each request are expected to be better than n-grams in a
        step, and with how many tokens per step the model then catches up.

        Both are spread over the steps that each request has left: the model catches up once, and a request that ends
        before the model has caught up has no drafts.
        """
        behind, gains, late = self._catch_up.behind(requests), [], []
        for depth in range(1, most + 1):
            gain = tokens = 0.0
            for request, (promises, looked_up), (lag, num_steps) in zip(requests, options, behind, strict=True):
                left = max(1.0, (request.max_tokens - len(request.token_ids)) / (1.0 + promises[depth]))
                gain += max(0.0, promises[depth] - looked_up) * max(0.0, 1.0 - num_steps / left)
                tokens += lag / left
            gains.append(gain)
            late.append(min(tokens, CATCH_UP_TOKENS))
        return gains, late

    def probability(self, request: Request) -> float:
        """Return the estimated probability that a draft is right if the drafts before it are."""
        return self._made.get(request, self._overall_made).probability(_AS_MATCHED)

    def draft(self, decodes: Sequence[Request], num_others: int = 0) -> dict[Request, list[int]]:
        """Return the drafts of these requests: n-grams, or a model's drafts of their next tokens."""
        found = self.look_up(decodes, num_others)
        for request in decodes:
            length, made = self._drafts.get(request, (-1, []))
            made = made[: max(0, self.max_drafts(request))]
            promise = _promises(self.probability(request), len(made))[-1]
            if length == len(request.token_ids) and promise > sum(found.get(request, _NOTHING)[1]):
                found[request] = made, []
        room, kept = max(0, self.max_sampled_tokens - self.num_tokens(decodes, num_others)), {}
        for request, (drafts, _) in found.items():
            if fitting := drafts[:room]:
                kept[request] = fitting
                room -= len(fitting)
        return kept

    def add_drafts(self, drafts: Mapping[Request, list[int]]) -> None:
        """Take the drafts that the workers have made, of these requests' next tokens."""
        for request, made in drafts.items():
            self._learn(request)
            if request.finish_reason is None:
                self._drafts[request] = len(request.token_ids), made

    def _learn(self, request: Request) -> None:
        """Compare the last drafts with the tokens that have followed."""
        start, drafts = self._drafts.pop(request, (0, []))
        pairs = [*zip(drafts, request.token_ids[start:], strict=False)]
        right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if pairs:
            made = self._made.setdefault(request, Acceptance(self._overall_made))
            for is_hit in [True] * right + [False] * (right < len(pairs)):
                made.learn(_AS_MATCHED, is_hit=is_hit)
            if right == len(pairs):  # a try that succeeds is followed by another one
                self._num_without = self._try_after

    def may_chain(self, requests: Sequence[Request], num_drafts: int) -> bool:
        """Whether these requests should have rows with `num_drafts` of the model before it is known where the previous
        rows end: not if n-grams, which need the text, promise more."""
        if self._ranks_wait_for_cpu or self._stops > _MAX_STOPS:
            return False
        return all(
            sum(chances) <= _promises(self.probability(request), num_drafts)[-1]
            for request, (_, chances) in self.look_up(requests, 0).items()
        )

    def on_verified(self, *, is_stop: bool) -> None:
        """Learn how often rows end their requests with a stop token, from one row."""
        self._stops = _STOP_DECAY * self._stops + (1 - _STOP_DECAY) * is_stop

    def on_drafter_runs(self, step: int, rows: Iterable[tuple[Request, int]]) -> None:
        """Record that the model runs at the end of a step with these rows, of so many tokens each."""
        self._catch_up.run(step, rows)

    def on_result(self, plan: SchedulerOutput, now: float | None) -> None:
        super().on_result(plan, now)
        self._catch_up.finish(plan.step)

    def learn_time(self, plan: SchedulerOutput, seconds: float) -> None:
        num_tokens = self._catch_up.in_step(plan.step)
        if num_tokens < _MIN_MEASURED:
            super().learn_time(plan, seconds)
        elif (base := self.times.plain(plan.num_rows)) is not None and self.times.knows("makes", plan.num_rows):
            expected = base * self.times.relative("makes", plan.num_rows, [plan.num_tokens])[0]
            self.times.learn("catches up", num_tokens, max(seconds - expected, 0.01 * base))

    def kind(self, plan: SchedulerOutput) -> Kind | None:
        made = (plan.num_rows - len(plan.masks)) * (plan.num_drafts or 0)
        if not made:
            return super().kind(plan)
        sizes = [bisect_left(SIZES, plan.num_rows + count) for count in (made, plan.num_draft_tokens)]
        return "makes" if sizes[0] == sizes[1] else None

    def on_finish(self, request: Request, num_running: int) -> None:
        super().on_finish(request, num_running)
        self._learn(request)
        self._made.pop(request, None)


def _promises(probability: float, most: int) -> list[float]:
    """Return how many of 0 to `most` drafts are expected to count, if each is right with this probability when the
    drafts before it are."""
    return [*accumulate((probability**place for place in range(1, most + 1)), initial=0.0)]


def make_speculation(config: EngineConfig) -> SpeculationManager | None:
    """The manager of the drafts of this engine's method, if it has one; see `SpeculationManager` and
    `ModelSpeculationManager`."""
    speculative, most = config.scheduler.speculative, config.scheduler.max_sampled_tokens
    if speculative is None:
        return None
    block_size = config.cache.block_size if any(group.is_state for group in config.cache.groups) else None
    if speculative.model is None:
        return SpeculationManager(speculative, most, block_size)
    ranks_wait_for_cpu = config.parallel.device == "cpu" and config.parallel.stage_ranks > 1
    return ModelSpeculationManager(speculative, most, block_size, ranks_wait_for_cpu=ranks_wait_for_cpu)
