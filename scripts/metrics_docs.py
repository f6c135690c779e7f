"""docs/reference/metrics.md from the metrics that a server exports; `scripts/docs` writes it."""

from __future__ import annotations

from array import array
from dataclasses import replace

from markdown_table import code, table
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from quire.engine.config.engine_config import KVStoreConfig, LoraConfig, MediaConfig
from quire.engine.config.options import EngineOptions
from quire.engine.config.resolve import resolve
from quire.engine.protocol.kv_store import KVStoreStats
from quire.engine.protocol.stats import GROUPS, ExpertLoad, GpuUsage, RankStats, RankUsage
from quire.server.client.media_metrics import KINDS, RESULTS
from quire.server.client.metrics import FINISH_REASONS, SHOWN_STATES, VLLM_NAMES, Metrics

INTRODUCTION = """# Metrics

`GET /metrics` returns these metrics in Prometheus text format. `scripts/docs` generates this page from the code, and a
test fails if it is out of date. [Monitoring](../guides/monitoring.md) says which ones to watch.

Metrics that vLLM also has use vLLM's names and labels. They are exported with the prefix `quire:`, and again with the
prefix `vllm:`, so that dashboards and rules made for vLLM find them; both are the same values. `--no-vllm-metrics`
leaves these aliases out. Histograms have all buckets of vLLM's, and more. vLLM's counts of HTTP requests have no
prefix; they have the label `handler` instead of `route`, and classes such as `4xx` as the `status`.

With `--api-server-count` above 1, every process returns the sum over all of them. A replica that has been removed keeps
its counters and histograms, so that sums over replicas do not fall; its gauges end.

| label | |
|---|---|
| `engine` | number of the replica |
| `rank`, `stage` | number of the rank in its replica, and of its pipeline stage |
| `state` | {states} |
| `finished_reason` | {reasons} |
| `source` | `local_compute`, `local_cache_hit`: the prefix cache of the devices, `external_kv_transfer`: the \
[KV store](../guides/kv-tiers.md); of cached tokens `device`, `host`, `disk`, `peer` |
| `host`, `tier` | of a KV store: its host, and `memory`, `disk` or `peer`: the stores of other hosts |
| `group` | {groups}: tensor parallelism, pipeline parallelism, expert parallelism |
| `direction` | `received`, `sent` |
| `method`, `route` | of an HTTP request: a template, such as `/v1/models/{{name:path}}`; `none` for unknown paths |
| `status` | of the response; `cut` if the API process died before its end |
| `reason` | [why a request was refused or failed](../guides/monitoring.md#refused-and-failed-requests) |
| `kind` | {kinds} |
| `result` | {results}: the item was loaded, was in the cache, was refused, or the server has failed |
| `key` | name of an [API key](../guides/deployment.md#api-keys) |

Some metrics exist only where they apply, as their condition says:

- *CPU*: ranks on CPUs. On GPUs the host does not wait for steps, so it cannot tell what they spend their time with.
  [Reliability](../design/reliability.md#stragglers) says how stragglers are found.
- *GPU*: ranks on NVIDIA GPUs. A GPU or driver may not report all of them, such as power in some virtual machines.
  Values are sampled every 2 seconds.
- *experts*: `--enable-expert-parallel`. Models with very many experts have no `quire:expert_tokens_total`.
- *media*: models that take images or videos.
- *KV store*: `--kv-offloading-size` or `--kv-disk`; those of the tier `disk` with the latter only, and
  those of peers and of ranks on other hosts if there are any.
- *adapters*: `--enable-lora`. They have the label `adapter`, the name of the [adapter](../guides/lora.md). Each API
  process counts 127 names by themselves, and all further ones as `others`; a name that was unloaded makes room.
"""


_OF_VLLM = VLLM_NAMES | {"http_requests", "http_request_duration_seconds"}


def render() -> str:
    """The page as Markdown."""
    servers = {
        "": _collect(),
        "CPU": _collect(on_cpu=True),
        "GPU": _collect(on_gpu=True),
        "experts": _collect(has_experts=True),
        "media": _collect(takes_media=True),
        "adapters": _collect(takes_adapters=True),
        "KV store": _collect(has_store=True),
    }
    rows: dict[str, tuple[str, ...]] = {}
    for condition, metrics in servers.items():
        for metric in metrics:
            rows.setdefault(metric.name, _row(metric, condition))
    found = {metric.name: metric for metrics in servers.values() for metric in metrics}
    histograms = [metric for metric in found.values() if metric.type == "histogram"]
    introduction = INTRODUCTION.format(
        states=_values(SHOWN_STATES),
        reasons=_values(FINISH_REASONS),
        groups=_values(GROUPS),
        kinds=_values(KINDS),
        results=_values(RESULTS),
    )
    return "\n".join(
        [
            introduction,
            "## All metrics\n",
            table(("metric", "vLLM's", "type", "labels", "where", ""), rows.values()),
            "## Buckets\n",
            "Upper bounds of the histograms' buckets:\n",
            table(("histogram", "buckets"), [(code(metric.name), _buckets(metric)) for metric in histograms]),
        ]
    )


def _collect(
    *,
    on_cpu: bool = False,
    on_gpu: bool = False,
    has_experts: bool = False,
    takes_media: bool = False,
    takes_adapters: bool = False,
    has_store: bool = False,
) -> list[Metric]:
    """The metrics of a server like this, without aliases."""
    config = resolve(EngineOptions(device="cpu"))
    if takes_media:
        media = MediaConfig(
            max_items={"image": 1}, max_encoder_features=1, encoder_cache_features=1, max_item_features=1
        )
        config = replace(config, media=media)
    if takes_adapters:
        config = replace(config, lora=LoraConfig(num_slots=2, device_bytes=0, host_bytes=0))
    if has_store:
        config = replace(config, kv_store=KVStoreConfig(memory_bytes=0))
    metrics = Metrics("MODEL", config=config, vllm_names=False)
    metrics.state(0, "up")
    metrics.http.begin(row := metrics.http.row("POST /v1/completions"))
    metrics.http.end(row, 200, 0.0)
    metrics.http.use_key("alice", 1, 1)
    metrics.adapters.add("sql")
    metrics.adapters.start("sql", 0.0)
    gpu = GpuUsage(0, 0, 0.0, 0.0, 0, 0, 0, 0) if on_gpu else None
    metrics.rank_stats = {0: [RankStats(steps=int(on_cpu), usage=RankUsage(0.0, 0, 0, gpu))]}
    if has_store:
        metrics.take_store(0, "localhost", KVStoreStats(disk_capacity=1, peers=1, copied_rank_bytes=1))
    if has_experts:
        metrics.expert_load = ExpertLoad(layers={0: 1}, tokens=array("q", [1]).tobytes(), imbalance=1.0, moved=0)
    return list(text_string_to_metric_families(metrics.exposition().decode()))


def _row(metric: Metric, condition: str) -> tuple[str, ...]:
    suffix = "_total" if metric.type == "counter" else ""
    name = metric.name.removeprefix("quire:")
    labels = dict.fromkeys(label for sample in metric.samples for label in sample.labels if label != "le")
    return (
        code(metric.name + suffix),
        code(f"vllm:{name}{suffix}" if name in VLLM_NAMES else f"{name}{suffix}") if name in _OF_VLLM else "",
        metric.type,
        ", ".join(map(code, labels)),
        condition,
        metric.documentation,
    )


def _buckets(metric: Metric) -> str:
    bounds = dict.fromkeys(sample.labels["le"] for sample in metric.samples if "le" in sample.labels)
    return ", ".join(f"{float(bound):.15g}".replace("inf", "+Inf") for bound in bounds)


def _values(names: tuple[str, ...]) -> str:
    return ", ".join(map(code, names))


if __name__ == "__main__":
    print(render())
