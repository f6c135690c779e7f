"""The check of a platform's kernels: of the CPU's kernels, as in `quire doctor`, and a rank's use of the results."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from quire import kernels
from quire.kernels import check, coded_words, cpu, examples, fp4, packed, quantized, reference
from quire.kernels.coded_words import CodedWords
from quire.kernels.examples import Inputs
from quire.kernels.fp4 import Fp4Weight
from quire.kernels.quantized import QuantizedFormat

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


WIDENED = {"coded_matmul", "coded_fused_experts"}
BEFORE = {"rms_norm_rounded", "add_rms_norm_rounded", "act_mul_rounded"}
ROUNDED = BEFORE | {"round_rows", "rounded_matmul", "rounded_fused_experts"}
OF_4_BITS = {"round_fp4", "fp4_matmul", "fp4_fused_experts"}


@pytest.fixture
def platform() -> ModuleType:
    """Kernels that are the references themselves: the interpreter of a GPU's takes half a minute for them."""
    platform = ModuleType("platform")
    for module, names in (
        (reference, {*reference.__all__} & {*kernels.__all__}),
        (coded_words, WIDENED | ROUNDED),
        (fp4, OF_4_BITS),
    ):
        vars(platform).update({name: getattr(module, name) for name in names})
    vars(platform)["__all__"] = [name for name in vars(platform) if not name.startswith("__")]
    return platform


def test_a_rank_uses_what_is_right_and_its_log_names_what_is_not(
    platform: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(x: Tensor, activation: str) -> Tensor:
        return reference.act_mul(x, activation) + 0.01

    def broken(*_: object) -> Tensor:
        raise RuntimeError("PTX was compiled for another architecture")

    monkeypatch.setattr(platform, "act_mul", wrong)
    monkeypatch.setattr(platform, "rms_norm", broken)
    config = kernels.AttentionConfig((kernels.AttentionLayer(6, 2, 24, 0.2, window=9, softcap=5.0, has_sinks=True),))
    passing, problems = check.passing(platform, CPU, torch.float32, config, ())
    plain = set(platform.__all__) - WIDENED - ROUNDED - OF_4_BITS
    unchecked = {"gumbel_noise", "read_kv", "rotary"}  # not of platforms
    assert set(vars(passing)) == plain - unchecked - {"act_mul", "rms_norm"}
    assert set(problems) == {"act_mul", "rms_norm"}
    assert "act_mul is not used on cpu" in caplog.text
    assert "RuntimeError: PTX was compiled for another architecture" in caplog.text


@pytest.mark.parametrize(
    ("form", "names"),
    [
        (None, set()),
        (QuantizedFormat("int8", rounds_inputs=True), ROUNDED),
        (QuantizedFormat("fp8", 128, rounds_inputs=True), ROUNDED),
        (QuantizedFormat("uint8", 96, has_offsets=True), WIDENED),
        (QuantizedFormat("uint4", 1 << 14, has_offsets=True), WIDENED),  # as a smaller group
        # A layer without the scale of its inputs is multiplied by widened weights.
        (QuantizedFormat("e2m1", 16, rounds_inputs=True), WIDENED | OF_4_BITS),
    ],
)
def test_a_rank_checks_the_kernels_of_its_formats(
    form: QuantizedFormat | None, names: set[str], platform: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no others; each of them is left out if its results are too large, or its codes are in another order."""
    of_weights = WIDENED | ROUNDED | OF_4_BITS
    monkeypatch.setattr(platform, "__all__", of_weights)
    formats = () if form is None else (form,)
    passed, problems = check.passing(platform, CPU, torch.float32, CONFIG, formats)
    assert (set(vars(passed)), problems) == (names, {})
    for name in names:
        right = getattr(platform, name)

        def wrong(x: Tensor, *args: object, right: Any = right, **options: Any) -> Any:
            found = right(x, *args, **options)
            if isinstance(found, Tensor):
                return found + 1.0
            codes, *others = found
            return codes.view(torch.uint8).flip(1).view(codes.dtype), *others

        monkeypatch.setattr(platform, name, wrong)
    found = check.differences(platform, CPU, torch.float32, CONFIG, formats)
    assert found.keys() == names
    assert all(found.values()), found


def level(factors: Tensor) -> Tensor:
    """The same factor everywhere, as if a kernel did not read them."""
    return torch.full_like(factors, float(factors.float().mean()))


def without_scales(weight: Any) -> Any:
    """An argument, without the scales of a weight if it has any."""
    if isinstance(weight, Fp4Weight):
        return replace(weight, scales=level(weight.scales), of_rows=level(weight.of_rows))
    if isinstance(weight, CodedWords):
        scales = None if weight.scales is None else level(weight.scales)
        return replace(weight, scales=scales, of_rows=level(weight.of_rows))
    return level(weight) if isinstance(weight, Tensor) and weight.dtype == torch.float32 else weight


def wrong_experts(right: Any, fault: str, x: Tensor, shares: Tensor, ids: Tensor, *weights: Any, **options: Any) -> Any:
    """The result of a kernel that does not read all of its arguments."""
    if fault == "one expert":
        ids = ids.clamp(max=0)
    elif fault == "an expert left out":
        ids = ids.where(ids != 1, -1)
    elif fault == "no scales":
        weights = tuple(map(without_scales, weights))
    return right(x, shares, ids, *weights, **options)


def of_experts(form: QuantizedFormat) -> str:
    """The experts' kernel of a format."""
    if not form.rounds_inputs:
        return "coded_fused_experts"
    return "fp4_fused_experts" if form.values == "e2m1" else "rounded_fused_experts"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fault", ["one expert", "an expert left out", "no scales"])
@pytest.mark.parametrize("form", check.FORMATS, ids=lambda form: f"{of_experts(form)}-{form.values}-{form.group}")
def test_wrong_experts_are_rejected(
    form: QuantizedFormat, fault: str, dtype: torch.dtype, platform: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results are large enough for the tolerance, and differ enough from expert to expert."""
    name = of_experts(form)
    monkeypatch.setattr(platform, "__all__", [name])
    assert check.differences(platform, CPU, dtype, CONFIG, (form,)) == {name: ""}
    monkeypatch.setattr(platform, name, partial(wrong_experts, getattr(platform, name), fault))
    assert "Mismatched elements" in check.differences(platform, CPU, dtype, CONFIG, (form,))[name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fault", ["one expert", "an expert left out", "no scales"])
def test_wrong_experts_of_coded_tiles_are_rejected(fault: str, dtype: torch.dtype) -> None:
    """For every kind of values."""
    every = [each for each in examples.packed_matmuls(Inputs(CPU, dtype)) if each.operation == "coded_experts"]
    assert len(every) == 5
    wrong = SimpleNamespace(coded_experts=partial(wrong_experts, quantized.coded_experts, fault))
    for example in every:
        assert "Mismatched elements" in check.difference(example, wrong, dtype)
