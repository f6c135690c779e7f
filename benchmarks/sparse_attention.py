"""Time of a decoded token in an MLA layer with and without sparse attention, over the length of the context.

.venv/bin/python benchmarks/sparse_attention.py

The layer has the sizes of DeepSeek V3.2 on one of eight ranks (16 of the 128 heads) and random weights; so has the
cache random numbers. Dense and sparse layers take turns, on one thread. Times are the processor's, which other work on
the machine changes less than elapsed ones.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from quire import kernels
from quire.engine.distributed.communicator import Parallel
from quire.engine.layers.attention import Batch, HostMetadata, IndexedCache, Selection
from quire.engine.layers.linear import Linear
from quire.engine.layers.mla import MLA
from quire.engine.layers.rotary import Rotary
from quire.engine.models.attention_spec import IndexerSpec, MLASpec
from quire.engine.models.spec_parts import NormSpec, RopeSpec

HIDDEN, BLOCK, CPU = 7168, 16, torch.device("cpu")
ROPE = RopeSpec(theta=10000.0, dim=64)
DENSE = MLASpec(
    num_heads=16,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    v_head_dim=128,
    scale=192**-0.5,
    rope=ROPE,
    norm=NormSpec(eps=1e-6),
)
INDEXER = IndexerSpec(num_heads=64, head_dim=128, norm=NormSpec(eps=1e-6, kind="layer", bias=True), rope=ROPE)


def layer_of(spec: MLASpec) -> MLA:
    layer = MLA(spec, HIDDEN, Parallel())
    for weight in layer.parameters():
        weight.data.normal_(std=weight.shape[-1] ** -0.5)
    for module in layer.modules():
        if isinstance(module, Linear):
            module.pack(None)
    return layer


def cache_of(length: int, shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
    sides, heads, size = shape
    cache = kernels.allocate_kv_cache(1, -(-length // BLOCK), heads, BLOCK, size, dtype, CPU, sides)[0]
    return cache.normal_()


def decode_of(length: int) -> Batch:
    """The last token of a request of `length` tokens, in shuffled blocks."""
    table, last = torch.randperm(-(-length // BLOCK)), length - 1
    return Batch(
        token_ids=torch.zeros(1, dtype=torch.int64),
        positions=torch.tensor([last]),
        slot_mapping=table[last // BLOCK, None] * BLOCK + last % BLOCK,
        block_tables=table[None],
        sequence_lengths=torch.tensor([length]),
        query_starts=torch.tensor([0, 1]),
        logits_indices=torch.tensor([0]),
        host=HostMetadata(torch.ones(1, dtype=torch.int64).numpy(), torch.tensor([length]).numpy()),
        selection=Selection(),
    )


def milliseconds(call: Callable[[], object]) -> float:
    started = time.process_time()
    call()
    return 1e3 * (time.process_time() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    lengths = [1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072]
    parser.add_argument("--lengths", type=int, nargs="+", default=lengths, help="tokens of context")
    parser.add_argument("--top-k", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    dtype: torch.dtype = getattr(torch, options.dtype)
    kernels.prepare("cpu")()
    torch.set_default_dtype(dtype)
    dense, sparse = layer_of(DENSE), layer_of(replace(DENSE, top_k=options.top_k, indexer=INDEXER))
    print("milliseconds of a layer for a token, medians; selection and attention are parts of sparse")
    print(f"{'context':>8} {'dense':>8} {'sparse':>8} {'selection':>10} {'attention':>10}")
    with torch.inference_mode():
        for length in options.lengths:
            batch, x = decode_of(length), torch.randn(1, HIDDEN)
            cache = IndexedCache(cache_of(length, DENSE.kv_shape(1), dtype), cache_of(length, (1, 1, 128), dtype))
            turns = Rotary(ROPE, length)(batch.positions)
            index_query, weights = torch.randn(1, INDEXER.num_heads, 128), torch.randn(1, INDEXER.num_heads).float()
            where = batch.block_tables, batch.sequence_lengths, batch.query_starts
            slots = kernels.select_tokens(index_query, weights, cache.keys, *where, options.top_k)
            query, sides = torch.randn(1, 16, 576), cache.memory.expand(2, -1, -1, -1, -1)
            count = batch.sequence_lengths.clamp(max=options.top_k)
            calls: list[Callable[[], object]] = [
                partial(dense, x, batch, turns, cache.memory),
                partial(sparse, x, batch, turns, cache),
                partial(kernels.select_tokens, index_query, weights, cache.keys, *where, options.top_k),
                partial(kernels.sparse_attention, query, sides, slots, count, 0.1),
            ]
            rounds = [[milliseconds(call) for call in calls] for _ in range(options.rounds)]
            of_dense, of_sparse, select, attend = (statistics.median(times) for times in zip(*rounds[2:], strict=True))
            print(f"{length:8} {of_dense:8.2f} {of_sparse:8.2f} {select:10.2f} {attend:10.2f}", flush=True)


if __name__ == "__main__":
    main()
