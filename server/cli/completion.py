"""`quire completion SHELL`: print a script that completes command lines, made from the parsers of all commands."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from quire.server.config import help
from quire.server.config.lazy import LazyParser

INSTALL = {
    "bash": 'add `eval "$(quire completion bash)"` to ~/.bashrc',
    "zsh": "write the output to a file _quire in a folder of $fpath",
    "fish": "write the output to ~/.config/fish/completions/quire.fish",
}


@dataclass(frozen=True)
class _Command:
    """A command, or the group of commands that begin with `name`."""

    name: str
    """Without `quire`, such as `bench serve`."""
    words: dict[str, str]
    """Flags and commands, with their help."""
    values: dict[str, tuple[str, ...]]
    """The values of flags, by flag; empty if any is possible, as the name of a file."""


def fill(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the subcommand."""
    hints = "; ".join(f"{shell}: {text}" for shell, text in INSTALL.items())
    parser.add_argument("shell", choices=[*INSTALL], metavar="SHELL", help=hints)
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Print the script. The exit code is 1 if its reader, such as `head`, ends before."""
    from quire.server.cli.main import build_parser

    commands = [*_commands(build_parser(), "")]
    try:
        print("\n".join({"bash": _bash, "zsh": _zsh, "fish": _fish}[parsed.shell](commands)), flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes again when it exits
        return 1
    return 0


def _commands(parser: argparse.ArgumentParser, name: str) -> Iterator[_Command]:
    """The command of a parser, and those below."""
    if isinstance(parser, LazyParser):
        parser.fill()
    words: dict[str, str] = {}
    values: dict[str, tuple[str, ...]] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            words |= {choice.dest: choice.help or "" for choice in action._choices_actions}
            for word, below in action.choices.items():
                yield from _commands(below, f"{name} {word}".strip())
        elif action.help != argparse.SUPPRESS:
            text = " ".join((action.help or "").replace("%%", "%").split())
            words |= dict.fromkeys(action.option_strings, text)
            if isinstance(action, help.HelpAction):
                values |= dict.fromkeys(action.option_strings, (*help.find_groups(parser), "all"))
            elif action.nargs != 0:
                values |= dict.fromkeys(action.option_strings, tuple(map(str, action.choices or ())))
            if not action.option_strings:
                words |= dict.fromkeys(map(str, action.choices or ()), "")
    yield _Command(name, words, values)


def _bash(commands: list[_Command]) -> Iterator[str]:
    yield from ("_quire() {", '    local words=("${COMP_WORDS[@]}") current=$COMP_CWORD previous="" found=""')
    yield '    local word="${COMP_WORDS[COMP_CWORD]}"; (( current > 0 )) && previous="${words[current-1]}"'
    # Bash makes three words of --flag=value, unless COMP_WORDBREAKS has been changed.
    yield from ('    local prefix=""', '    case "$word" in', '    =) word="" ;;')
    yield '    --*=*) previous="${word%%=*}" prefix="${word%%=*}=" word="${word#*=}" ;;'
    yield from ('    *) [[ "$previous" == "=" ]] && previous="${words[current-2]}" ;;', "    esac")
    yield from _cases(commands, first=1)
    yield '    COMPREPLY=($(compgen -P "$prefix" -W "$found" -- "$word"))'
    yield from ("}", "complete -o bashdefault -o default -F _quire quire")


def _zsh(commands: list[_Command]) -> Iterator[str]:
    yield from ("#compdef quire", "_quire() {", '    local current=$CURRENT previous="${words[CURRENT-1]}" found=""')
    yield '    local word="${words[CURRENT]}"'
    yield """    if [[ "$word" == --*=* ]]; then previous="${word%%=*}" word="${word#*=}"; compset -P 1 '*='; fi"""
    yield from _cases(commands, first=2)
    yield from ("    local -a matches=(${=found})", '    [[ "$word" == -* ]] || matches=(${matches:#-*})')
    yield from ("    if (( $#matches )); then compadd -- $matches; else _files; fi", "}")
    # In a folder of $fpath, the file is the body of the function, and runs at the first completion.
    yield 'if [[ "$funcstack[1]" == _quire ]]; then _quire "$@"; else compdef _quire quire; fi'


def _cases(commands: list[_Command], first: int) -> Iterator[str]:
    """The lines that set `found` to the words that may stand next, in bash and zsh; `words[first]` is the command. It
    stays empty where any value may stand, as the name of a file.
    """
    yield f'    local command="${{words[{first}]}}"'
    groups = "|".join({shlex.quote(command.name.split()[0]) for command in commands if " " in command.name})
    yield f'    case "$command" in {groups}) (( current > {first + 1} )) && command+=" ${{words[{first + 1}]}}" ;; esac'
    yield f'    (( current <= {first} )) && command=""'
    yield '    case "$command:$previous" in'
    for command in commands:
        for flag, values in command.values.items():
            yield f"    {shlex.quote(f'{command.name}:{flag}')}) found={shlex.quote(' '.join(values))} ;;"
        yield f"    {shlex.quote(command.name + ':')}*) found={shlex.quote(' '.join(command.words))} ;;"
    yield "    esac"


def _fish(commands: list[_Command]) -> Iterator[str]:
    yield "complete -c quire -f -n __fish_use_subcommand"
    below: dict[str, list[str]] = {}
    for command in commands:
        group, _, word = command.name.rpartition(" ")
        if group:
            below.setdefault(group, []).append(word)
    for command in commands:
        parts = command.name.split()
        conditions = [f"__fish_seen_subcommand_from {part}" for part in parts] or ["__fish_use_subcommand"]
        # A word counts wherever it stands: `serve` is also in `bench serve`.
        if len(parts) == 1 and (others := below.get(command.name) or [*below]):
            conditions.append(f"not __fish_seen_subcommand_from {' '.join(others)}")
        seen = "; and ".join(conditions)
        for word, text in command.words.items():
            kind = "-l" if word.startswith("--") else "-s" if len(word) == 2 else "-o" if word[0] == "-" else "-a"
            line = f"complete -c quire -n {shlex.quote(seen)} {kind} {word.lstrip('-')} -d {_quoted(text)}"
            if word in command.values:
                values = command.values[word]
                line += f" -x -a {_quoted(' '.join(values))}" if values else " -r"
            yield line


def _quoted(text: str) -> str:
    """Quoted for fish."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
