"""Standard error with a JSON log: also what native code writes in any process is a JSON object in each line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_RUN = """
import ctypes, logging, os, signal, subprocess, sys
from quire.engine.process import log, native_output

native_output.wrap()
log.setup("info", "test")
child = "import ctypes, os; ctypes.CDLL(None).dprintf(2, b'a panic\\\\nnote: its second line\\\\n'); os.abort()"
subprocess.run([sys.executable, "-c", child])
child = "import logging, sys; from quire.engine.process import log; log.setup('info', 'child'); "
child += "logging.getLogger('quire').warning('from a child %s', 'x' * 9000)"
subprocess.run([sys.executable, "-c", child])
logging.getLogger("quire").warning("from the parent")
os.write(2, b"half a line, \\xff")
"""


def run(last: str) -> tuple[int, list[dict[str, Any]]]:
    """The exit code, and the lines."""
    environment = os.environ | {"QUIRE_LOG_FORMAT": "json"}
    done = subprocess.run([sys.executable, "-c", _RUN + last], capture_output=True, env=environment, timeout=60)
    return done.returncode, [json.loads(line) for line in done.stderr.splitlines()]


@pytest.mark.parametrize("last", ["", "os.kill(os.getpid(), signal.SIGKILL)", "os._exit(3)"])
def test_every_line_is_a_json_object_however_the_process_ends(last: str) -> None:
    code, lines = run(last)
    assert code == {"": 0, "os._exit(3)": 3}.get(last, -signal.SIGKILL)
    native = [line for line in lines if line["logger"] == "stderr"]  # one, where the children were quick
    assert "\n".join(line["message"] for line in native) == "a panic\nnote: its second line\nhalf a line, \\xff"
    assert {line["level"] for line in native} == {"warning"}
    (child,) = (line for line in lines if line.get("process") == "child")
    assert child["message"].startswith("from a child")
    assert len(child["message"]) > 9000
    (parent,) = (line for line in lines if line not in (child, *native))
    assert parent["message"] == "from the parent"


def test_a_process_that_ends_waits_for_the_last_lines(tmp_path: Path) -> None:
    """Its container may end with it."""
    environment = os.environ | {"QUIRE_LOG_FORMAT": "json"}
    with open(tmp_path / "log", "wb") as file:
        subprocess.run([sys.executable, "-c", _RUN], stderr=file, env=environment, timeout=60)
        assert b"half a line" in (tmp_path / "log").read_bytes()
