"""torch's products of rounded inputs: their numbers, and that each rank uses the faster product."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from quire.kernels import backends, check, coded_words, dispatch, linear, scaled_matmul
from quire.kernels.attention_config import AttentionConfig
from quire.kernels.quantized import QuantizedFormat

CPU = torch.device("cpu")
FORMATS = (QuantizedFormat("int8", rounds_inputs=True), QuantizedFormat("fp8", 128, rounds_inputs=True))
KINDS = (torch.int8, torch.float8_e4m3fn)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(scaled_matmul, "_INPUTS", 64)
    monkeypatch.setattr(scaled_matmul, "_FEATURES", 48)
    yield
    scaled_matmul.CHOSEN.clear()


def arguments(kind: torch.dtype, rows: int = 40, inputs: int = 64, groups: int = 1) -> tuple[torch.Tensor, ...]:
    codes, scales = (torch.randn(48, inputs) * 32).clamp(-127, 127).to(kind), torch.rand(48, groups) / 64
    return torch.randn(rows, inputs).bfloat16(), codes, scales, torch.randn(48).bfloat16()


def times(monkeypatch: pytest.MonkeyPatch, *milliseconds: float) -> None:
    taken = iter(milliseconds)
    monkeypatch.setattr(backends, "seconds", lambda *_: next(taken) / 1000)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_bias", [True, False])
def test_numbers_are_those_of_the_reference(kind: torch.dtype, has_bias: bool) -> None:
    x, codes, scales, bias = arguments(kind)
    given = None if not has_bias else bias
    rows, x_scales = coded_words.round_rows(x, kind, 1)
    found = scaled_matmul.rounded_matmul(rows, codes, scales, given, x_scales, torch.bfloat16)
    expected = coded_words.rounded_matmul(x, codes, scales, given)
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("taken", "least", "said"),
    [
        ((1, 2, 1, 2, 1, 2, 1, 2), 32, "torch from 32 rows"),
        ((1, 2, 1, 2, 3, 2), 256, "torch from 256 rows, by the time of 48 x 64 (1024 rows: torch 1.000 ms, triton 2."),
        ((2, 2), None, "triton, by the time of 48 x 64 (1024 rows: torch 2.000 ms, triton 2.000 ms)"),
    ],
)
def test_the_faster_product_is_chosen_by_the_number_of_rows(
    taken: tuple[float, ...],
    least: int | None,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Weights with scales for groups are not timed."""
    caplog.set_level(logging.INFO)
    times(monkeypatch, *taken)
    scaled_matmul.choose(CPU, torch.bfloat16, FORMATS, coded_words.rounded_matmul)
    assert scaled_matmul.CHOSEN.get(("cpu", torch.int8)) == least
    assert len(scaled_matmul.CHOSEN) == (least is not None)
    assert [said in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize("kind", KINDS)
def test_what_differs_or_fails_is_not_used(
    kind: torch.dtype, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    form = QuantizedFormat("int8" if kind == torch.int8 else "fp8", rounds_inputs=True)
    product = scaled_matmul.rounded_matmul
    monkeypatch.setattr(scaled_matmul, "rounded_matmul", lambda *args: product(*args) + 1)
    scaled_matmul.choose(CPU, torch.bfloat16, (form,), coded_words.rounded_matmul)
    assert "torch's is not used: AssertionError: Tensor-likes are not close" in caplog.text

    def unsupported(*_: Any) -> None:
        raise RuntimeError("needs compute capability\n8.9")

    monkeypatch.setattr(scaled_matmul, "rounded_matmul", unsupported)
    scaled_matmul.choose(CPU, torch.bfloat16, (form,), coded_words.rounded_matmul)
    assert "torch's is not used: RuntimeError: needs compute capability 8.9" in caplog.text
    assert not scaled_matmul.CHOSEN


@pytest.mark.parametrize(
    ("rows", "inputs", "groups", "is_torchs"),
    [(40, 64, 1, True), (32, 64, 1, True), (31, 64, 1, False), (40, 200, 1, False), (40, 256, 2, False)],
)
@pytest.mark.parametrize("is_rounded", [True, False])
def test_layers_multiply_by_what_was_chosen(
    rows: int, inputs: int, groups: int, is_torchs: bool, is_rounded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    scaled_matmul.CHOSEN["cpu", torch.int8] = 32
    product, calls = scaled_matmul.rounded_matmul, list[int]()

    def watched(*args: Any) -> torch.Tensor:
        calls.append(len(args[0]))
        return product(*args)

    monkeypatch.setattr(scaled_matmul, "rounded_matmul", watched)
    x, codes, scales, bias = arguments(torch.int8, rows, inputs, groups)
    given, more = x, list[Any]()
    if is_rounded:
        given, x_scales = coded_words.round_rows(x, torch.int8, groups)
        more = [x_scales, torch.bfloat16]
    found = linear._rounded_matmul(given, codes, scales, bias, *more)
    torch.testing.assert_close(found, coded_words.rounded_matmul(x, codes, scales, bias), rtol=0.02, atol=0.02)
    assert calls == [rows] * is_torchs


def test_a_gpu_times_them_when_it_prepares(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(check, "passing", lambda *_: (object(), {}))
    monkeypatch.setattr(scaled_matmul, "choose", lambda *args: seen.append(args))
    monkeypatch.setattr(dispatch, "_choose", lambda *_: None)
    monkeypatch.setattr(dispatch, "PLATFORMS", {})
    load: Callable[..., None] = dispatch._load_triton
    load(torch.device("cuda"), AttentionConfig(), dtype=torch.bfloat16, formats=FORMATS)
    assert seen == [(torch.device("cuda"), torch.bfloat16, FORMATS, dispatch._rounded_matmul)]
