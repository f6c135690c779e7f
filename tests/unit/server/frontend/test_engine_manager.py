"""What the engine manager decides when cores come up and die, with cores that are played by the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from quire.engine.config.engine_config import EngineConfig, ExpertParallelConfig
from quire.engine.core.launch import CoreArgs
from quire.engine.protocol.stats import EngineStats
from quire.engine.protocol.supervision import EngineFailed, EngineState, Failed, Ready, ReplicaLost, ReplicaUp
from quire.engine.supervisor import Process
from quire.server.config import RestartPolicy
from quire.server.frontend import engine_manager as module
from quire.server.frontend.engine_manager import EngineManager
from quire.server.frontend.metrics import Metrics
from tests.fakes.supervised import FakeProcess


class Engine:
    """A manager, the cores that it has started, and the states that it has reported."""

    def __init__(
        self,
        config: EngineConfig,
        policy: RestartPolicy,
        started: list[tuple[CoreArgs, FakeProcess]],
        *,
        is_coupled: bool,
        count: int,
    ) -> None:
        self.started = started
        self.states: list[EngineState] = []
        experts = ExpertParallelConfig() if is_coupled else None
        parallel = replace(config.parallel, replicas=count, local_replicas=range(count), experts=experts)
        self.manager = EngineManager(replace(config, parallel=parallel), name="m", policy=policy)
        self.manager.on_change = self.states.append

    def core(self, replica: int) -> FakeProcess:
        """The newest core of a replica."""
        return [core for args, core in self.started if args.config.parallel.replica == replica][-1]

    def starts(self, replica: int) -> int:
        return sum(args.config.parallel.replica == replica for args, _ in self.started)

    def run(self, until: Callable[[], bool]) -> None:
        """Until it holds; a hanging test otherwise."""
        self.manager.run(until)

    def up(self, *replicas: int) -> None:
        for replica in replicas:
            self.core(replica).say(Ready({}, EngineStats(kv_blocks=100)))
            self.run(lambda replica=replica: isinstance(self.manager.states.get(replica), ReplicaUp))  # type: ignore[misc]

    def die(self, replica: int, reason: str = "rank 0 was killed by SIGKILL", *, user_error: bool = False) -> None:
        before = len(self.states)
        core = self.core(replica)
        core.say(Failed(reason, user_error))
        core.exit(1)
        self.run(lambda: len(self.states) > before)

    def live_again(self, replica: int) -> None:
        count = self.starts(replica)
        self.run(lambda: self.starts(replica) > count)
        self.up(replica)


Make = Callable[..., Engine]


@pytest.fixture
def engine(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Make]:
    monkeypatch.setattr(module, "RESTART_SECONDS", (0.0, 0.0))
    monkeypatch.setattr("quire.engine.supervisor._TICK_SECONDS", 0.001)
    made: list[Engine] = []

    def make(count: int = 1, *, is_coupled: bool = False, policy: RestartPolicy | None = None) -> Engine:
        found: list[tuple[CoreArgs, FakeProcess]] = []

        def start(args: CoreArgs, folder: str) -> Process:
            assert Path(folder).is_dir()
            found.append((args, FakeProcess()))
            return found[-1][1]

        monkeypatch.setattr(module, "start_core", start)
        made.append(Engine(config, policy or RestartPolicy(), found, is_coupled=is_coupled, count=count))
        return made[-1]

    yield make
    for each in made:
        for _, core in each.started:
            if core.code is None:
                core.exit(0)
        each.manager.close()


def test_a_replica_that_dies_comes_back_with_another_incarnation(engine: Make) -> None:
    one = engine()
    assert not one.manager.is_settled
    one.up(0)
    assert one.manager.is_settled
    one.die(0)
    one.live_again(0)
    first, lost, second = one.states
    assert isinstance(first, ReplicaUp)
    assert isinstance(second, ReplicaUp)
    assert lost == ReplicaLost(0, "rank 0 was killed by SIGKILL", returns=True)
    assert first.incarnation != second.incarnation
    assert [args.incarnation for args, _ in one.started] == [first.incarnation, second.incarnation]
    text = one.manager.metrics.exposition().decode()
    assert 'quire:engine_deaths_total{engine="0",model_name="m"} 1.0' in text
    assert 'quire:replicas{model_name="m",state="up"} 1.0' in text


@pytest.mark.parametrize("user_error", [False, True])
def test_an_engine_that_cannot_load_is_not_started_again(engine: Make, user_error: bool) -> None:
    two = engine(2)
    two.up(1)
    two.die(0, "the weights do not fit", user_error=user_error)
    assert two.states[1:] == [EngineFailed("replica 0: the weights do not fit")]
    assert two.manager.is_user_error == user_error
    assert two.starts(0) == 1


def test_the_last_replica_may_die_so_often_only(engine: Make) -> None:
    one = engine(policy=RestartPolicy(max_restarts=2))
    one.up(0)
    for _ in range(2):
        one.die(0)
        one.live_again(0)
    one.die(0)
    failed = one.states[-1]
    assert isinstance(failed, EngineFailed)
    assert failed.reason == "rank 0 was killed by SIGKILL (death 3 within 10 minutes; see --max-restarts)"
    assert one.starts(0) == 3


def test_there_is_no_limit_while_others_are_up(engine: Make) -> None:
    two = engine(2, policy=RestartPolicy(max_restarts=1))
    two.up(0, 1)
    for _ in range(4):
        two.die(0)
        two.live_again(0)
    two.die(0)
    two.die(1)  # now none is up, but this is its first death
    assert isinstance(two.states[-1], ReplicaLost)


def test_without_restarts_the_last_death_ends_the_engine(engine: Make) -> None:
    two = engine(2, policy=RestartPolicy(is_enabled=False))
    two.up(0, 1)
    two.die(0)
    two.die(1, "rank 1 hangs")
    assert two.states[2:] == [
        ReplicaLost(0, "rank 0 was killed by SIGKILL", returns=False),
        EngineFailed("replica 1: rank 1 hangs"),
    ]
    assert (two.starts(0), two.starts(1)) == (1, 1)


def test_replicas_that_share_experts_are_restarted_together(engine: Make) -> None:
    """None is started while another is still exiting: that would fail the new one with it."""
    two = engine(2, is_coupled=True)
    two.up(0, 1)
    two.die(0, "replica 0: rank 0 was killed by SIGKILL")
    assert (two.starts(0), two.starts(1)) == (1, 1)
    two.die(1, "replica 0: rank 0 was killed by SIGKILL")
    two.run(lambda: two.starts(0) == two.starts(1) == 2)
    two.up(0, 1)
    assert two.manager.failure is None


def test_replicas_of_other_hosts_are_reported(engine: Make, config: EngineConfig) -> None:
    one = engine()
    one.manager.replicas = (0, 1)
    one.manager.has_several = True
    one.manager.metrics = Metrics("m", replicas=(0, 1))
    one.up(0)
    one.manager.replica_up(ReplicaUp(1, 7))
    one.run(lambda: one.manager.is_settled)
    one.manager.replica_died(1, "nothing was heard for 10 s")
    one.manager.replica_died(1, "its core has ended")  # the same death
    one.manager.replica_up(ReplicaUp(1, 8))
    one.run(lambda: len(one.states) == 4)
    assert one.states[1:] == [
        ReplicaUp(1, 7),
        ReplicaLost(1, "nothing was heard for 10 s", returns=True),
        ReplicaUp(1, 8),
    ]
    one.manager.fail("the host with the first replica has exited")
    one.run(lambda: one.manager.failure is not None)


def test_the_engine_fails_if_no_replica_comes_back(engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    one = engine()
    one.manager.replicas = (1,)
    one.manager.metrics = Metrics("m", replicas=(0, 1))
    one.manager._config = replace(one.manager._config, parallel=replace(one.manager._config.parallel, timeout=0.05))
    one.manager._cores.clear()  # this host has none
    one.manager.replica_up(ReplicaUp(1, 7))
    one.manager.replica_died(1, "the host is gone")
    one.run(lambda: one.manager.failure is not None)
    assert one.states[-1] == EngineFailed("no replica has been up for 0.05 s")
