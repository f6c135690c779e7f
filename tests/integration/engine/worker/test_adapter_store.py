"""Adapters of requests on ranks: the tokens of each are those of its merged checkpoint."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers

from quire.engine.architecture.families.tensors import checkpoint_tensors
from quire.engine.config.engine_config import EngineConfig, LoraConfig
from quire.engine.distributed.parallel_state import connect
from quire.engine.protocol.adapters import AdapterPlan, AdapterPrepared, AdapterRef
from quire.engine.protocol.runner_output import ModelRunnerOutput
from quire.engine.protocol.sampling_params import SamplingParams
from quire.engine.protocol.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from quire.engine.repository import adapter_folder
from quire.engine.worker import adapter_store
from quire.engine.worker.model_runner import ModelRunner
from quire.kernels import LowRankPool
from tests.fakes.checkpoints import generate, write_checkpoint
from tests.fakes.lora import SETTINGS, merged, write_lora
from tests.fakes.model_logits import CPU, configure
from tests.fakes.plans import Driver, Request, executing
from tests.fakes.threads import ThreadExecutor

COUNT = 8
PROMPTS = [random.Random(length).choices(range(130), k=length) for length in (5, 16, 33)]
KINDS: dict[str, dict[str, Any]] = {
    "plain": SETTINGS,
    "DoRA": SETTINGS | {"use_dora": True, "use_rslora": True, "r": 5},
    "with biases": SETTINGS | {"lora_bias": True, "r": 2},
}


class Ranks:
    """Ranks that plans are made for by hand, and what they say of adapters."""

    def __init__(self, config: EngineConfig) -> None:
        self.config, self.answers, world_size = config, SimpleQueue[Any](), config.parallel.world_size
        self._world_size = world_size
        if world_size == 1:
            links = connect(config.parallel, 0, None, CPU)
            self.runner = ModelRunner(config, 0, links, CPU, on_report=self.answers.put)
            execute: Callable[..., Any] = executing(self.runner)
            self.close: Callable[[], None] = self.runner.close
        else:
            executor = ThreadExecutor(config)
            executor.on_report = self.answers.put
            execute, self.close = lambda plan: executor.submit(plan, 60.0).result(), executor.close
        is_one_stage = len(config.parallel.stages) == 1
        self.driver = Driver(execute, 8, config.cache.num_blocks, config.cache.block_size, workers_keep=is_one_stage)

    def prepare(self, *adapters: AdapterRef) -> list[AdapterPrepared]:
        """The answers of all ranks, in the order of the adapters."""
        self.driver.adapters = AdapterPlan(prepared=[*adapters])
        self.driver.step()
        found = [self.answers.get(timeout=60) for _ in range(len(adapters) * self._world_size)]
        assert sorted(each.rank for each in found) == sorted([*range(self._world_size)] * len(adapters))
        return sorted(found, key=lambda each: [adapter.digest for adapter in adapters].index(each.digest))

    def assign(self, assigned: Mapping[int, AdapterRef], freed: tuple[int, ...] = ()) -> None:
        """In the next step."""
        self.driver.adapters = AdapterPlan(
            freed=[*freed], assigned=[(slot, adapter.digest) for slot, adapter in assigned.items()]
        )

    def tokens(self, prompts: list[list[int]], slots: list[int], budget: int = 20) -> list[list[int]]:
        """The answers of requests with the adapters in these slots, which run side by side."""
        requests = [
            Request(prompt, SamplingParams(temperature=0.0), adapter_slot=slot)
            for prompt, slot in zip(prompts, slots, strict=True)
        ]
        self.driver.decode(requests, COUNT, budget)
        for request in requests:
            self.driver.release(request)
        return [request.output for request in requests]


def with_lora(config: EngineConfig, **changes: int) -> EngineConfig:
    lora = LoraConfig(num_slots=4, device_bytes=1 << 24, host_bytes=1 << 30)
    return replace(config, lora=replace(lora, **changes))


def layers_of(config: EngineConfig) -> list[str]:
    """The tensors of the linear layers."""
    return [name for name in checkpoint_tensors(config.model.architecture, has_head=True) if "_proj.weight" in name]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=3)


def configured(base: Path, **options: Any) -> EngineConfig:
    return with_lora(configure(base, block_size=4, max_num_seqs=8, max_model_len=128, **options))


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, AdapterRef]:
    config, folder = configured(base), tmp_path_factory.mktemp("adapters")
    return {
        name: write_lora(folder / name, config.model, layers_of(config), seed, settings=settings)
        for seed, (name, settings) in enumerate(KINDS.items())
    }


@pytest.fixture(scope="module")
def expected(
    base: Path, adapters: Mapping[str, AdapterRef], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[list[int]]]:
    """For each adapter, and for none (""), transformers' answers to all prompts."""
    model, folder = configured(base).model, tmp_path_factory.mktemp("merged")
    paths = {name: merged(model, adapter, folder / name) for name, adapter in adapters.items()}
    found = {name: generate(path, PROMPTS, COUNT) for name, path in ({"": base} | paths).items()}
    assert len({str(each) for each in found.values()}) == len(found)
    return found


@pytest.fixture
def ranks(base: Path) -> Iterator[Ranks]:
    found = Ranks(configured(base))
    yield found
    found.close()


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 3), (2, 2)])
def test_adapters_and_none_in_one_batch(
    base: Path, adapters: Mapping[str, AdapterRef], expected: Mapping[str, list[list[int]]], tp: int, pp: int
) -> None:
    ranks = Ranks(configured(base, tensor_parallel_size=tp, pipeline_parallel_size=pp))
    assert not any(each.error for each in ranks.prepare(*adapters.values()))
    slots = dict(zip(["", *adapters], (-1, 2, 0, 3), strict=True))
    ranks.assign({slots[name]: adapter for name, adapter in adapters.items()})
    pairs = [(name, number) for number in range(len(PROMPTS)) for name in slots][:8]
    found = ranks.tokens([PROMPTS[number] for _, number in pairs], [slots[name] for name, _ in pairs])
    assert found == [expected[name][number] for name, number in pairs]
    ranks.close()


Expected = Mapping[str, list[list[int]]]
Adapters = Mapping[str, AdapterRef]


def test_slots_are_used_again(ranks: Ranks, adapters: Adapters, expected: Expected) -> None:
    """By other adapters, with other ranks and without scales and biases, and by none; while others run."""
    plain, dora, biased = adapters.values()
    ranks.prepare(plain, dora, biased)
    ranks.assign({1: dora, 0: biased})
    assert ranks.tokens(PROMPTS[:2], [1, 0]) == [expected["DoRA"][0], expected["with biases"][1]]
    ranks.assign({1: plain}, freed=(1,))
    assert ranks.tokens(PROMPTS[:2], [1, 0]) == [expected["plain"][0], expected["with biases"][1]]
    ranks.assign({2: dora, 0: plain}, freed=(0, 1))
    names = ("plain", "", "DoRA")  # slot 1 has nothing
    assert ranks.tokens(PROMPTS, [0, 1, 2]) == [expected[name][number] for number, name in enumerate(names)]


def test_pools_stay_within_the_reserve(base: Path, adapters: Adapters, expected: Expected) -> None:
    """Rank rows that fit nowhere are moved together, and what nobody needs is given back."""
    config, names = configured(base), {adapter.digest: name for name, adapter in adapters.items()}
    plain, dora, biased = adapters.values()
    trial = Ranks(config)
    sizes = {each.digest: each.device_bytes for each in trial.prepare(plain, dora, biased)}
    trial.close()
    ranks = Ranks(with_lora(config, device_bytes=sizes[dora.digest]))
    ranks.prepare(plain, dora, biased)
    store = ranks.runner._adapters
    assert store is not None
    assert sizes[plain.digest] + sizes[biased.digest] <= sizes[dora.digest]
    steps: list[tuple[dict[int, AdapterRef], tuple[int, ...], bool]] = [
        ({0: plain}, (), True),
        ({1: biased}, (), True),
        ({0: dora}, (0, 1), True),  # larger than what both leave
        ({1: plain, 2: biased}, (0,), False),
        ({0: plain}, (1,), False),
    ]
    for slots, freed, has_new_tensors in steps:
        before = store.version
        ranks.assign(slots, freed)
        found = ranks.tokens(PROMPTS[: len(slots)], [*slots])
        assert found == [expected[names[adapter.digest]][number] for number, adapter in enumerate(slots.values())]
        assert sum(pool.nbytes for pool in store._pools.values()) <= store._device_bytes
        assert (store.version > before) == has_new_tensors
    ranks.close()


def test_pools_have_room_for_more_and_the_narrowest_type(
    base: Path, adapters: Adapters, expected: Expected, tmp_path: Path
) -> None:
    """Further adapters like the first one need no new tensors. Of 16 bits that are as exact as float32, until another
    adapter needs more; answers are the same."""
    ranks = Ranks(configured(base))
    model, store = ranks.config.model, ranks.runner._adapters
    assert store is not None
    narrow = [
        write_lora(tmp_path / str(seed), model, layers_of(ranks.config), seed, dtype=torch.bfloat16) for seed in (5, 6)
    ]
    answers = [
        generate(merged(model, each, tmp_path / f"merged{at}"), PROMPTS, COUNT) for at, each in enumerate(narrow)
    ]
    prepared = ranks.prepare(*narrow, adapters["plain"])
    assert len({each.device_bytes for each in prepared}) == 1  # which may be beside others of float32
    assert prepared[0].host_bytes < 0.6 * prepared[2].host_bytes

    def types() -> set[torch.dtype]:
        return {each.linear.pool.a.dtype for each in store._loader.layers.values() if each.linear.pool is not None}

    ranks.assign({0: narrow[0]})
    assert ranks.tokens(PROMPTS, [0] * 3) == answers[0]
    version = store.version
    ranks.assign({3: narrow[1]})
    assert ranks.tokens(PROMPTS, [3, 0, 3]) == [answers[1][0], answers[0][1], answers[1][2]]
    assert (store.version, types()) == (version, {torch.bfloat16})
    ranks.assign({1: adapters["plain"]})
    assert ranks.tokens(PROMPTS, [1, 3, 0]) == [expected["plain"][0], answers[1][1], answers[0][2]]
    assert types() == {torch.float32}
    ranks.assign({}, freed=(1,))
    ranks.tokens(PROMPTS[:1], [0])
    with torch.inference_mode():
        for pool in store._pools.values():
            pool.shrink()
    assert ranks.tokens(PROMPTS, [0] * 3) == answers[0]
    assert types() == {torch.bfloat16}
    ranks.close()


def test_adapters_of_different_layers_divide_the_reserve(base: Path, tmp_path: Path) -> None:
    """In a few steps, however many there are."""
    config = with_lora(configured(base), num_slots=8)
    kinds = [
        write_lora(tmp_path / kind, config.model, [name for name in layers_of(config) if f"{kind}_proj" in name])
        for kind in "qo"
    ]
    trial = Ranks(config)
    (size,) = {each.device_bytes for each in trial.prepare(*kinds)}
    trial.close()
    ranks = Ranks(with_lora(config, num_slots=8, device_bytes=8 * size))
    ranks.prepare(*kinds)
    store, changes = ranks.runner._adapters, list[int]()
    assert store is not None
    for slot in range(8):
        before = store.version
        ranks.assign({slot: kinds[slot % 2]})
        ranks.tokens(PROMPTS[:1], [slot])
        assert sum(pool.nbytes for pool in store._pools.values()) <= store._device_bytes
        changes.append(store.version - before)
    assert changes == [1, 1, 1, 0, 0, 0, 0, 0]
    ranks.close()


def test_an_adapter_that_starts_late(ranks: Ranks, base: Path, adapters: Adapters, tmp_path: Path) -> None:
    """Until there, the keys and values are the base's, whatever the chunks."""
    merged(ranks.config.model, adapters["plain"], tmp_path / "out")
    kind: Any = transformers.LlamaForCausalLM
    models = [kind.from_pretrained(each, dtype=torch.float32) for each in (base, tmp_path / "out")]
    prompt, start, expected = PROMPTS[2], 21, list[int]()
    with torch.inference_mode():
        cache: Any = transformers.DynamicCache()
        models[0](torch.tensor([prompt[:start]]), cache=cache, use_cache=True)
        tokens = prompt[start:]
        for _ in range(COUNT):
            logits = models[1](torch.tensor([tokens]), cache=cache, use_cache=True).logits
            tokens = [int(logits[0, -1].argmax())]
            expected += tokens
    ranks.prepare(adapters["plain"])
    ranks.assign({1: adapters["plain"]})
    for budget in (7, 100):
        params = SamplingParams(temperature=0.0)
        request = Request(prompt, params, adapter_slot=1, adapter_start=start)
        ranks.driver.decode([request, Request(PROMPTS[0], params)], COUNT, budget)
        assert request.output == expected
    alone = ranks.tokens([prompt, prompt], [1, -1])
    assert expected not in alone


def test_what_cannot_be_read_is_an_answer(
    ranks: Ranks, adapters: Adapters, expected: Expected, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While other adapters are read, and dropped, and run."""
    name = "model.layers.0.self_attn.q_proj.weight"
    other = write_lora(tmp_path / "other", ranks.config.model, [name], 7)
    wrong = AdapterRef(adapters["plain"].digest, other.paths)
    found = ranks.prepare(wrong, adapters["DoRA"], other)
    assert "has changed since the adapter was opened" in found[0].error
    assert not found[0].is_invalid
    assert not any(each.error for each in found[1:])
    assert 0 < found[2].device_bytes <= found[2].host_bytes < found[1].host_bytes
    ranks.assign({0: adapters["DoRA"]})
    assert ranks.tokens(PROMPTS[:1], [0]) == [expected["DoRA"][0]]
    ranks.driver.adapters = AdapterPlan(dropped=[other.digest])
    ranks.driver.step()
    (Path(other.paths[0]) / "adapter_model.safetensors").unlink()
    (found_again,) = ranks.prepare(other)
    assert "adapter_model.safetensors" in found_again.error
    assert not found_again.is_invalid
    infinite = write_lora(tmp_path / "infinite", ranks.config.model, [name], 7, size=math.inf)
    (found_again,) = ranks.prepare(AdapterRef(infinite.digest, (*infinite.paths, "/given")))
    assert found_again.is_invalid
    assert found_again.error.startswith("/given/adapter_model.safetensors: ")
    with monkeypatch.context() as patch:
        digest = adapter_folder._digest

        def unreadable(content: Any) -> bytes:
            if isinstance(content, bytearray):  # of a tensor, when its adapter has been found
                raise OSError(5, "Input/output error")
            return digest(content)

        patch.setattr(adapter_folder, "_digest", unreadable)
        (found_again,) = ranks.prepare(adapters["plain"])
        assert "cannot be read: Input/output error" in found_again.error
        assert not found_again.is_invalid
        store = ranks.runner._adapters
        assert store is not None
        patch.setattr(store._loader, "load", Mock(side_effect=MemoryError))
        (found_again,) = ranks.prepare(adapters["plain"])
        assert (found_again.error != "", found_again.is_invalid) == (True, False)
    (right,) = ranks.prepare(adapters["plain"])  # its digest had failed
    ranks.assign({1: adapters["plain"]})
    assert ranks.tokens(PROMPTS[:1], [1]) == [expected["plain"][0]]
    assert not right.error


def test_a_disk_that_does_not_answer(ranks: Ranks, adapters: Adapters, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread reads the adapters behind; no more than a few."""
    plain, dora, biased = adapters.values()
    store = ranks.runner._adapters
    assert store is not None
    answers, load = threading.Event(), store._loader.load
    held = iter((True, False))

    def slow(adapter: AdapterRef) -> Any:
        assert not next(held) or answers.wait(60)
        return load(adapter)

    monkeypatch.setattr(store._loader, "load", slow)
    monkeypatch.setattr(adapter_store, "_PATIENCE", 0.05)
    ranks.driver.adapters = AdapterPlan(prepared=[plain, dora])
    ranks.driver.step()
    assert ranks.answers.get(timeout=60).digest == dora.digest
    answers.set()
    assert ranks.answers.get(timeout=60).digest == plain.digest
    ranks.prepare(biased)
    assert len(store._threads) == 2


def test_no_memory_for_an_adapter(
    ranks: Ranks, adapters: Adapters, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result says so, and its rows are those of none; others go on. Also in a step that fails, or is skipped."""
    plain, dora, _ = adapters.values()
    ranks.prepare(plain, dora)
    ranks.assign({0: plain})
    assert ranks.tokens(PROMPTS[:1], [0]) == [expected["plain"][0]]

    def no_memory(*sizes: Any, **options: Any) -> Any:
        raise MemoryError("no more")

    with monkeypatch.context() as patch:
        patch.setattr(LowRankPool, "allocate", no_memory)
        ranks.assign({1: dora})
        assert ranks.tokens(PROMPTS[:2], [0, 1]) == [expected["plain"][0], expected[""][1]]
        ((digest, reason),) = ranks.driver.adapter_failures.items()
        assert (digest, reason.split(":")[0]) == (dora.digest, "out of memory on cpu")
        patch.setattr(ranks.runner, "execute_model", no_memory)
        row = NewRequestData(7, PROMPTS[0], 5, 0, [90, 91], SamplingParams(temperature=0.0), adapter_slot=1)
        plan = SchedulerOutput(100, [], [row], [CachedRequestData(7, 5, [], [])])
        for _ in range(2):
            plan.adapters = AdapterPlan(freed=[1], assigned=[(1, dora.digest)])
            result = ranks.runner.launch(plan).result()
            assert isinstance(result, ModelRunnerOutput)
            assert result.failure.startswith("out of memory on cpu in a step of 5 tokens")
            assert result.adapter_failures == {dora.digest: reason}
            plan = SchedulerOutput(101, [7], [], [])
    result = ranks.runner.launch(SchedulerOutput(102, [], [], [], clears_failure=True)).result()
    assert result == ModelRunnerOutput(102, [])
    ranks.assign({1: dora}, freed=(1,))
    assert ranks.tokens(PROMPTS[:1], [1]) == [expected["DoRA"][0]]
    assert ranks.answers.empty()
