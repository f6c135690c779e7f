"""Tasks that run in a process of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.engine.process import tool
from quire.engine.protocol.errors import ConfigError

_DIES = """
import os
from quire.engine.process import tool

def handle(out):
    tool.part_of(out).mkdir(exist_ok=True)
    os.kill(os.getpid(), 9)

tool.main(handle)
"""


def test_what_a_killed_process_has_written_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dies.py").write_text(_DIES)
    monkeypatch.syspath_prepend(tmp_path)
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match=r"not written, as the process that writes it died \(-9\)"):
        tool.run("dies", out, out)
    assert not tool.part_of(out).exists()
    tool.part_of(out).mkdir()  # another command's
    with pytest.raises(ConfigError):
        tool.run("dies", out, out)
    assert tool.part_of(out).exists()
