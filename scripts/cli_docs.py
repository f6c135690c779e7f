"""docs/reference/cli.md from the parsers of the `quire` command; `scripts/docs` writes it."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from itertools import takewhile

from markdown_table import code, table

from quire.server.cli.main import build_parser
from quire.server.config.help import HelpAction
from quire.server.config.lazy import LazyParser

INTRODUCTION = """# Command line

This page lists every subcommand of `quire` and every flag. `scripts/docs` generates it from the code, and a test fails
if it is out of date. `quire COMMAND --help` prints the same for one command. With many flags it prints the common ones
and the groups: `--help=GROUP` then prints a group, `--help=WORD` the flags with WORD in their names, and `--help=all`
everything.

`quire serve --config FILE.yaml` reads flags from a file. Keys are flag names without the leading dashes:
`tensor-parallel-size: 2`. A flag on the command line takes precedence over the file.

`quire completion SHELL` prints completions for bash, zsh or fish: `eval "$(quire completion bash)"` in ~/.bashrc.

An on/off flag such as `--enable-prefix-caching` has a form that turns it off: `--no-enable-prefix-caching`.
"""


def render() -> str:
    """The page as Markdown."""
    parser = build_parser()
    commands = list(_commands(parser, "quire"))
    serve = next(command for name, command in commands if name == "quire serve")
    of_serve = {group.title: _flags(group) for group in serve._action_groups[2:]}
    rows = [
        (f"[{code(name)}](#{name.replace(' ', '-')})", _sentence(command.description or ""))
        for name, command in commands
    ]
    parts = [INTRODUCTION, "## Commands\n", table(("command", ""), rows)]
    parts.append("`quire --version` prints the version, and the commit if it is known.\n")
    for name, command in commands:
        parts += _command(name, command, {} if command is serve else of_serve)
    return "\n".join(parts)


def _commands(parser: argparse.ArgumentParser, name: str) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """The commands that do something, by their full names, with all their flags."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for own_name, command in action.choices.items():
                yield from _commands(command, f"{name} {own_name}")
            return
    if isinstance(parser, LazyParser):
        parser.fill()
    yield name, parser


def _command(name: str, parser: argparse.ArgumentParser, of_serve: dict[str | None, list[str]]) -> Iterator[str]:
    """The section of a command. `of_serve` are the flags of `quire serve` by group, which are not listed again."""
    yield f"## {name}\n"
    yield f"{_sentence(parser.description or '')} Usage: {code(parser.usage or name)}\n"
    repeated = []
    for number, group in enumerate(parser._action_groups):
        actions = [action for action in group._group_actions if not isinstance(action, HelpAction)]
        if not actions:
            continue
        if _flags(group) == of_serve.get(group.title):
            repeated.append(f"[{group.title}](#{group.title})")
            continue
        if all(action.help == argparse.SUPPRESS for action in actions):
            yield f"{_sentence(group.description or '')}\n"
            continue
        if number > 1:  # before are positional arguments and options
            title = group.title or ""
            title = title.upper() if title in ("http", "tls") else title.capitalize()
            yield f"{title}:\n" if of_serve else f"### {title}\n\n{_sentence(group.description or '')}\n"
        yield table(("argument", "value", "default", ""), map(_row, actions))
    if repeated:
        yield f"The command also takes these groups of flags of quire serve: {', '.join(repeated)}.\n"


def _flags(group: argparse._ArgumentGroup) -> list[str]:
    return [flag for action in group._group_actions for flag in action.option_strings]


def _row(action: argparse.Action) -> tuple[str, str, str, str]:
    names = [name for name in action.option_strings if not name.startswith("--no-")] or [str(action.metavar)]
    if isinstance(action, argparse.BooleanOptionalAction):
        value = "on/off"
    elif action.choices is not None:
        value = ", ".join(code(choice) for choice in action.choices)
    else:
        value = code(action.metavar or "VALUE") if action.option_strings else ""
        if action.nargs == "+":
            value += " …"
    text, _, default = (action.help or "").replace("%%", "%").partition(" (default: ")
    return ", ".join(map(code, names)), value, _marked(default.removesuffix(")")), _sentence(text)


def _sentence(text: str) -> str:
    """A help text, which begins small and has no full stop, as a sentence; a text that begins with a name is left as it
    is."""
    first = "".join(takewhile(str.isalpha, text))
    return _marked(text[:1].upper() + text[1:] if first.islower() else text).removesuffix(".") + "."


def _marked(text: str) -> str:
    """Flags, JSON objects, and names with characters that Markdown interprets, as code."""
    parts = text.split("`")
    parts[::2] = (
        re.sub(r"\{.*?\}+|(?<![\w-])--[a-z][\w-]*|[\w.]*[*_][\w.*]+", r"`\g<0>`", part) for part in parts[::2]
    )
    return "`".join(parts)


if __name__ == "__main__":
    print(render())
