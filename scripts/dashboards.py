"""The Grafana dashboards in deploy/grafana/dashboards; `scripts/docs` writes them.

Here a panel has its title, its unit and its queries; the JSON adds the rest, which is the same everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

_COLUMNS = 24
_HEIGHTS = {"stat": 4, "timeseries": 8, "heatmap": 8, "table": 8}
_OF = 'model_name=~"$model_name",instance=~"$instance"'
"""The labels by which every query selects servers."""
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True)
class Panel:
    """A panel. In queries, `%` is `_OF`."""

    title: str
    queries: Sequence[tuple[str, str]]
    """(PromQL, legend) pairs."""
    unit: str = "short"
    kind: Literal["stat", "timeseries", "heatmap", "table"] = "timeseries"
    width: int = 8
    description: str = ""
    red_above: float | None = None
    """The threshold above which a value is bad."""


def quantiles(name: str) -> list[tuple[str, str]]:
    """The median, the 95th and the 99th percentile of a histogram."""
    buckets = f"sum by (le) (rate(quire:{name}_bucket{{%}}[$__rate_interval]))"
    return [
        (f"histogram_quantile({quantile}, {buckets})", legend)
        for quantile, legend in ((0.5, "median"), (0.95, "p95"), (0.99, "p99"))
    ]


def mean(name: str) -> str:
    """The mean of a histogram."""
    return f"sum(rate(quire:{name}_sum{{%}}[$__rate_interval])) / sum(rate(quire:{name}_count{{%}}[$__rate_interval]))"


def heatmap(title: str, name: str) -> Panel:
    """A histogram over time."""
    query = f"sum by (le) (increase(quire:{name}_bucket{{%}}[$__rate_interval]))"
    return Panel(title, [(query, "{{le}}")], kind="heatmap", width=12)


def rate(name: str) -> str:
    """A counter's rate, over all replicas."""
    return f"sum(rate(quire:{name}_total{{%}}[$__rate_interval]))"


_FAULTS = 'reason=~"failed|internal|unavailable|timeout|cut"'
"""Failures of the server; the others are refusals, and clients that have left."""
_NO_PROBES = 'route!~"/health.*|/ping|/metrics"'
"""Without health checks and scrapes."""
_REPLICA = "{{instance}} replica {{engine}}"
_RANK = f"{_REPLICA} rank {{{{rank}}}}"

OVERVIEW = [
    Panel(
        "Servers down",
        [('count(up{job="quire"} == 0) or vector(0)', "")],
        kind="stat",
        width=4,
        red_above=1,
        description="Servers that Prometheus cannot reach.",
    ),
    Panel("Replicas up", [('sum(quire:replicas{%,state="up"})', "")], kind="stat", width=4),
    Panel(
        "Replicas down",
        [('sum(quire:replicas{%,state=~"loading|restarting|unresponsive|dead"})', "")],
        kind="stat",
        width=4,
        red_above=1,
        description="Replicas that load the model, or have died.",
    ),
    Panel(
        "Alerts",
        [('count(ALERTS{alertstate="firing",job="quire"}) or vector(0)', "")],
        kind="stat",
        width=4,
        red_above=1,
        description="Rules of deploy/prometheus/rules.yml that fire.",
    ),
    Panel("Requests per second", [(rate("request_success"), "")], unit="reqps", kind="stat", width=4),
    Panel(
        "Failed requests",
        [
            (
                f"sum(rate(quire:http_requests_failed_total{{%,{_FAULTS}}}[$__rate_interval]))"
                f" / (sum(rate(quire:http_requests_total{{%,{_NO_PROBES}}}[$__rate_interval])) > 0) or vector(0)",
                "",
            )
        ],
        unit="percentunit",
        kind="stat",
        width=4,
        red_above=0.01,
        description="HTTP requests that the server has failed, or cut off as one of its processes has died.",
    ),
    Panel("Time to first token", quantiles("time_to_first_token_seconds"), unit="s"),
    Panel("Inter-token latency", quantiles("inter_token_latency_seconds"), unit="s"),
    Panel("Duration of requests", quantiles("e2e_request_latency_seconds"), unit="s"),
    Panel(
        "Tokens per second",
        [(rate("prompt_tokens"), "prompt"), (rate("generation_tokens"), "generated")],
    ),
    Panel(
        "Requests",
        [("sum(quire:num_requests_running{%})", "running"), ("sum(quire:num_requests_waiting{%})", "waiting")],
        description="Waiting requests that do not become fewer: add replicas.",
    ),
    Panel(
        "Finished requests per second",
        [
            (
                "sum by (finished_reason) (rate(quire:request_success_total{%}[$__rate_interval]))",
                "{{finished_reason}}",
            )
        ],
        unit="reqps",
    ),
    Panel(
        "Refused and failed requests per second",
        [("sum by (reason) (rate(quire:http_requests_failed_total{%}[$__rate_interval]))", "{{reason}}")],
        unit="reqps",
        description="By reason. queue_full, overloaded: add replicas. cut: an API process has died.",
    ),
    Panel(
        "HTTP responses per second",
        [("sum by (status) (rate(quire:http_requests_total{%}[$__rate_interval]))", "{{status}}")],
        unit="reqps",
    ),
    Panel(
        "Tokens per second of each key",
        [
            (
                "sum by (key) (rate(quire:key_prompt_tokens_total{%}[$__rate_interval])"
                " + rate(quire:key_generation_tokens_total{%}[$__rate_interval])) or vector(0)",
                "{{key}}",
            )
        ],
        description="Prompt and generated tokens, by the name of the API key.",
    ),
    Panel(
        "KV cache in use",
        [("quire:kv_cache_usage_perc{%}", _REPLICA)],
        unit="percentunit",
        description="Near 100 %, requests wait or are preempted.",
    ),
    Panel(
        "Replicas",
        [("sum by (state) (quire:replicas{%})", "{{state}}")],
    ),
    Panel(
        "Deaths of replicas",
        [("increase(quire:engine_deaths_total{%}[1h])", _REPLICA)],
        description="In the last hour.",
    ),
    Panel(
        "Images and videos per second",
        [("sum by (result) (rate(quire:media_items_total{%}[$__rate_interval]))", "{{result}}")],
        description="cached: neither fetched nor decoded again. failed: the media process is overloaded, or has died.",
    ),
    Panel("Time to load an image or a video", quantiles("media_load_seconds"), unit="s"),
    Panel(
        "Processed images and videos",
        [("quire:media_cache_bytes{%}", "{{instance}}")],
        unit="bytes",
        description="In shared memory; --mm-processor-cache-gb limits them.",
    ),
]

SCHEDULER = [
    Panel("Time in the queue", quantiles("request_queue_time_seconds"), unit="s"),
    Panel("Prefill time", quantiles("request_prefill_time_seconds"), unit="s"),
    Panel("Decode time", quantiles("request_decode_time_seconds"), unit="s"),
    Panel(
        "Requests of each replica",
        [
            ("quire:num_requests_running{%}", f"{_REPLICA} running"),
            ("quire:num_requests_waiting{%}", f"{_REPLICA} waiting"),
        ],
    ),
    Panel("Tokens in a step", [*quantiles("iteration_tokens_total"), (mean("iteration_tokens_total"), "mean")]),
    Panel("Steps per second", [("rate(quire:engine_steps_total{%}[$__rate_interval])", _REPLICA)]),
    Panel("KV cache in use", [("quire:kv_cache_usage_perc{%}", _REPLICA)], unit="percentunit"),
    Panel(
        "Prompt tokens from the prefix cache",
        [(f"{rate('prefix_cache_hits')} / {rate('prefix_cache_queries')}", "hit rate")],
        unit="percentunit",
    ),
    Panel(
        "Prompt tokens per second",
        [("sum by (source) (rate(quire:prompt_tokens_by_source_total{%}[$__rate_interval]))", "{{source}}")],
    ),
    Panel(
        "Cached prompt tokens by tier, per second",
        [("sum by (source) (rate(quire:prompt_tokens_cached_by_source_total{%}[$__rate_interval]))", "{{source}}")],
        description="host and disk: the KV store's.",
    ),
    Panel(
        "KV store in use",
        [("quire:kv_store_bytes{%} / quire:kv_store_capacity_bytes{%}", "{{host}} {{tier}}")],
        unit="percentunit",
        description="Of the host's memory, and of its disk.",
    ),
    Panel(
        "KV store, bytes per second",
        [
            ("sum by (tier) (rate(quire:kv_store_read_bytes_total{%}[$__rate_interval]))", "{{tier}} read"),
            ("sum by (tier) (rate(quire:kv_store_written_bytes_total{%}[$__rate_interval]))", "{{tier}} written"),
        ],
        unit="Bps",
    ),
    Panel(
        "Preemptions per second",
        [("rate(quire:num_preemptions_total{%}[$__rate_interval])", _REPLICA)],
        description="Requests that lost their KV blocks and are computed again.",
    ),
    Panel("Mean time per output token", [(mean("request_time_per_output_token_seconds"), "mean")], unit="s"),
    Panel(
        "Idle stages",
        [
            (
                "rate(quire:idle_stage_steps_total{%}[$__rate_interval])"
                " / rate(quire:engine_steps_total{%}[$__rate_interval])",
                _REPLICA,
            )
        ],
        description="Stages that were idle in a step while a request was waiting, on average.",
    ),
    Panel(
        "Pause at a hand-over",
        quantiles("handover_time_seconds"),
        unit="s",
        width=12,
        description="From the first token, of a prefill replica, to the next one.",
    ),
    Panel(
        "Prompt tokens of a hand-over",
        [
            (f"{rate('handed_over_tokens')} / {rate('requests_handed_over')}", "found"),
            (f"{rate('handed_over_tokens_recomputed')} / {rate('requests_handed_over')}", "computed again"),
        ],
        width=12,
        description="More than a block that is computed again: KV was evicted or late; use a larger KV store.",
    ),
    heatmap("Prompt length", "request_prompt_tokens"),
    heatmap("Output length", "request_generation_tokens"),
    Panel("Configuration of the KV cache", [("quire:cache_config_info{%}", "")], kind="table", width=24),
]

RANKS = [
    Panel(
        "Computing",
        [
            (
                "rate(quire:rank_busy_seconds_total{%}[$__rate_interval]) / (rate(quire:rank_busy_seconds_total{%}"
                "[$__rate_interval]) + rate(quire:rank_wait_seconds_total{%}[$__rate_interval]))",
                _RANK,
            )
        ],
        unit="percentunit",
        description="Part of its steps in which a rank computes instead of waiting for other ranks (CPU).",
    ),
    Panel(
        "Step time of each stage",
        [
            (
                "avg by (instance, engine, stage) (rate(quire:rank_busy_seconds_total{%}[$__rate_interval]))"
                " / on (instance, engine) group_left"
                " sum by (instance, engine) (rate(quire:engine_steps_total{%}[$__rate_interval]))",
                f"{_REPLICA} stage {{{{stage}}}}",
            )
        ],
        unit="s",
        description="Computing time of a step (CPU). Stages that differ: --pipeline-layer-partition.",
    ),
    Panel(
        "Communication",
        [
            (
                "sum by (instance, group) (rate(quire:rank_communication_seconds_total{%}[$__rate_interval]))"
                " / on (instance) group_left sum by (instance) ("
                "rate(quire:rank_busy_seconds_total{%}[$__rate_interval])"
                " + rate(quire:rank_wait_seconds_total{%}[$__rate_interval]))",
                "{{instance}} {{group}}",
            )
        ],
        unit="percentunit",
        description="Part of the steps that ranks spend in communication, including waiting (CPU).",
    ),
    Panel("Processors in use", [("rate(quire:rank_cpu_seconds_total{%}[$__rate_interval])", _RANK)]),
    Panel(
        "Resident memory",
        [("quire:rank_resident_memory_bytes{%}", _RANK)],
        unit="bytes",
    ),
    Panel("Shared memory", [("quire:rank_shared_memory_bytes{%}", _RANK)], unit="bytes"),
    Panel(
        "Stragglers",
        [("sum by (instance, engine, rank) (quire:straggler{%})", _RANK)],
        description="1: a rank that is persistently slower than the others of its stage.",
    ),
    Panel("GPU utilization", [("quire:gpu_utilization_ratio{%}", _RANK)], unit="percentunit"),
    Panel(
        "GPU memory", [("quire:gpu_memory_used_bytes{%} / quire:gpu_memory_total_bytes{%}", _RANK)], unit="percentunit"
    ),
    Panel("GPU power", [("quire:gpu_power_watts{%}", _RANK)], unit="watt"),
    Panel("PCIe traffic", [("quire:gpu_pcie_bytes_per_second{%}", f"{_RANK} {{{{direction}}}}")], unit="Bps"),
    Panel(
        "NVLink traffic",
        [("rate(quire:gpu_nvlink_bytes_total{%}[$__rate_interval])", f"{_RANK} {{{{direction}}}}")],
        unit="Bps",
    ),
    Panel(
        "Imbalance of the experts",
        [("quire:expert_load_imbalance{%}", "{{instance}}")],
        description="Load of the busiest rank divided by the mean; 1 is balanced. Well above: --enable-eplb.",
    ),
    Panel("Experts moved", [("increase(quire:experts_moved_total{%}[$__rate_interval])", "{{instance}}")]),
    Panel(
        "Most used expert of each layer",
        [("quire:expert_load_peak{%}", "{{instance}} layer {{layer}}")],
        description="Its load divided by the mean of the layer.",
    ),
    Panel(
        "Busiest experts",
        [
            (
                "topk(10, rate(quire:expert_tokens_total{%}[$__rate_interval]))",
                "{{instance}} layer {{layer}} expert {{expert}}",
            )
        ],
        width=24,
        description="Tokens per second of the ten experts with the most.",
    ),
]


def _json(uid: str, title: str, panels: Sequence[Panel]) -> str:
    dashboard = {
        "uid": uid,
        "title": title,
        "tags": ["quire"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "links": [{"type": "dashboards", "title": "Quire", "tags": ["quire"], "includeVars": True, "keepTime": True}],
        "templating": {
            "list": [
                {"type": "datasource", "name": "datasource", "label": "Data source", "query": "prometheus"},
                _variable("model_name", "Model"),
                _variable("instance", "Server"),
            ]
        },
        "panels": _place(panels),
    }
    return json.dumps(dashboard, indent=2) + "\n"


def _variable(name: str, label: str) -> dict[str, Any]:
    query = f"label_values(quire:replicas, {name})"
    return {
        "type": "query",
        "name": name,
        "label": label,
        "datasource": _DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".+",
        "current": {"text": "All", "value": "$__all"},
    }


def _place(panels: Sequence[Panel]) -> list[dict[str, Any]]:
    """The panels from left to right, in rows."""
    placed, x, y, height = [], 0, 0, 0
    for number, panel in enumerate(panels, 1):
        if x + panel.width > _COLUMNS:
            x, y = 0, y + height
        height = _HEIGHTS[panel.kind]
        placed.append(_panel(number, panel) | {"gridPos": {"x": x, "y": y, "w": panel.width, "h": height}})
        x += panel.width
    return placed


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if panel.red_above is not None:
        steps.append({"color": "red", "value": panel.red_above})
    options: dict[str, Any] = {}
    if panel.kind == "stat":
        options = {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value", "graphMode": "area"}
    elif panel.kind == "timeseries":
        options = {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        **({"description": panel.description} if panel.description else {}),
        "datasource": _DATASOURCE,
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0, "thresholds": {"mode": "absolute", "steps": steps}},
            "overrides": [],
        },
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + at),
                "datasource": _DATASOURCE,
                "expr": query.replace("%", _OF),
                "legendFormat": legend,
                **({"format": panel.kind} if panel.kind in ("heatmap", "table") else {}),
                **({"instant": True} if panel.kind == "table" else {}),
            }
            for at, (query, legend) in enumerate(panel.queries)
        ],
    }


DASHBOARDS = {
    "overview": lambda: _json("quire-overview", "Quire: overview", OVERVIEW),
    "scheduler": lambda: _json("quire-scheduler", "Quire: scheduler and cache", SCHEDULER),
    "ranks": lambda: _json("quire-ranks", "Quire: ranks, stages and experts", RANKS),
}
