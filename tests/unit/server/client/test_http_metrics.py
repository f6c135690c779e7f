"""Counts of HTTP requests in the table of all API processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.server.client import http_metrics
from quire.server.client.metrics import Metrics

Found = dict[tuple[str, ...], float]


def samples(metrics: Metrics) -> dict[str, Found]:
    """The samples by name, and by their labels' values in the order of the labels' names."""
    found: dict[str, Found] = {}
    for family in text_string_to_metric_families(metrics.exposition().decode()):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name != "model_name"}
            found.setdefault(sample.name, {})[tuple(labels[name] for name in sorted(labels))] = sample.value
    return found


def request(metrics: Metrics, route: str, status: int, seconds: float = 0.02) -> None:
    begin(metrics, route)
    metrics.http.end(metrics.http.row(route), status, seconds)


def begin(metrics: Metrics, route: str) -> None:
    metrics.http.begin(metrics.http.row(route))


def test_requests_of_all_processes_are_counted_by_method_route_and_status(tmp_path: Path) -> None:
    first, second = (Metrics("m", str(tmp_path / "metrics"), index, 2) for index in (0, 1))
    request(first, "GET /v1/models", 200)  # rows that are not in the same place in both processes
    request(first, "POST /v1/completions", 200, 0.3)
    request(first, "POST /v1/completions", 429)
    request(second, "POST /v1/completions", 200)
    second.http.fail("queue_full")
    first.http.fail("queue_full")
    for metrics in (first, second):
        found = samples(metrics)
        assert found["quire:http_requests_total"] == {
            ("GET", "/v1/models", "200"): 1,
            ("POST", "/v1/completions", "200"): 2,
            ("POST", "/v1/completions", "429"): 1,
        }
        failed = found["quire:http_requests_failed_total"]
        assert failed == {(reason,): 2 * (reason == "queue_full") for reason in http_metrics.REASONS}
        seconds = found["quire:http_request_duration_seconds_bucket"]
        counts = [seconds[bound, "POST", "/v1/completions"] for bound in ("0.01", "0.025", "0.25", "0.5", "+Inf")]
        assert counts == [0, 2, 2, 3, 3]
        assert found["quire:http_request_duration_seconds_sum"]["POST", "/v1/completions"] == pytest.approx(0.34)


def test_vllms_names_have_no_prefix_and_the_class_of_the_status() -> None:
    metrics = Metrics("m")
    for status in (200, 202, 429, 503):
        request(metrics, "POST /v1/completions", status)
    found = samples(metrics)
    # Of prometheus-fastapi-instrumentator: handler, method, status.
    assert found["http_requests_total"] == {
        ("/v1/completions", "POST", "2xx"): 2,
        ("/v1/completions", "POST", "4xx"): 1,
        ("/v1/completions", "POST", "5xx"): 1,
    }
    assert found["http_request_duration_seconds_count"] == {("/v1/completions", "POST"): 4}
    assert {"0.1", "0.5", "1.0"} <= {each[1] for each in found["http_request_duration_seconds_bucket"]}
    assert not any(name.startswith("http_") for name in samples(Metrics("m", vllm_names=False)))


def test_requests_of_a_process_that_died_are_cut(tmp_path: Path) -> None:
    path = str(tmp_path / "metrics")
    supervisor, dead, alive = Metrics("m", path, 0, 2), Metrics("m", path, 1, 2), Metrics("m", path, 0, 2)
    request(dead, "POST /v1/completions", 200)
    for _ in range(2):
        begin(dead, "POST /v1/completions")
    begin(dead, "GET /health")
    begin(alive, "POST /v1/completions")
    del dead
    assert [supervisor.count_cut(1), supervisor.count_cut(1)] == [3, 0]
    request(Metrics("m", path, 1, 2), "POST /v1/completions", 200)  # its successor
    found = samples(alive)
    assert found["quire:http_requests_total"] == {
        ("POST", "/v1/completions", "200"): 2,
        ("POST", "/v1/completions", "cut"): 2,
        ("GET", "/health", "cut"): 1,
    }
    assert found["quire:http_requests_failed_total"]["cut",] == 3
    assert found["http_requests_total"]["/v1/completions", "POST", "5xx"] == 2


def test_keys_are_counted_by_name_and_there_may_be_too_many(tmp_path: Path) -> None:
    first, second = (Metrics("m", str(tmp_path / "metrics"), index, 2) for index in (0, 1))
    first.http.use_key("bob", 1, 2)
    second.http.use_key("alice é", 10, 20)
    first.http.use_key("alice é", 100, 200)
    found = samples(second)
    assert found["quire:key_requests_total"] == {("bob",): 1, ("alice é",): 2}
    assert found["quire:key_prompt_tokens_total"] == {("bob",): 1, ("alice é",): 110}
    assert found["quire:key_generation_tokens_total"] == {("bob",): 2, ("alice é",): 220}
    for number in range(300):
        second.http.use_key(f"key {number}", 1, 1)
    second.http.use_key("alice é", 1, 1)
    found = samples(first)
    assert found["quire:key_requests_total"]["others",] == 300 - 254
    assert found["quire:key_requests_total"]["alice é",] == 3
    assert found["quire:key_requests_total"]["key 253",] == 1


def test_a_successor_goes_on_in_the_rows_of_its_predecessor(tmp_path: Path) -> None:
    path = str(tmp_path / "metrics")
    Metrics("m", path).http.use_key("x" * 200, 1, 1)  # longer than a name may be
    successor = Metrics("m", path)
    successor.http.use_key("x" * 200, 1, 1)
    assert samples(successor)["quire:key_requests_total"] == {("x" * 128,): 2}
