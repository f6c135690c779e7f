"""A request as the scheduler sees it."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.engine.protocol.messages import EngineCoreRequest, FinishReason
from quire.engine.scheduler.grammar import Grammar


@dataclass(slots=True, eq=False)
class Request:
    """Known tokens, and how many of them are computed.

    The one rule: `num_computed_tokens` chases the tokens. It moves when a plan is made. Where the workers keep what
    they sample, it may pass the known tokens: the token under way is computed next without having been seen here.
    """

    submit: EngineCoreRequest
    client: int
    request_id: str
    order: tuple[int, int]
    """Who goes first: (priority, arrival)."""
    token_ids: list[int]
    max_tokens: int
    """Length of prompt and output together at which it ends."""
    stops: frozenset[int]
    """Tokens that end it."""
    is_plain: bool = False
    """Its outputs are tokens and nothing else: the first has been told, and log-probabilities are not asked for."""
    num_computed_tokens: int = 0
    decode_until: int = 0
    """As a decode it may go on with nothing new while `num_computed_tokens` is less: up to the end of its last block,
    or to the last token that it may compute."""
    last_step: int = -1
    """The last plan with a row of it."""
    slot: int | None = None
    """Row of the workers' state; None while it waits."""
    block_ids: list[int] = field(default_factory=list)
    """Of all groups, in the order of `quire.engine.scheduler.kv_cache_manager`; so are `hashes`, of which
    `num_published` are known."""
    hashes: list[bytes] = field(default_factory=list)
    num_published: int = 0
    num_cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache when it was first admitted."""
    num_scored_tokens: int = 0
    """With prompt log-probabilities: prompt tokens after the first whose scores have come back."""
    finish_reason: FinishReason | None = None
    grammar: Grammar | None = None
    """Where its output is, if that is structured: past all of `token_ids`."""
    mask: bytes = b""
    """The tokens that the grammar allows next."""
    unsent_to_workers: list[int] = field(default_factory=list)
    """The last of `token_ids`, which its next row takes to the workers."""
    unsent_to_client: list[int] = field(default_factory=list)
    """Tokens forced before the first was sampled, which its next output takes to the server."""

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.submit.prompt_token_ids)

    @property
    def num_reusable_tokens(self) -> int:
        """Tokens that need not be computed where their KV is cached: not the last, and none whose logits are needed."""
        last = len(self.token_ids) - 1
        if self.submit.params.prompt_logprobs is not None and self.num_scored_tokens < self.num_prompt_tokens - 1:
            return min(last, self.num_scored_tokens)
        return last

    @property
    def num_pending_tokens(self) -> int:
        """Known tokens that no plan computes yet."""
        return max(0, len(self.token_ids) - self.num_computed_tokens)
