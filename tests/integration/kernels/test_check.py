"""The check of the CPU kernels, as `quire doctor` makes it; `test_triton.py` has that of a GPU's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire import kernels
from quire.kernels import check, cpu, packed

CPU = torch.device("cpu")
CONFIG = kernels.AttentionConfig()


@pytest.fixture(autouse=True, scope="module", params=["cpu"])
def implementation(request: pytest.FixtureRequest) -> str:
    """The check calls the module itself."""
    return str(request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_cpu_kernel_is_checked_and_right(dtype: torch.dtype) -> None:
    found = check.differences(cpu, CPU, dtype, CONFIG)
    assert found.keys() == {*cpu.__all__} - {"CannotBuild", "load"}
    assert not any(found.values()), found


def test_a_wrong_kernel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(x: Tensor) -> tuple[Tensor, Tensor]:
        quantized, scales = packed.quantize_rows(x)
        return quantized + 1, scales

    monkeypatch.setattr(cpu, "quantize_rows", wrong)
    found = check.differences(cpu, CPU, torch.float32, CONFIG)
    assert "Mismatched elements: 480 / 480" in found.pop("quantize_rows")
    assert not any(found.values()), found
