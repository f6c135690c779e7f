"""What the user asked for (`EngineOptions`) and what it came to (`EngineConfig`). No torch here.

`EngineOptions` is the one list of engine flags: the command line, `--config FILE.yaml` and `LLM(...)` are all
built from its fields. `quire.engine.resolve.resolve` turns it into an `EngineConfig`, once.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from quire.engine.architecture import Architecture
from quire.engine.families.quantized import Quantized
from quire.engine.pooling import Pooling

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
INT4_GROUPS = (128, 64, 32)
"""Weights that share a scale at 4 bits: the largest of these that divides the input features."""
DEMO_MODEL = Path(__file__).parent / "models" / "demo"


def flag(default: Any, help: str, *, short: str | None = None, metavar: str | None = None) -> Any:
    """A dataclass field that is also a command-line flag; its type and `Literal` choices come from the annotation."""
    return dataclasses.field(default=default, metadata={"help": help, "short": short, "metavar": metavar})


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Every engine option, unresolved: `None` and "auto" mean that Quire decides. The model itself is positional."""

    model: str = str(DEMO_MODEL)
    runner: Literal["auto", "generate", "pooling"] = flag(
        "auto",
        "what the model does: generate text, or embed it as vectors (pooling; auto: that for encoders and "
        "sentence-transformers folders)",
    )

    tensor_parallel_size: int = flag(1, "ranks that share each layer", short="-tp", metavar="T")
    pipeline_parallel_size: int = flag(1, "stages that the layers are cut into", short="-pp", metavar="P")
    pipeline_layer_partition: str | None = flag(
        None, "layers of each stage, e.g. 3,2,1 (default: as even as possible)", metavar="N,N,…"
    )
    distributed_executor_backend: Literal["auto", "uni", "mp", "ray"] = flag(
        "auto", "who runs the workers: uni (in the engine process), mp (processes on this host), ray"
    )
    device: Literal["auto", "cpu", "cuda"] = flag("auto", "where the model runs (auto: CUDA when there is a GPU)")

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = flag(
        "auto", "precision of weights and activations (auto: the checkpoint's on CUDA, float32 on CPU)"
    )
    quantization: Literal["int8", "int4"] | None = flag(
        None,
        "round the weights while loading: int8 (activations too, per token) or int4 (in groups); on CPU only",
        short="-q",
    )
    model_impl: Literal["auto", "quire", "transformers"] = flag(
        "auto", "whose implementation of the model runs (auto: Quire's own, or where there is none, transformers')"
    )
    max_model_len: int | None = flag(None, "longest prompt + output, in tokens (default: the model's own)")
    load_format: Literal["auto", "safetensors", "pt", "dummy"] = flag(
        "auto",
        "what the weights are in (auto: *.safetensors); pt: pytorch_model*.bin, of which tensors only are unpickled; "
        "dummy: random weights, nothing but config.json and the tokenizer is read",
    )
    revision: str | None = flag(None, "branch, tag or commit of a Hugging Face repository")
    tokenizer: str | None = flag(None, "folder or repository of the tokenizer (default: the model's)")
    max_logprobs: int = flag(20, "likeliest tokens that logprobs and prompt_logprobs may ask for (-1: all there are)")
    trust_remote_code: bool = flag(False, "run Python code that comes with the model or its tokenizer")
    seed: int = flag(0, "seed of dummy weights, and of requests that bring none of their own")

    max_num_seqs: int = flag(256, "requests that may run at once")
    max_num_batched_tokens: int | Literal["auto"] = flag(
        "auto", "tokens that one step may compute (auto: what --itl-target-ms allows, learned from the steps)"
    )
    itl_target_ms: float | None = flag(
        None,
        "with automatic step size, longest time from token to token while prompts are computed "
        "(default: fifteen measured decode steps)",
        metavar="MS",
    )
    enable_chunked_prefill: bool = flag(True, "split long prompts over steps, beside running decodes")
    scheduling_policy: Literal["fcfs", "priority"] = flag(
        "fcfs", "who goes first: in order of arrival, or by the request's `priority` (lower is earlier)"
    )

    gpu_memory_utilization: float = flag(
        0.9, "share of the device's free memory for weights, activations and KV cache together"
    )
    kv_cache_memory_bytes: int | None = flag(None, "KV cache per rank, in bytes (instead of what the share leaves)")
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "float16", "int8"] = flag(
        "auto",
        "precision of the KV cache (auto: that of the model, at most 16 bits with --quantization; int8: each token and "
        "head has a scale)",
    )
    block_size: int = flag(16, "tokens in a block of KV cache")
    enable_prefix_caching: bool = flag(True, "reuse the KV blocks of prompts that start alike")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model as it will be served."""

    path: Path
    tokenizer: Path
    architecture: Architecture
    dtype: str
    quantization: Literal["int8", "int4"] | None
    max_model_len: int
    load_format: Literal["safetensors", "pt", "dummy"]
    eos_token_ids: tuple[int, ...]
    trust_remote_code: bool
    seed: int
    max_logprobs: int = 20
    """Likeliest tokens that a request may ask for at each position; -1: all."""
    pooling: Pooling | None = None
    """The model embeds, and this is how; None: it generates."""
    quantized: Quantized | None = None
    """How the checkpoint is quantized; its weights are held in `dtype` nevertheless, or as `quantization` says."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """The rank grid. Rank = stage * tensor_parallel_size + position in the stage."""

    tensor_parallel_size: int
    pipeline_parallel_size: int
    stages: tuple[range, ...]
    executor: Literal["uni", "mp"]
    device: Literal["cpu", "cuda"]

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def stage_of(self, rank: int) -> int:
        return rank // self.tensor_parallel_size

    def tp_rank_of(self, rank: int) -> int:
        return rank % self.tensor_parallel_size


@dataclass(frozen=True, kw_only=True)
class CacheGroup:
    """Layers that share a block table (see `quire.engine.cache_groups`)."""

    window: int | None = None
    """Keys that a query sees, its own included: blocks wholly behind it are given back. None: all are kept."""
    layers: tuple[tuple[int, ...], ...] = ()
    """Of each stage."""

    def most_blocks(self, num_tokens: int, row_tokens: int, block_size: int) -> int:
        """Blocks that a request of `num_tokens` has at once at most, if a row computes at most `row_tokens` of them."""
        blocks = -(-num_tokens // block_size)
        if self.window is None:
            return blocks
        touched = self.window - 1 + min(row_tokens, num_tokens)  # from the first key that the row's first query sees
        return min(blocks, 1 + -(-(touched - 1) // block_size))


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The paged KV cache. Every rank has the same number of blocks; block 0 is as good as any other."""

    block_size: int
    num_blocks: int
    """0: the model keeps no KV."""
    dtype: str
    """A float type, or int8."""
    enable_prefix_caching: bool
    groups: tuple[CacheGroup, ...] = (CacheGroup(),)
    """Each has a block table for every request; their blocks come from one pool."""

    def most_blocks(self, num_tokens: int, row_tokens: int) -> int:
        """Blocks that a request has at once at most, in all groups."""
        return sum(group.most_blocks(num_tokens, row_tokens, self.block_size) for group in self.groups)


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits of a step, and `depth`: how many plans are in flight.

    That is one for each pipeline stage, which also hides the core. A single stage may have one more than it runs: the
    core then schedules ahead of it.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    enable_chunked_prefill: bool
    policy: Literal["fcfs", "priority"]
    depth: int
    is_tuned: bool = False
    """Whether prompt chunks are sized by the time that a step takes; `max_num_batched_tokens` bounds them then."""
    itl_target: float | None = None
    """Seconds; None: chosen from the measured decode step."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything resolved. It is pickled once to each process and never changes."""

    model: ModelConfig
    parallel: ParallelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
