"""Families whose experts are spread over ranks: logits, tokens and sizes equal the whole model's."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.engine.architecture.families import transformers_backend
from quire.engine.architecture.feed_forward_spec import MoESpec
from quire.engine.checkpoints.loader import needed_tensors
from quire.engine.config.engine_config import EngineConfig
from quire.engine.config.memory_plan import MemoryPlan
from quire.engine.config.plan_text import plan_text
from quire.engine.distributed.expert_group import ExpertGroup
from quire.engine.models.decoder import Decoder
from quire.engine.models.transformers_backend import describe
from quire.engine.protocol.errors import ConfigError
from quire.engine.protocol.sampling_params import SamplingParams
from tests.fakes.checkpoints import likeliest
from tests.fakes.core_with_ranks import Ranks
from tests.fakes.families import CASES, SIZES, name_as_published, write_model
from tests.fakes.model_logits import configure, logits
from tests.fakes.ranks import expert_groups, on_ranks
from tests.fakes.threads import ThreadExecutor

FAMILIES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 8},
    "Granite MoE": {"num_local_experts": 8},
    "gpt-oss": {"num_local_experts": 8},
    "Qwen2 MoE": {"num_experts": 8},
    "Qwen3 MoE": {"num_experts": 8},
    "GLM-4 MoE": {"n_routed_experts": 8},
    "DeepSeek V2": {},
    "DeepSeek V3": {},
    "Gemma 4, experts": {"num_experts": 8, "tie_word_embeddings": False},
    "Nemotron 3, latent experts": {"n_routed_experts": 8},
    "DeepSeek V4": {"n_routed_experts": 8},
    "ERNIE 4.5 VL": {"tie_word_embeddings": False},  # 8 of each kind
}
"""As in `tests.fakes.families`, with experts that four ranks can share."""
PLACEMENTS = ("linear", "round_robin")
STEPS = 24


def write(family: str, folder: Path) -> Any:
    architecture, changes = CASES[family]
    model = write_model(architecture, SIZES | changes | FAMILIES[family], folder)
    name_as_published(architecture, folder, model)
    return model


def spread(folder: Path, **options: Any) -> EngineConfig:
    return configure(folder, **{"enable_expert_parallel": True, "max_model_len": 256, **options})


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    model = write(family, tmp_path)
    tokens = torch.randint(0, 131, (90,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = model(tokens[None]).logits[0]
    for tp, pp, placement in ((1, 1, "linear"), (2, 1, "round_robin"), (4, 1, "linear"), (2, 3, "linear")):
        config = spread(
            tmp_path, tensor_parallel_size=tp, pipeline_parallel_size=pp, expert_placement_strategy=placement
        )
        for result in on_ranks(tp, partial(logits, config, tokens)):
            assert (result - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize(("family", "placement"), [*zip(FAMILIES, cycle(PLACEMENTS))])
def test_greedy_tokens_are_those_of_transformers(family: str, placement: str, tmp_path: Path) -> None:
    """With chunked prefill, and with prefix hits where a prompt begins as one before."""
    model = write(family, tmp_path)
    rng = random.Random(0)
    shared = [rng.randrange(3, 130) for _ in range(40)]
    prompts = [[rng.randrange(3, 130)], [*shared, 5, 6], [*shared, 7, 8, 9]]
    params = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)
    config = spread(tmp_path, tensor_parallel_size=2, expert_placement_strategy=placement)
    with Ranks(config, ThreadExecutor(config)) as ranks:
        tokens = ranks.tokens([(prompt, params) for prompt in prompts], max_num_batched_tokens=16)
    assert tokens == likeliest(model, prompts, tokens)


@pytest.mark.parametrize(
    ("family", "tp", "pp"), [("Mixtral", 2, 1), pytest.param("DeepSeek V3", 2, 2, marks=pytest.mark.slow)]
)
def test_processes_give_the_same_tokens(family: str, tp: int, pp: int, tmp_path: Path) -> None:
    model = write(family, tmp_path)
    rng = random.Random(1)
    prompts = [[rng.randrange(3, 130) for _ in range(length)] for length in (1, 9, 30)]
    params = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)
    config = spread(tmp_path, tensor_parallel_size=tp, pipeline_parallel_size=pp)
    with Ranks(config) as ranks:
        tokens = ranks.tokens([(prompt, params) for prompt in prompts], max_num_batched_tokens=16)
    assert tokens == likeliest(model, prompts, tokens)


def rank(config: EngineConfig, group: ExpertGroup) -> Decoder:
    arch = config.model.architecture
    with torch.device("meta"):
        return Decoder(arch, range(arch.num_layers), config.model.max_model_len, group.tp, group)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_hold_each_expert_once_and_as_much_as_the_plan_says(family: str, placement: str, tmp_path: Path) -> None:
    write(family, tmp_path)
    config = spread(tmp_path, tensor_parallel_size=2, expert_placement_strategy=placement)
    assert config.parallel.experts is not None
    groups, _ = expert_groups(1, 2, config.parallel.experts)
    found: dict[tuple[str, str, int], int] = {}
    for group in groups:
        decoder = rank(config, group)
        assert sum(weight.nbytes for weight in decoder.parameters()) == MemoryPlan.of(config).weights[0]
        for places in needed_tensors(decoder, config.model).values():
            for _, shard, stored in places:
                if shard.expert is not None:
                    assert (shard.start, shard.length) == (0, shard.shape[shard.dim])
                    key = stored.name, shard.part, shard.expert
                    found[key] = found.get(key, 0) + 1
    mixtures = [layer.feed_forward for layer in config.model.architecture.layers]
    counts = [mixture.num_routed for mixture in mixtures if isinstance(mixture, MoESpec)]
    assert set(found.values()) == {1}
    assert len({(name, number) for name, part, number in found if part == ""}) >= sum(counts)  # downs
    told = f"  {counts[0]} experts a layer over 2 ranks, {counts[0] // 2} each, {placement}\n"
    assert told in plan_text(config)


def test_experts_need_not_be_cut(tmp_path: Path) -> None:
    """So their number of inner features is arbitrary; layers that every token passes are still divided."""
    architecture, changes = CASES["Qwen3 MoE"]
    write_model(architecture, SIZES | changes | {"num_experts": 4, "moe_intermediate_size": 21}, tmp_path)
    with pytest.raises(ConfigError, match="4 does not divide this model's 21 feed-forward columns of an expert"):
        configure(tmp_path, tensor_parallel_size=4, max_model_len=256)
    tokens = torch.randint(0, 131, (30,), generator=torch.Generator().manual_seed(1))
    (expected,) = on_ranks(1, partial(logits, configure(tmp_path, max_model_len=256), tokens))
    for result in on_ranks(4, partial(logits, spread(tmp_path, tensor_parallel_size=4), tokens)):
        assert (result - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_what_cannot_be_spread_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_backend, "describe", describe.describe)  # spares the imports of its process
    write("Mixtral", tmp_path)
    with pytest.raises(
        ConfigError, match=r"8 experts cannot be distributed evenly over 3 ranks .* --num-redundant-experts 1"
    ):
        spread(tmp_path, tensor_parallel_size=3)
    with pytest.raises(ConfigError, match=r"not supported with transformers' implementation .* of Mixtral"):
        spread(tmp_path, tensor_parallel_size=2, model_impl="transformers")
    write("ERNIE 4.5 VL", tmp_path)
    with pytest.raises(ConfigError, match="--enable-eplb is not supported for Ernie4_5_VLMoe"):
        spread(tmp_path, tensor_parallel_size=2, enable_eplb=True)
    architecture, changes = CASES["Llama"]
    write_model(architecture, SIZES | changes, tmp_path)
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no experts; omit the flag"):
        spread(tmp_path, tensor_parallel_size=2)


def test_replicas_make_room_for_the_tokens_of_all(tmp_path: Path) -> None:
    write("Mixtral", tmp_path)
    config = spread(tmp_path, tensor_parallel_size=2)
    one = MemoryPlan.of(config)
    coupled = MemoryPlan.of(replace(config, parallel=replace(config.parallel, replicas=2)))
    tokens, inner = config.scheduler.max_num_batched_tokens, 2 * 80
    assert coupled.workspace - one.workspace == 4 * tokens * (3 * inner + 8 * 2 * 48)
    assert coupled.weights[0] < one.weights[0]  # half as many experts
