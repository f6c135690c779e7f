"""torch's profiler around the steps of a rank, and the way of its files to pieces."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch

from quire.engine.executor.traces import send_trace
from quire.engine.protocol.profile import Clock, ProfileOptions, RankTrace, StopProfile, TracePiece
from quire.engine.protocol.scheduler_output import SchedulerOutput
from quire.engine.worker import profiler
from quire.engine.worker.profiler import RankProfiler
from tests.fakes.configs import engine_config
from tests.unit.engine.process.test_trace import merged

STOP = StopProfile(2, 5)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def record(steps: int, seconds: float = 60.0, **options: Any) -> RankTrace:
    """Run steps with one operation each."""
    reported: SimpleQueue[RankTrace] = SimpleQueue()
    recorder = RankProfiler(0, ProfileOptions(seconds, 0, **options), torch.device("cpu"))
    values = torch.ones(2, 3)
    for step in range(steps):
        with recorder.step(SchedulerOutput(step, [], [], [], decodes=[0, 1])):
            values + values
    recorder.finish(STOP, reported.put)
    return reported.get(timeout=60)


def converted(trace: RankTrace) -> tuple[list[dict[str, Any]], TracePiece]:
    """The events, and the last piece."""
    sent: SimpleQueue[TracePiece] = SimpleQueue()
    send_trace(trace, engine_config().parallel, sent.put, Clock(7000, 10))
    pieces = [sent.get(timeout=60)]
    while pieces[-1].summary is None:
        pieces.append(sent.get(timeout=60))
    summary = pieces[-1].summary
    assert summary is not None
    assert {(piece.client, piece.call_id, piece.rank) for piece in pieces} == {(2, 5, 0)}
    document = merged(*(piece.data for piece in pieces[:-1]), summaries=[summary])
    assert not os.path.exists(trace.folder)
    return document["traceEvents"], pieces[-1]


def test_every_step_is_in_one_of_the_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "_SLICE_SECONDS", {"cpu": 0.0})
    trace = record(5)
    assert sorted(os.listdir(trace.folder)) == [*(f"{number:06}.json.gz" for number in range(1, 6)), "steps.json.gz"]
    events, last = converted(trace)
    assert last.summary is not None
    assert (last.summary.steps, last.summary.is_cut, last.summary.error) == (5, False, "")
    assert (last.summary.process, last.summary.clock) == (
        "replica 0 · stage 0 · tensor rank 0 (PP0 TP0)",
        Clock(7000, 10),
    )
    steps = [event for event in events if "step" in event.get("args", {})]
    assert [event["args"]["step"] for event in steps] == list(range(5))
    additions = [event["ts"] for event in events if event["name"] == "aten::add"]
    assert len(additions) == 5
    for step, at in zip(steps, additions, strict=True):
        earliest, latest = step["ts"] - 100_000, step["ts"] + step["dur"] + 100_000
        assert earliest < at < latest, "microseconds; torch reads another clock"


def test_annotations_that_end_after_a_slice_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo makes such ones. If torch recorded them, this would be a use after free."""
    monkeypatch.setattr(profiler, "_SLICE_SECONDS", {"cpu": 0.0})
    recorder = RankProfiler(0, ProfileOptions(60.0, 0), torch.device("cpu"))
    late = torch.profiler.record_function("gloo:send")
    with recorder.step(SchedulerOutput(1, [], [], [], decodes=[0])):
        late.__enter__()  # type: ignore[no-untyped-call]
    late.__exit__(None, None, None)
    reported: SimpleQueue[RankTrace] = SimpleQueue()
    recorder.finish(STOP, reported.put)
    events, _ = converted(reported.get(timeout=60))
    assert [event["name"] for event in events if event["ph"] == "X"] == [
        "step 1: 1 request, 0 prefill + 1 decode tokens"
    ]


def test_options_are_those_of_torch() -> None:
    trace = record(2, record_shapes=True, profile_memory=True, with_stack=True)
    events, _ = converted(trace)
    assert [e["args"]["Input Dims"][:2] for e in events if e["name"] == "aten::add"] == [[[2, 3], [2, 3]]] * 2
    assert any(event["name"] == "[memory]" for event in events)
    assert any(event.get("cat") == "python_function" for event in events)


@pytest.mark.parametrize(("limit", "seconds"), [(1, 60.0), (1 << 30, 0.0)])
def test_a_recording_ends_by_itself(monkeypatch: pytest.MonkeyPatch, limit: int, seconds: float) -> None:
    monkeypatch.setattr(profiler, "_SLICE_SECONDS", {"cpu": 0.0})
    monkeypatch.setattr(profiler, "_MAX_BYTES", limit)
    trace = record(3, seconds)
    assert (trace.steps, trace.is_cut) == (1, limit == 1)


def test_a_failure_of_the_profiler_is_reported_and_steps_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "_SLICE_SECONDS", {"cpu": 0.0})
    monkeypatch.setattr(os.path, "getsize", lambda path: (_ for _ in ()).throw(OSError(28, "no space left on device")))
    trace = record(3)
    assert (trace.steps, "no space left" in trace.error) == (1, True)


def test_what_cannot_be_converted_is_reported() -> None:
    trace = record(1)
    path = Path(trace.folder, "000001.json.gz")
    path.write_bytes(path.read_bytes()[:-20])
    events, last = converted(trace)
    assert last.summary is not None
    assert "cannot be converted: EOFError" in last.summary.error
    assert not [event for event in events if event.get("cat") == "cpu_op"]


def test_without_a_folder_there_is_only_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as if the file system is full."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "none"))
    monkeypatch.chdir(tmp_path)
    trace = record(2)
    assert (trace.folder, trace.steps, "FileNotFoundError" in trace.error) == ("", 0, True)
    events, last = converted(trace)
    assert last.summary is not None
    assert (last.summary.num_events, last.summary.error) == (0, trace.error)
    assert {event["ph"] for event in events} == {"M"}
    assert not list(tmp_path.iterdir())


def test_a_conversion_that_is_killed_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "os.write(1, bytes(4)); os.kill(os.getpid(), 9)"
    python = tmp_path / "python"
    python.write_text(f"#!{sys.executable}\nimport os, sys; sys.stdin.read()\n{code}\n")
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    events, last = converted(record(1))
    assert last.summary is not None
    assert last.summary.error == "the trace cannot be converted: the process ended within a chunk"
    assert {event["ph"] for event in events} == {"M"}


def test_nothing_stays_of_a_trace_that_nobody_wants(tmp_path: Path) -> None:
    recorder = RankProfiler(0, ProfileOptions(60.0, 0), torch.device("cpu"))
    with recorder.step(SchedulerOutput(1, [], [], [], decodes=[0])):
        pass
    recorder.discard()
    recorder._background.shutdown(wait=True)
    assert not list(tmp_path.iterdir())
