"""Every test here runs for the reference and for each platform's kernels, unless it is marked for one of them only."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quire.kernels import dispatch

PLATFORMS = ["cpu"]

platforms_only = pytest.mark.parametrize("implementation", PLATFORMS, indirect=True)
"""For tests that compare `quire.kernels` with the reference, which would be compared with itself, and for tests of
properties that the reference does not have."""
reference_only = pytest.mark.parametrize("implementation", ["reference"], indirect=True)
"""For tests that call the reference by name, or no operation that a platform has: other cases would repeat this one."""


@pytest.fixture(autouse=True, scope="module", params=["reference", *PLATFORMS])
def implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of the implementation that `quire.kernels` calls during the test."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "reference":
            patch.setattr(dispatch, "PLATFORMS", {})
        elif request.param not in dispatch.PLATFORMS:
            pytest.skip(f"the {request.param} kernels cannot be compiled here")
        yield request.param
