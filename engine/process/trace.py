"""Traces in Chrome's format, which Perfetto shows, from torch's profiler of several ranks. No torch.

Each rank's trace is converted where the rank is, by a process of its own (`main`) at the lowest priority: other process
numbers and names, and one clock. The result is compressed in pieces that can be joined in any order, so that an API
process only appends them to a file (`TraceWriter`).
"""

from __future__ import annotations

import gzip
import os
import re
import struct
import sys
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import msgspec

from quire.engine.protocol.profile import RankTrace, TraceSummary
from quire.engine.protocol.scheduler_output import SchedulerOutput

_RANKS, _DEVICES = 4096, 32
"""Ranks that a replica's process numbers have room for, and process numbers of a rank."""
_ID_BITS = 26
"""Bits of torch's flow event ids. With the number of the process they stay below 2 ** 53."""
_LOWEST_PRIORITY = 19
"""nice(2)"""
_GZIP_HEADER = b"\x1f\x8b\x08\0\0\0\0\0\0\xff"
_FLUSH_MARKER = b"\0\0\xff\xff"
"""At the end of a piece: an empty block (RFC 1951, 3.2.4), up to which all data has been written."""
_STEP = re.compile(r"step (\d+): (\d+) requests?, (\d+) prefill \+ (\d+) decode tokens")
FRAME = struct.Struct("<II")
"""Before each piece that `main` writes: the number of events, and of bytes."""


_NO_ARGS = msgspec.Raw(b"{}")


class Event(msgspec.Struct, omit_defaults=True, gc=False):
    """An event. Times in microseconds."""

    ph: str
    name: str
    pid: int | str = ""
    tid: int | str = ""
    ts: float | None = None
    dur: float | None = None
    cat: str = ""
    id: int | str | None = None
    bp: str | None = None
    s: str | None = None
    args: msgspec.Raw = _NO_ARGS


class _TorchTrace(msgspec.Struct):
    """A trace as `torch.profiler` writes it."""

    traceEvents: list[Event]
    baseTimeNanoseconds: int = 0


class Conversion(msgspec.Struct):
    """The input of `main`."""

    trace: RankTrace
    process: str
    pid: int
    offset: int
    """Added to the time of the rank's host, in nanoseconds."""


def process_id(replica: int, rank: int) -> int:
    """Return the number of a process in the trace; its GPUs have the next ones."""
    return (replica * _RANKS + rank + 2) * _DEVICES


def step_name(plan: SchedulerOutput) -> str:
    """Return the name of a step, from its plan."""
    rows, prefill = plan.num_rows, plan.num_prefill_tokens
    return (
        f"step {plan.step}: {rows} request{'s' * (rows != 1)}, {prefill} prefill + {plan.num_tokens - prefill} decode "
        "tokens"
    )


def step_args(name: str) -> dict[str, Any] | None:
    """Return the numbers in the name of a step; None: it is none."""
    if (match := _STEP.fullmatch(name)) is None:
        return None
    names = ("step", "requests", "prefill_tokens", "decode_tokens")
    return {key: int(value) for key, value in zip(names, match.groups(), strict=True)}


def process_events(pid: int, name: str) -> list[Event]:
    """Return the events that name a process, and sort it."""
    return [
        Event("M", "process_name", pid, args=_raw({"name": name})),
        Event("M", "process_sort_index", pid, args=_raw({"sort_index": pid})),
    ]


def convert(raw: bytes, conversion: Conversion) -> list[Event]:
    """Convert a file of torch's profiler. Raises `msgspec.DecodeError`."""
    trace = msgspec.json.decode(raw, type=_TorchTrace)
    own, pid = conversion.trace.pid, conversion.pid
    shift = (trace.baseTimeNanoseconds + conversion.offset - conversion.trace.options.origin) / 1000
    events, devices = list[Event](), set[int]()
    for event in trace.traceEvents:
        if not isinstance(event.pid, int) or (event.ph == "M" and not event.name.startswith("thread_")):
            continue  # torch's own spans and names of processes
        device = event.pid if event.pid != own else None
        if device is not None and event.ph != "M":
            devices.add(device)
        event.pid = pid if device is None else pid + 1 + device % (_DEVICES - 1)
        event.ts = None if event.ts is None or event.ph == "M" else round(event.ts + shift, 3)
        if isinstance(event.id, int):
            event.id += pid << _ID_BITS
        if event.cat.endswith("user_annotation") and (args := step_args(event.name)) is not None:
            event.args = _raw(args)
        events.append(event)
    used = {event.pid for event in events if event.ph != "M"}
    events = [event for event in events if event.ph != "M" or event.pid in used]
    for device in sorted(devices):
        events += process_events(pid + 1 + device % (_DEVICES - 1), f"{conversion.process} · GPU {device}")
    return events


def _raw(args: dict[str, Any]) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(args))


def compress(events: Iterable[Event]) -> bytes:
    """Return events as a piece for `TraceWriter`."""
    encode = msgspec.json.Encoder().encode
    deflate = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    text = b"".join(encode(event) + b",\n" for event in events)
    return deflate.compress(text) + deflate.flush(zlib.Z_FULL_FLUSH)


class TraceWriter:
    """Writes a trace as a single gzip stream, since not all viewers read several, from pieces that stay compressed."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._checksum = self._size = 0
        file.write(_GZIP_HEADER)
        self._write(b'{"displayTimeUnit":"ms","traceEvents":[\n')

    def add(self, piece: bytes) -> None:
        """Append a piece; raises `zlib.error` if it is none, or not a whole one."""
        if not piece.endswith(_FLUSH_MARKER):
            raise zlib.error("a chunk is incomplete")
        self._count(zlib.decompressobj(-zlib.MAX_WBITS).decompress(piece))
        self._file.write(piece)

    def close(self, summaries: Iterable[TraceSummary], metadata: dict[str, Any]) -> None:
        """Write the names of the processes, at least one, and `metadata`. Does not close the file."""
        named = [event for each in summaries for event in process_events(each.pid, each.process)]
        text = b",\n".join(map(msgspec.json.encode, named))
        self._write(text + b'],\n"otherData":' + msgspec.json.encode(metadata) + b"}\n")
        self._file.write(zlib.compressobj(wbits=-zlib.MAX_WBITS).flush())
        self._file.write(struct.pack("<II", self._checksum, self._size & 0xFFFFFFFF))

    def _write(self, text: bytes) -> None:
        deflate = zlib.compressobj(wbits=-zlib.MAX_WBITS)
        self._count(text)
        self._file.write(deflate.compress(text) + deflate.flush(zlib.Z_FULL_FLUSH))

    def _count(self, text: bytes) -> None:
        self._checksum = zlib.crc32(text, self._checksum)
        self._size += len(text)


def read_pieces(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield the output of `main`: the number of events of each piece, and the piece. Raises `EOFError` within a
    piece."""
    while header := file.read(FRAME.size):
        if len(header) == FRAME.size:
            count, size = FRAME.unpack(header)
            if len(piece := file.read(size)) == size:
                yield count, piece
                continue
        raise EOFError("the process ended within a chunk")


def main() -> None:
    """Convert the files of a `Conversion` on standard input to pieces on standard output."""
    os.nice(_LOWEST_PRIORITY)
    conversion = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Conversion)
    for path in sorted(Path(conversion.trace.folder).glob("*.json.gz")):
        events = convert(gzip.decompress(path.read_bytes()), conversion)
        piece = compress(events)
        sys.stdout.buffer.write(FRAME.pack(len(events), len(piece)) + piece)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
