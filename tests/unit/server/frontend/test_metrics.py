"""What several API processes count is one sum, and outlives them."""

from __future__ import annotations

from array import array
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from quire.engine.protocol.stats import EngineStats, ExpertLoad, RankTimes
from quire.server.frontend.metrics import _EXPERT_SERIES, Metrics


def samples(metrics: Metrics) -> dict[str, float]:
    """Every sample by its name and the labels that tell samples of that name apart."""
    return {
        " ".join(
            [sample.name, *(value for label, value in sample.labels.items() if label != "model_name")]
        ): sample.value
        for family in text_string_to_metric_families(metrics.exposition().decode())
        for sample in family.samples
    }


def test_whoever_is_asked_answers_for_all(tmp_path: Path) -> None:
    path = str(tmp_path / "metrics")
    first, second = (Metrics("m", path, index, 2) for index in (0, 1))
    first.inter_token_latency.observe(0.003, 5)
    second.inter_token_latency.observe(0.003)
    second.inter_token_latency.observe(100.0)
    first.finished("stop", 1.0)
    second.finished("abort", 2.0)
    second.finished("stop", 3.0)
    first.state(0, "up")
    first.take(0, EngineStats(steps=7, generated_tokens=70, kv_blocks=4, kv_blocks_used=1))
    second.take(0, EngineStats(steps=9, generated_tokens=90, kv_blocks=4, kv_blocks_used=3))
    first.take(0, EngineStats(steps=8, generated_tokens=80))
    found = samples(first)
    assert found == samples(second)
    assert found["quire:inter_token_latency_seconds_count"] == 7
    assert found["quire:inter_token_latency_seconds_sum"] == 100.0 + 6 * 0.003
    assert found["quire:inter_token_latency_seconds_bucket 0.0025"] == 0
    assert found["quire:inter_token_latency_seconds_bucket 0.005"] == 6
    assert found["quire:inter_token_latency_seconds_bucket 80.0"] == 6
    assert found["quire:inter_token_latency_seconds_bucket +Inf"] == 7
    assert found["quire:e2e_request_latency_seconds_sum"] == 6
    assert found["quire:request_success_total stop"] == 2
    assert found["quire:request_success_total abort"] == 1
    assert found["quire:request_success_total length"] == 0
    assert found["quire:generation_tokens_total 0"] == 90  # the newest, whoever has it
    assert found["quire:kv_cache_usage_perc 0"] == 0.75


def test_a_process_goes_on_counting_where_the_one_before_it_ended(tmp_path: Path) -> None:
    path = str(tmp_path / "metrics")
    alive, dead = (Metrics("m", path, index, 2) for index in (0, 1))
    dead.finished("stop", 1.0)
    del dead
    Metrics("m", path, 1, 2).finished("stop", 1.0)
    assert samples(alive)["quire:request_success_total stop"] == 2


def test_processes_that_share_nothing_count_alone() -> None:
    first, second = Metrics("m"), Metrics("m")
    first.finished("stop", 1.0)
    assert samples(second)["quire:request_success_total stop"] == 0


def test_expert_load_is_exported_unless_there_are_too_many_experts() -> None:
    metrics = Metrics("m")
    assert not any("expert" in name for name in samples(metrics))
    metrics.expert_load = ExpertLoad({1: 4, 3: 4}, array("q", [5, 1, 0, 2, 7, 7, 7, 7]).tobytes(), 1.25, 6)
    found = samples(metrics)
    assert found["quire:expert_load_imbalance"] == 1.25
    assert found["quire:experts_moved_total"] == 6
    assert found["quire:expert_load_peak 1"] == 2.5
    assert found["quire:expert_load_peak 3"] == 1.0
    assert [found[f"quire:expert_tokens_total {expert} 1"] for expert in range(4)] == [5, 1, 0, 2]
    assert found["quire:expert_tokens_total 3 3"] == 7
    many = _EXPERT_SERIES // 4 + 1
    metrics.expert_load = ExpertLoad(dict.fromkeys(range(many), 4), bytes(8 * 4 * many), 1.0, 0)
    found = samples(metrics)
    assert found[f"quire:expert_load_peak {many - 1}"] == 0
    assert not any(name.startswith("quire:expert_tokens") for name in found)


def test_the_times_of_ranks_are_exported_while_their_replica_is_up() -> None:
    metrics = Metrics("m")
    metrics.state(0, "dead")
    metrics.rank_times = {0: [RankTimes(4, 9.0, 1.0)] * 2, 3: [RankTimes(4, 9.0, 7.5), RankTimes(4, 9.0, 0.5, True)]}
    metrics.state(3, "up")
    found = samples(metrics)
    assert {name: value for name, value in found.items() if "rank" in name or "straggler" in name} == {
        "quire:rank_busy_seconds_total 3 0": 1.5,
        "quire:rank_busy_seconds_total 3 1": 8.5,
        "quire:rank_wait_seconds_total 3 0": 7.5,
        "quire:rank_wait_seconds_total 3 1": 0.5,
        "quire:straggler 3 0": 0.0,
        "quire:straggler 3 1": 1.0,
    }
    metrics.state(3, "dead")
    assert not any("rank" in name for name in samples(metrics))


def test_each_replica_and_the_sum_are_exported(tmp_path: Path) -> None:
    path = str(tmp_path / "metrics")
    first, second = (Metrics("m", path, index, 2) for index in (0, 1))
    first.take(0, EngineStats(running=2, waiting=1, kv_blocks=4, kv_blocks_used=1, steps=5, generated_tokens=50))
    second.take(3, EngineStats(running=4, kv_blocks=4, kv_blocks_used=4, steps=2, generated_tokens=20))
    for replica in (0, 3):
        first.state(replica, "up")
    found = samples(second)
    assert [found[f"quire:num_requests_running {replica}"] for replica in (0, 3)] == [2, 4]
    assert [found[f"quire:kv_cache_usage_perc {replica}"] for replica in (0, 3)] == [0.25, 1]
    assert [found[f"quire:replicas {state}"] for state in ("loading", "up", "draining", "dead")] == [0, 2, 0, 0]
    assert (first.stats.running, first.stats.waiting, first.stats.generated_tokens) == (6, 1, 70)
    first.state(0, "draining")
    first.state(3, "absent")
    found = samples(second)
    assert found["quire:num_requests_running 0"] == 2
    assert not [name for name in found if name.endswith(" 3")]
    assert [found[f"quire:replicas {state}"] for state in ("up", "draining")] == [0, 1]


def test_a_replica_that_died_runs_nothing_and_counts_anew(tmp_path: Path) -> None:
    path = str(tmp_path / "metrics")
    first, second = (Metrics("m", path, index, 2) for index in (0, 1))
    second.take(0, EngineStats(running=2, steps=500, generated_tokens=50, started=1))
    first.state(0, "dead")
    first.count_death(0)
    found = samples(first)
    assert found["quire:num_requests_running 0"] == 0
    assert found["quire:generation_tokens_total 0"] == 50
    assert found["quire:replicas dead"] == 1
    assert found["quire:engine_deaths_total 0"] == 1
    first.take(0, EngineStats(running=1, steps=1, generated_tokens=3, started=2))
    assert samples(second)["quire:num_requests_running 0"] == 0
    first.state(0, "up")
    assert samples(second)["quire:num_requests_running 0"] == 1
    assert samples(second)["quire:generation_tokens_total 0"] == 3
