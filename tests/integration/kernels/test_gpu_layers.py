"""Quantized layers as they are packed for GPUs, on tensors of the CPU, by the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quire import kernels
from quire.engine.architecture.spec_parts import NormSpec
from quire.engine.distributed.communicator import Parallel
from quire.engine.layers.linear import GatedLinear, Partition, RowParallelLinear
from quire.engine.layers.norm import RMSNorm
from quire.kernels import coded_words, experts, linear, packed_state, reference
from quire.kernels.quantized import VALUES, QuantizedWeight
from tests.integration.kernels.test_quantized import close, random_weight

Place = Callable[[tuple[int, int]], None]


@pytest.fixture(autouse=True, scope="module")
def implementation() -> str:
    return "reference"


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Place:
    """Packs for a GPU of compute capability 9.0, or another one."""

    def place(capability: tuple[int, int]) -> None:
        monkeypatch.setattr(linear, "gpu_capability", lambda device: capability)

    place((9, 0))
    return place


def rounding(values: str, *shape: int, groups: int = 1) -> QuantizedWeight:
    weight = random_weight(values, *shape, groups=groups)
    scales = weight.scales / VALUES[values].nan_to_num().abs().max()
    return replace(weight, activations=values, scales=scales.half().float())


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize(("groups", "factors"), [(1, 0), (3, 1), (3, 2)])
def test_codes_are_widened(values: str, groups: int, factors: int) -> None:
    weight = replace(rounding(values, 26, 96, groups=groups), activations=None)
    if factors == 2:
        weight = replace(weight, offsets=torch.randint(-16, 1, weight.scales.shape).float())
    x, bias = torch.randn(5, 96), torch.randn(26)
    product = kernels.pack_linear(weight)
    assert type(product) is linear.CodedWordsLinear
    both = F.linear(x.double(), weight.dequantize().double(), bias.double())
    close(product(x, bias), both, torch.float32)
    close(product(x, None), both - bias, torch.float32)
    close(kernels.pack_gated(weight, "silu")(x, bias), reference.act_mul(both, "silu"), torch.float32)
    other = kernels.pack_linear(replace(weight, codes=torch.zeros_like(weight.codes)))
    other = packed_state.with_tensors(other, packed_state.tensors_of(product))
    assert torch.equal(other(x, bias), product(x, bias))


@pytest.mark.parametrize(("values", "inputs", "groups"), [("int8", 40, 1), ("fp8", 40, 1), ("fp8", 256, 2)])
def test_inputs_are_rounded_where_the_publisher_does(values: str, inputs: int, groups: int) -> None:
    weight = rounding(values, 26, inputs, groups=groups)
    x, bias = torch.randn(5, inputs), torch.randn(26)
    product = kernels.pack_linear(weight)
    assert type(product) is linear.RoundedLinear
    codes, scales = coded_words.round_rows(x, coded_words.typed_codes(weight).dtype, groups)
    plain = (codes.double().view(5, groups, -1) * scales[..., None]).flatten(1)
    both = F.linear(plain, weight.dequantize().double(), bias.double())
    close(product(x, bias), both, torch.float32)
    assert (product(x, bias) - F.linear(x, weight.dequantize(), bias)).norm() > 1e-3 * both.norm()
    close(kernels.pack_gated(weight, "silu")(x, bias), reference.act_mul(both, "silu"), torch.float32)
    assert sum(each.nbytes for each in packed_state.tensors_of(product)) == weight.codes.nbytes + weight.scales.nbytes
    assert packed_state.tensors_of(product)[0].data_ptr() == weight.codes.data_ptr()


def test_inputs_are_not_rounded_where_nothing_multiplies_them(gpu: Place) -> None:
    for weight in (
        rounding("fp8", 6, 256, groups=4),
        rounding("int8", 6, 256, groups=2),
        replace(rounding("fp8", 6, 256), activations=None),
        replace(rounding("int8", 6, 256), offsets=torch.ones(6, 1)),
        replace(random_weight("int4", 6, 256), activations="int8"),
    ):
        assert type(kernels.pack_linear(weight)) is linear.CodedWordsLinear
    gpu((8, 6))
    assert type(kernels.pack_linear(rounding("int8", 6, 40))) is linear.RoundedLinear
    assert type(kernels.pack_linear(rounding("fp8", 6, 40))) is linear.CodedWordsLinear


@pytest.mark.parametrize("is_padded", [False, True])
def test_columns_in_another_order_take_their_inputs(is_padded: bool) -> None:
    weight, inputs = random_weight("int4", 40, 64, groups=4), 61 if is_padded else 64
    columns = torch.randperm(64).clamp(max=inputs)
    x = torch.randn(5, inputs)
    plain = torch.zeros(40, 65).index_add(1, columns, weight.dequantize())[:, :inputs]
    product = kernels.pack_gated(replace(weight, columns=columns), "silu")
    close(product(x, None), reference.act_mul(F.linear(x, plain), "silu"), torch.float32)


def mixture(kind: str) -> tuple[QuantizedWeight, QuantizedWeight]:
    """Gates and ups `[3, 2 * 128, 256]`, and downs `[3, 256, 128]`."""
    groups = {"uint4": 4, "fp8": 2}.get(kind, 1)
    made = []
    for shape, count in (((3, 256, 256), groups), ((3, 256, 128), max(1, groups // 2))):
        weight = rounding(kind, *shape, groups=count)
        made.append(replace(weight, offsets=torch.full_like(weight.scales, -7)) if kind == "uint4" else weight)
    return made[0], made[1]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("kind", "packed"),
    [("uint4", experts.CodedWordsExperts), ("int8", experts.RoundedExperts), ("fp8", experts.RoundedExperts)],
)
def test_experts(
    kind: str, packed: type[kernels.PackedExperts], has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the weights that they stand for, so inputs are not rounded here."""
    monkeypatch.setattr(coded_words, "round_rows", lambda x, dtype, groups: (x.float(), torch.ones(len(x), groups)))
    gate_up, down = mixture(kind)
    biases = (torch.randn(3, 256), torch.randn(3, 256)) if has_bias else (None, None)
    x, ids, weights = torch.randn(7, 256), torch.randint(-1, 4, (7, 2)), torch.rand(7, 2)
    product = kernels.pack_experts(gate_up, down, "silu", gate_up_bias=biases[0], down_bias=biases[1])
    assert type(product) is packed
    found = product(x, weights, ids)
    expected = reference.fused_experts(x, weights, ids, gate_up.dequantize(), down.dequantize(), "silu", *biases)
    assert (found - expected).norm() <= 1e-5 * expected.norm()
    first, second = (replace(each, codes=each.codes.flip(0), scales=each.scales.flip(0)) for each in (gate_up, down))
    flipped = [None if bias is None else bias.flip(0) for bias in biases]
    moved = kernels.pack_experts(first, second, "silu", gate_up_bias=flipped[0], down_bias=flipped[1])
    assert moved.layout == product.layout
    for place in (0, 2):
        moved.restore(place, [each.clone() for each in product.state(place)])
    assert all(each.is_contiguous() for each in product.state(1))
    assert torch.equal(moved(x, weights, ids), found)


def test_experts_of_which_one_matrix_cannot_be_rounded_are_widened() -> None:
    gate_up, _ = mixture("fp8")
    _, down = mixture("uint4")
    assert type(kernels.pack_experts(gate_up, down, "silu")) is experts.CodedWordsExperts


def test_layouts_of_other_formats_differ() -> None:
    first, second = (random_weight(values, 2, 64, 64, groups=2) for values in ("int4", "e2m1"))
    assert kernels.pack_experts(first, first, "silu").layout != kernels.pack_experts(second, second, "silu").layout


@pytest.mark.parametrize("kind", ["uint4", "int8", "fp8"])
def test_everything_is_on_the_device(kind: str) -> None:
    """By tensors without content, which do not mix with others."""
    gate_up, down = (
        replace(each, codes=each.codes.to("meta"), scales=each.scales.to("meta"), offsets=None, wide=True)
        for each in mixture(kind)
    )
    product = kernels.pack_experts(gate_up, down, "silu")
    one = kernels.pack_gated(gate_up.at(0), "silu")
    tensors: list[Tensor] = [*product.state(0), *packed_state.tensors_of(one)]
    assert {each.device.type for each in tensors} == {"meta"}
    assert one(torch.empty(3, 256, device="meta"), None).shape == (3, 128)


def test_adapters_read_the_rows_that_a_norm_rounds() -> None:
    """Where a layer has a pool; without one, nothing but the rounded rows is kept. Rows without adapters stay the
    same."""
    norm = RMSNorm(NormSpec(eps=1e-6), 256)
    gate_up = GatedLinear(256, Partition("gate", 128, 0, 128), Partition("up", 128, 0, 128), "silu", bias=False)
    down = RowParallelLinear(128, 40, Parallel(), bias=False)
    assert norm.weight is not None
    norm.weight.data.uniform_(0.5, 1.5)
    gate_up._product = kernels.pack_gated(rounding("fp8", 256, 256, groups=2), "silu")
    down._product = kernels.pack_linear(rounding("fp8", 40, 128))
    norm.feed(gate_up)
    x, rows = torch.randn(5, 256), kernels.AdapterRows.of(torch.tensor([1, -1, 0, 1, -1]), 2)

    def outputs(adapters: kernels.AdapterRows | None) -> Tensor:
        normed = norm(x)
        assert isinstance(normed, kernels.RoundedRows)
        assert (normed.plain is not None) == (gate_up.pool is not None)
        return down(gate_up.forward_to(down, normed, adapters), adapters)  # type: ignore[no-any-return]

    plain = outputs(None)
    both = gate_up._product.gates_and_ups(norm(x), None)
    for layer, ins, widths in ((gate_up, 256, (128, 128)), (down, 128, (40,))):
        layer.pool = kernels.LowRankPool.allocate(2, 3 * len(widths), ins, widths, torch.float32, x.device, 3)
        layer.pool.assign(1, 0, [(torch.randn(3, ins) * 0.1, torch.randn(width, 3)) for width in widths])
    assert outputs(None).equal(plain)
    found, normed = outputs(rows), kernels.rms_norm(x, norm.weight, 1e-6, 0.0)
    assert found[[1, 2, 4]].equal(plain[[1, 2, 4]])
    assert gate_up.pool is not None
    kernels.add_low_rank(both, normed, gate_up.pool, rows)
    inner = kernels.act_mul(both, "silu")
    expected = down._product(inner, None)
    assert down.pool is not None
    kernels.add_low_rank(expected, inner, down.pool, rows)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert not found[0].allclose(plain[0], atol=0.1)
