"""Experts spread over ranks and replicas: the same outputs as one rank's, however tokens reach them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.engine.architecture.feed_forward_spec import MLPSpec, MoESpec
from quire.engine.config.engine_config import ExpertParallelConfig
from quire.engine.distributed.communicator import Parallel
from quire.engine.distributed.expert_group import ExpertGroup
from quire.engine.distributed.expert_placement import ExpertPlacement
from quire.engine.layers.moe import MixtureOfExperts
from tests.fakes.experts import EVERYTHING, HIDDEN, PLAIN, batch, build, packed
from tests.fakes.ranks import on_replicas
from tests.integration.engine.layers.test_sharding import fill

BACKENDS: Any = ("allgather_reducescatter", "all_to_all")
PLACEMENTS: Any = ("linear", "round_robin")
TWELVE = replace(PLAIN, num_experts=12, top_k=4)
"""Four of the twelve: tokens have several experts on a rank."""


def whole(spec: MoESpec, x: Tensor) -> Tensor:
    with torch.no_grad():
        out: Tensor = fill(MixtureOfExperts(spec, HIDDEN, Parallel()))(x)
    return out


def check(
    spec: MoESpec, config: ExpertParallelConfig, dp: int, tp: int, counts: Sequence[int], *, is_packed: bool = True
) -> None:
    """Each rank gets the same result as one rank with its replica's tokens."""
    inputs = [torch.randn(count, HIDDEN) for count in counts]

    def run(group: ExpertGroup) -> Tensor:
        module = build(spec, group)
        x = inputs[group.dp.rank]
        out: Tensor = (packed(module) if is_packed else module)(x, batch(len(x), counts))
        return out

    results = on_replicas(dp, tp, config, run)
    assert len(results) == dp * tp
    for rank, result in enumerate(results):
        x = inputs[rank // tp]
        expected = whole(spec, x) if len(x) else x
        assert result.shape == expected.shape
        assert not len(x) or (result - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("counts", [(7, 7), (1, 30), (5, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("spec", [TWELVE, EVERYTHING], ids=["plain", "everything"])
def test_replicas_give_what_one_rank_gives(
    spec: MoESpec, counts: tuple[int, int], placement: Any, backend: Any
) -> None:
    """Uneven and empty ones as well, with and without shared experts."""
    check(spec, ExpertParallelConfig(placement=placement, all2all_backend=backend), 2, 2, counts)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (1, 2), (1, 4), (2, 1), (3, 1), (4, 1), (3, 2)])
def test_any_dp_and_tp_gives_what_one_rank_gives(dp: int, tp: int, backend: Any) -> None:
    config = ExpertParallelConfig(placement="round_robin", all2all_backend=backend)
    check(EVERYTHING, config, dp, tp, [3 + 4 * replica for replica in range(dp)], is_packed=dp != 3)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(("dp", "tp"), [(1, 4), (2, 2)])
def test_copies_change_nothing(dp: int, tp: int, placement: Any, backend: Any) -> None:
    config = ExpertParallelConfig(
        placement=placement, all2all_backend=backend, enable_eplb=True, num_redundant_experts=8
    )
    check(EVERYTHING, config, dp, tp, [9, 14][:dp])


@pytest.mark.parametrize("backend", BACKENDS)
def test_experts_may_be_anywhere(backend: Any) -> None:
    """As they are once they have been moved: the tokens of one position go to one copy, wherever it is."""
    moved = ExpertPlacement(((11, 3, 0, 0), (1, 3, 2, 4), (3, 5, 6, 7), (10, 9, 8, 3)))
    config = ExpertParallelConfig(all2all_backend=backend, enable_eplb=True, num_redundant_experts=4)
    counts = (13, 6)
    inputs = [torch.randn(count, HIDDEN) for count in counts]

    def run(group: ExpertGroup) -> Tensor:
        module = build(EVERYTHING, group)
        full = fill(MixtureOfExperts(EVERYTHING, HIDDEN, Parallel()))
        assert isinstance(full, MixtureOfExperts)
        for mine, theirs in zip(module.experts.parameters(), full.experts.parameters(), strict=True):
            mine.data.copy_(theirs.data[list(moved.experts[group.rank])])
        module.set_placement(moved)
        x = inputs[group.dp.rank]
        out: Tensor = packed(module)(x, batch(len(x), counts))
        return out

    for rank, result in enumerate(on_replicas(2, 2, config, run)):
        expected = whole(EVERYTHING, inputs[rank // 2])
        assert (result - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("backend", BACKENDS)
def test_output_of_a_token_does_not_depend_on_the_batch(backend: Any) -> None:
    """To the last bit: alone, or beside other tokens in its replica and in another one."""
    x = torch.randn(12, HIDDEN)
    counts = ((1, 0), (12, 5))

    def run(group: ExpertGroup) -> list[Tensor]:
        module, out = packed(build(EVERYTHING, group)), []
        for tokens in counts:
            mine = x[: tokens[group.dp.rank]]
            out.append(module(mine, batch(len(mine), tokens)))
        return out

    alone, among = on_replicas(2, 2, ExpertParallelConfig(all2all_backend=backend), run)[0]
    assert torch.equal(alone[0], among[0])


def test_a_token_goes_to_a_rank_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many of its experts are there; and by all_to_all, only where they are."""
    spec = replace(TWELVE, router_bias=True)
    config = ExpertParallelConfig(all2all_backend="all_to_all")

    def run(group: ExpertGroup) -> int:
        module = build(spec, group)
        assert module.router.bias is not None
        module.router.bias.zero_()
        module.router.bias[3:7] = 1e4  # of ranks 1 and 2
        x = torch.randn(8, HIDDEN)
        return len(module._dispatch(x, batch(8, (8, 8))).received().x)

    assert on_replicas(2, 2, config, run) == [0, 16, 16, 0]


def test_half_precision_is_summed_in_float32() -> None:
    """So that replicas round no more than ranks do."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        x = torch.randn(40, HIDDEN)
        spec = replace(EVERYTHING, shared=MLPSpec(intermediate_size=40))
        expected = whole(spec, x).float()
        for backend in BACKENDS:
            config = ExpertParallelConfig(all2all_backend=backend)
            for result in on_replicas(2, 2, config, lambda group: packed(build(spec, group))(x, batch(40, (40, 40)))):
                assert result.dtype == torch.bfloat16
                assert (result.float() - expected).norm() <= 0.02 * expected.norm()
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_quantized_experts_are_spread_alike(backend: Any, quantization: Any) -> None:
    """Whole ones are rounded as on one rank."""
    spec, counts = replace(TWELVE, intermediate_size=32), (11, 4)
    inputs = [torch.randn(count, HIDDEN) for count in counts]
    alone = packed(fill(MixtureOfExperts(spec, HIDDEN, Parallel())), quantization)

    def run(group: ExpertGroup) -> Tensor:
        x = inputs[group.dp.rank]
        out: Tensor = packed(build(spec, group), quantization)(x, batch(len(x), counts))
        return out

    results = on_replicas(2, 2, ExpertParallelConfig(all2all_backend=backend), run)
    with torch.no_grad():
        for rank, result in enumerate(results):
            expected = alone(inputs[rank // 2])
            assert (result - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("num_redundant_experts", [0, 4])
def test_every_expert_has_a_place(placement: Any, num_redundant_experts: int) -> None:
    config = ExpertParallelConfig(placement=placement, num_redundant_experts=num_redundant_experts)
    found = ExpertPlacement.initial(12, 4, config)
    assert found.num_local_experts == 3 + num_redundant_experts // 4
    copies = found.copies(12)
    assert sorted(place for places in copies for place in places) == list(range(12 + num_redundant_experts))
    assert [len(places) for places in copies] == [2] * num_redundant_experts + [1] * (12 - num_redundant_experts)
    flat = [expert for rank in found.experts for expert in rank]
    assert all(flat[place] == expert for expert, places in enumerate(copies) for place in places)
    if not num_redundant_experts:
        assert found.experts[1] == ((3, 4, 5) if placement == "linear" else (1, 5, 9))
