"""Scans of layers with a recurrent state, beside transformers' scans in torch: prefill, and decode of many requests.

.venv/bin/python benchmarks/recurrent.py --threads 2

The layers have the sizes of a model of 0.5B; the two take turns. Each pair is first compared, and a difference ends the
run. With one thread, times are the processor's, which other work on the machine changes less than elapsed ones.

`floor` is the best possible time of the machine: in a decode, reading and writing the states at the rate of a copy; in
a prefill, the matrix products of the chunked form (chunks of 64) at the rate of float32 products. Mamba has no
products.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.mamba import modeling_mamba
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.qwen3_next import modeling_qwen3_next

from quire import kernels

_CHUNK = 64
_LENGTH_EPS = 1e-6


@dataclass(frozen=True)
class Pair:
    """The same scan by both. Each returns the outputs `[tokens, width]` for the same random input."""

    name: str
    quire: Callable[[], Tensor]
    transformers: Callable[[], Tensor]
    state_bytes: int
    products: float
    """Multiplications and additions of the chunked form for each token; 0: there are no products."""


def gated_delta(tokens: int, requests: int, dtype: torch.dtype) -> Pair:
    """Qwen3-Next's: 8 key heads, 16 value heads of 128."""
    key_heads, heads, size, count = 8, 16, 128, tokens * requests
    query, key = (torch.randn(requests, tokens, key_heads, size, dtype=dtype) for _ in range(2))
    value = torch.randn(requests, tokens, heads, size, dtype=dtype)
    decay, beta = -F.softplus(torch.randn(requests, tokens, heads)), torch.rand(requests, tokens, heads)
    matrices, segments = torch.randn(requests, heads, size, size), segments_of(tokens, requests)
    state = None if tokens > 1 else matrices.clone()

    def quire() -> Tensor:
        q, k, v, d, b = (part.flatten(0, 1) for part in (query, key, value, decay, beta))
        return kernels.linear_attention(q, k, v, d, b, matrices, segments, size**-0.5, _LENGTH_EPS).flatten(1)

    def other() -> Tensor:
        name = "torch_recurrent_gated_delta_rule" if tokens == 1 else "torch_chunk_gated_delta_rule"
        function = getattr(modeling_qwen3_next, name)
        options: dict[str, Any] = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
        out: Tensor = function(query, key, value, decay, beta, initial_state=state, **options)[0]
        return out.reshape(count, -1)

    products = 2 * heads * (_CHUNK * (2 * size + size + size) + 3 * size * size)  # with the triangular solution
    return Pair("gated delta rule", quire, other, matrices.nbytes, products)


def mamba2(tokens: int, requests: int, dtype: torch.dtype) -> Pair:
    """Bamba's: 32 heads of 64 with one group of 128 state features."""
    heads, width, size, count = 32, 64, 128, tokens * requests
    query, key = (torch.randn(requests, tokens, 1, size, dtype=dtype) for _ in range(2))
    value = torch.randn(requests, tokens, heads, width, dtype=dtype)
    step, rates = F.softplus(torch.randn(requests, tokens, heads)), -torch.rand(heads)
    matrices, segments = torch.randn(requests, heads, size, width), segments_of(tokens, requests)
    state = matrices.transpose(2, 3).contiguous()

    def quire() -> Tensor:
        q, k, v, d, b = (part.flatten(0, 1) for part in (query, key, value, step * rates, step))
        return kernels.linear_attention(q, k, v, d, b, matrices, segments, 1.0, is_delta=False).flatten(1)

    def other() -> Tensor:
        scan: Any = modeling_mamba2
        out: Tensor
        if tokens > 1:
            out, _ = scan.mamba2_chunk_scan(value, step, rates, key, query, 256, return_final_states=True)
            return out.reshape(count, -1).to(dtype)
        per_feature = step[:, 0, :, None].expand(-1, -1, width), rates[:, None, None].expand(-1, width, size)
        out = scan.mamba2_selective_state_update(
            state, value[:, 0], *per_feature, key[:, 0].float(), query[:, 0].float()
        )
        return out.reshape(count, -1)

    products = 2 * heads * (_CHUNK * (size + width) + 2 * size * width)
    return Pair("Mamba-2", quire, other, matrices.nbytes, products)


def mamba(tokens: int, requests: int, dtype: torch.dtype) -> Pair:
    """Mamba's: 2048 channels with 16 state features."""
    width, size, count = 2048, 16, tokens * requests
    x = torch.randn(requests, tokens, width, dtype=dtype)
    key, query = (torch.randn(requests, tokens, size, dtype=dtype) for _ in range(2))
    step, rates = F.softplus(torch.randn(requests, tokens, width)), -torch.rand(size, width)
    matrices, segments = torch.randn(requests, 1, size, width), segments_of(tokens, requests)
    state, columns = matrices[:, 0].transpose(1, 2).contiguous(), rates.T.contiguous()

    def quire() -> Tensor:
        u, d, k, q = (part.flatten(0, 1) for part in (x, step, key, query))
        return kernels.selective_scan(u, d, rates, k, q, matrices, segments)

    def other() -> Tensor:
        scan: Any = modeling_mamba
        out: Tensor
        if tokens > 1:
            rows = x.transpose(1, 2), step.transpose(1, 2), columns, key.transpose(1, 2), query.transpose(1, 2)
            out, _ = scan.mamba_selective_scan(*rows, return_last_state=True)
            return out.transpose(1, 2).reshape(count, -1)
        rows = x[:, 0], step[:, 0], columns, key[:, 0].float(), query[:, 0].float()
        out = scan.mamba_selective_state_update(state, *rows)
        return out

    return Pair("Mamba", quire, other, matrices.nbytes, 0.0)


def segments_of(tokens: int, requests: int) -> kernels.StateSegments:
    """Prefills begin with a state of zeros; decodes go on with theirs."""
    rows = torch.arange(requests)
    read = rows if tokens == 1 else torch.full_like(rows, -1)
    return kernels.StateSegments(torch.arange(requests + 1) * tokens, torch.arange(requests + 1), read, rows)


def seconds(call: Callable[[], Tensor]) -> float:
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    started = clock()
    call()
    return clock() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=2048, help="of a prefill")
    parser.add_argument("--requests", type=int, default=32, help="of a decode")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    dtype: torch.dtype = getattr(torch, options.dtype)
    kernels.prepare("cpu")()
    source, target, square = torch.ones(1 << 25), torch.ones(1 << 25), torch.randn(1536, 1536)
    copy = 2 * source.nbytes / min(seconds(lambda: target.copy_(source)) for _ in range(9))
    rate = 2 * len(square) ** 3 / min(seconds(lambda: square @ square) for _ in range(9))
    print(f"{options.threads} threads, {options.dtype}: copy {copy / 1e9:.1f} GB/s, products {rate / 1e9:.0f} GFLOP/s")
    print(f"milliseconds, medians of {options.rounds} rounds")
    print(f"{'':40} {'quire':>8} {'floor':>8} {'transformers':>13} {'ratio':>7}")
    with torch.inference_mode():
        for make in (gated_delta, mamba2, mamba):
            for tokens, requests in ((options.tokens, 1), (1, options.requests)):
                pair = make(tokens, requests, dtype)
                mine, theirs = pair.quire().float(), pair.transformers().float()
                bound = (0.02 if dtype == torch.bfloat16 else 1e-3) * float(theirs.abs().max())
                assert float((mine - theirs).abs().max()) <= bound, "the two do not compute the same"
                rounds = [(seconds(pair.quire), seconds(pair.transformers)) for _ in range(options.rounds)]
                times = [statistics.median(column) * 1e3 for column in zip(*rounds, strict=True)]
                ratio = statistics.median(other / own for own, other in rounds)
                floor = 2e3 * pair.state_bytes / copy if tokens == 1 else 1e3 * pair.products * tokens / rate
                what = f"{pair.name}, " + (f"decode of {requests}" if tokens == 1 else f"prefill of {tokens}")
                print(
                    f"{what:40} {times[0]:8.3f} {f'{floor:.3f}' if floor else '':>8} {times[1]:13.3f} {ratio:6.1f}x",
                    flush=True,
                )


if __name__ == "__main__":
    main()
