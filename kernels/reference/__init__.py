"""Every operation in plain torch: correct on any device, and the oracle for the faster implementations.

Operations on weights packed for a CPU are in `quire.kernels.packed`.
"""

from quire.kernels.noise import gumbel_noise, uniform_noise
from quire.kernels.reference.compression import compress_tokens
from quire.kernels.reference.elementwise import act_mul, activate, add_rms_norm, rms_norm, rotary
from quire.kernels.reference.experts import GroupScore, Scoring, by_expert, fused_experts, mix_experts, route
from quire.kernels.reference.hyper_connections import mhc_post, mhc_pre
from quire.kernels.reference.kv_cache import read_kv, rotary_write_kv, write_kv
from quire.kernels.reference.low_rank import add_low_rank
from quire.kernels.reference.paged import paged_attention, sparse_attention
from quire.kernels.reference.recurrent import causal_conv, linear_attention, selective_scan, wkv
from quire.kernels.reference.sampling import apply_bitmask, penalize, sample, score_tokens
from quire.kernels.reference.selection import choose_blocks, select_blocks, select_tokens
from quire.kernels.reference.sequences import PlainSequenceKV, attention, sequence_kv

__all__ = [
    "GroupScore",
    "PlainSequenceKV",
    "Scoring",
    "act_mul",
    "activate",
    "add_low_rank",
    "add_rms_norm",
    "apply_bitmask",
    "attention",
    "by_expert",
    "causal_conv",
    "choose_blocks",
    "compress_tokens",
    "fused_experts",
    "gumbel_noise",
    "linear_attention",
    "mhc_post",
    "mhc_pre",
    "mix_experts",
    "paged_attention",
    "penalize",
    "read_kv",
    "rms_norm",
    "rotary",
    "rotary_write_kv",
    "route",
    "sample",
    "score_tokens",
    "select_blocks",
    "select_tokens",
    "selective_scan",
    "sequence_kv",
    "sparse_attention",
    "uniform_noise",
    "wkv",
    "write_kv",
]
