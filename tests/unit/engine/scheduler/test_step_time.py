"""Learning the cost of a step, from made-up steps."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest

from quire.engine.scheduler.step_time import StepLoad, StepTimeModel


def seconds(load: StepLoad) -> float:
    """The truth."""
    return (
        0.02 + 3e-4 * load.prompt_tokens + 5e-4 * load.decodes + 2e-7 * load.decode_context + 4e-9 * load.prompt_context
    )


def some_load(rng: random.Random) -> StepLoad:
    decodes = rng.randrange(32)
    tokens = rng.choice([0, 0, 0, 64, 128, 512])
    return StepLoad(tokens, decodes, decodes * rng.randrange(100, 400), float(tokens * rng.randrange(2000)))


def learned(*, noise: float = 0.0, outliers: float = 0.0, steps: int = 600) -> StepTimeModel:
    rng = random.Random(1)
    step_time = StepTimeModel()
    for _ in range(steps):
        load = some_load(rng)
        factor = rng.uniform(1 - noise, 1 + noise) * (20.0 if rng.random() < outliers else 1.0)
        step_time.learn(load, seconds(load) * factor)
    return step_time


LOADS = [StepLoad(0, 32, 8000, 0.0), StepLoad(128, 16, 4000, 64000.0), StepLoad(1024, 0, 0, 1024 * 512.0)]


@pytest.mark.parametrize(("noise", "outliers", "error"), [(0.0, 0.0, 0.02), (0.1, 0.0, 0.06), (0.05, 0.02, 0.15)])
def test_predictions_are_near_the_truth(noise: float, outliers: float, error: float) -> None:
    step_time = learned(noise=noise, outliers=outliers)
    for load in LOADS:
        assert step_time.predict(load) == pytest.approx(seconds(load), rel=error)


def test_prompt_tokens_fill_the_time_that_is_left() -> None:
    step_time = learned()
    tokens = int(step_time.prompt_tokens_within(0.2, 16, 4000, 1000))
    assert seconds(StepLoad(tokens, 16, 4000, tokens * (1000 + tokens / 2))) == pytest.approx(0.2, rel=0.05)
    assert step_time.prompt_tokens_within(0.01, 16, 4000, 0) == 0.0
    counts = [step_time.prompt_tokens_within(0.2, 16, 4000, position) for position in (0, 1000, 10_000)]
    assert all(less <= more for more, less in pairwise(counts))


def test_the_fixed_cost_says_what_pays() -> None:
    assert learned().efficient_prompt_tokens(0.05) == pytest.approx(0.02 / 3e-4 / 0.05, rel=0.15)


def test_no_coefficient_is_negative_where_the_data_mislead() -> None:
    """More rows took less time: for any reason, a row never has a negative cost."""
    step_time = StepTimeModel()
    for count in range(100):
        step_time.learn(StepLoad(64, count % 10, 0, 0.0), 0.1 - 0.005 * (count % 10))
    predictions = [step_time.predict(StepLoad(64, count, 0, 0.0)) for count in (0, 10, 100)]
    assert predictions == sorted(predictions)
    assert predictions[0] > 0.0


def test_a_machine_that_slows_down_is_followed() -> None:
    rng = random.Random(2)
    step_time = learned()
    for _ in range(1000):
        load = some_load(rng)
        step_time.learn(load, 5 * seconds(load))
    assert step_time.predict(LOADS[1]) == pytest.approx(5 * seconds(LOADS[1]), rel=0.1)


def test_decodes_alone_do_not_wipe_out_what_prompts_cost() -> None:
    step_time = learned()
    for count in range(20_000):
        load = StepLoad(0, 8, 1000 + count, 0.0)
        step_time.learn(load, seconds(load))
    assert step_time.predict(LOADS[1]) == pytest.approx(seconds(LOADS[1]), rel=0.1)


def test_before_anything_is_known_no_number_is_made_up() -> None:
    step_time = StepTimeModel()
    assert not step_time.is_ready
    assert step_time.predict(LOADS[1]) == 0.0
    assert step_time.prompt_tokens_within(0.1, 1, 1, 0) == math.inf
    for _ in range(3):  # the first steps compile and allocate
        step_time.learn(LOADS[1], 9.0)
    assert not step_time.is_ready
    step_time.learn(LOADS[1], 0.1)
    assert step_time.is_ready
    assert step_time.max_prompt_tokens_seen == 128
