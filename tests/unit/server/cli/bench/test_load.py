"""The times of requests on a simulated clock, and their contents."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest

from quire.engine.protocol.errors import ConfigError
from quire.server.cli.bench import dataset
from quire.server.cli.bench.dataset import DatasetOptions
from quire.server.cli.bench.load import LoadClock, SendTimes, arrival_times, drive


class HandClock(LoadClock):
    """Goes on when somebody waits for a moment, to that moment."""

    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time

    async def until(self, moment: float) -> None:
        for _ in range(5):  # tasks that can go on do so before time passes
            await asyncio.sleep(0)
        self.time = max(self.time, moment)


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5)])
def test_intervals_vary_as_asked(burstiness: float, variation: float) -> None:
    times = np.array(arrival_times(20_000, 10, burstiness, seed=1))
    intervals = np.diff(times)
    assert (intervals >= 0).all()
    assert times[-1] == pytest.approx(2000)
    assert intervals.std() / intervals.mean() == pytest.approx(variation, rel=0.05)


def test_a_poisson_process_is_memoryless() -> None:
    intervals = np.diff(arrival_times(20_000, 10, 1.0, seed=2))
    for seconds in (0.05, 0.1, 0.3):
        assert (intervals > seconds).mean() == pytest.approx(math.exp(-10 * seconds), abs=0.01)


def test_arrivals_are_seeded() -> None:
    assert arrival_times(50, 3, 1.0, 7) == arrival_times(50, 3, 1.0, 7) != arrival_times(50, 3, 1.0, 8)


def test_the_ends_of_the_scale() -> None:
    assert arrival_times(3, math.inf, 1.0, 0) == [0, 0, 0]
    assert arrival_times(4, 2, math.inf, 0) == pytest.approx([0.5, 1.0, 1.5, 2.0])


async def test_an_open_loop_counts_from_the_schedule_however_late_it_is() -> None:
    clock = HandClock()

    async def send(index: int, moments: SendTimes) -> SendTimes:
        if index == 0:
            clock.time += 5  # the client is kept busy
        return moments

    moments = await drive(send, [1.0, 2.0, 8.0], None, clock)
    assert [m.scheduled for m in moments] == [m.start for m in moments] == [101, 102, 108]
    assert [m.sent for m in moments] == [101, 106, 108]


async def test_a_closed_loop_never_exceeds_its_limit_and_counts_from_when_there_was_room() -> None:
    clock = HandClock()
    running, most = 0, 0

    async def send(index: int, moments: SendTimes) -> SendTimes:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(20):
            await asyncio.sleep(0)
        clock.time += 1
        running -= 1
        return moments

    moments = await drive(send, [0.0] * 9, 2, clock)
    assert most == 2
    assert [m.scheduled for m in moments] == [100] * 9
    assert all(m.start == m.sent for m in moments)
    assert moments[8].start >= 107


async def test_nothing_to_send() -> None:
    async def send(index: int, moments: SendTimes) -> None:
        raise AssertionError

    assert await drive(send, [], None, HandClock()) == []


def test_prompts_of_token_ids() -> None:
    options = DatasetOptions(
        num_prompts=200, random_input_len=20, random_output_len=10, random_range_ratio=0.5, random_prefix_len=8
    )
    samples = dataset.token_samples(options, 1000, seed=3)
    assert samples == dataset.token_samples(options, 1000, seed=3) != dataset.token_samples(options, 1000, seed=4)
    prompts = [sample.prompt for sample in samples if isinstance(sample.prompt, list)]
    assert {tuple(prompt[:8]) for prompt in prompts} == {tuple(prompts[0][:8])}
    assert len({tuple(prompt[8:]) for prompt in prompts}) == 200
    assert {len(prompt) for prompt in prompts} == set(range(18, 39))
    assert [sample.prompt_len for sample in samples] == [len(prompt) for prompt in prompts]
    assert {sample.output_len for sample in samples} == set(range(5, 16))
    assert all(100 <= token < 1000 for prompt in prompts for token in prompt)


def test_text_comes_to_the_length_that_the_server_counts() -> None:
    options = DatasetOptions(num_prompts=3, random_input_len=100, random_output_len=4, random_prefix_len=20)
    words_for = dataset.words_per_token((16, 9 + 32), (256, 9 + 512))  # two tokens a word, and a template of nine
    samples = dataset.text_samples(options, words_for, seed=0)
    for sample in samples:
        assert isinstance(sample.prompt, str)
        assert abs(2 * len(sample.prompt.split()) + 9 - 120) <= 1
    assert len({str(sample.prompt)[:60] for sample in samples}) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_prompts": 0},
        {"random_range_ratio": 1.0},
        {"random_input_len": 0},
        {"random_output_len": 0},
        {"input_len": -1},
    ],
)
def test_requests_that_cannot_be_made(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        DatasetOptions(**wrong).check()
