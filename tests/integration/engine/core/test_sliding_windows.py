"""Sliding windows: greedy float32 tokens equal transformers', and blocks that a window has left behind are used for
others."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from quire.engine.config.engine_config import EngineConfig, KVCacheGroup
from quire.engine.config.options import EngineOptions
from quire.engine.config.resolve import resolve
from quire.engine.protocol.sampling_params import SamplingParams
from tests.fakes.checkpoints import generate, write_checkpoint
from tests.fakes.core_with_ranks import Ranks

WINDOW, COUNT = 12, 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("mistral", tmp_path_factory.mktemp("mistral"), sliding_window=WINDOW)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Up to eight windows long; the last two start alike."""
    rng = random.Random(0)
    shared = [rng.randrange(3, 130) for _ in range(60)]
    prompts = [[rng.randrange(3, 130) for _ in range(length)] for length in (1, 11, 12, 13, 96)]
    return [*prompts, [*shared, 5, 6], [*shared, 7, 8, 9]]


@pytest.fixture(scope="module")
def expected(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    return generate(folder, prompts, COUNT)


def configure(folder: Path, tp: int, pp: int, groups: int) -> EngineConfig:
    """With the layers in more groups than they need, as a model has whose layers are not alike."""
    config = resolve(
        EngineOptions(
            model=str(folder),
            device="cpu",
            dtype="float32",
            tensor_parallel_size=tp,
            pipeline_parallel_size=pp,
            max_model_len=256,
            max_num_seqs=16,
            block_size=4,
            max_num_batched_tokens=64,
        )
    )
    layers = [tuple(tuple(stage[at::groups]) for stage in config.parallel.stages) for at in range(groups)]
    cut = tuple(KVCacheGroup(window=WINDOW, layers=of_stages) for of_stages in layers)
    return replace(config, cache=replace(config.cache, groups=cut))


@pytest.mark.parametrize(("tp", "pp", "groups"), [(1, 1, 4), (2, 3, 2)])
@pytest.mark.slow
def test_tokens_equal_transformers(
    folder: Path, prompts: list[list[int]], expected: list[list[int]], tp: int, pp: int, groups: int
) -> None:
    config = configure(folder, tp, pp, groups)
    requests = [(prompt, SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)) for prompt in prompts]
    with Ranks(config) as ranks:
        for budget in (5, 64):
            tight = config.cache.max_blocks(256, budget) + 2
            for num_blocks in (None, tight):
                tokens = ranks.tokens(requests, max_num_batched_tokens=budget, num_blocks=num_blocks)
                assert tokens == expected
                if num_blocks is None:
                    assert ranks.stats.prefix_hit_tokens >= 40
                elif budget == 5:  # a larger chunk makes the least cache so large that all windows fit
                    assert ranks.stats.preemptions > 0
        for depth in (1, 2) if pp == 1 else ():
            assert ranks.tokens(requests, depth=depth, max_num_batched_tokens=16) == expected
