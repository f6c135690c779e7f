"""The resolved configuration (`EngineConfig`): frozen, and pickled once to each process. No torch.

`quire.engine.config.resolve.resolve` makes it from `EngineOptions`. Nothing after that reads the options;
`RayPlacement` carries the options that nodes started by Ray resolve themselves.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from quire.engine.architecture.families.tensors import weight_names
from quire.engine.architecture.model_spec import ModelSpec
from quire.engine.architecture.quantization.method import Method, Scheme
from quire.engine.architecture.quantization.online import Online
from quire.engine.config.options import EngineOptions
from quire.engine.config.pooling import Pooling
from quire.engine.config.topology import SlowestLinks
from quire.engine.protocol.media import MediaKind
from quire.engine.protocol.supervision import ReplicaRole

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The resolved model."""

    path: Path
    tokenizer: Path
    architecture: ModelSpec
    dtype: str
    stored_dtype: str | None = None
    """The 16-bit type in which products of float32 keep the checkpoint's weights, and widen them; None: `dtype`."""
    quantization: Literal["int8", "int4"] | None
    """How the decoder's weights are quantized when they are packed, on CPUs; on GPUs, `quantized` says it."""
    tower_quantization: Literal["int8"] | None = None
    """The same for the tower's weights."""
    max_model_len: int
    """Most tokens of a request, prompt and output together."""
    min_model_len: int = 0
    """Length to which `max_model_len` may be reduced, to what the KV cache holds; 0: the user has set the length."""
    unreduced_model_len: int = 0
    """`max_model_len` before it was reduced; 0: it was not."""
    load_format: Literal["safetensors", "pt", "mistral", "gguf", "dummy"]
    hf_overrides: Mapping[str, Any] = field(default_factory=dict)
    """Values that replace values in config.json; `architecture` includes them."""
    sampling_defaults: dict[str, Any] = field(default_factory=dict)
    """Sampling parameters that requests have unless they set them, from generation_config.json."""
    max_output_tokens: int | None = None
    """Maximum number of tokens that a request may generate; larger `max_tokens` are reduced."""
    packed_cache: float | Literal["auto"] = 0.0
    """Maximum GiB of packed weights that are kept on this host's disk; auto: depends on the disk."""
    eos_token_ids: tuple[int, ...]
    trust_remote_code: bool
    seed: int
    max_logprobs: int = 20
    """Maximum number of log-probabilities that a request may ask for at each position; -1: no limit."""
    attention_backend: Literal["auto", "triton", "flashinfer", "reference"] = "auto"
    """auto: each rank chooses the fastest correct one on its device."""
    pooling: Pooling | None = None
    """The pooling of an embedding model; None: the model generates text."""
    quantized: Method | None = None
    """How the checkpoint is quantized, or how it is quantized while it is loaded."""
    quantized_outer: frozenset[str] = frozenset()
    """Which of embedding and head (`ModelSpec.outer_matrices`), and of the tower's modules, the checkpoint stores
    quantized."""
    rounded_types: tuple[Literal["int8", "fp8", "fp4"], ...] = ("int8",)
    """Types in which the device multiplies quantized weights by inputs that are rounded to the same type."""

    @property
    def position_len(self) -> int:
        """The length that scaled positions are for. It does not depend on the memory, and so neither do answers."""
        return self.unreduced_model_len or self.max_model_len

    def with_length(self, max_model_len: int) -> ModelConfig:
        """Return a copy with a length of at most `max_model_len`; the same if the length may not be reduced."""
        length = max(max_model_len, self.min_model_len or self.max_model_len)
        if length >= self.max_model_len:
            return self
        return dataclasses.replace(self, max_model_len=length, unreduced_model_len=self.position_len)

    @property
    def weight_dtype(self) -> str:
        """The type of matrices that are not quantized, and of embeddings."""
        return self.stored_dtype or self.dtype

    @property
    def is_quantized_online(self) -> bool:
        """Whether --quantization quantizes weights while they are loaded."""
        return self.requested_quantization is not None

    @property
    def requested_quantization(self) -> str | None:
        """How --quantization quantizes weights while they are loaded."""
        return self.quantized.requested if isinstance(self.quantized, Online) else self.quantization

    def quantization_of(self, module: str) -> Literal["int8", "int4"] | None:
        """How the weights of a module, given by its path, are quantized when they are packed."""
        return self.tower_quantization if module.startswith("tower.") else self.quantization

    def keeps_quantized(self, module: str = "") -> bool:
        """Whether the weights of a module, by default of the decoder, are kept as a quantized checkpoint stores them.
        Otherwise they are requantized."""
        return self.quantized is not None and self.quantization_of(module) is None

    @property
    def min_window(self) -> int:
        """Minimum number of tokens that each layer sees; `max_model_len` without windows."""
        layers = (layer.attention for layer in self.architecture.layers)
        windows = (attention.window for attention in layers if attention is not None and attention.window)
        return min(windows, default=self.max_model_len)

    @cached_property
    def weight_names(self) -> Mapping[tuple[int | None, str], Sequence[str]]:
        """See `tensors.weight_names`."""
        return weight_names(self.architecture)

    @property
    def embedding_name(self) -> str:
        """The embedding's name in the checkpoint, without `.weight`."""
        embedding, _ = self.architecture.outer_matrices(1)
        return self.weight_names[None, embedding.module][0]

    @cached_property
    def schemes(self) -> Mapping[tuple[int | None, str], Sequence[Scheme | None]]:
        """How the checkpoint stores the weights that each module combines; None: not quantized. Modules are as in
        `weight_names`, but outside the decoder's layers only modules in `quantized_outer` are included."""
        if self.quantized is None:
            return {}
        found = {
            (number, module): [self.quantized.scheme(name) for name in names]
            for (number, module), names in self.weight_names.items()
            if (number is not None and not module.startswith("tower.")) or module in self.quantized_outer
        }
        embedding, _ = self.architecture.outer_matrices(1)
        if schemes := found.get((None, embedding.module)):
            found[None, embedding.module] = [scheme and scheme.of_embedding() for scheme in schemes]
        return found


@dataclass(frozen=True, kw_only=True)
class ExpertParallelConfig:
    """Expert parallelism: whole experts are distributed over a stage's ranks in all replicas, which step together."""

    placement: Literal["linear", "round_robin"] = "linear"
    all2all_backend: Literal["allgather_reducescatter", "all_to_all"] = "allgather_reducescatter"
    enable_eplb: bool = False
    """Whether busy experts are moved and replicated at run time (EPLB)."""
    num_redundant_experts: int = 0
    """Additional copies of experts in each layer."""
    step_interval: int = 3000
    """Steps between two rearrangements."""


@dataclass(frozen=True)
class RayPlacement:
    """The placement of a replica's ranks by Ray."""

    address: str
    """Address of the cluster's control store, HOST:PORT."""
    group: str | None
    """Id of the placement group to use, in hex; None: create one."""
    nodes: tuple[tuple[str, str], ...]
    """Ray's id and the address of each node with ranks, from node 1 on. Node 0 is the engine core, without ranks; its
    host may also be another node's."""
    ranks_per_node: tuple[int, ...]
    """Number of ranks on each of these nodes."""
    all_ranks_per_node: tuple[int, ...]
    """The same for all replicas, which share the processors."""
    bundles: tuple[int, ...]
    """Bundle of each rank in `group`; empty without a group."""
    options: EngineOptions
    """The options that each node resolves; node rank and leader's port are still to be set."""

    def ranks_of(self, node: int) -> range:
        counts = (0, *self.ranks_per_node)
        return range(sum(counts[:node]), sum(counts[: node + 1]))


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """The ranks of one replica, and the replicas. Rank = stage * stage_ranks + position in the stage; position =
    place in the prefill context * tensor_parallel_size + place among the ranks that share each layer.

    The ranks of a replica are on its `hosts` in order, evenly unless Ray places them: host `n` has `ranks_of(n)`.
    """

    tensor_parallel_size: int
    pipeline_parallel_size: int
    stages: tuple[range, ...]
    executor: Literal["uni", "mp", "ray"]
    device: Literal["cpu", "cuda"]
    decode_context_parallel_size: int = 1
    """Number of successive ranks of a stage that divide the tokens of each block, and have the same KV heads."""
    prefill_context_parallel_size: int = 1
    """Number of ranks of a stage with the same weights and the same KV, which divide the tokens of a step."""
    nnodes: int = 1
    """Number of hosts of all replicas, if they are started as nodes; 1: their replicas are numbered instead."""
    nodes: int = 1
    """Number of hosts of this replica."""
    first_node: int = 0
    """Number of the first of them, which has the engine core."""
    node: int = 0
    """Number of this host, among all."""
    master: tuple[str, int] = ("127.0.0.1", 0)
    """Address and port of the replica's first host, to which its other hosts connect; on these, of the host with the
    API, which tells them (`Redirected`)."""
    ray: tuple[RayPlacement, ...] = ()
    """The placement of each replica; empty: the ranks are not started by Ray."""
    devices: tuple[int, ...] = ()
    """Device index of each rank on this host, ordered by replica and rank; empty: 0, 1, 2, …"""
    links: SlowestLinks = dataclasses.field(default_factory=SlowestLinks)
    """The slowest links between these devices."""
    timeout: float = 600.0
    """Timeout of communication between ranks, in seconds."""
    watchdog_seconds: float = 10.0
    """A process or rank that is silent for longer is killed."""
    cluster_token: str = dataclasses.field(default="", repr=False)
    """Secret of the hosts (see `quire.engine.cluster.security`); empty: all are reached at loopback addresses."""
    cluster_timeout: float = 15.0
    """Seconds without a message after which another host is lost."""
    trust_weights: bool = False
    """Whether hosts compare only headers and samples of their weights."""
    custom_all_reduce: bool = True
    """Whether the GPUs of a stage may use symmetric memory for all-reduce."""
    replicas: int = 1
    replica: int = 0
    """Number of the replica that this configuration is for."""
    local_replicas: range = range(1)
    """The replicas on this host."""
    coordinator: tuple[str, int] = ("127.0.0.1", 0)
    """Address and port of the host that replicas on other hosts join."""
    accepts_hosts: bool = False
    """Whether hosts can join a server that has all its replicas on this host."""
    external_lb: bool = False
    """Whether an API on this host serves only the replicas of this host, behind an external load balancer."""
    init_method: str | None = None
    """Where the ranks of coupled replicas rendezvous, as in `parallel_state.connect`; None: the ranks of a replica
    choose a place."""
    experts: ExpertParallelConfig | None = None
    """None: each expert is sharded over the ranks of a stage, and replicas are independent."""
    prefill_replicas: int = 0
    """The first so many replicas are for prompts, and the others for decodes (`ReplicaRole`), when the server starts;
    0: replicas have no roles."""
    local_ranks: tuple[int, ...] = ()
    """Ranks on this host of each of its replicas; empty: as many as of this one."""

    def role_of(self, replica: int) -> ReplicaRole:
        """The role of a replica when the server starts, or when its host joins."""
        if not self.prefill_replicas:
            return "any"
        return "prefill" if replica < self.prefill_replicas else "decode"

    @property
    def world_size(self) -> int:
        """Ranks of one replica."""
        return self.stage_ranks * self.pipeline_parallel_size

    @property
    def stage_ranks(self) -> int:
        """Ranks of a stage."""
        return self.tensor_parallel_size * self.prefill_context_parallel_size

    def context_size(self, ranks: int) -> int:
        """Number of ranks that divide the tokens of a model over the ranks of a stage; a single rank has all."""
        return min(self.decode_context_parallel_size, ranks)

    def of_replica(self, replica: int) -> ParallelConfig:
        """Return a copy for another replica."""
        nodes = len(self.ray[replica].nodes) + 1 if self.ray else self.nodes
        return dataclasses.replace(self, replica=replica, nodes=nodes)

    @property
    def placement(self) -> RayPlacement | None:
        """Where Ray has placed the ranks of this replica."""
        return self.ray[self.replica] if self.ray else None

    @property
    def hosts(self) -> range:
        """The numbers of this replica's hosts."""
        return range(self.first_node, self.first_node + self.nodes)

    @property
    def api_replicas(self) -> range:
        """The replicas that the API of this host sends requests to."""
        return self.local_replicas if self.external_lb else range(self.replicas)

    @property
    def is_coupled(self) -> bool:
        """Whether the replicas share experts, and step together."""
        return self.experts is not None and self.replicas > 1

    @property
    def is_first_local_replica(self) -> bool:
        """Whether this is the first replica on this host."""
        return self.replica == self.local_replicas.start

    @property
    def expert_ranks(self) -> int:
        """Number of ranks that a layer's experts are distributed over: the ranks of its stage in all replicas."""
        return self.replicas * self.tensor_parallel_size

    @property
    def ranks_per_node(self) -> int:
        """Number of ranks of this replica on this host."""
        return len(self.ranks_of(self.node))

    @property
    def num_local_ranks(self) -> int:
        """Number of ranks of all replicas on this host, which share its processors and memory."""
        if self.placement is not None:
            return self.placement.all_ranks_per_node[self.node - 1] if self.node else 0
        return sum(self.local_ranks) or self.ranks_per_node * len(self.local_replicas)

    @property
    def memory_shares(self) -> int:
        """Equal parts that the host's memory is divided into, of which each rank of this replica has one: replicas have
        as much as each other, also with other layouts. What Ray's other replicas have is not free anyway."""
        return self.ranks_per_node * len(self.local_replicas)

    @property
    def ranks_per_device(self) -> int:
        """Maximum number of ranks, of all replicas, that share a device of this host."""
        return max(Counter(self.devices).values(), default=1)

    def ranks_of(self, node: int) -> range:
        if self.placement is not None:
            return self.placement.ranks_of(node)
        count, place = self.world_size // self.nodes, node - self.first_node
        return range(place * count, (place + 1) * count)

    def device_of(self, rank: int) -> int:
        """Return the device index of one of this host's ranks."""
        earlier = self.replica - self.local_replicas.start
        before = sum(self.local_ranks[:earlier]) if self.local_ranks else earlier * self.ranks_per_node
        place = before + rank - self.ranks_of(self.node).start
        return self.devices[place] if self.devices else place

    def stage_of(self, rank: int) -> int:
        return rank // self.stage_ranks

    def tp_rank_of(self, rank: int) -> int:
        return rank % self.tensor_parallel_size

    def pcp_rank_of(self, rank: int) -> int:
        """The rank's place among those that divide the tokens of a step."""
        return rank % self.stage_ranks // self.tensor_parallel_size


@dataclass(frozen=True, kw_only=True)
class KVCacheGroup:
    """A group of layers that share a block table (see `quire.engine.config.kv_cache_groups`)."""

    window: int | None = None
    """Number of keys that a query sees, including its own; blocks outside the window are freed. None: all keys."""
    layers: tuple[tuple[int, ...], ...] = ()
    """Layer numbers, by stage."""
    is_state: bool = False
    """The layers keep a recurrent state instead of keys and values: a page holds the state after some token."""
    fills_pages: bool = False
    """A block takes a page, because the layers keep more per token than in other groups."""

    def max_blocks(self, num_tokens: int, row_tokens: int, block_size: int) -> int:
        """Maximum number of blocks in use at once by a request of `num_tokens`, in rows of at most `row_tokens`."""
        blocks = -(-num_tokens // block_size)
        if self.window is None:
            return blocks
        # From the first key that the first query of the row sees.
        touched = self.window - 1 + min(row_tokens, num_tokens)
        return min(blocks, 1 + -(-(touched - 1) // block_size))

    def max_pages(self, num_tokens: int, row_tokens: int, block_size: int, blocks_per_page: int) -> int:
        """Maximum number of pages in use at once; the first and the last may have blocks that the request does not use.

        A row reads a state, writes one, and may write one at a boundary in between.
        """
        if self.is_state:
            return 3
        blocks = self.max_blocks(num_tokens, row_tokens, block_size)
        return blocks if blocks_per_page == 1 or self.fills_pages else min(blocks, 1 + -(-blocks // blocks_per_page))


@dataclass(frozen=True)
class RecentBlocks:
    """The blocks for keys and values that are not quantized yet: see `quire.kernels.int4_kv`."""

    dtype: str
    per_request: int
    """A layer's blocks of each request slot: for its newest tokens, and those before them that may be computed again.
    """
    others: int
    """Blocks for the other tokens of a step, which layers use one after another."""

    def number(self, max_num_seqs: int, layers: int) -> int:
        """All blocks of layers that have the same others."""
        return self.others + layers * max_num_seqs * self.per_request


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The paged KV cache. Every rank has the same number of blocks; block 0 is not reserved."""

    block_size: int
    num_blocks: int
    """0: the model has no KV cache."""
    dtype: str
    """A float type, int8, fp8 (see `quire.kernels.cache`) or int4."""
    enable_prefix_caching: bool
    groups: tuple[KVCacheGroup, ...] = (KVCacheGroup(),)
    """Each request has a block table in each group; all blocks come from one pool."""
    blocks_per_page: int = 1
    """Blocks that are allocated together: as many as the memory of a recurrent state. `num_blocks` is a multiple."""
    gpu_memory_utilization: float = 0.9
    """Fraction of the memory free at start-up that a rank may use, for weights, activations and cache."""
    kv_cache_memory_bytes: int | None = None
    """Size of a rank's cache that the user has chosen; None: the memory that `gpu_memory_utilization` leaves."""
    recent: RecentBlocks | None = None
    """Beside a cache in int4; None: there are none."""

    def max_blocks(self, num_tokens: int, row_tokens: int) -> int:
        """Maximum number of blocks in use at once by a request, in all groups."""
        size, page = self.block_size, self.blocks_per_page
        return page * sum(group.max_pages(num_tokens, row_tokens, size, page) for group in self.groups)

    def max_length(self, num_blocks: int, row_tokens: int, limit: int) -> int:
        """Return the length of the longest request that `num_blocks` blocks are enough for, at most `limit`."""
        return bisect_right(range(1, limit + 1), num_blocks, key=lambda length: self.max_blocks(length, row_tokens))

    def blocks_moved(self, num_tokens: int, row_tokens: int) -> int:
        """Blocks of a request that a row reads, and states that it reads and writes."""
        return sum(
            2 * self.blocks_per_page
            if group.is_state
            else group.max_blocks(num_tokens, row_tokens, self.block_size)
            * (self.blocks_per_page if group.fills_pages else 1)
            for group in self.groups
        )


_MIN_SHARE = 256
"""Minimum tokens of a stage's share: a smaller step takes about as long, because it reads the same weights."""


_DRAFTING_ROWS = 8
"""Rows that can have all drafts of a model at once, whatever `max_num_seqs` is."""
_NUM_LOOKUP_TOKENS = 16
"""See `SpeculativeConfig.num_lookup_tokens`."""


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """How the next tokens of a request are guessed."""

    method: Literal["ngram", "draft_model", "mtp", "eagle", "eagle3"] = "ngram"
    num_speculative_tokens: int = _NUM_LOOKUP_TOKENS
    """Maximum drafts that the method makes for a row."""
    prompt_lookup_min: int = 2
    """Minimum tokens that must have occurred before, for n-grams."""
    model: ModelConfig | None = None
    """The model that guesses, on the last stage; None: the scheduler guesses. Its layers are numbered after the
    target's (see `EngineConfig.drafter`)."""
    tensor_parallel_size: int = 1
    """Ranks of the last stage that `model` is sharded over: all of them, or 1 if only the first one has it."""

    @property
    def reads_hidden_states(self) -> bool:
        """Whether `model` is a head on the target, which reads its hidden states and runs in each of its steps."""
        return self.method in ("mtp", "eagle", "eagle3")

    @property
    def num_lookup_tokens(self) -> int:
        """Maximum n-gram drafts of a row. There may be some beside a draft model's, too."""
        return self.num_speculative_tokens if self.method == "ngram" else _NUM_LOOKUP_TOKENS


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits of a step, and `depth`, the number of plans in flight.

    There is one plan in flight per pipeline stage. With a single stage there can be one more, so that the core
    schedules ahead of the device.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    enable_chunked_prefill: bool
    policy: Literal["fcfs", "priority"]
    depth: int
    max_num_partial_prefills: int = 1
    """Prompts that share the prompt tokens of a step equally; a long one then does not delay the others."""
    long_prefill_token_threshold: int = 0
    """Maximum tokens of a prompt in a step, unless there is no other request; 0: no limit."""
    dynamic_chunking: bool = False
    """Whether the size of prompt chunks follows the step time, up to `max_num_batched_tokens`."""
    itl_target: float | None = None
    """Target inter-token latency in seconds; None: derived from the measured decode step."""
    speculative: SpeculativeConfig | None = None
    """None: no row has draft tokens."""

    @property
    def max_drafts(self) -> int:
        """Maximum draft tokens of a row."""
        made = self.speculative
        return 0 if made is None else max(made.num_speculative_tokens, made.num_lookup_tokens)

    @property
    def max_sampled_tokens(self) -> int:
        """Maximum tokens that a step samples; a row with drafts samples several."""
        most = max(self.max_num_seqs, 1 + self.max_drafts)
        if self.speculative is not None and self.speculative.model is not None:
            most = max(most, min(self.max_num_seqs, _DRAFTING_ROWS) * (1 + self.speculative.num_speculative_tokens))
        return min(most, self.max_num_batched_tokens)

    def share(self, tokens: int, stages: int) -> int:
        """Maximum tokens of a plan if `tokens` are pending or in flight: one stage's share of them, rounded up."""
        if stages == 1 or not self.enable_chunked_prefill:
            return self.max_num_batched_tokens
        return min(self.max_num_batched_tokens, max(-(-tokens // stages), _MIN_SHARE))


@dataclass(frozen=True, kw_only=True)
class MediaConfig:
    """Images and videos. They are measured in features: the tokens of a prompt whose embeddings these replace."""

    max_items: Mapping[MediaKind, int]
    """Maximum items of each kind in a prompt; 0: the model does not take them."""
    max_encoder_features: int
    """Features that a step encodes, unless a single item has more."""
    encoder_cache_features: int
    """Features that the ranks of the first stage keep, by digest."""
    max_item_features: int
    """Maximum features of an item, for whose activations there is memory."""


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters of requests."""

    num_slots: int
    """Adapters that a step may mix."""
    device_bytes: int
    """Bytes of each rank's device for adapters."""
    host_bytes: int
    """Bytes of the host's memory in which each rank keeps adapters; those that requests use may exceed them. The ranks
    follow the core, so that the value of the core's host counts."""


@dataclass(frozen=True, kw_only=True)
class GraphConfig:
    """Batch sizes of the decode steps that are captured once and replayed (CUDA graphs; op replay on CPU)."""

    sizes: tuple[int, ...] = ()
    """Ascending. A step is padded to the next size; larger steps and steps with prompt tokens are not replayed."""
    disabled_reason: str = ""
    """Why `sizes` is empty."""
    tower_sizes: tuple[int, ...] = ()
    """Numbers of patches for which the layers of a tower are captured, ascending. A picture is padded to the next one;
    larger ones are not replayed."""


@dataclass(frozen=True, kw_only=True)
class KVStoreConfig:
    """The KV store of each host, which its replicas share."""

    memory_bytes: int
    """Size of the arena; 0: ranks of this host use the store of their replica's first host."""
    num_tokens: int = 0
    """Tokens of prompts as long as the model allows for which memory and disk have room; 0: not known."""
    disk_path: str = ""
    """Folder of the disk tier; empty: there is none."""
    disk_bytes: int = 0
    """Most bytes in it."""
    disk_bandwidth: float = 0.0
    """Bytes per second that are written to it at most; 0: no limit."""
    peers: tuple[str, ...] = ()
    """Stores of other servers (`HOST:PORT`)."""
    peer_port: int = 0
    """Where others read from this one; 0: nowhere, unless the server has other hosts."""
    peer_bandwidth: float = 0.0
    """Bytes per second that are sent to others at most; 0: no limit."""
    min_tokens: int = 256
    """Shorter prefixes are computed: they are neither offered nor looked up."""


@dataclass(frozen=True, kw_only=True)
class KVEventsConfig:
    """How replicas tell routers which blocks they have (`quire.engine.protocol.kv_events`)."""

    endpoint: str
    """ZMQ address of replica 0; that of another has its number added to the port, or to the path."""
    replay_endpoint: str | None
    """None: batches are not sent again."""
    buffer_steps: int
    """Last batches that are kept for `replay_endpoint`."""
    hwm: int
    """Batches in the queue of a subscriber; more are lost to it."""
    max_queue_size: int
    """Batches that wait to be sent; further events wait for the next one."""
    topic: str
    hash_seed: str
    """See `quire.engine.scheduler.event_hashes`."""
    kinds: tuple[tuple[str, int | None], ...]
    """The kind of attention and the window of each group of layers, in vLLM's terms."""
    waits_for_ports: bool = False
    """Whether another server that ends may still have the ports."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The resolved configuration. It is pickled once to each process and never changes."""

    model: ModelConfig
    parallel: ParallelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    graphs: GraphConfig = GraphConfig()
    media: MediaConfig | None = None
    """None: prompts are only text."""
    lora: LoraConfig | None = None
    """None: requests have no adapters."""
    kv_store: KVStoreConfig | None = None
    """None: KV is kept on the devices alone."""
    kv_events: KVEventsConfig | None = None
    """None: nobody is told of blocks."""
    prefill: EngineConfig | None = None
    """The configuration of replicas for prompts; None: the same, as they have the same layout."""
    shared_settings: dict[str, str] = dataclasses.field(default_factory=dict)
    """Flags and resolved values that must be the same on every host (see `quire.engine.config.resolve`)."""

    def of_role(self, role: ReplicaRole) -> EngineConfig:
        """Return the configuration of a replica that is started with a role."""
        return dataclasses.replace(self if role != "prefill" else self.prefill or self, prefill=None)

    def has_layout_of(self, other: EngineConfig) -> bool:
        """Whether replicas with these configurations divide the model in the same way."""
        own, its = (
            (
                each.tensor_parallel_size,
                each.decode_context_parallel_size,
                each.prefill_context_parallel_size,
                each.stages,
            )
            for each in (self.parallel, other.parallel)
        )
        return own == its

    @property
    def drafter(self) -> EngineConfig | None:
        """The same configuration for the model that guesses tokens, whose only stage is the last one, without adapters;
        None: there is none."""
        speculative = self.scheduler.speculative
        if speculative is None or speculative.model is None:
            return None
        parallel = dataclasses.replace(
            self.parallel,
            tensor_parallel_size=speculative.tensor_parallel_size,
            decode_context_parallel_size=self.parallel.context_size(speculative.tensor_parallel_size),
            prefill_context_parallel_size=1,  # each rank computes all tokens
            pipeline_parallel_size=1,
            stages=(range(speculative.model.architecture.num_layers),),
            experts=None,
        )
        scheduler = dataclasses.replace(self.scheduler, speculative=None)
        model = speculative.model.with_length(self.model.max_model_len)
        return dataclasses.replace(self, model=model, parallel=parallel, scheduler=scheduler, media=None, lora=None)

    @property
    def with_drafter(self) -> list[EngineConfig]:
        """This configuration, and `drafter`'s if there is one."""
        return [self] if (drafter := self.drafter) is None else [self, drafter]

    def with_blocks(self, num_blocks: int) -> EngineConfig:
        """Return a copy with another number of KV blocks; 0 keeps the number.

        Unless the user has set the model's length, it is reduced to the longest request that the blocks are enough for.
        So ranks, hosts and API processes that know the same number of blocks have the same length.
        """
        cache = dataclasses.replace(self.cache, num_blocks=num_blocks or self.cache.num_blocks)
        model = self.model
        if cache.num_blocks and model.min_model_len:
            row = self.scheduler.max_num_batched_tokens
            model = model.with_length(cache.max_length(cache.num_blocks, row, model.max_model_len))
        return dataclasses.replace(self, cache=cache, model=model)
