"""Profiles the engine, and merges the traces of all ranks into one file."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
import zlib
from dataclasses import dataclass
from typing import IO, Any

from quire.engine.process.trace import TraceWriter
from quire.engine.protocol.profile import CORE, ProfileOptions, StartProfile, StopProfile, TraceSummary
from quire.server.client.engine_client import EngineClient
from quire.server.client.output_stream import EngineUnavailable

MAX_PROFILE_SECONDS = 60.0
"""Time in seconds after which a profile ends by itself."""
_PIECE_SECONDS = 120.0
"""Time limit for the next piece of a trace. A rank converts its first one before it can send it."""


class ProfileConflict(RuntimeError):
    """A profile is running already, or none is."""


@dataclass(frozen=True)
class ProfileReport:
    """A summary of a trace."""

    num_events: int
    is_cut: bool
    """Whether the trace is incomplete: a replica is missing, or a recording was cut off or failed."""


class Profiler:
    """Starts and stops the profilers of all replicas that are up."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    async def start(
        self,
        seconds: float,
        *,
        with_stack: bool = False,
        record_shapes: bool = False,
        profile_memory: bool = False,
    ) -> None:
        """Start recording on all ranks, for at most `seconds`. Raises `ProfileConflict` and `EngineUnavailable`."""
        options = ProfileOptions(seconds, time.time_ns(), with_stack, record_shapes, profile_memory)
        replies = await self._ask({each: StartProfile(self._index, self._call(), options) for each in self._replicas()})
        if failed := {each: reply for each, reply in replies.items() if reply}:
            started = [each for each in replies if each not in failed or isinstance(failed[each], EngineUnavailable)]
            await self._ask({each: StopProfile(self._index, self._call(), discard=True) for each in started})
            self._raise(failed)

    async def stop(self, file: IO[bytes]) -> ProfileReport:
        """Stop recording, and write the merged trace as `.json.gz`. Raises `ProfileConflict` and `EngineUnavailable`.

        A replica that has been started meanwhile has no trace; the file says so.
        """
        client, call_id = self._client, self._call()
        pieces = client.calls.traces[call_id] = asyncio.Queue()
        try:
            replicas = self._replicas()
            clocks = dict(zip(replicas, await asyncio.gather(*map(client.calls.measure_clock, replicas)), strict=True))
            replies = await self._ask({each: StopProfile(self._index, call_id, clocks[each]) for each in replicas})
            recorded = [each for each, reply in replies.items() if not reply]
            if not recorded:
                self._raise(replies)
            writer = TraceWriter(file)
            summaries: dict[tuple[int, int], TraceSummary] = {}
            ranks = {
                each.index: each.tensor_parallel_size * each.prefill_context_parallel_size * len(each.stages)
                for each in client.replicas
            }
            expected = {(replica, rank) for replica in recorded for rank in range(CORE, ranks[replica])}
            while len(summaries) < len(expected):
                async with asyncio.timeout(_PIECE_SECONDS):
                    piece = await pieces.get()
                if isinstance(piece, int):
                    if piece in recorded:
                        raise EngineUnavailable(f"{client.calls.lost_text(piece)}; its part of the profile is lost")
                elif (piece.replica, piece.rank) in expected:
                    if piece.data:
                        await asyncio.to_thread(writer.add, piece.data)
                    if piece.summary is not None:
                        summaries[piece.replica, piece.rank] = piece.summary
        except TimeoutError:
            raise EngineUnavailable(f"no trace has arrived for {_PIECE_SECONDS:g} seconds") from None
        except zlib.error as error:
            raise EngineUnavailable(f"a trace is damaged: {error}") from None
        finally:
            del client.calls.traces[call_id]
        found = [summary for _, summary in sorted(summaries.items())]
        missing = [replica for replica in replicas if replica not in recorded]
        await asyncio.to_thread(writer.close, found, _metadata(found, missing))
        return ProfileReport(
            sum(each.num_events for each in found), bool(missing) or any(each.is_cut or each.error for each in found)
        )

    async def save(self, folder: str, prefix: str = "quire") -> tuple[str, ProfileReport]:
        """Like `stop`, but writes a new file of the folder, and returns its path, too. Also raises `OSError`."""
        path = os.path.join(folder, trace_name(prefix))
        with open(path, "xb") as file:
            try:
                return path, await self.stop(file)
            except BaseException:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
                raise

    @property
    def _index(self) -> int:
        return self._client.index

    def _call(self) -> int:
        return self._client.calls.next_number()

    def _replicas(self) -> list[int]:
        """The replicas that are up; raises `EngineUnavailable` if none is."""
        self._client.check()
        if not (replicas := self._client.up_replicas):
            raise EngineUnavailable("the engine is restarting")
        return replicas

    async def _ask(self, messages: dict[int, Any]) -> dict[int, str | EngineUnavailable]:
        """Send each replica its message, and return the errors."""

        async def ask(replica: int, message: Any) -> str | EngineUnavailable:
            try:
                return await self._client.calls.ask(replica, message)
            except EngineUnavailable as error:
                return error

        return dict(zip(messages, await asyncio.gather(*(ask(*each) for each in messages.items())), strict=True))

    def _raise(self, errors: dict[int, str | EngineUnavailable]) -> None:
        for error in errors.values():
            if isinstance(error, EngineUnavailable):
                raise error
        raise ProfileConflict(next(iter(map(str, errors.values()))))


def trace_name(prefix: str = "quire") -> str:
    """Return the name of a new trace."""
    return f"{prefix}-{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 1000:03}.json.gz"


def _metadata(summaries: list[TraceSummary], missing: list[int]) -> dict[str, Any]:
    """The metadata of the trace."""
    return {
        "processes": [
            {
                "name": each.process,
                "events": each.num_events,
                "steps": each.steps,
                "cut_off": each.is_cut,
                "error": each.error,
                "clock_offset_us": each.clock.offset / 1000,
                "clock_error_us": each.clock.error / 1000,
            }
            for each in summaries
        ],
        "replicas_without_trace": missing,
    }
