"""What the user asked for (`EngineOptions`) and what it came to (`EngineConfig`). No torch here.

`EngineOptions` is the one list of engine flags: the command line, `--config FILE.yaml` and `LLM(...)` are all
built from its fields. `quire.engine.config.resolve.resolve` turns it into an `EngineConfig`, once.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from quire.engine.config.pooling import Pooling
from quire.engine.config.topology import CrossedLinks
from quire.engine.models.families.quantized import QuantizedCheckpoint
from quire.engine.models.model_spec import ModelSpec

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
INT4_GROUPS = (128, 64, 32)
"""Weights that share a scale at 4 bits: the largest of these that divides the input features."""
DEMO_MODEL = Path(__file__).parents[1] / "models" / "demo"


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
        "auto",
        "who runs the workers: uni (in the engine process), mp (processes on this host, or on --nnodes), ray (on the "
        "nodes of a Ray cluster; auto: that when this host has too few GPUs, or inside a placement group)",
    )
    nnodes: int = flag(1, "hosts that share the ranks evenly, in their order (without Ray)", metavar="N")
    node_rank: int = flag(
        0, "which of the --nnodes hosts this is; 0 has the API, the others run --headless", metavar="R"
    )
    master_addr: str = flag("127.0.0.1", "address of host 0, as the others reach it", metavar="ADDR")
    master_port: int = flag(29501, "port of host 0 that the others join at", metavar="PORT")
    distributed_timeout_seconds: float = flag(
        600.0, "longest that a rank waits for another, in any exchange between them", metavar="S"
    )
    disable_custom_all_reduce: bool = flag(
        False, "sum over the GPUs of a stage by NCCL alone, never through memory that they share (symmetric memory)"
    )

    data_parallel_size: int = flag(1, "replicas of the model, each with its own ranks", short="-dp", metavar="D")
    data_parallel_size_local: int | None = flag(
        None, "replicas on this host (default: all, or with --data-parallel-start-rank one)", short="-dpl", metavar="D"
    )
    data_parallel_start_rank: int | None = flag(
        None,
        "number of this host's first replica; with --headless their API is at --data-parallel-address, else this "
        "host's API serves its own replicas only, behind a balancer of yours",
        short="-dpr",
        metavar="R",
    )
    data_parallel_address: str = flag(
        "127.0.0.1", "address of the host with the API, or with replica 0", short="-dpa", metavar="ADDR"
    )
    data_parallel_rpc_port: int = flag(
        29550, "port there that replicas of other hosts join at", short="-dpp", metavar="PORT"
    )
    enable_expert_parallel: bool = flag(
        False, "spread whole experts over all ranks and replicas, instead of a slice of each over the ranks of a stage"
    )
    expert_placement_strategy: Literal["linear", "round_robin"] = flag(
        "linear", "which experts a rank has: consecutive ones, or every n-th"
    )
    all2all_backend: Literal["allgather_reducescatter", "all_to_all"] = flag(
        "allgather_reducescatter",
        "how tokens reach their experts: all tokens go to all ranks, or each only where its experts are",
    )
    enable_eplb: bool = flag(False, "measure how much each expert is used, and move and double the busy ones")
    num_redundant_experts: int = flag(0, "with --enable-eplb, copies of busy experts that a layer has, over all ranks")
    eplb_step_interval: int = flag(3000, "with --enable-eplb, steps from one move to the next", metavar="N")
    enable_dbo: bool = flag(
        False, "with --enable-expert-parallel, cut large batches in two: one computes while the other is exchanged"
    )
    dbo_token_threshold: int = flag(64, "with --enable-dbo, tokens of a replica from which on a step is cut in two")

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
        "(default: five measured decode steps, up to fifteen where prompts queue up)",
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
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "float16", "int8", "fp8", "fp8_e4m3"] = flag(
        "auto",
        "precision of the KV cache (auto: that of the model, at most 16 bits with --quantization; int8, fp8: each "
        "token and head has a scale; fp8_e4m3 is fp8)",
    )
    block_size: int = flag(16, "tokens in a block of KV cache")
    attention_backend: Literal["auto", "triton", "flashinfer", "reference"] = flag(
        "auto",
        "who computes attention on a GPU (auto: the fastest that is installed and right, timed at start; decodes in "
        "CUDA graphs are always Triton's); reference: plain torch, slow, on CPU too, to compare with",
    )
    enable_prefix_caching: bool = flag(True, "reuse the KV blocks of prompts that start alike")

    enforce_eager: bool = flag(
        False, "give the device every step operation by operation, without CUDA graphs or, on CPU, tapes"
    )
    cuda_graph_sizes: str | None = flag(
        None,
        "requests of the decode steps that are captured as CUDA graphs, e.g. 1,2,4,8; others are padded to the next "
        "(default: 1, 2, 4, 8, 16, 24, … up to --max-num-seqs)",
        metavar="N,N,…",
    )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model as it will be served."""

    path: Path
    tokenizer: Path
    architecture: ModelSpec
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
    quantized: QuantizedCheckpoint | None = None
    """How the checkpoint is quantized; its weights are held in `dtype` nevertheless, or as `quantization` says."""


@dataclass(frozen=True, kw_only=True)
class ExpertParallelConfig:
    """Whole experts, spread over the ranks of a stage in all replicas, which therefore step together."""

    placement: Literal["linear", "round_robin"] = "linear"
    all2all: Literal["allgather_reducescatter", "all_to_all"] = "allgather_reducescatter"
    is_balanced: bool = False
    """Busy experts are moved and doubled while serving (EPLB)."""
    redundant: int = 0
    """Copies of experts that a layer has beyond one of each."""
    step_interval: int = 3000
    """Steps between two moves."""
    split_tokens: int | None = None
    """A step in which some replica has so many tokens is cut in two (DBO); None: never."""


@dataclass(frozen=True)
class RayPlacement:
    """Where Ray runs the ranks."""

    address: str
    """Of the cluster's control store, HOST:PORT."""
    head: str
    """Address of this host, where the engine core is."""
    group: str | None
    """Placement group to use, in hex; None: one is made."""
    nodes: tuple[tuple[str, str], ...]
    """Ray's id and the address of each node that has ranks, from node 1 on."""
    bundles: tuple[int, ...]
    """Of each rank, in `group`; empty without one."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """The rank grid of one replica, and the replicas. Rank = stage * tensor_parallel_size + position in the stage.

    The ranks of a replica lie on `nodes` hosts in order, evenly unless there are `shares`: host `n` has `ranks_of(n)`.
    """

    tensor_parallel_size: int
    pipeline_parallel_size: int
    stages: tuple[range, ...]
    executor: Literal["uni", "mp", "ray"]
    device: Literal["cpu", "cuda"]
    nodes: int = 1
    node: int = 0
    """The host that this configuration is for."""
    master: tuple[str, int] = ("127.0.0.1", 0)
    """Address and port of host 0, which the other nodes join."""
    shares: tuple[int, ...] = ()
    """Ranks of each node; empty: each has as many."""
    ray: RayPlacement | None = None
    """None: Ray does not run the ranks."""
    devices: tuple[int, ...] = ()
    """Device of each rank on this host, in the order of ranks (and of local replicas); empty: 0, 1, 2, …"""
    links: CrossedLinks = dataclasses.field(default_factory=CrossedLinks)
    """What those have to cross to reach each other."""
    timeout: float = 600.0
    """Seconds that a rank waits for another in an exchange."""
    custom_all_reduce: bool = True
    """Whether GPUs of a stage may sum through memory that they share."""
    replicas: int = 1
    replica: int = 0
    """The one that this configuration is for."""
    local_replicas: range = range(1)
    """Those on this host."""
    experts: ExpertParallelConfig | None = None
    """None: each expert is sliced over the ranks of a stage, and replicas know nothing of each other."""

    @property
    def world_size(self) -> int:
        """Ranks of one replica."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def is_coupled(self) -> bool:
        """Whether the replicas share experts, and step together."""
        return self.experts is not None and self.replicas > 1

    @property
    def is_first_here(self) -> bool:
        """Whether no replica on this host stands before this one."""
        return self.replica == self.local_replicas.start

    @property
    def init_method(self) -> str | None:
        """Where the ranks of coupled replicas meet, as torch.distributed is told; None: those of a replica choose."""
        return f"tcp://{self.master[0]}:{self.master[1]}" if self.is_coupled else None

    @property
    def expert_ranks(self) -> int:
        """Ranks that a layer's experts are spread over: those of its stage in all replicas."""
        return self.replicas * self.tensor_parallel_size

    @property
    def ranks_per_node(self) -> int:
        """Of this replica, on this node."""
        return len(self.ranks_of(self.node))

    @property
    def ranks_here(self) -> int:
        """Ranks of all replicas on a host, which share its processors and its memory."""
        return self.ranks_per_node * len(self.local_replicas)

    @property
    def ranks_per_device(self) -> int:
        """Ranks, of all replicas, on the device of this host that has most of them."""
        return max(Counter(self.devices).values(), default=1)

    def ranks_of(self, node: int) -> range:
        shares = self.shares or (self.world_size // self.nodes,) * self.nodes
        return range(sum(shares[:node]), sum(shares[: node + 1]))

    def device_of(self, rank: int) -> int:
        """Number of the device, on this host, of one of its ranks."""
        place = (self.replica - self.local_replicas.start) * self.ranks_per_node + rank - self.ranks_of(self.node).start
        return self.devices[place] if self.devices else place

    def stage_of(self, rank: int) -> int:
        return rank // self.tensor_parallel_size

    def tp_rank_of(self, rank: int) -> int:
        return rank % self.tensor_parallel_size


@dataclass(frozen=True, kw_only=True)
class CacheGroup:
    """Layers that share a block table (see `quire.engine.config.kv_cache_groups`)."""

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
    """A float type, int8 or fp8 (see `quire.kernels.cache`)."""
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
class GraphConfig:
    """Decode steps that are captured once and replayed, each with its number of requests (CUDA graphs; tapes)."""

    sizes: tuple[int, ...] = ()
    """Rising. A step is padded to the next; one with more requests, or with a prompt's tokens, runs without."""
    why_none: str = ""
    """Why there are no sizes, where there could be."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything resolved. It is pickled once to each process and never changes."""

    model: ModelConfig
    parallel: ParallelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    graphs: GraphConfig = GraphConfig()
    options: EngineOptions = EngineOptions()
    """As they were asked for: another host resolves them for itself."""

    def with_blocks(self, num_blocks: int) -> EngineConfig:
        """The same with another size of the KV cache; 0 leaves it as it is."""
        return dataclasses.replace(
            self, cache=dataclasses.replace(self.cache, num_blocks=num_blocks or self.cache.num_blocks)
        )
