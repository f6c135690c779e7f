"""The output of `quire doctor`, and its exit code."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from quire.engine.doctor.check import Check, fault, not_applicable, ok, warning
from quire.engine.protocol.errors import ConfigError
from quire.server.cli import doctor
from quire.server.cli.doctor import DoctorOptions, Output
from quire.server.cli.main import build_parser, main

GOOD = ok("memory", "enough", free_bytes=7.0)
SLOW = warning("clock", "not synchronized", "run chrony")
BAD = fault("port 8000", "in use", "choose another with --port")
NONE = not_applicable("GPUs", "no NVIDIA GPU is visible")


@pytest.mark.parametrize(
    ("checks", "code", "counts"),
    [
        ([GOOD, SLOW, NONE], 0, "1 ok, 1 warning, 0 fault, 1 not applicable"),
        ([GOOD, BAD], 1, "1 ok, 0 warning, 1 fault, 0 not applicable"),
    ],
)
def test_lines_and_the_exit_code(
    checks: list[Check], code: int, counts: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "check_host", lambda options: iter(checks))
    assert main(["doctor"]) == code
    first, *lines, last = capsys.readouterr().out.splitlines()
    assert (first, last) == ("this host:", counts)
    assert lines == [f"  {check.line}" for check in checks]


def test_lines_are_printed_when_a_check_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    def checks() -> Iterator[Check]:
        yield GOOD
        assert capsys.readouterr().out == "this host:\n  ok              memory: enough\n"
        yield BAD

    Output(False).host("this host", checks())
    text = "  fault           port 8000: in use; choose another with --port\n"
    assert capsys.readouterr().out == text


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output(True)
    output.host("node 0", [GOOD, NONE])
    output.host("node 1", [SLOW])
    output.between(BAD)
    assert output.finish() == 1
    result = json.loads(capsys.readouterr().out)
    assert result["status"] == "fault"
    assert [host["name"] for host in result["hosts"]] == ["node 0", "node 1"]
    assert result["hosts"][0]["checks"][0] == {
        "name": "memory",
        "status": "ok",
        "found": "enough",
        "remedy": "",
        "values": {"free_bytes": 7.0},
    }
    assert [check["remedy"] for check in result["cluster"]] == ["choose another with --port"]


def test_ports_that_a_server_listens_on() -> None:
    def numbers(**options: Any) -> list[int]:
        return [port.number for port in doctor._ports(DoctorOptions(**options))]

    assert numbers() == [8000, 29501, 29550]
    assert numbers(port=0, data_parallel_rpc_port=7) == [29501, 7]
    assert numbers(nnodes=2) == [8000, 29550]
    assert numbers(nnodes=2, node_rank=1) == []


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--nnodes", "2", "--node-rank", "2"], "--node-rank 2 is out of range: --nnodes is 2"),
        (
            ["--distributed-timeout-seconds", "-1"],
            r"--distributed-timeout-seconds must be above 0 and at most 1e\+09, got -1",
        ),
        (["--distributed-timeout-seconds", "nan"], "--distributed-timeout-seconds must be .*, got nan"),
        (["--distributed-timeout-seconds", "inf"], "--distributed-timeout-seconds must be .*, got inf"),
        (["--master-port", "70000"], "--master-port 70000: must be from 0 to 65535"),
    ],
)
def test_values_that_are_impossible(arguments: list[str], error: str) -> None:
    parsed = build_parser().parse_args(["doctor", *arguments])
    with pytest.raises(ConfigError, match=error):
        parsed.run(parsed)


def test_the_first_host_of_several_at_a_foreign_address(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("QUIRE_HOST_IP", raising=False)
    monkeypatch.setenv("QUIRE_CLUSTER_TOKEN", "a token for tests only")
    monkeypatch.setattr(doctor, "check_host", lambda options: iter([GOOD]))
    arguments = ("--nnodes", "2", "--master-addr", "192.0.2.1")
    assert main(["doctor", *arguments]) == 1
    text = capsys.readouterr().out
    assert "fault           hosts: --master-addr 192.0.2.1 is not an address of this host" in text
    assert "; give every host one of node 0's addresses as --master-addr" in text
