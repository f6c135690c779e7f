"""Interfaces, names, ports and variables of made-up hosts; the ports are real ones."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from quire.engine.doctor import network
from quire.engine.doctor.network import Port
from tests.unit.engine.doctor.test_system import Root, by_name, statuses
from tests.unit.engine.doctor.test_system import root as root


def interface(name: str, state: str = "up", mtu: int = 1500, speed: str = "25000") -> dict[str, str]:
    folder = f"sys/class/net/{name}"
    return {f"{folder}/operstate": state, f"{folder}/mtu": str(mtu), f"{folder}/speed": speed}


def test_interfaces_and_infiniband_devices(root: Root) -> None:
    path = root.files(interface("lo", "unknown", 65536) | interface("eth0") | interface("eth1", "down"))
    (found,) = network.links(path, "eth0")
    assert (found.status, found.found) == ("ok", "eth0 (25 Gbit/s, MTU 1500)")
    root.files({f"sys/class/infiniband/mlx5_{number}/node_type": "1" for number in (1, 0)})
    assert network.devices(path) == ["mlx5_0", "mlx5_1"]


@pytest.mark.parametrize(
    ("files", "used", "status"),
    [
        (interface("eth0", mtu=1400, speed="-1"), "eth0", "warning"),
        (interface("eth0", mtu=1400), None, "ok"),
        (interface("eth0", mtu=1400) | interface("eth1", mtu=9000), "eth1", "ok"),
        (interface("eth0") | interface("eth1", "down"), "eth1", "fault"),
        (interface("eth0", "down"), None, "not applicable"),
        (interface("lo", mtu=65536), "lo", "not applicable"),
    ],
)
def test_the_interface_that_reaches_other_hosts(
    root: Root, files: dict[str, str], used: str | None, status: str
) -> None:
    assert statuses(network.links(root.files(files), used))["network interfaces"] == status


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, {"NCCL and gloo variables": "ok"}),
        ({"NCCL_SOCKET_IFNAME": "eth"}, {"NCCL and gloo variables": "ok"}),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, {"NCCL_SOCKET_IFNAME": "fault"}),
        ({"NCCL_SOCKET_IFNAME": "^lo,docker"}, {"NCCL and gloo variables": "ok"}),
        ({"NCCL_SOCKET_IFNAME": "^eth"}, {"NCCL_SOCKET_IFNAME": "fault"}),
        ({"GLOO_SOCKET_IFNAME": "eth"}, {"GLOO_SOCKET_IFNAME": "fault"}),
        ({"GLOO_SOCKET_IFNAME": "eth0"}, {"NCCL and gloo variables": "ok"}),
        ({"NCCL_IB_HCA": "mlx5_1:1"}, {"NCCL_IB_HCA": "fault"}),
        ({"NCCL_IB_HCA": "=mlx5_0:1"}, {"NCCL and gloo variables": "ok"}),
        ({"NCCL_IB_DISABLE": "1"}, {"NCCL_IB_DISABLE": "warning"}),
        ({"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "0"}, {"NCCL_P2P_DISABLE": "warning"}),
    ],
)
def test_communication_variables(variables: dict[str, str], expected: dict[str, str]) -> None:
    assert statuses(network.communication_variables(variables, ["eth0"], ["mlx5_0"])) == expected


def resolve(name: str) -> list[str]:
    return ["127.0.1.1"]


@pytest.mark.parametrize(("nnodes", "status"), [(1, "ok"), (2, "warning")])
def test_a_host_name_that_is_a_loopback_address(nnodes: int, status: str) -> None:
    found = by_name(network.names(nnodes, "127.0.0.1", 0, {}, resolve))
    assert found["host name"].status == status
    assert found["QUIRE_HOST_IP"].status == "not applicable"


def test_a_host_name_that_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> list[str]:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "gethostname", lambda: "nobody")
    found = by_name(network.names(1, "127.0.0.1", 0, {}, unknown))["host name"]
    assert (found.status, found.found) == ("warning", "nobody cannot be resolved: Name or service not known")


@pytest.mark.parametrize("name", ["QUIRE_HOST_IP", "VLLM_HOST_IP"])
def test_an_address_of_this_host(name: str) -> None:
    def has_address(address: str) -> bool:
        return address == "10.0.0.1"

    for address, status in (("10.0.0.1", "ok"), ("10.0.0.9", "fault")):
        assert statuses(network.names(1, "", 0, {name: address}, resolve, has_address))[name] == status


@pytest.mark.parametrize(
    ("master", "node", "status"),
    [("127.0.0.1", 0, "ok"), ("127.0.0.1", 1, "warning"), ("10.0.0.1", 1, "ok"), ("elsewhere", 1, "fault")],
)
def test_the_address_of_host_0(master: str, node: int, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def source(address: str) -> str:
        if address == "elsewhere":
            raise OSError(101, "Network is unreachable")
        return {"10.0.0.1": "10.0.0.2"}.get(address, address)

    monkeypatch.setattr(network, "source_address", source)
    assert statuses(network.names(2, master, node, {}, resolve))["--master-addr"] == status


def test_ports() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        needed, other = (Port("the API", "127.0.0.1", number, "use --port", is_needed) for is_needed in (True, False))
        (found,) = network.ports([needed])
        assert (found.name, found.status) == (f"port {number}", "fault")
        assert "another program listens there" in found.found
        assert found.remedy.startswith("use --port; ss -ltnp")
        assert [check.status for check in network.ports([other])] == ["warning"]
    assert [check.status for check in network.ports([needed])] == ["ok"]


def test_a_port_of_an_address_elsewhere() -> None:
    (found,) = network.ports([Port("the API", "192.0.2.1", 0, "use --host")])
    assert (found.status, found.remedy) == ("fault", "use --host")


def test_a_host_without_sys(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        list(network.links(tmp_path))
