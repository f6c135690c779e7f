"""The size of the KV cache that fits a rank, measured by a scripted meter; and the step that it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from quire.engine.config.engine_config import EngineConfig
from quire.engine.config.memory_plan import MemoryPlan, limit_blocks
from quire.engine.config.options import EngineOptions
from quire.engine.config.resolve import resolve
from quire.engine.distributed.parallel_state import connect
from quire.engine.protocol.errors import ConfigError
from quire.engine.protocol.sampling_params import SamplingParams
from quire.engine.protocol.scheduler_output import SchedulerOutput
from quire.engine.worker import memory
from quire.engine.worker.async_copies import AsyncOutput
from quire.engine.worker.model_runner import ModelRunner
from quire.engine.worker.oom import is_out_of_memory
from tests.fakes.checkpoints import generate, write_checkpoint
from tests.fakes.model_logits import CPU, configure
from tests.fakes.plans import Driver, Request, executing
from tests.fakes.processes import CONTEXT

U = 1 << 27
"""Bytes, an eighth of a GiB."""


@dataclass
class FakeMeter:
    """A scripted meter. `run` stands for the largest step: the most that it holds beside the weights, and the part that
    stays."""

    at_start: int = 80 * U
    others: int = 1 * U
    weights: int = 16 * U
    peak_bytes: int = 3 * U
    kept: int = 1 * U
    has_run: bool = False
    left: int = -1

    def run(self, plan: SchedulerOutput) -> None:
        self.has_run = True

    def reserved(self) -> int:
        return self.weights + self.kept * self.has_run

    def free(self) -> int:
        return self.at_start - self.reserved() - self.others

    def reset_peak(self) -> None:
        assert not self.has_run

    def peak(self) -> int:
        return self.weights + self.peak_bytes * self.has_run

    def keep_free(self, size: int) -> None:
        self.left = size


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"))


def many(folder: Path, **options: Any) -> EngineConfig:
    """So many requests at once that the memory limits the cache."""
    most = 32 if "kv_cache_memory_bytes" in options else 1 << 13
    return resolve(
        EngineOptions(
            model=str(folder),
            device="cpu",
            max_num_seqs=most,
            max_num_batched_tokens=most,
            enforce_eager=True,
            **options,
        )
    )


def fit(config: EngineConfig, meter: FakeMeter) -> int:
    return memory.determine_num_blocks(config, 0, meter, meter.run)


def test_the_cache_gets_what_the_rest_leaves(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    config, meter = many(folder), FakeMeter()
    block = MemoryPlan.of(config).kv_block[0]
    with caplog.at_level("INFO", logger="quire"):
        assert fit(config, meter) == (72 - 16 - 3 - 1) * U // block
    assert "memory: 10 GiB free at the start, budget 9 GiB: weights 2.12 GiB, activations 256 MiB," in caplog.text
    assert "CUDA and libraries 128 MiB, KV cache 6.5 GiB in" in caplog.text
    assert "; 1 GiB left" in caplog.text
    assert 0 < meter.left < 8 * U


def test_no_more_than_all_requests_can_use(folder: Path) -> None:
    config = resolve(EngineOptions(model=str(folder), device="cpu", max_num_seqs=3, max_model_len=128, block_size=4))
    assert fit(config, FakeMeter()) == 3 * 128 // 4


def test_a_fixed_cache_stays_as_it_is(folder: Path) -> None:
    config = many(folder, kv_cache_memory_bytes=1 << 21)
    assert fit(config, FakeMeter()) == config.cache.num_blocks == (1 << 21) // MemoryPlan.of(config).kv_block[0]


def test_a_fixed_cache_that_does_not_fit_is_refused(folder: Path) -> None:
    config = many(folder, kv_cache_memory_bytes=1 << 21)
    with pytest.raises(
        ConfigError, match=r"--kv-cache-memory-bytes 2097152 does not fit on rank 0, in addition to weights 10"
    ):
        fit(config, FakeMeter(weights=79 * U, peak_bytes=U, others=0))


def test_too_little_is_refused_with_numbers_and_flags(folder: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"less than one request of 512 .* on rank 0, in addition to weights 9"
    ) as refusal:
        fit(many(folder), FakeMeter(weights=71 * U))
    assert "in 10 GiB free at the start" in str(refusal.value)
    assert "--gpu-memory-utilization" in str(refusal.value)


def test_a_length_that_is_not_set_is_reduced_to_what_was_measured(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The rank, its executor and the API derive the same from the number of blocks."""
    config = many(folder, max_model_len="auto")
    block, tokens = MemoryPlan.of(config).kv_block[0], config.cache.block_size
    meter = FakeMeter(weights=68 * U - 20 * block - block // 2)
    with caplog.at_level("WARNING", logger="quire"):
        num_blocks = fit(config, meter)
    assert (config.model.max_model_len, num_blocks) == (512, 20)
    assert config.with_blocks(num_blocks).model.max_model_len == 20 * tokens
    assert f"requests have at most {20 * tokens} tokens instead of the model's 512" in caplog.text


def agree(rank: int, config: EngineConfig, init_method: str, weights: int, pipe: Connection) -> None:
    links = connect(config.parallel, rank, init_method, CPU)
    meter = FakeMeter(weights=weights)
    try:
        pipe.send(memory.determine_num_blocks(config, rank, meter, meter.run))
    except ConfigError as error:
        pipe.send(str(error))
    pipe.recv()
    links.close()


@pytest.mark.parametrize("weights", [20, 72])
def test_ranks_agree_on_the_least(folder: Path, tmp_path: Path, weights: int) -> None:
    """Stages of the same layers: the last has more to hold, and all say so."""
    config = many(folder, pipeline_parallel_size=2)
    pipes = [CONTEXT.Pipe() for _ in range(2)]
    init_method = (tmp_path / "meet").as_uri()
    ranks = [
        CONTEXT.Process(target=agree, args=(rank, config, init_method, size * U, theirs))
        for rank, (size, (_, theirs)) in enumerate(zip((16, weights), pipes, strict=True))
    ]
    for process in ranks:
        process.start()
    reported = [ours.recv() for ours, _ in pipes]
    for ours, _ in pipes:
        ours.send(None)
    for process in ranks:
        process.join(30)
        assert process.exitcode == 0
    if weights == 20:
        assert reported == [(72 - 20 - 3 - 1) * U // MemoryPlan.of(config).kv_block[1]] * 2
    else:
        assert reported[0] == reported[1]
        assert "on rank 1, in addition to weights 9.12 GiB" in reported[0]


SHARED = 80 * U
"""Free on a device before two ranks take any of it."""


@dataclass
class SharingMeter(FakeMeter):
    """The meter of one of two ranks on a device: the bytes that each has taken are in shared memory."""

    rank: int = 0
    taken: Any = None
    has_given_back: Any = None
    """An event of each rank."""

    def run(self, plan: SchedulerOutput) -> None:
        super().run(plan)
        self.taken[self.rank] = self.weights + self.peak_bytes + self.others  # torch keeps the largest step's

    def reserved(self) -> int:
        if self.has_run:
            if self.rank:
                assert self.has_given_back[0].wait(60)  # this one is the slower
            self.taken[self.rank] = super().reserved() + self.others
            self.has_given_back[self.rank].set()
        return super().reserved()

    def free(self) -> int:
        return SHARED - sum(map(int, self.taken))

    def keep_free(self, size: int) -> None:
        self.left = self.free() - size
        """The memory that torch may take in addition."""


def share(rank: int, config: EngineConfig, init_method: str, meter: SharingMeter, pipe: Connection) -> None:
    links = connect(config.parallel, rank, init_method, CPU)
    blocks = memory.determine_num_blocks(config, rank, meter, meter.run)
    cache = blocks * MemoryPlan.of(config).kv_block[rank]
    meter.taken[rank] += cache
    pipe.send((blocks, meter.left, cache))
    pipe.recv()
    links.close()


def test_ranks_that_share_a_device_count_their_own(folder: Path, tmp_path: Path) -> None:
    """Each has half, and half of the memory outside allocators; the second to start found less free."""
    config = many(folder, pipeline_parallel_size=2)
    config = replace(config, parallel=replace(config.parallel, devices=(0, 0)))
    taken, events = CONTEXT.Array("q", 2), [CONTEXT.Event() for _ in range(2)]
    pipes = [CONTEXT.Pipe() for _ in range(2)]
    ranks = []
    for rank, (weights, others) in enumerate(((16, 1), (20, 3))):
        taken[rank] = (weights + others) * U
        at_start = SHARED - rank * U
        meter = SharingMeter(at_start, others * U, weights * U, rank=rank, taken=taken, has_given_back=events)
        arguments = (rank, config, (tmp_path / "meet").as_uri(), meter, pipes[rank][1])
        ranks.append(CONTEXT.Process(target=share, args=arguments))
    for process in ranks:
        process.start()
    reported = [ours.recv() for ours, _ in pipes]
    for ours, _ in pipes:
        ours.send(None)
    for process in ranks:
        process.join(30)
        assert process.exitcode == 0
    (blocks, first, cache), (same, second, _) = reported
    assert blocks == same == (36 - 20 - 3 - 2) * U // MemoryPlan.of(config).kv_block[1]
    not_torchs = (40 - 16 - 1 - 2) * U - first
    assert second == (40 - 20 - 1 - 2) * U - not_torchs
    assert 0 < not_torchs < 4 * U
    assert cache + 2 * U <= first, "with the largest step's activations"
    assert first + second <= SHARED - (16 + 20 + 2 + 4) * U, "both together"


class Recorder:
    """Lets the largest step run for real, and remembers its plans."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plans: list[SchedulerOutput] = []
        run: Callable[[ModelRunner, SchedulerOutput], AsyncOutput] = ModelRunner._launch

        def launch(runner: ModelRunner, plan: SchedulerOutput) -> AsyncOutput:
            self.plans.append(plan)
            return run(runner, plan)

        monkeypatch.setattr(ModelRunner, "_launch", launch)


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize(("budget", "rows"), [(1, 1), (40, 8), (512, 8), (2000, 3)])
def test_the_largest_step_runs_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, budget: int, rows: int
) -> None:
    folder = write_checkpoint(family, tmp_path, **({"sliding_window": 16} if family == "mistral" else {}))
    config = resolve(
        EngineOptions(model=str(folder), device="cpu", max_num_seqs=rows, max_num_batched_tokens=budget, block_size=4)
    )
    seen = Recorder(monkeypatch)
    meter = FakeMeter()
    meter.reset_peak = lambda: None  # type: ignore[method-assign]  # the step runs in the runner, and not in the meter
    runner = ModelRunner(config, 0, connect(config.parallel, 0, None, CPU), CPU, meter)
    step, end = seen.plans
    assert step.num_tokens == min(budget, rows * 511)
    assert step.num_rows == len(step.new) == len(end.freed_slots) == min(rows, budget)
    assert all(len(new.token_ids) < 512 for new in step.new)
    memory = runner._kv_caches.layers[0].memory
    assert memory is not None
    assert runner.num_blocks == memory.shape[1] == limit_blocks(config, 1 << 40, 1)
    prompt = [5, 6, 7, 8, 9, 10, 11]
    request = Request(prompt, SamplingParams(temperature=0.0))
    Driver(executing(runner), rows, 40, 4).decode([request], 8, budget) if family == "llama" else None
    assert family == "mistral" or request.output == generate(folder, [prompt], 8)[0]


def test_the_shortest_model_length_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token of a prompt and one behind it; of prompts that are embedded, one."""
    for changes, least in (({}, 2), ({"runner": "pooling"}, 1)):
        config = configure(
            write_checkpoint("llama", tmp_path), max_model_len=least, block_size=4, max_num_seqs=3, **changes
        )
        seen, meter = Recorder(monkeypatch), FakeMeter()
        meter.reset_peak = lambda: None  # type: ignore[method-assign]
        runner = ModelRunner(config, 0, connect(config.parallel, 0, None, CPU), CPU, meter)
        runner.finalize()
        assert seen.plans[0].num_tokens == 3
        assert runner.num_blocks == config.cache.num_blocks


def test_without_a_meter_nothing_is_measured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configure(folder, block_size=4, max_num_seqs=2)
    seen = Recorder(monkeypatch)
    runner = ModelRunner(config, 0, connect(config.parallel, 0, None, CPU), CPU)
    assert runner.num_blocks == config.cache.num_blocks
    assert not seen.plans


@pytest.mark.parametrize(
    ("error", "is_it"),
    [
        (MemoryError(), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: you"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("can't allocate memory"), False),
    ],
)
def test_what_is_out_of_memory(error: Exception, is_it: bool) -> None:
    assert is_out_of_memory(error) == is_it
