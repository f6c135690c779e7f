"""Dual-batch overlap: a step as two halves, where one half's all-to-all overlaps the other's computation."""

from __future__ import annotations

from quire.engine.layers.batch import Batch, KVBlocks
from quire.kernels import HostMetadata


def split_micro_batches(batch: Batch) -> tuple[Batch, Batch]:
    """Split a step's tokens, and each replica's, into two halves.

    A request may be split: in every layer its first tokens run before its last ones, which therefore find the keys they
    need. Layers with recurrent states are refused with --enable-dbo.
    """
    counts, known, _ = batch.host_metadata()
    ends = counts.cumsum()
    total = int(ends[-1]) if len(ends) else 0
    cut = -(-total // 2)
    stop = min(len(ends), int(ends.searchsorted(cut)) + 1)  # end of the requests with tokens before the cut
    start = int(ends.searchsorted(cut, "right"))  # start of the requests with tokens after it
    behind = int(ends[stop - 1]) - cut if stop else 0
    before, after, until = counts[:stop].copy(), counts[start:].copy(), known[:stop].copy()
    before[-1:] -= behind
    until[-1:] -= behind
    after[:1] -= cut - (ends[start:] - counts[start:])[:1]
    lengths = batch.sequence_lengths[:stop].clone()
    lengths[stop - 1 :] -= behind
    first = Batch(
        token_ids=batch.token_ids[:cut],
        positions=batch.positions[:cut],
        sequence_lengths=lengths,
        query_starts=batch.query_starts[: stop + 1].clamp(max=cut),
        logits_indices=batch.logits_indices[:0],
        groups=_blocks(batch, slice(cut), slice(stop)),
        host=HostMetadata(before, until),
        replica_tokens=tuple(-(-tokens // 2) for tokens in batch.replica_tokens),
    )
    second = Batch(
        token_ids=batch.token_ids[cut:],
        positions=batch.positions[cut:],
        sequence_lengths=batch.sequence_lengths[start:],
        query_starts=batch.query_starts[start:].clamp(min=cut) - cut,
        logits_indices=batch.logits_indices[:0],
        groups=_blocks(batch, slice(cut, None), slice(start, None)),
        host=HostMetadata(after, known[start:]),
        replica_tokens=tuple(tokens // 2 for tokens in batch.replica_tokens),
    )
    return first, second


def _blocks(batch: Batch, tokens: slice, requests: slice) -> dict[int, KVBlocks]:
    metadata = {number: batch.attention(number) for number in batch.groups}
    return {
        number: KVBlocks(each.slot_mapping[tokens], each.block_tables[requests]) for number, each in metadata.items()
    }
