"""A stand-in for the workers that checks every plan and costs nothing.

It keeps the tokens of each slot and, for each KV block, which token of which history was written where, and for which
group of layers. So a wrong block table, a stale prefix hit, a block that was given back too early or a diff that was
lost shows as an assertion, not as a wrong answer later.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from quire.engine.architecture.media_spec import TowerSpec
from quire.engine.config.engine_config import KVCacheGroup
from quire.engine.protocol.adapters import NO_SLOT, AdapterPlan, AdapterRef
from quire.engine.protocol.logprobs import PromptLogprobs
from quire.engine.protocol.media import MediaItem
from quire.engine.protocol.runner_output import ModelRunnerOutput
from quire.engine.protocol.scheduler_output import CachedRequestData, MediaPlan, SchedulerOutput
from tests.fakes.outputs import prompt_logprobs

VOCAB = 97
FAILURE = "out of memory"
UNPLACED = "cannot be placed"
DAMAGED = "cannot be encoded"


def next_token(tokens: list[int]) -> int:
    """The model: a fixed function of everything before."""
    value = 7
    for token in tokens:
        value = (value * 31 + token + 1) % 1_000_003
    return value % VOCAB


def with_features(prompt: Sequence[int], media: Sequence[MediaItem]) -> list[int]:
    """The prompt as the model sees it: each feature is a token of its own."""
    tokens = list(prompt)
    for item in media:
        places = [item.offset + place for run in item.runs for place in range(run.start, run.start + run.length)]
        for number, place in enumerate(places):
            tokens[place] = VOCAB + int.from_bytes(item.digest[:3]) + number
    return tokens


def with_adapter(prompt: Sequence[int], adapter: bytes, start: int) -> list[int]:
    """The prompt as the model sees it: the first token that the adapter changes is another one, on which all later ones
    depend."""
    tokens = list(prompt)
    tokens[start] += VOCAB * (1 + int.from_bytes(adapter[:4]))
    return tokens


@dataclass
class Row:
    tokens: list[int]
    blocks: list[int]
    """The blocks of all groups, in the order of `quire.engine.scheduler.kv_cache_manager`."""
    computed: int
    score_from: int = 0
    score_until: int = 0
    """Positions whose logits score the next prompt token."""
    drafts: list[int] = field(default_factory=list)
    """The drafts of the step that runs."""
    unknown: list[int] = field(default_factory=list)
    """The tokens that the last step has sampled after drafts, which only a chained row may use before a plan contains
    them."""
    made: list[int] = field(default_factory=list)
    """The drafts that were made at the end of the last step."""
    last_step: int = -1
    media: Sequence[MediaItem] = ()
    adapter: tuple[int, bytes] | None = None
    """The adapter's slot and digest."""
    is_unplaced: bool = False
    """The adapter is not in its slot, so that nothing of this row is valid."""
    joined: tuple[int, ...] = ()
    """The prompt, whose tokens attend to each other in both directions; empty: they do not."""
    histories: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    """By group of layers: the number (see `FakeModel.numbers`) of each computed token."""


@dataclass
class FakeModel:
    """Executes plans in order; `block_size` and `num_blocks` as the scheduler believes them to be."""

    block_size: int
    num_blocks: int
    max_tokens: int
    keeps: bool = True
    """Whether it keeps its sampled tokens, as a single stage does."""
    pools: bool = False
    """It embeds: the vector of a prompt is its tokens."""
    groups: Sequence[KVCacheGroup] = (KVCacheGroup(),)
    blocks_per_page: int = 1
    max_features: int = 0
    """Features of images that it may keep."""
    tower: TowerSpec | None = None
    computed: dict[int, float] = field(default_factory=dict)
    """By step: the features that it computed; of items that it did not complete, the same share as of its steps."""
    is_bidirectional: bool = False
    """Whether the tokens of a run attend to each other in both directions."""
    joins_prompt: bool = False
    """Whether those of a prompt with items do."""
    prompts: dict[tuple[int, ...], int] = field(default_factory=dict)
    """The numbers of these prompts, on each of which all its KV depends."""
    damaged: set[bytes] = field(default_factory=set)
    """Digests of the items that it cannot encode."""
    features: dict[bytes, int] = field(default_factory=dict)
    """By digest: how many features of an item it keeps."""
    parts: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    """By digest: how many features an item has whose first steps have run, and the number of these."""
    adapters: dict[bytes, AdapterRef] = field(default_factory=dict)
    """The adapters that it reads, or has in the host's memory."""
    asked: list[AdapterRef] = field(default_factory=list)
    """All that it has been asked to read, for the test to answer for."""
    adapter_slots: dict[int, bytes] = field(default_factory=dict)
    """The adapters on the device."""
    has_room: Callable[[bytes], bool] = lambda digest: True
    """Whether there is memory on the device for an adapter."""
    tower_adapters: set[bytes] = field(default_factory=set)
    """Digests of the adapters that change the tower."""
    encoded_with: dict[bytes, bytes] = field(default_factory=dict)
    """By the digest of an item: of the adapter that changes its features."""
    unencoded: set[bytes] = field(default_factory=set)
    """Digests of the items whose adapter was not there."""
    rows: dict[int, Row] = field(default_factory=dict)
    numbers: dict[tuple[int, int], int] = field(default_factory=dict)
    """(number of the token before, or of the group for the first; token) → number: it stands for all tokens so far."""
    kv: list[list[int | None]] = field(init=False)
    """By block and offset: the number of the token whose KV lies there."""
    states: dict[int, int] = field(default_factory=dict)
    """By page: the number of the last token that the state in it includes."""
    plans: list[SchedulerOutput] = field(default_factory=list)
    fails: Callable[[SchedulerOutput], bool] = lambda plan: False
    """Whether there is no memory for a step; the steps after it are skipped until a plan says that the core knows."""
    is_skipping: bool = False
    guess: Callable[[list[int]], int] = next_token
    """The drafter's next token, where a plan asks for drafts."""
    drafts_fit: Callable[[SchedulerOutput], bool] = lambda plan: True
    """Whether there is memory for making drafts at the end of a step."""

    def __post_init__(self) -> None:
        self.kv = [[None] * self.block_size for _ in range(self.num_blocks)]

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        self.plans.append(plan)
        assert plan.num_tokens <= self.max_tokens
        unplaced = self._apply(plan)
        assert self.is_skipping or not plan.clears_failure
        self.is_skipping = self.is_skipping and not plan.clears_failure
        failures = dict[bytes, str]()
        if not self.is_skipping and plan.media is not None:
            self.computed[plan.step] = self._encode(plan.media, failures)  # a step that fails may have got so far
        if not self.is_skipping and self.fails(plan):
            self.is_skipping = True
        if self.is_skipping:
            return ModelRunnerOutput(plan.step, [], failure=FAILURE, adapter_failures=unplaced)
        result = self._run(plan)
        result.encoding_failures, result.adapter_failures = failures, unplaced
        return result

    def _apply(self, plan: SchedulerOutput) -> dict[bytes, str]:
        """Returns the adapters that cannot be placed."""
        for slot in plan.freed_slots:
            del self.rows[slot]
        unplaced = {} if plan.adapters is None else self._change_adapters(plan.adapters)
        for new in plan.new:
            assert new.slot not in self.rows
            assert all(item.data is None for item in new.media)
            tokens = with_features(new.token_ids, [item for item in new.media if item.digest not in self.damaged])
            row = Row(tokens, list(new.block_ids), new.num_computed_tokens, media=new.media)
            if new.adapter_slot != NO_SLOT and new.adapter_slot in self.adapter_slots:
                row.adapter = new.adapter_slot, self.adapter_slots[new.adapter_slot]
                row.tokens = with_adapter(tokens, row.adapter[1], new.adapter_start)
            row.is_unplaced = new.adapter_slot != NO_SLOT and row.adapter is None
            if self.joins_prompt and new.media:
                row.joined = tuple(tokens[: new.num_prompt_tokens])
            if new.params.prompt_logprobs is not None:
                assert min(new.num_computed_tokens, new.num_prompt_tokens - 1) <= new.num_scored_tokens
                row.score_from, row.score_until = new.num_scored_tokens, new.num_prompt_tokens - 1
            self.rows[new.slot] = row
        for digest in () if plan.media is None else plan.media.freed:
            self.features.pop(digest, None)
            self.parts.pop(digest, None)
            self.unencoded.discard(digest)
        return unplaced

    def _change_adapters(self, plan: AdapterPlan) -> dict[bytes, str]:
        for digest in plan.dropped:
            del self.adapters[digest]
        for adapter in plan.prepared:
            assert adapter.digest not in self.adapters, "it is read again"
            self.adapters[adapter.digest] = adapter
            self.asked.append(adapter)
        for slot in plan.freed:
            self.adapter_slots.pop(slot, None)
        for slot, digest in plan.assigned:
            assert slot not in self.adapter_slots
            assert digest in self.adapters, "it is not prepared"
            if self.has_room(digest):
                self.adapter_slots[slot] = digest
        return {digest: UNPLACED for slot, digest in plan.assigned if slot not in self.adapter_slots}

    def _encode(self, media: MediaPlan, failures: dict[bytes, str]) -> float:
        computed = 0.0
        for item in media.encoded:
            if item.digest in self.damaged:  # as soon as its first steps run
                if item.data is not None:
                    assert item.digest not in self.features, "it is encoded again"
                    failures[item.digest] = DAMAGED
                self.features[item.digest] = item.num_features
                continue
            if item.digest in self.unencoded:
                assert item.data is None, "it is encoded again"
                continue
            assert (item.data is None) == (item.digest in self.parts), "it is begun again, or was not begun"
            assert item.digest not in self.features, "it is encoded again"
            if (slot := media.adapter_slots.get(item.digest)) is not None:
                assert item.data is not None
                if slot not in self.adapter_slots:
                    failures[item.digest] = DAMAGED
                    self.features[item.digest] = item.num_features
                    self.unencoded.add(item.digest)
                    continue
                self.encoded_with[item.digest] = self.adapter_slots[slot]
            adapter = self.encoded_with.get(item.digest)
            assert adapter is None or adapter in self.adapter_slots.values(), "its adapter has lost its slot"
            _, done = self.parts.pop(item.digest, (0, 0))
            assert self.tower is not None
            total = self.tower.num_steps(item, "cpu")
            steps = total - done
            if media.num_steps is not None and item is media.encoded[-1]:
                assert 0 < media.num_steps < steps
                steps = media.num_steps
                self.parts[item.digest] = item.num_features, done + steps
            else:
                self.features[item.digest] = item.num_features
            computed += steps / total * item.num_features
        assert sum(self.features.values()) + sum(size for size, _ in self.parts.values()) <= self.max_features
        return computed

    def _run(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        assert len(plan.token_ids) == (0 if self.keeps else len(plan.decodes))
        scheduled = [
            CachedRequestData(slot, 1, [] if token_id is None else [token_id], [])
            for slot, token_id in zip_longest(plan.decodes, plan.token_ids)
        ]
        scheduled += [self._unchained(row, plan.step) if row.is_chained else row for row in plan.scheduled]
        for row in scheduled:  # all KV of a step is written before any row attends
            self._write(row)
        self._update_states(scheduled)
        slots = [row.slot for row in scheduled]
        assert len(set(slots)) == len(slots)
        assert plan.masks.keys() <= {scheduled.slot for scheduled in plan.scheduled}
        counts = [row.num_tokens for row in scheduled]
        scores = {
            number: scored
            for number, (slot, count) in enumerate(zip(slots, counts, strict=True))
            if len(scored := self._score(self.rows[slot], count))
        }
        for slot, count in zip(slots, counts, strict=True):
            self._read(self.rows[slot], count)
        if self.pools:
            return ModelRunnerOutput(plan.step, [-1] * len(slots), vectors=self._pool(slots))
        sampled = [self._sample(self.rows[slot], plan.masks.get(slot)) for slot in slots]
        accepted = {number: tokens[1:] for number, tokens in enumerate(sampled) if len(tokens) > 1}
        result = ModelRunnerOutput(plan.step, [tokens[0] for tokens in sampled], [], scores, accepted)
        for number, (slot, tokens) in enumerate(zip(slots, sampled, strict=True)):
            state = self.rows[slot]
            state.last_step, state.made, state.unknown = plan.step, [], tokens if state.drafts else []
            if plan.num_drafts and tokens[0] >= 0 and slot not in plan.masks and self.drafts_fit(plan):
                result.draft_token_ids[number] = state.made = self._draft(state, tokens, plan.num_drafts)
        return result

    def _unchained(self, chained: CachedRequestData, step: int) -> CachedRequestData:
        """The row as it would be if the plan contained the tokens that it continues from."""
        row = self.rows[chained.slot]
        assert row.last_step == step - 1, "the plan before has no row of this slot"
        assert (chained.new_token_ids, chained.draft_token_ids, chained.num_accepted) == ([], [], 0)
        drafts, accepted = row.made[: chained.num_tokens - 1], max(0, len(row.unknown) - 1)
        return CachedRequestData(
            chained.slot, 1 + len(drafts), row.unknown, chained.new_block_ids, drafts, accepted, is_chained=True
        )

    def _draft(self, row: Row, sampled: list[int], most: int) -> list[int]:
        """Make as many drafts as there are slots for; the previous contents of these slots are lost."""
        tokens = row.tokens if row.tokens[row.computed :] == sampled else row.tokens + sampled
        tokens, newest = list(tokens), row.computed + len(row.drafts)
        room = len(row.blocks) // len(self.groups) * self.block_size
        count = max(0, min(most, room - newest))
        for position in range(len(tokens), len(tokens) + count - 1):
            for group in range(len(self.groups)):
                self.kv[self._block(row, position // self.block_size, group)][position % self.block_size] = None
        for _ in range(count):
            tokens.append(self.guess(tokens))
        return tokens[len(tokens) - count :]

    def _pool(self, slots: list[int]) -> dict[int, bytes]:
        rows = [self.rows[slot] for slot in slots]
        ended = (number for number, row in enumerate(rows) if row.computed == len(row.tokens))
        return {number: array("f", rows[number].tokens).tobytes() for number in ended}

    def _write(self, scheduled: CachedRequestData) -> None:
        row = self.rows[scheduled.slot]
        assert row.adapter is None or self.adapter_slots[row.adapter[0]] == row.adapter[1], "another adapter"
        row.computed += scheduled.num_accepted
        row.tokens += scheduled.new_token_ids
        row.drafts = scheduled.draft_token_ids
        row.blocks += scheduled.new_block_ids
        assert scheduled.num_tokens > 0
        end = row.computed + scheduled.num_tokens
        assert end == len(row.tokens) + len(row.drafts) or (end < len(row.tokens) and not row.drafts)
        assert row.computed >= len(row.joined) or end >= len(row.joined), "a row ends inside a prompt that is one run"
        for item in row.media:
            for run in item.runs:
                start, stop = item.offset + run.start, item.offset + run.start + run.length
                if start < end and row.computed < stop:
                    assert item.digest in self.features, "the features are missing"
                    adapter = None if row.adapter is None else row.adapter[1]
                    expected = adapter if adapter in self.tower_adapters else None
                    is_valid = not row.is_unplaced and item.digest not in self.damaged | self.unencoded
                    assert not is_valid or self.encoded_with.get(item.digest) == expected, "another adapter's features"
                    assert end >= stop or not self.is_bidirectional, "a row ends inside a run"
        if not self.num_blocks:
            assert row.computed == 0
            assert end == len(row.tokens), "without KV a prompt is one row"
            assert not row.blocks
        for group, kind in enumerate(self.groups if self.num_blocks else ()):
            history = row.histories[group]
            for token in [*row.tokens, *row.drafts][len(history) : end]:
                first = -1 - group
                if row.joined:
                    first -= len(self.groups) * (1 + self.prompts.setdefault(row.joined, len(self.prompts)))
                before = history[-1] if history else first
                history.append(self.numbers.setdefault((before, token), len(self.numbers)))
            for position in range(row.computed, end) if not kind.is_state else ():
                block = self._block(row, position // self.block_size, group)
                self.states.pop(block // self.blocks_per_page, None)
                if kind.fills_pages:
                    assert block % self.blocks_per_page == 0
                    for other in range(block + 1, block + self.blocks_per_page):
                        self.kv[other] = [None] * self.block_size
                self.kv[block][position % self.block_size] = history[position]
        row.computed = end

    def _update_states(self, scheduled: list[CachedRequestData]) -> None:
        """Check the states that the rows read, and write others. Rows run in any order, groups one after another."""
        for group, kind in enumerate(self.groups if self.num_blocks else ()):
            if not kind.is_state:
                continue
            read, written = dict[int, int](), dict[int, int]()
            for each in scheduled:
                row = self.rows[each.slot]
                start, history, size = row.computed - each.num_tokens, row.histories[group], self.block_size
                end = row.computed - len(row.drafts)
                assert not row.drafts or -(-end // size) == -(-row.computed // size), "drafts begin a block"
                if start:
                    page = self._page(row, (start - 1) // size, group)
                    assert self.states[page] == history[start - 1], "another state"
                    read[page] = each.slot
                for index in range(start // size, -(-end // size)):
                    if index == (end - 1) // size or row.blocks[index * len(self.groups) + group] >= 0:
                        page = self._page(row, index, group)
                        assert written.setdefault(page, each.slot) == each.slot, "two rows write a page"
                        self.states[page] = history[min(end, (index + 1) * size) - 1]
            others = (page for page, slot in written.items() if read.get(page, slot) != slot)
            assert not [*others], "a row writes what another reads"
            for page in written:
                for block in range(page * self.blocks_per_page, (page + 1) * self.blocks_per_page):
                    self.kv[block] = [None] * self.block_size

    def _page(self, row: Row, index: int, group: int) -> int:
        block = self._block(row, index, group)
        assert block % self.blocks_per_page == 0
        return block // self.blocks_per_page

    def _read(self, row: Row, count: int) -> None:
        """Every token that the last `count` see must be theirs."""
        if row.is_unplaced:
            return
        for group, kind in enumerate(self.groups if self.num_blocks else ()):
            if kind.is_state:
                continue
            window = kind.window
            first = 0 if window is None else max(0, row.computed - count + 1 - window)
            for index in range(first // self.block_size, -(-row.computed // self.block_size)):
                start = index * self.block_size
                begin, end = max(first, start), min(row.computed, start + self.block_size)
                expected = row.histories[group][begin:end]
                assert self.kv[self._block(row, index, group)][begin - start : end - start] == expected

    def _score(self, row: Row, count: int) -> PromptLogprobs:
        """Scores: the scored token takes the place of its log-probability, and its position the place of the rank."""
        ends = range(max(row.computed - count, row.score_from), min(row.computed, row.score_until))
        return prompt_logprobs([(float(row.tokens[at + 1]), at + 1, [], []) for at in ends], 0)

    def _sample(self, row: Row, mask: bytes | None) -> list[int]:
        """The sampled token, and the tokens sampled after accepted drafts."""
        if row.computed < len(row.tokens):
            assert mask is None
            return [-1]
        if row.drafts:
            assert mask is None
            row.computed -= len(row.drafts)
            for history in row.histories.values():
                del history[row.computed :]
            sampled = [next_token(row.tokens)]
            for draft in row.drafts:
                if draft != sampled[-1]:
                    break
                sampled.append(next_token(row.tokens + sampled))
            return sampled
        token = next_token(row.tokens)
        if mask is not None:
            allowed = [id for id in range(len(mask) * 8) if mask[id // 8] >> id % 8 & 1]
            token = allowed[token % len(allowed)]
        if self.keeps:
            row.tokens.append(token)
        return [token]

    def _block(self, row: Row, index: int, group: int) -> int:
        block = row.blocks[index * len(self.groups) + group]
        assert 0 <= block < self.num_blocks
        return block
