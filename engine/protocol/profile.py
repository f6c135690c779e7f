"""Profiling a running engine: the messages from an API process to each rank, and the traces that come back. No torch.

An API process sends `StartProfile` and `StopProfile` to the core of each replica, which puts them into its next plan:
all ranks start and stop at the same step. The traces come back as `TracePiece`s.
"""

from __future__ import annotations

import msgspec

CORE = -1
"""In place of a rank: the loop of the engine core."""


class Clock(msgspec.Struct, array_like=True):
    """Nanoseconds to add to a host's time to get the API process's."""

    offset: int = 0
    error: int = 0
    """Maximum error of `offset`; 0 if both have the same clock."""

    @classmethod
    def measured(cls, sent: int, answered: int, received: int) -> Clock:
        """Return the clock of this host relative to another one's, which answered at its time `answered`.

        An offset that is not larger than its error becomes 0: then the hosts may be the same.
        """
        error = (received - sent) // 2
        offset = answered - sent - error
        return cls(offset, error) if abs(offset) > error else cls(0, error)

    def after(self, other: Clock) -> Clock:
        """Return the sum of two offsets."""
        return Clock(self.offset + other.offset, self.error + other.error)


class ProfileOptions(msgspec.Struct, array_like=True, frozen=True):
    """Options of a recording."""

    seconds: float
    """Time after which the recording ends, even if nobody stops it."""
    origin: int
    """Time 0 of the trace, by the clock of the API process, in nanoseconds since 1970."""
    with_stack: bool = False
    """Record Python calls, too."""
    record_shapes: bool = False
    """Record the shapes of the operations' inputs, too."""
    profile_memory: bool = False
    """Record memory that is allocated and freed, too."""


class StartProfile(msgspec.Struct, tag=True, array_like=True):
    """Record from the next step on. Answered with `ProfileReply`."""

    client: int
    call_id: int
    options: ProfileOptions


class StopProfile(msgspec.Struct, tag=True, array_like=True):
    """Record no more. Answered with `ProfileReply`, and then the traces of the core and of each rank."""

    client: int
    call_id: int
    clock: Clock = msgspec.field(default_factory=Clock)
    """The clock of the core's host."""
    discard: bool = False
    """No traces are wanted."""


class ClockPing(msgspec.Struct, tag=True, array_like=True):
    """Answered with `ClockReply` at once, whatever the loop does."""

    client: int
    call_id: int
    incarnation: int


class ProfileReply(msgspec.Struct, tag=True, array_like=True):
    """All ranks have started or stopped; or the reason why there was nothing to start or stop."""

    call_id: int
    replica: int
    incarnation: int
    error: str = ""


class ClockReply(msgspec.Struct, tag=True, array_like=True):
    """The time of the core's host, in nanoseconds since 1970."""

    call_id: int
    replica: int
    incarnation: int
    time: int


class RankTrace(msgspec.Struct, tag=True, array_like=True):
    """Reported by a rank: its trace is complete, as files that are for `quire.engine.process.trace.convert`."""

    rank: int
    pid: int
    """Id of the rank's process."""
    folder: str
    """The folder on the rank's host. The receiver removes it. Empty: there are no files."""
    options: ProfileOptions
    stop: StopProfile
    steps: int
    """Steps recorded."""
    is_cut: bool = False
    """Whether the recording ended early, at the maximum size."""
    error: str = ""
    """Why the recording ended early otherwise."""


class TraceSummary(msgspec.Struct, array_like=True):
    """A summary of a trace."""

    process: str
    """Name of the process in the trace."""
    pid: int
    """Its number there."""
    num_events: int
    clock: Clock
    steps: int = 0
    is_cut: bool = False
    error: str = ""


class TracePiece(msgspec.Struct, tag=True, array_like=True):
    """Some events of a trace, for `quire.engine.process.trace.TraceWriter`."""

    client: int
    call_id: int
    rank: int
    data: bytes
    summary: TraceSummary | None = None
    """Only in the last piece of each rank."""
    replica: int = 0
    incarnation: int = 0
