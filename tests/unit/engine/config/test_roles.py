"""Replicas for prompts and for decodes: their layouts, devices and memory, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.engine.config import devices, kv_store_config, parallel_config
from quire.engine.config.devices import Devices
from quire.engine.config.layouts import layouts
from quire.engine.config.machine import this_machine
from quire.engine.config.memory_plan import MemoryPlan
from quire.engine.config.plan_text import plan_text
from quire.engine.config.resolve import resolve
from quire.engine.config.topology import LinkType
from quire.engine.protocol.errors import ConfigError
from tests.unit.engine.config.test_resolve import _eight_gib, folder, options  # noqa: F401

GIB = 1 << 30
ROLES = {"prefill_replicas": 1, "decode_replicas": 2}
OWN = {"prefill_tensor_parallel_size": 2, "prefill_pipeline_parallel_size": 3}


def test_roles_make_replicas_with_a_kv_store(tmp_path: Path) -> None:
    config = resolve(options(folder(tmp_path), **ROLES, max_num_seqs=8))
    assert config.parallel.replicas == 3
    assert [config.parallel.role_of(replica) for replica in range(3)] == ["prefill", "decode", "decode"]
    assert config.prefill is None
    assert config.of_role("prefill") == config
    # Four prompts of 2,048 tokens: keys and values of 6 layers and 4 heads, in float32.
    assert config.kv_store is not None
    assert config.kv_store.memory_bytes == 4 * 2048 * 6 * 2 * 4 * 32 * 4
    assert config.kv_store.num_tokens == 4 * 2048
    assert "replica 0 for prompts, replicas 1-2 for decodes, each with the ranks below" in plan_text(config)
    more = resolve(options(folder(tmp_path), prefill_replicas=2, decode_replicas=1, max_num_seqs=8)).kv_store
    assert more is not None
    assert more.memory_bytes == 2 * config.kv_store.memory_bytes
    many = resolve(options(folder(tmp_path), **ROLES, max_num_seqs=16)).kv_store
    assert many is not None
    assert many.num_tokens == 16 * 1024, "as many may wait for a decode replica"
    given = resolve(options(folder(tmp_path), **ROLES, kv_offloading_size=2))
    assert given.kv_store is not None
    assert given.kv_store.memory_bytes == 2 * GIB
    assert resolve(options(folder(tmp_path))).parallel.role_of(0) == "any"


def test_each_role_may_have_a_layout(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = resolve(options(folder(tmp_path), **ROLES, **OWN, kv_offloading_size=1))
    prefill, decode = config.of_role("prefill"), config.of_role("decode")
    assert prefill.prefill is None is decode.prefill
    assert (prefill.parallel.tensor_parallel_size, len(prefill.parallel.stages)) == (2, 3)
    assert (decode.parallel.tensor_parallel_size, len(decode.parallel.stages)) == (1, 1)
    assert (prefill.parallel.executor, decode.parallel.executor) == ("mp", "uni")
    # They share the processors, and replicas have equal parts of the memory.
    assert prefill.parallel.num_local_ranks == decode.parallel.num_local_ranks == 6 + 2
    parts = [MemoryPlan.of(prefill).kv_store * 6, MemoryPlan.of(decode).kv_store]
    assert parts == pytest.approx([GIB / 3] * 2, rel=1e-6)
    assert prefill.has_layout_of(prefill)
    assert not prefill.has_layout_of(decode)
    assert prefill.shared_settings == decode.shared_settings
    text = plan_text(config)
    assert "replicas for prompts have tensor parallel 2 × pipeline parallel 3 = 6 ranks (mp); KV cache holds" in text
    assert "stage 2 (ranks 4-5): layers 4-5" in text


def test_ranks_for_prompts_divide_tokens_if_they_are_as_many(tmp_path: Path) -> None:
    """The model has 4 KV heads."""
    for changes, prefill in (({"prefill_tensor_parallel_size": 2}, 1), ({"prefill_pipeline_parallel_size": 2}, 2)):
        asked = options(folder(tmp_path), **ROLES, tensor_parallel_size=8, decode_context_parallel_size=2, **changes)
        config = resolve(asked)
        sizes = [config.of_role(role).parallel.decode_context_parallel_size for role in ("prefill", "decode")]
        assert sizes == [prefill, 2]


def test_only_replicas_for_prompts_divide_the_tokens_of_steps(tmp_path: Path) -> None:
    """Only those for decodes divide blocks then, also if both have as many ranks."""
    context = {"prefill_context_parallel_size": 2, "decode_context_parallel_size": 2}
    asked = options(folder(tmp_path), **ROLES, **context, tensor_parallel_size=8, prefill_tensor_parallel_size=4)
    config = resolve(asked)
    prefill, decode = config.of_role("prefill"), config.of_role("decode")
    sizes = [
        (each.parallel.prefill_context_parallel_size, each.parallel.decode_context_parallel_size)
        for each in (prefill, decode)
    ]
    assert sizes == [(2, 1), (1, 2)]
    assert prefill.parallel.world_size == decode.parallel.world_size == 8
    assert not prefill.has_layout_of(decode)
    with pytest.raises(ConfigError, match=r"of the --prefill-replicas: --prefill-context-parallel-size 2 .*int4"):
        resolve(replace(asked, decode_context_parallel_size=1, kv_cache_dtype="int4"))
    with pytest.raises(ConfigError, match=r"--prefill-context-parallel-size 2 .*--decode-context-parallel-size 2;"):
        resolve(replace(asked, prefill_replicas=None, decode_replicas=None, prefill_tensor_parallel_size=None))


def test_requests_are_as_long_as_any_replica_allows(tmp_path: Path) -> None:
    """A rank of one layout may have room for less than a rank of another."""
    asked = options(folder(tmp_path), **ROLES, **OWN, max_model_len="auto", kv_cache_memory_bytes=8 << 20)
    config = resolve(asked)
    assert config.prefill is not None
    assert config.prefill.cache.num_blocks > config.cache.num_blocks
    assert config.model.max_model_len == config.prefill.model.max_model_len < 2048
    assert config.model.position_len == 2048


def test_ranks_of_each_role_have_gpus_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a stage are near each other, whatever the other replicas need."""
    near, far = LinkType.NVLINK, LinkType.PCIE
    links = tuple(tuple(near if one % 2 == other % 2 else far for other in range(5)) for one in range(5))
    monkeypatch.setattr(devices, "free_gpu_memory", lambda: [16 * GIB] * 5)
    monkeypatch.setattr(devices, "_gpu_links", lambda count: links)
    monkeypatch.setattr(devices, "gpu_capabilities", lambda: [(9, 0)] * 5)
    asked = options(folder(tmp_path), **ROLES, device="cuda", prefill_tensor_parallel_size=2, kv_offloading_size=1)
    config = resolve(asked)
    prefill, decode = config.of_role("prefill").parallel, config.of_role("decode").parallel
    of_prefill = [prefill.of_replica(0).device_of(rank) for rank in range(2)]
    of_decode = [decode.of_replica(replica).device_of(0) for replica in (1, 2)]
    assert len({device % 2 for device in of_prefill}) == 1
    assert len({*of_prefill, *of_decode}) == 4
    assert prefill.links.tensor is near
    assert decode.links.tensor is None
    with pytest.raises(ConfigError, match="needs 6 GPUs on this host, but 5 are visible"):
        resolve(replace(asked, decode_replicas=4, data_parallel_size=5))


def test_a_host_resolves_the_layouts_of_its_own_replicas(tmp_path: Path) -> None:
    """Also one that joins with more replicas than the server has been started with."""
    asked = options(folder(tmp_path), **ROLES, **OWN, cluster_token="x" * 16)
    first = resolve(replace(asked, data_parallel_start_rank=0))
    assert (first.prefill, first.parallel.world_size, first.parallel.num_local_ranks) == (None, 6, 6)
    later = parallel_config.for_headless(replace(asked, data_parallel_start_rank=5, data_parallel_size_local=2))
    last = resolve(later)
    assert (last.prefill, last.parallel.world_size, last.parallel.replicas) == (None, 1, 7)
    assert last.parallel.role_of(6) == "decode"
    assert first.shared_settings == last.shared_settings
    assert first.kv_store == last.kv_store is not None
    api = resolve(replace(asked, data_parallel_size_local=0))
    assert (api.prefill, api.kv_store, api.parallel.world_size) == (None, None, 1)


def test_nodes_have_the_layout_of_their_replica(tmp_path: Path) -> None:
    """Replica 0 is on nodes 0 and 1, replica 1 on the others; the first node of each has a store."""
    hosts = {"nnodes": 4, "tensor_parallel_size": 2, "cluster_token": "x" * 16}
    asked = options(folder(tmp_path), prefill_replicas=1, decode_replicas=1, **OWN, **hosts)
    nodes = [resolve(replace(asked, node_rank=node)) for node in range(4)]
    assert [each.parallel.role_of(each.parallel.replica) for each in nodes] == [*["prefill"] * 2, *["decode"] * 2]
    assert [(each.parallel.world_size, each.parallel.ranks_per_node) for each in nodes] == [
        *[(6, 3)] * 2,
        *[(2, 1)] * 2,
    ]
    assert [each.kv_store is not None and each.kv_store.memory_bytes > 0 for each in nodes] == [True, False] * 2
    assert len({tuple(each.shared_settings.items()) for each in nodes}) == 1


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"decode_replicas": None}, "--prefill-replicas 1 needs --decode-replicas"),
        ({"prefill_replicas": None}, "--decode-replicas 2 needs --prefill-replicas"),
        ({"prefill_replicas": None, "decode_replicas": None} | OWN, "--prefill-tensor-parallel-size 2 needs"),
        ({"prefill_replicas": 0, "decode_replicas": None}, "--prefill-replicas must be at least 1"),
        ({"data_parallel_size": 4}, "--data-parallel-size 4 contradicts --prefill-replicas 1 and --decode-replicas 2"),
        ({"kv_offloading_size": 0}, "--kv-offloading-size 0 with --prefill-replicas"),
        ({"enable_prefix_caching": False}, "--prefill-replicas needs the prefix cache, and it is off"),
        ({"enable_expert_parallel": True} | OWN, "replicas that share experts have the same layout; omit"),
        ({"pipeline_layer_partition": "6"} | OWN, "--pipeline-layer-partition 6 is for all replicas, which have 1"),
        ({"prefill_tensor_parallel_size": 3}, "of the --prefill-replicas: --tensor-parallel-size 3 does not divide"),
        ({"runner": "pooling"}, "--prefill-replicas: .* does not generate text, so there is nothing to decode"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=text if ".*" in text else re.escape(text)):
        resolve(options(folder(tmp_path), **(ROLES | changes)))


def test_layouts_have_the_same_entries(tmp_path: Path) -> None:
    """Of states that transformers computes, each rank has its own part of an entry."""
    config = resolve(options(folder(tmp_path), **ROLES))
    other = replace(config, cache=replace(config.cache, dtype="int8"))
    with pytest.raises(ConfigError, match="LlamaForCausalLM only if they have the same number of ranks; omit them"):
        kv_store_config.check_layouts(config, other)


def test_layouts_are_planned_for_equal_replicas(tmp_path: Path) -> None:
    asked = options(folder(tmp_path), **ROLES)
    with pytest.raises(ConfigError, match="--prefill-replicas: only layouts of all replicas can be planned"):
        layouts(asked, this_machine(asked, 1, 1.0))


def test_gpus_may_be_described(tmp_path: Path) -> None:
    eight = Devices("cuda", 8, 16 * GIB, order=tuple(range(5)), links=((LinkType.NVLINK,) * 8,) * 8, capability=(9, 0))
    config = resolve(options(folder(tmp_path), **ROLES, device="cuda", prefill_tensor_parallel_size=2), described=eight)
    assert config.prefill is not None
    assert [config.parallel.of_replica(replica).device_of(0) for replica in (1, 2)] == [2, 3]
