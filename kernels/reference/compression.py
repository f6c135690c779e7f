"""Entries that stand for groups of tokens in a cache."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.cache import LARGEST
from quire.kernels.reference.elementwise import rotary
from quire.kernels.reference.kv_cache import write_kv
from quire.kernels.reference.paged import SCORE_ELEMENTS


def compress_tokens(
    inputs: Tensor,
    position_bias: Tensor,
    weight: Tensor | None,
    eps: float,
    cos_sin: Tensor,
    cache: Tensor,
    slots: Tensor,
    block_tables: Tensor,
    sequence_lengths: Tensor,
    query_starts: Tensor,
    entry_tables: Tensor,
) -> None:
    """Compress the groups of tokens that end with one of the step's tokens to entries (DeepSeek-V4, 2026), and store
    them.

    A group has `ratio` tokens, the last one at a position where `(position + 1) % ratio` is 0. An entry is the RMSNorm,
    with `weight` `[head_dim]` and `eps`, of a sum of the tokens' values; None: the sum itself. The weights of the sum
    are, for each feature, a softmax of the tokens' gates plus `position_bias`, float32 `[ratio, width]`, by the place
    in the group. If width is `2 * head_dim`, the first head_dim features are for the next group: the sum has the first
    features of the tokens of the group before, if there is one, and the last ones of the group's own. Everything but
    the result is float32.

    `inputs` `[1, blocks, 1, block_size, 2 * width]` has the values and then the gates of the tokens, in the blocks
    `block_tables`; without the gates, they are 0. The entry is stored in `cache` `[1, blocks, 1, rows, head_dim]`, of a
    float type, in the block of `entry_tables` that its last token is in; a row is for `block_size // rows` tokens.
    Before, its last rotary_dim features, which are pairs side by side, become the first ones, in halves, and are
    rotated as by `rotary`. `cos_sin` `[tokens, rotary_dim]` has the rotation of the entry that ends with each token.
    Nothing is stored for a token with -1 in `slots` `[tokens]`. A row of `cache` may be a part of the row in `inputs`
    of the last token of its group, if no other entry is computed from it. The other arguments are as in
    `paged_attention`.
    """
    assert cache.dtype not in LARGEST
    (ratio, width), block_size, (rows, head_dim) = position_bias.shape, inputs.shape[3], cache.shape[3:]
    parts = width // head_dim
    requests = torch.arange(len(sequence_lengths), device=slots.device).repeat_interleave(query_starts.diff())
    positions = torch.arange(len(slots), device=slots.device) + (sequence_lengths - query_starts[1:])[requests]
    ends = (((positions + 1) % ratio == 0) & (slots >= 0)).nonzero()[:, 0]
    before = torch.arange(1 - parts * ratio, 1, device=slots.device)
    for tokens in torch.split(ends, max(1, SCORE_ELEMENTS // (2 * parts * ratio * width))):
        at, request, last = positions[tokens, None] + before, requests[tokens, None], positions[tokens]
        seen = at.clamp(min=0)
        found = inputs[0, block_tables[request, seen // block_size], 0, seen % block_size].float()
        values, gates = torch.unflatten(found, 1, (parts, ratio)).tensor_split((width,), dim=-1)
        gates = gates if gates.shape[-1] else torch.zeros_like(values)  # [groups, parts, ratio, width]
        gates = (gates + position_bias).masked_fill(torch.unflatten(at < 0, 1, (parts, ratio))[..., None], -torch.inf)
        values, gates = (
            torch.cat([x[:, part, :, part * head_dim : (part + 1) * head_dim] for part in range(parts)], dim=1)
            for x in (values, gates)
        )
        weights = gates.softmax(dim=1)
        entry = (values.where(weights > 0, 0.0) * weights).sum(dim=1)
        entry = entry if weight is None else F.rms_norm(entry, (head_dim,), weight.float(), eps)
        plain, pairs = entry.tensor_split((head_dim - cos_sin.shape[1],), dim=1)
        entry = torch.cat((pairs[:, ::2], pairs[:, 1::2], plain), dim=1)[:, None]
        entry, _ = rotary(entry, entry[:, :0], cos_sin[tokens])
        places = last % block_size // (block_size // rows)
        write_kv(entry, None, cache, entry_tables[requests[tokens], last // block_size] * rows + places)
