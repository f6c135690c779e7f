"""Log-probabilities of tokens, as workers compute them and the server returns them. No torch."""

from __future__ import annotations

from array import array

import msgspec


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Natural log-probabilities at one position, from the model's distribution before temperature."""

    logprob: float
    """Log-probability of the sampled token, or of the prompt token."""
    rank: int
    """1 for the most likely token."""
    top_ids: list[int]
    top_logprobs: list[float]


class PromptLogprobs(msgspec.Struct, array_like=True):
    """`TokenLogprobs` of consecutive prompt tokens, as packed columns instead of objects.

    There is one row per token, but none for the first token of the prompt.
    """

    num_top: int
    """Number of most likely tokens in each row."""
    logprobs: bytes
    """float32 `[rows]`"""
    ranks: bytes
    """int32 `[rows]`"""
    top_ids: bytes
    """int32 `[rows, num_top]`"""
    top_logprobs: bytes
    """float32 `[rows, num_top]`"""

    def __len__(self) -> int:
        return len(self.logprobs) // 4

    def extend(self, more: PromptLogprobs) -> None:
        """Append the rows of the following tokens."""
        assert more.num_top == self.num_top
        self.logprobs += more.logprobs
        self.ranks += more.ranks
        self.top_ids += more.top_ids
        self.top_logprobs += more.top_logprobs

    def after(self, count: int) -> PromptLogprobs:
        """Return the rows after the first `count`."""
        row, top = 4 * count, 4 * count * self.num_top
        return PromptLogprobs(
            self.num_top, self.logprobs[row:], self.ranks[row:], self.top_ids[top:], self.top_logprobs[top:]
        )

    def rows(self) -> list[TokenLogprobs]:
        """Return the rows as objects."""
        logprobs, tops = array("f", self.logprobs), array("f", self.top_logprobs).tolist()
        ranks, ids = array("i", self.ranks), array("i", self.top_ids).tolist()
        cuts = (slice(at * self.num_top, (at + 1) * self.num_top) for at in range(len(self)))
        return [
            TokenLogprobs(logprob, rank, ids[cut], tops[cut])
            for logprob, rank, cut in zip(logprobs, ranks, cuts, strict=True)
        ]
