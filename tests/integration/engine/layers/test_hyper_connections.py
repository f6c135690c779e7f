"""Hyper-connections against those of transformers, and what their weights mean."""

from __future__ import annotations

import pytest
import torch
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection, DeepseekV4HyperHead

from quire.engine.layers.residual import HyperConnection, HyperHead
from quire.engine.models.model_spec import HyperConnectionSpec
from quire.engine.models.spec_parts import NormSpec

SPEC = HyperConnectionSpec(num_streams=3, iterations=6, eps=1e-6, norm=NormSpec(eps=1e-5, has_weight=False))
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
    parameters = (sum(each.numel() for each in kind(SPEC, WIDTH).parameters()) for kind in (HyperConnection, HyperHead))
    connection, head = parameters
    assert SPEC.num_parameters(WIDTH) == 2 * connection
    assert SPEC.num_last_parameters(WIDTH) == head
