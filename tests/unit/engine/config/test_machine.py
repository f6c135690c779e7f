"""Machines as `--gpus` describes them, and as NVML names them."""

from __future__ import annotations

import logging

import pytest

from quire.engine.config import devices, machine
from quire.engine.config.devices import Devices
from quire.engine.config.machine import GPUS, describe, this_machine
from quire.engine.config.options import EngineOptions
from quire.engine.config.topology import LinkType
from quire.engine.protocol.errors import ConfigError


@pytest.mark.parametrize(
    ("gpus", "count", "name"),
    [
        ("8xH100-80G", 8, "H100-80G"),
        ("4xA100-40G", 4, "A100-40G"),
        ("a100", 1, "A100-80G"),
        ("H200", 1, "H200-141G"),
        ("2x B200", 2, "B200-180G"),
        ("L40S", 1, "L40S-48G"),
        ("A10G", 1, "A10G-24G"),
        ("8×RTX-4090", 8, "RTX-4090-24G"),
        ("8XH100", 8, "H100-80G"),
        ("H100-SXM", 1, "H100-80G"),
        ("H100 SXM5", 1, "H100-80G"),
        ("A100-SXM4-80GB", 1, "A100-80G"),
        ("RTX4090", 1, "RTX-4090-24G"),
    ],
)
def test_known_gpus_are_named(gpus: str, count: int, name: str) -> None:
    described = describe(gpus, 2, 50.0)
    assert (described.count, described.nodes, described.device.name) == (count, 2, name)


def test_an_unknown_gpu_is_described_by_its_figures() -> None:
    described = describe("4xA800:80,2039,312,200", 1, 25.0)
    device = described.device
    assert (described.count, device.name, device.memory, device.bandwidth) == (4, "A800", 80 * 10**9, 2039e9)
    assert (device.flops[16], device.link.bandwidth, described.network.bandwidth) == (312e12, 200e9, 25e9)


def test_a_bridge_joins_few_gpus() -> None:
    links = {gpus: describe(gpus, 1, 50.0).device.link for gpus in ("2xH100-NVL", "8xH100-NVL", "4xH200-NVL")}
    assert [link.name for link in links.values()] == ["NVLink", "PCIe", "NVLink"]
    assert links["8xH100-NVL"].bandwidth == 64e9
    assert not describe("2xH100-NVL", 1, 50.0).device.has_multicast


@pytest.mark.parametrize("gpus", ["", "8x", "0xH100", "8", "X:1", "X:1,2,3,4,5", "X:0,1,1", "X:1,2,a", "H9000", "RTX"])
def test_what_is_no_gpu_is_rejected_with_the_syntax(gpus: str) -> None:
    with pytest.raises(ConfigError, match=r"--gpus .*COUNTx"):
        describe(gpus, 1, 50.0)


@pytest.mark.parametrize(
    ("nvml", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-80G"),
        ("NVIDIA H100 PCIe", "H100-PCIe-80G"),
        ("NVIDIA H100 NVL", "H100-NVL-94G"),
        ("NVIDIA A100-SXM4-40GB", "A100-40G"),
        ("NVIDIA A100-SXM4-80GB", "A100-80G"),
        ("NVIDIA A100-PCIE-40GB", "A100-PCIe-40G"),
        ("NVIDIA A10G", "A10G-24G"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada-48G"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090-24G"),
        ("NVIDIA H200 NVL", "H200-NVL-141G"),
        ("NVIDIA GH200 480GB", "GH200-96G"),
        ("NVIDIA GB200", "GB200-186G"),
        ("NVIDIA B300 SXM6 AC", "B300-270G"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX-PRO-6000-Blackwell-96G"),
        ("NVIDIA RTX A6000", "RTX-A6000-48G"),
        ("Tesla T4", "T4-16G"),
        ("Tesla V100-SXM2-16GB", "V100-16G"),
        ("Tesla V100-PCIE-32GB", "V100-PCIe-32G"),
        ("NVIDIA L20", "L20-48G"),
    ],
)
def test_this_machine_is_the_visible_gpus(nvml: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the memory that is free, and with PCIe between GPUs whose NVLinks do not connect all of them."""
    link = LinkType.NVLINK
    monkeypatch.setattr(devices, "free_gpu_memory", lambda: [3 << 30, 2 << 30])
    monkeypatch.setattr(devices, "gpu_names", lambda: [nvml] * 2)
    monkeypatch.setattr(devices, "find", lambda kind, groups: Devices("cuda", 2, 2 << 30, (), ((link, link),) * 2))
    known = next(each for each in GPUS if each.name == name)
    found = this_machine(EngineOptions(), 1, 50.0)
    assert (found.device.name, found.count, found.kind, found.device.memory) == (name, 2, "cuda", 2 << 30)
    assert found.device.link == known.link
    link = LinkType.PCIE
    assert this_machine(EngineOptions(), 1, 50.0).device.link.name == "PCIe"


@pytest.mark.parametrize(
    "nvml",
    [
        "NVIDIA Titan V",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA H20-3e",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA A40-48Q",
        "NVIDIA A100-SXM-64GB",
        "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
        "Quadro RTX 6000",
    ],
)
def test_a_gpu_without_figures_is_named(
    nvml: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is not taken for another one with a similar name; a warning says whose figures are used."""
    monkeypatch.setattr(devices, "free_gpu_memory", lambda: [1 << 30] * 2)
    monkeypatch.setattr(devices, "gpu_names", lambda: [nvml] * 2)
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    links = ((LinkType.PCIE,) * 2,) * 2
    monkeypatch.setattr(devices, "find", lambda kind, groups: Devices("cuda", 2, 1 << 30, (), links))
    found = this_machine(EngineOptions(), 1, 50.0).device
    [message] = caplog.messages
    assert message.startswith(f"the bandwidth and FLOPS of the GPU {nvml} are not known: layouts are compared with")
    assert (found.name, found.memory, found.link.name) == (f"{nvml} (with the figures of A100-80G)", 1 << 30, "PCIe")
    assert found.capability is None


def test_a_cpu_is_one_device_with_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_MEASURED_BYTES", (1 << 20, 0))
    found = this_machine(EngineOptions(device="cpu"), 3, 50.0)
    assert (found.kind, found.count, found.nodes) == ("cpu", 1, 3)
    assert 0 < found.device.bandwidth <= found.device.cache_bandwidth
    assert 0 < found.device.flops[32] <= found.device.flops[16]
    assert "TFLOPS in 32 / 16 / 8 bits" in found.text
