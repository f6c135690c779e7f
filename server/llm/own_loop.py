"""An event loop for programs without one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from multiprocessing.util import Finalize
from typing import Any, TypeVar

from quire.server.client.output_stream import EngineUnavailable
from quire.server.llm.async_llm import AsyncLLM

T = TypeVar("T")


class OwnLoop:
    """Runs an `AsyncLLM` in an event loop of its own thread, so that the caller may itself be in an event loop."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=self._loop.run_forever, name="quire-llm", daemon=True)
        thread.start()
        self._finalizer = Finalize(self, _stop, (self._loop, thread, llm), exitpriority=0)
        try:
            self._frontend = self._wait(llm.start())
        except BaseException:
            self.shutdown()
            raise

    def shutdown(self) -> None:
        """Stop the engine; the object cannot be used afterwards. Called at the end of the script at the latest."""
        self._finalizer()

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        if not self._finalizer.still_active():
            work.close()
            raise EngineUnavailable("the engine is shut down")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            future.cancel()  # an interrupt must not leave requests running


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread, llm: AsyncLLM) -> None:
    asyncio.run_coroutine_threadsafe(llm.shutdown(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
