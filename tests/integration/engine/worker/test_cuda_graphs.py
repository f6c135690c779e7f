"""Captured decode steps: replayed with padding and without, they are the steps themselves."""

from __future__ import annotations

import contextlib
import logging
import random
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.engine.config.engine_config import EngineConfig, ExpertParallelConfig, GraphConfig, LoraConfig
from quire.engine.distributed.communicator import Parallel
from quire.engine.distributed.expert_group import ExpertCommunicator, ExpertGroup
from quire.engine.distributed.expert_placement import ExpertPlacement
from quire.engine.distributed.parallel_state import ParallelState, connect
from quire.engine.layers.batch import BatchAdapters, KVBlocks
from quire.engine.layers.mlp import MLP
from quire.engine.layers.moe import MixtureOfExperts
from quire.engine.models.build import load
from quire.engine.protocol.runner_output import ModelRunnerOutput
from quire.engine.protocol.sampling_params import SamplingParams
from quire.engine.protocol.scheduler_output import SchedulerOutput
from quire.engine.worker import cuda_graphs, graph_recorders
from quire.engine.worker.cuda_graphs import DecodeGraphs
from quire.engine.worker.graph_recorders import GraphRecorder, OpReplayRecorder
from quire.engine.worker.kv_caches import allocate_caches
from quire.engine.worker.model_runner import ModelRunner
from quire.engine.worker.worker import Worker
from quire.kernels import AdapterRows, StateSegments, isa
from tests.fakes.adapter_pools import SLOTS, add_pools, changeable
from tests.fakes.core_with_ranks import Ranks
from tests.fakes.experts import EVERYTHING, HIDDEN, batch, build, packed
from tests.fakes.families import CASES, write
from tests.fakes.model_logits import CPU, configure
from tests.fakes.plans import Driver, Request, executing
from tests.fakes.processes import CONTEXT
from tests.fakes.ranks import on_ranks
from tests.fakes.recorder import CallAgain, Recording
from tests.fakes.threads import ThreadExecutor

COUNT = 20
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp("model")
            write(family, made[family], **({"num_local_experts": 8} if family == "Mixtral" else {}))
        return made[family]

    return folder


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recording:
    recorder = Recording()
    monkeypatch.setattr(graph_recorders, "make_recorder", lambda *place: recorder)
    return recorder


def config_of(folder: Path, *sizes: int, **options: Any) -> EngineConfig:
    given = {"block_size": 4, "max_num_seqs": 8, "max_model_len": 128, "spec_method": "none", **options}
    return replace(configure(folder, **given), graphs=GraphConfig(sizes=sizes))


def driver(config: EngineConfig) -> Driver:
    runner = ModelRunner(config, 0, connect(config.parallel, 0, None, CPU), CPU)
    runner.finalize()
    cache = config.cache
    return Driver(executing(runner), 8, cache.num_blocks, cache.block_size, groups=len(cache.groups))


def requests(count: int) -> list[Request]:
    rng = random.Random(1)
    return [Request([rng.randrange(130) for _ in range(rng.choice((1, 5, 30, 60)))], GREEDY) for _ in range(count)]


def crowds(driven: Driver) -> list[list[int]]:
    """Requests that come, go, are preempted and grow into new blocks, in steps of 1 to 8 of them."""
    everyone = requests(8)
    for count in range(1, 9):
        driven.decode(everyone[:count], 2 * count, 1000)
    for request in everyone[1::2]:
        driven.release(request)
    driven.decode(everyone[::2], COUNT, 1000)
    driven.decode(everyone[5:], COUNT, 7)
    driven.decode(everyone, COUNT, 60)
    return [request.output for request in everyone]


FAMILIES = [
    *("Llama", "Llama 4", "Mistral, windows", "Gemma 3", "GPT-2", "Falcon-RW, ALiBi"),
    *("gpt-oss", "Mixtral", "MiMo-V2-Flash", "DeepSeek V3"),
]


@pytest.mark.parametrize(("family", "sizes"), [("Llama", (1, 2, 4, 8)), *zip(FAMILIES, cycle([(3, 7), (1, 2, 4, 8)]))])
def test_replays_are_the_steps_themselves(
    family: str, sizes: tuple[int, ...], recorder: Recording, folders: Callable[[str], Path]
) -> None:
    expected = crowds(driver(config_of(folders(family))))
    assert not recorder.captured
    assert crowds(driver(config_of(folders(family), *sizes))) == expected
    assert recorder.captured == len(sizes)
    assert recorder.replayed >= 30


def test_a_replay_is_bit_for_bit_the_step_and_stores_nothing_else(
    recorder: Recording, folders: Callable[[str], Path]
) -> None:
    """As a step of the same number of rows; with padding, as a step of the rows alone."""
    config = config_of(folders("Llama"), 1, 2, 4, 8)
    runner = ModelRunner(config, 0, connect(config.parallel, 0, None, CPU), CPU)
    runner.finalize()
    assert runner._graphs is not None
    memory, model = [cache.memory for cache in runner._kv_caches.layers if cache.memory is not None], runner._model
    for cache in memory:
        cache.normal_()
    generator = torch.Generator().manual_seed(0)
    for rows in range(1, 9):
        inputs = cuda_graphs._Inputs(config, CPU, receives=False).batch(rows)
        lengths = torch.randint(1, 128, (rows,), generator=generator)
        tables = torch.randperm(rows * 32, generator=generator).view(rows, 32)[:, : -(-int(lengths.max()) // 4)]
        slots = tables.gather(1, (lengths[:, None] - 1) // 4)[:, 0] * 4 + (lengths - 1) % 4
        decode = replace(
            inputs,
            token_ids=torch.randint(0, 131, (rows,), generator=generator),
            positions=lengths - 1,
            sequence_lengths=lengths,
            groups={0: KVBlocks(slots, tables)},
        )
        with torch.inference_mode():
            start = [cache.clone() for cache in memory]
            expected = model(None, decode, runner._kv_caches.layers).clone()
            stored = [cache.clone() for cache in memory]
            for cache, old in zip(memory, start, strict=True):
                cache.copy_(old)
            found = runner._graphs.run(None, decode)
        assert found is not None
        assert torch.equal(found, expected)
        assert all(torch.equal(*pair) for pair in zip(memory, stored, strict=True))


def test_what_is_no_decode_of_these_sizes_runs_without(recorder: Recording, folders: Callable[[str], Path]) -> None:
    driven = driver(config_of(folders("Llama"), 2))
    some = requests(3)
    driven.step(*[(request, len(request.tokens)) for request in some])
    assert all(request.output for request in some)
    driven.step(*[(request, 1) for request in some])  # more than the largest
    assert recorder.replayed == 0
    driven.step((some[0], 1), (some[1], 1))
    driven.step((some[2], 1))
    assert recorder.replayed == 2
    one = requests(5)[4]
    driven.step((some[0], 1), (one, len(one.tokens)))
    assert len(one.tokens) > 2
    assert recorder.replayed == 2


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (2, 3)])
def test_ranks_and_stages_replay(
    tp: int, pp: int, monkeypatch: pytest.MonkeyPatch, folders: Callable[[str], Path]
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
    asked = [(request.prompt, params) for request in requests(7)]
    made: list[CallAgain] = []

    def make_recorder(*place: object) -> CallAgain:
        made.append(CallAgain())
        return made[-1]

    monkeypatch.setattr(graph_recorders, "make_recorder", make_recorder)
    outputs = []
    for sizes in ((), (1, 3, 8)):
        config = config_of(folders("Gemma 2"), *sizes, tensor_parallel_size=tp, pipeline_parallel_size=pp)
        with Ranks(config, ThreadExecutor(config)) as ranks:
            outputs.append(ranks.tokens(asked, max_num_batched_tokens=16))
    assert outputs[0] == outputs[1]
    for recorder in made[-tp * pp :]:
        assert recorder.captured == 3
        assert recorder.replayed >= 10


def test_what_is_sent_to_the_next_stage_stays(recorder: Recording, folders: Callable[[str], Path]) -> None:
    """On the way while the next step runs, as two stages have two steps."""
    config = config_of(folders("Llama"), 2, pipeline_parallel_size=2)
    for stage, stays in ((0, True), (1, False)):
        model = load(config, stage, Parallel(), CPU)
        caches = allocate_caches(config, stage, CPU)
        captured = DecodeGraphs(model, caches, config, CPU, stage, Parallel())
        captured.capture(bar=False)
        step = cuda_graphs._Inputs(config, CPU, receives=False).batch(2)
        width = config.model.architecture.hidden_size
        with torch.inference_mode():
            first = captured.run(torch.ones(2, width) if stage else None, step)
            assert first is not None
            before = first.clone()
            other = torch.randn(2, width) if stage else None
            assert captured.run(other, replace(step, token_ids=torch.tensor([5, 9]))) is not None
        assert torch.equal(first, before) == stays


@pytest.mark.parametrize("num_redundant_experts", [0, 4])
def test_experts_move_where_replays_look_for_them_and_padding_is_no_load(
    num_redundant_experts: int, folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    moving = {"enable_expert_parallel": True, "enable_eplb": True, "eplb_step_interval": 2, "tensor_parallel_size": 2}
    params = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
    asked = [(request.prompt, params) for request in requests(5)]
    monkeypatch.setattr(graph_recorders, "make_recorder", lambda *place: CallAgain())
    outputs, counts = [], []
    for sizes in ((), (8,)):
        config = config_of(folders("Mixtral"), *sizes, num_redundant_experts=num_redundant_experts, **moving)
        loads: list[torch.Tensor] = []
        executor = CountingExecutor(config, loads)
        with Ranks(config, executor) as ranks:
            outputs.append(ranks.tokens(asked, max_num_batched_tokens=64))
        counts.append([int(load.sum()) for load in loads])
    assert outputs[0] == outputs[1]
    assert counts[0] == counts[1]
    assert sum(counts[0]) > 0


class CountingExecutor(ThreadExecutor):
    """Keeps the layers' counts of tokens for later."""

    def __init__(self, config: EngineConfig, loads: list[torch.Tensor]) -> None:
        self._loads = loads
        super().__init__(config)

    def _run(self, runner: ModelRunner, plans: Any) -> None:  # type: ignore[override]
        assert runner._balancer is not None
        self._loads += [layer.tokens for layer in runner._balancer._layers]
        super()._run(runner, plans)


@pytest.mark.parametrize("num_redundant_experts", [0, 4])
def test_a_layer_of_experts_replays_by_the_places_of_now(num_redundant_experts: int) -> None:
    config = ExpertParallelConfig(enable_eplb=True, num_redundant_experts=num_redundant_experts)
    module = packed(build(EVERYTHING, ExpertGroup(config, Parallel(), ExpertCommunicator(), ExpertCommunicator())))
    assert isinstance(module, MixtureOfExperts)
    count = EVERYTHING.num_experts
    x, step, out = torch.randn(6, HIDDEN), batch(6, (6,)), torch.zeros(6, HIDDEN)
    with torch.inference_mode():  # in which an operation of C++ is one to the tape
        expected = module(x, step)

        def compute() -> None:
            out.copy_(module(x, step))

        replay = Recording().capture(compute)
        assert module.placement is not None
        before = module.placement.experts[0]
        after = tuple((5 * number + 1) % count for number in range(count)) + (5,) * num_redundant_experts
        held = [[part.clone() for part in module.experts.state(place)] for place in range(len(before))]
        for place, number in enumerate(after):
            module.experts.restore(place, held[before.index(number)])
        module.set_placement(ExpertPlacement((after,)))
        module.tokens.zero_()
        replay()
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    assert int(module.tokens.sum()) == 6 * EVERYTHING.top_k


def test_a_step_that_cannot_be_captured_is_logged_and_runs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, folders: Callable[[str], Path]
) -> None:
    class Refusing(CallAgain):
        def capture(self, step: Callable[[], None]) -> graph_recorders.Replay:
            raise RuntimeError("operation not permitted when stream is capturing\nand more")

    monkeypatch.setattr(graph_recorders, "make_recorder", lambda *place: Refusing())
    config = config_of(folders("Llama"), 1, 2, 4, 8)
    with caplog.at_level(logging.INFO):
        tokens = crowds(driver(config))
    assert tokens == crowds(driver(replace(config, graphs=GraphConfig())))
    assert caplog.text.count("capturing a step failed: operation not permitted when stream is capturing\n") == 1
    with caplog.at_level(logging.INFO):
        driver(replace(config, graphs=GraphConfig(disabled_reason="--enforce-eager")))
    assert "decode steps run without CUDA graphs: --enforce-eager" in caplog.text


class Failing(CallAgain):
    """Cannot capture its second step, or not even run it."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self._place, self._warmed_up = place, 0

    def warm_up(self, step: Callable[[], None]) -> str:
        self._warmed_up += 1
        if self._warmed_up == 2 and self._place == "warm-up":
            raise RuntimeError("no kernel for it")
        step()
        return "it waits" if self._warmed_up == 2 and self._place == "check" else ""

    def capture(self, step: Callable[[], None]) -> graph_recorders.Replay:
        if self.captured == 1 and self._place == "capture":
            raise RuntimeError("out of memory\nand more")
        return super().capture(step)


def capture_on(rank: int, place: str, config: EngineConfig, init_method: str, pipe: Connection) -> None:
    """A rank, of which the second fails at its second size; it reports its captured sizes, its log and its decodes."""
    graph_recorders.make_recorder = lambda *given: Failing(place if rank == 1 else "")
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    cuda_graphs.logger.addHandler(handler)
    torch.set_num_threads(1)
    links = connect(config.parallel, rank, init_method, CPU)
    runner = ModelRunner(config, rank, links, CPU)
    try:
        runner.finalize()
    except RuntimeError as error:
        pipe.send(f"raised: {error}")
        return
    assert runner._graphs is not None
    request, cache = Request([3, 4, 5], GREEDY), config.cache
    if config.parallel.pipeline_parallel_size == 1:
        driven = Driver(
            lambda plan: executing(runner)(plan) or ModelRunnerOutput(plan.step, [7] * plan.num_rows),
            8,
            cache.num_blocks,
            4,
        )
        driven.decode([request], 3, 1000)
    pipe.send((sorted(runner._graphs._replays), said, len(request.output)))
    pipe.recv()
    links.close()


def on_two_ranks(config: EngineConfig, place: str, folder: Path) -> list[Any]:
    pipes = [CONTEXT.Pipe() for _ in range(2)]
    init_method = (folder / f"meet-{place}").as_uri()
    ranks = [
        CONTEXT.Process(target=capture_on, args=(rank, place, config, init_method, theirs), daemon=True)
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for process in ranks:
        process.start()
    try:
        if place == "warm-up":  # the other waits in it
            assert pipes[1][0].poll(120)
            return [pipes[1][0].recv()]
        assert all(ours.poll(120) for ours, _ in pipes), "a rank waits for one that has given up"
        reported = [ours.recv() for ours, _ in pipes]
        for ours, _ in pipes:
            ours.send(None)
        for process in ranks:
            process.join(30)
        return reported
    finally:
        for process in ranks:
            process.kill()


@pytest.mark.parametrize(
    ("place", "layout", "reason"),
    [
        ("capture", {"tensor_parallel_size": 2}, "out of memory"),
        ("check", {"tensor_parallel_size": 2}, "it waits"),
        ("warm-up", {"tensor_parallel_size": 2}, "no kernel for it"),
        ("capture", {"pipeline_parallel_size": 2}, "out of memory"),
    ],
)
def test_all_ranks_have_a_size_or_none_has(
    place: str, layout: dict[str, int], reason: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    """No matter which rank fails, nobody waits for it; if it fails in an exchange of the step itself, the error names
    it instead."""
    config = config_of(folders("Llama"), 1, 2, 4, **layout)
    reported = on_two_ranks(config, place, tmp_path)
    if place == "warm-up":
        assert reported == [f"raised: {reason}"]
        return
    assert [sizes for sizes, *_ in reported] == [[], []]
    text = f"decode steps run without CUDA graphs: capturing a step failed on rank 1: {reason}"
    assert [said for _, said, _ in reported] == [[text], []]
    assert "pipeline_parallel_size" in layout or all(count >= 3 for *_, count in reported)


def beyond_the_captured_lengths(driven: Driver) -> list[list[int]]:
    """Steps of one request and of two, captured where they are short, and replayed where one is longer than windows,
    chunks and selections are; in the end the other again."""
    short, long = (Request([3 + number % 120 for number in range(length)], GREEDY) for length in (1, 60))
    driven.step((short, 1))
    driven.step((short, 1))
    driven.step((long, 60))
    driven.step((long, 1))
    other = Request([5, 9], GREEDY)
    driven.step((other, 2))
    driven.step((short, 1), (other, 1))
    driven.step((other, 1), (long, 1))
    driven.decode([long, short], 6, 1000)
    return [each.output for each in (short, long, other)]


@pytest.mark.parametrize("family", CASES)
def test_op_replay_captures_the_steps_of_every_family(
    family: str, folders: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing of a step depends on numbers that Python sees, nor on the lengths when it was captured."""
    eager, taped = (driver(config_of(folders(family), *sizes)) for sizes in ((), (1, 2)))
    with caplog.at_level(logging.INFO):
        assert beyond_the_captured_lengths(taped) == beyond_the_captured_lengths(eager)
    assert "decode steps run without" not in caplog.text


@pytest.mark.parametrize(
    ("family", "options"),
    [
        *((family, {}) for family in ("Llama", "Gemma 3n", "DeepSeek V3.2", "Qwen3-Next", "DeepSeek V4")),
        *(("Llama", options) for options in ({"dtype": "bfloat16"}, {"quantization": "int8"})),
        *(("Llama", {"kv_cache_dtype": dtype}) for dtype in ("int8", "int4")),
    ],
)
def test_op_replay_captures_steps_when_they_first_occur(
    family: str, options: dict[str, Any], folders: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    """Each number of requests when it comes first, and the tokens stay the same."""
    eager, taped = (driver(config_of(folders(family), *sizes, **options)) for sizes in ((), range(1, 9)))
    with caplog.at_level(logging.INFO):
        assert crowds(taped) == crowds(eager)
    assert "decode steps run without" not in caplog.text


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"quantization": "int8"}])
def test_op_replay_captures_onednn_products(
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    folders: Callable[[str], Path],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As a processor with AMX does most of its work by."""
    if options.get("dtype") == "bfloat16" and not isa.has("avx512f"):
        pytest.skip("oneDNN takes no bfloat16 without AVX-512")
    monkeypatch.setattr(isa, "has", lambda feature: feature == "amx_tile")
    eager, taped = (driver(config_of(folders("Llama"), *sizes, **options)) for sizes in ((), range(1, 9)))
    with caplog.at_level(logging.INFO):
        assert crowds(taped) == crowds(eager)
    assert "decode steps run without" not in caplog.text


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"quantization": "int8"}])
def test_op_replay_captures_moe_with_packed_tiles(
    options: dict[str, Any], folders: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    """And run others, whose experts are called one by one, as they are."""
    eager, taped = (driver(config_of(folders("Mixtral"), *sizes, **options)) for sizes in ((), range(1, 9)))
    with caplog.at_level(logging.INFO):
        assert crowds(taped) == crowds(eager)
    is_panels = isa.has("avx2") and not isa.has("amx_tile")
    assert ("decode steps run without" not in caplog.text) == is_panels


def test_each_size_is_captured_once(monkeypatch: pytest.MonkeyPatch, folders: Callable[[str], Path]) -> None:
    config = config_of(folders("Llama"), *range(1, 9))
    runner = ModelRunner(config, 0, connect(config.parallel, 0, None, CPU), CPU)
    runner.finalize()
    assert runner._graphs is not None
    assert not runner._graphs._replays
    execute, captured = executing(runner), list[bool]()

    def note(plan: SchedulerOutput) -> ModelRunnerOutput | None:
        result = execute(plan)
        assert result is not None
        captured.append(result.has_captured)
        return result

    driven = Driver(note, 8, config.cache.num_blocks, config.cache.block_size)
    everyone = requests(8)
    driven.decode(everyone, 1, 1000)
    assert not any(captured)
    captured.clear()
    for count in (8, 3, 1, 3):
        driven.step(*((request, 1) for request in everyone[:count]))
    assert captured == [True, True, True, False]
    assert sorted(runner._graphs._replays) == [(size, False) for size in (1, 3, 8)]
    kept = dict(runner._graphs._replays)
    monkeypatch.setattr(runner._graphs, "_model", None)
    driven.step(*((request, 1) for request in everyone[:3]))
    assert runner._graphs._replays == kept


def test_after_a_failed_capture_the_next_step_is_captured(
    monkeypatch: pytest.MonkeyPatch, folders: Callable[[str], Path]
) -> None:
    config = config_of(folders("Llama"), *range(1, 9))
    runner = ModelRunner(config, 0, connect(config.parallel, 0, None, CPU), CPU)
    taped, step = runner._graphs, cuda_graphs._Inputs(config, CPU, receives=False).batch(2)
    assert taped is not None

    def fails(self: MLP, *given: object) -> Tensor:
        raise RuntimeError("no memory")

    with torch.inference_mode():
        with monkeypatch.context() as patch:
            patch.setattr(MLP, "forward", fails)
            with pytest.raises(RuntimeError, match="no memory"):
                taped.run(None, step)
        assert not taped._replays
        first = taped.run(None, step)
        assert first is not None
        assert sorted(taped._replays) == [(2, False)]
        expected = first.clone()
        first.zero_()
        again = taped.run(None, step)
        assert again is not None
        assert torch.equal(again, expected)


@pytest.mark.parametrize("way", [Tensor.tolist, Tensor.sum, lambda x: x.data, lambda x: torch.tensor(len(x))])
def test_a_step_that_depends_on_python_is_not_captured(
    way: Callable[[Tensor], Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    folders: Callable[[str], Path],
) -> None:
    forward = MLP.forward

    def looks(self: MLP, x: Tensor, *more: Any) -> Tensor:
        way(x)
        return forward(self, x, *more)

    expected = crowds(driver(config_of(folders("Llama"))))
    monkeypatch.setattr(MLP, "forward", looks)
    with caplog.at_level(logging.INFO):
        assert crowds(driver(config_of(folders("Llama"), *range(1, 9)))) == expected
    reported = caplog.text.count("decode steps run without op replay: a step cannot be replayed: ")
    assert reported == (way is not Tensor.sum)


def test_ranks_that_synchronize_outside_operations_are_not_captured() -> None:
    assert isinstance(graph_recorders.make_recorder(CPU, Parallel()), OpReplayRecorder)
    assert on_ranks(2, lambda parallel: graph_recorders.make_recorder(CPU, parallel)) == [None, None]


class FakeCuda:
    """The parts of torch.cuda that capturing needs, and a record of its calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.mode = 0
        self.is_broken = False
        calls, cuda = self.calls, self

        class Graph:
            def capture_begin(self, pool: object, capture_error_mode: str) -> None:
                calls.append(f"begin in {pool}, {capture_error_mode}")

            def capture_end(self) -> None:
                calls.append("end")
                if cuda.is_broken:
                    raise RuntimeError("operation failed due to a previous error during capture")

            def replay(self) -> None:
                calls.append("replay")

        def set_mode(mode: str | int) -> None:
            if mode == "warn":
                warnings.warn("does not detect all that waits", stacklevel=1)
            self.mode = {"warn": 1}.get(str(mode), 0)

        for name, value in {
            "CUDAGraph": Graph,
            "Stream": lambda *place: "side",
            "stream": lambda stream: contextlib.nullcontext(),
            "synchronize": lambda: None,
            "empty_cache": lambda: None,
            "graph_pool_handle": lambda: "pool",
            "get_sync_debug_mode": lambda: 0,
            "set_sync_debug_mode": set_mode,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

        def leave(device: int, pool: object) -> None:
            calls.append(f"leave {pool}")

        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", leave, raising=False)

    def step(self) -> None:
        self.calls.append(f"step {self.mode}")


def test_cuda_graphs_are_warmed_up_checked_once_and_captured_into_one_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    recorder = graph_recorders.make_recorder(torch.device("cuda", 0), Parallel())
    assert recorder is not None
    replays = []
    for _ in range(2):
        assert recorder.warm_up(cuda.step) == ""
        replays.append(recorder.capture(cuda.step))
    capture = ["begin in pool, thread_local", "step 0", "end"]
    assert cuda.calls == ["step 0", "step 1", *capture, "step 0", *capture]
    cuda.calls.clear()
    replays[1]()
    replays[0]()
    assert cuda.calls == ["replay", "replay"]


def test_a_step_that_synchronizes_finishes_and_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks may be in an exchange behind the place where it waits."""
    cuda = FakeCuda(monkeypatch)

    def step() -> None:
        if cuda.mode == 1:
            warnings.warn("called a synchronizing CUDA operation (Triggered internally)", stacklevel=1)
        cuda.step()

    recorder = graph_recorders.make_recorder(torch.device("cuda", 0), Parallel())
    assert recorder is not None
    assert re.match(r"called a synchronizing CUDA operation .* at \S+test_cuda_graphs\.py:\d+$", recorder.warm_up(step))
    assert cuda.calls == ["step 0", "step 1"]
    assert cuda.mode == 0


def test_closing_releases_the_communicators(
    recorder: Recording, monkeypatch: pytest.MonkeyPatch, folders: Callable[[str], Path]
) -> None:
    """NCCL would wait for the graphs that use it."""
    worker = Worker(config_of(folders("Llama"), 1, 2), 0, None)
    held = worker._runner._graphs
    assert held is not None
    assert sorted(held._replays) == [(1, False), (2, False)]
    left: list[dict[Any, Any]] = []
    monkeypatch.setattr(ParallelState, "close", lambda _: left.append(held._replays))
    worker.close()
    assert left == [{}]


@pytest.mark.parametrize("place", [1, 2, 3])
def test_a_capture_that_fails_leaves_cuda_as_it_was(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)

    def step() -> None:
        cuda.step()
        if sum(call.startswith("step") for call in cuda.calls) == place:
            cuda.is_broken = True
            raise RuntimeError("no kernel for it")

    recorder = graph_recorders.make_recorder(torch.device("cuda", 0), Parallel())
    assert recorder is not None

    def run() -> None:
        recorder.warm_up(step)
        recorder.capture(step)

    with pytest.raises(RuntimeError, match="no kernel for it"):
        run()
    assert cuda.mode == 0
    begun = sum(call.startswith("begin") for call in cuda.calls)
    assert cuda.calls.count("end") == cuda.calls.count("leave pool") == begun


@pytest.mark.parametrize("kind", [Recording, OpReplayRecorder])
@pytest.mark.parametrize("family", ["Llama", "Falcon-H1", "DeepSeek V3"])
def test_steps_with_adapters_are_captured_when_they_occur(
    family: str, kind: type[GraphRecorder], folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are the steps themselves, and store nothing twice; other steps are as without adapters."""
    recorder = kind()
    monkeypatch.setattr(graph_recorders, "make_recorder", lambda *place: recorder)
    monkeypatch.setattr(cuda_graphs, "_RUNS_BEFORE_CAPTURE", 1)
    lora = LoraConfig(num_slots=SLOTS, device_bytes=1 << 20, host_bytes=1 << 20)
    config = replace(config_of(folders(family), 2, 4), lora=lora)
    model, caches = load(config, 0, Parallel(), CPU), allocate_caches(config, 0, CPU)
    pools = add_pools(model)
    graphs = DecodeGraphs(model, caches, config, CPU, 0, Parallel())
    graphs.capture(bar=False)
    kept = [each for cache in caches for each in (cache.memory, *(cache.state or ())) if isinstance(each, Tensor)]
    generator = torch.Generator().manual_seed(0)
    for each in kept:
        each.normal_(generator=generator)

    def check(slots: list[int], *, is_replayed: bool = True) -> None:
        rows = len(slots)
        step = cuda_graphs._Inputs(config, CPU, receives=False).batch(rows)
        tokens = torch.randint(0, 131, (rows,), generator=generator)
        numbers, last = torch.arange(rows), torch.tensor([9, 3, 6, 0])[:rows]
        groups = {
            number: each._replace(read=numbers, write=numbers)
            if isinstance(each, StateSegments)
            else KVBlocks(numbers * 12 + last, numbers[:, None] * 3 + torch.arange(3))
            for number, each in step.groups.items()
        }
        own = AdapterRows.of(torch.tensor(slots), SLOTS)
        adapters = BatchAdapters(own, own, own) if max(slots) >= 0 else None
        step = replace(
            step, token_ids=tokens, positions=last, sequence_lengths=last + 1, groups=groups, adapters=adapters
        )
        with torch.inference_mode():
            before = [each.clone() for each in kept]
            expected = model(None, step, caches).clone()
            stored = [each.clone() for each in kept]
            for each, old in zip(kept, before, strict=True):
                each.copy_(old)
            found = graphs.run(None, step)
        assert (found is not None) == is_replayed
        if found is None:
            return
        # torch rounds exponentials in the remainder of a batch after the last whole vector differently.
        torch.testing.assert_close((found, *kept), (expected, *stored), rtol=1e-4, atol=1e-4)

    def captured() -> list[tuple[int, bool]]:
        return sorted(key for key, replay in graphs._replays.items() if replay is not None)

    assert captured() == ([] if recorder.runs_on_capture else [(2, False), (4, False)])
    check([-1, -1, -1])
    check([0, 2, -1])
    assert (4, True) in captured()
    for slots in ([2, -1, 0, 2], [-1, 0], [2], [-1, -1], [0, 0, 0]):
        check(slots)
    assert captured() == [(2, False), (2, True), (4, False), (4, True)]
    for pool in pools.values():  # in place: another adapter in the slot
        pool.b.mul_(2)
    check([0, 2, -1])
    for name, layer in changeable(model):
        layer.pool = replace(pools[name], a=pools[name].a * 3)
    graphs.on_assigned(is_changed=True)
    assert captured() == [(2, False), (4, False)]
    check([-1, 0], is_replayed=recorder.runs_on_capture)  # the largest is captured first
    assert captured() == [
        (2, False),
        *[(2, True)] * recorder.runs_on_capture,
        (4, False),
        *[(4, True)] * (not recorder.runs_on_capture),
    ]
    for slots in ([2, 0, 0], [-1, 0]):
        check(slots)


def run_with_adapters(graphs: DecodeGraphs, config: EngineConfig, rows: int) -> bool:
    """Whether a step with adapters is replayed."""
    with torch.inference_mode():
        return (
            graphs.run(None, cuda_graphs._Inputs(config, CPU, receives=False).batch(rows, has_adapters=True))
            is not None
        )


class Unable(CallAgain):
    """Cannot capture its `place`-th step, and knows which ones it has tried."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.tried, self._place = 0, place

    def capture(self, step: Callable[[], None]) -> graph_recorders.Replay:
        self.tried += 1
        if self.tried == self._place:
            raise RuntimeError("out of memory")
        return super().capture(step)


def test_steps_with_adapters_are_captured_once_that_pays(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One in a step, after some without, and the largest first; what cannot be captured is tried once."""
    recorder = Unable(5)
    monkeypatch.setattr(graph_recorders, "make_recorder", lambda *place: recorder)
    monkeypatch.setattr(cuda_graphs, "_RUNS_BEFORE_CAPTURE", 3)
    lora = LoraConfig(num_slots=SLOTS, device_bytes=1 << 20, host_bytes=1 << 20)
    config = replace(config_of(folders("Llama"), 1, 2, 4), lora=lora)
    model, caches = load(config, 0, Parallel(), CPU), allocate_caches(config, 0, CPU)
    graphs = DecodeGraphs(model, caches, config, CPU, 0, Parallel())
    graphs.capture(bar=False)
    assert not graphs.has_captured  # in no step

    def run(*rows: int) -> list[tuple[bool, bool]]:
        """For each step, whether it is replayed, and whether one is captured."""
        found = []
        for count in rows:
            found.append((run_with_adapters(graphs, config, count), graphs.has_captured))
            graphs.has_captured = False
        return found

    eager, captures, replays, both = (False, False), (False, True), (True, False), (True, True)
    assert run(2, 2, 1, 2) == [eager, eager, eager, captures]
    assert sorted(key for key in graphs._replays if key.has_adapters) == [(4, True)]
    assert run(2, 4, 2) == [captures, replays, eager]  # the fifth
    assert caplog.text.count("decode steps with adapters run without CUDA graphs: capturing a step failed") == 1
    assert run(1, 1, 1) == [eager, both, replays]
    graphs.on_assigned(is_changed=False)
    assert run(1, 4) == [replays, replays]
    assert recorder.tried == 6
    graphs.on_assigned(is_changed=True)
    assert run(1, 1, 2, 2, 2, 2, 1, 1) == [*[eager] * 6, captures, both]
    assert recorder.tried == 8


def test_ranks_replay_the_same_steps_with_adapters(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If one cannot capture a step, or has other tensors: padding takes part in what ranks exchange."""
    made = iter([Unable(0), Unable(4)])
    monkeypatch.setattr(graph_recorders, "make_recorder", lambda *place: next(made))
    monkeypatch.setattr(cuda_graphs, "_RUNS_BEFORE_CAPTURE", 1)
    lora = LoraConfig(num_slots=SLOTS, device_bytes=1 << 20, host_bytes=1 << 20)
    config = replace(config_of(folders("Llama"), 2, 4, tensor_parallel_size=2), lora=lora)

    def work(parallel: Parallel) -> list[list[tuple[int, bool]]]:
        model, caches = load(config, 0, parallel, CPU), allocate_caches(config, 0, CPU)
        graphs, found = DecodeGraphs(model, caches, config, CPU, 0, parallel), list[list[tuple[int, bool]]]()
        assert graphs.capture(bar=False)
        for rows in (3, 1, 4):
            run_with_adapters(graphs, config, rows)
        for _ in range(2):
            found.append(sorted((*key,) for key, replay in graphs._replays.items() if replay is not None))
            graphs.on_assigned(is_changed=parallel.rank == 1)
        return found

    one, other = on_ranks(2, work)
    assert one == other == [[(2, False), (4, False), (4, True)], [(2, False), (4, False)]]
