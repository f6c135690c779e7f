"""Whether hosts reach each other; they are probers of this one."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from quire.engine.cluster.reachability import (
    Answer,
    Listen,
    Listening,
    Number,
    Prober,
    Reach,
    Reached,
    Request,
    Target,
    find_blocked,
)

ADDRESS = "127.0.0.1"


def test_a_stranger_gets_no_answer() -> None:
    prober = Prober(ADDRESS)
    listening = prober.answer(Listen(b"s" * 16, []))
    assert isinstance(listening, Listening)
    assert len(listening.assigned) == 3
    target = Target(listening.address, listening.assigned[0])
    try:
        for secret, problem in ((b"s" * 16, ""), (b"x" * 16, "another program answers there")):
            assert prober.answer(Reach(secret, [target])) == Reached(secret, [problem])
    finally:
        prober.close()
    with socket.socket() as probe:
        probe.bind((ADDRESS, 0))
        closed = Target(ADDRESS, probe.getsockname()[1])
        assert prober.answer(Reach(b"s" * 16, [closed])) == Reached(b"s" * 16, ["connection refused"])


def test_a_silent_connection_keeps_no_port_from_others() -> None:
    """Such as a port scanner's."""
    prober = Prober(ADDRESS)
    listening = prober.answer(Listen(b"s" * 16, []))
    assert isinstance(listening, Listening)
    target = Target(listening.address, listening.assigned[0])
    try:
        with socket.create_connection((target.address, target.port)):
            assert prober.answer(Reach(b"s" * 16, [target])) == Reached(b"s" * 16, [""])
    finally:
        prober.close()


def test_a_blocked_host_is_named_once_with_the_flags() -> None:
    """Node 1 cannot reach node 0, whose fixed port is open; nobody asks node 1 to listen."""

    def ask(requests: Mapping[Number, Request]) -> dict[Number, Answer]:
        if isinstance(requests.get(None), Listen):
            assert all(
                request == Listen(request.secret, [29501] * (host is None), "GLOO_SOCKET_IFNAME")
                for host, request in requests.items()
                if isinstance(request, Listen)
            )
            return {
                None: Listening(requests[None].secret, "10.0.0.1", [40001, 40002], [29501]),
                1: Listening(requests[None].secret, "10.0.0.2", [40003], []),
            }
        (reach,) = requests.values()
        assert isinstance(reach, Reach)
        assert reach.targets == [Target("10.0.0.1", port) for port in (40001, 40002, 29501)]
        return {1: Reached(reach.secret, ["timed out", "timed out", ""])}

    names: dict[Number, str] = {None: "node 0 (10.0.0.1)", 1: "node 1 (10.0.0.2)"}
    found, count = find_blocked(
        ask, names, [(1, None)], address_flag="--master-addr", variable="GLOO_SOCKET_IFNAME", fixed={None: [29501]}
    )
    (blocked,) = found
    assert count == 3
    assert str(blocked).startswith(
        "port 40001: node 1 (10.0.0.2) cannot reach it on node 0 (10.0.0.1): timed out; open it in the firewall of "
        "10.0.0.1 for 10.0.0.2, like all from "
    )
    assert str(blocked).endswith(
        "which the operating system assigns, or use another network (--master-addr, QUIRE_HOST_IP, GLOO_SOCKET_IFNAME)"
    )
