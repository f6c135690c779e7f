"""A device whose memory is as good as full, and requests of every kind: nobody runs out of it."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

Check = Callable[[str], list[Any]]


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Check:
    """The results of this part of scripts/gpu_check; on CPU at small sizes."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[4] / "benchmarks"))
    lab, memory = importlib.import_module("gpu.lab").Lab, importlib.import_module("gpu.memory")
    return lambda device: list(memory.check(lab(device, device == "cpu", False, tmp_path, time.monotonic() + 900)))


def test_requests_of_every_kind(check: Check) -> None:
    _, found = check("cpu")
    assert found.what == "60 mixed requests of up to 400 tokens in 95% of the memory"
    assert found.ok, found.detail


def test_a_request_that_ends_early_is_reported(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = importlib.import_module("gpu.memory").LLM
    generate = llm.generate

    def cut(self: Any, *args: Any, **options: Any) -> Any:
        results = generate(self, *args, **options)
        results[7].outputs[0].finish_reason = "stop"
        return results

    monkeypatch.setattr(llm, "generate", cut)
    found = check("cpu")[-1]
    assert not found.ok
    assert "1 ended early, the first is number 7" in found.detail


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU is visible")
def test_ten_thousand_requests_where_five_percent_are_left(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # of the other tests; the engine's process is to compile
    found = check("cuda")[-1]
    assert found.ok, found.detail
