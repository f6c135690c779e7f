"""The scripts of `quire completion` complete command lines, as their shells run them."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from quire.server.cli.main import main

LINES = {
    "quire pro": {"profile"},
    "quire bench th": {"throughput"},
    "quire serve --max-num-s": {"--max-num-seqs"},
    "quire serve a --distributed-executor-backend r": {"ray"},
    "quire bench serve --base-ur": {"--base-url"},
    "quire completion f": {"fish"},
    "quire serve --config ": set(),
}


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("line", LINES)
def test_bash_completes(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = line.split(" ")
    quoted = " ".join(f"'{word}'" for word in words)
    ask = f"COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _quire; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(["bash", "-c", script("bash", capsys) + ask], capture_output=True, text=True, check=True)
    assert not done.stderr
    assert {*done.stdout.split()} == LINES[line]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_scripts_of_other_shells_name_every_flag(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = script(shell, capsys)
    assert "max-num-seqs" in text
    if path := shutil.which(shell):
        subprocess.run([path, "-n"], input=text, text=True, check=True)
