"""A request as the scheduler sees it."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.engine.messages import FinishReason, Submit


@dataclass(slots=True, eq=False)
class Request:
    """Known tokens, and how many of them are computed.

    The one rule: `num_computed` chases `len(token_ids)`. It moves when a plan is made, so a request whose sampled
    token is still under way has nothing pending and is left out of further plans until the token arrives.
    """

    submit: Submit
    order: tuple[int, int]
    """Who goes first: (priority, arrival)."""
    token_ids: list[int]
    max_tokens: int
    """Length of prompt and output together at which it ends."""
    num_computed: int = 0
    num_sent: int = 0
    """Tokens that the workers know."""
    in_flight: int = 0
    """Plans under way that carry a row of it."""
    slot: int | None = None
    """Row of the workers' state; None while it waits."""
    block_ids: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    num_published: int = 0
    num_cached: int | None = None
    """Prompt tokens found in the prefix cache when it was first admitted."""
    finish_reason: FinishReason | None = None

    @property
    def num_prompt(self) -> int:
        return len(self.submit.prompt_token_ids)

    @property
    def num_pending(self) -> int:
        """Known tokens that no plan computes yet."""
        return len(self.token_ids) - self.num_computed
