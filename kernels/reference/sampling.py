"""From logits to tokens: masks, penalties, log-probabilities and samples."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.noise import gumbel_noise


def apply_bitmask(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    """Set `logits[rows]` (float32 `[…, vocab]`) to minus infinity in place where the bit in `masks` is 0.

    `masks` is int32 `[rows, ⌈vocab / 32⌉]`; the bit of token `i` is bit `i % 32` of word `i // 32`. `rows` is int64.
    """
    bits = torch.arange(8, dtype=torch.uint8, device=logits.device)
    forbidden = (masks.view(torch.uint8)[..., None] >> bits & 1).flatten(1)[:, : logits.shape[1]] == 0
    logits[rows] = logits[rows].masked_fill_(forbidden, -torch.inf)


def score_tokens(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities of `tokens` (int64 `[rows]`) and of the most likely tokens, by float32 `[rows, vocab]`
    `logits`.

    Returns the log-probabilities (float32 `[rows]`) and ranks (int32 `[rows]`, 1 for the most likely) of `tokens`, then
    the ids (int32 `[rows, num_top]`) of the most likely tokens in descending order, and their log-probabilities
    (float32, same shape).
    """
    total = logits.logsumexp(dim=-1, keepdim=True)
    chosen = logits.gather(1, tokens[:, None])
    ranks = (logits > chosen).sum(dim=-1) + 1
    top = logits.topk(min(num_top, logits.shape[1]), dim=-1)
    return (chosen - total)[:, 0], ranks.int(), top.indices.int(), top.values - total


def penalize(logits: Tensor, tokens: Tensor, rows: Tensor, spans: Tensor, factors: Tensor, longest: int) -> None:
    """Apply repetition, frequency and presence penalties to `logits[rows]` (float32 `[…, vocab]`), in place.

    `spans` int64 `[requests, 3]` are offsets in `tokens` `[…]`: the start of a request's prompt, the start of its
    output, and the end of its output; a request has at most `longest` tokens. `factors` is float32 `[requests, 3]`:

    - repetition (Keskar et al. 2019): the logits of tokens in the prompt or the output are divided by it if positive,
      else multiplied;
    - frequency (OpenAI): subtracted once for every occurrence in the output;
    - presence (OpenAI): subtracted once if the token occurs in the output.

    `rows` is int64 without duplicates.
    """
    begin, middle, end = spans[..., None].unbind(1)
    place = begin + torch.arange(longest, device=logits.device)  # [requests, longest]
    ids = tokens[torch.where(place < end, place, begin)].long()
    repetition, frequency, presence = factors[..., None].unbind(1)
    x = logits[rows]
    seen, counts = (
        torch.zeros_like(x).scatter_add_(1, ids, chosen.to(x.dtype))
        for chosen in (place < end, (place >= middle) & (place < end))
    )
    x = torch.where(seen > 0, torch.where(x > 0, x / repetition, x * repetition), x)
    x -= frequency * counts
    x -= presence * (counts > 0)
    logits[rows] = x


GREEDY_BELOW = 1e-5
"""Lower temperatures are treated as 0."""


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seeds: Tensor, positions: Tensor
) -> Tensor:
    """Sample one token id per row of `logits` (float32 `[rows, vocab]`); returns int64 `[rows]` on the same device.

    The other arguments are `[rows]` on the host: int64 `top_k`, `seeds` and `positions` (which may also be on the
    device), float32 the others. At
    temperature 0 the result is the arg max, with ties going to the lowest id. Otherwise it is
    `argmax(logits / temperature + gumbel_noise)` over the tokens that min_p (if above 0), then top_k (if above 0), then
    top_p (if below 1) keep, which depends on the row alone. A filter that a row does not use costs it nothing.
    """
    tokens = logits.argmax(dim=-1)
    sampled = torch.nonzero(temperature >= GREEDY_BELOW)[:, 0]
    if not len(sampled):
        return tokens
    temperature, top_k, top_p, min_p = temperature[sampled], top_k[sampled], top_p[sampled], min_p[sampled]
    seeds, positions, rows = (host.to(logits.device) for host in (seeds[sampled], positions[sampled], sampled))
    x = logits[rows]
    x /= _column(temperature, x)
    filtered = torch.nonzero(min_p > 0.0)[:, 0]
    if len(filtered):
        part = filtered.to(x.device)
        x[part] = _keep_probable(x[part], min_p[filtered])
    filtered = torch.nonzero((top_k > 0) | (top_p < 1.0))[:, 0]
    if len(filtered):
        part = filtered.to(x.device)
        x[part] = _keep_top(x[part], top_k[filtered], top_p[filtered])
    x += gumbel_noise(seeds, positions, x.shape[1])
    tokens[rows] = x.argmax(dim=-1)
    return tokens


def _keep_probable(x: Tensor, min_p: Tensor) -> Tensor:
    """Min-p (Nguyen et al. 2024): drop tokens less than `min_p` times as probable as the most likely one."""
    return x.masked_fill_(x < x.amax(dim=-1, keepdim=True) + _column(min_p, x).log(), -torch.inf)


def _keep_top(x: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Keep the `top_k` most likely tokens, then the fewest of these that reach `top_p`; keep ties with the last one."""
    top_k = torch.where(top_k > 0, top_k.clamp(max=x.shape[1]), x.shape[1])
    top = x.topk(int(top_k.max()), dim=-1).values  # [rows, k], descending
    place = torch.arange(top.shape[1], device=x.device)
    top.masked_fill_(place >= _column(top_k, x), -torch.inf)
    probable = top.softmax(dim=-1)
    before = probable.cumsum(dim=-1) - probable
    kept = (top > -torch.inf) & (before < _column(torch.where(top_p < 1.0, top_p, 2.0), x))
    last = top.gather(1, kept.sum(dim=-1, keepdim=True).clamp(min=1) - 1)
    return x.masked_fill_(x < last, -torch.inf)


def _column(host: Tensor, other: Tensor) -> Tensor:
    return host.to(other.device)[:, None]
