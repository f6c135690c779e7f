"""The unit file of systemd."""

from __future__ import annotations

import configparser
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from quire.server.cli import parent
from quire.server.cli.main import build_parser
from quire.server.cli.serve_options import read_options
from quire.server.config.server_options import ServerOptions

UNIT = Path("deploy/systemd/quire.service")


def test_the_unit_starts_reloads_and_stops_the_server(tmp_path: Path) -> None:
    unit = configparser.ConfigParser(interpolation=None, delimiters=("=",))
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(UNIT.read_text())
    service = unit["Service"]
    program, *arguments = shlex.split(service["ExecStart"])
    assert Path(program).name == "quire"
    config = tmp_path / "quire.yaml"
    config.write_text("port: 8001\n")
    parsed = build_parser().parse_args([str(config) if "quire.yaml" in each else each for each in arguments])
    assert read_options(parsed)[1] == ServerOptions(port=8001)
    assert service["Type"] == "notify"
    assert shlex.split(service["ExecReload"])[1:] == ["-HUP", "$MAINPID"]
    assert signal.Signals[service["KillSignal"]] == signal.SIGTERM
    assert float(service["TimeoutStopSec"]) >= ServerOptions().drain_seconds() + parent._STOP_SECONDS
    assert service["RestartPreventExitStatus"] == "2"
    if (analyze := shutil.which("systemd-analyze")) is not None:  # where it is installed, it has no complaint
        (copy := tmp_path / "quire.service").write_text(UNIT.read_text().replace(program, sys.executable))
        done = subprocess.run([analyze, "verify", str(copy)], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
