"""`quire bench` as a process, and with one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.server.cli.bench.test_serve import refusal


def test_a_server_that_does_not_start_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "quire serve did not start:" in refusal(capsys, "startup", str(tmp_path / "none"))


def test_serve_is_no_slower_for_it() -> None:
    """Nothing of the benchmarks is imported, and no flag of theirs is made, until one is asked for."""
    program = (
        "import sys; from quire.server.cli.main import build_parser; build_parser().parse_args(['serve']); "
        "print(*(name for name in sys.modules if 'bench.' in name or name in ('numpy', 'tqdm', 'uvloop')))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"
