"""The messages of workers to the engine core: the result of a step, start and failure. No torch."""

from __future__ import annotations

import msgspec

from quire.engine.protocol.logprobs import PromptLogprobs, TokenLogprobs
from quire.engine.protocol.stats import ExpertLoad

LOST_REPLICAS = "lost the connection to the other replicas"
"""A rank's reason when a collective with other replicas fails: the cause is elsewhere."""


class ModelRunnerOutput(msgspec.Struct, tag=True, array_like=True):
    """The result of a step, from the first TP rank of the last stage, one entry per row of the plan."""

    step: int
    token_ids: list[int]
    """The sampled token of each row, the first one of a row with drafts; -1 for a row that did not sample."""
    logprobs: list[TokenLogprobs | None] = []
    """Empty if no row requests them."""
    prompt_logprobs: dict[int, PromptLogprobs] = {}
    """By row number, for rows of requests with prompt log-probabilities."""
    accepted: dict[int, list[int]] = {}
    """By row number, the sampled tokens that follow the one in `token_ids`, for rows with accepted drafts."""
    accepted_logprobs: dict[int, list[TokenLogprobs | None]] = {}
    """One for each of `accepted`, for rows that request them."""
    vectors: dict[int, bytes] = {}
    """Embedding models: by row number, float32, for rows that complete their prompt. No row samples."""
    is_wave_active: bool = False
    """Replicas that share experts: whether any of them had requests when this step was scheduled."""
    expert_load: ExpertLoad | None = None
    """Expert parallelism: present in some steps only."""
    draft_token_ids: dict[int, list[int]] = {}
    """By row number, the tokens that a drafter that is a model expects after the last sampled token; see
    `SchedulerOutput.num_drafts`."""
    failure: str = ""
    """Why the step failed; its results are invalid. Steps in flight after it are skipped and report the same reason."""
    encoding_failures: dict[bytes, str] = {}
    """See `EncoderOutput`."""
    adapter_failures: dict[bytes, str] = {}
    """By digest, why an adapter that the plan assigns could not be placed, also if the step failed or was skipped. No
    result of rows with it is valid until its slot is freed, as they run without it; others are. Only a single rank
    reports this: of several, one that has no memory for an adapter ends, as it does in a step."""
    has_captured: bool = False
    """Whether a step was captured in this one (CUDA graphs, op replay), which thus took longer than such a step."""


class EncoderOutput(msgspec.Struct, tag=True, array_like=True):
    """What the first rank reports of a plan that encodes items, if the step's result comes from a later stage."""

    step: int
    failures: dict[bytes, str]
    """By digest, why an item could not be encoded. Its features are zeros until it is freed, so no result of a request
    with this item is valid; others are."""


RankOutput = ModelRunnerOutput | EncoderOutput | None
"""What a rank reports of a step; None: only that it is complete."""


class WorkerReady(msgspec.Struct, tag=True, array_like=True):
    """A rank, or all ranks of a node, have loaded the model."""

    seconds: dict[str, float]
    num_blocks: int = 0
    """KV blocks of every rank of the replica, as agreed among them; 0: as configured."""


class WorkerFailed(msgspec.Struct, tag=True, array_like=True):
    """A rank, or the ranks of a node, have failed.

    `user_error`: the user can fix the cause, such as a missing tensor; no traceback is logged. `is_certain`: the cause
    is known to be here; otherwise it may be a rank elsewhere.
    """

    reason: str
    user_error: bool = False
    is_certain: bool = False
