"""The scheduler's state of one request."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from quire.engine.protocol.engine_core import EngineCoreOutput, EngineCoreRequest, FinishReason, Phase
from quire.engine.protocol.logprobs import TokenLogprobs
from quire.engine.scheduler.event_hashes import EventBlock
from quire.engine.scheduler.grammar import Grammar
from quire.engine.scheduler.ngram import TokenLookup


@dataclass(slots=True, eq=False)
class ShareQueue:
    """The requests of one share (`EngineCoreRequest.share`), and the service that it has received."""

    key: bytes
    weight: float
    num_requests: int = 0
    """Unfinished requests."""
    num_waiting: int = 0
    waiting: list[tuple[tuple[int, int], Request]] = field(default_factory=list)
    """Heap by `Request.order`; also contains requests that ended while waiting."""
    num_running: int = 0
    load: float = 0.0
    """`num_running` divided by the weight."""
    served: float = 0.0
    """Virtual time: tokens of scheduled prompts divided by the weight, without credit for times without prompts."""

    def count_running(self, change: int) -> None:
        """Count requests that start to run, or stop."""
        self.num_running += change
        self.load = self.num_running / self.weight


@dataclass(slots=True, eq=False)
class Request:
    """The known tokens of a request, and how many of them are computed.

    `num_computed_tokens` advances when a plan is made, until it reaches the number of known tokens. If the workers keep
    the tokens that they sample, it can exceed that number: the token in flight is scheduled before it is known here.
    """

    core_request: EngineCoreRequest
    client: int
    request_id: str
    order: tuple[int, int]
    """Sort key: (priority, arrival number)."""
    token_ids: list[int]
    max_tokens: int
    """Length of prompt and output together at which the request finishes."""
    stops: frozenset[int]
    """Tokens that finish the request."""
    share: ShareQueue
    is_plain: bool = False
    """Outputs are plain tokens: an output has been sent since the last preemption, and there are no log-probabilities
    and no grammar.
    """
    num_computed_tokens: int = 0
    decode_until: int = 0
    """A decode needs no new block while `num_computed_tokens` is less than this: the end of its last block, or the last
    token that it may compute."""
    last_step: int = -1
    """The last step with a row of this request."""
    slot: int | None = None
    """Row in the workers' request state; None while waiting."""
    block_ids: list[int] = field(default_factory=list)
    """Blocks of all groups, in the order described in `quire.engine.scheduler.kv_cache_manager`. `hashes` has the same
    order; the first `num_published` of them are in the prefix cache."""
    hashes: list[bytes] = field(default_factory=list)
    num_published: int = 0
    event_blocks: list[EventBlock] = field(default_factory=list)
    """With KV events: its first blocks, as routers know them."""
    num_offered: int = 0
    """Links of the chain whose blocks are offered to the KV store, or were when it started."""
    num_loaded_tokens: tuple[int, int, int] = (0, 0, 0)
    """Of `num_cached_tokens`: see `EngineCoreOutput`."""
    num_cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache when it was first admitted."""
    started_at: float = 0.0
    """When it was first admitted (`time.monotonic`)."""
    preempted_after: list[float] = field(default_factory=list)
    """`running_seconds` at each preemption."""
    num_scored_tokens: int = 0
    """With prompt log-probabilities: prompt tokens after the first whose log-probabilities have arrived."""
    finish_reason: FinishReason | None = None
    grammar: Grammar | None = None
    """Structured output only: the grammar's state after all of `token_ids`."""
    mask: bytes = b""
    """The tokens that the grammar allows next."""
    grammar_seconds: float = 0.0
    """Time that the grammar took for the last token."""
    unsent_to_workers: list[int] = field(default_factory=list)
    """The last tokens of `token_ids`, which the workers receive with the next row."""
    num_accepted: int = 0
    """Drafts of its last row that count, which the workers learn with the next row."""
    num_drafter_tokens: int = 0
    """With a draft model: the tokens that it has computed once all plans in flight have run, at most."""
    lookup: TokenLookup | None = None
    """With n-gram speculation: finds earlier occurrences of the last tokens."""
    unsent_to_client: list[int] = field(default_factory=list)
    """Tokens forced by the grammar before the first sampled one, which the server receives with the next output."""

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.core_request.prompt_token_ids)

    @property
    def phase(self) -> Phase:
        """What happens to it."""
        if self.slot is None:
            return "preempted" if self.preempted_after else "waiting"
        return "prefill" if self.num_computed_tokens < len(self.token_ids) - 1 else "decode"

    @property
    def running_seconds(self) -> float:
        """Time since it was first admitted; 0 if it has not been."""
        return time.monotonic() - self.started_at if self.num_cached_tokens is not None else 0.0

    @property
    def num_reusable_tokens(self) -> int:
        """Tokens that may come from the prefix cache: not the last one, and none whose logits are needed."""
        last = len(self.token_ids) - 1
        if self.core_request.params.prompt_logprobs is not None and self.num_scored_tokens < self.num_prompt_tokens - 1:
            return min(last, self.num_scored_tokens)
        return last

    @property
    def num_pending_tokens(self) -> int:
        """Known tokens that are not scheduled yet."""
        return max(0, len(self.token_ids) - self.num_computed_tokens)

    @property
    def media_end(self) -> int:
        """The token behind its last image or video; 0 if it has none."""
        return self.core_request.media[-1].end if self.core_request.media else 0

    @property
    def is_resumed(self) -> bool:
        """Whether another replica began it, which has counted its prompt."""
        return bool(self.core_request.output_token_ids)

    @property
    def num_pending_texts(self) -> int:
        """Those of its pending tokens that do not wait for a tower: behind all images and videos."""
        return max(0, len(self.token_ids) - max(self.num_computed_tokens, self.media_end))

    def output(
        self,
        token_ids: list[int],
        logprobs: list[TokenLogprobs] | None = None,
        finish_reason: FinishReason | None = None,
        stop_token_id: int | None = None,
    ) -> EngineCoreOutput:
        """Return an output with these tokens, and with how far the request is."""
        return EngineCoreOutput(
            self.request_id,
            token_ids,
            logprobs,
            finish_reason,
            stop_token_id,
            num_cached_tokens=self.num_cached_tokens or 0,
            num_loaded_tokens=self.num_loaded_tokens,
            running_seconds=self.running_seconds,
            preempted_after=self.preempted_after,
        )
