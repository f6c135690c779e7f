"""The ranks that wait for a rank that does not take part name it, with the exchange and a hint."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
import torch.distributed as dist

from quire.engine.distributed import pipeline, watchdog
from quire.engine.distributed.parallel_state import ParallelState, connect
from quire.engine.distributed.watchdog import PendingCollective, parse_pending, watch
from tests.fakes.processes import CONTEXT
from tests.integration.engine.distributed.test_parallel_state import CPU, grid, limit_collectives

START, TIMEOUT = 60.0, 1.0
Work = Callable[[ParallelState], Any]


def serve(rank: int, tp: int, pp: int, init_method: str, work: Work | None, pipe: Connection) -> None:
    """A rank that reports the error of `work`; without `work` it takes part in nothing."""
    torch.set_num_threads(1)
    os.environ["TORCH_FR_BUFFER_SIZE"] = "100"
    watchdog._GRACE_SECONDS = 0.5
    links = connect(grid(tp, pp), rank, init_method, CPU, timedelta(seconds=START))
    if work is not None:
        try:
            pipe.send(work(links))
        except RuntimeError as error:
            pipe.send(f"{type(error).__name__}: {error}")
    pipe.recv()
    os._exit(0)


def without_last(folder: Path, tp: int, pp: int, work: Work) -> list[Any]:
    """The results of `work` on all ranks but the last, which does not take part."""
    started = []
    for rank in range(tp * pp):
        ours, theirs = CONTEXT.Pipe()
        here = None if rank == tp * pp - 1 else work
        process = CONTEXT.Process(target=serve, args=(rank, tp, pp, f"file://{folder}/rendezvous", here, theirs))
        process.start()
        started.append((process, ours))
    try:
        results = [pipe.recv() for _, pipe in started[:-1]]
        for process, pipe in started:
            pipe.send(None)
            process.join(60)
        return results
    finally:
        for process, pipe in started:
            pipe.close()
            process.kill()
            process.join()


class GraceTime:
    """Replaces the clock of `missing_ranks`: the time is over once both ranks have said that they wait."""

    def __init__(self) -> None:
        self._has_heard = False

    def monotonic(self) -> float:
        store, has_heard = dist.distributed_c10d._get_default_store(), self._has_heard
        self._has_heard = store.check(["quire-waits-0", "quire-waits-1"])
        return 1e9 * has_heard

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def all_reduce(links: ParallelState) -> None:
    limit_collectives(TIMEOUT)
    watchdog.time = GraceTime()  # type: ignore[assignment,attr-defined]
    links.tp.all_reduce(torch.ones(3, 4))


def broadcast(links: ParallelState) -> None:
    limit_collectives(TIMEOUT)
    watchdog.time = GraceTime()  # type: ignore[assignment,attr-defined]
    for _ in range(2):  # rank 0 would be done with the first before it left
        links.tp.broadcast(torch.ones(2))
        links.tp.all_gather(torch.ones(5))


def receive_from_next(links: ParallelState) -> None:
    wait = pipeline._wait  # for messages, gloo's limit is that of the start

    def wait_less(work: dist.Work, what: str, message: torch.Tensor, limit: timedelta | None = None) -> None:
        wait(work, what, message, timedelta(seconds=TIMEOUT))

    pipeline._wait = wait_less
    links.pipeline.stage, links.pipeline._previous = 1, 1
    links.pipeline.receive((2, 8), torch.float32)


def timeouts(links: ParallelState) -> list[float]:
    groups = list(dist.distributed_c10d._world.pg_map)
    return [group._get_backend(CPU).options._timeout.total_seconds() for group in groups]


def watched(links: ParallelState) -> str:
    """The report on a sum that the host has launched and does not wait for, as with NCCL."""
    reports: SimpleQueue[str] = SimpleQueue()
    limit_collectives(TIMEOUT)
    look = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json")  # noqa: B009 (gloo's, which has no type)
    watch(TIMEOUT / 4, reports.put, lambda: parse_pending(look(True, True)))
    dist.all_reduce(torch.ones(7, 2), async_op=True)
    return reports.get(timeout=60)


@pytest.mark.parametrize(
    ("work", "what"), [(all_reduce, "all_reduce of [3, 4] float32"), (broadcast, "all_gather of [5] float32")]
)
def test_the_rank_that_stays_away_from_a_collective_is_named(work: Work, what: str, tmp_path: Path) -> None:
    said = without_last(tmp_path, 3, 1, work)
    assert all(what in text for text in said) or work is broadcast
    for text in said:
        assert text.startswith("CollectiveError: ")
        assert " among ranks 0, 1, 2: rank 2 did not join; gloo: " in text
        assert "check that rank's log" in text
    assert any("raise --distributed-timeout-seconds" in text for text in said)


def test_the_stage_that_sends_nothing_is_named(tmp_path: Path) -> None:
    (text,) = without_last(tmp_path, 1, 2, receive_from_next)
    assert text.startswith("CollectiveError: waiting for hidden states from rank 1 ([2, 8]): ")


def test_the_timeout_reaches_every_group(tmp_path: Path) -> None:
    first, second, third = without_last(tmp_path, 2, 2, timeouts)
    assert first == second == third == [START] * 2  # the whole grid's, and the stage's


def test_what_a_device_waits_for_is_reported(tmp_path: Path) -> None:
    (text,) = without_last(tmp_path, 2, 1, watched)
    assert text.startswith("gloo:all_reduce of [[7, 2]] Float among ranks 0, 1: rank 1 did not join; gloo: ")
    assert "it has waited there for" in text


def test_what_ends_in_time_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: SimpleQueue[int] = SimpleQueue()
    said: SimpleQueue[str] = SimpleQueue()
    monkeypatch.setattr(watchdog, "describe_failure", lambda what, *_, **__: what)
    numbers = iter([0, 1, 2, 3, *[4] * 1000])

    def pending() -> list[PendingCollective]:
        number = next(numbers)
        looks.put(number)
        return [PendingCollective(number, f"number {number}", None), PendingCollective(number + 1, "a later one", None)]

    watch(0.02, said.put, pending)
    assert said.get(timeout=60) == "number 4"
    assert [looks.get() for _ in range(5)] == [0, 1, 2, 3, 4]


def test_the_trace_of_the_flight_recorder() -> None:
    """As torch writes it for NCCL; groups that this process does not have are not known."""
    entry = {
        "record_id": 7,
        "process_group": ["nobody's", "default_pg"],
        "profiling_name": "nccl:all_reduce",
        "input_sizes": [[3, 4]],
        "input_dtypes": ["BFloat16"],
        "state": "started",
        "retired": False,
    }
    done = [{**entry, "record_id": 5, "state": "completed"}, {**entry, "record_id": 6, "retired": True}]
    assert parse_pending(json.dumps({"entries": [*done, entry]})) == [
        PendingCollective(7, "nccl:all_reduce of [[3, 4]] BFloat16", None)
    ]
    assert parse_pending(json.dumps({"version": "2.10"})) == []
