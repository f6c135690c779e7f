"""The messages between API processes and engine cores: requests, outputs, health checks. No torch."""

from __future__ import annotations

from typing import Literal

import msgspec

from quire.engine.protocol.adapters import AdapterRef
from quire.engine.protocol.kv_events import FollowKVEvents, GetKVEvents, KVEventsNews, KVEventsState
from quire.engine.protocol.kv_store import KVStoreStats
from quire.engine.protocol.logprobs import PromptLogprobs, TokenLogprobs
from quire.engine.protocol.media import MediaItem
from quire.engine.protocol.profile import (
    ClockPing,
    ClockReply,
    ProfileReply,
    StartProfile,
    StopProfile,
    TracePiece,
)
from quire.engine.protocol.sampling_params import SamplingParams
from quire.engine.protocol.stats import EngineStats, ExpertLoad, LogRecord, RankStats

FinishReason = Literal["stop", "length", "abort", "error"]


class EngineCoreRequest(msgspec.Struct, tag=True, array_like=True):
    """A request. The engine answers with one or more `EngineCoreOutput`s, the last one with a finish reason.

    An embedding model answers with exactly one, and ignores the sampling parameters.
    """

    client: int
    """Number of the API process that gets the outputs."""
    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: bytes = b""
    """Requests share cached prefixes only with requests of the same salt."""
    output_token_ids: list[int] = []
    """Output tokens sent by another replica before it died: generation continues after them without sending them."""
    share: bytes = b""
    """Requests of different shares are scheduled fairly. Without fair sharing, all are of one share."""
    weight: float = 1.0
    """Weight of the share; the newest request's counts."""
    second_segment: int = 0
    """Encoders with token types: index of the first token of a pair's second text; 0: there is one text."""
    label: str = ""
    """Name of the API key, for lists of requests."""
    arrived: float = 0.0
    """Time of arrival at the API process, on the monotonic clock of its host, for lists of requests."""
    media: list[MediaItem] = []
    """Images and videos, by offset."""
    adapter: AdapterRef | None = None
    """None: the base model answers."""
    adapter_start: int = 0
    """The first token that the adapter changes: until there, everything is as without it."""
    adapter_name: str = ""
    """What the request calls the adapter, for KV events."""
    hands_over: bool = False
    """Leave the replica after the first token (`EngineCoreOutput.is_handed_over`), unless that is the last one anyway:
    another replica continues, and loads the KV from the KV store of its host, or of this one."""
    is_expected: bool = False
    """Do not run it yet: another replica computes its prompt. Load what the KV store gets of it (that of the host, or
    `kv_peer`), until the request comes again with the first token, or is aborted."""
    kv_peer: str = ""
    """Address of the KV store of another host that has its prefix, or will have it (`LookUpKV.peer`)."""


class AbortRequests(msgspec.Struct, tag=True, array_like=True):
    """Abort requests: the client disconnected, or a stop string was found. Unknown ids are ignored."""

    request_ids: list[str]


class Probe(msgspec.Struct, tag=True, array_like=True):
    """Health check of the loop and every rank. Answered with `ProbeReply` when every rank has completed a step."""

    client: int
    call_id: int


class ListRequests(msgspec.Struct, tag=True, array_like=True):
    """Ask for the oldest `limit` of the unfinished requests whose ids contain `part`. Answered with `RequestList`
    between two steps.
    """

    client: int
    call_id: int
    limit: int
    part: str = ""
    label: str | None = None
    """None: those of all API keys."""

    def selects(self, request: EngineCoreRequest) -> bool:
        """Whether it asks for this request, if it is among the oldest."""
        return self.label in (None, request.label) and self.part in request.request_id


class PrepareAdapter(msgspec.Struct, tag=True, array_like=True):
    """Read an adapter into the memory of all ranks. Answered with `PreparedAdapter` when all have it, or one cannot."""

    client: int
    call_id: int
    adapter: AdapterRef
    pins: bool = False
    """Also pin it, as the last `PinAdapters` of this API process says."""


class PinAdapters(msgspec.Struct, tag=True, array_like=True):
    """The only adapters of this API process that stay in the memory of all ranks once they are read, as far as it has
    room: those that it knows as pinned, and those that it loads to be pinned. Those of other API processes stay, too:
    each learns of a change at another time."""

    client: int
    digests: list[bytes]


class ResetPrefixCache(msgspec.Struct, tag=True, array_like=True):
    """Forget the prefix cache: later requests find nothing that it has now. Answered with `PrefixCacheReset`."""

    client: int
    call_id: int
    clears_store: bool = False
    """Whether the KV store of the replica's host forgets everything, too, in memory and on disk."""


class Join(msgspec.Struct, tag=True, array_like=True):
    """An API process has started: abort the requests of its predecessor."""

    client: int


class StartWave(msgspec.Struct, tag=True, array_like=True):
    """Sent by a core to the other replicas that share its experts: start wave number `wave`."""

    wave: int


class ReplicaFailed(msgspec.Struct, tag=True, array_like=True):
    """Sent by a core to the other replicas that share its experts: it has failed, and they cannot continue."""

    replica: int
    reason: str


ToCore = (
    EngineCoreRequest
    | AbortRequests
    | Probe
    | ListRequests
    | PrepareAdapter
    | GetKVEvents
    | FollowKVEvents
    | ResetPrefixCache
    | PinAdapters
    | Join
    | StartWave
    | ReplicaFailed
    | StartProfile
    | StopProfile
    | ClockPing
)


class EngineCoreOutput(msgspec.Struct, array_like=True):
    """New tokens of a request. Exactly one output of each request has a `finish_reason`: the last."""

    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    """One for each of `token_ids`, if requested."""
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The stop token (or end of sequence) that ended the output; it is the last of `token_ids`."""
    error: str | None = None
    num_cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache, or were loaded into it; set from the first output on."""
    prompt_logprobs: PromptLogprobs | None = None
    """For the prompt tokens that follow the ones already sent; all are sent before the first of `token_ids`."""
    vector: bytes | None = None
    """Embedding models: float32, before the final normalization."""
    running_seconds: float = 0.0
    """Time since the request was first scheduled by its present replica."""
    preempted_after: list[float] = []
    """`running_seconds` at each of its preemptions there."""
    num_accepted_tokens: int = 0
    """Accepted draft tokens of the row that gave this output."""
    num_rejected_tokens: int = 0
    is_invalid: bool = False
    """With `error`: the request itself is its cause, such as a grammar that allows no next token."""
    is_unavailable: bool = False
    """With `error`: its cause passes, so the request may be sent again."""
    num_loaded_tokens: tuple[int, int, int] = (0, 0, 0)
    """Of `num_cached_tokens`: those whose KV was loaded for it, from memory, from disk and from other hosts."""
    is_handed_over: bool = False
    """The last output of a request that `hands_over` from this replica, without a finish reason."""


class EngineCoreOutputs(msgspec.Struct, tag=True, array_like=True):
    """The outputs of a step for one API process: one message for all its requests. Without any, it is a pulse: the
    replica makes progress.

    A request is either in `outputs` or, if its output is one token and nothing else, in the two columns.
    """

    outputs: list[EngineCoreOutput] = []
    """First and last outputs, and outputs with log-probabilities."""
    stats: EngineStats | None = None
    """None: unchanged."""
    request_ids: list[str] = []
    token_ids: list[int] = []
    """One new token for each of `request_ids`."""
    replica: int = 0
    expert_load: ExpertLoad | None = None
    """None: unchanged or not available."""
    rank_stats: list[RankStats] | None = None
    """Stats of the replica's ranks, in order. None: unchanged."""
    warnings: list[LogRecord] = []
    """New warnings and errors of the replica's core, nodes and ranks."""
    incarnation: int = 0
    """The replica's incarnation: outputs of an earlier start may arrive late, and are dropped."""


class KVStoreState(msgspec.Struct, tag=True, array_like=True):
    """What the KV store of a replica's host says of itself. It does not come from the replica's loop, which may be in a
    long step."""

    stats: KVStoreStats
    replica: int = 0
    incarnation: int = 0


class ProbeReply(msgspec.Struct, tag=True, array_like=True):
    """The answer to a `Probe`."""

    call_id: int
    replica: int = 0
    incarnation: int = 0


Phase = Literal["waiting", "prefill", "decode", "preempted"]


class RequestInfo(msgspec.Struct, array_like=True):
    """A request that has not finished."""

    request_id: str
    label: str
    arrived: float
    phase: Phase
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache."""
    num_output_tokens: int = 0
    max_tokens: int | None = None
    """The longest output; None: it is not known yet."""
    adapter: bytes = b""
    """Its adapter's digest; empty: it has none."""


class RequestList(msgspec.Struct, tag=True, array_like=True):
    """The answer to `ListRequests`."""

    call_id: int
    requests: list[RequestInfo]
    """The oldest first."""
    total: int
    """Number of all requests that were asked for."""
    replica: int = 0
    incarnation: int = 0


class PreparedAdapter(msgspec.Struct, tag=True, array_like=True):
    """The answer to `PrepareAdapter`."""

    call_id: int
    error: str = ""
    """Why the adapter cannot be used; empty: it can."""
    is_invalid: bool = True
    """See `AdapterPrepared`."""
    replica: int = 0
    incarnation: int = 0


class PrefixCacheReset(msgspec.Struct, tag=True, array_like=True):
    """The answer to `ResetPrefixCache`, of which other API processes hear, too."""

    call_id: int
    """-1: another API process has called."""
    error: str = ""
    """Why the KV store has not forgotten everything; empty: it has, or was not asked to."""
    replica: int = 0
    incarnation: int = 0


ToServer = (
    EngineCoreOutputs
    | ProbeReply
    | RequestList
    | PreparedAdapter
    | KVEventsState
    | KVEventsNews
    | KVStoreState
    | PrefixCacheReset
    | ProfileReply
    | ClockReply
    | TracePiece
)
