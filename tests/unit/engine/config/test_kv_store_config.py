"""What the options for KV tiers become, and what they are refused for."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire.engine.config import kv_store_config
from quire.engine.config.added_replica import added_replica
from quire.engine.config.devices import Devices
from quire.engine.config.engine_config import KVStoreConfig, RayPlacement
from quire.engine.config.floors import doubling_context
from quire.engine.config.memory_plan import MemoryPlan
from quire.engine.config.plan_text import plan_text
from quire.engine.config.resolve import resolve
from quire.engine.protocol.errors import ConfigError
from tests.unit.engine.config.test_resolve import _eight_gib, folder, options  # noqa: F401

GIB = 1 << 30


def test_replicas_share_memory_and_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, disk = folder(tmp_path), tmp_path / "kv" / "tier"
    plain = resolve(options(model, data_parallel_size=2))
    tiers = options(model, data_parallel_size=2, kv_offloading_size=1.5, kv_disk=f"{disk}:0.25")
    config = resolve(tiers)
    assert plain.kv_store is None
    assert config.kv_store == KVStoreConfig(
        memory_bytes=3 * GIB // 2,
        num_tokens=(7 << 28) * 16 // (96 << 10),
        disk_path=str(disk),
        disk_bytes=GIB // 4,
    )
    assert f"--kv-disk {disk}:0.25: 256 MiB is less than the 1.5 GiB of memory" in caplog.text
    assert not disk.exists()
    assert MemoryPlan.of(config).fixed[0] == MemoryPlan.of(plain).fixed[0] + 3 * GIB // 4
    tokens = (7 << 28) // (96 << 10) * 16
    text = f"KV store: 1.5 GiB of the host's memory, and 256 MiB of disk in {disk}, for prefixes of 256 tokens or more"
    assert f"{text}: at least {tokens:,} tokens" in plan_text(config)
    assert added_replica(config, 2, (), [1, 1]).kv_store == config.kv_store
    only_disk = resolve(replace(tiers, kv_offloading_size=None)).kv_store
    assert only_disk is not None
    assert only_disk.memory_bytes == 8 * GIB // 10
    assert resolve(options(model, kv_offloading_size=0)).kv_store is None


def test_the_context_at_which_a_token_costs_twice_as_much(tmp_path: Path) -> None:
    dense = resolve(options(folder(tmp_path)))
    linear, attended = 2 * 256 * 256 + 2 * 128 * 256 + 3 * 640 * 256, 8 * (32 + 32)
    assert doubling_context(dense) == linear / attended
    experts = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2}
    chosen = 2 * 256 * 256 + 2 * 128 * 256 + 2 * 3 * 640 * 256
    assert doubling_context(resolve(options(folder(tmp_path, **experts)))) == chosen / attended
    windowed = {"architectures": ["MistralForCausalLM"], "sliding_window": 64}
    assert doubling_context(resolve(options(folder(tmp_path, **windowed)))) == math.inf


def test_stores_of_other_servers(tmp_path: Path) -> None:
    peers = {"kv_peers": "10.0.0.7:29560, [fe80::1]:1,host-2.svc:80,10.0.0.7:29560", "kv_peer_bandwidth": 100}
    store = resolve(
        options(folder(tmp_path), kv_offloading_size=1, cluster_token="x" * 16, kv_peer_port=29560, **peers)
    ).kv_store
    assert store == KVStoreConfig(
        memory_bytes=GIB,
        num_tokens=GIB * 16 // (96 << 10),
        peers=("10.0.0.7:29560", "[fe80::1]:1", "host-2.svc:80"),
        peer_port=29560,
        peer_bandwidth=100 << 20,
    )
    assert resolve(options(folder(tmp_path), kv_offloading_size=1, kv_peers="127.0.0.1:2,localhost:3,[::1]:4")).kv_store


def test_a_host_without_replicas_has_no_store(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hosts = {"data_parallel_size": 2, "data_parallel_size_local": 0, "cluster_token": "x" * 16}
    assert resolve(options(folder(tmp_path), kv_offloading_size=1, **hosts)).kv_store is None
    assert "--kv-offloading-size has no effect on this host, which has no replicas" in caplog.text


def test_only_the_first_host_of_a_replica_has_its_store(tmp_path: Path) -> None:
    """The other one plans no memory for it, but has to know that there is one."""
    hosts = {"nnodes": 2, "tensor_parallel_size": 2, "cluster_token": "x" * 16}
    first, other = (
        resolve(options(folder(tmp_path), kv_offloading_size=2, kv_disk="/srv:9", node_rank=node, **hosts))
        for node in range(2)
    )
    assert first.kv_store == KVStoreConfig(
        memory_bytes=2 * GIB, num_tokens=11 * GIB * 16 // (96 << 10), disk_path="/srv", disk_bytes=9 * GIB
    )
    assert other.kv_store == KVStoreConfig(memory_bytes=0)
    assert (MemoryPlan.of(first).kv_store, MemoryPlan.of(other).kv_store) == (2 * GIB, 0)
    assert first.shared_settings == other.shared_settings
    without = resolve(options(folder(tmp_path), node_rank=1, **hosts))
    assert without.shared_settings != first.shared_settings


def test_with_ray_the_store_takes_the_memory_of_this_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not that of every rank, which other hosts may have."""
    monkeypatch.setattr("quire.engine.config.devices.free_host_memory", lambda: 40 * GIB)

    def planned(node: str, **tiers: Any) -> tuple[int, int]:
        """Bytes of the store, and what a rank has less: one is at the address `node`, one on another host."""
        hosts = {"tensor_parallel_size": 2, "distributed_executor_backend": "ray", "master_addr": "10.0.0.1"}
        asked = options(folder(tmp_path), cluster_token="x" * 16, **hosts, **tiers)
        place = RayPlacement("10.0.0.1:6379", None, (("a", node), ("b", "10.0.0.2")), (1, 1), (1, 1), (), asked)
        config = resolve(asked, find=lambda _: ((place,), Devices("cpu", 2, 6 * GIB)))
        assert config.kv_store is not None
        assert resolve(replace(asked, node_rank=1), place).kv_store == KVStoreConfig(memory_bytes=0)
        return config.kv_store.memory_bytes, MemoryPlan.of(config).kv_store

    assert planned("10.0.0.3", kv_offloading_size=16) == (16 * GIB, 0)
    assert planned("10.0.0.3", kv_disk="/srv:9") == (GIB, 0)
    assert planned("10.0.0.1", kv_offloading_size=1) == (GIB, GIB)
    with pytest.raises(ConfigError, match=r"--kv-offloading-size 41 \(GiB\): the host has 40 GiB of free memory$"):
        planned("10.0.0.3", kv_offloading_size=41)


def test_an_added_replica_needs_no_store_of_its_own(tmp_path: Path) -> None:
    config = resolve(options(folder(tmp_path), kv_offloading_size=6, kv_cache_memory_bytes=100 << 20))
    needed = sum(MemoryPlan.of(config).fixed) - 6 * GIB
    assert needed < GIB
    assert added_replica(config, 1, (), [1]).kv_store == config.kv_store


def test_the_memory_of_a_cpu_is_planned_with_its_tier(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"KV store 8 GiB\), .* or --kv-offloading-size"):
        resolve(options(folder(tmp_path), kv_offloading_size=8))


def test_gpus_do_not_need_more_than_the_hosts_memory(tmp_path: Path) -> None:
    gpu = Devices("cuda", 1, 64 * GIB, order=(0,))
    asked = options(folder(tmp_path), device="cuda", kv_offloading_size=8)
    config = resolve(asked, described=gpu)
    assert config.kv_store is not None
    assert MemoryPlan.of(config).kv_store == 0  # it is not the device's
    with pytest.raises(ConfigError, match=r"--kv-offloading-size 8\.5 \(GiB\): the host has 8 GiB of free memory$"):
        resolve(replace(asked, kv_offloading_size=8.5), described=gpu)
    with pytest.raises(ConfigError, match=r"of which adapters may take 1 GiB \(--lora-memory\)"):
        resolve(replace(asked, enable_lora=True, lora_memory=1), described=gpu)
    other = resolve(replace(asked, enable_lora=True, lora_memory=1, kv_offloading_size=1), described=gpu)
    kv_store_config.check_host(KVStoreConfig(memory_bytes=0), other.lora, 99, gpu)  # not a first host's
    assert resolve(replace(asked, kv_offloading_size=900), described=replace(gpu, capability=(9, 0))).kv_store


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"enable_prefix_caching": False},
            "--kv-offloading-size needs the prefix cache, and it is off (--no-enable-prefix-caching)",
        ),
        ({"kv_offloading_size": 0, "kv_disk": "/tmp:1"}, "--kv-offloading-size 0 with --kv-disk"),
        ({"kv_disk": "/tmp"}, "--kv-disk /tmp: expected PATH:GIB"),
        ({"kv_disk": "/tmp:0"}, "--kv-disk /tmp:0: expected PATH:GIB"),
        ({"kv_disk": "s3://bucket/kv:9"}, "--kv-disk s3://bucket/kv:9: expected the path of a folder; mount"),
        ({"kv_disk": "/tmp:big"}, "--kv-disk /tmp:big: expected PATH:GIB"),
        ({"kv_disk": "/etc/passwd/kv:1"}, "--kv-disk /etc/passwd/kv: /etc/passwd is not a folder"),
        # Keys and values of 6 layers, 4 heads and 16 tokens, in float32: an entry, and another one.
        (
            {"kv_offloading_size": 0.0001},
            "entries of up to 96 KiB in 1 kind; use at least 0.01",
        ),
        ({"kv_disk": "/srv:0.0005"}, "--kv-disk /srv: 524 KiB is too little for 8 files with entries of up to 96 KiB"),
        ({"kv_disk": "/tmp/kv:1e300"}, "--kv-disk /tmp/kv:1e300: expected PATH:GIB"),
        ({"kv_offloading_size": 1e300}, "--kv-offloading-size 1e+300: expected GiB"),
        ({"kv_disk": "/tmp:1"}, "others can write to /tmp, and could change answers"),
        ({"kv_offloading_size": -1}, "--kv-offloading-size must be at least 0"),
        ({"kv_offloading_size": math.inf}, "--kv-offloading-size must be finite, got inf"),
        ({"kv_peers": "10.0.0.7"}, "--kv-peers 10.0.0.7: expected HOST:PORT"),
        ({"kv_peers": "127.0.0.1:1,b:70000"}, "--kv-peers b:70000: expected HOST:PORT"),
        *(
            ({"kv_peers": each}, f"--kv-peers {each}: expected HOST:PORT")
            for each in ("a..b:1", "_kv.host:1", "-:5", f"{'a' * 64}.b:1", "[::g]:1", "fe80::1:1", "a:0", "a:١")
        ),
        ({"kv_peers": "127.evil.example.com:1"}, "--kv-peers 127.evil.example.com:1: connections to other hosts need"),
        ({"kv_peers": "10.0.0.7:1"}, "--kv-peers 10.0.0.7:1: connections to other hosts need a --cluster-token"),
        ({"kv_peer_port": 70000}, "--kv-peer-port 70000: expected a port, at most 65535"),
        ({"kv_offloading_size": None, "kv_peer_port": 1}, "--kv-peer-port needs a KV store on this host"),
        ({"kv_disk_bandwidth": 1}, "--kv-disk-bandwidth limits writes to --kv-disk, which is not set"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        resolve(options(folder(tmp_path), **({"kv_offloading_size": 1} | changes)))


def test_a_model_without_a_prefix_cache_has_no_tiers(tmp_path: Path) -> None:
    bert = {"architectures": ["BertModel"], "num_hidden_layers": 2, "type_vocab_size": 2, "num_key_value_heads": None}
    with pytest.raises(ConfigError, match=r"--kv-disk needs the prefix cache, and .* cannot use it"):
        resolve(options(folder(tmp_path, **bert), kv_disk=f"{tmp_path}:1"))


def test_a_disk_must_not_be_another_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.stat", lambda path: SimpleNamespace(st_uid=12345, st_mode=0o40700))
    assert f"{tmp_path} belongs to another user (12345)" in kv_store_config.why_untrusted(str(tmp_path))


def test_a_disk_must_be_as_large_as_its_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(total=10 * GIB))
    asked = options(folder(tmp_path), kv_disk=f"{tmp_path}:10")
    assert resolve(asked).kv_store
    with pytest.raises(ConfigError, match="11 GiB is more than the 10 GiB of its file system"):
        resolve(replace(asked, kv_disk=f"{tmp_path}:11"))
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(ConfigError, match="this user cannot write to"):
        resolve(asked)
