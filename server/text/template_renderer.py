"""Renders chat templates in other processes, which can be stopped: a template may take any time and memory.

Nearly all renderings are quick, and go to a process that is kept for the next one (`Sandbox.ask_kept`). One that takes
longer starts again in a process of its own, beside the quick ones, within limits of time, memory and length that only a
template that does not end reaches.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

from quire.engine.protocol.errors import InvalidParameter
from quire.server.client.fair_share import FairSlots
from quire.server.client.output_stream import EngineUnavailable
from quire.server.text import conversation
from quire.server.text.chat_template import ChatTemplate, ChatTemplates
from quire.server.text.conversation import CHAT_NAMES, ChatTemplateOptions, Message, ParamNames
from quire.server.text.sandbox import Answer, Sandbox, SandboxStopped

QUICK_SECONDS = 0.1
"""Processor time limit of a quick rendering."""
RENDER_SECONDS = 10.0
"""Processor time limit of a rendering."""
RENDER_MEMORY = 2**29
"""Memory limit of a rendering in bytes."""
MAX_PROMPT_CHARACTERS = 2**25
"""Characters of a rendered prompt."""


class TemplateRenderer:
    """Renders with the templates of a model, or with those of requests, in other processes."""

    def __init__(self, templates: ChatTemplates | None) -> None:
        self._sandbox = Sandbox(_make, templates, RENDER_SECONDS, RENDER_MEMORY)
        count = max(2, len(os.sched_getaffinity(0)) // 2)
        self._quick, self._slow = FairSlots(count), FairSlots(count)

    async def render(
        self,
        template: ChatTemplate,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        options: ChatTemplateOptions,
        may_call: bool,
        names: ParamNames = CHAT_NAMES,
    ) -> str:
        """`conversation.render` in another process. `template` is the request's own (`options.chat_template`), or the
        one that the templates choose.

        Raises `InvalidParameter` also for a rendering that exceeds its limits, and `EngineUnavailable` if no process
        can be started.
        """
        which = bool(tools) if options.chat_template is None else template
        try:
            question = pickle.dumps((which, messages, tools, options, may_call, names))
        except RecursionError:
            raise InvalidParameter(f"{names.messages}: nested too deeply", names.messages) from None
        try:
            async with self._quick:
                return _text_of(await self._sandbox.ask_kept(question, QUICK_SECONDS))
        except SandboxStopped:
            pass
        except OSError as error:
            raise _unavailable(error) from None
        try:
            async with self._slow:
                return _text_of(await self._sandbox.ask_async(question))
        except SandboxStopped:
            raise InvalidParameter(
                f"the chat template takes more than {RENDER_SECONDS:g} s of processor time or {RENDER_MEMORY >> 20} "
                "MiB of memory for these messages; shorten them, or use another --chat-template",
                names.messages,
            ) from None
        except OSError as error:
            raise _unavailable(error) from None

    def start(self) -> None:
        """Start the processes, so that the first rendering need not wait for them."""
        self._sandbox.start()

    def close(self) -> None:
        """Stop the processes."""
        self._sandbox.close()


def _text_of(answer: bytes) -> str:
    found = pickle.loads(answer)
    if isinstance(found, InvalidParameter):
        raise found
    text: str = found
    return text


def _unavailable(error: OSError) -> EngineUnavailable:
    return EngineUnavailable(f"chat templates cannot be rendered now: {error}")


def _make(templates: ChatTemplates | None) -> Answer:
    """Make the sandbox's function, which returns a pickled text, or an `InvalidParameter`."""
    if templates is not None:
        _ = templates.reads  # not in each fork again

    def answer(question: bytes) -> bytes:
        which, messages, tools, options, may_call, names = pickle.loads(question)
        if isinstance(which, bool):
            assert templates is not None
            which = templates.choose(which)
        try:
            text = conversation.render(which, messages, tools, options, may_call, names)
            if len(text) > MAX_PROMPT_CHARACTERS:
                raise InvalidParameter(
                    f"the chat template makes a prompt of {len(text)} characters of these messages, and at most "
                    f"{MAX_PROMPT_CHARACTERS} are allowed",
                    names.messages,
                )
            return pickle.dumps(text)
        except InvalidParameter as error:
            return pickle.dumps(error)

    return answer
