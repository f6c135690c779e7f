"""The encoder cache: which features of images and videos the workers keep, and what each step encodes.

Plain Python, no torch: the features themselves are on the ranks of the first stage, and this module only does the
bookkeeping. Features are known by the digest of their item, so that many requests share them. If an adapter changes the
tower, its digest is mixed in; requests with other adapters share the features of the base.

An item is encoded in the first step with a row that reaches its features, unless the workers have these. A row that
reaches an item for which this step has no room ends before it. Every row of a plan holds the features that it reads,
and between plans a request holds those of the item that its last row ended in; the others stay until their room is
needed. So a request that holds features can always go on to the end of the item, whatever the others hold.

Next to decodes, whose steps have a target time, rows encode nothing. A row ends before an item that the workers do not
have, and the next plans encode it before they have rows, a few steps of the tower at a time (`start`). There is one
such *part* at most. It has its room from its first step on, and every plan goes on with it, so that the room is not
lost. A prompt that is one run needs all its items in one plan, and nothing holds those that are there until then. But
only the first waiting request has items encoded ahead then, so they stay unless another one comes before it.

Workers drop `MediaPlan.freed` before they encode `MediaPlan.encoded`, and run plans in order: what a plan frees was
last read by an earlier one. Workers that skip a plan after a failure drop what it frees, too, but encode nothing.

Invariants (`check_integrity`):
- the features that are kept, and those of the part, are no more than the capacity;
- what a running request has begun to read is kept, and held by it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import takewhile
from typing import NamedTuple

import msgspec

from quire.engine.architecture.media_spec import NO_WORK, TowerWork
from quire.engine.config.engine_config import EngineConfig
from quire.engine.protocol.media import MediaItem
from quire.engine.protocol.scheduler_output import MediaPlan
from quire.engine.protocol.stats import EngineStats
from quire.engine.scheduler.adapters import AdapterManager
from quire.engine.scheduler.plans_in_flight import PlansInFlight
from quire.engine.scheduler.request import Request
from quire.engine.scheduler.token_budget import TowerTime


class MediaSpan(NamedTuple):
    """The tokens of a prompt from the first to the last that features of an item replace."""

    start: int
    end: int
    num_features: int
    item: MediaItem


class UnencodedItem(NamedTuple):
    """An item that is not encoded yet, or not completely."""

    request: Request
    """The first one that needs it."""
    item: MediaItem
    num_steps: int
    """Steps of the tower that have run."""


class EncoderCacheManager:
    """Decides which items a plan encodes, and what the workers drop for them."""

    def __init__(
        self, config: EngineConfig, in_flight: PlansInFlight, adapters: AdapterManager, stats: EngineStats
    ) -> None:
        media, spec = config.media, config.model.architecture.media
        self._capacity = 0 if media is None else media.encoder_cache_features
        self._tower, self._device = None if spec is None else spec.tower, config.parallel.device
        self._max_features = 0 if media is None else media.max_encoder_features
        """Features that rows of a plan encode, unless a single item has more."""
        self.needs_whole_runs = spec is not None and spec.is_bidirectional
        """Whether a row may not end inside a run, because its tokens attend to each other in both directions."""
        self._joins_prompt = spec is not None and spec.joins_prompt
        """Whether all tokens of a prompt with items are such a run."""
        self.joins_text = spec is not None and spec.joins_text
        """Whether those of any prompt are."""
        self._in_flight, self._adapters, self._stats = in_flight, adapters, stats
        self._spans: dict[Request, list[MediaSpan]] = {}
        """The items of the requests that have any."""
        self._sizes: dict[bytes, int] = {}
        """Features of each item that the workers keep, from the plan that encodes it to the one that frees it."""
        self._held: dict[Request, dict[bytes, None]] = {}
        """The items whose features a request needs."""
        self._num_holders: dict[bytes, int] = {}
        """Requests that hold an item."""
        self._unused: OrderedDict[bytes, None] = OrderedDict()
        """Items that nobody holds, in the order in which they will be dropped."""
        self._num_used = 0
        """Features of items that are held."""
        self._encoded: dict[int, dict[bytes, Request]] = {}
        """By step: the items that it encodes, and for whom, until its result arrives."""
        self._is_ahead = False
        """Rows of the current plan encode nothing."""
        self._wanted: dict[bytes, UnencodedItem] = {}
        """Items before which its rows have ended, and those that these rows would have read then: for the next plan."""
        self._part: UnencodedItem | None = None
        """The item whose first steps have run."""
        self._last_steps: tuple[bytes, Sequence[tuple[TowerWork, int]]] = b"", ()
        """Of the item that was planned last: all plans go on with the part."""
        self._unread: set[bytes] = set()
        """Items that were encoded ahead of the first row that reads them."""
        self._plan = MediaPlan()
        """Of the plan that is made."""
        self._num_planned = 0
        """Features of the items that it encodes, at least in part."""
        divides_items = self._tower is not None and self._tower.divides_items
        self._work = [NO_WORK] * (config.parallel.tensor_parallel_size if divides_items else 1)
        """Of the tower, in this plan: of each rank if they divide items."""
        self._completed: list[Request] = []
        """Those whose items it completes with adapters that change the tower."""
        self._rows: list[Request] = []
        """Its requests with rows that read features."""
        self.lacks_tokens = False
        """The current plan has too few tokens left for a run that must be in one row."""
        self._is_full = False
        """A request waits for room. Others do not hold further items then, so that there will be room."""

    # --- requests ---------------------------------------------------------------------------------------------

    @property
    def has_requests(self) -> bool:
        """Whether there are unfinished requests with items."""
        return bool(self._spans)

    def add(self, request: Request) -> None:
        """Add a request, whose items are valid, and whose adapter is prepared. Its items get digests that say all that
        their features depend on. With a salt, requests with another one cannot tell which items it has."""
        given, spans = request.core_request, []
        given.media = [self._with_own_digest(item, request) for item in given.media]
        for item in given.media:
            first, last = item.runs[0], item.runs[-1]
            start, end = item.offset + first.start, item.offset + last.start + last.length
            spans.append(MediaSpan(start, end, item.num_features, item))
        if spans:
            self._spans[request] = spans

    def _with_own_digest(self, item: MediaItem, request: Request) -> MediaItem:
        digest, adapter = item.digest, request.core_request.adapter
        if adapter is not None and self._is_changed(item, request):
            digest = blake2b(digest, key=adapter.digest, digest_size=16).digest()
        if salt := request.core_request.cache_salt:
            digest = blake2b(digest, key=salt, digest_size=16).digest()
        return item if digest == item.digest else msgspec.structs.replace(item, digest=digest)

    def _is_changed(self, item: MediaItem, request: Request) -> bool:
        """Whether the features of a request's item depend on its adapter."""
        return item.needs_tower and self._adapters.changes_tower(request)

    def finish(self, request: Request) -> None:
        """Remove a request that has ended."""
        self.release(request)
        self._spans.pop(request, None)
        if self._part is not None and self._part.request is request:
            self._drop_part()

    def release(self, request: Request, kept: Iterable[bytes] = ()) -> None:
        """Let go of the items that a request holds, except `kept`."""
        if (held := self._held.pop(request, None)) is None:
            return
        if still := {digest: None for digest in kept if digest in held}:
            self._held[request] = still
        for digest in held:
            if digest in still:
                continue
            self._num_holders[digest] -= 1
            if not self._num_holders[digest]:
                del self._num_holders[digest]
                self._num_used -= self._sizes[digest]
                self._unused[digest] = None

    def _spans_in(self, request: Request, start: int, end: int) -> Iterator[MediaSpan]:
        """The items whose features the request's tokens from `start` to `end` read."""
        spans = self._spans.get(request, [])
        first = bisect_right(spans, start, key=lambda span: span.end)
        return takewhile(lambda span: span.start < end, spans[first : first + end - start])

    # --- plans ------------------------------------------------------------------------------------------------

    @property
    def has_planned(self) -> bool:
        """Whether the current plan encodes anything."""
        return bool(self._plan.encoded)

    @property
    def user(self) -> Request | None:
        """The request that the part is encoded for, if its adapter changes the tower: the part uses it, too."""
        part = self._part
        return None if part is None or not self._is_changed(part.item, part.request) else part.request

    @property
    def planned_work(self) -> TowerWork:
        """Of the tower, in the current plan: of the rank with the most, which runs beside the others."""
        return max(self._work, key=sum)

    @property
    def _fresh(self) -> set[bytes]:
        """Items that the current plan completes, and that nobody holds yet. They stay until the next plan."""
        return {item.digest for item in self._plan.encoded} & self._unused.keys()

    @property
    def _room(self) -> int:
        """Features that can be kept besides those that must stay."""
        used = self._num_used + sum(self._sizes[digest] for digest in self._fresh)
        return self._capacity - used - (0 if self._part is None else self._part.item.num_features)

    def is_awaited_by(self, request: Request) -> bool:
        """Whether the last row of a request has ended before an item that next plans encode."""
        parts = self._wanted.values() if self._part is None else (self._part, *self._wanted.values())
        return any(part.request is request for part in parts)

    def start(self, within: TowerTime | None) -> None:
        """Begin a plan.

        `within` is the time that it has for the tower next to decodes: items are encoded here only, and at least one
        step of the first one. None: the part is completed, and rows encode the items that they reach.
        """
        self._is_ahead, left = within is not None, 0.0 if within is None else within.seconds
        wanted, self._wanted = self._wanted if self._is_ahead else {}, {}
        if self._part is not None:
            wanted = {self._part.item.digest: self._part, **wanted}
        for digest, part in wanted.items():
            if digest in self._sizes or part.request not in self._spans:
                continue
            if not part.num_steps and part.item.num_features > self._room:
                self._is_full = True
                break
            needs_slot = not part.num_steps and part.request.slot is None and self._is_changed(part.item, part.request)
            if needs_slot and not self._adapters.can_start(part.request):
                continue  # the request leaves the queue in its turn
            steps = 0
            for work, count in self._steps_left(part):
                cost = 0.0 if within is None else within.cost(work)
                least = 0 if steps or self.has_planned else 1
                affordable = max(least, min(count, int(max(0.0, left) / cost))) if cost else count
                steps, left = steps + affordable, left - affordable * cost if affordable else left
                if affordable < count:
                    break
            if not steps:
                break
            self._encode(part, steps)
            if self._part is not None:
                break
            self._unused[digest] = None
            self._unread.add(digest)

    def limit_chunk(self, request: Request, count: int, most: int) -> int:
        """Return how many of a request's next `count` tokens a row of the current plan can have.

        A row that may not end inside a run ends after it, if `most` tokens are enough for that, even if they are more
        than `count`.
        """
        start = request.num_computed_tokens
        end = start + count
        if self.needs_whole_runs:
            end = self._end_of_run(request, start, end, start + most)
            self.lacks_tokens |= end <= start
        room, planned = self._room, self._num_planned
        seen = self._fresh
        for span in (spans := self._spans_in(request, start, end)):
            digest, size = span.item.digest, span.num_features
            if digest in self._num_holders or digest in seen:
                continue
            is_kept = digest in self._sizes
            if self._is_ahead and not is_kept:
                part = None if self._part is None else self._part.item.digest
                for each in (span, *spans):
                    if each.item.digest not in self._sizes and each.item.digest != part:
                        self._wanted.setdefault(each.item.digest, UnencodedItem(request, each.item, 0))
                return self._count_before(request, start, span)
            if self._is_full or size > room or (not is_kept and planned and planned + size > self._max_features):
                count = self._count_before(request, start, span)
                self._is_full |= size > room and not count
                return count
            room -= size
            planned += 0 if is_kept else size
            seen.add(digest)
        return end - start

    def _end_of_run(self, request: Request, start: int, end: int, limit: int) -> int:
        """Return where a row from `start` ends that should end at `end`, so that it does not end inside a run."""
        begin = stop = 0
        if self._joins_prompt:
            stop = request.num_prompt_tokens
        else:
            for span in self._spans_in(request, end - 1, end):
                runs, offset = span.item.runs, span.item.offset
                run = runs[bisect_right(runs, end - 1 - offset, key=lambda run: run.start) - 1]
                begin, stop = offset + run.start, offset + run.start + run.length
        if end >= stop:
            return end
        return stop if stop <= limit else max(start, begin)

    def _count_before(self, request: Request, start: int, span: MediaSpan) -> int:
        """Return how many tokens a row from `start` has that ends before an item."""
        end = max(start, span.start)
        if self.needs_whole_runs and end > start:
            end = self._end_of_run(request, start, end, end)
        return end - start

    def hold(self, request: Request, count: int) -> None:
        """Hold the items that the last `count` of a request's computed tokens read, as `limit_chunk` allows, and encode
        those that the workers do not have."""
        end = request.num_computed_tokens
        if not (spans := [*self._spans_in(request, end - count, end)]):
            return
        self._rows.append(request)
        held = self._held.setdefault(request, {})
        spans.sort(key=lambda span: span.item.digest not in self._sizes)  # those that are kept are not dropped then
        for span in spans:
            digest = span.item.digest
            if digest in held:
                continue
            held[digest] = None
            self._stats.encoder_cache_queries += 1
            if digest not in self._sizes:
                self._encode(UnencodedItem(request, span.item, 0), self._num_steps(span.item))
            elif digest in self._unread:
                self._unread.remove(digest)
            else:
                self._stats.encoder_cache_hits += 1
            if digest in self._unused:
                del self._unused[digest]
            if digest not in self._num_holders:
                self._num_used += span.num_features
            self._num_holders[digest] = self._num_holders.get(digest, 0) + 1

    def _steps(self, item: MediaItem) -> Sequence[tuple[TowerWork, int]]:
        """See `TowerSpec.steps`; one without work if the item has features."""
        if item.digest != self._last_steps[0]:
            assert self._tower is not None
            steps = [*self._tower.steps(item, self._device)] if item.needs_tower else [(NO_WORK, 1)]
            self._last_steps = item.digest, steps
        return self._last_steps[1]

    def _steps_left(self, part: UnencodedItem) -> Iterator[tuple[TowerWork, int]]:
        """The steps that have not run."""
        done = part.num_steps
        for work, count in self._steps(part.item):
            if done < count:
                yield work, count - done
            done = max(0, done - count)

    def _num_steps(self, item: MediaItem) -> int:
        return sum(count for _, count in self._steps(item))

    def _encode(self, part: UnencodedItem, steps: int) -> None:
        """Run `steps` for an item in the current plan. The first ones drop the least recently used items for it; the
        last ones complete it, and otherwise it becomes the part. Its adapter, if it changes the tower, is used as by a
        running request until the plan is complete: workers change adapters before they encode."""
        item, num_run, left = part.item, part.num_steps + steps, steps
        is_changed = self._is_changed(item, part.request)
        assert self._tower is not None
        rank = self._tower.rank_of(item, len(self._work))
        for work, count in self._steps_left(part):
            self._work[rank] = self._work[rank].plus(work, min(left, count))
            left = max(0, left - count)
        if not part.num_steps:
            assert self._part is None
            kept = sum(self._sizes.values())
            while kept + item.num_features > self._capacity:
                digest, _ = self._unused.popitem(last=False)
                self._unread.discard(digest)
                kept -= self._sizes.pop(digest)
                self._plan.freed.append(digest)
            self._stats.encoded_features += item.num_features
            if is_changed:
                self._adapters.start(part.request)
                self._plan.adapter_slots[item.digest] = self._adapters.slot_of(part.request)
        self._plan.encoded.append(msgspec.structs.replace(item, data=None) if part.num_steps else item)
        self._num_planned += item.num_features
        self._encoded.setdefault(self._in_flight.next_step, {})[item.digest] = part.request
        if num_run == self._num_steps(item):
            self._sizes[item.digest], self._part = item.num_features, None
            if is_changed:
                self._completed.append(part.request)
        else:
            self._plan.num_steps, self._part = steps, part._replace(num_steps=num_run)

    def _drop_part(self) -> None:
        assert self._part is not None
        self._plan.freed.append(self._part.item.digest)
        if self.user is not None:
            self._adapters.stop(self.user)
        self._part = None

    def take_plan(self) -> MediaPlan | None:
        """Return the changes of the current plan, which is complete; None if there are none."""
        for request in self._rows:
            end = request.num_computed_tokens
            self.release(
                request, [span.item.digest for span in self._spans_in(request, end - 1, end) if end < span.end]
            )
        plan, self._plan, self._is_full, self.lacks_tokens = self._plan, MediaPlan(), False, False
        self._num_planned, self._work = 0, [NO_WORK] * len(self._work)
        for request in self._completed:
            self._adapters.stop(request)
        self._completed.clear()
        self._rows.clear()
        return plan if plan.encoded or plan.freed else None

    # --- results ----------------------------------------------------------------------------------------------

    def on_finished(self, step: int) -> None:
        """Record that the workers have run a step."""
        self._encoded.pop(step, None)

    def encoded_for(self, step: int) -> Iterable[Request]:
        """The requests for which a step in flight encodes items."""
        return self._encoded.get(step, {}).values()

    def on_failed(self, step: int) -> None:
        """Forget what this step and those behind it encode: whatever the workers have of it, they drop.

        The requests that hold it all have rows in these steps, and have been released.
        """
        for later in [each for each in self._encoded if each >= step]:
            for digest in self._encoded.pop(later):
                if self._part is not None and self._part.item.digest == digest:
                    self._drop_part()
                elif self._sizes.pop(digest, None) is not None:
                    del self._unused[digest]
                    self._unread.discard(digest)
                    self._plan.freed.append(digest)

    def requests_with(self, digests: Collection[bytes]) -> list[Request]:
        """The unfinished requests that have any of these items."""
        return [request for request, spans in self._spans.items() if any(span.item.digest in digests for span in spans)]

    def drop(self, digests: Iterable[bytes]) -> None:
        """Drop items that the workers could not encode, and that no request has."""
        for digest in digests:
            if self._sizes.pop(digest, None) is not None:
                del self._unused[digest]
                self._unread.discard(digest)
                self._plan.freed.append(digest)

    def check_integrity(self, running: Sequence[Request]) -> None:
        """Assert the invariants between two plans."""
        holders: dict[bytes, int] = {}
        for request, held in self._held.items():
            assert request in running
            for digest in held:
                holders[digest] = holders.get(digest, 0) + 1
        assert holders == self._num_holders
        assert self._sizes.keys() == holders.keys() | self._unused.keys()
        assert not holders.keys() & self._unused.keys()
        assert self._num_used == sum(self._sizes[digest] for digest in holders)
        assert self._unread <= self._unused.keys()
        part = 0
        if self._part is not None:
            assert self._part.request in self._spans
            assert self._part.item.digest not in self._sizes
            assert 0 < self._part.num_steps < self._num_steps(self._part.item)
            part = self._part.item.num_features
        assert sum(self._sizes.values()) + part <= self._capacity
        for request in running:
            end = request.num_computed_tokens
            begun = {span.item.digest for span in self._spans_in(request, end - 1, end) if end < span.end}
            assert self._held.get(request, {}).keys() == begun
        assert not self._rows
        assert not self._completed
        assert not self._num_planned
