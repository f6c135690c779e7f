"""Hyper-connections against transformers', and the meaning of their weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import DeepseekV4Config, Qwen4ExpTextConfig
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection, DeepseekV4HyperHead
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextHyperHead
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextGatedResidual

from quire.engine.architecture.residual_spec import GatedConnectionSpec, HyperConnectionSpec
from quire.engine.architecture.spec_parts import NormSpec, Parameters
from quire.engine.layers.residual import GatedConnection, GatedHead, HyperConnection, HyperHead

SPEC = HyperConnectionSpec(num_streams=3, iterations=6, eps=1e-6, norm=NormSpec(eps=1e-5, has_weight=False))
GATED = GatedConnectionSpec(num_streams=3, rank=6, norm=NormSpec(eps=1e-5, offset=1.0))
WIDTH = 20


def config() -> DeepseekV4Config:
    return DeepseekV4Config(hidden_size=WIDTH, hc_mult=3, hc_sinkhorn_iters=6, hc_eps=1e-6, rms_norm_eps=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_streams_are_those_of_transformers(dtype: torch.dtype) -> None:
    ours, theirs = HyperConnection(SPEC, WIDTH), DeepseekV4HyperConnection(config())
    for mine, other in ((ours.function, theirs.fn), (ours.base, theirs.base), (ours.scale, theirs.scale)):
        other.data.normal_()
        mine.data.copy_(other)
    x, output = torch.randn(7, 3 * WIDTH).to(dtype), torch.randn(7, WIDTH).to(dtype)
    streams = x.view(1, 7, 3, WIDTH)
    post, comb, expected = theirs(streams)
    found, mixing = ours.before(x)
    torch.testing.assert_close(found, expected[0])
    assert mixing.mixed is not None
    assert (mixing.mixed.sum(1) - 1).abs().max() < 1e-4
    after = post[..., None] * output.float()[:, None] + comb.mT @ streams.float()  # transformers rounds the weights
    torch.testing.assert_close(ours.after(output, mixing), after[0].flatten(1).to(dtype))


def test_the_last_sum_is_that_of_transformers() -> None:
    ours, theirs = HyperHead(SPEC, WIDTH), DeepseekV4HyperHead(config())
    for mine, other in ((ours.function, theirs.hc_fn), (ours.base, theirs.hc_base), (ours.scale, theirs.hc_scale)):
        other.data.normal_()
        mine.data.copy_(other)
    x = torch.randn(7, 3 * WIDTH)
    torch.testing.assert_close(ours.merge(x), theirs(x.view(1, 7, 3, WIDTH))[0])


def test_parameters_are_counted() -> None:
    def held(*modules: nn.Module) -> int:
        return sum(each.numel() for module in modules for each in module.parameters())

    def described(parameters: Parameters) -> int:
        return sum(each.elements(1) for each in parameters)

    assert described(SPEC.parameters(WIDTH)) == 2 * held(HyperConnection(SPEC, WIDTH))
    assert described(SPEC.last_parameters("merger", WIDTH)) == held(HyperHead(SPEC, WIDTH))
    averaging = replace(SPEC, averages=True)
    assert described(averaging.last_parameters("merger", WIDTH)) == held(HyperHead(averaging, WIDTH)) == 0
    assert described(GATED.parameters(WIDTH)) == 2 * held(GatedConnection(GATED, WIDTH))
    assert described(GATED.last_parameters("merger", WIDTH)) == held(GatedHead(GATED, WIDTH))


def test_the_last_mean_is_that_of_transformers() -> None:
    x = torch.randn(7, 3 * WIDTH)
    found = HyperHead(replace(SPEC, averages=True), WIDTH).merge(x)
    torch.testing.assert_close(found, Glm5NextTextHyperHead()(x.view(1, 7, 3, WIDTH))[0])


def gated(*, is_last: bool) -> tuple[GatedConnection | GatedHead, Qwen4ExpTextGatedResidual]:
    """Ours and transformers', with the same random weights."""
    config = Qwen4ExpTextConfig(hidden_size=WIDTH, hc_count=3, hc_lowrank=6, rms_norm_eps=1e-5)
    theirs = Qwen4ExpTextGatedResidual(config, use_combine=not is_last)
    ours = GatedHead(GATED, WIDTH) if is_last else GatedConnection(GATED, WIDTH)
    names = {"norm": "hc_norm", "down": "input_mix_weight_down", "up": "input_mix_weight_up"}
    for mine, other in (names if is_last else names | {"outputs": "block_inject_weight"}).items():
        weight, own = theirs.get_submodule(other).weight, ours.get_submodule(mine).weight
        assert isinstance(weight, torch.Tensor)
        assert isinstance(own, torch.Tensor)
        weight.data.normal_()
        own.data.copy_(weight)
    return ours, theirs


def test_gated_streams_are_those_of_transformers() -> None:
    ours, theirs = gated(is_last=False)
    assert isinstance(ours, GatedConnection)
    x, output = torch.randn(7, 3 * WIDTH), torch.randn(7, WIDTH)
    expected, _, weights = theirs(x)
    found, mixing = ours.before(x)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(ours.after(output, mixing), x + (output[:, None] * weights[..., None]).flatten(1))


def test_the_last_gated_mean_is_that_of_transformers() -> None:
    ours, theirs = gated(is_last=True)
    assert isinstance(ours, GatedHead)
    x = torch.randn(7, 3 * WIDTH)
    torch.testing.assert_close(ours.merge(x), theirs(x))
