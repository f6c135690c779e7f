"""Weights pass through buffers on their way to a GPU; here their destination is the host's memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire.engine.checkpoints import loader, staging
from quire.engine.checkpoints.staging import PinnedStaging
from quire.engine.distributed.communicator import Parallel
from quire.engine.models.build import load
from tests.fakes.checkpoints import write_checkpoint
from tests.fakes.model_logits import CPU, configure

NUMBERS = torch.arange(24.0).view(4, 6)


@pytest.mark.parametrize("part", [8, 24, 56, 1 << 20])
@pytest.mark.parametrize(
    "values",
    [NUMBERS, NUMBERS.t(), NUMBERS[:, 1:4], NUMBERS[::2], NUMBERS[0], NUMBERS[0, 3], NUMBERS[:0], NUMBERS[None]],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_arrives_however_small_the_buffers_are(
    part: int, values: Tensor, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "PART_BYTES", part)
    target = torch.full((values.numel() + 2,), -1.0, dtype=dtype)
    PinnedStaging(CPU).copy(target[1:-1].view(values.shape), values)
    assert target.tolist() == [-1.0, *values.flatten().tolist(), -1.0]


def test_each_thread_has_its_own_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "PART_BYTES", 64)
    shared = PinnedStaging(CPU)
    targets = [torch.empty(4000) for _ in range(8)]
    with ThreadPoolExecutor(4) as pool:
        for number, target in enumerate(targets):
            pool.submit(shared.copy, target, torch.full((4000,), float(number)))
    assert [set(target.tolist()) for target in targets] == [{float(number)} for number in range(8)]


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_model_through_buffers_is_the_same(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configure(write_checkpoint(family, tmp_path))
    expected = dict(load(config, 0, Parallel(), CPU, pack=False).named_parameters())
    monkeypatch.setattr(staging, "PART_BYTES", 1000)
    read, buffers = loader._read, PinnedStaging(CPU)
    monkeypatch.setattr(loader, "_read", lambda checkpoint, place, staging: read(checkpoint, place, buffers))
    found = dict(load(config, 0, Parallel(), CPU, pack=False).named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
