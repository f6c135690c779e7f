"""Every wrong configuration that the first process can notice ends in one line, before anything is started."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest

from quire.engine.config.engine_config import EngineConfig
from quire.engine.process import current_process
from quire.server.cli import serve
from quire.server.cli.main import main
from quire.server.config.server_options import ServerOptions
from quire.server.text.chat_formats import ChatFormats
from quire.server.text.input_processor import InputProcessor
from tests.fakes.bad_configurations import CASES, BadConfiguration


def load(config: EngineConfig, options: ServerOptions, *others: Any, **named: Any) -> None:
    """The part of an API process's start that runs while the engine starts."""
    InputProcessor.load(config.model, ChatFormats.of(options))
    pytest.fail("it would be served")


@pytest.mark.parametrize("case", [case for case in CASES if case.is_early], ids=lambda case: case.name)
def test_it_ends_in_one_line(
    case: BadConfiguration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("quire.server.cli.parent.Server", load)
    monkeypatch.setattr(current_process, "set_name", lambda name: None)
    monkeypatch.setattr(serve, "prepared_core", lambda options: contextlib.nullcontext())
    for name, value in case.environment.items():
        monkeypatch.setenv(name, value)
    try:
        code: Any = main(case.command(tmp_path))
    except SystemExit as ended:  # of argparse
        code = ended.code
    assert code == case.code
    (line,) = (line for line in capsys.readouterr().err.splitlines() if not line.startswith("usage:"))
    assert re.match(rf"quire( serve)?: error: .*({case.message})", line)
