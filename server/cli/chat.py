"""`quire chat`: an interactive conversation with a running server."""

from __future__ import annotations

import argparse
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from quire.engine.config.options import flag
from quire.server.cli.remote import RemoteOptions, RemoteServer
from quire.server.cli.terminal import Screen, ask_and_answer
from quire.server.config import flags

HELP = "/clear starts a new conversation, /exit or Ctrl-D quits, Ctrl-C stops an answer"


@dataclass(frozen=True, kw_only=True)
class ChatCommandOptions(RemoteOptions):
    """Options of `quire chat`."""

    system_prompt: str | None = flag(None, "system prompt of the conversation")


def fill(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the subcommand."""
    flags.add_flags(parser, ChatCommandOptions)
    parser.set_defaults(run=run, parser=parser)


def run(parsed: argparse.Namespace) -> int:
    """Chat until the input ends; returns 0."""
    options = flags.collect(parsed, ChatCommandOptions)
    with RemoteServer(options) as remote:
        chat = ChatSession(remote, options.system_prompt, Screen())
        if options.quick is not None:
            chat.answer(options.quick)
        else:
            chat.screen.aside(f"{remote.model}. {HELP}\n")
            ask_and_answer(chat.take, "> ")
    return 0


class ChatSession:
    """The conversation so far."""

    def __init__(self, remote: RemoteServer, system_prompt: str | None, screen: Screen) -> None:
        self.screen = screen
        self._remote = remote
        self._beginning = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
        self._messages: list[dict[str, Any]] = list(self._beginning)

    def take(self, line: str) -> None:
        """Handle a line of input: a question or a command."""
        match line.split():
            case ["/clear"]:
                self._messages = list(self._beginning)
            case ["/exit" | "/quit"]:
                raise EOFError
            case ["/help"]:
                self.screen.aside(f"{HELP}\n")
            case _:
                self.answer(line)

    def answer(self, question: str) -> None:
        """Stream the answer to the screen. Keep question and answer, even if Ctrl-C stops the answer, unless it is
        empty.
        """
        asked = {"role": "user", "content": question}
        said, is_thinking = "", False
        try:
            with closing(
                self._remote.stream("/v1/chat/completions", {"messages": [*self._messages, asked]})
            ) as choices:
                for choice in choices:
                    delta = choice.get("delta") or {}
                    if reasoning := delta.get("reasoning_content") or delta.get("reasoning"):
                        self.screen.aside(reasoning)
                        is_thinking = True
                    if text := delta.get("content"):
                        if is_thinking:
                            self.screen.aside("\n")
                            is_thinking = False
                        said += text
                        self.screen.show(text)
        except KeyboardInterrupt:
            pass
        finally:
            self.screen.end()
        if said:
            self._messages += [asked, {"role": "assistant", "content": said}]
