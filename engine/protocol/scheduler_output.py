"""The plan of a step, from the engine core to its workers: token ids and numbers only. No torch."""

from __future__ import annotations

import msgspec

from quire.engine.protocol.adapters import NO_SLOT, AdapterPlan
from quire.engine.protocol.kv_store import KVCopyPlan
from quire.engine.protocol.media import MediaItem
from quire.engine.protocol.profile import StartProfile, StopProfile
from quire.engine.protocol.sampling_params import SamplingParams

CATCH_UP_TOKENS = 256
"""Tokens of a step that a draft model may compute for rows that it is behind with."""


class NewRequestData(msgspec.Struct, array_like=True):
    """A complete request, sent when it is first scheduled, and again after a preemption."""

    slot: int
    """Row in the workers' request state, < max_num_seqs; freed by `SchedulerOutput.freed_slots`."""
    token_ids: list[int]
    """The prompt, and the tokens generated before a preemption."""
    num_prompt_tokens: int
    num_computed_tokens: int
    """Tokens whose KV is already in `block_ids`: prefix cache hits."""
    block_ids: list[int]
    """Blocks of all groups of layers for the first `block_size` tokens, then for the next; arbitrary outside windows.
    """
    params: SamplingParams
    num_scored_tokens: int = 0
    """With `params.prompt_logprobs`: prompt tokens after the first that were already scored before a preemption."""
    second_segment: int = 0
    """See `EngineCoreRequest`."""
    media: list[MediaItem] = []
    """Images and videos, by offset, without their data."""
    adapter_slot: int = NO_SLOT
    """The device slot of the request's adapter."""
    adapter_start: int = 0
    """See `EngineCoreRequest`."""


class CachedRequestData(msgspec.Struct, array_like=True):
    """A row with changes: `num_tokens` more tokens of a known request, and its changes since it was last scheduled.

    The last of a row's tokens may be drafts, which are guessed. Such a row samples after its last known token and after
    each draft. Drafts are accepted up to the first one that differs from the token sampled at its place.
    """

    slot: int
    num_tokens: int
    new_token_ids: list[int]
    """Sampled tokens that the workers do not have yet; appended to the request's tokens."""
    new_block_ids: list[int]
    """Appended to `NewRequestData.block_ids`, in the same order."""
    draft_token_ids: list[int] = []
    """The last of the row's `num_tokens` tokens."""
    num_accepted: int = 0
    """Accepted drafts of the request's last row that are not computed again: their KV is in the cache. They are among
    `new_token_ids`."""
    is_chained: bool = False
    """The row continues where the request's row of the plan before ends, which is not known yet: with the last token
    that is sampled there, and at most `num_tokens` - 1 of the drafts that are made there."""

    @property
    def num_drafts(self) -> int:
        """Number of drafts at the end of the row; their maximum number in a chained row."""
        return self.num_tokens - 1 if self.is_chained else len(self.draft_token_ids)

    @property
    def has_prompt_tokens(self) -> bool:
        """Whether the row has tokens that are neither drafts nor sampled (or forced by a grammar)."""
        return self.num_tokens > max(1, len(self.new_token_ids)) + self.num_drafts


class MediaPlan(msgspec.Struct, array_like=True):
    """Changes of the features that the first stage's ranks keep: those of `freed` are dropped, also in steps that are
    skipped after a failure, then `encoded` are computed, before the rows run. Ranks ignore what they do not have."""

    encoded: list[MediaItem] = []
    """With their data, unless an earlier plan has begun them; offsets and runs have no meaning. One whose earlier plan
    failed to encode it is ignored."""
    freed: list[bytes] = []
    """Digests, also of items that are begun."""
    num_steps: int | None = None
    """Steps of the tower (`TowerSpec.num_steps`) to run for the last of `encoded`, which a later plan completes. None:
    all that remain, as for the others."""
    adapter_slots: dict[bytes, int] = {}
    """By digest, for items of `encoded` that are begun: the device slots of adapters that change the tower, which keep
    them until their item is complete or freed. An item whose adapter could not be placed there fails."""


class SchedulerOutput(msgspec.Struct, array_like=True):
    """The plan of a step. Each rank applies `freed_slots`, then `new`, then runs the rows: `decodes`, then `scheduled`.

    A row samples when its computed tokens reach its known tokens. With a single stage the workers keep the tokens that
    they sample; these are known from then on, and plans contain them only after drafts, unless a row is chained. A plan
    without rows is a heartbeat, which every rank passes on.
    """

    step: int
    freed_slots: list[int]
    new: list[NewRequestData]
    scheduled: list[CachedRequestData]
    decodes: list[int] = []
    """Slots of one-token rows without changes: no new block, and no new token except the last one sampled."""
    token_ids: list[int] = []
    """The last token of each of `decodes`; empty if the workers keep sampled tokens."""
    masks: dict[int, bytes] = {}
    """By slot, the tokens that a row of `scheduled` may sample: bit `i % 32` of int32 `i // 32` for token `i`."""
    has_work: bool | None = None
    """Replicas that share experts: whether this one has requests. None: it steps independently."""
    clears_failure: bool = False
    """After a failed step: the workers stop skipping plans and run this one."""
    profile: StartProfile | StopProfile | None = None
    """The request to the ranks' profilers before this step."""
    num_drafts: int | None = None
    """Maximum drafts to make for each row that samples without a mask, at the end of this step, by a drafter that is a
    model; 0: it only computes its own KV of the rows' tokens; None: it does not run."""
    media: MediaPlan | None = None
    """None: nothing changes."""
    adapters: AdapterPlan | None = None
    """None: nothing changes."""
    kv_copies: KVCopyPlan | None = None
    """None: no copy begins."""

    @property
    def encodes(self) -> bool:
        """Whether the step encodes images or videos."""
        return self.media is not None and bool(self.media.encoded)

    @property
    def places_adapters(self) -> bool:
        """Whether the step copies adapters to devices."""
        return self.adapters is not None and bool(self.adapters.assigned)

    @property
    def num_rows(self) -> int:
        return len(self.decodes) + len(self.scheduled)

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(row.num_tokens for row in self.scheduled)

    @property
    def num_draft_tokens(self) -> int:
        return sum(row.num_drafts for row in self.scheduled)

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of the rows that are new or have prompt tokens."""
        new = {row.slot for row in self.new}
        return sum(row.num_tokens for row in self.scheduled if row.has_prompt_tokens or row.slot in new)
