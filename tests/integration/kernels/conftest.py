"""Every test here holds for the reference and for each platform's kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quire.kernels import dispatch


@pytest.fixture(autouse=True, scope="module", params=["reference", "cpu"])
def implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of what `quire.kernels` calls during the test."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "reference":
            patch.setattr(dispatch, "PLATFORMS", {})
        elif request.param not in dispatch.PLATFORMS:
            pytest.skip(f"the {request.param} kernels cannot be compiled here")
        yield request.param
