"""The entry point of the images: `docker run IMAGE MODEL` serves a model, `docker run IMAGE COMMAND` runs a command."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.server.cli.main import build_parser
from tests.unit.test_image import DOCKERFILE


@pytest.fixture
def container(tmp_path: Path) -> Callable[..., list[str]]:
    """Run the entry point of the images, and return the arguments that `quire` gets."""
    (instruction,) = re.findall(r"^ENTRYPOINT (\[.*?\])$", DOCKERFILE, flags=re.M | re.S)
    entry_point = json.loads(instruction.replace("\\\n", ""))
    for name, script in (("tini", 'shift 2\nexec "$@"'), ("quire", 'printf "%s\\n" "$@"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)

    def run(*arguments: str) -> list[str]:
        command, environment = [*entry_point, *arguments], {"PATH": f"{tmp_path}:/usr/bin:/bin"}
        return subprocess.run(
            command, env=environment, text=True, check=True, stdout=subprocess.PIPE
        ).stdout.splitlines()

    return run


def test_a_container_takes_a_model_as_vllms_does(container: Callable[..., list[str]]) -> None:
    assert container("org/a model", "-tp", "2") == ["serve", "org/a model", "-tp", "2"]
    assert container("--model", "org/model") == ["serve", "--model", "org/model"]


def test_a_container_takes_every_command(container: Callable[..., list[str]]) -> None:
    (commands,) = (action for action in build_parser()._actions if isinstance(action.choices, dict))
    assert commands.choices is not None
    for command in (*commands.choices, "--version", "--help", "-h"):
        assert container(command, "--json") == [command, "--json"]
