"""Wrong configurations that only another process can notice also end in one line, before the server is ready."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.e2e.serving import quire
from tests.fakes.bad_configurations import CASES, BadConfiguration


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if not case.is_early], ids=lambda case: case.name)
def test_it_ends_in_one_line(case: BadConfiguration, tmp_path: Path) -> None:
    ended = subprocess.run(
        quire(*case.command(tmp_path)),
        env={**os.environ, **case.environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == case.code
    assert "Traceback" not in ended.stderr
    (line,) = re.findall(r"quire: error: .*", ended.stderr)
    assert re.search(case.message, line)
