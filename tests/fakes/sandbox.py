"""A sandbox that answers in the process that asks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from quire.server.text.sandbox import Answer

T = TypeVar("T")


class InProcessSandbox:
    """Replaces `quire.server.text.sandbox.Sandbox`, without its limits."""

    def __init__(
        self, make: Callable[[T], Answer], argument: T, *limits: float, wall_clock_factor: float = 1.0
    ) -> None:
        self._make = partial(make, argument)
        self._answer: Answer | None = None

    def ask(self, question: bytes) -> bytes:
        self._answer = self._answer or self._make()
        return self._answer(question)

    async def ask_async(self, *question: bytes | memoryview, seconds: float | None = None) -> bytes:
        return await asyncio.to_thread(self.ask, b"".join(question))

    async def ask_kept(self, question: bytes, seconds: float) -> bytes:
        return self.ask(question)

    def start(self) -> None:
        """There is no process."""

    def close(self) -> None:
        """There is no process."""
