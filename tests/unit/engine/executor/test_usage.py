"""The usage of a process and its GPU, measured with this process and a fake NVML."""

from __future__ import annotations

import mmap
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from quire.engine.executor.usage import UsageSampler, read_gpu, read_usage
from quire.engine.protocol.stats import GpuUsage, RankUsage
from tests.fakes.waiting import until


class FakeNvml(types.ModuleType):
    """NVML of a GPU that does not report the values in `silent`."""

    NVML_PCIE_UTIL_TX_BYTES, NVML_PCIE_UTIL_RX_BYTES = 0, 1
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX = 138, 139

    class NVMLError(Exception):
        pass

    def __init__(self, *silent: str) -> None:
        super().__init__("pynvml")
        self.silent = silent

    def _say(self, name: str, value: Any) -> Any:
        if name in self.silent:
            raise self.NVMLError("Not Supported")
        return value

    def nvmlInit(self) -> None:
        self._say("driver", None)

    def nvmlShutdown(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetMemoryInfo(self, gpu: int) -> Any:
        return self._say("memory", types.SimpleNamespace(used=7 + gpu, total=80))

    def nvmlDeviceGetUtilizationRates(self, gpu: int) -> Any:
        return self._say("utilization", types.SimpleNamespace(gpu=50, memory=3))

    def nvmlDeviceGetPowerUsage(self, gpu: int) -> int:
        return int(self._say("power", 350_500))

    def nvmlDeviceGetPcieThroughput(self, gpu: int, counter: int) -> int:
        return int(self._say("pcie", (4, 5)[counter]))

    def nvmlDeviceGetFieldValues(self, gpu: int, fields: list[tuple[int, int]]) -> list[Any]:
        ((field, scope),) = fields
        assert scope == 2**32 - 1, "all links"
        value = types.SimpleNamespace(ullVal={138: 2, 139: 3}[field])
        return [types.SimpleNamespace(nvmlReturn=int("nvlink" in self.silent), value=value)]

    def _nvmlCheckReturn(self, code: int) -> None:
        if code:
            raise self.NVMLError("Not Supported")


@pytest.mark.parametrize(
    ("silent", "usage"),
    [
        ((), GpuUsage(8, 80, 0.5, 350.5, 5000, 4000, 3 * 1024, 2 * 1024)),
        (("power", "nvlink"), GpuUsage(8, 80, 0.5, None, 5000, 4000, None, None)),
        (("utilization", "pcie"), GpuUsage(8, 80, None, 350.5, None, None, 3 * 1024, 2 * 1024)),
        (("memory",), None),
    ],
)
def test_a_gpu_reports_what_it_can(
    silent: tuple[str, ...], usage: GpuUsage | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(*silent))
    assert read_gpu(1) == usage


def test_the_memory_and_time_of_a_process() -> None:
    before = read_usage(os.getpid(), None)
    with mmap.mmap(-1, 32 << 20) as shared:
        shared.write(bytes(32 << 20))
        during = read_usage(os.getpid(), None)
    assert during.gpu is None
    assert during.shared_bytes - before.shared_bytes >= 30 << 20
    assert during.resident_bytes > during.shared_bytes
    assert 0 < before.cpu_seconds <= during.cpu_seconds <= sum(os.times()[:2]) + 0.1


def test_a_process_that_has_ended_has_no_usage() -> None:
    last = max(int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())
    with pytest.raises(OSError, match="No such"):
        read_usage(last + 10_000_000, None)


@pytest.mark.parametrize(
    ("silent", "indices", "memory", "warning"),
    [
        ((), [1, 0], [8, 7], ""),
        ((), [1, 3], [8, None], "GPU metrics are not available: GPU 3 is not visible"),
        (("driver",), [1, 0], [None, None], "GPU metrics are not available: no NVIDIA driver"),
    ],
)
def test_each_process_is_sampled_with_its_gpu(
    silent: tuple[str, ...],
    indices: list[int],
    memory: list[int | None],
    warning: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(*silent))
    sampler = UsageSampler([os.getpid()] * 2, indices)
    try:
        until(lambda: all(sampler.usage), seen=lambda: sampler.usage)
    finally:
        sampler.close()
    used = [None if each is None or each.gpu is None else each.gpu.memory_used for each in sampler.usage]
    assert used == memory
    assert caplog.messages == ([warning] if warning else [])


@pytest.mark.parametrize("error", [OSError("No such process"), RuntimeError("a bug")])
def test_no_sample_is_left_when_there_are_no_new_ones(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    samples = [RankUsage(1.0, 2, 3)]

    def read(pid: int, gpu: object) -> RankUsage:
        if samples:
            return samples.pop()
        raise error

    monkeypatch.setattr("quire.engine.executor.usage.read_usage", read)
    monkeypatch.setattr("quire.engine.executor.usage._SECONDS", 0.01)
    sampler = UsageSampler([1], None)
    try:
        until(lambda: not samples and sampler.usage == [None])
    finally:
        sampler.close()
    assert ("not sampled any more" in caplog.text) == isinstance(error, RuntimeError)
