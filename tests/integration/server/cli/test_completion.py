"""The scripts of `quire completion` complete command lines, as their shells run them."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys

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
    "quire serve --help=sch": {"--help=scheduler"},
    # As bash breaks words at =, and as it does without = in COMP_WORDBREAKS.
    "quire serve a --distributed-executor-backend = r": {"ray"},
    "quire serve a --distributed-executor-backend =": {"auto", "uni", "mp", "ray"},
    "quire serve a --distributed-executor-backend=r": {"--distributed-executor-backend=ray"},
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


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("quire", ("-a", "profile")),
        ("quire serve", ("-l", "max-num-seqs")),
        ("quire bench", ("-a", "throughput")),
        ("quire bench serve", ("-l", "base-url")),
    ],
)
def test_fish_tells_commands_apart_by_the_words_before(
    line: str, offered: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = line.split()[1:]

    def holds(condition: str) -> bool:
        negated, name, among = re.fullmatch(r"(not )?(\S+) ?(.*)", condition).groups()  # type: ignore[union-attr]
        true = {"__fish_use_subcommand": not words, "__fish_seen_subcommand_from": bool({*words} & {*among.split()})}
        return true[name] is not bool(negated)

    rules = [shlex.split(each.partition(" -d ")[0]) for each in script("fish", capsys).splitlines()[1:]]
    found = {
        (kind, word)
        for _, _, _, _, conditions, kind, word, *_ in rules
        if all(holds(each) for each in conditions.split("; and "))
    }
    others = {("-a", "profile"), ("-l", "max-num-seqs"), ("-a", "throughput"), ("-l", "base-url")} - {offered}
    assert offered in found
    assert not others & found


def test_zsh_completes_at_the_first_call_of_the_autoloaded_file(capsys: pytest.CaptureFixture[str]) -> None:
    first, *_, last = script("zsh", capsys).splitlines()
    assert first == "#compdef quire"
    assert re.search(r'funcstack\[1\]" == _quire .*_quire "\$@".*else compdef _quire quire', last)


def test_a_reader_may_end_early(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        assert main(["completion", "bash"]) == 1
