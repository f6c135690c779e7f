"""Attention to the tokens of selected groups (Qwen4-Exp, 2026)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire import kernels
from quire.engine.architecture import attention_spec
from quire.engine.architecture.attention_spec import GroupIndexerSpec
from quire.engine.architecture.spec_parts import RopeSpec
from quire.engine.layers.batch import AttentionMetadata, Batch
from quire.engine.layers.from_spec import FromSpec
from quire.engine.layers.kv_cache import LayerCache
from quire.engine.layers.norm import make_norm
from quire.engine.layers.rotary import Rotary


class GroupIndexer(nn.Module):
    """Queries and keys of the selection that `quire.engine.architecture.attention_spec.GroupIndexerSpec` describes; all
    ranks have the same."""

    def __init__(self, spec: GroupIndexerSpec, rope: RopeSpec | None, own: FromSpec) -> None:
        """`own` has the parameters of the attention."""
        super().__init__()
        self._spec, self._rotary = spec, Rotary(rope, 0)
        self.inputs = own.column_parallel("attention.indexer.inputs")
        self.query_norm = make_norm(spec.norm, spec.head_dim)
        self.key_norm = make_norm(spec.norm, spec.head_dim)

    def forward(self, x: Tensor, batch: Batch, cos_sin: Tensor, cache: LayerCache) -> Tensor:
        """Write the tokens' keys, and the keys of groups that end with one of the tokens, to the cache; returns the
        tokens' queries `[tokens, heads, head_dim]`."""
        spec, weight, metadata, keys = self._spec, self.key_norm.weight, batch.attention(cache.group), cache.keys
        assert isinstance(weight, Tensor)
        assert keys is not None
        heads = torch.unflatten(self.inputs(x, batch.adapters_of()), -1, (-1, spec.head_dim))
        query, key = heads.split_with_sizes((spec.num_heads, 1), dim=1)
        query = self.query_norm(query)
        query, _ = kernels.rotary(query, query[:, :0], cos_sin)
        kernels.rotary_write_kv(key[:, :0], key, None, cos_sin[:, :0], keys, metadata.slot_mapping)
        places = torch.zeros(spec.size, spec.head_dim, dtype=torch.float32, device=x.device)  # all alike
        kernels.compress_tokens(
            keys,
            places,
            weight.float() + spec.norm.offset,
            spec.norm.eps,
            self._rotary(batch.positions + 1 - spec.size),
            keys[:, :, :, spec.size - 1 :: spec.size],
            metadata.slot_mapping,
            *metadata.paged,
            metadata.block_tables,
        )
        return query

    def attend(
        self, query: Tensor, index_query: Tensor, metadata: AttentionMetadata, cache: LayerCache, scale: float
    ) -> Tensor:
        """All heads of a query attend to the same groups. Nothing is read from the device."""
        spec, memory, keys = self._spec, cache.memory, cache.keys
        assert memory is not None
        assert keys is not None
        weights = torch.ones(index_query.shape[:2], dtype=torch.float32, device=query.device)
        chosen = kernels.select_tokens(
            index_query, weights, keys[:, :, :, spec.size - 1 :: spec.size], *metadata.paged, spec.num_groups, spec.size
        )
        slots, counts = tokens_of_groups(chosen, metadata, spec.size, memory.shape[3])
        return kernels.sparse_attention(query, memory, slots, counts, scale)


def tokens_of_groups(chosen: Tensor, metadata: AttentionMetadata, size: int, block_size: int) -> tuple[Tensor, Tensor]:
    """The slots of the tokens in the `chosen` groups, then of the tokens after the last complete group: `[tokens,
    (groups + 1) * size - 1]`; and how many of each token's slots are valid, `[tokens]`. `chosen` `[tokens, groups]` are
    slots of groups of `size` tokens."""
    tokens, most = chosen.shape
    device, width = chosen.device, (most + 1) * size - 1
    number, owners = torch.arange(width, device=device), metadata.sequence_of_tokens(tokens)
    place = torch.arange(tokens, device=device)
    seen = (metadata.sequence_lengths[owners] - metadata.query_starts[owners + 1] + place + 1).clamp(min=1)
    in_groups = (seen // size).clamp(max=most) * size
    slots = chosen.new_empty(tokens, width)
    for rows in torch.split(place, max(1, attention_spec.SCORES_AT_ONCE // width)):
        of_groups = chosen[rows].repeat_interleave(size, dim=1) * size + number[: most * size] % size
        ends, counts = seen[rows, None], in_groups[rows, None]
        places = (ends - ends % size + number - counts).clamp(min=0).minimum(ends - 1)
        after = metadata.block_tables[owners[rows, None], places // block_size] * block_size + places % block_size
        slots[rows] = torch.where(number < counts, F.pad(of_groups, (0, size - 1)), after)
    return slots, in_groups + seen % size
