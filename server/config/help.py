"""`--help` of commands with many flags: the common ones and the groups, or what `--help=WORD` asks for."""

from __future__ import annotations

import argparse
import difflib
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

_MAX_FLAGS = 50
"""Commands with more flags show only the common ones."""
_ALL = ("all", "page")
"""The words for all flags: Quire's, and vLLM's for showing them in a pager."""
_NO_WORD = (None, "listgroup")
"""No word, and vLLM's for the groups."""
_VLLM_GROUPS = {
    "frontend": ("chat", "http", "access", "browser", "tls"),
    "observabilityconfig": ("monitoring",),
    "deviceconfig": ("execution",),
    "attentionconfig": ("execution",),
    "compilationconfig": ("execution",),
}
"""The groups with the flags of vLLM's groups, in lower case, whose names are others: ModelConfig is `model`."""
_MAX_CHOICES = 40
"""Characters of choices that stand beside the flag; longer lists stand in its text."""


class HelpFormatter(argparse.HelpFormatter):
    """As wide as the terminal, without breaks inside of flags. Long lists of choices stand in the text of a flag."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)

    def _metavar_formatter(self, action: argparse.Action, default_metavar: str) -> Any:
        if _has_many_choices(action):
            return super()._metavar_formatter(_Line("NAME"), default_metavar)
        return super()._metavar_formatter(action, default_metavar)

    def _expand_help(self, action: argparse.Action) -> str:
        text = super()._expand_help(action)
        return f"{text}. One of {', '.join(action.choices or ())}" if _has_many_choices(action) else text


def _has_many_choices(action: argparse.Action) -> bool:
    return action.metavar is None and len(",".join(map(str, action.choices or ()))) > _MAX_CHOICES


class _Line(argparse.Action):
    """A line of the help that is not a flag."""

    def __init__(self, head: str, text: str = "") -> None:
        super().__init__([], "", metavar=head, help=text.replace("%", "%%"))


class HelpAction(argparse.Action):
    """Prints help and exits: `--help`, `--help=GROUP`, `--help=FLAG`, `--help=WORD` or `--help=all`.

    vLLM's names of groups that have a counterpart, such as ModelConfig and Frontend, are accepted. The word may be an
    argument of its own; if it names nothing, it is taken for another argument, such as the model.
    """

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        text = "show a group of flags, a flag, the flags with WORD in their names, or all; without WORD, the groups"
        super().__init__(option_strings, argparse.SUPPRESS, nargs="?", metavar="WORD", help=text)
        self.default = argparse.SUPPRESS

    def __call__(self, parser: argparse.ArgumentParser, _: object, word: Any, option_string: object = None) -> None:
        groups = find_groups(parser)
        text = _search(parser, word) if groups and word not in (*_NO_WORD, *_ALL) else ""
        if text is None and word not in (vars(parser).get("arguments") or ()):
            _refuse(parser, word)
        elif text:
            parser._print_message(text, sys.stdout)
        elif not groups or word in _ALL or len(_actions(parser._action_groups)) <= _MAX_FLAGS:
            parser.print_help()
        else:
            parser._print_message(_overview(parser), sys.stdout)
        parser.exit()


def find_groups(parser: argparse.ArgumentParser) -> dict[str, argparse._ArgumentGroup]:
    """Return the groups of flags by title."""
    own = parser._action_groups[2:]  # without positional arguments and options
    return {group.title or "": group for group in own if any(each.option_strings for each in _actions([group]))}


def _actions(groups: Iterable[argparse._ArgumentGroup]) -> list[argparse.Action]:
    return [action for group in groups for action in group._group_actions if action.help != argparse.SUPPRESS]


def _overview(parser: argparse.ArgumentParser) -> str:
    formatter, general = parser._get_formatter(), parser._action_groups[:2]
    formatter.add_usage(parser.usage, parser._actions, parser._mutually_exclusive_groups)
    formatter.add_text(parser.description)
    for group in general:
        _add(formatter, group.title, None, _actions([group]))
    _add(formatter, "common flags", None, [each for each in _actions(parser._action_groups) if _is_common(each)])
    lines = [
        _Line(f"{title} ({len(_actions([group]))})", (group.description or "").removesuffix("."))
        for title, group in find_groups(parser).items()
    ]
    _add(formatter, "groups of flags", None, lines)
    formatter.add_text(
        f"{parser.prog} --help=GROUP shows the flags of a group, --help=WORD the flags with WORD in their names, "
        "and --help=all all of them."
    )
    return formatter.format_help()


def _is_common(action: argparse.Action) -> bool:
    return bool(vars(action).get("is_common"))


def _search(parser: argparse.ArgumentParser, word: str) -> str | None:
    """The help of the group, the flag or the flags that the word names, in this order; None if it names none."""
    known, groups = _actions(parser._action_groups), find_groups(parser)
    name = _name(word)
    formatter = parser._get_formatter()
    if titles := [each for each in _VLLM_GROUPS.get(name, (_title(name),)) if each in groups]:
        for title in titles:
            _add(formatter, title, groups[title].description, groups[title]._group_actions)
        return formatter.format_help()
    names = {each: [flag.strip("-") for flag in each.option_strings] for each in known}
    found = [each for each in known if name in names[each]]
    found = found or [each for each in known if any(name in flag for flag in names[each])]
    if not name or not found:
        return None
    for title, group in [("", group) for group in parser._action_groups[:2]] + [*groups.items()]:
        _add(formatter, title or group.title, None, [each for each in found if each in group._group_actions])
    return formatter.format_help()


def _name(word: str) -> str:
    return word.strip("-").replace("_", "-").lower()


def _title(name: str) -> str:
    return name.removesuffix("config").removesuffix("options")


def _refuse(parser: argparse.ArgumentParser, word: str) -> NoReturn:
    name, groups = _name(word), find_groups(parser)
    flags = [flag.strip("-") for each in _actions(parser._action_groups) for flag in each.option_strings]
    near = difflib.get_close_matches(_title(name), groups, n=3) or difflib.get_close_matches(name, flags, n=3)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    parser.error(f"argument --help: no group or flag is named {word}{hint} (groups: {', '.join(groups)})")


def _add(
    formatter: argparse.HelpFormatter, title: str | None, text: str | None, actions: Iterable[argparse.Action]
) -> None:
    formatter.start_section(title)
    formatter.add_text(text)
    formatter.add_arguments(actions)
    formatter.end_section()
