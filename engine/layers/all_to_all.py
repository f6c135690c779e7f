"""Dispatch of tokens to the ranks that have their experts, and combination of the experts' outputs.

Creating a dispatch object starts to send the tokens, `received` waits for those that this rank computes, and `combine`
exchanges the outputs. Other work may run before `received`. Each is called once; dispatches that exchange rows drop the
received ones when they return them, so that memory need hold only one direction at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from quire.engine.distributed.expert_group import ExpertGroup


class RoutedTokens(NamedTuple):
    """Tokens and their destinations."""

    x: Tensor
    """`[tokens, hidden_size]`"""
    weights: Tensor
    """Float32 `[tokens, top_k]`"""
    physical_ids: Tensor
    """Int64 `[tokens, top_k]`, numbered as in `ExpertPlacement`."""


class ExpertDispatch(Protocol):
    """The dispatched tokens of one layer and step."""

    def received(self) -> RoutedTokens:
        """The tokens that this rank computes; their experts include those on other ranks, which are ignored."""

    def combine(self, out: Tensor) -> Tensor:
        """Exchange `out` `[received tokens, hidden_size]`, the weighted sums over this rank's experts. Returns the sums
        of the replica's tokens, `[tokens, hidden_size]`, still to be summed over the ranks of its stage."""


class LocalDispatch:
    """Every rank has all tokens and computes its part of the sum; nothing is sent."""

    def __init__(self, routed: RoutedTokens) -> None:
        self._routed = routed

    def received(self) -> RoutedTokens:
        return self._routed

    def combine(self, out: Tensor) -> Tensor:
        return out


class AllGatherDispatch:
    """All-gather the tokens of all replicas to every rank; reduce-scatter the outputs."""

    def __init__(self, group: ExpertGroup, routed: RoutedTokens, replica_tokens: Sequence[int]) -> None:
        assert replica_tokens[group.dp.rank] == len(routed.x)
        self._group, self._counts, self._like = group, replica_tokens, routed
        self._dispatched = group.dp.start_all_gather(_packed(routed), replica_tokens)

    def received(self) -> RoutedTokens:
        rows = self._dispatched.wait()
        del self._dispatched
        return _unpacked(rows, self._like)

    def combine(self, out: Tensor) -> Tensor:
        return self._group.dp.reduce_scatter(out, self._counts)


class AllToAllDispatch:
    """Send each token once to every rank that has one of its experts. The ranks of a stage send an equal share of the
    tokens each.

    `routed` is this rank's share: the tokens from `first` on, of the `tokens` of its replica.
    """

    def __init__(
        self, group: ExpertGroup, routed: RoutedTokens, num_local_experts: int, first: int, tokens: int
    ) -> None:
        """`num_local_experts` is the number of experts on each rank."""
        self._group, self._like, self._first, self._tokens = group, routed, first, tokens
        is_sent = routed.x.new_zeros((len(routed.x), group.size), dtype=torch.bool)
        is_sent.scatter_(1, routed.physical_ids // num_local_experts, True)
        _, self._senders = is_sent.T.nonzero(as_tuple=True)  # by rank, then token
        counts, ones = is_sent.sum(0), [1] * group.size
        self._sent = counts.tolist()
        self._received = group.all_ranks.all_to_all(counts[:, None], ones, ones)[:, 0].tolist()
        outgoing = RoutedTokens(*(part[self._senders] for part in routed))
        self._dispatched = group.all_ranks.start_all_to_all(_packed(outgoing), self._sent, self._received)

    def received(self) -> RoutedTokens:
        rows = self._dispatched.wait()
        del self._dispatched
        return _unpacked(rows, self._like)

    def combine(self, out: Tensor) -> Tensor:
        out = self._group.all_ranks.all_to_all(out, self._received, self._sent)
        total = torch.zeros((self._tokens, out.shape[1]), dtype=torch.float32, device=out.device)
        return total.index_add_(0, self._first + self._senders, out.float()).to(out.dtype)


def even_slice(tokens: int, rank: int, size: int) -> slice:
    """The slice of `tokens` that belongs to `rank`."""
    length = -(-tokens // size)
    return slice(min(tokens, rank * length), min(tokens, (rank + 1) * length))


def _packed(routed: RoutedTokens) -> Tensor:
    """Pack a token's numbers into one row of bytes, so that one message is enough; the widest types come first, for
    alignment."""
    parts = routed.weights, routed.physical_ids.int(), routed.x
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=1)


def _unpacked(rows: Tensor, like: RoutedTokens) -> RoutedTokens:
    widths = [*[like.weights.shape[1] * 4] * 2, like.x.shape[1] * like.x.element_size()]
    weights, physical_ids, x = (part.contiguous() for part in rows.split_with_sizes(widths, dim=1))
    return RoutedTokens(x.view(like.x.dtype), weights.view(torch.float32), physical_ids.view(torch.int32).long())
