"""scripts/run_cluster.sh, with a docker that only records its arguments."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "run_cluster.sh"
# Each call is a line of the log; `run` goes on until something is written to the fifo, as a container would.
DOCKER = """#!/usr/bin/env bash
printf '%s\\n' "$(printf '%s|' "$@")mode=${RAY_AUTH_MODE:-},token=${RAY_AUTH_TOKEN:-},ip=${QUIRE_HOST_IP:-}" >> "$LOG"
if [[ $1 == run ]]; then echo started; exec cat "$FIFO" > /dev/null; fi
if [[ $1 == stop ]]; then exec 3<> "$FIFO"; exec 3>&-; fi
"""


class Script:
    """The script, with its own PATH and a folder for HF_HOME."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log, self.hf_home = folder, folder / "log", folder / "hf home"
        self.hf_home.mkdir()
        os.mkfifo(folder / "fifo")
        tools = folder / "bin"
        tools.mkdir()
        for name in ("bash", "sed", "cat", "env"):
            (tools / name).symlink_to(shutil.which(name) or "")
        self.tool("docker", DOCKER)
        self.tool("nvidia-smi", "#!/bin/sh\nexit 9\n")
        self.tool("ip", "#!/bin/sh\necho '10.0.0.1 via 10.0.0.254 dev eth0 src 10.0.0.2 uid 0'\n")
        self.env = {"PATH": str(tools), "LOG": str(self.log), "FIFO": str(folder / "fifo")}

    def tool(self, name: str, text: str) -> None:
        path = self.folder / "bin" / name
        path.write_text(text)
        path.chmod(0o755)

    def start(self, role: str, *docker: str, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [SCRIPT, "quire:1", "10.0.0.1", role, str(self.hf_home), *docker],
            env={**self.env, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, role: str, *docker: str, **env: str) -> list[str]:
        """Start, end it by SIGTERM once the container runs; returns the arguments of docker's first call, and its
        tail."""
        with self.start(role, *docker, **env) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "started\n"
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 143
        run, *rest = self.calls()
        name = run[run.index("--name") + 1]
        assert [call[0] for call in rest] == ["stop", "rm"]
        assert all(name in call for call in rest)
        return run

    def calls(self) -> list[list[str]]:
        return [line.split("|") for line in self.log.read_text().splitlines()]

    def refusal(self, *arguments: str, **env: str) -> str:
        ended = subprocess.run(
            [SCRIPT, *arguments], env={**self.env, **env}, capture_output=True, text=True, timeout=20
        )
        assert ended.returncode == 2
        assert not self.log.exists()
        (line,) = ended.stderr.splitlines()
        return line


@pytest.fixture
def script(tmp_path: Path) -> Script:
    return Script(tmp_path)


def test_the_head_listens_at_its_address(script: Script) -> None:
    run = script.run("--head")
    assert {"--init", "host"} < set(run)
    assert run[run.index("--network") + 1] == run[run.index("--ipc") + 1] == "host"
    assert f"{script.hf_home}:/cache/huggingface" in run
    assert run[run.index("--user") + 1] == f"{os.getuid()}:{os.getgid()}"
    assert "--gpus" not in run
    image = run.index("quire:1")
    assert run[image - 2 : image] == ["--entrypoint", "ray"]
    ray = run[image + 1 : -1]
    assert ray == [
        "start",
        "--block",
        "--node-ip-address=10.0.0.1",
        "--disable-usage-stats",
        "--head",
        "--port=6379",
    ]
    assert run[-1] == "mode=disabled,token=,ip=10.0.0.1"


def test_a_worker_joins_with_the_address_that_reaches_the_head(script: Script) -> None:
    run = script.run("--worker", RAY_PORT="7000")
    assert run[-3:-1] == ["--disable-usage-stats", "--address=10.0.0.1:7000"]
    assert "--node-ip-address=10.0.0.2" in run
    assert run[-1] == "mode=disabled,token=,ip=10.0.0.2"


@pytest.mark.parametrize("given", [["-e", "QUIRE_HOST_IP=10.0.0.7"], ["--env=QUIRE_HOST_IP=10.0.0.7"], []])
def test_a_given_address_is_used_by_ray_too(script: Script, given: list[str]) -> None:
    run = script.run("--worker", *given, **{} if given else {"QUIRE_HOST_IP": "10.0.0.7"})
    assert "--node-ip-address=10.0.0.7" in run
    assert run[-1].endswith("ip=10.0.0.7")


def test_gpus_and_arguments_of_docker_go_through(script: Script) -> None:
    script.tool("nvidia-smi", "#!/bin/sh\nexit 0\n")
    run = script.run("--worker", "-v", "/data:/data")
    assert run[run.index("--gpus") + 1] == "all"
    assert run.index("/data:/data") < run.index("quire:1")
    script.log.unlink()
    assert script.run("--worker", "--gpus", "device=1").count("--gpus") == 1


@pytest.mark.parametrize("by_file", [False, True])
def test_a_token_reaches_the_container_and_no_command_line(script: Script, by_file: bool) -> None:
    (script.folder / "token").write_text("secret\n")
    path = {"RAY_AUTH_TOKEN_PATH": str(script.folder / "token")}
    run = script.run("--worker", **path if by_file else {"RAY_AUTH_TOKEN": "secret"})
    assert run[-1].startswith("mode=token,token=secret,")
    assert "RAY_AUTH_TOKEN" in run
    assert not any("secret" in argument for argument in run[:-1])


def test_it_ends_with_its_container(script: Script) -> None:
    script.tool("docker", '#!/bin/bash\nprintf "%s|" "$@" >> "$LOG"; echo >> "$LOG"\n[[ $1 != run ]] || exit 7\n')
    with script.start("--head") as process:
        assert process.wait(20) == 7
    assert [call[0] for call in script.calls()] == ["run", "stop", "rm"]


def test_what_is_wrong_is_one_line(script: Script) -> None:
    home = str(script.hf_home)
    assert "usage:" in script.refusal("quire:1", "10.0.0.1", "--head")
    assert "expected --head or --worker, got -head" in script.refusal("quire:1", "10.0.0.1", "-head", home)
    assert "/nowhere (HF_HOME)" in script.refusal("quire:1", "10.0.0.1", "--head", "/nowhere")
    other = script.refusal("quire:1", "10.0.0.1", "--head", home, QUIRE_HOST_IP="10.0.0.9")
    assert "QUIRE_HOST_IP is 10.0.0.9 on the head; it must be HEAD_IP, 10.0.0.1" in other
    assert "needs RAY_AUTH_TOKEN" in script.refusal("quire:1", "10.0.0.1", "--head", home, RAY_AUTH_MODE="token")
    script.tool("ip", "#!/bin/sh\nexit 2\n")
    assert "no interface reaches 10.0.0.1" in script.refusal("quire:1", "10.0.0.1", "--worker", home)
