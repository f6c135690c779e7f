"""Selection of the experts of each token: one program per token, with the scores of all groups in registers."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.reference.experts import GroupScore, Scoring


@triton.jit
def _route_kernel(
    logits,
    row_stride,
    correction,
    weights,
    ids,
    experts,
    groups,
    members,
    top_k,
    top_groups,
    scale,
    ineligible,
    SCORING: tl.constexpr,
    CORRECTED: tl.constexpr,
    BY_TWO: tl.constexpr,
    IN_ORDER: tl.constexpr,
    RENORMALIZED: tl.constexpr,
    GROUPS: tl.constexpr,
    MEMBERS: tl.constexpr,
    TOP_K: tl.constexpr,
):
    """See `quire.kernels.reference.route`. BY_TWO: the score of a group is the sum of its two best experts."""
    row = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, GROUPS), tl.arange(0, MEMBERS)
    number = group[:, None] * members + member[None, :]
    inside = (group < groups)[:, None] & (member < members)[None, :]
    x = tl.load(logits + row * row_stride + number, mask=inside, other=float("-inf"))
    scores = x
    if SCORING == "softmax":
        exponentials = tl.exp(x - tl.max(x))
        scores = exponentials / tl.sum(exponentials)
    elif SCORING == "sigmoid":
        scores = tl.where(inside, tl.sigmoid(x), float("-inf"))
    choice = scores
    if CORRECTED:
        choice = scores + tl.load(correction + number, mask=inside, other=0.0)
        choice = tl.where(inside, choice, float("-inf"))
    elif (SCORING == "softmax") & IN_ORDER:
        choice = x  # the same order as the softmax, where different logits may round to equal scores
    number = tl.where(inside, number, experts)
    if GROUPS > 1:
        best = tl.max(choice, axis=1)
        if BY_TWO:
            is_best = choice == best[:, None]
            place = tl.min(tl.where(is_best, member[None, :], MEMBERS), axis=1)
            best += tl.max(tl.where(member[None, :] == place[:, None], float("-inf"), choice), axis=1)
        closed = group < groups
        for _ in range(top_groups):
            top = tl.max(tl.where(closed, best, float("-inf")), axis=0)
            opened = tl.min(tl.where(closed & (best == top), group, GROUPS), axis=0)
            closed = closed & (group != opened)
        choice = tl.where(closed[:, None] & inside, ineligible, choice)
    place = tl.arange(0, TOP_K)
    chosen, of_chosen = tl.zeros([TOP_K], tl.int32), tl.full([TOP_K], float("-inf"), tl.float32)
    free = inside
    for rank in range(top_k):
        top = tl.max(tl.where(free, choice, float("-inf")))
        # If a logit is NaN, no expert is the maximum: the result is arbitrary, but the index stays in bounds.
        expert = tl.minimum(tl.min(tl.where(free & (choice == top), number, experts)), experts - 1)
        free = free & (number != expert)
        score = tl.max(tl.where(number == expert, scores, float("-inf")))
        chosen, of_chosen = tl.where(place == rank, expert, chosen), tl.where(place == rank, score, of_chosen)
    is_chosen = place < top_k
    if SCORING == "topk_softmax":
        of_chosen = tl.exp(of_chosen - tl.max(of_chosen, axis=0))
        of_chosen = of_chosen / tl.sum(of_chosen, axis=0)
    of_chosen = tl.where(is_chosen, of_chosen, 0.0)
    if RENORMALIZED:
        of_chosen = of_chosen / (tl.sum(of_chosen, axis=0) + 1e-20)
    tl.store(weights + row * top_k + place, of_chosen * scale, mask=is_chosen)
    tl.store(ids + row * top_k + place, chosen.to(tl.int64), mask=is_chosen)


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
    """See `quire.kernels.reference`."""
    if logits.stride(-1) != 1:
        logits = logits.contiguous()
    tokens, experts = logits.shape
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=logits.device)
    ids = torch.empty((tokens, top_k), dtype=torch.int64, device=logits.device)
    if not tokens:
        return weights, ids
    members = experts // groups
    _route_kernel[(tokens,)](
        *(logits, logits.stride(0), logits if correction_bias is None else correction_bias, weights, ids),
        *(experts, groups, members, top_k, top_groups, float(scale), float(ineligible)),
        SCORING=scoring,
        CORRECTED=correction_bias is not None,
        BY_TWO=groups > 1 and group_score == "top2_sum",
        IN_ORDER=groups == 1 or (group_score == "max" and ineligible == -math.inf),
        RENORMALIZED=renormalize,
        GROUPS=triton.next_power_of_2(groups),
        MEMBERS=triton.next_power_of_2(members),
        TOP_K=triton.next_power_of_2(top_k),
        num_warps=1 if experts <= 256 else 4,
    )
    return weights, ids
