"""Requests that become a vector, against a model that checks every plan it is given."""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest

from quire.engine.config.pooling import Mode, Pooling
from quire.engine.protocol.engine_core import EngineCoreOutput
from tests.fakes.configs import engine_config
from tests.unit.engine.scheduler.test_scheduler import AHEAD, Engine


def pooled_engine(mode: Mode = "lasttoken", **options: Any) -> Engine:
    return Engine(engine_config(pooling=Pooling(modes=(mode,), size=32), **options))


def check(engine: Engine, request_id: str, prompt: list[int]) -> EngineCoreOutput:
    """The one output of a request, which is its vector."""
    (output,) = engine.outputs[request_id]
    assert (output.finish_reason, output.token_ids) == ("stop", [])
    assert output.vector == array("f", prompt).tobytes()
    return output


@pytest.mark.parametrize(("stages", "depth"), AHEAD)
@pytest.mark.parametrize("budget", [16, 64])
@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("num_blocks", [40, 400])
def test_every_prompt_gets_one_vector(stages: int, depth: int, budget: int, prefix: bool, num_blocks: int) -> None:
    engine = pooled_engine(
        stages=stages, depth=depth, max_num_batched_tokens=budget, prefix=prefix, num_blocks=num_blocks
    )
    rng = random.Random(depth * budget + num_blocks)
    shared = [rng.randrange(97) for _ in range(30)]
    prompts = [
        shared[: rng.randrange(31)] + [rng.randrange(97) for _ in range(rng.randrange(1, 50))] for _ in range(60)
    ]
    aborted = set(rng.sample(range(60), 10))

    def arrive(turn: int) -> None:
        if turn < len(prompts):
            engine.add(str(turn), prompts[turn], max_tokens=9)  # no parameter of sampling matters
        for late in (0, 1):
            if turn - late in aborted and turn % 2 == late:  # while it waits, or while it may run
                engine.abort(str(turn - late))

    engine.run(arrive, at_least=62)
    for index, prompt in enumerate(prompts):
        if index in aborted and engine.ends(str(index)) == ["abort"]:
            continue
        check(engine, str(index), prompt)
    stats = engine.scheduler.snapshot()
    assert (stats.prefix_hit_tokens > 0) == prefix
    assert stats.generated_tokens == 0
    assert sum(engine.ends(str(index)) == ["abort"] for index in range(60)) > 0


@pytest.mark.parametrize("depth", [1, 2])
def test_without_a_cache_prompts_need_no_blocks(depth: int) -> None:
    engine = pooled_engine("mean", depth=depth, num_blocks=0, chunked=False, prefix=False, max_num_batched_tokens=128)
    rng = random.Random(depth)
    prompts = [[rng.randrange(97) for _ in range(rng.randrange(1, 129))] for _ in range(80)]
    for index, prompt in enumerate(prompts):
        engine.add(str(index), prompt)
    engine.run()
    for index, prompt in enumerate(prompts):
        check(engine, str(index), prompt)
    assert engine.scheduler.snapshot().preemptions == 0
    assert max(len(plan.scheduled) for plan in engine.model.plans) > 1


@pytest.mark.parametrize("num_blocks", [0, 32])
def test_a_prompt_may_fill_the_length(num_blocks: int) -> None:
    limits: Any = {"max_model_len": 128, "max_num_batched_tokens": 128}
    engine = pooled_engine(num_blocks=num_blocks, chunked=num_blocks > 0, prefix=num_blocks > 0, **limits)
    full = [index % 97 for index in range(128)]
    engine.add("full", full)
    engine.add("long", [*full, 1])
    engine.add("empty", [])
    engine.run()
    check(engine, "full", full)
    (refused,) = engine.outputs["long"]
    assert refused.error == "the prompt has 129 tokens; the maximum model length is 128"
    assert engine.ends("empty") == ["error"]


def test_a_prompt_that_is_known_computes_its_last_block_only() -> None:
    engine = pooled_engine(block_size=4)
    prompt = list(range(42))
    engine.add("first", prompt)
    engine.run()
    engine.add("again", prompt)
    engine.run()
    assert check(engine, "first", prompt).num_cached_tokens == 0
    assert check(engine, "again", prompt).num_cached_tokens == 40
