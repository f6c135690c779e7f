"""Layers with a recurrent state."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.cache import StateSegments


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, inputs: Tensor, segments: StateSegments, *, silu: bool = True
) -> Tensor:
    """Convolve each channel over its last tokens, then apply silu (if `silu`): `[tokens, channels]` → the same.

    `weight` is `[channels, conv_size]`, with the weight of the newest token last; `bias` is `[channels]`. `inputs` is
    as in `RecurrentState`, and is updated.
    """
    out, size = torch.empty_like(x, memory_format=torch.contiguous_format), weight.shape[1]
    starts, read, write = (each.tolist() for each in (segments.starts, segments.read, segments.write))
    for segment, (start, end) in enumerate(pairwise(starts)):
        before = x.new_zeros(size - 1, x.shape[1]) if read[segment] < 0 else inputs[read[segment]]
        seen = torch.cat((before, x[start:end]))
        windows = seen.float().unfold(0, size, 1)  # [tokens, channels, conv_size]
        total = (windows * weight.float()).sum(dim=-1)
        if bias is not None:
            total = total + bias.float()
        out[start:end] = (F.silu(total) if silu else total).to(x.dtype)
        if write[segment] >= 0:
            inputs[write[segment]] = seen[len(seen) - size + 1 :]
    return out


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor | None,
    matrices: Tensor,
    segments: StateSegments,
    scale: float,
    eps: float = 0.0,
    *,
    is_delta: bool = True,
) -> Tensor:
    """Linear attention with a decaying state: `[tokens, heads, value_dim]` like `value`.

    For each token, the state S of a head becomes `exp(decay) * S + key ⊗ update`, and its output is
    `scale * S.T @ query`. `update` is `beta * value`, or the value without `beta`; with `is_delta` it is the gated
    delta rule's (Yang et al. 2024), `beta * (value - key @ (exp(decay) * S))`. `query` and `key` are
    `[tokens, key_heads, key_dim]`; a key head belongs to consecutive heads, and with `eps` is divided by its length.
    `decay` is float32 `[tokens, heads]`, or for each key feature `[tokens, heads, key_dim]`; `beta` is float32
    `[tokens, heads]`. `matrices` is as in `RecurrentState`, and is updated.
    """
    repeats, out = value.shape[1] // key.shape[1], torch.empty_like(value, memory_format=torch.contiguous_format)
    query, key = query.float(), key.float()
    if eps:
        query, key = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps) for x in (query, key))
    query, key = ((x * by).repeat_interleave(repeats, dim=1) for x, by in ((query, scale), (key, 1.0)))
    factors = (decay if decay.dim() == 3 else decay[..., None]).exp()[..., None]
    starts, read, write = (each.tolist() for each in (segments.starts, segments.read, segments.write))
    for segment, (start, end) in enumerate(pairwise(starts)):
        state = torch.zeros_like(matrices[0]) if read[segment] < 0 else matrices[read[segment]].clone()
        for token in range(start, end):
            state *= factors[token]
            update, row = value[token].float(), key[token].unsqueeze(-1)
            if is_delta:
                update = update - (row * state).sum(1)
            if beta is not None:
                update = beta[token, :, None] * update
            state += row * update.unsqueeze(1)
            out[token] = (query[token].unsqueeze(-1) * state).sum(1).to(value.dtype)
        if write[segment] >= 0:
            matrices[write[segment]] = state
    return out


def selective_scan(
    x: Tensor, step: Tensor, rates: Tensor, key: Tensor, query: Tensor, matrices: Tensor, segments: StateSegments
) -> Tensor:
    """The selective scan of Mamba (Gu & Dao 2023): `[tokens, channels]` like `x`.

    For each token, the state S `[state_size, channels]` becomes `exp(step * rates) * S + key ⊗ (step * x)`, and the
    output is `S.T @ query`: linear attention with a decay for each element of the state. `step` is float32
    `[tokens, channels]`, `rates` float32 `[state_size, channels]`, `key` and `query` are `[tokens, state_size]`.
    `matrices` is as in `RecurrentState` with one head, and is updated.
    """
    out, key, query = torch.empty_like(x, memory_format=torch.contiguous_format), key.float(), query.float()
    starts, read, write = (each.tolist() for each in (segments.starts, segments.read, segments.write))
    for segment, (start, end) in enumerate(pairwise(starts)):
        state = torch.zeros_like(matrices[0, 0]) if read[segment] < 0 else matrices[read[segment], 0].clone()
        for token in range(start, end):
            update = step[token] * x[token].float()
            state = (step[token] * rates).exp() * state + key[token, :, None] * update
            out[token] = (query[token, :, None] * state).sum(0).to(x.dtype)
        if write[segment] >= 0:
            matrices[write[segment], 0] = state
    return out


LOWEST_EXPONENT = -1e38
"""The largest exponent before the first token (`wkv`)."""


def wkv(key: Tensor, value: Tensor, decay: Tensor, bonus: Tensor, matrices: Tensor, segments: StateSegments) -> Tensor:
    """The weighted means of RWKV-4 (Peng et al. 2023): `[tokens, channels]` like `value`.

    A channel's output is the mean of its values so far, with weights `exp(key + bonus)` for the token's own value and
    `exp(key + n * decay)` for a value with n tokens in between. `key` and `value` are `[tokens, channels]`, `decay` and
    `bonus` float32 `[channels]`. `matrices` is as in `RecurrentState` with one head and three rows, and is updated: the
    weighted sum of values, the sum of weights, both divided by the exponential of the third row, which is the largest
    exponent so far.
    """
    out, keys, values = torch.empty_like(value, memory_format=torch.contiguous_format), key.float(), value.float()
    starts, read, write = (each.tolist() for each in (segments.starts, segments.read, segments.write))
    for segment, (start, end) in enumerate(pairwise(starts)):
        state = torch.zeros_like(matrices[0, 0]) if read[segment] < 0 else matrices[read[segment], 0].clone()
        total, weight, largest = state.unbind(0)
        if read[segment] < 0:
            largest = torch.full_like(largest, LOWEST_EXPONENT)
        for token in range(start, end):
            own = keys[token] + bonus
            top = torch.maximum(largest, own)
            before, own = (largest - top).exp(), (own - top).exp()
            out[token] = ((before * total + own * values[token]) / (before * weight + own)).to(value.dtype)
            top = torch.maximum(largest + decay, keys[token])
            before, own = (largest + decay - top).exp(), (keys[token] - top).exp()
            total, weight, largest = before * total + own * values[token], before * weight + own, top
        if write[segment] >= 0:
            matrices[write[segment], 0] = torch.stack((total, weight, largest))
    return out
