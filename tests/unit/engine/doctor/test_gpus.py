"""The GPUs of made-up hosts."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from quire.engine.config.topology import LinkType
from quire.engine.doctor import gpus
from tests.unit.engine.config.test_topology import ALL_NVLINK, TWO_ISLANDS, FakeNvml
from tests.unit.engine.doctor.test_system import Root, by_name, statuses
from tests.unit.engine.doctor.test_system import root as root


class Nvml(FakeNvml):
    """Eight GPUs without anything wrong. `answers` has other results, by function."""

    NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 0, 1, 0
    NVML_NVLINK_MAX_LINKS = 4

    def __init__(self, links: Any = ALL_NVLINK, **answers: Any) -> None:
        super().__init__(links)
        usual: dict[str, Any] = {
            "nvmlSystemGetDriverVersion": "580.65.06",
            "nvmlSystemGetCudaDriverVersion_v2": 13000,
            "nvmlDeviceGetName": "NVIDIA H100",
            "nvmlDeviceGetTotalEccErrors": 0,
            "nvmlDeviceGetRemappedRows": (0, 0, 0, 0),
            "nvmlDeviceGetMigMode": [0, 0],
            "nvmlDeviceGetNvLinkState": 1,
            "nvmlDeviceGetComputeRunningProcesses": [],
            "nvmlDeviceGetMemoryInfo": types.SimpleNamespace(total=80 << 30, used=400 << 20),
        }
        for name, value in (usual | answers).items():
            setattr(self, name, self._answer(value))

    def _answer(self, value: Any) -> Any:
        def answer(*arguments: Any) -> Any:
            found = value(*arguments) if callable(value) else value
            if found is None:
                raise self.NVMLError("Not Supported")
            return found

        return answer

    def nvmlDeviceGetP2PStatus(self, one: int, other: int, capability: int) -> int:
        return 0 if capability == gpus._P2P_READ else super().nvmlDeviceGetP2PStatus(one, other, capability)


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def install(monkeypatch: pytest.MonkeyPatch, nvml: Nvml) -> Nvml:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    return nvml


def test_gpus_as_they_should_be(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = install(monkeypatch, Nvml())
    found = by_name(gpus.check_gpus())
    assert set(statuses(found.values()).values()) == {"ok"}
    assert found["GPUs"].found == "8 × NVIDIA H100 with 80.0 GiB, driver 580.65.06"
    assert found["GPU links"].found == "between 8 GPUs: NVLink"
    assert gpus.driver_version() == (13000, "580.65.06")
    assert nvml.sessions == 0


@pytest.mark.parametrize(
    ("name", "answers", "status", "text"),
    [
        ("GPU memory errors", {"nvmlDeviceGetTotalEccErrors": lambda *a: int(a == (2, 1, 0))}, "fault", "GPU 2: 1 unc"),
        ("GPU memory errors", {"nvmlDeviceGetTotalEccErrors": lambda *a: int(a[1] == 0)}, "ok", "8 corrected"),
        ("GPU memory errors", {"nvmlDeviceGetRemappedRows": (0, 1, 0, 1)}, "fault", "cannot be replaced"),
        ("GPU memory errors", {"nvmlDeviceGetRemappedRows": (0, 1, 1, 0)}, "warning", "to be replaced"),
        ("MIG", {"nvmlDeviceGetMigMode": [1, 1]}, "warning", "GPUs 0, 1, 2"),
        ("GPU links", {"nvmlDeviceGetNvLinkState": lambda gpu, link: int(link > 0)}, "warning", "1 of 4 NVLinks"),
        (
            "GPU processes",
            {"nvmlDeviceGetComputeRunningProcesses": [types.SimpleNamespace(pid=71, usedGpuMemory=3 << 30)]},
            *("warning", "GPU 0: process 71 (3.0 GiB)"),
        ),
        (
            "GPU processes",
            {"nvmlDeviceGetMemoryInfo": types.SimpleNamespace(total=80 << 30, used=30 << 30)},
            *("warning", "30.0 GiB in use by processes that are not listed"),
        ),
    ],
)
def test_what_may_be_wrong(
    name: str, answers: dict[str, Any], status: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, Nvml(**answers))
    found = by_name(gpus.check_gpus())[name]
    assert (found.status, text in found.found) == (status, True), found
    assert bool(found.remedy) == (status != "ok")


def test_slow_links_between_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Nvml(TWO_ISLANDS))
    found = by_name(gpus.check_gpus())["GPU links"]
    assert (found.status, found.found) == ("warning", "between 8 GPUs: NVLink, PCIe across CPU sockets")


def test_gpus_that_cannot_read_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = install(monkeypatch, Nvml())
    monkeypatch.setattr(
        nvml, "nvmlDeviceGetP2PStatus", lambda one, other, what: int(what == 0 and (one, other) == (0, 1))
    )
    found = by_name(gpus.check_gpus())["GPU peer access"]
    assert (found.status, found.found) == ("warning", "not possible between GPUs 0-1")


def test_a_driver_that_reports_little(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = (
        "TotalEccErrors",
        "RemappedRows",
        "MigMode",
        "NvLinkState",
        "ComputeRunningProcesses",
    )
    install(monkeypatch, Nvml(((LinkType.NVLINK,),), **{f"nvmlDeviceGet{name}": None for name in unknown}))
    assert statuses(gpus.check_gpus()) == {
        "GPUs": "ok",
        **dict.fromkeys(("GPU memory errors", "MIG", "GPU links"), "not applicable"),
        "GPU processes": "ok",
    }


def test_no_driver(monkeypatch: pytest.MonkeyPatch, root: Root) -> None:
    install(monkeypatch, Nvml(nvmlInit=None))
    assert statuses(gpus.check_gpus(root.path)) == {"GPUs": "not applicable"}
    assert gpus.driver_version() == (None, "")
    card = "sys/bus/pci/devices/0000:41:00.0"
    root.files({f"{card}/vendor": "0x10de", f"{card}/class": "0x030200"})
    (found,) = gpus.check_gpus(root.path)
    assert (found.status, found.found) == ("fault", "NVIDIA cards without a driver: 0000:41:00.0")


def test_a_variable_that_names_no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, Nvml())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "9")
    (found,) = gpus.check_gpus(tmp_path)
    assert (found.status, "CUDA_VISIBLE_DEVICES=9" in found.found) == ("fault", True)
