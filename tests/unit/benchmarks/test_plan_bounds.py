"""The bounds of `quire plan` are bounds on published rates, and not far above them."""

from __future__ import annotations

import pytest

from benchmarks.plan_bounds import ROWS, Row, bound
from quire.engine.config.achieved import PUBLISHED


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.model}, {row.gpus}")
def test_published_rates_are_within_the_stated_share_of_the_bounds(row: Row) -> None:
    least, most = PUBLISHED
    assert least <= round(row.tokens_per_second / bound(row), 2) <= most < 1


def test_they_are_of_five_models_and_cards_at_least() -> None:
    assert len({row.model for row in ROWS}) >= 5
    assert len({row.gpus.rpartition("x")[2] for row in ROWS}) >= 5
