"""The report of a device's process when torch cannot use the device."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch

from quire.engine.doctor import device_checks, gpus
from quire.engine.doctor.check import Check
from quire.engine.doctor.ranks import RankTask
from quire.engine.process import current_process

NOT_INITIALIZED = """Unexpected error from cudaGetDeviceCount().
Error 802: system not yet initialized"""


class Found:
    """Runs the process of a rank of two in this one, without a GPU that torch can use."""

    def __init__(self, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], url: str) -> None:
        def init() -> None:
            raise RuntimeError(NOT_INITIALIZED)

        self._patch, self._capsys, self._url = patch, capsys, url
        patch.setattr(current_process, "watch_stdin", lambda on_end: None)
        patch.setattr(current_process, "set_name", lambda name: None)
        patch.setattr(torch.cuda, "is_available", lambda: False)
        patch.setattr(torch.cuda, "init", init)
        patch.setattr(torch.version, "cuda", "13.0")
        patch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")

    def of(self, rank: int, driver_cuda: int | None = 13000, checks_kernels: bool = True) -> list[tuple[str, str, str]]:
        task = RankTask(rank, 2, "cuda", rank, 2, self._url, checks_kernels=checks_kernels)
        self._patch.setattr(gpus, "driver_version", lambda: (driver_cuda, "580.65"))
        self._patch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(msgspec.json.encode(task) + b"\n")))
        assert device_checks.main() == 0
        lines = self._capsys.readouterr().out.splitlines()
        checks = [msgspec.json.decode(line, type=Check) for line in lines]
        assert all(check.remedy for check in checks if check.status == "fault")
        return [(check.name, check.status, check.found) for check in checks]


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Found:
    return Found(monkeypatch, capsys, tmp_path.as_uri())


def test_gpus_that_torch_cannot_use_are_a_fault_once_per_host(found: Found) -> None:
    version, unusable = found.of(0)
    assert version[:2] == ("CUDA", "ok")
    problem = "Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized"
    assert unusable == ("torch.cuda", "fault", f"torch cannot use the GPUs: {problem}")
    assert [status for _, status, _ in found.of(0, None)] == ["not applicable", "fault"]  # of no known version
    assert found.of(1) == []


def test_a_driver_that_is_too_old_is_the_only_fault(found: Found) -> None:
    assert [(name, status) for name, status, _ in found.of(0, 12080)] == [("CUDA", "fault")]


def test_an_all_reduce_among_hosts_names_the_rank(found: Found) -> None:
    ((name, status, text),) = found.of(0, checks_kernels=False)
    assert (name, status) == ("all-reduce", "fault")
    assert text.startswith("rank 0: torch cannot use the GPUs: ")


def test_gpus_that_torch_initializes_and_yet_does_not_list(found: Found, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    assert found.of(0)[1] == ("torch.cuda", "fault", "torch cannot use the GPUs: torch.cuda.is_available() is False")
