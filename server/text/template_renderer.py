"""Renders chat templates in other processes, which can be stopped: a template may take any time and memory.

A rendering goes through tiers, and starts again in the next one if it takes longer than this one allows. Each tier has
slots of its own, so that renderings wait for none that takes longer. Nearly all end in the first, whose processes are
kept for the next rendering (`Sandbox.ask_kept`); only a template that does not end reaches the limits of the last.
"""

from __future__ import annotations

import asyncio
import os
import pickle
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from quire.engine.protocol.errors import InvalidParameter
from quire.server.client.fair_share import FairSlots, Overloaded
from quire.server.client.output_stream import DEADLINE, EngineUnavailable, RequestTimedOut
from quire.server.text import conversation
from quire.server.text.chat_template import ChatTemplate, ChatTemplates
from quire.server.text.conversation import CHAT_NAMES, ChatTemplateOptions, Message, ParamNames
from quire.server.text.media_prompt import Placeholders
from quire.server.text.sandbox import Answer, Sandbox, SandboxStopped

QUICK_SECONDS, MEDIUM_SECONDS, RENDER_SECONDS = 0.1, 1.0, 10.0
"""Processor time limits of a rendering in the three tiers."""
WALL_CLOCK_FACTOR = 3.0
"""Wall-clock limit of a rendering, as a multiple of its processor time limit."""
RENDER_MEMORY = 2**29
"""Memory limit of a rendering in bytes."""
MAX_PROMPT_CHARACTERS = 2**25
"""Characters of all prompts that are rendered at once."""
MAX_WAITING = 8
"""Renderings that wait for the last tier; further ones are rejected."""
_MAX_OTHERS = 32
"""Templates that a process keeps, apart from the model's."""
_MAX_SLOW = 4
"""Slots of each tier after the first."""

_NO_OPTIONS = ChatTemplateOptions()


class LocalRenderer:
    """Renders in this process, where nobody else waits: a fork for a large body, or a test."""

    async def render(
        self,
        template: ChatTemplate,
        conversations: Sequence[Sequence[Message]],
        tools: Sequence[Mapping[str, Any]] = (),
        options: ChatTemplateOptions = _NO_OPTIONS,
        may_call: bool = False,
        names: ParamNames = CHAT_NAMES,
        placeholders: Placeholders | None = None,
    ) -> list[str]:
        """`conversation.render` for each conversation."""
        return [
            conversation.render(template, each, tools, options, may_call, names, placeholders) for each in conversations
        ]

    def start(self) -> None:
        """There is no process."""

    def close(self) -> None:
        """There is no process."""


class TemplateRenderer(LocalRenderer):
    """Renders with the templates of a model, or with a request's own (from Python only: a request over HTTP that may
    have one is processed as a large body), in other processes.
    """

    def __init__(self, templates: ChatTemplates | None) -> None:
        self._sandbox = Sandbox(_make, templates, RENDER_SECONDS, RENDER_MEMORY, wall_clock_factor=WALL_CLOCK_FACTOR)
        count = max(2, len(os.sched_getaffinity(0)) // 2)
        self._quick, self._medium = FairSlots(count), FairSlots(min(count, _MAX_SLOW))
        self._slow = FairSlots(min(count, _MAX_SLOW), MAX_WAITING)

    async def render(
        self,
        template: ChatTemplate,
        conversations: Sequence[Sequence[Message]],
        tools: Sequence[Mapping[str, Any]] = (),
        options: ChatTemplateOptions = _NO_OPTIONS,
        may_call: bool = False,
        names: ParamNames = CHAT_NAMES,
        placeholders: Placeholders | None = None,
    ) -> list[str]:
        """`conversation.render` for each conversation, all within the same limits. `template` is the request's own
        (`options.chat_template`), or the one that the templates choose.

        Raises `InvalidParameter` also if that exceeds the limits, `Overloaded` if too many renderings take long,
        `RequestTimedOut` at the `DEADLINE`, and `EngineUnavailable` if no process can be started.
        """
        which = bool(tools) if options.chat_template is None else template
        try:
            question = pickle.dumps((which, conversations, tools, options, may_call, names, placeholders))
        except RecursionError:
            raise InvalidParameter(f"{names.messages}: nested too deeply", names.messages) from None
        deadline = DEADLINE.get()
        try:
            async with asyncio.timeout_at(deadline and deadline.at):
                answer = await self._ask(question)
        except SandboxStopped:
            raise InvalidParameter(
                f"the chat template takes more than {RENDER_SECONDS:g} s of processor time "
                f"({RENDER_SECONDS * WALL_CLOCK_FACTOR:g} s in all) or {RENDER_MEMORY >> 20} MiB of memory for "
                f"{names.messages}; shorten them, or use another --chat-template",
                names.messages,
            ) from None
        except Overloaded:
            raise Overloaded("too many requests at once take long in the chat template; try again") from None
        except TimeoutError:
            assert deadline is not None
            raise RequestTimedOut(f"the request exceeded the time limit of {deadline.seconds:g} seconds") from None
        except OSError as error:
            raise EngineUnavailable(f"chat templates cannot be rendered now: {error}") from None
        found = pickle.loads(answer)
        if isinstance(found, InvalidParameter):
            raise found
        texts: list[str] = found
        return texts

    async def _ask(self, question: bytes) -> bytes:
        """Return the answer of the first tier that has one. Raises `SandboxStopped` if none has."""
        try:
            async with self._quick:
                return await self._sandbox.ask_kept(question, QUICK_SECONDS)
        except SandboxStopped:
            pass
        try:
            async with self._medium:
                return await self._sandbox.ask_async(question, seconds=MEDIUM_SECONDS)
        except SandboxStopped:
            pass
        async with self._slow:
            return await self._sandbox.ask_async(question)

    def start(self) -> None:
        """Start the processes, so that the first rendering need not wait for them."""
        self._sandbox.start()

    def close(self) -> None:
        """Stop the processes."""
        self._sandbox.close()


def _make(templates: ChatTemplates | None) -> Answer:
    """Make the sandbox's function, which returns a pickled list of texts, or an `InvalidParameter`."""
    if templates is not None:
        _ = templates.reads  # not in each fork again
    others = OrderedDict[str, ChatTemplate]()
    """Those of adapters and requests, by source, as a process that is kept has compiled them."""

    def answer(question: bytes) -> bytes:
        which, conversations, tools, options, may_call, names, placeholders = pickle.loads(question)
        if isinstance(which, bool):
            assert templates is not None
            which = templates.choose(which)
        else:
            which = others.setdefault(which.source, which)
            if len(others) > _MAX_OTHERS:
                others.popitem(last=False)
        try:
            texts = [
                conversation.render(which, each, tools, options, may_call, names, placeholders)
                for each in conversations
            ]
            if (size := sum(map(len, texts))) > MAX_PROMPT_CHARACTERS:
                raise InvalidParameter(
                    f"the chat template makes a prompt of {size} characters of {names.messages}, and at most "
                    f"{MAX_PROMPT_CHARACTERS} are allowed",
                    names.messages,
                )
            return pickle.dumps(texts)
        except InvalidParameter as error:
            return pickle.dumps(error)

    return answer
