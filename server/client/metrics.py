"""All Prometheus metrics, in one table. Names and meanings are vLLM's, with the prefix `quire:`.

They are written as text here, from parts that are kept: a scrape runs on the event loop, which answers nobody
meanwhile, and `prometheus_client.generate_latest` needs several ms for each replica.
"""

from __future__ import annotations

import time
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, islice
from struct import Struct
from typing import Literal, get_args

from msgspec.structs import astuple

from quire.engine.config.engine_config import CacheConfig, EngineConfig
from quire.engine.config.parallel_config import MAX_REPLICAS
from quire.engine.protocol.engine_core import FinishReason
from quire.engine.protocol.kv_store import KVStoreStats
from quire.engine.protocol.stats import GROUPS, ITERATION_TOKENS, MAX_DRAFT_TOKENS, EngineStats, ExpertLoad, RankStats
from quire.server.client import adapter_metrics, http_metrics, media_metrics
from quire.server.client.adapter_metrics import AdapterMetrics
from quire.server.client.http_metrics import HttpMetrics, HttpTotals
from quire.server.client.media_metrics import MediaMetrics
from quire.server.client.table import map_table


def _loaded_tokens(stats: EngineStats) -> int:
    """Prompt tokens that came from the KV store."""
    return stats.kv_loaded_memory_tokens + stats.kv_loaded_disk_tokens + stats.kv_loaded_peer_tokens


# Engine metrics: name, kind, help, value.
ENGINE_METRICS: tuple[tuple[str, Literal["gauge", "counter"], str, Callable[[EngineStats], float]], ...] = (
    ("num_requests_running", "gauge", "Requests in the running batch.", lambda s: s.running),
    ("num_requests_waiting", "gauge", "Requests waiting to be scheduled.", lambda s: s.waiting),
    (
        "kv_cache_usage_perc",
        "gauge",
        "Fraction of KV blocks in use, from 0 to 1.",
        lambda s: s.kv_blocks_used / s.kv_blocks if s.kv_blocks else 0.0,
    ),
    ("kv_cache_blocks", "gauge", "Total number of KV blocks.", lambda s: s.kv_blocks),
    (
        "prefix_cache_queries",
        "counter",
        "Prompt tokens looked up in the prefix cache.",
        lambda s: s.prefix_queried_tokens,
    ),
    (
        "prefix_cache_hits",
        "counter",
        "Prompt tokens found in the prefix cache of the devices.",
        lambda s: s.prefix_hit_tokens - _loaded_tokens(s),
    ),
    (
        "num_preemptions",
        "counter",
        "Preemptions: requests that lost their KV blocks and were recomputed.",
        lambda s: s.preemptions,
    ),
    ("prompt_tokens", "counter", "Prompt tokens of started requests.", lambda s: s.prompt_tokens),
    (
        "prompt_tokens_cached",
        "counter",
        "Prompt tokens of started requests that were not computed.",
        lambda s: s.prefix_hit_tokens,
    ),
    ("generation_tokens", "counter", "Generated tokens.", lambda s: s.generated_tokens),
    ("engine_steps", "counter", "Steps of the engine loop.", lambda s: s.steps),
    (
        "idle_stage_steps",
        "counter",
        "Steps in which a pipeline stage was idle while a request was waiting.",
        lambda s: s.idle_stage_steps,
    ),
    ("spec_decode_num_drafts", "counter", "Rows with draft tokens.", lambda s: s.num_drafts),
    ("spec_decode_num_draft_tokens", "counter", "Draft tokens.", lambda s: s.num_draft_tokens),
    (
        "spec_decode_num_accepted_tokens",
        "counter",
        "Draft tokens that were what was sampled.",
        lambda s: s.num_accepted_tokens,
    ),
    (
        "encoder_cache_queries",
        "counter",
        "Images and videos whose features a request needed.",
        lambda s: s.encoder_cache_queries,
    ),
    (
        "encoder_cache_hits",
        "counter",
        "Images and videos whose features were known, and were not encoded again.",
        lambda s: s.encoder_cache_hits,
    ),
    (
        "encoded_features",
        "counter",
        "Features of images and videos that were encoded.",
        lambda s: s.encoded_features,
    ),
    ("adapters_prepared", "gauge", "Adapters in the memory of the host.", lambda s: s.adapters_prepared),
    ("adapters_on_device", "gauge", "Adapters on the devices.", lambda s: s.adapters_on_device),
    ("adapter_swaps", "counter", "Adapters that were copied to the devices.", lambda s: s.adapter_swaps),
)

# The same, of engines with a KV store.
KV_METRICS: tuple[tuple[str, Literal["gauge", "counter"], str, Callable[[EngineStats], float]], ...] = (
    (
        "external_prefix_cache_queries",
        "counter",
        "Prompt tokens looked up in the KV store: those that the devices did not have.",
        lambda s: s.prefix_queried_tokens - s.prefix_hit_tokens + _loaded_tokens(s),
    ),
    (
        "external_prefix_cache_hits",
        "counter",
        "Prompt tokens whose KV was loaded from the KV store.",
        _loaded_tokens,
    ),
    ("kv_loading_requests", "gauge", "Requests that wait for KV from the KV store.", lambda s: s.kv_loading),
    ("kv_loads", "counter", "Loads of KV from the KV store.", lambda s: s.kv_loads),
    (
        "kv_load_seconds",
        "counter",
        "Seconds of all these loads, until the request could start.",
        lambda s: s.kv_load_seconds,
    ),
    (
        "kv_recomputed_tokens",
        "counter",
        "Prompt tokens that were computed because their KV could not be loaded, or not in time.",
        lambda s: s.kv_failed_load_tokens,
    ),
    ("kv_stored_blocks", "counter", "KV blocks that were copied to the KV store.", lambda s: s.kv_stored_blocks),
    (
        "kv_failed_copies",
        "counter",
        "Entries that a rank could not copy to the KV store or from there, because it has ended or is late.",
        lambda s: s.kv_failed_copies,
    ),
)

# Metrics of a host's KV store, by tier (memory, disk, the stores of other hosts): name, kind, help, the value of each.
STORE_METRICS: tuple[tuple[str, Literal["gauge", "counter"], str, Callable[[KVStoreStats], tuple[float, ...]]], ...] = (
    ("kv_store_bytes", "gauge", "Bytes of KV in a tier.", lambda s: (s.memory_bytes, s.disk_bytes)),
    ("kv_store_capacity_bytes", "gauge", "Size of a tier.", lambda s: (s.memory_capacity, s.disk_capacity)),
    ("kv_store_entries", "gauge", "Entries in a tier: blocks of a kind.", lambda s: (s.memory_entries, s.disk_entries)),
    (
        "kv_store_written_bytes",
        "counter",
        "Bytes of KV written to a tier.",
        lambda s: (s.stored_bytes, s.written_disk_bytes),
    ),
    (
        "kv_store_read_bytes",
        "counter",
        "Bytes of KV loaded from a tier.",
        lambda s: (s.loaded_memory_bytes, s.loaded_disk_bytes, s.loaded_peer_bytes),
    ),
    (
        "kv_store_evicted_entries",
        "counter",
        "Entries that left a tier to make room.",
        lambda s: (s.evicted_memory_entries, s.evicted_disk_entries),
    ),
)

# The same about a store and those of other hosts that it reads from; absent without any.
PEER_METRICS: tuple[tuple[str, Literal["gauge", "counter"], str, Callable[[KVStoreStats], float]], ...] = (
    ("kv_store_peers", "gauge", "KV stores of other hosts that a store reads from.", lambda s: s.peers),
    ("kv_store_peers_up", "gauge", "Those of them that answer and have the same model.", lambda s: len(s.peers_up)),
    (
        "kv_store_peer_errors",
        "counter",
        "Late or wrong answers of the stores of other hosts.",
        lambda s: s.failed_peers,
    ),
    ("kv_store_sent_bytes", "counter", "Bytes of KV sent to the stores of other hosts.", lambda s: s.sent_peer_bytes),
)

# Metrics of a rank: name, kind, the name of another label, help, and the values by this label. Metrics that do not
# apply to a rank are absent.
RANK_METRICS: tuple[tuple[str, Literal["gauge", "counter"], str, str, Callable[[RankStats], dict[str, float]]], ...] = (
    (
        "rank_busy_seconds",
        "counter",
        "",
        "Seconds for which a rank computed.",
        lambda s: {"": s.busy} if s.steps else {},
    ),
    (
        "rank_wait_seconds",
        "counter",
        "",
        "Seconds for which a rank waited in a step for other ranks to compute.",
        lambda s: {"": s.waited} if s.steps else {},
    ),
    (
        "rank_communication_seconds",
        "counter",
        "group",
        "Seconds of steps that a rank spent in communication with its group, including waiting.",
        lambda s: dict(zip(GROUPS, s.communication, strict=True)) if s.steps else {},
    ),
    (
        "straggler",
        "gauge",
        "",
        "1 if a rank is persistently slower than the other ranks of its stage, which wait for it.",
        lambda s: {"": s.is_straggler} if s.steps else {},
    ),
    (
        "rank_cpu_seconds",
        "counter",
        "",
        "Processor time of a rank's process.",
        lambda s: {"": s.usage.cpu_seconds} if s.usage else {},
    ),
    (
        "rank_resident_memory_bytes",
        "gauge",
        "",
        "Resident memory of a rank's process, including shared memory.",
        lambda s: {"": s.usage.resident_bytes} if s.usage else {},
    ),
    (
        "rank_shared_memory_bytes",
        "gauge",
        "",
        "Shared memory in a rank's resident memory.",
        lambda s: {"": s.usage.shared_bytes} if s.usage else {},
    ),
    (
        "gpu_utilization_ratio",
        "gauge",
        "",
        "Fraction of the time in which the rank's GPU was in use, from 0 to 1.",
        lambda s: _gpu(s, "utilization"),
    ),
    ("gpu_memory_used_bytes", "gauge", "", "Memory in use on the rank's GPU.", lambda s: _gpu(s, "memory_used")),
    ("gpu_memory_total_bytes", "gauge", "", "Memory of the rank's GPU.", lambda s: _gpu(s, "memory_total")),
    ("gpu_power_watts", "gauge", "", "Power draw of the rank's GPU.", lambda s: _gpu(s, "power")),
    (
        "gpu_pcie_bytes_per_second",
        "gauge",
        "direction",
        "PCIe traffic of the rank's GPU.",
        lambda s: _gpu(s, "pcie_received", "received") | _gpu(s, "pcie_sent", "sent"),
    ),
    (
        "gpu_nvlink_bytes",
        "counter",
        "direction",
        "NVLink traffic of the rank's GPU, over all links.",
        lambda s: _gpu(s, "nvlink_received", "received") | _gpu(s, "nvlink_sent", "sent"),
    ),
)


def _gpu(stats: RankStats, name: str, label: str = "") -> dict[str, float]:
    """A value of the rank's GPU, if there is one that reports it."""
    value = None if stats.usage is None or stats.usage.gpu is None else getattr(stats.usage.gpu, name)
    return {} if value is None else {label: value}


# Metrics of an API key, which have its name: name, and help.
KEY_METRICS = (
    ("key_requests", "HTTP requests with an API key."),
    ("key_prompt_tokens", "Prompt tokens of the requests with an API key."),
    ("key_generation_tokens", "Generated tokens of the requests with an API key."),
)

_SECONDS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_FINE_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, *_SECONDS)
_LONG_SECONDS = (1, 2.5, 5, 7.5, 10, 20, 40, 80)
_TTFT_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, *_LONG_SECONDS, 160, 640, 2560)
_ITL_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, *_LONG_SECONDS)
_TOKENS = (*(digit * 10**power for power in range(6) for digit in (1, 2, 5)), 1_000_000)

# Histograms of requests, which the API processes observe: name, help, buckets. These have all buckets of vLLM's.
HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("Time from a request's arrival to its first token, in seconds.", _TTFT_SECONDS),
    "inter_token_latency_seconds": ("Time between two consecutive outputs of a request, in seconds.", _ITL_SECONDS),
    "request_time_per_output_token_seconds": (
        "Mean time between the tokens of a finished request, in seconds.",
        _ITL_SECONDS,
    ),
    "e2e_request_latency_seconds": (
        "Time from a request's arrival to its last token, in seconds.",
        (0.1, *_SECONDS),
    ),
    "request_queue_time_seconds": (
        "Time from a request's arrival until it was first scheduled, in seconds.",
        _FINE_SECONDS,
    ),
    "request_prefill_time_seconds": (
        "Time from when a request was first scheduled to its first token, in seconds.",
        _FINE_SECONDS,
    ),
    "request_decode_time_seconds": ("Time from a request's first to its last token, in seconds.", _FINE_SECONDS),
    "request_inference_time_seconds": (
        "Time from when a request was first scheduled to its last token, in seconds.",
        _FINE_SECONDS,
    ),
    "handover_time_seconds": (
        "Time from a request's first token on a prefill replica to its next output on another replica, in seconds.",
        _ITL_SECONDS,
    ),
    "request_prompt_tokens": ("Prompt tokens of a finished request.", _TOKENS),
    "request_prefill_kv_computed_tokens": (
        "Prompt tokens of a finished request that did not come from the prefix cache.",
        _TOKENS,
    ),
    "request_generation_tokens": ("Generated tokens of a finished request.", _TOKENS),
    "request_max_num_generation_tokens": ("Generated tokens of the longest of a prompt's `n` outputs.", _TOKENS),
    "request_params_max_tokens": ("`max_tokens` of a finished request.", _TOKENS),
    "request_params_n": ("`n`, the number of outputs of a prompt.", (1, 2, 5, 10, 20)),
}
VLLM_NAMES = frozenset(HISTOGRAMS) - {"handover_time_seconds"} | {
    "iteration_tokens_total",
    "lora_requests_info",
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "external_prefix_cache_queries",
    "external_prefix_cache_hits",
    "num_preemptions",
    "prompt_tokens",
    "prompt_tokens_cached",
    "prompt_tokens_cached_by_source",
    "prompt_tokens_by_source",
    "generation_tokens",
    "request_success",
    "cache_config_info",
    "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
    "spec_decode_num_accepted_tokens_per_pos",
}
"""The metrics that vLLM also has, with the same meaning and labels. They are also exported with the prefix `vllm:`."""

# Counters of requests that change replicas after their first token, which the API processes count: name, and help.
HANDOVERS = {
    "requests_handed_over": "Requests whose prompt this replica has computed, and that continued on another one.",
    "handed_over_tokens": "Tokens of requests handed over to this replica whose KV it had or loaded.",
    "handed_over_tokens_recomputed": "Tokens of requests handed over to this replica that it computed again.",
}

_EXPERT_SERIES = 4096
"""Maximum number of experts (over all layers) with individual metrics; above it, there are only sums over ranks and
layers.
"""


def _layout() -> tuple[dict[str, slice], int]:
    """Return the place of each group of an API process's values for one replica, and the number of values.

    They are followed by the newest stats that the replica has sent to this process.
    """
    sizes = {name: len(bounds) + 2 for name, (_, bounds) in HISTOGRAMS.items()}
    sizes |= {"finished": len(FINISH_REASONS), **dict.fromkeys(HANDOVERS, 1)}
    ends = list(accumulate(sizes.values()))
    return {name: slice(end - size, end) for (name, size), end in zip(sizes.items(), ends, strict=True)}, ends[-1]


FINISH_REASONS: tuple[str, ...] = get_args(FinishReason)
_AT, _CELLS = _layout()
_SCALARS = len(EngineStats.__struct_fields__) - 2
"""The numbers in the stats before the lists."""
assert EngineStats.__struct_fields__[_SCALARS:] == ("iteration_tokens", "accepted_per_position")
_STARTED, _STEPS, _LOAD_SECONDS = map(EngineStats.__struct_fields__.index, ("started", "steps", "kv_load_seconds"))
_POSITIONS = _SCALARS + len(EngineStats().iteration_tokens)
_STATS = _POSITIONS + MAX_DRAFT_TOKENS
_make_stats: Callable[..., EngineStats] = EngineStats
_PACK = Struct(f"{_STATS}d").pack_into
_PER_REPLICA = _CELLS + _STATS
_HTTP = MAX_REPLICAS * _PER_REPLICA
"""The place of the counts of HTTP requests in a process's values."""
_ADAPTERS = _HTTP + http_metrics.CELLS
"""The place of the counts of adapters in a process's values."""
_PER_PROCESS = _ADAPTERS + adapter_metrics.CELLS
"""Memory that is not used is not allocated."""
ReplicaState = Literal["removed", "loading", "up", "draining", "restarting", "dead"]
STATES: tuple[ReplicaState, ...] = get_args(ReplicaState)
SHOWN_STATES = (*STATES[1:], "unresponsive")
"""Values of the label `state`. A replica that is up may be unresponsive."""
_LIVE = ("up", "draining")
_STORE_SECONDS = 10.0
"""A KV store of which nothing has been heard for so long is not up. Stats come every second."""
_DEATH = 64
"""Cells of the last death of a replica: its time, then the reason as UTF-8, which is cut if it is longer."""
_PROCESSES = (2 + _DEATH) * MAX_REPLICAS
"""The place of the values of the processes."""


@dataclass(frozen=True)
class Death:
    """The death of a replica."""

    time: float
    """Seconds since 1970."""
    reason: str


def media_table(path: str) -> str:
    """Return the file of `MediaMetrics` beside the file of the other metrics."""
    return f"{path}-media"


class Metrics:
    """The metrics of one model, summed over its API processes, for each replica: its number is the label `engine`.

    They are in a table of float64: the file at `path`, which all processes map. First come the state of each replica,
    the number of its deaths, and the last one, then the values of each process. The process that is scraped adds them
    up. The counts of a process survive its death, and its successor continues them. Without a path, this process is the
    only one.
    """

    def __init__(
        self,
        model_name: str,
        path: str | None = None,
        index: int = 0,
        count: int = 1,
        *,
        config: EngineConfig | None = None,
        vllm_names: bool = True,
    ) -> None:
        """`index` is the number of this process among `count`. `config` is for labels; None: they are left out.

        With `vllm_names`, the metrics that vLLM also has are also exported under its names.
        """
        self._table = map_table(path, _PROCESSES + count * _PER_PROCESS)
        self._cells = memoryview(self._table).cast("d")
        self._states = self._cells[:MAX_REPLICAS]
        """By replica, as places in `STATES` from 1 on; 0: there was never a replica with this number."""
        self._deaths = self._cells[MAX_REPLICAS : 2 * MAX_REPLICAS]
        self._last_deaths = self._cells[2 * MAX_REPLICAS : _PROCESSES]
        self._starts = [_PROCESSES + process * _PER_PROCESS for process in range(count)]
        """The start of each process's values."""
        self._own = self._starts[index]
        self._http = [HttpMetrics(self._cells[start + _HTTP : start + _ADAPTERS]) for start in self._starts]
        self.http = self._http[index]
        self._adapters = [
            AdapterMetrics(self._cells[start + _ADAPTERS : start + _PER_PROCESS]) for start in self._starts
        ]
        self.adapters = self._adapters[index]
        takes_media = config is not None and config.media is not None
        self.media = MediaMetrics(path and media_table(path)) if takes_media else None
        """None: the model does not take images, or `config` is not known."""
        self._model_name, self._config, self._vllm_names = model_name, config, vllm_names
        self.unresponsive: frozenset[int] = frozenset()
        """Replicas that are up but silent, as this process sees it."""
        self.expert_load: ExpertLoad | None = None
        """The newest value; every process receives it."""
        self.rank_stats: dict[int, list[RankStats]] = {}
        """By replica, as above."""
        self.stage_ranks: dict[int, int] = {}
        """By replica, the ranks of each of its stages; 0: not known."""
        self._stores_of: dict[int, str] = {}
        """By replica that has a KV store: which one (`Replica.store`)."""
        self._kv_stores: dict[str, tuple[str, KVStoreStats, float]] = {}
        """By store: its host, the newest stats, and when they came, on the monotonic clock."""

    def observe(self, replica: int, name: str, value: float, count: int = 1) -> None:
        """Add a value to one of `HISTOGRAMS`, `count` times. The client library would cost several µs."""
        bounds, cells = HISTOGRAMS[name][1], self._cells
        start = self._own + replica * _PER_REPLICA + _AT[name].start
        at = start + bisect_left(bounds, value)
        cells[at] = cells[at] + count
        total = start + len(bounds) + 1
        cells[total] = cells[total] + value * count

    def finished(self, replica: int, reason: FinishReason, seconds: float) -> None:
        """Count a finished request and its duration."""
        self._cells[self._own + replica * _PER_REPLICA + _AT["finished"].start + FINISH_REASONS.index(reason)] += 1
        self.observe(replica, "e2e_request_latency_seconds", seconds)

    def count(self, replica: int, name: str, value: int) -> None:
        """Add to one of `HANDOVERS`."""
        self._cells[self._own + replica * _PER_REPLICA + _AT[name].start] += value

    def take(self, replica: int, stats: EngineStats) -> None:
        """Store the stats of a replica."""
        start = self._own + replica * _PER_REPLICA + _CELLS
        *scalars, iteration_tokens, per_position = astuple(stats)
        _PACK(self._table, start * 8, *scalars, *iteration_tokens, *per_position)

    def take_store(self, replica: int, host: str, stats: KVStoreStats, store: str = "") -> None:
        """Store the stats of the KV store of a replica's host; `store` is `Replica.store`, if that is not the host."""
        self._stores_of[replica] = store = store or host
        self._kv_stores[store] = host, stats, time.monotonic()
        present = set(self._stores_of.values())
        if len(self._kv_stores) > len(present):  # a replica has come back on another host
            self._kv_stores = {each: found for each, found in self._kv_stores.items() if each in present}

    def stores(self) -> dict[str, tuple[KVStoreStats, bool]]:
        """Return the newest stats of each KV store that replicas have, and whether it is up."""
        now, states = time.monotonic(), self.states
        present = {store for replica, store in self._stores_of.items() if states.get(replica, "removed") != "removed"}
        return {
            store: (stats, now - heard < _STORE_SECONDS)
            for store, (_, stats, heard) in self._kv_stores.items()
            if store in present
        }

    def stores_by_host(self) -> dict[str, tuple[KVStoreStats, bool]]:
        """The same by host; one that shares its host's address with another, by where others read from it."""
        found = self.stores()
        hosts = {store: self._kv_stores[store][0] for store in found}
        count = Counter(hosts.values())
        return {store if count[hosts[store]] > 1 else hosts[store]: each for store, each in found.items()}

    def state(self, replica: int, state: ReplicaState) -> None:
        """Set the state of a replica; called by the process that supervises it."""
        self._states[replica] = 1 + STATES.index(state)
        if state == "removed":  # another replica may get its number
            self._last_deaths[replica * _DEATH] = 0.0

    def count_cut(self, process: int) -> int:
        """Count the requests that API process `process` had when it ended, and return their number."""
        self._adapters[process].cut()
        return self._http[process].cut()

    def count_death(self, replica: int, reason: str) -> None:
        """Count the death of a replica; called by the process that supervises it."""
        self._deaths[replica] += 1
        cells, text = self._last_deaths[replica * _DEATH : (replica + 1) * _DEATH], reason.encode(errors="replace")
        cells[0] = 0.0  # others read it meanwhile
        cells.cast("B")[8:] = text[: 8 * (_DEATH - 1)].ljust(8 * (_DEATH - 1), b"\0")
        cells[0] = time.time()

    def last_death(self, replica: int) -> Death | None:
        """Return the last death of a replica, if there is one."""
        cells = self._last_deaths[replica * _DEATH : (replica + 1) * _DEATH]
        if not (at := cells[0]):
            return None
        return Death(at, bytes(cells.cast("B")[8:]).rstrip(b"\0").decode(errors="ignore"))

    @property
    def states(self) -> dict[int, ReplicaState]:
        """The states of all replicas, including those that have been removed."""
        return {replica: STATES[int(place) - 1] for replica, place in enumerate(self._states.tolist()) if place}

    def of(self, replica: int) -> EngineStats:
        """Return the newest stats that a replica has sent to any process, without its lists. Nothing runs on one that
        is not up.
        """
        start = self._newest(replica)
        stats = _make_stats(*map(int, self._cells[start : start + _SCALARS]), [], [])
        stats.kv_load_seconds = self._cells[start + _LOAD_SECONDS]
        place = int(self._states[replica])
        if not place or STATES[place - 1] not in _LIVE:
            stats.running = stats.waiting = stats.prefilling = stats.kv_blocks_used = 0
        return stats

    def histogram(self, replica: int, name: str) -> list[float]:
        """Return one of `HISTOGRAMS`, summed over all processes: the number of values in each bucket, and their sum."""
        return self._sums(replica)[_AT[name]]

    def totals(self, name: str, replicas: Collection[int]) -> list[float]:
        """Return one of `HISTOGRAMS`, or of `finished` the requests by `FINISH_REASONS`, summed over replicas and all
        processes.
        """
        at, cells = _AT[name], self._cells
        starts = [start + replica * _PER_REPLICA for start in self._starts for replica in replicas]
        found = [cells[start + at.start : start + at.stop].tolist() for start in starts]
        return list(map(sum, zip(*found, strict=True))) if found else [0.0] * (at.stop - at.start)

    @property
    def failed(self) -> list[float]:
        """The HTTP requests that were refused or have failed, by each of `http_metrics.REASONS`, of all processes."""
        return HttpMetrics.failed(self._http)

    def _newest(self, replica: int) -> int:
        """The start of a replica's newest stats."""
        at, cells = replica * _PER_REPLICA + _CELLS, self._cells
        starts = [start + at for start in self._starts]
        return max(starts, key=lambda start: (cells[start + _STARTED], cells[start + _STEPS]))

    def exposition(self) -> bytes:
        """Return all metrics in the Prometheus text format."""
        return ("".join(self._families()).removeprefix("\n") + "\n").encode()

    def _families(self) -> Iterator[str]:
        """The text of each metric. Samples start with a line break.

        Replicas that have been removed keep their counters and histograms, so that sums over replicas do not fall.
        """
        states = self.states
        known = {replica: self.of(replica) for replica in states}
        present = {replica: stats for replica, stats in known.items() if states[replica] != "removed"}
        # A host that has only the API has no store of its own.
        has_store = bool(self._kv_stores) or (self._config is not None and self._config.kv_store is not None)
        for name, kind, meaning, value in (*ENGINE_METRICS, *KV_METRICS * has_store):
            shown = present if kind == "gauge" else known
            samples = ((value(stats), {"engine": str(replica)}) for replica, stats in shown.items())
            yield self._metric(name, kind, meaning, samples)
        yield self._metric(
            "prompt_tokens_by_source",
            "counter",
            "Prompt tokens of started requests, by where their KV came from.",
            (
                (value, {"engine": str(replica), "source": source})
                for replica, stats in known.items()
                for source, value in (
                    ("local_compute", stats.prompt_tokens - stats.prefix_hit_tokens),
                    ("local_cache_hit", stats.prefix_hit_tokens - _loaded_tokens(stats)),
                    ("external_kv_transfer", _loaded_tokens(stats)),
                )
            ),
        )
        yield self._metric(
            "prompt_tokens_cached_by_source",
            "counter",
            "Prompt tokens of started requests that were not computed, by the tier that had their KV.",
            (
                (value, {"engine": str(replica), "source": source})
                for replica, stats in known.items()
                for source, value in (
                    ("device", stats.prefix_hit_tokens - _loaded_tokens(stats)),
                    ("host", stats.kv_loaded_memory_tokens),
                    ("disk", stats.kv_loaded_disk_tokens),
                    ("peer", stats.kv_loaded_peer_tokens),
                )
            ),
        )
        if self._config is not None:
            yield self._cache_config(self._config.cache, present)
        places = range(0 if self._config is None else self._config.scheduler.max_drafts)
        yield self._metric(
            "spec_decode_num_accepted_tokens_per_pos",
            "counter",
            "Draft tokens that were what was sampled, by their position in the row.",
            (
                (self._cells[start + _POSITIONS + at], {"engine": str(replica), "position": str(at)})
                for replica, start in {replica: self._newest(replica) for replica in known}.items()
                for at in places
            ),
        )
        tokens = {replica: self._newest(replica) + _SCALARS for replica in known}
        yield self._histogram(
            "iteration_tokens_total",
            "Tokens of a step, without rejected drafts.",
            ITERATION_TOKENS,
            (
                (self._cells[start : start + _POSITIONS - _SCALARS].tolist(), {"engine": str(replica)})
                for replica, start in tokens.items()
            ),
        )
        counts: Counter[str] = Counter(states.values())
        counts["unresponsive"] = sum(states.get(replica) == "up" for replica in self.unresponsive)
        counts["up"] -= counts["unresponsive"]
        samples = ((counts[state], {"state": state}) for state in SHOWN_STATES)
        yield self._metric("replicas", "gauge", "Replicas of the engine.", samples)
        meaning = "Deaths of a replica, each followed by a restart if that is possible."
        samples = ((self._deaths[replica], {"engine": str(replica)}) for replica in known)
        yield self._metric("engine_deaths", "counter", meaning, samples)
        sums = {replica: self._sums(replica) for replica in known}
        for name, (meaning, bounds) in HISTOGRAMS.items():
            if name == "handover_time_seconds" and not has_store:
                continue
            of_each = ((each[_AT[name]], {"engine": str(replica)}) for replica, each in sums.items())
            yield self._histogram(name, meaning, bounds, of_each)
        for name, meaning in HANDOVERS.items() if has_store else ():
            samples = ((sum(each[_AT[name]]), {"engine": str(replica)}) for replica, each in sums.items())
            yield self._metric(name, "counter", meaning, samples)
        samples = (
            (count, {"engine": str(replica), "finished_reason": reason})
            for replica, each in sums.items()
            for reason, count in zip(FINISH_REASONS, each[_AT["finished"]], strict=True)
        )
        yield self._metric("request_success", "counter", "Finished requests, by finish reason.", samples)
        yield from self._requests()
        if self.media is not None:
            yield from self._media(self.media)
        if self._config is not None and self._config.lora is not None:
            yield from self._of_adapters(self._config.lora.num_slots)
        yield from self._stores()
        yield from self._ranks([replica for replica in present if states[replica] in _LIVE])
        yield from self._experts()

    def _family(self, name: str, kind: str, meaning: str, text: str) -> str:
        """A metric with the text of its samples. One that vLLM also has is followed by its alias."""
        full = f"{name}_total" if kind == "counter" else name
        own = f"\n# HELP quire:{full} {meaning}\n# TYPE quire:{full} {kind}{text}"
        if not self._vllm_names or name not in VLLM_NAMES:
            return own
        alias = text.replace("\nquire:", "\nvllm:")
        return f"{own}\n# HELP vllm:{full} {meaning}\n# TYPE vllm:{full} {kind}{alias}"

    def _metric(self, name: str, kind: str, meaning: str, samples: Iterable[tuple[float, dict[str, str]]]) -> str:
        """A counter or a gauge, given the value and the labels of each sample."""
        series = ((_series(name, kind, model_name=self._model_name, **labels), value) for value, labels in samples)
        return self._family(name, kind, meaning, "".join(f"{each} {float(value)!r}" for each, value in series))

    def _histogram(
        self, name: str, meaning: str, bounds: Sequence[float], found: Iterable[tuple[Sequence[float], dict[str, str]]]
    ) -> str:
        """A histogram, given the counts of the buckets with the sum, and the labels, of each sample."""
        samples = []
        for (*counts, total), labels in found:
            buckets = [*accumulate(counts)]
            template = _histogram_template(name, tuple(bounds), model_name=self._model_name, **labels)
            samples.append(template % (*buckets, buckets[-1], total))
        return self._family(name, "histogram", meaning, "".join(samples))

    def _requests(self) -> Iterator[str]:
        """Metrics of HTTP requests. vLLM's have no prefix, and only the class of the status."""
        totals = HttpMetrics.totals(self._http)
        yield self._metric(
            "http_requests",
            "counter",
            "HTTP requests that have ended, by the status of the response; `cut`: the API process has died.",
            (
                (count, {**_route(name, "route"), "status": str(status or "cut")})
                for name, counts in totals.statuses.items()
                for status, count in zip(http_metrics.STATUSES, counts, strict=True)
                if count
            ),
        )
        meaning = "HTTP requests that were refused or failed, by the reason."
        samples = ((count, {"reason": reason}) for reason, count in totals.reasons.items())
        yield self._metric("http_requests_failed", "counter", meaning, samples)
        for at, (name, meaning) in enumerate(KEY_METRICS):
            samples = ((each[at], {"key": key}) for key, each in totals.keys.items())
            yield self._metric(name, "counter", meaning, samples)
        yield self._durations(totals, "route")
        if not self._vllm_names:
            return
        classes = dict[tuple[str, str], float]()
        for name, counts in totals.statuses.items():
            for status, count in zip(http_metrics.STATUSES, counts, strict=True):
                of = name, f"{status // 100 or 5}xx"
                classes[of] = classes.get(of, 0.0) + count
        requests = self._metric(
            "http_requests",
            "counter",
            "Total number of requests by method, status and handler.",
            ((count, {**_route(name, "handler"), "status": of}) for (name, of), count in classes.items() if count),
        )
        yield (requests + self._durations(totals, "handler")).replace("quire:http_", "http_")

    def _media(self, media: MediaMetrics) -> Iterator[str]:
        """Metrics of images and videos."""
        meaning = "1 if the process that loads images and videos is up."
        yield self._metric("media_process_up", "gauge", meaning, [(media.state == "up", {})])
        yield self._metric(
            "media_items",
            "counter",
            "Images and videos of requests: loaded, found in the cache (cached), refused, or failed.",
            (
                (count, {"kind": kind, "result": result})
                for kind in media_metrics.KINDS
                for result, count in zip(media_metrics.RESULTS, media.results(kind), strict=True)
            ),
        )
        meaning = "Time to fetch, decode and process an image or a video, or to find it in the cache, in seconds."
        seconds = ((media.seconds(kind), {"kind": str(kind)}) for kind in media_metrics.KINDS)
        yield self._histogram("media_load_seconds", meaning, media_metrics.SECONDS, seconds)
        meaning = "Bytes of processed images and videos in shared memory."
        yield self._metric("media_cache_bytes", "gauge", meaning, [(media.cache_bytes, {})])

    def _of_adapters(self, num_slots: int) -> Iterator[str]:
        """Metrics of adapters."""
        totals = AdapterMetrics.totals(self._adapters)
        running, waiting = (
            ",".join(sorted(name for name, count in counts.items() if count > 0))
            for counts in (totals.running, totals.waiting)
        )
        labels = {"max_lora": str(num_slots), "running_lora_adapters": running, "waiting_lora_adapters": waiting}
        meaning = "The adapters with running and with waiting requests, in labels; the value is the time, in seconds."
        pairs = ",".join(f'{label}="{_escape(value)}"' for label, value in sorted(labels.items()))
        sample = f"\nquire:lora_requests_info{{{pairs}}} {time.time()!r}"  # not kept: the labels change all the time
        yield self._family("lora_requests_info", "gauge", meaning, sample)
        for kind, counts in (("running", totals.running), ("waiting", totals.waiting)):
            samples = ((count, {"adapter": name}) for name, count in counts.items())
            yield self._metric(
                f"adapter_requests_{kind}", "gauge", f"Requests with an adapter that are {kind}.", samples
            )
        for at, (name, meaning) in enumerate(adapter_metrics.COUNTS):
            samples = ((each[at], {"adapter": adapter}) for adapter, each in totals.counts.items())
            yield self._metric(name, "counter", meaning, samples)
        meaning = "Time from the arrival of a request with an adapter to its first token, in seconds."
        first = ((each, {"adapter": adapter}) for adapter, each in totals.first_tokens.items())
        yield self._histogram("adapter_time_to_first_token_seconds", meaning, adapter_metrics.SECONDS, first)
        meaning = "Time to load an adapter on all replicas, in seconds."
        yield self._histogram("adapter_load_seconds", meaning, adapter_metrics.SECONDS, [(totals.loads, {})])
        meaning = "Adapters that could not be loaded."
        yield self._metric("adapter_load_errors", "counter", meaning, [(totals.failed, {})])

    def _stores(self) -> Iterator[str]:
        """Metrics of the KV stores of all hosts."""
        if not (found := self.stores_by_host()):
            return
        newest = {host: stats for host, (stats, _) in found.items()}
        up = ((is_up, {"host": host}) for host, (_, is_up) in found.items())
        yield self._metric("kv_store_up", "gauge", "1 if the KV store of a host is up.", up)
        for name, kind, meaning, values in STORE_METRICS:
            samples = (
                (value, {"host": host, "tier": tier})
                for host, stats in newest.items()
                for tier, value in zip(("memory", "disk", "peer"), values(stats), strict=False)
                if tier == "memory" or (stats.disk_capacity if tier == "disk" else stats.peers)
            )
            yield self._metric(name, kind, meaning, samples)
        meaning = "Entries that were dropped because their bytes were not those that had been stored."
        samples = ((stats.wrong_checksums, {"host": host}) for host, stats in newest.items())
        yield self._metric("kv_store_wrong_checksums", "counter", meaning, samples)
        if any(stats.copied_rank_bytes for stats in newest.values()):
            meaning = "Bytes of KV that ranks on other hosts have copied to a store and from there."
            samples = ((stats.copied_rank_bytes, {"host": host}) for host, stats in newest.items())
            yield self._metric("kv_store_copied_rank_bytes", "counter", meaning, samples)
        if any(stats.peers or stats.sent_peer_bytes for stats in newest.values()):
            for name, kind, meaning, count in PEER_METRICS:
                samples = ((count(stats), {"host": host}) for host, stats in newest.items())
                yield self._metric(name, kind, meaning, samples)
        disks = {host: stats for host, stats in newest.items() if stats.disk_capacity}
        if disks:
            meaning = "1 if the disk tier of a host is in use; the log says why it is not."
            yield self._metric(
                "kv_store_disk_up",
                "gauge",
                meaning,
                ((not each.disk_error, {"host": host}) for host, each in disks.items()),
            )
            meaning = "Reads and writes of the disk tier that failed."
            failed = ((stats.failed_disk, {"host": host}) for host, stats in disks.items())
            yield self._metric("kv_store_disk_errors", "counter", meaning, failed)

    def _durations(self, totals: HttpTotals, label: str) -> str:
        meaning = "Time from the headers of an HTTP request to the end of the response, in seconds."
        samples = ((each, _route(name, label)) for name, each in totals.seconds.items())
        return self._histogram("http_request_duration_seconds", meaning, http_metrics.SECONDS, samples)

    def _cache_config(self, cache: CacheConfig, replicas: Mapping[int, EngineStats]) -> str:
        labels = {
            "block_size": str(cache.block_size),
            "cache_dtype": str(cache.dtype),
            "enable_prefix_caching": str(cache.enable_prefix_caching),
            "gpu_memory_utilization": str(cache.gpu_memory_utilization),
        }
        samples = (
            (1, {"engine": str(replica), **labels, "num_gpu_blocks": str(stats.kv_blocks)})
            for replica, stats in replicas.items()
        )
        meaning = "The configuration of the KV cache in labels; always 1."
        return self._metric("cache_config_info", "gauge", meaning, samples)

    def _ranks(self, replicas: Iterable[int]) -> Iterator[str]:
        """Metrics of the ranks of these replicas; metrics without a sample do not apply here."""
        ranks = [
            (stats, {"engine": str(replica), "stage": str(rank // size), "rank": str(rank)})
            for replica in replicas
            if (known := self.rank_stats.get(replica)) and (size := self.stage_ranks.get(replica) or len(known))
            for rank, stats in enumerate(known)
        ]
        for name, kind, label, meaning, values in RANK_METRICS:
            samples = [
                (value, labels | ({label: of} if label else {}))
                for stats, labels in ranks
                for of, value in values(stats).items()
            ]
            if samples:
                yield self._metric(name, kind, meaning, samples)

    def _experts(self) -> Iterator[str]:
        """Metrics of the load balance between experts, if whole experts are distributed over ranks."""
        load = self.expert_load
        if load is None:
            return
        meaning = "Load of the busiest rank of each MoE layer, divided by the mean over ranks; 1 is balanced."
        yield self._metric("expert_load_imbalance", "gauge", meaning, [(load.imbalance, {})])
        yield self._metric("experts_moved", "counter", "Experts moved to another place.", [(load.moved, {})])
        counts = iter(array("q", load.tokens))
        by_layer = {str(layer): list(islice(counts, number)) for layer, number in load.layers.items()}
        meaning = "Load of a layer's most used expert since the start, divided by the mean over its experts."
        peaks = ((max(used) * len(used) / max(1, sum(used)), {"layer": layer}) for layer, used in by_layer.items())
        yield self._metric("expert_load_peak", "gauge", meaning, peaks)
        if sum(load.layers.values()) > _EXPERT_SERIES:
            return
        samples = (
            (count, {"layer": layer, "expert": str(expert)})
            for layer, used in by_layer.items()
            for expert, count in enumerate(used)
        )
        yield self._metric("expert_tokens", "counter", "Tokens routed to an expert.", samples)

    def _sums(self, replica: int) -> list[float]:
        """The values of a replica, summed over the processes."""
        starts = [start + replica * _PER_REPLICA for start in self._starts]
        first, *others = (list(self._cells[start : start + _CELLS]) for start in starts)
        return [sum(column, 0.0) for column in zip(first, *others, strict=True)] if others else first


@cache
def _series(name: str, kind: str, /, **labels: str) -> str:
    """The name and the labels of a sample."""
    pairs = ",".join(f'{label}="{_escape(value)}"' for label, value in sorted(labels.items()))
    return f"\nquire:{name}{'_total' if kind == 'counter' else ''}{{{pairs}}}"


@cache
def _histogram_template(name: str, bounds: Sequence[float], /, **labels: str) -> str:
    """The samples of a histogram, to be formatted with the count in each bucket and below, the count, and the sum."""
    edges = [*(str(float(bound)) for bound in bounds), "+Inf"]
    series = [_series(f"{name}_bucket", "histogram", le=edge, **labels) for edge in edges]
    series += [_series(f"{name}_{end}", "histogram", **labels) for end in ("count", "sum")]
    return "".join(f"{each.replace('%', '%%')} %r" for each in series)


def _route(name: str, label: str) -> dict[str, str]:
    """The labels of a route, given as `METHOD ROUTE`."""
    method, _, route = name.partition(" ")
    return {"method": method, label: route}


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
