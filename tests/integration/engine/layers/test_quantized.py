"""The parameters of quantized weights: columns in the order of their groups."""

from __future__ import annotations

import torch

from quire.engine.architecture.quantization.form import Form
from quire.engine.layers.moe import ExpertMatrices
from quire.engine.layers.quantized import keep_quantized
from quire.engine.layers.weight import Shard, Weight
from quire.kernels import pack_linear

ROWS, COLUMNS, GROUP = 16, 128, 64


def test_experts_have_orders_of_their_own() -> None:
    """On a rank that has a part of each group: the second expert's 32 and 96 columns are other numbers of whole pieces
    than the first one's."""
    torch.manual_seed(0)
    shards = [Shard((ROWS, 2 * COLUMNS), 0, COLUMNS, dim=1, expert=expert, local_expert=expert) for expert in range(2)]
    form = Form(
        values="uint4",
        bits=4,
        group=GROUP,
        has_offsets=True,
        wide=False,
        has_order=True,
        inputs=2 * COLUMNS,
        activations=None,
        has_rounding=False,
    )
    group = torch.arange(2 * COLUMNS) // GROUP
    order = torch.stack([group[::2], group[32 : 32 + COLUMNS][torch.randperm(COLUMNS)]])
    matrices = ExpertMatrices(Weight((2, ROWS, COLUMNS), *shards), None)
    quantized = keep_quantized(matrices, form, order, None)
    codes = torch.randint(16, (2, ROWS, COLUMNS), dtype=torch.uint8)
    scales, offsets = torch.rand(2, ROWS, 4).half().float(), torch.randint(-15, 0, (2, ROWS, 4)).float()
    for part, values in zip(quantized.parts(), (codes, scales, offsets), strict=True):
        part[1].data.copy_(values)
    weight, x = quantized.weight(), torch.randn(3, COLUMNS)
    assert not quantized.codes.numel()
    for expert in range(2):
        own = order[expert]
        expected = (codes[expert] + offsets[expert][:, own]) * scales[expert][:, own]
        torch.testing.assert_close(pack_linear(weight.at(expert))(x, None), x @ expected.T, rtol=1e-3, atol=1e-2)
