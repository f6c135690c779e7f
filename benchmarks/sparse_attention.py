"""Time of a decoded token in a layer with sparse attention, over the length of the context.

.venv/bin/python benchmarks/sparse_attention.py [--models deepseek-v4]

Layers have random weights, and their caches random numbers. Columns of a model take turns, on one thread. Times are the
processor's, which other work on the machine changes less than elapsed ones.

- deepseek-v3.2: MLA on one of eight ranks (16 of the 128 heads), without and with sparse attention.
- deepseek-v4: V4-Flash on one of eight ranks (8 of the 64 heads): a layer with a window only, one whose indexer selects
  512 entries for 4 tokens each, and one with an entry for 128 tokens. The token ends a group in both.
- minimax-m3: on one of four ranks (16 query heads, one KV head), without and with sparse attention to 16 blocks of 128
  tokens.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from quire import kernels
from quire.engine.architecture.attention_spec import (
    AttentionSpec,
    BlockIndexerSpec,
    CompressedAttentionSpec,
    IndexerSpec,
    MLASpec,
)
from quire.engine.architecture.families import from_hf_config
from quire.engine.architecture.spec_parts import NormSpec, RopeSpec
from quire.engine.distributed.communicator import Parallel
from quire.engine.layers.attention import Attention
from quire.engine.layers.batch import Batch, KVBlocks
from quire.engine.layers.compressed import CompressedAttention, compressed_cache
from quire.engine.layers.kv_cache import LayerCache
from quire.engine.layers.linear import Linear
from quire.engine.layers.mla import MLA
from quire.engine.layers.rotary import Rotary
from quire.engine.layers.sparse_attention import SparseAttention

BLOCK, CPU = 16, torch.device("cpu")
Layer = TypeVar("Layer", bound=nn.Module)
Calls = list[Callable[[], object]]


def with_random_weights(layer: Layer) -> Layer:
    for weight in layer.parameters():
        weight.data.normal_(std=weight.shape[-1] ** -0.5)
    for module in layer.modules():
        if isinstance(module, Linear):
            module.pack(None)
    return layer


def cache_of(blocks: int, shape: tuple[int, int, int], block_size: int = BLOCK) -> Tensor:
    sides, heads, size = shape
    cache = kernels.allocate_kv_cache(1, blocks, heads, block_size, size, torch.get_default_dtype(), CPU, sides)[0]
    return cache.normal_()


def decode_of(length: int, table: Tensor) -> Batch:
    """The last token of a request of `length` tokens, in the blocks `table`."""
    last = length - 1
    return Batch(
        token_ids=torch.zeros(1, dtype=torch.int64),
        positions=torch.tensor([last]),
        sequence_lengths=torch.tensor([length]),
        query_starts=torch.tensor([0, 1]),
        logits_indices=torch.tensor([0]),
        groups={0: blocks_of(length, table)},
        host=kernels.HostMetadata(torch.ones(1, dtype=torch.int64).numpy(), torch.tensor([length]).numpy()),
    )


def blocks_of(length: int, table: Tensor) -> KVBlocks:
    last = length - 1
    return KVBlocks(table[last // BLOCK, None] * BLOCK + last % BLOCK, table[None])


def deepseek_v32(top_k: int) -> Callable[[int], Calls]:
    hidden, rope = 7168, RopeSpec(theta=10000.0, dim=64)
    spec = MLASpec(
        num_heads=16,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        v_head_dim=128,
        scale=192**-0.5,
        rope=rope,
        norm=NormSpec(eps=1e-6),
    )
    indexer = IndexerSpec(num_heads=64, head_dim=128, norm=NormSpec(eps=1e-6, kind="layer", bias=True), rope=rope)
    dense, sparse = (
        with_random_weights(MLA(each, hidden, Parallel()))
        for each in (spec, replace(spec, top_k=top_k, indexer=indexer))
    )

    def calls(length: int) -> Calls:
        blocks = -(-length // BLOCK)
        batch, x = decode_of(length, torch.randperm(blocks)), torch.randn(1, hidden)
        memory, keys = cache_of(blocks, spec.kv_shape(1)), cache_of(blocks, (1, 1, 128))
        turns = Rotary(rope, length)(batch.positions)
        index_query, weights = torch.randn(1, indexer.num_heads, 128), torch.randn(1, indexer.num_heads).float()
        where = batch.attention(0)[1:4]
        slots = kernels.select_tokens(index_query, weights, keys, *where, top_k)
        query, sides = torch.randn(1, 16, 576), memory.expand(2, -1, -1, -1, -1)
        count = batch.sequence_lengths.clamp(max=top_k)
        return [
            partial(dense, x, batch, turns, LayerCache(memory)),
            partial(sparse, x, batch, turns, LayerCache(memory, keys=keys)),
            partial(kernels.select_tokens, index_query, weights, keys, *where, top_k),
            partial(kernels.sparse_attention, query, sides, slots, count, 0.1),
        ]

    return calls


def deepseek_v4(_: int) -> Callable[[int], Calls]:
    required = {"scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "norm_topk_prob": True}
    model = from_hf_config({"architectures": ["DeepseekV4ForCausalLM"], "hidden_act": "silu", **required})
    attentions = [layer.attention for layer in model.layers if isinstance(layer.attention, CompressedAttentionSpec)]
    specs = {each.compressor_ratio: replace(each, num_heads=8, output_groups=1) for each in attentions}
    specs[0] = replace(specs[128], compressor=None)
    layers = {
        ratio: with_random_weights(CompressedAttention(spec, model.hidden_size, Parallel()))
        for ratio, spec in specs.items()
    }
    page = max(spec.head_dim + spec.inputs_width for spec in specs.values()) * BLOCK // (4 * specs[0].head_dim)

    def calls(length: int) -> Calls:
        number = -(-length // BLOCK)
        tokens = number + page * (torch.arange(number) % 10)  # the blocks of a window are used again
        batch = decode_of(length, tokens)
        batch = replace(batch, groups={**batch.groups, 1: blocks_of(length, torch.randperm(number))})
        found: Calls = []
        for ratio in (0, 4, 128):
            spec, x = specs[ratio], torch.randn(1, model.hidden_size)
            memory = cache_of(number + 10 * page, (1, 1, spec.head_dim), 4)
            keys = None if spec.indexer is None else cache_of(number + 10 * page, (1, 1, spec.indexer.head_dim), 4)
            cache = LayerCache(compressed=compressed_cache(spec, memory, keys, BLOCK, page), entries_group=1)
            turns = Rotary(spec.rope, length)(batch.positions)
            found.append(partial(layers[ratio], x, batch, turns, cache))
        return found

    return calls


def minimax_m3(_: int) -> Callable[[int], Calls]:
    hidden, norm = 6144, NormSpec(eps=1e-6)
    indexer = BlockIndexerSpec(head_dim=128, norm=norm, block_size=128, num_blocks=16, num_local_blocks=1)
    rope = RopeSpec(theta=5e6, dim=64)
    spec = AttentionSpec(num_heads=16, num_kv_heads=1, head_dim=128, scale=128**-0.5, rope=rope, qk_norm=norm)
    dense, sparse = (
        with_random_weights(layer)
        for layer in (
            Attention(spec, hidden, Parallel()),
            SparseAttention(replace(spec, indexer=indexer), hidden, Parallel()),
        )
    )

    def calls(length: int) -> Calls:
        blocks = -(-length // BLOCK)
        batch, x = decode_of(length, torch.randperm(blocks)), torch.randn(1, hidden)
        memory, keys = cache_of(blocks, spec.kv_shape(1)), cache_of(blocks, (1, 1, 128))
        turns, where = Rotary(rope, length)(batch.positions), batch.attention(0)[1:4]
        return [
            partial(dense, x, batch, turns, LayerCache(memory)),
            partial(sparse, x, batch, turns, LayerCache(memory, keys=keys)),
            partial(kernels.select_blocks, torch.randn(1, 1, 128), keys, *where, 128, 16, 1),
        ]

    return calls


MODELS: dict[str, tuple[Callable[[int], Callable[[int], Calls]], tuple[str, ...]]] = {
    "deepseek-v3.2": (deepseek_v32, ("dense", "sparse", "selection", "attention")),
    "deepseek-v4": (deepseek_v4, ("window", "1 for 4", "1 for 128")),
    "minimax-m3": (minimax_m3, ("dense", "sparse", "selection")),
}
"""The function that makes the calls of a model, and their names."""


def milliseconds(call: Callable[[], object]) -> float:
    started = time.process_time()
    call()
    return 1e3 * (time.process_time() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    lengths = [1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072]
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--lengths", type=int, nargs="+", default=lengths, help="tokens of context")
    parser.add_argument("--top-k", type=int, default=2048, help="tokens that DeepSeek V3.2 selects")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    kernels.prepare("cpu")()
    torch.set_default_dtype(getattr(torch, options.dtype))
    print("milliseconds of a layer for a token, medians; selection and attention are parts of sparse")
    for name in options.models:
        make, columns = MODELS[name]
        calls = make(options.top_k)
        print(f"{name}\n{'context':>8} {' '.join(f'{column:>10}' for column in columns)}")
        with torch.inference_mode():
            for length in options.lengths:
                each = calls(length)
                rounds = [[milliseconds(call) for call in each] for _ in range(options.rounds)]
                medians = [statistics.median(times) for times in zip(*rounds[2:], strict=True)]
                print(f"{length:8} {' '.join(f'{median:10.2f}' for median in medians)}", flush=True)


if __name__ == "__main__":
    main()
