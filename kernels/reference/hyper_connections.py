"""Hyper-connections: residual streams that layers mix."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def mhc_pre(
    x: Tensor,
    function: Tensor,
    base: Tensor,
    scale: Tensor,
    num_streams: int,
    norm_eps: float,
    eps: float,
    iterations: int = 0,
    magnitude: float = 2.0,
    output_eps: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """The input of a layer with manifold-constrained hyper-connections (Xie et al. 2026), computed from the residual
    streams `x` `[tokens, num_streams * hidden_size]`, and the weights with which `mhc_post` mixes them afterwards.

    Weights are `function`, `[num_streams * (2 + num_streams), num_streams * hidden_size]`, times the RMSNorm of the
    streams together, with `norm_eps`; each of their three parts is multiplied by one of `scale` `[3]`, and `base` is
    added. All of it is float32. With only two parts, or one, the results of the others are empty: `[tokens, 0, 0]`,
    streams that stay as they are, and `[tokens, 0]`, nothing that is written.

    - The layer's input, `[tokens, hidden_size]` like `x`: the sum of the streams, weighted by the sigmoids of the first
      `num_streams` weights plus `eps`.
    - Float32 `[tokens, num_streams]`, the weight of the layer's output in each stream: a sigmoid times
      `magnitude` plus `output_eps`.
    - Float32 `[tokens, num_streams, num_streams]`, the weight of each stream (first) in each stream (second): a softmax
      over the second plus `eps`, made doubly stochastic by dividing by the sums over the first and, `iterations` - 1
      times, by the sums over the second and then the first (Sinkhorn & Knopp 1967), with `eps` added to sums.
    """
    wide = x.float()
    weights = F.linear(F.rms_norm(wide, wide.shape[1:], None, norm_eps), function)
    sizes = (num_streams, num_streams, num_streams**2)[: len(scale)]
    parts = zip(weights.split_with_sizes(sizes, dim=1), scale, base.split_with_sizes(sizes), strict=True)
    inputs, *others = (part * factor + added for part, factor, added in parts)
    streams = torch.unflatten(wide, 1, (num_streams, -1))
    read = ((inputs.sigmoid() + eps)[..., None] * streams).sum(dim=1).to(x.dtype)
    outputs = magnitude * others[0].sigmoid() + output_eps if others else wide.new_empty(len(x), 0)
    if len(others) < 2:
        return read, outputs, wide.new_empty(len(x), 0, 0)
    mixed = torch.unflatten(others[1], 1, (num_streams, -1)).softmax(dim=2) + eps
    mixed = mixed / (mixed.sum(dim=1, keepdim=True) + eps)
    for _ in range(iterations - 1):
        mixed = mixed / (mixed.sum(dim=2, keepdim=True) + eps)
        mixed = mixed / (mixed.sum(dim=1, keepdim=True) + eps)
    return read, outputs, mixed


def mhc_post(x: Tensor, streams: Tensor, outputs: Tensor, mixed: Tensor) -> Tensor:
    """The residual streams after a layer with hyper-connections: `streams` `[tokens, num_streams * hidden_size]`, the
    streams before it, mixed, plus the layer's output `x` `[tokens, hidden_size]`. `outputs` and `mixed` are the weights
    that `mhc_pre` computes; if there are none for mixing, streams stay as they are. Sums are float32."""
    before = torch.unflatten(streams, 1, (outputs.shape[1], -1)).float()
    before = mixed.mT @ before if mixed.shape[1] else before
    return (outputs[..., None] * x.float()[:, None] + before).flatten(1).to(x.dtype)
