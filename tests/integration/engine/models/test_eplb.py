"""Busy experts that move while requests run: greedy tokens still equal transformers'."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.engine.config.engine_config import EngineConfig
from quire.engine.config.memory_plan import MemoryPlan
from quire.engine.distributed.eplb import ExpertMove
from quire.engine.protocol.errors import ConfigError
from quire.engine.protocol.runner_output import ModelRunnerOutput
from quire.engine.protocol.sampling_params import SamplingParams
from quire.engine.protocol.scheduler_output import SchedulerOutput
from quire.engine.protocol.stats import ExpertLoad
from quire.engine.worker import eplb
from tests.fakes.checkpoints import likeliest
from tests.fakes.core_with_ranks import Ranks
from tests.fakes.families import CASES, SIZES, write_model
from tests.fakes.model_logits import configure
from tests.fakes.plans import Driver, Request
from tests.fakes.rank_processes import Ranks as Processes
from tests.fakes.threads import ThreadExecutor

FAMILIES = {"Mixtral": {"num_local_experts": 8}, "Granite MoE": {"num_local_experts": 8}, "DeepSeek V3": {}}
STEPS = 24


def write(family: str, folder: Path) -> Any:
    architecture, changes = CASES[family]
    return write_model(architecture, SIZES | changes | FAMILIES[family], folder)


def moving(folder: Path, tp: int, **options: Any) -> EngineConfig:
    """Experts find new places every second step."""
    given = {"enable_expert_parallel": True, "enable_eplb": True, "eplb_step_interval": 2, "max_model_len": 256}
    return configure(folder, tensor_parallel_size=tp, **{**given, **options})


def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(3, 130) for _ in range(length)] for length in (1, 33, 40)]


@pytest.mark.parametrize(
    ("family", "tp", "pp", "num_redundant_experts"),
    [
        ("Mixtral", 2, 1, 0),
        ("Mixtral", 2, 2, 4),
        ("Granite MoE", 2, 1, 4),
        pytest.param("Granite MoE", 4, 1, 0, marks=pytest.mark.slow),
        ("DeepSeek V3", 2, 2, 0),
        pytest.param("DeepSeek V3", 4, 1, 4, marks=pytest.mark.slow),
    ],
)
def test_tokens_stay_while_experts_move(
    family: str, tp: int, pp: int, num_redundant_experts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write(family, tmp_path)
    config = moving(tmp_path, tp, pipeline_parallel_size=pp, num_redundant_experts=num_redundant_experts)
    moved: list[ExpertMove] = []
    run: Callable[[Any, list[ExpertMove]], None] = eplb._Mover.run

    def counted(mover: Any, some: list[ExpertMove]) -> None:
        moved.extend(some)
        run(mover, some)

    monkeypatch.setattr(eplb._Mover, "run", counted)
    params = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)
    with Ranks(config, ThreadExecutor(config)) as ranks:
        tokens = ranks.tokens([(prompt, params) for prompt in prompts()], max_num_batched_tokens=16)
    assert tokens == likeliest(model, prompts(), tokens)
    assert len(moved) >= 10 * tp


@pytest.mark.slow
@pytest.mark.parametrize(("quantization", "pp"), [(None, 2), ("int8", 1)])
def test_processes_move_experts_and_report_it(quantization: Any, pp: int, tmp_path: Path) -> None:
    """The same tokens as where nothing moves, bytes and all."""
    model = write("Mixtral", tmp_path)
    outputs, loads = [], list[ExpertLoad]()
    for enable_eplb in (False, True):
        options = {"enable_eplb": enable_eplb, "num_redundant_experts": 4 * enable_eplb, "quantization": quantization}
        config = moving(tmp_path, 2, pipeline_parallel_size=pp, max_num_seqs=8, block_size=4, **options)
        ranks = Processes(config, tmp_path)

        def execute(plan: SchedulerOutput, ranks: Processes = ranks) -> ModelRunnerOutput:
            result = ranks.execute(plan)
            if result.expert_load is not None:
                loads.append(result.expert_load)
            return result

        driven = Driver(execute, 8, config.cache.num_blocks, 4, workers_keep=pp == 1)
        requests = [Request(prompt, SamplingParams(temperature=0.0)) for prompt in prompts()]
        driven.step()  # a sign of life
        driven.decode(requests, STEPS, 16)
        ranks.close()
        outputs.append([request.output for request in requests])
    assert outputs[0] == outputs[1]
    assert quantization is not None or outputs[0] == likeliest(model, prompts(), outputs[0])
    layers = config.model.architecture.num_layers
    assert loads[-1].layers == dict.fromkeys(range(layers), 8)
    assert loads[-1].moved >= 10
    assert all(1.0 <= load.imbalance <= 2.0 for load in loads)


def test_the_plan_includes_buffers_for_moving_experts(tmp_path: Path) -> None:
    write("Mixtral", tmp_path)
    still, config = moving(tmp_path, 2, enable_eplb=False), moving(tmp_path, 2)
    one = 3 * SIZES["hidden_size"] * SIZES["intermediate_size"] * 4
    assert MemoryPlan.of(config).workspace - MemoryPlan.of(still).workspace == 3 * one


def test_more_copies_than_ranks_for_them_are_refused(tmp_path: Path) -> None:
    write("Mixtral", tmp_path)
    with pytest.raises(ConfigError, match=r"--num-redundant-experts 10: 8 experts over 2 ranks"):
        moving(tmp_path, 2, num_redundant_experts=10)
    with pytest.raises(ConfigError, match="have at most 0 copies"):
        moving(tmp_path, 1, num_redundant_experts=1)
    assert moving(tmp_path, 2, num_redundant_experts=8).parallel.experts is not None
