"""Experts that are counted, and moved and doubled between steps: the same outputs, and less for the busiest rank."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from quire import kernels
from quire.engine.architecture.feed_forward_spec import MLPSpec
from quire.engine.config.engine_config import ExpertParallelConfig
from quire.engine.distributed.expert_group import ExpertCommunicator, ExpertGroup
from quire.engine.distributed.expert_placement import ExpertPlacement
from quire.engine.distributed.pipeline import Pipeline
from quire.engine.distributed.threads import ThreadExpertCommunicator
from quire.engine.layers.moe import Experts as ExpertsOfRank
from quire.engine.layers.moe import MixtureOfExperts
from quire.engine.protocol.errors import ConfigError
from quire.engine.protocol.stats import ExpertLoad
from quire.engine.worker.eplb import REPORT_INTERVAL, ExpertLoadBalancer
from tests.fakes.experts import HIDDEN, PLAIN, batch, build, packed
from tests.fakes.ranks import on_replicas

BACKENDS: Any = ("allgather_reducescatter", "all_to_all")
CPU = torch.device("cpu")
ALONE = Pipeline(0, 1, 0, 1, CPU)
SPEC = replace(
    PLAIN,
    num_experts=16,
    top_k=3,
    intermediate_size=32,
    router_bias=True,
    bias=True,
    shared=MLPSpec(intermediate_size=64, bias=True),
)


def skewed(group: ExpertGroup, quantization: kernels.Quantization | None = None) -> MixtureOfExperts:
    """Tokens prefer the first experts, which are one rank's."""
    module = build(SPEC, group)
    assert module.router.bias is not None
    module.router.bias.copy_(torch.arange(SPEC.num_experts) * -0.6)
    packed(module, quantization)
    return module


def balanced(**settings: Any) -> ExpertParallelConfig:
    return ExpertParallelConfig(**{"enable_eplb": True, "step_interval": 5, **settings})


def serve(
    config: ExpertParallelConfig,
    dp: int,
    tp: int,
    steps: int,
    *,
    layers: int = 1,
    quantization: kernels.Quantization | None = None,
) -> list[tuple[list[Tensor], list[ExpertLoad], list[ExpertPlacement]]]:
    """The outputs of each rank's layers in each step, its reported loads, and the last placement of experts.

    Every step has the same tokens, uneven over the replicas.
    """
    counts = [40, 23][:dp]
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(count, HIDDEN, generator=generator) for count in counts]

    def run(group: ExpertGroup) -> tuple[list[Tensor], list[ExpertLoad], list[ExpertPlacement]]:
        modules = {2 * number + 1: skewed(group, quantization) for number in range(layers)}
        balancer = ExpertLoadBalancer(modules, dict.fromkeys(modules, SPEC.num_experts), group, ALONE, CPU)
        balancer.finalize()
        x = inputs[group.dp.rank]
        outs, reported = [], []
        for _ in range(steps):
            load = balancer.step()
            reported += [load] if load is not None else []
            outs.append(torch.stack([module(x, batch(len(x), counts)) for module in modules.values()]))
        return outs, reported, [module.placement for module in modules.values() if module.placement is not None]

    return on_replicas(dp, tp, config, run)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("dp", "tp"), [(1, 2), (1, 4), (2, 2)])
@pytest.mark.parametrize("num_redundant_experts", [0, 4])
def test_busy_experts_move_and_outputs_stay(dp: int, tp: int, num_redundant_experts: int, backend: Any) -> None:
    ranks = serve(balanced(all2all_backend=backend, num_redundant_experts=num_redundant_experts), dp, tp, 12, layers=2)
    first_told = ranks[0][1]
    assert len(first_told) == 2
    assert first_told[0].moved == 0
    assert first_told[1].moved > 0
    assert first_told[0].imbalance > (1.3 if not num_redundant_experts else 1.1)
    assert first_told[1].imbalance < min(1.2, first_told[0].imbalance)
    for outs, reported, placements in ranks:
        # Bit for bit while nothing moves; then the sum over ranks has another order.
        assert all(torch.equal(out, outs[0]) for out in outs[:5])
        assert all(torch.equal(out, outs[7]) for out in outs[7:])
        assert not torch.equal(outs[0], outs[7])
        assert max((out - outs[0]).abs().max() for out in outs) <= 1e-6 * outs[0].abs().max()
        assert reported == first_told
        assert placements == ranks[0][2]
        assert sorted({e for rank in placements[0].experts for e in rank}) == list(range(SPEC.num_experts))


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_experts_move_as_they_are(quantization: kernels.Quantization) -> None:
    """They are not rounded again."""
    for outs, reported, _ in serve(balanced(num_redundant_experts=4), 2, 2, 8, quantization=quantization):
        assert reported[0].imbalance > 1.3
        assert not torch.equal(outs[-1], outs[0])
        assert (outs[-1] - outs[0]).abs().max() <= 2e-6 * outs[0].abs().max()


def test_a_layer_moves_with_a_step() -> None:
    """So that no step waits for all of them; where steps are few, several do."""
    moved: list[int] = []
    for steps in range(6, 10):
        placements = serve(balanced(), 1, 2, steps, layers=3)[0][2]
        first = ExpertPlacement.initial(SPEC.num_experts, 2, balanced())
        moved.append(sum(placement != first for placement in placements))
    assert moved == [1, 2, 3, 3]
    _, reported, placements = serve(balanced(step_interval=2), 1, 2, 4, layers=3)[0]
    assert first not in placements
    assert len(reported) == 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_every_token_is_counted_once(dp: int, tp: int, backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without EPLB too; nothing moves then."""
    monkeypatch.setattr("quire.engine.worker.eplb.REPORT_INTERVAL", 3)
    ranks = serve(ExpertParallelConfig(all2all_backend=backend, step_interval=1), dp, tp, 8, layers=2)
    for outs, reported, placements in ranks:
        assert all(torch.equal(out, outs[0]) for out in outs)
        assert placements == [ExpertPlacement.initial(SPEC.num_experts, dp * tp, ExpertParallelConfig())] * 2
        assert [load.moved for load in reported] == [0, 0]
        for steps, load in zip((3, 6), reported, strict=True):
            assert load.layers == {1: SPEC.num_experts, 3: SPEC.num_experts}
            tokens = array("q", load.tokens).tolist()
            assert sum(tokens[: SPEC.num_experts]) == steps * sum([40, 23][:dp]) * SPEC.top_k
            assert tokens[: SPEC.num_experts] == tokens[SPEC.num_experts :]
            assert 1.0 <= load.imbalance <= dp * tp
        assert reported[0].imbalance == reported[1].imbalance
    assert REPORT_INTERVAL >= 50  # as the exchange takes time


def test_only_the_last_stage_reports_expert_load() -> None:
    """The second stage tells of both."""
    sent: list[Tensor] = []

    class Stage(Pipeline):
        def send(self, message: Tensor) -> None:
            sent.append(message)

        def receive(self, shape: tuple[int, ...], dtype: torch.dtype, *, is_patient: bool = False) -> Tensor:
            assert (sent[0].shape, sent[0].dtype) == (shape, dtype)
            return sent.pop(0)

    def run(group: ExpertGroup) -> ExpertLoad | None:
        reported = None
        counts: dict[int, int] = {}
        stages = []
        for number in range(3):
            here = {} if number == 1 else {number: build(PLAIN, group)}
            counts = counts | dict.fromkeys(here, PLAIN.num_experts)
            stages.append((here, ExpertLoadBalancer(here, counts, group, Stage(number, 3, number, 1, CPU), CPU)))
            stages[-1][1].finalize()
        for step in range(4):
            for here, balancer in stages:
                reported = balancer.step()
                assert (reported is None) == (step != 3 or balancer is not stages[-1][1])
                for number, layer in here.items():
                    layer(torch.randn(5 + number, HIDDEN), batch(5 + number, ()))
        return reported

    (reported,) = on_replicas(1, 1, balanced(step_interval=3), run)
    assert reported is not None
    assert reported.layers == {0: 6, 2: 6}
    tokens = array("q", reported.tokens).tolist()
    assert sum(tokens[:6]) == 3 * 5 * PLAIN.top_k
    assert sum(tokens[6:]) == 3 * 7 * PLAIN.top_k
    assert reported.imbalance == 1.0
    assert sent == []


@pytest.mark.parametrize("interval", [1, 2])
def test_steps_before_the_ranks_have_settled_are_not_counted_and_move_nothing(interval: int) -> None:
    """They are made up: the largest step and its end, and decodes."""

    def run(group: ExpertGroup) -> tuple[list[ExpertLoad | None], list[ExpertPlacement | None]]:
        layer = skewed(group)
        balancer = ExpertLoadBalancer({0: layer}, {0: SPEC.num_experts}, group, ALONE, CPU)
        reported, placements = [], [layer.placement]
        for number, tokens in enumerate([500, 0, 5, 5, 5, 40, 40, 40]):
            if number == 5:
                balancer.finalize()
            reported.append(balancer.step())
            placements.append(layer.placement)
            layer(torch.randn(tokens, HIDDEN), batch(tokens, (tokens,)))
        return reported, placements

    for reported, placements in on_replicas(1, 2, balanced(step_interval=interval), run):
        first = 5 + interval
        assert reported[:first] == [None] * first
        load = reported[first]
        assert load is not None
        assert sum(array("q", load.tokens)) == interval * 40 * SPEC.top_k
        assert placements[: first + 1] == placements[:1] * (first + 1)
        assert placements[first + 1] != placements[0]


def test_ranks_with_different_weight_layouts_do_not_move_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(group: ExpertGroup) -> None:
        layer = build(PLAIN, group)
        if group.rank == 1:
            packed(layer)
        ExpertLoadBalancer({0: layer}, {0: PLAIN.num_experts}, group, ALONE, CPU).finalize()

    with pytest.raises(ConfigError, match="--enable-eplb: experts cannot move between ranks whose processors"):
        on_replicas(1, 2, balanced(), run)
    monkeypatch.setattr(ExpertsOfRank, "layout", "same")
    on_replicas(1, 2, balanced(), run)


def test_memory_of_moving_experts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that leaves, one that comes, and one laid beside."""
    most: list[int] = []
    exchange = ThreadExpertCommunicator.all_to_all

    def watched(peers: ExpertCommunicator, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        if x.dtype == torch.uint8:
            most.append(max(sum(sent), sum(received)))
        return exchange(peers, x, sent, received)

    monkeypatch.setattr(ThreadExpertCommunicator, "all_to_all", watched)
    serve(balanced(num_redundant_experts=8), 1, 4, 8)
    assert max(most) == 1
