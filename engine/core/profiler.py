"""Profiling a replica: starts and stops the ranks' profilers by a plan, and records the core's own loop."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import msgspec

from quire.engine.process.trace import Event, compress, process_id, step_args, step_name
from quire.engine.protocol.engine_core import ToServer
from quire.engine.protocol.profile import (
    CORE,
    Clock,
    ProfileReply,
    StartProfile,
    StopProfile,
    TracePiece,
    TraceSummary,
)
from quire.engine.protocol.scheduler_output import SchedulerOutput

_MAX_SPANS = 500_000
_SPANS_PER_PIECE = 20_000

P = ParamSpec("P")
T = TypeVar("T")


class LoopSpans:
    """The loop's activities while a profile was recorded, with their times."""

    def __init__(self, seconds: float) -> None:
        self.deadline = time.monotonic() + seconds
        self._zero = time.time_ns() - time.perf_counter_ns()
        self._spans: list[tuple[str, int, int, str]] = []
        """Name, begin and end (`time.perf_counter_ns`), and the name of the step: a plan itself holds prompts."""

    @property
    def is_cut(self) -> bool:
        """Whether there were more than are kept."""
        return len(self._spans) >= _MAX_SPANS

    def add(self, name: str, begin: int, end: int, plan: SchedulerOutput | None) -> None:
        self._spans.append((name, begin, end, "" if plan is None else step_name(plan)))

    def events(self, pid: int, clock: Clock, origin: int) -> list[Event]:
        """Return the spans as events. `clock` is this host's."""
        shift = self._zero + clock.offset - origin
        events = []
        for name, begin, end, step in self._spans:
            event = Event(
                ph="X", name=name, pid=pid, tid=pid, ts=(begin + shift) / 1000, dur=(end - begin) / 1000, cat="core"
            )
            if step:
                event.args = msgspec.Raw(msgspec.json.encode(step_args(step)))
            events.append(event)
        return events


class CoreProfiler:
    """The profiler of one replica. The loop puts `command` into its next plan, and calls `on_result` after it."""

    def __init__(self, replica: int, incarnation: int, send: Callable[[int, ToServer], None]) -> None:
        """`send` sends a message to an API process, from any thread."""
        self.command: StartProfile | StopProfile | None = None
        self._replica, self._incarnation, self._send = replica, incarnation, send
        self._recording: LoopSpans | None = None
        self._started: tuple[StartProfile, LoopSpans] | None = None
        """The profile that runs, or that nobody has asked for yet."""
        self._stopping: deque[tuple[StartProfile, LoopSpans]] = deque()
        """The profiles of the stops that the ranks have not executed yet, in their order."""

    def call(self, name: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function of the loop, and record when it ran if a profile is recorded meanwhile."""
        if (spans := self._recording) is None:
            return function(*args, **kwargs)
        begin = time.perf_counter_ns()
        result = function(*args, **kwargs)
        end = time.perf_counter_ns()
        if spans is self._recording:
            plan = next((each for each in (*args, result) if isinstance(each, SchedulerOutput)), None)
            spans.add(name, begin, end, plan)
            if spans.is_cut or time.monotonic() >= spans.deadline:
                self._recording = None
        return result

    def handle(self, message: StartProfile | StopProfile) -> None:
        """Start or stop with the next plan, if that is possible now."""
        if isinstance(self.command, StartProfile) and isinstance(message, StopProfile) and message.discard:
            self._reply(self.command, "the profile was stopped before its first step")
        elif self.command is not None:
            return self._reply(message, "the profiler is just being started or stopped")
        if isinstance(message, StopProfile):
            if self._started is None:
                return self._reply(message, "no profile is running; start one with start_profile")
            self._stopping.append(self._started)
            self._started = None
        elif self._started is not None and (left := self._started[1].deadline - time.monotonic()) > 0:
            return self._reply(
                message, f"a profile is running already, for {left:.0f} s at most; stop it with stop_profile"
            )
        else:
            self._recording = LoopSpans(message.options.seconds)
            self._started = message, self._recording
        self.command = message

    def on_result(self, command: StartProfile | StopProfile) -> None:
        """Answer a command: all ranks have executed it. Sends the core's own trace."""
        if isinstance(command, StopProfile):
            started, spans = self._stopping.popleft()
            if spans is self._recording:
                self._recording = None
            if not command.discard:
                origin = started.options.origin
                threading.Thread(target=self._send_spans, args=(spans, command, origin), daemon=True).start()
        self._reply(command)

    def send_piece(self, piece: TracePiece) -> None:
        """Send a piece of a trace on to the API process that waits for it, from any thread."""
        piece.replica, piece.incarnation = self._replica, self._incarnation
        self._send(piece.client, piece)

    def _reply(self, message: StartProfile | StopProfile, error: str = "") -> None:
        self._send(message.client, ProfileReply(message.call_id, self._replica, self._incarnation, error))

    def _send_spans(self, spans: LoopSpans, stop: StopProfile, origin: int) -> None:
        pid = process_id(self._replica, CORE)
        events = spans.events(pid, stop.clock, origin)
        for at in range(0, len(events), _SPANS_PER_PIECE):
            piece = compress(events[at : at + _SPANS_PER_PIECE])
            self.send_piece(TracePiece(stop.client, stop.call_id, CORE, piece))
        steps = sum(event.name == "submit" for event in events)
        name = f"replica {self._replica} · engine core"
        summary = TraceSummary(name, pid, len(events), stop.clock, steps, is_cut=spans.is_cut)
        self.send_piece(TracePiece(stop.client, stop.call_id, CORE, b"", summary))
