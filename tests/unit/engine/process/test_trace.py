"""Merging the traces of several ranks into one file."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from typing import Any

import msgspec
import pytest

from quire.engine.process import trace
from quire.engine.process.trace import Conversion, TraceWriter, compress, convert, process_id, step_args, step_name
from quire.engine.protocol.profile import CORE, Clock, ProfileOptions, RankTrace, StopProfile, TraceSummary
from quire.engine.protocol.sampling_params import SamplingParams
from quire.engine.protocol.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput

ORIGIN = 1_800_000_000_000_000_000
"""Time 0 of the profile, in nanoseconds since 1970."""
BASE = ORIGIN - 5_000_000_000
"""Time 0 of torch's files."""
PID = 4321


def torch_file(*events: dict[str, Any]) -> bytes:
    """As `torch.profiler` writes it."""
    own = {"ph": "M", "ts": 1.0, "pid": PID, "tid": 0}
    around = [
        {**own, "name": "process_name", "args": {"name": "python"}},
        {**own, "name": "thread_name", "tid": 7, "args": {"name": "thread 7 (python)"}},
        {**own, "name": "thread_name", "pid": 3, "tid": 0, "args": {"name": "stream 0"}},
        {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": "x", "ts": 1.0, "dur": 1.0},
        {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": 9.0},
    ]
    return json.dumps({"schemaVersion": 1, "baseTimeNanoseconds": BASE, "traceEvents": [*around, *events]}).encode()


def span(name: str, at: float, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": PID, "tid": 7, "ts": at, "dur": 2.5, **more}


def conversion(replica: int = 0, rank: int = 0, offset: int = 0) -> Conversion:
    found = RankTrace(rank, PID, "", ProfileOptions(1.0, ORIGIN), StopProfile(0, 0), 1)
    return Conversion(found, f"replica {replica} · rank {rank}", process_id(replica, rank), offset)


def merged(*pieces: bytes, summaries: list[TraceSummary], **metadata: Any) -> dict[str, Any]:
    file = io.BytesIO()
    writer = TraceWriter(file)
    for piece in pieces:
        writer.add(piece)
    writer.close(summaries, metadata)
    found: dict[str, Any] = json.loads(gzip.decompress(file.getvalue()))
    return found


def test_ranks_of_hosts_with_the_same_process_number_are_told_apart_on_one_clock() -> None:
    step = "step 7: 3 requests, 12 prefill + 2 decode tokens"
    jobs = [conversion(0, 0), conversion(0, 1, offset=-2_000_000), conversion(1, 0)]
    late = [0, 2_000, 0]  # microseconds by which the hosts' clocks are ahead
    pieces = [
        compress(
            convert(
                torch_file(
                    span(step, 5e6 + 100.25 + ahead, cat="user_annotation"), span("aten::mm", 5e6 + 101 + ahead)
                ),
                job,
            )
        )
        for job, ahead in zip(jobs, late, strict=True)
    ]
    summaries = [TraceSummary(job.process, job.pid, 2, Clock()) for job in jobs]
    found = merged(*reversed(pieces), summaries=summaries, note="x")
    assert found["otherData"] == {"note": "x"}
    events = [event for event in found["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in events} == {job.pid for job in jobs}
    names = {e["pid"]: e["args"]["name"] for e in found["traceEvents"] if e["name"] == "process_name"}
    assert names == {job.pid: job.process for job in jobs}
    plan = {"step": 7, "requests": 3, "prefill_tokens": 12, "decode_tokens": 2}
    assert [(e["ts"], e["dur"], e["args"]) for e in events if e["name"] == step] == [(100.25, 2.5, plan)] * 3
    assert {(e["name"], e["tid"]) for e in found["traceEvents"] if e["ph"] == "M" and "tid" in e} == {
        ("thread_name", 7)
    }, "only threads with events"


def test_gpus_are_processes_of_their_own_and_arrows_stay_within_a_rank() -> None:
    kernel = {"cat": "kernel", "pid": 3, "tid": 0}
    arrow = [
        {"ph": "s", "cat": "ac2g", "name": "ac2g", "pid": PID, "tid": 7, "ts": 5e6, "id": 11},
        {"ph": "f", "cat": "ac2g", "name": "ac2g", "pid": 3, "tid": 0, "ts": 5e6 + 1, "id": 11, "bp": "e"},
    ]
    first, second = (
        convert(torch_file(span("launch", 5e6), span("gemm", 5e6 + 1, **kernel), *arrow), conversion(0, rank))
        for rank in range(2)
    )
    gpu = {event.pid for event in first if event.cat == "kernel"}
    assert gpu == {process_id(0, 0) + 4}
    assert any(e.pid in gpu and json.loads(bytes(e.args)) == {"name": "replica 0 · rank 0 · GPU 3"} for e in first)
    ids = [{event.id for event in events if event.ph in "sf"} for events in (first, second)]
    assert [len(each) for each in ids] == [1, 1]
    assert ids[0] != ids[1]
    largest = convert(torch_file({**arrow[0], "id": 2**26 - 1}), conversion(255, 4000))
    assert max(event.id for event in largest if isinstance(event.id, int)) < 2**53  # JavaScript's integers


def test_the_numbers_of_processes_differ() -> None:
    numbers = {process_id(replica, rank) + gpu for replica in range(3) for rank in (CORE, 0, 1, 9) for gpu in range(3)}
    assert len(numbers) == 3 * 4 * 3
    assert min(numbers) > 0  # viewers take 0 for the idle task


def test_a_damaged_file_of_torch_is_an_error() -> None:
    with pytest.raises(msgspec.DecodeError):
        convert(torch_file(span("aten::mm", 1.0))[:-20], conversion())


def test_the_name_of_a_step_tells_its_plan() -> None:
    new = NewRequestData(4, [1], 1, 0, [0], SamplingParams())
    rows = [CachedRequestData(2, 5, [], []), CachedRequestData(3, 1, [], []), CachedRequestData(4, 1, [], [])]
    plan = SchedulerOutput(9, [], [new], rows, decodes=[0, 1])
    assert step_name(plan) == "step 9: 5 requests, 6 prefill + 3 decode tokens"
    assert step_args(step_name(plan)) == {"step": 9, "requests": 5, "prefill_tokens": 6, "decode_tokens": 3}
    assert step_args(step_name(SchedulerOutput(1, [], [], [], decodes=[0]))) is not None
    assert step_args("gloo:send") is None


def test_pieces_are_read_as_they_were_written() -> None:
    pieces = [b"", b"one", b"two" * 1000]
    file = io.BytesIO(b"".join(trace.FRAME.pack(at, len(each)) + each for at, each in enumerate(pieces)))
    assert list(trace.read_pieces(file)) == list(enumerate(pieces))
    for missing in (1, 3000, 3001, 3007):  # of the last piece, and of its frame
        rest = trace.read_pieces(io.BytesIO(file.getvalue()[:-missing]))
        assert [next(rest), next(rest)] == [(0, b""), (1, b"one")]
        with pytest.raises(EOFError, match="within a chunk"):
            next(rest)


def test_a_piece_that_was_cut_off_does_not_get_into_the_file() -> None:
    piece = compress([trace.Event("X", f"name {number}", 32, 32, 1.0, 1.0) for number in range(100)])
    file = io.BytesIO()
    writer = TraceWriter(file)
    before = file.getvalue()
    for length in (0, len(piece) // 2, len(piece) - 1):
        with pytest.raises(zlib.error, match="incomplete"):
            writer.add(piece[:length])
    assert file.getvalue() == before
    writer.add(compress([]))
    writer.add(piece)
    writer.close([TraceSummary("x", 32, 100, Clock())], {})
    assert len(json.loads(gzip.decompress(file.getvalue()))["traceEvents"]) == 102


def test_a_clock_that_may_be_the_same_is_not_shifted() -> None:
    assert Clock.measured(1000, 2500, 2000) == Clock(1000, 500)
    assert Clock.measured(1000, 1600, 2000) == Clock(0, 500)
    assert Clock(5, 1).after(Clock(-2, 3)) == Clock(3, 4)
