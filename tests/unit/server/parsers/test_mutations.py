"""What a person reads in a transcript with spoilt tags, every format reads, too, whole and in any chunks."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.unit.server.parsers import mutations


@pytest.mark.parametrize("format", mutations.sources())
def test_spoilt_tags_lose_no_call_and_no_text(format: str) -> None:
    assert mutations.faults_in(format, 8) == []


@pytest.mark.slow
@pytest.mark.parametrize("format", mutations.sources())
def test_no_spoilt_tag_loses_a_call_or_text(format: str) -> None:
    faults = mutations.faults_in(format, 1000)
    counts = Counter(fault for fault, _ in faults)
    print(format, counts)
    assert {*counts} <= {mutations.SWALLOWED}, faults
    assert counts[mutations.SWALLOWED] <= 12
