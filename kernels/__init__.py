"""The operations that models are built from, each dispatched on the device of its first argument.

`quire.kernels.reference` defines every operation in plain torch and is the oracle for the other implementations.
Once `prepare` has loaded a platform's module, the operations it defines replace the reference's; the others fall
back to the reference. This package imports nothing else from Quire.
"""

from __future__ import annotations

from quire.kernels import coded_words, int4_kv, reference
from quire.kernels.attention_config import AttentionConfig, AttentionLayer, HostMetadata
from quire.kernels.backends import BackendUnavailable
from quire.kernels.cache import (
    RecurrentState,
    StateSegments,
    allocate_kv_cache,
    heads_as_blocks,
    int4_row_size,
    kv_cache_dtype,
    page_rows,
    recurrent_states,
)
from quire.kernels.coded_words import RoundedRows, RowRounding, plain_rows, rows_for
from quire.kernels.dispatch import by_device, int4_attention, paged_attention, prepare
from quire.kernels.experts import PackedExperts, fused_experts, pack_experts
from quire.kernels.linear import (
    PackedEmbedding,
    PackedGatedLinear,
    PackedLinear,
    Quantization,
    pack_embedding,
    pack_gated,
    pack_groups,
    pack_linear,
    widens_weights,
)
from quire.kernels.low_rank import AdapterRows, ExpertChanges, LowRankPool, OneAdapter, RowAdapters
from quire.kernels.quantized import QuantizedFormat, QuantizedWeight
from quire.kernels.sequences import SequenceBlocks, SequenceKV

__all__ = [
    "AdapterRows",
    "AttentionConfig",
    "AttentionLayer",
    "BackendUnavailable",
    "ExpertChanges",
    "HostMetadata",
    "LowRankPool",
    "OneAdapter",
    "PackedEmbedding",
    "PackedExperts",
    "PackedGatedLinear",
    "PackedLinear",
    "Quantization",
    "QuantizedFormat",
    "QuantizedWeight",
    "RecurrentState",
    "RoundedRows",
    "RowAdapters",
    "RowRounding",
    "SequenceBlocks",
    "SequenceKV",
    "StateSegments",
    "act_mul",
    "activate",
    "add_low_rank",
    "add_rms_norm",
    "add_rms_norm_rounded",
    "allocate_kv_cache",
    "apply_bitmask",
    "attention",
    "causal_conv",
    "compress_tokens",
    "fused_experts",
    "gumbel_noise",
    "heads_as_blocks",
    "int4_attention",
    "int4_row_size",
    "kv_cache_dtype",
    "linear_attention",
    "mhc_post",
    "mhc_pre",
    "pack_embedding",
    "pack_experts",
    "pack_gated",
    "pack_groups",
    "pack_linear",
    "page_rows",
    "paged_attention",
    "penalize",
    "plain_rows",
    "prepare",
    "quantize_kv",
    "read_kv",
    "recurrent_states",
    "rms_norm",
    "rms_norm_rounded",
    "rotary",
    "rotary_write_kv",
    "route",
    "rows_for",
    "sample",
    "score_tokens",
    "select_blocks",
    "select_tokens",
    "selective_scan",
    "sequence_kv",
    "sparse_attention",
    "uniform_noise",
    "widens_weights",
    "wkv",
]

rms_norm = by_device(reference.rms_norm)
add_rms_norm = by_device(reference.add_rms_norm)
rms_norm_rounded = by_device(coded_words.rms_norm_rounded)
add_rms_norm_rounded = by_device(coded_words.add_rms_norm_rounded)
rotary = by_device(reference.rotary)
rotary_write_kv = by_device(reference.rotary_write_kv)
route = by_device(reference.route)
read_kv = by_device(reference.read_kv)
quantize_kv = by_device(int4_kv.quantize_kv)
act_mul = by_device(reference.act_mul)
activate = by_device(reference.activate)
attention = by_device(reference.attention)
sequence_kv = by_device(reference.sequence_kv)
causal_conv = by_device(reference.causal_conv)
linear_attention = by_device(reference.linear_attention)
selective_scan = by_device(reference.selective_scan)
wkv = by_device(reference.wkv)
select_blocks = by_device(reference.select_blocks)
select_tokens = by_device(reference.select_tokens)
sparse_attention = by_device(reference.sparse_attention)
compress_tokens = by_device(reference.compress_tokens)
mhc_pre = by_device(reference.mhc_pre)
mhc_post = by_device(reference.mhc_post)
add_low_rank = by_device(reference.add_low_rank)
apply_bitmask = by_device(reference.apply_bitmask)
score_tokens = by_device(reference.score_tokens)
penalize = by_device(reference.penalize)
sample = by_device(reference.sample)
uniform_noise = by_device(reference.uniform_noise)
gumbel_noise = by_device(reference.gumbel_noise)
