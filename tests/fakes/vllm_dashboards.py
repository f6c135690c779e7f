"""The queries of the Grafana dashboards that vLLM publishes in its repository, below examples/observability.

All of prometheus_grafana/grafana.json (at commit 4b5c627c2), and of query_statistics.json (at 030ea52ef) and
performance_statistics.json (at 5961e8d3b) in dashboards/grafana.
"""

from __future__ import annotations

_MODEL = '{model_name="$model_name"}[$__rate_interval]'
_DEPLOYMENT = '{model_name=~"$Deployment_id"}[$__rate_interval]'

GRAFANA = [
    *(
        f"histogram_quantile({quantile}, sum by(le) (rate(vllm:{name}_bucket{_MODEL})))"
        for name in ("e2e_request_latency_seconds", "inter_token_latency_seconds", "time_to_first_token_seconds")
        for quantile in (0.99, 0.95, 0.9, 0.5)
    ),
    *(
        f"rate(vllm:{name}_sum{_MODEL})\n/\nrate(vllm:{name}_count{_MODEL})"
        for name in ("e2e_request_latency_seconds", "inter_token_latency_seconds", "time_to_first_token_seconds")
    ),
    f"rate(vllm:prompt_tokens_total{_MODEL})",
    f"rate(vllm:generation_tokens_total{_MODEL})",
    'vllm:num_requests_running{model_name="$model_name"}',
    'vllm:num_requests_waiting{model_name="$model_name"}',
    'vllm:kv_cache_usage_perc{model_name="$model_name"}',
    f"sum by(le) (increase(vllm:request_prompt_tokens_bucket{_MODEL}))",
    f"sum by(le) (increase(vllm:request_generation_tokens_bucket{_MODEL}))",
    f"sum by(finished_reason) (increase(vllm:request_success_total{_MODEL}))",
    f"rate(vllm:request_queue_time_seconds_sum{_MODEL})",
    f"rate(vllm:request_prefill_time_seconds_sum{_MODEL})",
    f"rate(vllm:request_decode_time_seconds_sum{_MODEL})",
    f"rate(vllm:request_max_num_generation_tokens_sum{_MODEL})",
]

_TIMES = ("e2e_request_latency_seconds", "time_to_first_token_seconds", "inter_token_latency_seconds")

QUERY_STATISTICS = [
    f"sum by (model_name) (\n  rate(vllm:request_success_total{_DEPLOYMENT})\n)",
    f"sum(rate(vllm:request_success_total{_DEPLOYMENT}))",
    *(
        f"histogram_quantile({quantile}, sum by(le, model_name) (rate(vllm:{name}_bucket{_DEPLOYMENT})))"
        for name in ("e2e_request_latency_seconds", "request_prompt_tokens")
        for quantile in ("0.50", "0.90", "0.99")
    ),
    f"sum by (le, model_name) (rate(vllm:request_prompt_tokens_bucket{_DEPLOYMENT}))",
    f"sum(rate(vllm:prompt_tokens_total{_DEPLOYMENT}))\n/\nsum(rate(vllm:request_success_total{_DEPLOYMENT}))",
    *(
        f"sum{by}(rate(vllm:{name}_total{_DEPLOYMENT}))"
        for name in ("prompt_tokens", "generation_tokens")
        for by in (" by (model_name) ", "")
    ),
]

PERFORMANCE_STATISTICS = [
    *(f"rate(vllm:{name}_sum[$__rate_interval]) / rate(vllm:{name}_count[$__rate_interval])" for name in _TIMES),
    *(
        f"histogram_quantile({quantile}, sum by(le) (rate(vllm:{name}_bucket[$__range])))"
        for name in _TIMES
        for quantile in ("0.50", "0.90", "0.99")
    ),
    *(f"(sum(increase(vllm:{name}_sum[$__range])) / sum(increase(vllm:{name}_count[$__range])))" for name in _TIMES),
    *(
        f"histogram_quantile({quantile}, sum by(le) (rate(vllm:inter_token_latency_seconds_bucket[$__rate_interval])))"
        for quantile in ("0.50", "0.90", "0.99")
    ),
    "rate(vllm:generation_tokens_total[$__rate_interval])",
    "rate(vllm:prompt_tokens_total[$__rate_interval])",
    "rate(vllm:iteration_tokens_total_count[$__rate_interval])",
]

QUERIES = GRAFANA + QUERY_STATISTICS + PERFORMANCE_STATISTICS
