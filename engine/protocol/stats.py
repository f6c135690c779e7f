"""The engine's report about itself: gauges and counters. No torch."""

from __future__ import annotations

import msgspec

ITERATION_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper bounds of the buckets of `EngineStats.iteration_tokens`."""

MAX_DRAFT_TOKENS = 32
"""Maximum draft tokens of a row."""


class EngineStats(msgspec.Struct, array_like=True):
    """Current gauges, and counters since the start."""

    running: int = 0
    waiting: int = 0
    kv_blocks: int = 0
    kv_blocks_used: int = 0
    steps: int = 0
    idle_stage_steps: int = 0
    """Stage-steps left idle although a request could have used them."""
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    """Of started requests: like those of the prefix cache and of loaded KV, counted where a request begins, and not
    where another replica continues it."""
    generated_tokens: int = 0
    prefilling: int = 0
    """Running requests whose prompt is not computed yet."""
    started: int = 0
    """Start time in milliseconds since 1970; it changes when a replica restarts."""
    num_drafts: int = 0
    """Speculation: rows with draft tokens."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    """Accepted draft tokens."""
    encoder_cache_queries: int = 0
    """Images and videos that requests have reached: each once, and again after a preemption."""
    encoder_cache_hits: int = 0
    """Those of them whose features were known. The others were encoded."""
    encoded_features: int = 0
    adapters_prepared: int = 0
    """Adapters in the host's memory of all ranks."""
    adapters_on_device: int = 0
    adapter_swaps: int = 0
    """Adapters copied to devices."""
    kv_loading: int = 0
    """Requests that wait for KV from the store."""
    kv_loads: int = 0
    """Loads of KV that have ended."""
    kv_load_seconds: float = 0.0
    """Duration of all of them, from the decision to load until the request could start."""
    kv_loaded_memory_tokens: int = 0
    """Prompt tokens of started requests whose KV was loaded, from the store's memory, from its disk, and from other
    hosts."""
    kv_loaded_disk_tokens: int = 0
    kv_loaded_peer_tokens: int = 0
    kv_failed_load_tokens: int = 0
    """Prompt tokens whose KV should have been loaded, and was computed, as the load failed or was late."""
    kv_stored_blocks: int = 0
    """Blocks copied to the store."""
    kv_failed_copies: int = 0
    """Entries that a rank could not copy to the store or from there, for each such rank."""
    iteration_tokens: list[int] = msgspec.field(default_factory=lambda: [0] * (len(ITERATION_TOKENS) + 2))
    """Histogram of the tokens of a step, without rejected drafts: the number of steps in each bucket, the last one
    unbounded; then the sum."""
    accepted_per_position: list[int] = msgspec.field(default_factory=lambda: [0] * MAX_DRAFT_TOKENS)
    """Accepted draft tokens, by their place in the row."""


class LogRecord(msgspec.Struct, tag=True, array_like=True):
    """A log message."""

    time: float
    """Seconds since 1970."""
    level: str
    text: str
    source: str
    """The process that logged it, such as rank 1."""
    replica: int | None = None
    """Set by the API process that receives it from an engine core."""


class GpuUsage(msgspec.Struct, array_like=True):
    """NVML's report of a GPU; None: this GPU does not report it."""

    memory_used: int
    memory_total: int
    utilization: float | None = None
    """Fraction of the time in which a kernel ran, from 0 to 1."""
    power: float | None = None
    """Watts."""
    pcie_received: int | None = None
    """Bytes per second."""
    pcie_sent: int | None = None
    nvlink_received: int | None = None
    """Bytes over all links, since the driver was loaded."""
    nvlink_sent: int | None = None


class RankUsage(msgspec.Struct, array_like=True):
    """A rank's use of its host and of its GPU."""

    cpu_seconds: float
    """Processor time since the start."""
    resident_bytes: int
    """Resident memory, including shared memory."""
    shared_bytes: int
    """Shared memory in it."""
    gpu: GpuUsage | None = None


GROUPS = ("tp", "pp", "ep")
"""Purposes of communication between ranks: tensor, pipeline and expert parallelism."""


class RankStats(msgspec.Struct, array_like=True):
    """How a rank has spent its time since the start, and its use of resources.

    Times are measured on CPUs. On a GPU all are 0, as the host does not wait.
    """

    steps: int = 0
    seconds: float = 0.0
    """Duration of all steps."""
    waited: float = 0.0
    """The part in which the rank waited for others to compute: the ranks of its stage, and the previous stage."""
    is_straggler: bool = False
    """Whether it is persistently slower than the other ranks of its stage."""
    communication: tuple[float, ...] = (0.0,) * len(GROUPS)
    """Seconds of steps in communication, including waiting, for each of `GROUPS`."""
    usage: RankUsage | None = None
    """None: not known yet."""

    @property
    def busy(self) -> float:
        """Seconds for which the rank has computed."""
        return self.seconds - self.waited


class ExpertLoad(msgspec.Struct, array_like=True):
    """How evenly the shared experts are used. Every replica sends the same values from time to time."""

    layers: dict[int, int]
    """Number of experts of each MoE layer, by layer number."""
    tokens: bytes
    """int64, layer by layer and expert by expert: tokens routed to it since the start."""
    imbalance: float
    """Recent load of the busiest rank of each layer divided by the mean load of the ranks; 1 is balanced."""
    moved: int
    """Experts moved since the start."""
