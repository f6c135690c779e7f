"""Terminal input and output of `quire chat` and `quire complete`."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator

from quire.server.cli.remote import RemoteError

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
_CONTROL = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
"""Control characters that could move the cursor or worse. They are removed from the model's text."""


class Screen:
    """Standard output. `show` writes the text of an answer, `aside` anything else."""

    def __init__(self) -> None:
        self.is_terminal = sys.stdout.isatty()
        self._is_dim = False
        self._can_dim = self.is_terminal and not os.environ.get("NO_COLOR")

    def show(self, text: str) -> None:
        self._write(text, dim=False)

    def aside(self, text: str) -> None:
        """Write dimmed text; nothing if the output is not a terminal."""
        if self.is_terminal:
            self._write(text, dim=True)

    def end(self) -> None:
        """End an answer."""
        self._write("\n", dim=False)

    def _write(self, text: str, *, dim: bool) -> None:
        if self.is_terminal:
            text = text.translate(_CONTROL)
        if dim != self._is_dim and self._can_dim:
            text = (_DIM if dim else _PLAIN) + text
        self._is_dim = dim
        sys.stdout.write(text)
        sys.stdout.flush()


def ask_and_answer(answer: Callable[[str], None], prompt: str) -> None:
    """Answer each line of input, until it ends (Ctrl-D) or `answer` raises `EOFError`.

    An error ends the current answer only.
    """
    for line in _lines(prompt):
        try:
            answer(line)
        except EOFError:
            return
        except RemoteError as error:
            print(f"quire: error: {error}", file=sys.stderr)


def _lines(prompt: str) -> Iterator[str]:
    is_typed = sys.stdin.isatty()
    if is_typed:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # enables line editing and history in input()
    while True:
        try:
            line = input(prompt if is_typed else "")
        except KeyboardInterrupt:  # as in a shell, Ctrl-C discards the line
            print()
        except EOFError:
            if is_typed:
                print()
            return
        else:
            if line.strip():
                yield line
