"""Stages go on while hidden states are under way, on both sides of the link."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from quire.engine.distributed.communicator import Parallel
from quire.engine.distributed.parallel_state import ParallelState, connect
from quire.engine.distributed.pipeline import Pipeline
from quire.engine.protocol.sampling_params import SamplingParams
from quire.engine.protocol.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from quire.engine.worker.model_runner import ModelRunner
from quire.engine.worker.worker import read_plans
from tests.fakes.checkpoints import write_checkpoint
from tests.fakes.model_logits import CPU, configure
from tests.fakes.processes import CONTEXT
from tests.integration.engine.distributed.test_parallel_state import grid

SHAPE = (64, 1024)


class SlowLink:
    """Takes messages, and reports none as sent until somebody waits for it."""

    def __init__(self) -> None:
        self.messages: list[Tensor] = []
        self.waited: list[int] = []

    def isend(self, message: Tensor, to: int, tag: int = 0) -> Any:
        number = len(self.messages)
        self.messages.append(message.clone())
        waited = self.waited

        class Work:
            def wait(self) -> None:
                waited.append(number)

        return Work()


def test_a_stage_computes_the_next_plans_while_one_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_checkpoint("llama", tmp_path / "model")
    config = configure(folder, pipeline_parallel_size=2, block_size=4, max_num_seqs=4, max_model_len=64)
    link = SlowLink()
    monkeypatch.setattr(dist, "isend", link.isend)
    runner = ModelRunner(config, 0, ParallelState(Parallel(), Pipeline(0, 2, 0, 1, CPU)), CPU)
    params = SamplingParams(temperature=0.0)
    plans = [
        SchedulerOutput(0, [], [NewRequestData(0, [5, 6, 7], 3, 0, [0], params)], [CachedRequestData(0, 3, [], [])]),
        SchedulerOutput(1, [], [NewRequestData(1, [8, 9], 2, 0, [1], params)], [CachedRequestData(1, 2, [], [])]),
        SchedulerOutput(2, [], [], [CachedRequestData(0, 1, [4], [])]),
    ]
    for plan in plans[:2]:  # as many as are in flight
        assert runner.launch(plan).result() is None
    assert link.waited == []
    runner.launch(plans[2]).result()
    assert link.waited == [0], "the buffers of no more plans than are in flight are kept"
    hidden = config.model.architecture.hidden_size
    assert [tuple(message.shape) for message in link.messages] == [(plan.num_tokens, hidden) for plan in plans]


def send(folder: str, arrived: Event) -> None:
    links = connect(grid(1, 2), 0, f"file://{folder}/rendezvous", CPU)
    links.pipeline.send(torch.full(SHAPE, 7.0))
    links.pipeline.drain()
    arrived.set()
    links.close()


def receive(folder: str, arrived: Event) -> None:
    links = connect(grid(1, 2), 1, f"file://{folder}/rendezvous", CPU)
    links.pipeline.post_receive(SHAPE, torch.float32)
    assert arrived.wait(60), "nothing has moved before it was asked for"  # this stage computes, meanwhile
    assert links.pipeline.receive(SHAPE, torch.float32).eq(7.0).all()
    links.close()


def test_what_is_expected_arrives_while_a_stage_computes(tmp_path: Path) -> None:
    arrived = CONTEXT.Event()
    processes = [CONTEXT.Process(target=target, args=(str(tmp_path), arrived)) for target in (send, receive)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]


def encode_and_send(folder: str, started: Barrier, limit: timedelta) -> None:
    started.wait(60)  # as the limit is also that of joining
    links = connect(grid(1, 2), 0, f"file://{folder}/rendezvous", CPU, limit)
    time.sleep(2 * limit.total_seconds())
    links.pipeline.send(torch.full((2, 8), 7.0))
    links.pipeline.drain()
    links.close()


def receive_patiently(folder: str, started: Barrier, limit: timedelta) -> None:
    started.wait(60)
    links = connect(grid(1, 2), 1, f"file://{folder}/rendezvous", CPU, limit)
    assert links.pipeline.receive((2, 8), torch.float32, is_patient=True).eq(7.0).all()
    links.close()


def test_a_stage_that_encodes_may_take_longer_than_messages(tmp_path: Path) -> None:
    targets, limit = (encode_and_send, receive_patiently), timedelta(seconds=1)
    arguments = (str(tmp_path), CONTEXT.Barrier(2), limit)
    processes = [CONTEXT.Process(target=target, args=arguments) for target in targets]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]


def test_plans_are_expected_as_they_come_and_run_in_order() -> None:
    expected: list[int] = []
    coming: Iterator[bytes] = iter([b"0", b"1", b"2", b""])
    plans = read_plans(
        lambda: next(coming), lambda data: SchedulerOutput(int(data), [], [], []), lambda p: expected.append(p.step)
    )
    first = next(plans)
    assert [first.step, *(plan.step for plan in plans)] == [0, 1, 2]
    assert expected == [0, 1, 2]

    coming = iter([b"0", b""])
    directly = read_plans(lambda: next(coming), lambda data: SchedulerOutput(int(data), [], [], []), None)
    assert [plan.step for plan in directly] == [0]


def test_a_link_that_breaks_while_plans_are_read_ahead_ends_the_rank() -> None:
    def post_receive(plan: SchedulerOutput) -> None:
        raise RuntimeError("Connection closed by peer")

    with pytest.raises(RuntimeError, match="closed by peer"):
        list(read_plans(lambda: b"0", lambda data: SchedulerOutput(0, [], [], []), post_receive))
