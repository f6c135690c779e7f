"""The shares that ranks have of parameters."""

from __future__ import annotations

import pytest

from quire.engine.architecture.spec_parts import ALL, MatrixShape, Parameter, Units, layout_errors, linear, matrices


@pytest.mark.parametrize(
    ("spare", "fits"),
    [("none", [1, 2, 3, 6]), ("copies", [1, 2, 3, 6, 12]), ("copies of one", [1, 2, 3, 6]), ("padding", range(1, 13))],
)
def test_sizes_that_divide_six_heads(spare: str, fits: list[int]) -> None:
    parameter = Parameter("qkv", "weight", {"k": (60, 8)}, {"k": Units(6, "KV heads", spare)})  # type: ignore[arg-type]
    assert [tp for tp in range(1, 13) if not layout_errors([parameter], tp)] == list(fits)
    assert list(layout_errors([parameter, parameter], 4)) == ["6 KV heads"] * (4 not in fits)


def test_a_single_unit_may_be_on_all_ranks() -> None:
    assert Units(1, "groups", "copies of one").is_divisible(4)
    assert not Units(2, "groups", "copies of one").is_divisible(4)


@pytest.mark.parametrize("spare", ["none", "copies", "copies of one", "padding"])
def test_parts_of_size_0_are_divided_by_any_number_of_ranks(spare: str) -> None:
    """Some configs have a shared expert of size 0, which is none."""
    (up,) = linear("up", {"gate": 0, "up": 0}, 8, rows_of=Units(0, "columns", spare))  # type: ignore[arg-type]
    assert not layout_errors([up], 3)
    assert up.elements(3) == Units(0, "columns", spare).start(0, 1, 3) == 0  # type: ignore[arg-type]


def test_fewer_heads_than_ranks_are_on_neighbouring_ranks() -> None:
    heads = Units(2, "KV heads", "copies")
    assert [heads.start(20, rank, 8) for rank in range(8)] == [0, 0, 0, 0, 10, 10, 10, 10]
    assert heads.share(20, 8) == 10
    assert (Units(6, "KV heads", "copies").start(60, 1, 2), Units(6, "KV heads", "copies").share(60, 2)) == (30, 30)


def test_ranks_have_their_share_of_rows_or_columns() -> None:
    heads = Units(4, "heads")
    up = list(linear("up", {"q": 40, "latent": 6}, 8, rows_of={"q": heads}, bias=True, number=3))
    down = list(linear("down", 8, 40, columns_of=heads, bias=True))
    assert [list(each.shapes(2)) for each in (*up, *down)] == [[(20, 8), (6, 8)], [(20,), (6,)], [(8, 20)], [(8,)]]
    assert [each.elements(2) for each in (*up, *down)] == [3 * 26 * 8, 3 * 26, 160, 8]
    assert list(matrices((*up, *down), 2)) == [MatrixShape(26, 8, 3, "up"), MatrixShape(8, 20, 1, "down", 40)]


def test_rows_of_all_parts_may_be_padded_as_one() -> None:
    tokens = Parameter("embedding", "weight", {"0": (5, 2), "1": (4, 2)}, {ALL: Units(9, "tokens", "padding")})
    assert list(tokens.shapes(2)) == [(5, 2)]
