"""Hyper-connections against their formulas, and the same results with any other tokens in the batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire import kernels
from quire.kernels import reference
from tests.integration.kernels.conftest import platforms_only, reference_only

EPS = 1e-6, 1e-5


def weights(streams: int, hidden: int, kinds: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """The weights of reading, of writing and of mixing, or the first `kinds` of them."""
    count, width = sum((streams, streams, streams**2)[:kinds]), streams * hidden
    return torch.randn(count, width) * width**-0.5, torch.randn(count), torch.randn(kinds)


@platforms_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("tokens", "streams", "hidden"), [(1, 4, 512), (7, 4, 100), (9, 3, 33), (5, 2, 1), (3, 1, 20), (0, 4, 8)]
)
def test_the_operations_are_those_of_the_reference(tokens: int, streams: int, hidden: int, dtype: torch.dtype) -> None:
    check_connection(tokens, streams, hidden, dtype)


@platforms_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kinds", [1, 2])
@pytest.mark.parametrize(("tokens", "streams", "hidden"), [(1, 4, 512), (9, 3, 33), (3, 1, 20), (0, 4, 8)])
def test_streams_that_are_not_mixed_are_those_of_the_reference(
    tokens: int, streams: int, hidden: int, kinds: int, dtype: torch.dtype
) -> None:
    check_connection(tokens, streams, hidden, dtype, kinds)


def check_connection(tokens: int, streams: int, hidden: int, dtype: torch.dtype, kinds: int = 3) -> None:
    given, x = weights(streams, hidden, kinds), (torch.randn(tokens, streams * hidden) * 3).to(dtype)
    numbers = (5,) if kinds == 3 else (0, 1.5, 0.25)
    found, expected = (module.mhc_pre(x, *given, streams, *EPS, *numbers) for module in (kernels, reference))
    step = 2e-5 if dtype == torch.float32 else 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(found, expected, rtol=step, atol=step)
    if kinds == 1:
        assert not found[1].numel()
        return
    output = torch.randn(tokens, hidden).to(dtype)
    after = kernels.mhc_post(output, x, *found[1:])
    torch.testing.assert_close(after, reference.mhc_post(output, x, *expected[1:]), rtol=step, atol=step)


@reference_only
def test_what_is_added_to_streams_that_are_not_mixed() -> None:
    """The same as with all weights, without the mixing."""
    (function, base, scale), x, output = weights(3, 16), torch.randn(5, 48), torch.randn(5, 16)
    read, written, mixed = reference.mhc_pre(x, function, base, scale, 3, *EPS, 4)
    found = reference.mhc_pre(x, function[:6], base[:6], scale[:2], 3, *EPS, 0, 3.0, 0.5)
    torch.testing.assert_close(found[0], read)
    torch.testing.assert_close(found[1], written * 1.5 + 0.5)
    after = reference.mhc_post(output, x, found[1], found[2])
    torch.testing.assert_close(after, reference.mhc_post(output, x, found[1], torch.eye(3).expand_as(mixed)))


@reference_only
def test_the_reference_is_the_formula() -> None:
    """One token after another, in float64."""
    streams, hidden = 3, 16
    (function, base, scale), x = weights(streams, hidden), torch.randn(4, streams * hidden)
    read, outputs, mixed = reference.mhc_pre(x, function, base, scale, streams, *EPS, 50)
    after = reference.mhc_post(read, x, outputs, mixed)
    for row, token in enumerate(x.double()):
        normed = token / (token.square().mean() + EPS[0]).sqrt()
        numbers = function.double() @ normed * scale.double().repeat_interleave(torch.tensor([3, 3, 9])) + base.double()
        expected = ((numbers[:3].sigmoid() + EPS[1])[:, None] * token.view(streams, hidden)).sum(0)
        torch.testing.assert_close(read[row].double(), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(outputs[row].double(), 2 * numbers[3:6].sigmoid(), rtol=1e-5, atol=1e-5)
        for number in range(streams):
            total = outputs[row, number] * read[row]
            for other in range(streams):
                total = total + mixed[row, other, number] * x[row].view(streams, hidden)[other]
            torch.testing.assert_close(after[row].view(streams, hidden)[number], total, rtol=1e-5, atol=1e-5)
    # Doubly stochastic after many iterations, and in proportion to rows and columns of the exponentials before.
    torch.testing.assert_close(mixed.sum(1), torch.ones(4, streams), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(mixed.sum(2), torch.ones(4, streams), rtol=1e-3, atol=1e-3)
    ratios = (mixed[:, 0, 0] * mixed[:, 1, 1] / (mixed[:, 0, 1] * mixed[:, 1, 0])).log()
    normed = x / (x.square().mean(1, keepdim=True) + EPS[0]).sqrt()
    logits = (normed @ function.T * scale[2] + base)[:, 6:].view(4, 3, 3)
    expected_ratios = logits[:, 0, 0] + logits[:, 1, 1] - logits[:, 0, 1] - logits[:, 1, 0]
    torch.testing.assert_close(ratios, expected_ratios, rtol=2e-2, atol=2e-2)


@platforms_only
@pytest.mark.parametrize("kinds", [1, 2, 3])
def test_a_token_does_not_depend_on_others(kinds: int) -> None:
    """Matrix products of torch depend on their size."""
    given, x = weights(4, 300, kinds), torch.randn(23, 1200)
    together = kernels.mhc_pre(x, *given, 4, *EPS, 20)
    for rows in (slice(0, 1), slice(5, 8), slice(17, 23)):
        alone = kernels.mhc_pre(x[rows], *given, 4, *EPS, 20)
        assert all(torch.equal(one, all_of[rows]) for one, all_of in zip(alone, together, strict=True))
        if kinds == 1:
            continue
        after = kernels.mhc_post(together[0], x, *together[1:])
        assert torch.equal(kernels.mhc_post(alone[0], x[rows], *alone[1:]), after[rows])
