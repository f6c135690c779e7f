"""Sends the traces of this host's ranks on their way to the API process."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import msgspec

from quire.engine.config.engine_config import ParallelConfig
from quire.engine.process.trace import Conversion, process_id, read_pieces
from quire.engine.protocol.profile import Clock, RankTrace, TracePiece, TraceSummary


def send_trace(
    trace: RankTrace, parallel: ParallelConfig, send: Callable[[TracePiece], None], clock: Clock | None = None
) -> None:
    """Convert a rank's trace in another process, and send its pieces from a thread. Removes the rank's files.

    `clock` relates this host's clock to the core's; None: this is the core's host. Converting takes longer than
    sending, so that the messages of steps hardly wait for pieces.
    """
    name = f"trace-{trace.rank}"
    threading.Thread(target=_send, args=(trace, parallel, send, clock), daemon=True, name=name).start()


def _send(trace: RankTrace, parallel: ParallelConfig, send: Callable[[TracePiece], None], clock: Clock | None) -> None:
    rank, stop = trace.rank, trace.stop
    clock = stop.clock if clock is None else stop.clock.after(clock)
    stage, tp_rank = parallel.stage_of(rank), parallel.tp_rank_of(rank)
    context = f" · context rank {parallel.pcp_rank_of(rank)}" * (parallel.prefill_context_parallel_size > 1)
    process = f"replica {parallel.replica} · stage {stage}{context} · tensor rank {tp_rank} (PP{stage} TP{tp_rank})"
    pid = process_id(parallel.replica, rank)
    summary = TraceSummary(process, pid, 0, clock, trace.steps, trace.is_cut, trace.error)
    try:
        if trace.folder and not stop.discard:
            for count, piece in _convert(Conversion(trace, process, pid, clock.offset)):
                summary.num_events += count
                send(TracePiece(stop.client, stop.call_id, rank, piece))
    except Exception as error:  # whatever it is: the API process waits for the summary
        summary.error = f"the trace cannot be converted: {error}"
    finally:
        shutil.rmtree(trace.folder, ignore_errors=True)
    if not stop.discard:
        send(TracePiece(stop.client, stop.call_id, rank, b"", summary))


def _convert(conversion: Conversion) -> Iterator[tuple[int, bytes]]:
    """Yield the pieces, and their numbers of events; raises `RuntimeError` if the process fails."""
    command = [sys.executable, "-P", "-m", "quire.engine.process.trace"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(msgspec.msgpack.encode(conversion))
        process.stdin.close()
        yield from read_pieces(process.stdout)
        errors = process.stderr.read().decode(errors="replace").strip()
        if process.wait():
            raise RuntimeError(errors.rpartition("\n")[2] or f"exit code {process.returncode}")
