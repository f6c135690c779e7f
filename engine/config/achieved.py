"""What engines reach of a machine's peak figures, at best: the constants of `quire.engine.config.floors`. No torch.

They are few, physical, and the same for all models and GPUs. benchmarks/plan_bounds.py compares the bounds that follow
from them with published rates, which are all below; docs/guides/parallelism.md has the table and the sources.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Achieved:
    """Shares of peak figures, and the time of a kernel that does hardly anything."""

    bandwidth: float
    """Share of the bandwidth of memory."""
    flops: float
    """Share of the peak operations per second, dense."""
    kernel_seconds: float
    """From one kernel of a CUDA graph to the next one that needs its result, beside the reading of weights."""


@dataclass(frozen=True)
class Latency:
    """Seconds of a collective without data: `base`, and `each` for every rank beyond the first."""

    base: float
    each: float


PUBLISHED = 0.29, 0.82
"""The least and the greatest share of the bounds that published rates reach."""

GPU = Achieved(bandwidth=0.92, flops=0.85, kernel_seconds=2.5e-6)
"""Bandwidth: copies of large arrays reach 90 to 93 %. FLOPS: the best matrix products reach 75 to 85 % under load
(https://github.com/deepseek-ai/DeepGEMM: 1,550 of 1,979 TFLOPS in FP8 on an H800). Kernels: 1.3 µs for the launch in a
CUDA graph on an H100 (https://hazyresearch.stanford.edu/blog/2025-05-27-no-bubbles), and the latency of memory, twice
0.6 µs, before the first result is written."""

CPU = Achieved(bandwidth=1.0, flops=1.0, kernel_seconds=0.0)
"""The bandwidth is measured."""

NVLINK = Latency(3e-6, 0.25e-6)
PCIE = Latency(6e-6, 1e-6)
NETWORK = Latency(15e-6, 2e-6)
"""All-reduces of a few KiB, in one kernel inside a host. Data sheets do not have them."""

ATTENTION_KERNELS = 3
"""Kernels of a layer's attention besides its products: norm, positions and KV cache, attention."""
LATENT_ATTENTION_KERNELS = 6
"""The same for MLA: also norms of the latent vectors, and the absorbed products of queries and values."""
RECURRENT_KERNELS = 4
"""Norm, convolution, state, gated norm."""
MLP_KERNELS = 2
"""Norm, activation."""
MOE_KERNELS = 6
"""Norm, router, choice of experts, order of tokens, activation, sum of experts."""
LAST_KERNELS = 3
"""After the layers: norm, head, sampling."""
