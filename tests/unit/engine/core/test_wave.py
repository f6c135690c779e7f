"""Simulated cores that step together: with any arrivals at any time, they run the same steps, then sleep."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest

from quire.engine.core.wave import Wave


@dataclass
class SimulatedCore:
    """The turns of `engine.core.Core`, without their computation. `work` is the number of steps that its requests still
    need."""

    wave: Wave
    depth: int
    work: int = 0
    inbox: deque[int] = field(default_factory=deque)
    """Wave numbers, as they were sent."""
    steps: list[tuple[int, bool]] = field(default_factory=list)
    """The wave of each step handed out, and whether there was work."""
    taken: int = 0
    done: int = 0


class World:
    """Cores whose steps come back once all have handed them out; messages take their time."""

    def __init__(self, cores: int, depth: int, rng: random.Random) -> None:
        self.cores = [SimulatedCore(Wave(depth), depth) for _ in range(cores)]
        self.depth, self.rng = depth, rng

    def turn(self, core: SimulatedCore) -> bool:
        """One turn of a core's loop; False if it can only wait."""
        heard = bool(core.inbox)
        while core.inbox and self.rng.random() < 0.5:  # the rest is still on its way
            core.wave.wake(core.inbox.popleft())
        if core.wave.start(has_work=core.work > 0):
            for other in self.cores:
                if other is not core:
                    other.inbox.append(core.wave.number)
        if len(core.steps) - core.taken == self.depth or not core.wave.is_running:
            return self.take(core) or heard
        core.wave.on_submit()
        core.steps.append((core.wave.number, core.work > 0))
        if core.work and self.rng.random() < 0.7:  # else nothing could be planned just now
            core.work -= 1
            core.done += 1
        return True

    def take(self, core: SimulatedCore) -> bool:
        """Its oldest result, if it is there."""
        step = core.taken
        if any(len(each.steps) <= step for each in self.cores):
            return False
        core.taken += 1
        core.wave.on_result(is_active=any(each.steps[step][1] for each in self.cores))
        return True

    def finalize(self) -> None:
        """Let all go on until they can only wait."""
        for _ in range(100_000):
            order = self.rng.sample(self.cores, len(self.cores))
            if not any(self.turn(core) for core in order):
                return
        raise AssertionError("they never come to rest")


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("cores", [2, 3, 4])
def test_all_run_the_same_steps_and_then_sleep(cores: int, depth: int) -> None:
    for seed in range(150):
        rng = random.Random(seed)
        world = World(cores, depth, rng)
        asked = 0
        for _ in range(rng.randrange(1, 12)):
            for core in world.cores:
                if rng.random() < 0.4:
                    work = rng.randrange(1, 8)
                    core.work += work
                    asked += work
            for _ in range(rng.choice((0, 1, 3, 10, 40))):  # more arrives while they are under way, or not
                world.turn(rng.choice(world.cores))
            if rng.random() < 0.3:
                world.finalize()
        world.finalize()
        first = world.cores[0]
        for core in world.cores:
            assert core.work == 0, f"seed {seed}: work was left undone"
            assert core.wave.is_idle, f"seed {seed}: somebody waits for a step that nobody runs"
            assert not core.inbox
            assert [wave for wave, _ in core.steps] == [wave for wave, _ in first.steps], f"seed {seed}"
        assert sum(core.done for core in world.cores) == asked
        idle = [not any(core.steps[at][1] for core in world.cores) for at in range(len(first.steps))]
        waves = first.wave.number
        assert sum(idle) <= (2 * depth - 1) * waves, f"seed {seed}: they run on without work"


def test_a_wave_without_work_ends_after_the_plans_in_flight() -> None:
    """So it is when only a sign of life is asked for."""
    wave = Wave(2)
    assert wave.start(has_work=True)
    wave.on_submit()
    wave.on_submit()
    wave.on_result(is_active=False)
    assert not wave.is_running
    assert not wave.is_idle
    wave.on_result(is_active=True)  # too late for this wave
    assert not wave.is_running
    assert wave.is_idle


def test_a_wave_started_during_the_last_steps_begins_after_them() -> None:
    wave = Wave(1)
    wave.start(has_work=True)
    wave.on_submit()
    wave.wake(1)  # it came late: the wave was joined already
    wave.on_result(is_active=False)
    assert wave.is_idle
    wave.wake(2)
    assert not wave.is_idle
    assert not wave.start(has_work=False)
    assert wave.number == 2
    assert wave.is_running


def test_a_wave_number_out_of_order_is_ignored() -> None:
    wave = Wave(1)
    wave.wake(7)
    assert wave.is_idle
