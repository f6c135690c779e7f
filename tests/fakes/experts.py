"""Mixtures of experts for tests, and the surroundings that a layer needs. No transformers here: it imports slowly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from quire import kernels
from quire.engine.architecture.feed_forward_spec import MLPSpec, MoESpec
from quire.engine.distributed.expert_group import ExpertGroup
from quire.engine.layers.batch import Batch
from quire.engine.layers.linear import Linear
from quire.engine.layers.moe import Experts as ExpertsOfRank
from quire.engine.layers.moe import MixtureOfExperts
from tests.integration.engine.layers.test_sharding import fill

HIDDEN = 32
PLAIN = MoESpec(num_experts=6, top_k=2, intermediate_size=24, activation="silu", scoring="softmax", renormalize=True)
SHARED = replace(PLAIN, shared=MLPSpec(intermediate_size=40), shared_gate=True)
EVERYTHING = replace(
    SHARED,
    num_experts=12,
    top_k=3,
    activation="swiglu_oai",
    scoring="sigmoid",
    scale=2.5,
    groups=4,
    top_groups=2,
    group_score="top2_sum",
    correction_bias=True,
    router_bias=True,
    bias=True,
    shared=MLPSpec(intermediate_size=40, bias=True),
)


def packed(module: nn.Module, quantization: kernels.Quantization | None = None) -> nn.Module:
    """As the loader does."""
    for part in module.modules():
        if isinstance(part, Linear | ExpertsOfRank):
            part.pack(quantization)
    return module


def build(spec: MoESpec, group: ExpertGroup) -> MixtureOfExperts:
    """The layer as a rank of the group has it."""
    module = fill(MixtureOfExperts(spec, HIDDEN, group.tp, group))
    assert isinstance(module, MixtureOfExperts)
    return module


def batch(tokens: int, replica_tokens: Sequence[int]) -> Batch:
    """The parts of a batch that experts read."""
    none, place = torch.empty(0, dtype=torch.int64), torch.arange(tokens)
    return Batch(place, place, none, none, none, replica_tokens=tuple(replica_tokens))
