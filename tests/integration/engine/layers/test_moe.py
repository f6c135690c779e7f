"""Mixtures of experts: sharded against whole, held in other ways, and against transformers' modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeMoE
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.granitemoe.modeling_granitemoe import GraniteMoeMoE
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from quire import kernels
from quire.engine.architecture.feed_forward_spec import MLPSpec, MoESpec
from quire.engine.config.engine_config import ExpertParallelConfig
from quire.engine.distributed.communicator import Parallel
from quire.engine.distributed.expert_group import ExpertGroup
from quire.engine.layers.batch import Batch
from quire.engine.layers.linear import ColumnParallelLinear, ReplicatedLinear
from quire.engine.layers.moe import MixtureOfExperts
from quire.engine.layers.weight import Shard, Weight
from tests.fakes.experts import EVERYTHING, HIDDEN, PLAIN, SHARED, batch, build, packed
from tests.fakes.ranks import on_ranks, on_replicas
from tests.integration.engine.layers.test_sharding import check, fill


@pytest.mark.parametrize("spec", [PLAIN, SHARED, EVERYTHING], ids=["plain", "shared", "everything"])
@pytest.mark.parametrize("tokens", [1, 7, 50])
def test_ranks_give_what_one_gives(spec: MoESpec, tokens: int) -> None:
    check(lambda parallel: MixtureOfExperts(spec, HIDDEN, parallel), torch.randn(tokens, HIDDEN))


@pytest.mark.parametrize("spec", [PLAIN, EVERYTHING], ids=["plain", "everything"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_packed_ranks_give_what_one_gives(spec: MoESpec, size: int) -> None:
    x = torch.randn(9, HIDDEN)
    expected = on_ranks(1, lambda parallel: fill(MixtureOfExperts(spec, HIDDEN, parallel))(x))[0]
    for result in on_ranks(size, lambda parallel: packed(fill(MixtureOfExperts(spec, HIDDEN, parallel)))(x)):
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


def test_an_expert_that_nobody_chooses_may_hold_anything() -> None:
    module = fill(MixtureOfExperts(replace(PLAIN, router_bias=True), HIDDEN, Parallel()))
    x = torch.randn(11, HIDDEN)
    assert isinstance(module, MixtureOfExperts)
    assert module.router.bias is not None
    module.router.bias[3] = -1e4
    expected = module(x)
    module.experts.gate_up.weight[3] = module.experts.down.weight[3] = torch.nan
    assert torch.equal(module(x), expected)
    torch.testing.assert_close(packed(module)(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantization_leaves_router_and_gate_alone(quantization: kernels.Quantization) -> None:
    spec = replace(EVERYTHING, intermediate_size=32, shared=MLPSpec(intermediate_size=64))
    module = fill(MixtureOfExperts(spec, 64, Parallel()))
    x = torch.randn(30, 64)
    assert isinstance(module, MixtureOfExperts)
    weights, ids = module.router(x)
    expected = module(x)
    out = packed(module, quantization)(x)
    packed_weights, packed_ids = module.router(x)
    assert torch.equal(ids, packed_ids)
    torch.testing.assert_close(packed_weights, weights)
    assert (out - expected).norm() < (0.02 if quantization == "int8" else 0.2) * expected.norm()
    assert not any(weight.numel() for name, weight in module.named_parameters() if name.endswith("weight"))


def test_half_precision_routes_in_float32() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        module = MixtureOfExperts(EVERYTHING, HIDDEN, Parallel())
    finally:
        torch.set_default_dtype(torch.float32)
    fill(module)
    assert module.router.correction_bias is not None
    assert module.router.correction_bias.dtype == torch.float32
    x = torch.randn(10, HIDDEN).bfloat16()
    weights, _ = module.router(x)
    assert weights.dtype == torch.float32
    out = module(x)
    assert out.dtype == torch.bfloat16
    assert (packed(module)(x).float() - out.float()).norm() < 0.02 * out.float().norm()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_shards_cut_every_expert_alike(size: int) -> None:
    class Rank(Parallel):
        def __init__(self, rank: int) -> None:
            self.rank, self.size = rank, size

    columns = 24 // size
    module = MixtureOfExperts(PLAIN, HIDDEN, Rank(size - 1))
    gate_up, down = module.experts.gate_up.weight, module.experts.down.weight
    assert gate_up.shape == (6, 2 * columns, HIDDEN)
    assert down.shape == (6, HIDDEN, columns)
    assert len(gate_up.shards) == 12
    shard = gate_up.shards[7]
    assert (shard.expert, shard.local_expert, shard.part, shard.shape) == (3, 3, "up", (24, HIDDEN))
    assert shard.source == (slice(24 - columns, 24),)
    assert shard.target == (3, slice(columns, 2 * columns))
    assert down.shards[2].source == (slice(None), slice(24 - columns, 24))
    assert down.shards[2].target == (2, slice(None), slice(0, columns))
    assert sum(shard.elements for shard in gate_up.shards) == gate_up.numel()


class Change(NamedTuple):
    """What an adapter does to an expert."""

    down: tuple[Tensor, Tensor]
    gate: tuple[Tensor, Tensor]
    up: tuple[Tensor, Tensor]

    @classmethod
    def random(cls, rank: int, size: int) -> Change:
        shapes = (HIDDEN, size), (size, HIDDEN), (size, HIDDEN)
        return cls(*((torch.randn(rank, ins), torch.randn(outs, rank) / 4) for outs, ins in shapes))


ADAPTERS, EXPERTS = 3, 12
TWELVE_EXPERTS: dict[str, Any] = {"num_experts": EXPERTS, "top_k": 4}


def give_pools(module: MixtureOfExperts, adapters: Sequence[dict[int, Change]], routers: Sequence[Tensor]) -> None:
    """Let the adapters change the experts that a rank has, by number, and its router."""
    router = kernels.LowRankPool.allocate(ADAPTERS, ADAPTERS, HIDDEN, (EXPERTS,), torch.float32, torch.device("cpu"), 1)
    for slot, change in enumerate(routers):
        router.assign(slot, slot, [(change, torch.ones(EXPERTS, 1))])
        router.b[slot, ::2] *= -1
    module.router.pool = router
    for matrices in (module.experts.gate_up, module.experts.down):
        shards = matrices.weight.shards
        widths = [each.shape[0] if each.dim else each.length for each in shards if each.local_expert == 0]
        ranks = [len(change.gate[0]) for changes in adapters for change in changes.values()]
        given = 2 * 2 * sum(ranks), matrices.weight.shape[2], widths, torch.float32, torch.device("cpu"), max(ranks)
        matrices.pool, first = kernels.LowRankPool.allocate(ADAPTERS * module.experts.count, *given), 0
        for slot, changes in enumerate(adapters):
            for expert in range(module.experts.count):
                parts = list[tuple[Tensor, Tensor] | None]()
                for shard in (each for each in shards if each.local_expert == expert):
                    if shard.expert not in changes:
                        parts.append(None)
                        continue
                    a, b = getattr(changes[shard.expert], shard.part or "down")
                    parts.append((a[:, shard.source[1]], b) if shard.dim else (a, b[shard.source[0]]))
                matrices.pool.assign(slot * module.experts.count + expert, first, parts)
                first += sum(len(part[0]) for part in parts if part is not None)


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("spec", [PLAIN, EVERYTHING], ids=["plain", "everything"])
@pytest.mark.parametrize("layout", ["one", "slices", "experts", "copies"])
def test_experts_changed_by_adapters_are_merged_ones(spec: MoESpec, layout: str, is_packed: bool) -> None:
    """Slices of each expert on two ranks, or whole experts, some of which have copies."""
    spec, x, slots = replace(spec, **TWELVE_EXPERTS), torch.randn(24, HIDDEN), torch.arange(24) % (ADAPTERS + 1) - 1
    changed: list[Any] = [range(EXPERTS), (0, 5, 11), (7,)]
    adapters = [
        {number: Change.random(1 + (number + slot) % 5, spec.intermediate_size) for number in numbers}
        for slot, numbers in enumerate(changed)
    ]
    routers = [torch.randn(1, HIDDEN) / 8 for _ in adapters]
    expected = torch.empty(0)
    for slot in range(-1, ADAPTERS):
        whole = fill(MixtureOfExperts(spec, HIDDEN, Parallel()))
        assert isinstance(whole, MixtureOfExperts)
        if slot >= 0:
            whole.router.weight.data += routers[slot] * torch.tensor([-1.0, 1.0]).repeat(EXPERTS // 2)[:, None]
            for number, change in adapters[slot].items():
                gate, up, down = (each[1] @ each[0] for each in (change.gate, change.up, change.down))
                whole.experts.gate_up.weight[number] += torch.cat((gate, up))
                whole.experts.down.weight[number] += down
        out = whole(x)
        expected = out.clone() if slot < 0 else torch.where((slots == slot)[:, None], out, expected)

    def run(module: nn.Module, given: Batch | None) -> Tensor:
        assert isinstance(module, MixtureOfExperts)
        give_pools(module, adapters, routers)
        module = packed(module) if is_packed else module
        plain, found = module(x, given), module(x, given, kernels.AdapterRows.of(slots, ADAPTERS))
        tolerance = 0.0 if is_packed else 1e-5  # torch's product of a row depends on the number of rows
        torch.testing.assert_close(found[slots < 0], plain[slots < 0], rtol=tolerance, atol=10 * tolerance)
        return found  # type: ignore[no-any-return]

    if layout in ("one", "slices"):
        size = 1 if layout == "one" else 2
        results = on_ranks(size, lambda parallel: run(fill(MixtureOfExperts(spec, HIDDEN, parallel)), None))
    else:
        config = ExpertParallelConfig(placement="round_robin", num_redundant_experts=4 * (layout == "copies"))
        results = on_replicas(1, 2, config, lambda group: run(build(spec, group), batch(len(x), [len(x)])))
    for result in results:
        assert (result - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("backend", ["allgather_reducescatter", "all_to_all"])
def test_adapters_change_routers_and_latents_of_replicas_that_share_experts(backend: Any) -> None:
    """One of the ranks has no tokens to send."""
    spec, counts = replace(PLAIN, **TWELVE_EXPERTS, latent_size=16), (7, 1)
    inputs = [torch.randn(count, HIDDEN) for count in counts]
    slots = [torch.arange(count) % 3 - 1 for count in counts]
    changes = [[(torch.randn(1, HIDDEN), torch.randn(rows, 1) / 4) for _ in range(2)] for rows in (EXPERTS, 16)]

    def layers(module: nn.Module) -> list[ReplicatedLinear | ColumnParallelLinear]:
        assert isinstance(module, MixtureOfExperts)
        assert module.latent_down is not None
        assert module.router.may_have_pool
        assert module.latent_down.may_have_pool
        return [module.router, module.latent_down]

    def run(group: ExpertGroup) -> Tensor:
        module, x = build(spec, group), inputs[group.dp.rank]
        for layer, own in zip(layers(module), changes, strict=True):
            rows = len(own[0][1])
            layer.pool = kernels.LowRankPool.allocate(2, 2, HIDDEN, (rows,), torch.float32, torch.device("cpu"), 1)
            for slot, change in enumerate(own):
                layer.pool.assign(slot, slot, [change])
        return module(x, batch(len(x), counts), kernels.AdapterRows.of(slots[group.dp.rank], 2))  # type: ignore[no-any-return]

    results = on_replicas(2, 2, ExpertParallelConfig(all2all_backend=backend), run)
    for slot in range(-1, 2):
        whole = fill(MixtureOfExperts(spec, HIDDEN, Parallel()))
        for layer, own in zip(layers(whole), changes, strict=True):
            layer.weight.data += own[slot][1] @ own[slot][0] if slot >= 0 else 0.0
        for rank, result in enumerate(results):
            expected, is_own = whole(inputs[rank // 2]), slots[rank // 2] == slot
            assert (result - expected)[is_own].norm() <= 1e-5 * expected.norm()


def test_experts_that_move_or_are_shared_by_replicas_are_not_changed_by_adapters() -> None:
    def fixed_by(dp: int, config: ExpertParallelConfig) -> list[str]:
        return on_replicas(dp, 1, config, lambda group: build(PLAIN, group).experts.down.fixed_by)

    assert fixed_by(1, ExpertParallelConfig()) == [""]
    assert "replicas" in fixed_by(2, ExpertParallelConfig())[0]
    assert "--enable-eplb" in fixed_by(1, ExpertParallelConfig(enable_eplb=True))[0]


# The tests below compare our layer with transformers'. Their experts are stacked, gates before ups.
Lookup = Callable[[str, Shard], Tensor]


def stacked(module: nn.Module, router: str, shared: str = "shared_experts") -> Lookup:
    """The place of our slice in their module, which has these names."""
    theirs = dict(module.named_parameters()) | dict(module.named_buffers())
    names = {
        "router.weight": f"{router}.weight",
        "router.bias": f"{router}.bias",
        "router.correction_bias": f"{router}.e_score_correction_bias",
        "shared.down.weight": f"{shared}.down_proj.weight",
        "shared_gate.weight": "shared_expert_gate.weight",
    }

    def lookup(path: str, shard: Shard) -> Tensor:
        if path in names:
            return theirs[names[path]]
        if path == "shared.gate_up.weight":
            return theirs[f"{shared}.{shard.part}_proj.weight"]
        if path == "experts.down.weight":
            return theirs["experts.down_proj"][shard.expert]
        assert path == "experts.gate_up.weight", path
        return theirs["experts.gate_up_proj"][shard.expert].chunk(2)[shard.part == "up"]

    return lookup


def gpt_oss(module: nn.Module) -> Lookup:
    """Matrices `[in, out]`, gates and ups in turn."""
    theirs = dict(module.named_parameters())

    def lookup(path: str, shard: Shard) -> Tensor:
        module, name = path.rsplit(".", 1)
        if module == "router":
            return theirs[path]
        tensor = theirs[f"{module}_proj_bias" if name == "bias" else f"{module}_proj"][shard.expert]
        rows = tensor if name == "bias" else tensor.T
        return rows if module == "experts.down" else rows[int(shard.part == "up") :: 2]

    return lookup


def take(module: MixtureOfExperts, lookup: Lookup) -> MixtureOfExperts:
    for path, weight in module.named_parameters():
        assert isinstance(weight, Weight)
        for shard in weight.shards:
            tensor = lookup(path, shard)
            assert tensor.shape == shard.shape
            weight.data[shard.target] = tensor[shard.source]
    return module


SIZES: dict[str, Any] = {"hidden_size": HIDDEN, "num_experts_per_tok": 3}
DEEPSEEK: dict[str, Any] = {
    "n_routed_experts": 12,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "routed_scaling_factor": 2.5,
}
TWELVE = replace(PLAIN, num_experts=12, top_k=3)
DEEPSEEK_V3 = replace(
    TWELVE,
    scoring="sigmoid",
    scale=2.5,
    groups=4,
    top_groups=2,
    group_score="top2_sum",
    correction_bias=True,
    shared=MLPSpec(intermediate_size=48),
)
FAMILIES: dict[str, tuple[Callable[[Any], nn.Module], Any, Callable[[nn.Module], Lookup], MoESpec]] = {
    "Mixtral": (
        MixtralSparseMoeBlock,
        transformers.MixtralConfig(**SIZES, num_local_experts=12, intermediate_size=24),
        lambda module: stacked(module, "gate"),
        TWELVE,
    ),
    "Qwen3-MoE": (
        Qwen3MoeSparseMoeBlock,
        transformers.Qwen3MoeConfig(**SIZES, num_experts=12, moe_intermediate_size=24, norm_topk_prob=True),
        lambda module: stacked(module, "gate"),
        TWELVE,
    ),
    "Qwen2-MoE": (
        Qwen2MoeSparseMoeBlock,
        transformers.Qwen2MoeConfig(
            **SIZES, num_experts=12, moe_intermediate_size=24, shared_expert_intermediate_size=40, norm_topk_prob=False
        ),
        lambda module: stacked(module, "gate", "shared_expert"),
        replace(TWELVE, renormalize=False, shared=MLPSpec(intermediate_size=40), shared_gate=True),
    ),
    "GraniteMoE": (
        GraniteMoeMoE,
        transformers.GraniteMoeConfig(**SIZES, num_local_experts=12, intermediate_size=24),
        lambda module: stacked(module, "router"),
        replace(TWELVE, scoring="topk_softmax", renormalize=False),
    ),
    "gpt-oss": (
        GptOssMLP,
        transformers.GptOssConfig(**SIZES, num_local_experts=12, intermediate_size=24),
        gpt_oss,
        replace(
            TWELVE, activation="swiglu_oai", scoring="topk_softmax", renormalize=False, bias=True, router_bias=True
        ),
    ),
    "DeepSeek-V2": (
        DeepseekV2Moe,
        transformers.DeepseekV2Config(**SIZES, **DEEPSEEK, topk_method="group_limited_greedy", n_group=4, topk_group=2),
        lambda module: stacked(module, "gate"),
        replace(TWELVE, renormalize=False, scale=2.5, groups=4, top_groups=2, shared=MLPSpec(intermediate_size=48)),
    ),
    "DeepSeek-V3": (
        DeepseekV3MoE,
        transformers.DeepseekV3Config(**SIZES, **DEEPSEEK, n_group=4, topk_group=2),
        lambda module: stacked(module, "gate"),
        DEEPSEEK_V3,
    ),
    "GLM-4-MoE": (
        Glm4MoeMoE,
        transformers.Glm4MoeConfig(**SIZES, **DEEPSEEK, n_group=1, topk_group=1),
        lambda module: stacked(module, "gate"),
        replace(DEEPSEEK_V3, groups=1, top_groups=1),
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_layer_is_transformers(family: str) -> None:
    module_class, config, lookup, spec = FAMILIES[family]
    config._experts_implementation = "eager"
    theirs = module_class(config).eval()
    for parameter in [*theirs.parameters(), *theirs.buffers()]:
        nn.init.normal_(parameter, std=0.5)
    with torch.no_grad():
        ours = take(MixtureOfExperts(spec, HIDDEN, Parallel()), lookup(theirs))
        cases = [torch.randn(tokens, HIDDEN) for tokens in (1, 7, 60)]
        expected = [theirs(x[None]) for x in cases]
        expected = [out[0][0] if isinstance(out, tuple) else out[0] for out in expected]
        for layer in (ours, packed(ours)):
            for x, out in zip(cases, expected, strict=True):
                torch.testing.assert_close(layer(x), out, rtol=1e-4, atol=1e-4)


def test_a_whole_linear_is_the_plain_one() -> None:
    module = fill(ReplicatedLinear(HIDDEN, 5, bias=True))
    x = torch.randn(4, HIDDEN)
    assert isinstance(module, ReplicatedLinear)
    assert module.bias is not None
    expected = F.linear(x, module.weight, module.bias)
    torch.testing.assert_close(module.logits(x), expected)
    packed(module)
    torch.testing.assert_close(module.logits(x), expected)
