"""The actors of an engine, with a fake Ray: actors and groups that it does not provide in time are reported."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from quire.engine.cluster import ray_cluster
from quire.engine.cluster.ray_launcher import NodesGone, RayLauncher
from quire.engine.config.engine_config import EngineConfig, RayPlacement
from quire.engine.config.options import EngineOptions
from quire.engine.config.resolve import resolve
from quire.engine.protocol.errors import ConfigError


class FakeRay(ModuleType):
    """Gives groups if `has_room`; of the actors, the first `started` answer."""

    def __init__(self, has_room: bool, started: int) -> None:
        super().__init__("ray")
        self.removed: list[object] = []
        self.killed: list[object] = []
        self.bundles: list[dict[str, str]] = []
        self._started = started
        self._group = SimpleNamespace(wait=lambda seconds: has_room)
        self.util = SimpleNamespace(placement_group=self._make, remove_placement_group=self.removed.append)
        self.exceptions = SimpleNamespace(RayError=RuntimeError)
        self.kill = self.killed.append
        self.dead: set[str] = set()

    def _make(self, bundles: list[dict[str, float]], bundle_label_selector: list[dict[str, str]]) -> object:
        self.bundles += bundle_label_selector
        return self._group

    def remote(self, **takes: float) -> Any:
        actor = SimpleNamespace(describe=SimpleNamespace(remote=lambda: object()))
        return lambda kind: SimpleNamespace(options=lambda **where: SimpleNamespace(remote=lambda: actor))

    def wait(self, refs: list[object], num_returns: int, timeout: float) -> tuple[list[object], list[object]]:
        return refs[: self._started], refs[self._started :]

    def nodes(self) -> list[dict[str, object]]:
        return [{"NodeID": name, "Alive": name not in self.dead} for name in ("a", "b")]

    def shutdown(self) -> None:
        pass


@pytest.fixture
def config() -> EngineConfig:
    """Three ranks on node 1, one on node 2."""
    config = resolve(EngineOptions(pipeline_parallel_size=4, distributed_executor_backend="mp"))
    nodes = (("a", "10.0.0.1"), ("b", "10.0.0.2"))
    place = RayPlacement("10.0.0.1:6379", None, nodes, (3, 1), (3, 1), (), EngineOptions())
    return replace(config, parallel=replace(config.parallel, nodes=3, ray=(place,)))


def use(monkeypatch: pytest.MonkeyPatch, **fake: Any) -> FakeRay:
    ray = FakeRay(**fake)
    monkeypatch.setitem(sys.modules, "ray", ray)
    strategies = ModuleType("ray.util.scheduling_strategies")
    strategies.PlacementGroupSchedulingStrategy = lambda *given, **named: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray.util", ModuleType("ray.util"))
    monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", strategies)
    monkeypatch.setattr(ray_cluster, "connect", lambda *given, **named: None)
    return ray


def test_a_group_that_is_not_scheduled_is_reported_and_removed(
    monkeypatch: pytest.MonkeyPatch, config: EngineConfig
) -> None:
    launcher, ray = RayLauncher(config, "info"), use(monkeypatch, has_room=False, started=0)
    with pytest.raises(ConfigError, match=r"did not give 3 CPU on 10.0.0.1, 1 CPU on 10.0.0.2 within 15 s, although"):
        launcher.start(0, lambda node, reason: None)
    launcher.close()
    assert [each["ray.io/node-id"] for each in ray.bundles] == ["a", "a", "a", "b"]
    assert len(ray.removed) == 1


def test_workers_that_do_not_start_are_reported_with_their_node(
    monkeypatch: pytest.MonkeyPatch, config: EngineConfig
) -> None:
    launcher, ray = RayLauncher(config, "info"), use(monkeypatch, has_room=True, started=3)
    with pytest.raises(ConfigError, match=r"did not start 1 of 4 workers within 60 s, on node 2 \(10.0.0.2\)"):
        launcher.start(0, lambda node, reason: None)
    launcher.close()
    assert len(ray.killed) == 4
    assert len(ray.removed) == 1


def test_ranks_get_other_places_when_a_node_has_gone(monkeypatch: pytest.MonkeyPatch, config: EngineConfig) -> None:
    launcher, ray = RayLauncher(config, "info"), use(monkeypatch, has_room=True, started=4)
    ray.dead.add("b")
    with pytest.raises(NodesGone, match=r"node 2 \(10.0.0.2\): Ray says that the node has died"):
        launcher.start(0, lambda node, reason: None)
    launcher.close()
    assert not ray.bundles
    former = config.parallel.placement
    assert former is not None
    other = replace(former, nodes=(("a", "10.0.0.1"),), ranks_per_node=(4,), options=EngineOptions(model="other"))
    asked: list[EngineOptions] = []

    def find(options: EngineOptions) -> object:
        asked.append(options)
        return (other,), None

    monkeypatch.setattr(ray_cluster, "find", find)
    two = replace(config, parallel=replace(config.parallel, ray=(other, former), replica=1, replicas=2))
    placed = ray_cluster.place_again(two).parallel
    assert (placed.hosts, placed.ray[0], placed.ray[1]) == (range(2), other, replace(other, options=former.options))
    assert [(each.distributed_executor_backend, each.data_parallel_size) for each in asked] == [("ray", 1)]
