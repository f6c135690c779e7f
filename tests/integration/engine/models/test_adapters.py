"""A decoder whose linear layers are changed by adapters, against the same decoder with the changes in its weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.engine.config.engine_config import EngineConfig
from quire.engine.distributed.communicator import Parallel
from quire.engine.layers.batch import Batch, BatchAdapters, KVBlocks
from quire.engine.layers.kv_cache import LayerCache
from quire.engine.models.build import load
from quire.engine.models.decoder import Decoder
from quire.kernels import AdapterRows, StateSegments
from tests.fakes.adapter_pools import SLOTS, Pool, add_pools, merge
from tests.fakes.families import CASES, LENGTHS, write
from tests.fakes.model_logits import CPU, blocks_per_page, configure, in_pages, layer_cache
from tests.fakes.ranks import on_ranks

OF_REQUESTS = (0, -1, 2, 0)
"""The slot of each request's adapter; one is empty."""
CHUNKS = ((21, 7, 30, 1), (10, 32, 1, 5), (1, 1, 1, 1), (3, 1, 2, 1))
"""The tokens of each request in each step."""
KINDS = (
    *("Llama", "Qwen2 MoE", "Gemma 3n", "Gemma 4, layer inputs, shared keys and values", "Zamba2", "DeepSeek V3.2"),
    *("DeepSeek V4", "Nemotron 3, latent experts", "Qwen3-Next", "Kimi Linear", "RecurrentGemma", "RWKV-4", "xLSTM"),
    *("Mamba", "Jamba", "LFM3", "MiniMax-M3", "GLM-5.3", "Qwen4-Exp", "Llama 4", "Falcon-H1"),
)
"""Cases with all kinds of layers; the others are slow tests."""
SHARDED = ("Qwen2 MoE", "Gemma 3n", "Zamba2", "Nemotron 3, latent experts", "Jamba", "RWKV-4", "GLM-5.3")


def outputs(decoder: Decoder, config: EngineConfig, slots: Sequence[int] | None, parallel: Parallel) -> Tensor:
    """The logits of the requests' tokens, one step after another; the last step only of the requests' last tokens, if
    the model can. Without `slots`, no token has an adapter."""
    arch, count = config.model.architecture, len(OF_REQUESTS)
    total = torch.tensor(CHUNKS).sum(0)
    generator = torch.Generator().manual_seed(3)
    tokens = [torch.randint(0, 131, (length,), generator=generator) for length in total.tolist()]
    page, dtype = blocks_per_page(arch, config.model.dtype), getattr(torch, config.model.dtype)
    width = int(total.max() + 3) // 4
    tables, numbers = torch.arange(count * width).view(count, width), torch.arange(count)
    caches: list[LayerCache] = []
    for number in range(arch.num_layers):
        source = arch.layers[number].kv_source
        own = layer_cache(arch.layers[number], parallel.size, count * width, dtype, page, count)
        caches.append(own if source is None else own._replace(memory=caches[source].memory))
    done, found = torch.zeros(count, dtype=torch.int64), []
    for step, chunk in enumerate(CHUNKS):
        counts = torch.tensor(chunk)
        starts, rows = F.pad(counts.cumsum(0), (1, 0)), numbers.repeat_interleave(counts)
        positions = torch.cat([torch.arange(b, b + n) for b, n in zip(done.tolist(), chunk, strict=True)])
        read = numbers if step else torch.full_like(numbers, -1)
        groups: dict[int, KVBlocks | StateSegments] = {**in_pages(tables, rows, positions, page)}
        groups[2] = StateSegments(starts, F.pad(numbers + 1, (1, 0)), read, numbers)
        last = starts[1:] - 1
        is_narrow = step == len(CHUNKS) - 1 and decoder.supports_logits_indices_only
        adapters = None
        if slots is not None:
            of_rows = torch.tensor(slots)[rows]
            tokens_, lasts = (AdapterRows.of(each, SLOTS) for each in (of_rows, of_rows[last]))
            adapters = BatchAdapters(tokens_, lasts, lasts)
        batch = Batch(
            token_ids=torch.cat([own[p : p + n] for own, p, n in zip(tokens, done.tolist(), chunk, strict=True)]),
            positions=positions,
            sequence_lengths=done + counts,
            query_starts=starts,
            logits_indices=last,
            groups=groups,
            logits_indices_only=is_narrow,
            adapters=adapters,
        )
        found.append(decoder.logits(decoder(None, batch, caches))[slice(None) if is_narrow else last])
        done = done + counts
    return torch.stack(found)


def slow(cases: Iterable[str], others: Sequence[str]) -> list[Any]:
    return [pytest.param(case, marks=pytest.mark.slow) for case in cases if case not in others]


@pytest.mark.parametrize("case", [*KINDS, *slow(CASES, KINDS)])
def test_logits_are_those_of_changed_weights(case: str, tmp_path: Path) -> None:
    """Of rows with adapters and of rows without, side by side. The latter are to the last bit those of a model that no
    adapter changes. All layers that adapters may change are given their rows."""
    write(case, tmp_path)
    config = configure(tmp_path, max_model_len=LENGTHS.get(case, 256))
    with torch.no_grad():
        base = load(config, 0, Parallel(), CPU)
        plain = outputs(base, config, None, Parallel())
        pools = add_pools(base)
        found = outputs(base, config, OF_REQUESTS, Parallel())
        unread = [name for name, pool in pools.items() if id(pool) not in Pool.used]
        assert not unread
        assert outputs(base, config, None, Parallel()).equal(plain)
        for slot in (0, 2):
            own = torch.tensor(OF_REQUESTS) == slot
            merged = load(config, 0, Parallel(), CPU, pack=False)
            merge(merged, slot)
            expected = outputs(merged, config, None, Parallel())[:, own]
            assert (found[:, own] - expected).abs().max() <= 1e-4 * expected.abs().max()
            assert (found[:, own] - plain[:, own]).abs().max() >= 1e-2 * expected.abs().max()
    none = torch.tensor(OF_REQUESTS) < 0
    assert found[:, none].equal(plain[:, none])


@pytest.mark.parametrize("case", [*SHARDED, *slow(KINDS, SHARDED)])
def test_ranks_change_their_own_slices(case: str, tmp_path: Path) -> None:
    """Also with factors and biases, which are added once."""
    write(case, tmp_path)

    def run(config: EngineConfig, parallel: Parallel) -> Tensor:
        decoder = load(config, parallel.rank, parallel, CPU)
        add_pools(decoder, has_scale=True)
        return outputs(decoder, config, OF_REQUESTS, parallel)

    length = LENGTHS.get(case, 256)
    alone, *ranks = (
        result
        for size in (1, 2)
        for result in on_ranks(size, partial(run, configure(tmp_path, max_model_len=length, tensor_parallel_size=size)))
    )
    for result in ranks:
        assert (result - alone).abs().max() <= 1e-4 * alone.abs().max()


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_rows_without_adapters_are_those_of_the_quantized_base(quantization: str, tmp_path: Path) -> None:
    write("Llama", tmp_path, hidden_size=64, intermediate_size=96)
    config = configure(tmp_path, max_model_len=256, quantization=quantization)
    with torch.no_grad():
        decoder = load(config, 0, Parallel(), CPU)
        plain = outputs(decoder, config, None, Parallel())
        add_pools(decoder)
        found = outputs(decoder, config, OF_REQUESTS, Parallel())
    for number, slot in enumerate(OF_REQUESTS):
        assert found[:, number].equal(plain[:, number]) == (slot < 0)
