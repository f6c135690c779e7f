"""Routing of tokens to experts, and the experts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Literal, Protocol, Self, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.low_rank import AdapterRows, ExpertChanges, LowRankPool
from quire.kernels.reference.elementwise import act_mul, activate
from quire.kernels.reference.low_rank import add_low_rank

Scoring = Literal["softmax", "sigmoid", "topk_softmax"]
GroupScore = Literal["max", "top2_sum"]


def route(
    logits: Tensor,
    top_k: int,
    scoring: Scoring,
    *,
    renormalize: bool = False,
    scale: float = 1.0,
    groups: int = 1,
    top_groups: int = 1,
    group_score: GroupScore = "max",
    ineligible: float = -math.inf,
    correction_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Select the `top_k` experts of each token, best first; returns float32 weights and int64 ids, `[tokens, top_k]`.

    `logits` are float32 `[tokens, experts]`. Experts are selected by their scores, which are also the weights; with
    "topk_softmax" the weights are the softmax of the selected experts' logits. `correction_bias` (float32 `[experts]`)
    is added for selection only (Wang et al. 2024). With `groups`, only experts in the `top_groups` best groups are
    eligible; a group's score is its best expert's or the sum of its two best (DeepSeek-V2 and V3). In the choice,
    the others have the score `ineligible`. Ties, of experts and of groups, go to the lower number. `renormalize` makes
    weights sum to 1 before they are scaled by `scale`.
    """
    scores = logits.softmax(dim=-1) if scoring == "softmax" else logits.sigmoid() if scoring == "sigmoid" else logits
    choice = scores if correction_bias is None else scores + correction_bias
    in_order = groups == 1 or (group_score == "max" and ineligible == -math.inf)
    if scoring == "softmax" and correction_bias is None and in_order:
        choice = logits  # the same order as the softmax, where different logits may round to equal scores
    if groups > 1:
        members = choice.view(len(choice), groups, choice.shape[1] // groups)
        best = members.topk(2 if group_score == "top2_sum" else 1, dim=-1).values.sum(dim=-1)
        excluded = torch.ones_like(best, dtype=torch.bool).scatter_(-1, _highest(best, top_groups), False)
        choice = members.masked_fill(excluded[..., None], ineligible).flatten(-2)
    ids = _highest(choice, top_k)
    weights = scores.gather(-1, ids)
    if scoring == "topk_softmax":
        weights = weights.softmax(dim=-1)
    if renormalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * scale, ids


def _highest(scores: Tensor, count: int) -> Tensor:
    """The indices of torch.topk, with ties in ascending order."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def fused_experts(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: str,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    changes: ExpertChanges | None = None,
) -> Tensor:
    """The weighted sum of each token's experts; `x` and the result are `[tokens, hidden]`, sums are float32.

    An expert is `down(act_mul(gate_up(x), activation))`: `gate_up` is `[experts, 2 * size, hidden]`, gates before ups,
    and `down` is `[experts, hidden, size]`; the biases are `[experts, 2 * size]` and `[experts, hidden]`. An expert
    without gates is `down(activate(gate_up(x), activation))`, with half as many rows of `gate_up`. `weights` and `ids`
    are `[tokens, top_k]`. An id that is negative or beyond the last expert adds nothing: the expert is on another
    rank.

    `changes` are made to the results of `gate_up` and `down` as by `add_low_rank`; tokens without an adapter have the
    results of a call without, to the last bit where a token does not depend on the others.
    """

    def gates_and_ups(expert: int, rows: Tensor) -> Tensor:
        return F.linear(rows, gate_up[expert], None if gate_up_bias is None else gate_up_bias[expert])

    def downs(expert: int, inner: Tensor) -> Tensor:
        return F.linear(inner, down[expert], None if down_bias is None else down_bias[expert])

    is_gated = gate_up.shape[1] > down.shape[2]
    return mix_experts(x, weights, ids, len(gate_up), gates_and_ups, downs, activation, is_gated, changes)


class Rows(Protocol):
    """A tensor of rows, or a stand-in for one."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def __getitem__(self, rows: Tensor, /) -> Self: ...


R = TypeVar("R", bound=Rows)


def by_expert(x: R, weights: Tensor, ids: Tensor, experts: int, feed_forward: Callable[[int, R], Tensor]) -> Tensor:
    """The weighted sum of `feed_forward(expert, rows)` over each token's experts; skips experts without rows."""
    total = torch.zeros(x.shape, dtype=torch.float32, device=ids.device)
    for expert, tokens, places in _routed(ids, experts):
        rows = feed_forward(expert, x[tokens])
        total.index_add_(0, tokens, rows.float() * weights[tokens, places, None])
    return total.to(x.dtype)


def mix_experts(
    x: R,
    weights: Tensor,
    ids: Tensor,
    experts: int,
    gate_up: Callable[[int, R], Tensor],
    down: Callable[[int, Tensor], Tensor],
    activation: str,
    gated: bool,
    changes: ExpertChanges | None,
    act_mul: Callable[[Tensor, str], Tensor] = act_mul,
    add_low_rank: Callable[[Tensor, Tensor, LowRankPool, AdapterRows], None] = add_low_rank,
) -> Tensor:
    """`fused_experts` with products of an expert and its rows, which this changes in place. The last two may be other
    implementations."""
    total = torch.zeros(x.shape, dtype=torch.float32, device=ids.device)
    for expert, tokens, places in _routed(ids, experts):
        own = None if changes is None else changes.of_pairs(tokens * ids.shape[1] + places, ids.shape[1])
        both = gate_up(expert, x[tokens])
        if own is not None and own.gate_up is not None:
            add_low_rank(both, own.x, own.gate_up, own.pairs)
        inner = (act_mul if gated else activate)(both, activation).to(x.dtype)
        out = down(expert, inner)
        if own is not None and own.down is not None:
            add_low_rank(out, inner, own.down, own.pairs)
        total.index_add_(0, tokens, out.float() * weights[tokens, places, None])
    return total.to(x.dtype)


def _routed(ids: Tensor, experts: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """The experts that have rows: their numbers, tokens, and the places of these among the tokens' experts."""
    for expert in torch.unique(ids).tolist():
        if 0 <= expert < experts:
            yield expert, *torch.nonzero(ids == expert, as_tuple=True)
