"""The sources of the cluster token, and the hosts that make one."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from quire.engine.cluster.cluster_token import ENVIRONMENT, other_command, with_cluster_token
from quire.engine.config.options import EngineOptions
from quire.engine.protocol.errors import ConfigError

TOKEN = "a token for tests only"
FIRST: dict[str, Any] = {"nnodes": 2, "pipeline_parallel_size": 2, "master_addr": "10.0.0.1"}
SECOND: dict[str, Any] = FIRST | {"node_rank": 1}


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    monkeypatch.setattr(sys, "argv", ["/bin/quire", "serve", "M", "--nnodes", "2", "--node-rank", "0", "-pp=2"])


def find(is_headless: bool = False, **options: Any) -> str | None:
    return with_cluster_token(EngineOptions(**options), is_headless=is_headless).cluster_token


def test_flag_file_and_environment_in_this_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "token"
    file.write_text(f" {TOKEN} of the file\n")
    monkeypatch.setenv(ENVIRONMENT, f"{TOKEN} of the environment")
    assert find(**SECOND, cluster_token=TOKEN, cluster_token_file=str(file)) == TOKEN
    assert find(**SECOND, cluster_token_file=str(file)) == f"{TOKEN} of the file"
    assert find(**SECOND) == f"{TOKEN} of the environment"
    with pytest.raises(ConfigError, match=r"--cluster-token-file /none: cannot read the file: .*No such file"):
        find(**SECOND, cluster_token_file="/none")


@pytest.mark.parametrize("source", ["flag", "environment"])
def test_a_short_token_is_refused(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"cluster_token": "secret"} if source == "flag" else {}
    if source == "environment":
        monkeypatch.setenv(ENVIRONMENT, "secret")
    with pytest.raises(ConfigError, match=r"(--cluster-token|QUIRE_CLUSTER_TOKEN): the token has 6 characters; use"):
        find(**FIRST, **options)


@pytest.mark.parametrize(
    ("options", "is_headless", "others"),
    [
        (FIRST, False, "M --nnodes 2 -pp=2 --node-rank 1 --headless"),
        (
            {"data_parallel_size": 2, "data_parallel_size_local": 1, "data_parallel_address": "10.0.0.1"},
            False,
            "-rank 1 --headless",
        ),
        ({"data_parallel_address": "10.0.0.1"}, False, "--data-parallel-start-rank 1 --headless"),
        (
            {
                "data_parallel_size": 2,
                "data_parallel_start_rank": 0,
                "data_parallel_address": "10.0.0.1",
                "enable_expert_parallel": True,
            },
            False,
            "--data-parallel-start-rank 1",
        ),
    ],
)
def test_the_first_host_makes_a_token_and_prints_the_command_of_the_others(
    options: dict[str, Any], is_headless: bool, others: str, capsys: pytest.CaptureFixture[str]
) -> None:
    token = find(is_headless, **options)
    assert token is not None
    printed = capsys.readouterr().out
    assert re.search(rf"\n  QUIRE_CLUSTER_TOKEN={re.escape(token)} quire serve .*{re.escape(others)}", printed)
    assert find(is_headless, **options) != token


@pytest.mark.parametrize(
    ("options", "is_headless"),
    [
        (SECOND, True),
        ({"data_parallel_size": 2, "data_parallel_start_rank": 0, "data_parallel_address": "10.0.0.1"}, True),
        ({"data_parallel_size": 2, "data_parallel_start_rank": 1, "data_parallel_address": "10.0.0.1"}, True),
    ],
)
def test_another_host_without_a_token_is_told_where_to_get_it(options: dict[str, Any], is_headless: bool) -> None:
    with pytest.raises(ConfigError, match=r"needs the --cluster-token of the host at --.* 10.0.0.1: set QUIRE_CLUSTER"):
        find(is_headless, **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"data_parallel_size": 2},
        {"data_parallel_size": 2, "data_parallel_address": "10.0.0.1", "enable_expert_parallel": True},
        {"nnodes": 2, "pipeline_parallel_size": 2, "node_rank": 1},
        {"data_parallel_size": 2, "data_parallel_start_rank": 1, "data_parallel_address": "10.0.0.1"},
    ],
    ids=["one rank", "one host", "experts on one host", "loopback", "independent"],
)
def test_no_token_is_made_where_none_is_needed(options: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert find(**options) is None
    assert not capsys.readouterr().out


def test_the_command_of_many_hosts_leaves_the_number_open() -> None:
    options = EngineOptions(nnodes=4, pipeline_parallel_size=4)
    command = other_command(options, ["quire", "serve", "my model", "--node-rank=0", "--nnodes", "4"])
    assert command == "quire serve 'my model' --nnodes 4 --node-rank R --headless"
    secret = ["--api-key", "sk-1", "sk-2", "--nnodes", "4", "--cluster-token=abc", "--node-rank", "0", "model"]
    command = other_command(options, ["quire", "serve", *secret])
    assert command == "quire serve --nnodes 4 model --node-rank R --headless"
    command = other_command(options, ["quire", "doctor", "--nnodes", "4", "--node-rank", "0"])
    assert command == "quire doctor --nnodes 4 --node-rank R"


def test_no_secret_is_shown() -> None:
    assert TOKEN not in repr(EngineOptions(cluster_token=TOKEN))
