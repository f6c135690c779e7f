"""Operations with recurrent states: the compiled ones against the reference, and the reference against formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from quire import kernels
from quire.kernels import RecurrentState, StateSegments, allocate_kv_cache, recurrent_states, reference
from tests.integration.kernels.conftest import platforms_only, reference_only

SIZES = {"heads": 4, "key_heads": 2, "key_dim": 24, "value_dim": 40}
CHANNELS, CONV = 2 * 2 * 24 + 4 * 40, 4


def segments(lengths: list[list[int]], read: list[int], write: list[int]) -> StateSegments:
    """`lengths` are the lengths of the segments of each row."""
    flat = [length for row in lengths for length in row]
    starts = torch.tensor([0, *flat]).cumsum(0)
    rows = torch.tensor([0, *map(len, lengths)]).cumsum(0)
    return StateSegments(starts, rows, torch.tensor(read), torch.tensor(write))


STEPS = {
    "decodes": segments([[1]] * 5, [3, 1, -1, 4, 6], [3, 2, 0, 5, -1]),
    "a prompt": segments([[150]], [-1], [2]),
    "short": segments([[5, 16, 2], [1], [6]], [-1, 4, 5, 2, 1], [4, 5, 0, 2, 3]),
    "mixed": segments([[70, 16, 3], [1], [64], [5, 1]], [-1, 4, 5, 1, 2, 6, 3], [4, 5, 0, 1, 2, 3, 6]),
}


def state(dtype: torch.dtype, seed: int = 0) -> RecurrentState:
    """Random states in the memory of a KV cache, with a page more than the tests use."""
    sizes = SIZES["heads"], SIZES["key_dim"], SIZES["value_dim"]
    cache = allocate_kv_cache(2, 8 * 10, 2, 16, 32, dtype, torch.device("cpu"))
    found = recurrent_states(cache[1], 10, sizes, (CONV - 1, CHANNELS), dtype)
    generator = torch.Generator().manual_seed(seed)
    found.matrices.copy_(torch.randn(found.matrices.shape, generator=generator))
    found.inputs.copy_(torch.randn(found.inputs.shape, generator=generator))
    return found


def attention_inputs(tokens: int, dtype: torch.dtype, *, per_feature: bool, has_beta: bool) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(1)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    heads, key_heads, key_dim, value_dim = SIZES.values()
    mixed = randn(tokens, 2 * key_heads * key_dim + heads * value_dim).to(dtype)
    query, key, value = mixed.split_with_sizes((key_heads * key_dim, key_heads * key_dim, heads * value_dim), dim=-1)
    decay = -randn(tokens, heads, key_dim).exp() if per_feature else -randn(tokens, heads).exp()
    return [
        torch.unflatten(query, -1, (key_heads, key_dim)),
        torch.unflatten(key, -1, (key_heads, key_dim)),
        torch.unflatten(value, -1, (heads, value_dim)),
        decay,
        randn(tokens, heads).sigmoid() if has_beta else None,
    ]


def assert_alike(run: Callable[[Any, RecurrentState], Tensor], dtype: torch.dtype) -> None:
    """The compiled operation gives the outputs and states of the reference, and writes to no other page."""
    out_state, expected_state = state(dtype), state(dtype)
    out, expected = run(kernels, out_state), run(reference, expected_state)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(out_state.matrices, expected_state.matrices, rtol=1e-4, atol=1e-5)
    assert torch.equal(out_state.inputs, expected_state.inputs)


def one_row(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


TWO_STEPS = (0, 5, segments([[5]], [-1], [1])), (5, 12, segments([[7]], [1], [1]))
"""First and last token, and segments, of 12 tokens in two steps, with the state between them in page 1."""


@reference_only
def test_convolution_is_the_formula() -> None:
    x, weight, bias = one_row(12, CHANNELS, seed=1), one_row(CHANNELS, CONV, seed=2), one_row(CHANNELS, seed=3)
    kept = state(torch.float32)
    found = [reference.causal_conv(x[a:b], weight, bias, kept.inputs, step, silu=False) for a, b, step in TWO_STEPS]
    padded = torch.nn.functional.pad(x.T.double()[None], (CONV - 1, 0))
    expected = torch.nn.functional.conv1d(padded, weight.double()[:, None], bias.double(), groups=CHANNELS)[0].T
    torch.testing.assert_close(torch.cat(found).double(), expected, rtol=1e-5, atol=1e-5)
    found = [reference.causal_conv(x[a:b], weight, bias, kept.inputs, step) for a, b, step in TWO_STEPS]
    torch.testing.assert_close(torch.cat(found).double(), expected * expected.sigmoid(), rtol=1e-5, atol=1e-5)


@reference_only
@pytest.mark.parametrize("per_feature", [False, True])
@pytest.mark.parametrize(("is_delta", "has_beta"), [(True, True), (False, True), (False, False)])
def test_linear_attention_is_the_formula(per_feature: bool, is_delta: bool, has_beta: bool) -> None:
    """By matrices: a token multiplies the state by its decay and, with the delta rule, by I - beta * key ⊗ key."""
    query, key, value, decay, beta = given = attention_inputs(
        12, torch.float32, per_feature=per_feature, has_beta=has_beta
    )
    assert query is not None
    assert key is not None
    assert value is not None
    assert decay is not None
    kept, found = state(torch.float32), []
    run: Any = reference.linear_attention
    for first, last, step in TWO_STEPS:
        part = [None if each is None else each[first:last] for each in given]
        found.append(run(*part, kept.matrices, step, 0.3, 1e-6, is_delta=is_delta))
    for head in range(SIZES["heads"]):
        matrix = torch.zeros(SIZES["key_dim"], SIZES["value_dim"], dtype=torch.float64)
        of_keys = head * SIZES["key_heads"] // SIZES["heads"]
        for token, out in enumerate(torch.cat(found)[:, head]):
            q, k = (x[token, of_keys].double() / x[token, of_keys].double().norm() for x in (query, key))
            share = 1.0 if beta is None else float(beta[token, head])
            matrix = decay[token, head].double().exp().expand(len(k))[:, None] * matrix
            if is_delta:
                matrix = (torch.eye(len(k), dtype=torch.float64) - share * torch.outer(k, k)) @ matrix
            matrix = matrix + share * torch.outer(k, value[token, head].double())
            torch.testing.assert_close(out.double(), 0.3 * matrix.T @ q, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(kept.matrices[1, head].double(), matrix, rtol=1e-4, atol=1e-5)


@reference_only
def test_selective_scan_is_the_formula() -> None:
    """Every earlier token adds its decayed contribution."""
    size, channels = 6, 10
    x, steps, rates = (
        one_row(12, channels, seed=1),
        one_row(12, channels, seed=2).sigmoid(),
        -one_row(size, channels, seed=3).exp(),
    )
    key, query, kept = one_row(12, size, seed=4), one_row(12, size, seed=5), torch.randn(3, 1, size, channels)
    found = [
        reference.selective_scan(x[a:b], steps[a:b], rates, key[a:b], query[a:b], kept, step)
        for a, b, step in TWO_STEPS
    ]
    for token, out in enumerate(torch.cat(found)):
        expected = torch.zeros(channels, dtype=torch.float64)
        for other in range(token + 1):
            since = (rates.double() * steps[other + 1 : token + 1].double().sum(0)).exp()
            expected += (query[token] * key[other]).double() @ since * steps[other].double() * x[other].double()
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@reference_only
def test_wkv_is_the_formula() -> None:
    """A weighted mean of the values so far."""
    channels, kept = 10, torch.randn(3, 1, 3, 10)
    key, value = (one_row(12, channels, seed=seed) for seed in (1, 2))
    decay, bonus = -one_row(channels, seed=3).exp(), one_row(channels, seed=4)
    found = [reference.wkv(key[a:b], value[a:b], decay, bonus, kept, step) for a, b, step in TWO_STEPS]
    for token, out in enumerate(torch.cat(found)):
        between = torch.arange(token - 1, -1, -1)[:, None]
        weights = torch.cat((key[:token] + between * decay, (key[token] + bonus)[None])).double().softmax(0)
        torch.testing.assert_close(out.double(), (weights * value[: token + 1]).sum(0), rtol=1e-5, atol=1e-5)


@platforms_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("step", STEPS)
def test_causal_conv_is_that_of_the_reference(step: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(int(STEPS[step].starts[-1]), CHANNELS + 8, generator=generator).to(dtype)[:, :CHANNELS]
    weight = torch.randn(CHANNELS, 1, CONV, generator=generator).to(dtype)[:, 0]
    bias = torch.randn(CHANNELS, generator=generator).to(dtype)
    assert_alike(lambda ops, kept: ops.causal_conv(x, weight, None, kept.inputs, STEPS[step]), dtype)
    assert_alike(lambda ops, kept: ops.causal_conv(x, weight, bias, kept.inputs, STEPS[step], silu=False), dtype)


@platforms_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("per_feature", "has_beta", "is_delta"),
    [(False, True, True), (True, True, True), (False, True, False), (False, False, False)],
)
@pytest.mark.parametrize("step", STEPS)
def test_linear_attention_is_that_of_the_reference(
    step: str, per_feature: bool, has_beta: bool, is_delta: bool, dtype: torch.dtype
) -> None:
    given = attention_inputs(int(STEPS[step].starts[-1]), dtype, per_feature=per_feature, has_beta=has_beta)
    eps = 1e-6 if is_delta else 0.0
    scale = SIZES["key_dim"] ** -0.5
    assert_alike(
        lambda ops, kept: ops.linear_attention(*given, kept.matrices, STEPS[step], scale, eps, is_delta=is_delta),
        dtype,
    )


@platforms_only
@pytest.mark.parametrize("step", STEPS)
def test_values_of_an_odd_size_are_those_of_the_reference(step: str) -> None:
    """As the values of an xLSTM, of which the last is 1."""
    query, key, value, decay, beta = attention_inputs(
        int(STEPS[step].starts[-1]), torch.float32, per_feature=False, has_beta=True
    )
    assert value is not None
    value = torch.nn.functional.pad(value[..., :32], (0, 1), value=1.0)
    found = []
    for ops in (kernels, reference):
        matrices = torch.randn(10, SIZES["heads"], SIZES["key_dim"], 33, generator=torch.Generator().manual_seed(6))
        given = (query, key, value, decay, beta, matrices, STEPS[step], 0.2)
        found += [ops.linear_attention(*given, is_delta=False), matrices]
    torch.testing.assert_close(found[0], found[2], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1], found[3], rtol=1e-4, atol=1e-5)


@platforms_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("state_size", [SIZES["key_dim"], 1])
@pytest.mark.parametrize("step", STEPS)
def test_selective_scan_is_that_of_the_reference(step: str, state_size: int, dtype: torch.dtype) -> None:
    """With a state of one head, in the memory of several. A state of one element is a recurrent unit's."""
    heads, _, key_dim, value_dim = SIZES.values()
    tokens, channels = int(STEPS[step].starts[-1]), heads * key_dim * value_dim // state_size
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(tokens, channels + 2 * state_size, generator=generator).to(dtype)
    steps = torch.randn(tokens, channels, generator=generator).sigmoid()
    rates = -torch.randn(state_size, channels, generator=generator).exp()

    def run(ops: Any, kept: RecurrentState) -> Tensor:
        matrices = kept.matrices.view(-1, 1, state_size, channels)
        parts = x.split_with_sizes((channels, state_size, state_size), dim=1)
        out: Tensor = ops.selective_scan(parts[0], steps, rates, *parts[1:], matrices, STEPS[step])
        return out

    assert_alike(run, dtype)


@platforms_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1.0, 40.0])
@pytest.mark.parametrize("step", STEPS)
def test_wkv_is_that_of_the_reference(step: str, size: float, dtype: torch.dtype) -> None:
    """With a state of one head, in the memory of several. Also with keys whose exponentials overflow float32."""
    heads, _, key_dim, value_dim = SIZES.values()
    tokens, channels = int(STEPS[step].starts[-1]), heads * key_dim * value_dim // 3
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(tokens, 2 * channels, generator=generator).to(dtype)
    decay, bonus = -torch.randn(channels, generator=generator).exp(), torch.randn(channels, generator=generator)
    key, value = x[:, :channels] * size, x[:, channels:]

    def run(ops: Any, kept: RecurrentState) -> Tensor:
        matrices = kept.matrices.view(-1, 1, 3, channels)
        matrices[:, :, 1].abs_().add_(0.1)
        out: Tensor = ops.wkv(key, value, decay, bonus, matrices, STEPS[step])
        return out

    assert_alike(run, dtype)


def test_a_row_gives_the_same_in_pieces() -> None:
    """In one step, in segments of one step, and in several steps: bit by bit."""
    given = attention_inputs(90, torch.float32, per_feature=False, has_beta=True)
    x = torch.randn(90, CHANNELS, generator=torch.Generator().manual_seed(3))
    weight = torch.randn(CHANNELS, CONV, generator=torch.Generator().manual_seed(4))

    def run(kept: RecurrentState, first: int, last: int, step: StateSegments) -> tuple[Tensor, Tensor]:
        part = [None if each is None else each[first:last] for each in given]
        ops: Any = kernels
        out = ops.linear_attention(*part, kept.matrices, step, 0.5, 1e-6)
        return out, kernels.causal_conv(x[first:last], weight, None, kept.inputs, step)

    def prepared() -> RecurrentState:
        return state(torch.float32)

    whole, pieces, steps = prepared(), prepared(), prepared()
    expected = run(whole, 0, 90, segments([[90]], [-1], [1]))
    for out, wanted in zip(run(pieces, 0, 90, segments([[1, 16, 73]], [-1, 2, 3], [2, 3, 1])), expected, strict=True):
        assert torch.equal(out, wanted)
    outputs = [run(steps, 0, 2, segments([[2]], [-1], [4])), run(steps, 2, 90, segments([[88]], [4], [1]))]
    for parts, wanted in zip(zip(*outputs, strict=True), expected, strict=True):
        assert torch.equal(torch.cat(parts), wanted)
    for kept in (pieces, steps):
        assert torch.equal(kept.matrices[1], whole.matrices[1])
        assert torch.equal(kept.inputs[1], whole.inputs[1])
