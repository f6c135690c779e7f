"""Residual paths as formulas over the plain layer."""

from __future__ import annotations

from dataclasses import replace

import torch

from quire.engine.architecture.residual_spec import ScaledResidualSpec
from quire.engine.distributed.communicator import Parallel
from quire.engine.models.decoder_layer import DecoderLayer, LayerStep
from quire.engine.models.gemma_layers import ScaledResidualLayer
from tests.fakes.configs import TINY_ATTENTION, TINY_LAYER
from tests.integration.engine.layers.test_sharding import fill, prefill


@torch.no_grad()
def test_a_scalar_multiplies_the_whole_stream() -> None:
    """Gemma 4 multiplies the residual stream, not only the layer's contribution to it."""
    x, residual = torch.randn(2, 5, 32)
    spec = replace(TINY_LAYER, residual=ScaledResidualSpec(layer_input=None))
    plain, scaled = DecoderLayer(TINY_LAYER, 32, Parallel()), ScaledResidualLayer(spec, 32, Parallel())
    for layer in (plain, scaled):
        fill(layer)
    scaled.scalar.fill_(0.25)
    sums = []
    for layer in (plain, scaled):
        added, stream = layer(x, residual, LayerStep(*prefill(TINY_ATTENTION, len(x))))
        sums.append(added + stream)
    torch.testing.assert_close(sums[1], 0.25 * sums[0])
