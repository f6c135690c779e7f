"""Sampled tokens equal the reference's, with any distribution and filters."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire import kernels
from quire.kernels import reference
from tests.integration.kernels.conftest import platforms_only

INF = float("inf")


def shaped(kind: str, rows: int, width: int) -> Tensor:
    """Logits as models give them, flat ones, peaked ones, and ones of few different values."""
    x = torch.randn(rows, width)
    match kind:
        case "flat":
            return x * 1e-3
        case "peaked":
            return x * 3 + 15 * (torch.rand(rows, width) < 3 / width)
        case "ties":
            return (x * 2).round()
        case "holes":
            return x.masked_fill(torch.rand(rows, width) < 0.5, -INF).index_fill(1, torch.tensor([width // 2]), 0.5)
    return x * 3


def both(logits: Tensor, **controls: Tensor) -> tuple[Tensor, Tensor]:
    rows = len(logits)
    arguments = {
        "temperature": torch.ones(rows),
        "top_k": torch.zeros(rows, dtype=torch.int64),
        "top_p": torch.ones(rows),
        "min_p": torch.zeros(rows),
        "seeds": torch.randint(-(2**63), 2**63 - 1, (rows,)),
        "positions": torch.arange(rows),
        **controls,
    }
    given = logits.clone()
    found = kernels.sample(logits, *arguments.values())
    assert torch.equal(logits, given)
    return found, reference.sample(logits, *arguments.values())


@platforms_only
@pytest.mark.parametrize("width", [1, 15, 50, 1000, 32_000])
@pytest.mark.parametrize("kind", ["normal", "ties"])
def test_arg_max_goes_to_the_lowest_id(width: int, kind: str) -> None:
    found, expected = both(shaped(kind, 40, width), temperature=torch.zeros(40))
    assert torch.equal(found, expected)


@platforms_only
@pytest.mark.parametrize("kind", ["normal", "flat", "peaked", "ties", "holes"])
@pytest.mark.parametrize(("rows", "width"), [(4000, 100), (500, 1003), (60, 32_000)])
def test_draws_are_those_of_the_reference(rows: int, width: int, kind: str) -> None:
    """Every filter, alone and together."""
    torch.manual_seed(rows)
    pick = torch.randint(0, 2, (3, rows)).bool()
    controls = {
        "temperature": torch.rand(rows) * 2 + 0.05,
        "top_k": torch.where(pick[0], torch.randint(1, width + 9, (rows,)) ** torch.randint(0, 2, (rows,)), 0),
        "top_p": torch.where(pick[1], torch.rand(rows) * 0.99 + 0.01, 1.0),
        "min_p": torch.where(pick[2], torch.rand(rows) ** 4, 0.0),
    }
    found, expected = both(shaped(kind, rows, width), **controls)
    assert torch.equal(found, expected)


@platforms_only
def test_a_hundred_thousand_plain_draws_are_those_of_the_reference() -> None:
    found, expected = both(torch.randn(100_000, 120))
    assert torch.equal(found, expected)


@platforms_only
@settings(max_examples=80, deadline=None)
@given(
    values=st.lists(st.integers(-6, 6), min_size=1, max_size=70),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    top_k=st.integers(-1, 80),
    top_p=st.sampled_from([0.07, 0.43, 0.91, 1.0]),
    min_p=st.sampled_from([0.0, 0.013, 1.0]),
    forbidden=st.integers(0, 80),
)
def test_few_values_with_many_ties(
    values: list[int], temperature: float, top_k: int, top_p: float, min_p: float, forbidden: int
) -> None:
    row = torch.tensor(values).float()
    row[min(forbidden, len(row)) : len(row) - 1] = -INF
    found, expected = both(
        row.repeat(20, 1),
        temperature=torch.full((20,), temperature),
        top_k=torch.full((20,), top_k),
        top_p=torch.full((20,), top_p),
        min_p=torch.full((20,), min_p),
    )
    assert torch.equal(found, expected)


@platforms_only
def test_rows_may_be_a_part_of_wider_ones() -> None:
    wide = torch.randn(9, 70)
    found, expected = both(wide[:, 3:60], top_k=torch.full((9,), 7))
    assert torch.equal(found, expected)


def test_a_row_that_forbids_all_still_has_a_token() -> None:
    logits = torch.full((2, 40), -INF)
    nothing = torch.zeros(2, dtype=torch.int64)
    tokens = kernels.sample(logits, torch.tensor([0.0, 1.0]), nothing, torch.ones(2), torch.zeros(2), nothing, nothing)
    assert tokens.tolist() == [0, 0]


@platforms_only
@pytest.mark.parametrize("width", [1, 16, 77, 5000])
def test_uniform_noise_is_that_of_the_reference_bit_by_bit(width: int) -> None:
    seeds, ids = torch.randint(-(2**63), 2**63 - 1, (30,)), torch.randint(0, 2**31 - 1, (width,)).int()
    positions = torch.randint(0, 2**40, (30,))
    found = kernels.uniform_noise(seeds, positions, ids)
    assert torch.equal(found, reference.uniform_noise(seeds, positions, ids))


def test_a_row_without_any_token_left_costs_nobody_else() -> None:
    logits = torch.stack((torch.full((40,), -INF), torch.arange(40.0)))
    controls = {"temperature": torch.ones(2), "top_p": torch.tensor([0.9, 0.01])}
    found, expected = both(logits, **controls)
    assert torch.equal(found, expected)
    assert found[1] == 39


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 97, 256])
def test_a_bitmask_leaves_the_tokens_whose_bit_is_set(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(5, vocab, generator=generator)
    allowed = torch.rand(2, -(-vocab // 32) * 32, generator=generator) < 0.5
    weights = 1 << torch.arange(32)
    words = (allowed.view(2, -1, 32) * weights).sum(-1)
    masks = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    expected = logits.clone()
    for row, kept in zip((3, 1), allowed, strict=True):
        expected[row, ~kept[:vocab]] = -torch.inf
    kernels.apply_bitmask(logits, torch.tensor([3, 1]), masks)
    assert torch.equal(logits, expected)
