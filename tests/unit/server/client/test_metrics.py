"""The counts of several API processes are one sum, and outlive them."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from quire.engine.config.engine_config import KVStoreConfig, LoraConfig, SpeculativeConfig
from quire.engine.protocol.kv_store import KVStoreStats
from quire.engine.protocol.stats import EngineStats, ExpertLoad, GpuUsage, RankStats, RankUsage
from quire.server.client.metrics import _EXPERT_SERIES, HISTOGRAMS, VLLM_NAMES, Metrics
from tests.fakes.configs import engine_config


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
    first.observe(0, "inter_token_latency_seconds", 0.003, 5)
    second.observe(0, "inter_token_latency_seconds", 0.003)
    second.observe(0, "inter_token_latency_seconds", 100.0)
    second.observe(1, "inter_token_latency_seconds", 1.0)
    first.finished(0, "stop", 1.0)
    second.finished(0, "abort", 2.0)
    second.finished(0, "stop", 3.0)
    first.state(0, "up")
    first.state(1, "up")
    tokens = [0, 7, *[0] * 12, 56]
    first.take(0, EngineStats(steps=7, generated_tokens=70, kv_blocks=4, kv_blocks_used=1))
    second.take(0, EngineStats(steps=9, generated_tokens=90, kv_blocks=4, kv_blocks_used=3, iteration_tokens=tokens))
    first.take(0, EngineStats(steps=8, generated_tokens=80))
    found = samples(first)
    assert found == samples(second)
    assert found["quire:inter_token_latency_seconds_count 0"] == 7
    assert found["quire:inter_token_latency_seconds_sum 0"] == 100.0 + 6 * 0.003
    assert found["quire:inter_token_latency_seconds_bucket 0 0.0025"] == 0
    assert found["quire:inter_token_latency_seconds_bucket 0 0.005"] == 6
    assert found["quire:inter_token_latency_seconds_bucket 0 80.0"] == 6
    assert found["quire:inter_token_latency_seconds_bucket 0 +Inf"] == 7
    assert found["quire:inter_token_latency_seconds_sum 1"] == 1
    assert found["quire:e2e_request_latency_seconds_sum 0"] == 6
    assert found["quire:request_success_total 0 stop"] == 2
    assert found["quire:request_success_total 0 abort"] == 1
    assert found["quire:request_success_total 0 length"] == 0
    assert found["quire:generation_tokens_total 0"] == 90  # the newest, from any process
    assert found["quire:kv_cache_usage_perc 0"] == 0.75
    assert found["quire:iteration_tokens_total_bucket 0 1.0"] == 0
    assert found["quire:iteration_tokens_total_bucket 0 8.0"] == found["quire:iteration_tokens_total_count 0"] == 7
    assert found["quire:iteration_tokens_total_sum 0"] == 56


def test_a_process_goes_on_counting_where_the_one_before_it_ended(tmp_path: Path) -> None:
    path = str(tmp_path / "metrics")
    alive, dead = (Metrics("m", path, index, 2) for index in (0, 1))
    alive.state(0, "up")
    dead.finished(0, "stop", 1.0)
    del dead
    Metrics("m", path, 1, 2).finished(0, "stop", 1.0)
    assert samples(alive)["quire:request_success_total 0 stop"] == 2


def test_processes_that_share_nothing_count_alone() -> None:
    first, second = Metrics("m"), Metrics("m")
    second.state(0, "up")
    first.finished(0, "stop", 1.0)
    assert samples(second)["quire:request_success_total 0 stop"] == 0


def test_the_text_is_what_the_client_library_writes() -> None:
    metrics = Metrics('100 %r of a "quire:\\\n', config=engine_config())
    for replica in (0, 1):
        metrics.state(replica, "up")
        metrics.take(replica, EngineStats(kv_blocks=4, steps=3, iteration_tokens=[1, 2, *[0] * 12, 9]))
        metrics.observe(replica, "time_to_first_token_seconds", 0.1 + 0.2, 3)
        metrics.finished(replica, "stop", 1e-7)
    metrics.rank_stats = {1: [RankStats(4, 9.0, 1.0, usage=RankUsage(1.5, 2, 3, GpuUsage(7, 8, pcie_sent=9)))]}
    metrics.expert_load = ExpertLoad({1: 2}, array("q", [5, 1]).tobytes(), 1.25, 6)
    metrics.http.begin(row := metrics.http.row("GET /v1/models/{name:path}"))
    metrics.http.end(row, 404, 0.02)
    metrics.http.use_key('of "alice"\\', 1, 2)
    text = metrics.exposition().decode()

    class Parsed(Collector):
        def collect(self) -> Iterator[Metric]:
            yield from text_string_to_metric_families(text)

    assert generate_latest(Parsed()).decode() == text
    (label,) = {sample.labels["model_name"] for family in Parsed().collect() for sample in family.samples}
    assert label == '100 %r of a "quire:\\\n'


def test_the_aliases_of_vllm_are_the_same_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 1.0)
    config = engine_config()
    lora = LoraConfig(num_slots=2, device_bytes=1, host_bytes=1)
    store = KVStoreConfig(memory_bytes=1)
    speculating = replace(config.scheduler, speculative=SpeculativeConfig())
    config = replace(config, scheduler=speculating, lora=lora, kv_store=store)
    metrics, without = (Metrics("m", config=config, vllm_names=names) for names in (True, False))
    for each in (metrics, without):
        each.state(0, "up")
        each.take(0, EngineStats(running=2, kv_blocks=4, prompt_tokens=9, prefix_hit_tokens=4, steps=1, started=1))
        each.finished(0, "stop", 1.0)
        each.rank_stats = {0: [RankStats(1, 1.0, 0.5)]}
    found, own = samples(metrics), samples(without)
    theirs = {name: value for name, value in found.items() if name.startswith("vllm:")}
    without_prefix = {name: value for name, value in found.items() if name.startswith("http_")}
    assert found == own | theirs | without_prefix
    assert not any(name.startswith("vllm:") for name in own)
    assert all(own[name.replace("vllm:", "quire:")] == value for name, value in theirs.items())
    names = {sample.partition(" ")[0].removeprefix("vllm:") for sample in theirs}
    suffixes = ("", "_total", "_bucket")
    assert all(any(name + suffix in names for suffix in suffixes) for name in VLLM_NAMES)
    assert found["vllm:prompt_tokens_by_source_total 0 local_compute"] == 5
    assert "vllm:rank_busy_seconds_total 0 0 0" not in found
    info = f"vllm:cache_config_info 0 {config.cache.block_size} float32 True 0.9 4"
    assert sorted(info.split()) in [sorted(name.split()) for name in found if "cache_config_info" in name]


@pytest.mark.parametrize(
    ("name", "bounds"),
    [
        (
            "time_to_first_token_seconds",
            "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160 640 2560",
        ),
        (
            "inter_token_latency_seconds",
            "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80",
        ),
        ("request_queue_time_seconds", "0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680"),
        ("e2e_request_latency_seconds", "0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680"),
        ("request_prompt_tokens", "1 2 5 10 20 50 100 200 500 1000 2000 5000 10000 20000 50000 100000"),
    ],
)
def test_histograms_have_the_buckets_of_vllm(name: str, bounds: str) -> None:
    """So that a rule that names one of vLLM 0.32's buckets finds it."""
    assert set(map(float, bounds.split())) <= set(HISTOGRAMS[name][1])
    assert all(list(edges) == sorted(set(edges)) for _, edges in HISTOGRAMS.values())


def test_tokens_of_a_kv_store_are_counted_by_tier() -> None:
    metrics = Metrics("m", config=replace(engine_config(), kv_store=KVStoreConfig(memory_bytes=1)), vllm_names=False)
    metrics.state(0, "up")
    stats = EngineStats(started=1, steps=1, prompt_tokens=200, prefix_queried_tokens=200, prefix_hit_tokens=90)
    stats.kv_loaded_memory_tokens, stats.kv_loaded_disk_tokens, stats.kv_load_seconds = 30, 15, 0.25
    stats.kv_loaded_peer_tokens = 5
    metrics.take(0, stats)
    found = samples(metrics)
    assert {
        name.removeprefix("quire:prompt_tokens_"): value
        for name, value in found.items()
        if name.startswith(("quire:prompt_tokens_by_source", "quire:prompt_tokens_cached"))
    } == {
        "cached_total 0": 90,
        "cached_by_source_total 0 device": 40,
        "cached_by_source_total 0 host": 30,
        "cached_by_source_total 0 disk": 15,
        "cached_by_source_total 0 peer": 5,
        "by_source_total 0 local_compute": 110,
        "by_source_total 0 local_cache_hit": 40,
        "by_source_total 0 external_kv_transfer": 50,
    }
    assert found["quire:prefix_cache_hits_total 0"] == 40
    assert found["quire:external_prefix_cache_queries_total 0"] == 160
    assert found["quire:external_prefix_cache_hits_total 0"] == 50
    assert found["quire:kv_load_seconds_total 0"] == 0.25
    assert not any("kv_store_" in name for name in found)


def test_each_host_has_the_metrics_of_its_kv_store(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics, now = Metrics("m"), 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    metrics.state(0, "up")
    metrics.state(1, "restarting")
    assert not any("kv_load" in name for name in samples(metrics))
    metrics.take_store(
        0, "localhost", KVStoreStats(memory_bytes=5, memory_capacity=8, stored_bytes=9, wrong_checksums=1)
    )
    assert not any("kv_store_peer" in name or "rank" in name for name in samples(metrics))
    metrics.take_store(
        1,
        "10.0.0.2",
        KVStoreStats(
            memory_capacity=8,
            disk_bytes=7,
            disk_capacity=70,
            disk_error="full",
            peers=2,
            peers_up=["10.0.0.3:7"],
            loaded_peer_bytes=6,
            copied_rank_bytes=4,
        ),
    )
    found = samples(metrics)
    assert found["quire:kv_loads_total 0"] == 0
    assert found["quire:kv_store_bytes localhost memory"] == 5
    assert found["quire:kv_store_written_bytes_total localhost memory"] == 9
    assert found["quire:kv_store_wrong_checksums_total localhost"] == 1
    assert found["quire:kv_store_capacity_bytes 10.0.0.2 disk"] == 70
    assert found["quire:kv_store_disk_up 10.0.0.2"] == 0
    assert (found["quire:kv_store_peers 10.0.0.2"], found["quire:kv_store_peers_up 10.0.0.2"]) == (2, 1)
    assert found["quire:kv_store_read_bytes_total 10.0.0.2 peer"] == 6
    assert found["quire:kv_store_copied_rank_bytes_total 10.0.0.2"] == 4
    assert not any("disk" in name for name in found if "localhost" in name)
    now = 109.0
    metrics.take_store(0, "localhost", KVStoreStats())
    now = 111.0
    found = samples(metrics)
    assert (found["quire:kv_store_up localhost"], found["quire:kv_store_up 10.0.0.2"]) == (1, 0)
    metrics.state(2, "up")
    metrics.take_store(2, "localhost", KVStoreStats(), "127.0.0.1:7")
    found = samples(metrics)
    assert (found["quire:kv_store_up localhost"], found["quire:kv_store_up 127.0.0.1:7"]) == (1, 1)
    metrics.state(1, "removed")
    assert not any("10.0.0.2" in name for name in samples(metrics)), "its host may have left"
    metrics.take_store(1, "10.0.0.4", KVStoreStats())
    assert {*metrics._kv_stores} == {"localhost", "127.0.0.1:7", "10.0.0.4"}


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


def test_the_stats_of_ranks_are_exported_while_their_replica_is_up() -> None:
    metrics = Metrics("m")
    metrics.stage_ranks = {3: 1}
    metrics.state(0, "dead")
    metrics.rank_stats = {
        0: [RankStats(4, 9.0, 1.0)] * 2,
        3: [
            RankStats(4, 9.0, 7.5, communication=(1.0, 2.0, 3.0)),
            RankStats(4, 9.0, 0.5, True, usage=RankUsage(1.5, 200, 50, GpuUsage(7, 8, power=300.0, pcie_sent=9))),
        ],
    }
    metrics.state(3, "up")
    found = samples(metrics)
    of_ranks = ("rank", "straggler", "gpu_")
    assert {name: value for name, value in found.items() if any(word in name for word in of_ranks)} == {
        "quire:rank_busy_seconds_total 3 0 0": 1.5,
        "quire:rank_busy_seconds_total 3 1 1": 8.5,
        "quire:rank_wait_seconds_total 3 0 0": 7.5,
        "quire:rank_wait_seconds_total 3 1 1": 0.5,
        "quire:straggler 3 0 0": 0.0,
        "quire:straggler 3 1 1": 1.0,
        "quire:rank_communication_seconds_total 3 tp 0 0": 1.0,
        "quire:rank_communication_seconds_total 3 pp 0 0": 2.0,
        "quire:rank_communication_seconds_total 3 ep 0 0": 3.0,
        "quire:rank_communication_seconds_total 3 tp 1 1": 0.0,
        "quire:rank_communication_seconds_total 3 pp 1 1": 0.0,
        "quire:rank_communication_seconds_total 3 ep 1 1": 0.0,
        "quire:rank_cpu_seconds_total 3 1 1": 1.5,
        "quire:rank_resident_memory_bytes 3 1 1": 200,
        "quire:rank_shared_memory_bytes 3 1 1": 50,
        "quire:gpu_memory_used_bytes 3 1 1": 7,
        "quire:gpu_memory_total_bytes 3 1 1": 8,
        "quire:gpu_power_watts 3 1 1": 300.0,
        "quire:gpu_pcie_bytes_per_second sent 3 1 1": 9,
    }
    metrics.state(3, "dead")
    assert not any("rank" in name for name in samples(metrics))


def test_each_replica_is_exported(tmp_path: Path) -> None:
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
    second.finished(3, "stop", 1.0)
    first.state(0, "draining")
    first.state(3, "removed")
    found = samples(second)
    assert found["quire:num_requests_running 0"] == 2
    assert [found[f"quire:replicas {state}"] for state in ("up", "draining")] == [0, 1]
    # Its counts remain, its gauges do not.
    kept = {name.split()[0] for name in found if "3" in name.split()[1:]}
    assert found["quire:generation_tokens_total 3"] == 20
    assert found["quire:request_success_total 3 stop"] == found["quire:e2e_request_latency_seconds_count 3"] == 1
    assert all(name.endswith(("_total", "_bucket", "_sum", "_count")) for name in kept)
    assert {name.removesuffix(" 3") for name in found if name.endswith("_total 3")} == {
        name.removesuffix(" 0") for name in found if name.endswith("_total 0")
    }


def test_a_replica_that_died_runs_nothing_and_counts_anew(tmp_path: Path) -> None:
    path = str(tmp_path / "metrics")
    first, second = (Metrics("m", path, index, 2) for index in (0, 1))
    second.take(0, EngineStats(running=2, steps=500, generated_tokens=50, started=1))
    first.state(0, "dead")
    before = time.time()
    first.count_death(0, "rank 3 was killed – out of memory")
    death = second.last_death(0)
    assert death is not None
    assert (before <= death.time <= time.time(), death.reason) == (True, "rank 3 was killed – out of memory")
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
    assert second.last_death(0) == death, "as long as the replica exists"
    first.count_death(0, "é" * 1000)
    assert second.last_death(0).reason == "é" * 252  # type: ignore[union-attr]
    first.state(0, "removed")
    assert second.last_death(0) is second.last_death(1) is None
