"""The devices that the ranks get, by the links between them, and their text in the plan."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.engine.architecture.families import from_hf_config
from quire.engine.config import devices, parallel_config, plan_text, topology
from quire.engine.config.devices import Devices
from quire.engine.config.engine_config import ExpertParallelConfig, ParallelConfig
from quire.engine.config.options import EngineOptions
from quire.engine.config.topology import Links, LinkType, assign_devices, slowest_links
from quire.engine.protocol.errors import ConfigError
from tests.unit.engine.config.test_resolve import LLAMA

ARCH = from_hf_config(LLAMA)
INTERLEAVED = [[0, 2, 4, 6], [1, 3, 5, 7]]
UUIDS = [f"GPU-{number:08x}-aaaa" for number in range(8)]


def islands(parts: list[list[int]], inside: LinkType, outside: LinkType) -> Links:
    home = {device: number for number, part in enumerate(parts) for device in part}
    count = len(home)
    return tuple(
        tuple(inside if home[one] == home[other] else outside for other in range(count)) for one in range(count)
    )


ALL_NVLINK = islands([list(range(8))], LinkType.NVLINK, LinkType.UNKNOWN)
TWO_ISLANDS = islands(INTERLEAVED, LinkType.NVLINK, LinkType.SOCKETS)


class FakeNvml(types.ModuleType):
    """NVML of a host with these links. A handle is the number of its GPU."""

    NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK = 2, 0
    NVML_TOPOLOGY_MULTIPLE, NVML_TOPOLOGY_NODE = 20, 40

    class NVMLError(Exception):
        pass

    def __init__(self, links: Links, free: list[int] | None = None, silent: bool = False) -> None:
        super().__init__("pynvml")
        self.capabilities = [(9, 0)] * len(links)
        self.links, self.free, self.silent, self.sessions = links, free or [80 << 30] * len(links), silent, 0

    def nvmlInit(self) -> None:
        self.sessions += 1

    def nvmlShutdown(self) -> None:
        self.sessions -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.links)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index >= len(self.links):
            raise self.NVMLError("Invalid Argument")
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        if uuid not in UUIDS:
            raise self.NVMLError("Not Found")
        return UUIDS.index(uuid)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return types.SimpleNamespace(free=self.free[handle])

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:
        if self.silent:
            raise self.NVMLError("Not Supported")
        return self.capabilities[handle]

    def nvmlDeviceGetP2PStatus(self, one: int, other: int, capability: int) -> int:
        assert capability == self.NVML_P2P_CAPS_INDEX_NVLINK
        if self.silent:
            raise self.NVMLError("Not Supported")
        return 0 if self.links[one][other] is LinkType.NVLINK else 5

    def nvmlDeviceGetTopologyCommonAncestor(self, one: int, other: int) -> int:
        if self.silent:
            raise self.NVMLError("Not Supported")
        return {LinkType.SWITCH: 10, LinkType.PCIE: 30, LinkType.SOCKETS: 50, LinkType.NVLINK: 50}[
            self.links[one][other]
        ]


Install = Callable[..., FakeNvml]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    def put(links: Links, visible: str | None = None, **more: Any) -> FakeNvml:
        fake = FakeNvml(links, **more)
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        return fake

    return put


@pytest.mark.parametrize(
    ("links", "groups", "expected"),
    [
        (ALL_NVLINK, [4, 4], (0, 1, 2, 3, 4, 5, 6, 7)),
        (ALL_NVLINK, [8], tuple(range(8))),
        (TWO_ISLANDS, [4, 4], (0, 2, 4, 6, 1, 3, 5, 7)),
        (TWO_ISLANDS, [4], (0, 2, 4, 6)),
        (TWO_ISLANDS, [2, 2, 2, 2], (0, 2, 4, 6, 1, 3, 5, 7)),  # an island is used up before the next is begun
        (TWO_ISLANDS, [2, 4], (1, 3, 0, 2, 4, 6)),  # the small group does not break the large one's island
        (TWO_ISLANDS, [1, 1], (0, 2)),  # stages beside each other, while there is room
        (islands([[0, 3], [1, 2]], LinkType.SWITCH, LinkType.PCIE), [2, 2], (0, 3, 1, 2)),
        (islands([[0, 1], [2, 3]], LinkType.PCIE, LinkType.SOCKETS), [2, 2], (0, 1, 2, 3)),
        (islands([[0], [1]], LinkType.PCIE, LinkType.PCIE), [], ()),
    ],
)
def test_groups_lie_inside_the_fastest_islands(links: Links, groups: list[int], expected: tuple[int, ...]) -> None:
    assert assign_devices(links, groups) == expected


def test_a_group_avoids_the_one_slow_pair() -> None:
    """A ring of four, 0-1-3-2-0, whose diagonals have no NVLink: not any two that reach each other somehow."""
    fast = {(0, 1), (1, 3), (2, 3), (0, 2)}
    ring = tuple(
        tuple(LinkType.NVLINK if (min(a, b), max(a, b)) in fast else LinkType.SOCKETS for b in range(4))
        for a in range(4)
    )
    order = assign_devices(ring, [2, 2])
    assert slowest_links(ring, order, [2, 2], 2).tensor is LinkType.NVLINK


def test_large_hosts_are_arranged_at_once() -> None:
    sixteen = islands([list(range(0, 16, 2)), list(range(1, 16, 2))], LinkType.NVLINK, LinkType.SOCKETS)
    assert assign_devices(sixteen, [8, 8]) == (*range(0, 16, 2), *range(1, 16, 2))


def test_what_is_crossed_is_the_slowest_of_each_kind() -> None:
    order = assign_devices(TWO_ISLANDS, [4, 4])
    assert slowest_links(TWO_ISLANDS, order, [4, 4], 2) == topology.SlowestLinks(LinkType.NVLINK, LinkType.SOCKETS)
    assert slowest_links(TWO_ISLANDS, order, [4, 4], 1) == topology.SlowestLinks(LinkType.NVLINK, None), (
        "two replicas do not talk"
    )
    assert slowest_links(TWO_ISLANDS, range(8), [8], 1).tensor is LinkType.SOCKETS
    assert slowest_links(TWO_ISLANDS, [0], [1], 1) == topology.SlowestLinks()


@pytest.mark.parametrize(
    ("visible", "groups", "count", "order"),
    [
        (None, [4, 4], 8, (0, 2, 4, 6, 1, 3, 5, 7)),
        ("1,2,3,4", [2, 2], 4, (0, 2, 1, 3)),  # numbers among the visible ones
        ("4,3,2,1", [2, 2], 4, (0, 2, 1, 3)),
        (f"{UUIDS[5]}, {UUIDS[0]},{UUIDS[7]}", [2], 3, (0, 2)),
        ("0,1,-1,2", [2], 2, (0, 1)),
        ("3,5", [4], 2, ()),
    ],
)
def test_visible_gpus_are_read(
    visible: str | None, groups: list[int], count: int, order: tuple[int, ...], install: Install
) -> None:
    fake = install(TWO_ISLANDS, visible)
    found = devices.find("auto", groups)
    assert (found.kind, found.count, found.order) == ("cuda", count, order)
    assert fake.sessions == 0


def test_memory_is_that_of_the_smallest_gpu_that_is_used(install: Install) -> None:
    install(TWO_ISLANDS, free=[80, 1, 70, 1, 60, 1, 50, 1])
    assert devices.find("cuda", [4]).memory == 50
    assert devices.find("cuda", [4, 1]).memory == 1


def test_unknown_links_keep_the_device_order(install: Install) -> None:
    install(TWO_ISLANDS, silent=True)
    found = devices.find("cuda", [4, 4])
    assert found.order == tuple(range(8))
    assert found.links[0][1] is LinkType.UNKNOWN


def test_missing_and_invalid_gpus_are_reported(install: Install) -> None:
    install(())
    found = devices.find("auto", [1])
    assert (found.kind, found.order, found.links) == ("cpu", (), ())
    with pytest.raises(ConfigError, match="no NVIDIA GPU is visible"):
        devices.find("cuda", [1])
    for visible in ("9", "GPU-none"):
        install(ALL_NVLINK, visible)
        with pytest.raises(ConfigError, match=f"CUDA_VISIBLE_DEVICES={visible}"):
            devices.find("cuda", [1])


@pytest.mark.parametrize(
    ("changes", "groups"),
    [
        ({}, (1,)),
        ({"tensor_parallel_size": 4, "pipeline_parallel_size": 2}, (4, 4)),
        ({"tensor_parallel_size": 4, "pipeline_parallel_size": 2, "nnodes": 2, "node_rank": 1}, (4,)),
        ({"tensor_parallel_size": 8, "nnodes": 2}, (4,)),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 3, "nnodes": 2}, (2, 1)),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 3, "nnodes": 2, "node_rank": 1}, (1, 2)),
        ({"tensor_parallel_size": 4, "data_parallel_size": 2, "nnodes": 4, "node_rank": 3}, (2,)),
        ({"tensor_parallel_size": 2, "data_parallel_size": 4, "nnodes": 2, "node_rank": 1}, (2, 2)),
        ({"tensor_parallel_size": 2, "data_parallel_size": 3}, (2, 2, 2)),
        ({"tensor_parallel_size": 2, "data_parallel_size": 3, "data_parallel_size_local": 0}, ()),
    ],
)
def test_groups_of_this_host(changes: dict[str, Any], groups: tuple[int, ...]) -> None:
    assert parallel_config.local_group_sizes(EngineOptions(**changes)) == groups


def plan(links: Links | None, **changes: Any) -> str:
    """The plan's text about the grid on a host with such GPUs, or without any."""
    asked = EngineOptions(**changes)
    groups = parallel_config.local_group_sizes(asked)
    found = Devices("cpu", 8, 1 << 30)
    if links is not None:
        found = Devices("cuda", len(links), 80 << 30, assign_devices(links, groups), links)
    return "\n".join(plan_text.parallel_lines(parallel_config.resolve(asked, ARCH, found), ARCH))


def test_the_plan_names_the_links() -> None:
    assert plan(None) == plan(ALL_NVLINK) == ""
    assert plan(None, tensor_parallel_size=2, pipeline_parallel_size=2) == (
        "  tensor parallel inside a host over shared memory; pipeline inside a host over loopback"
    )
    assert plan(TWO_ISLANDS, tensor_parallel_size=4, pipeline_parallel_size=2) == (
        "  tensor parallel inside a host over NVLink; pipeline inside a host over PCIe across CPU sockets"
    )
    assert "of hosts" not in plan(TWO_ISLANDS, tensor_parallel_size=2)


def test_the_plan_warns_of_layers_cut_over_slow_links(monkeypatch: pytest.MonkeyPatch) -> None:
    text = plan(TWO_ISLANDS, tensor_parallel_size=8)
    assert "warning: tensor parallelism communicates between CPU sockets" in text
    assert "warning" not in plan(ALL_NVLINK, tensor_parallel_size=8)

    wide: dict[str, Any] = {"tensor_parallel_size": 16, "nnodes": 2, "node_rank": 1}
    monkeypatch.setattr(topology, "fast_network", lambda: None)
    # 16 heads are too many for this model, which the plan does not look at
    text = plan(ALL_NVLINK, **wide)
    assert "  2 hosts: ranks 0-7 on host 0, ranks 8-15 on host 1 (this host)" in text
    assert "warning: tensor parallelism communicates between hosts" in text
    assert "use --tensor-parallel-size 8 --pipeline-parallel-size 2" in text
    right = {"tensor_parallel_size": 8, "pipeline_parallel_size": 2, "nnodes": 2}
    assert "warning" not in plan(ALL_NVLINK, **right)
    assert "inside a host over NVLink; pipeline across hosts over the network" in plan(ALL_NVLINK, **right)
    monkeypatch.setattr(topology, "fast_network", lambda: "mlx5_0 (400 Gb/sec)")
    assert "warning" not in plan(ALL_NVLINK, **wide)
    assert "tensor parallel across hosts over mlx5_0 (400 Gb/sec)" in plan(ALL_NVLINK, **wide)


def test_the_plan_shows_experts() -> None:
    asked = EngineOptions(tensor_parallel_size=2, data_parallel_size=4, data_parallel_size_local=2)
    parallel = parallel_config.resolve(asked, ARCH, Devices("cpu", 8, 1 << 30))
    changes = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2}
    mixture = from_hf_config(LLAMA | changes)
    experts = ExpertParallelConfig(all2all_backend="all_to_all", enable_eplb=True, num_redundant_experts=8)
    text = "\n".join(plan_text.parallel_lines(replace(parallel, experts=experts), mixture))
    assert "4 replicas, which step together" in text
    assert "8 experts a layer and 8 copies over 8 ranks (4 replicas × 2), 2 each, linear" in text
    assert "tokens are dispatched by all_to_all across hosts; rebalanced every 3,000 steps" in text


def test_the_fastest_active_port_is_the_network(tmp_path: Path) -> None:
    assert topology.fast_network(tmp_path / "none") is None
    for name, state, rate in (
        ("mlx5_0", "4: ACTIVE", "100 Gb/sec (4X EDR)"),
        ("mlx5_1", "4: ACTIVE", "400 Gb/sec (4X NDR)"),
        ("mlx5_2", "1: DOWN", "800 Gb/sec (4X XDR)"),
    ):
        port = tmp_path / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "rate").write_text(f"{rate}\n")
    assert topology.fast_network(tmp_path) == "mlx5_1 (400 Gb/sec)"


def shared(count: int, **changes: Any) -> ParallelConfig:
    """The grid on a host whose `count` GPUs ranks may share."""
    asked = EngineOptions(**changes)
    return parallel_config.resolve(asked, ARCH, devices.find("cuda", parallel_config.local_group_sizes(asked)))


@pytest.mark.parametrize(
    ("count", "tp", "pp", "order"),
    [(1, 2, 1, (0, 0)), (1, 1, 2, (0, 0)), (2, 2, 2, (0, 1, 0, 1)), (2, 1, 3, (0, 1, 0)), (2, 2, 1, (0, 1))],
)
def test_ranks_share_gpus_round_robin(
    count: int, tp: int, pp: int, order: tuple[int, ...], install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(islands([list(range(count))], LinkType.NVLINK, LinkType.NVLINK))
    sizes = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp}
    if tp * pp > count:
        for value in ("", "0"):
            monkeypatch.setenv(devices.SHARE, value)
            with pytest.raises(
                ConfigError, match=f"needs {tp * pp} GPUs on this host, but {count} are visible .*QUIRE_SHARE_GPU=1"
            ):
                shared(count, **sizes)
    monkeypatch.setenv(devices.SHARE, "1")
    parallel = shared(count, **sizes)
    assert parallel.devices == order
    assert [parallel.device_of(rank) for rank in range(tp * pp)] == list(order)
    assert parallel.ranks_per_device == -(-tp * pp // count)
    text = "\n".join(plan_text.parallel_lines(parallel, ARCH))
    if tp * pp > count:
        which = "one GPU" if count == 1 else f"{count} GPUs"
        assert (
            f"  {tp * pp} ranks share {which} (QUIRE_SHARE_GPU) and communicate by gloo: slow, for testing a layout"
            in text
        )
        assert "NVLink" not in text
        assert "inside a host through its memory" in text
    else:
        assert "share" not in text


def test_what_cannot_share_is_refused(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(islands([[0]], LinkType.NVLINK, LinkType.NVLINK))
    monkeypatch.setenv(devices.SHARE, "1")
    alone = "QUIRE_SHARE_GPU is supported only on a single host"
    for changes, message in (
        ({"tensor_parallel_size": 4, "nnodes": 2}, alone),
        ({"data_parallel_size": 3, "data_parallel_size_local": 2, "enable_expert_parallel": True}, alone),
        ({"data_parallel_size": 2}, r"× 2 replicas .* not supported with --data-parallel-size 2 without --enable-exp"),
    ):
        with pytest.raises(ConfigError, match=message):
            shared(1, **changes)
    monkeypatch.setenv(devices.SHARE, "yes")
    with pytest.raises(ConfigError, match="QUIRE_SHARE_GPU=yes is invalid"):
        shared(1)


def test_capabilities_are_those_of_the_visible_gpus(install: Install) -> None:
    fake = install(TWO_ISLANDS, "2,1")
    fake.capabilities[1] = (8, 6)
    assert devices.gpu_capabilities() == [(9, 0), (8, 6)]
    fake.silent = True
    assert devices.gpu_capabilities() == []
    assert fake.sessions == 0
