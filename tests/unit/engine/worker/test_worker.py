"""The reports of a rank to the core while its device runs behind."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from dataclasses import replace
from datetime import timedelta
from typing import Any

import msgspec
import pytest
import torch

from quire.engine.architecture.attention_spec import GroupIndexerSpec
from quire.engine.architecture.feed_forward_spec import MoESpec
from quire.engine.architecture.model_spec import TransformersLayerSpec
from quire.engine.architecture.recurrent_spec import ShortConvSpec
from quire.engine.architecture.residual_spec import HyperConnectionSpec
from quire.engine.distributed.communicator import GroupParallel
from quire.engine.distributed.cpu_communicator import CpuParallel
from quire.engine.executor.local_ranks import find_late_ranks
from quire.engine.protocol.rank_state import RankState
from quire.engine.protocol.runner_output import ModelRunnerOutput, RankOutput, WorkerFailed, WorkerReady
from quire.engine.worker import worker as workers
from quire.engine.worker.async_copies import AsyncOutput, AsyncRead
from quire.engine.worker.worker import Reports, is_in_collective
from tests.fakes.configs import NORM, TINY, TINY_ATTENTION, TINY_LAYER, engine_config
from tests.fakes.model_logits import CPU


class Late(AsyncOutput):
    """Its device is told when to come to it."""

    def __init__(self, step: int, error: Exception | None = None) -> None:
        result = ModelRunnerOutput(step, [-1])
        super().__init__(
            result, [AsyncRead([torch.tensor([step])], lambda x: result.token_ids.__setitem__(0, x[0].item()))], CPU
        )
        self.may_go, self._error = threading.Event(), error

    def result(self) -> RankOutput:
        assert self.may_go.wait(60)
        if self._error is not None:
            raise self._error
        return super().result()


class Rank:
    def __init__(self) -> None:
        self.pipe, sender = multiprocessing.Pipe(duplex=False)
        self.state = RankState(-1)
        self.reports = Reports(sender, self.state)
        self.errors: list[Exception] = []
        self.take = self.reports.in_thread(self.errors.append)

    def launch(self, step: Late, number: int) -> None:
        self.reports.begin(number)
        self.take(number, step)

    def receive(self) -> object:
        assert self.pipe.poll(60)
        return msgspec.msgpack.decode(self.pipe.recv_bytes(), type=ModelRunnerOutput | WorkerFailed | WorkerReady)


def test_results_are_sent_after_the_launches() -> None:
    rank = Rank()
    steps = [Late(number) for number in range(3)]
    for number, step in enumerate(steps):
        rank.launch(step, number)
    assert not rank.pipe.poll(0)
    assert rank.state.progress == 0
    assert find_late_ranks({4: rank.state.progress}, 0) == [4]  # it has taken plans 1 and 2, but not done step 0
    for number, step in enumerate(steps):
        step.may_go.set()
        assert rank.receive() == ModelRunnerOutput(number, [number])
    rank.reports.close()
    assert rank.state.progress == 5
    assert not rank.errors


def test_what_goes_wrong_on_the_device_ends_the_rank() -> None:
    rank = Rank()
    steps = [Late(0), Late(1, RuntimeError("an illegal memory access")), Late(2)]
    for number, step in enumerate(steps):
        rank.launch(step, number)
        step.may_go.set()
    assert rank.receive() == ModelRunnerOutput(0, [0])
    rank.reports.close()
    assert [str(error) for error in rank.errors] == ["an illegal memory access"]
    assert not rank.pipe.poll(0)  # later steps are not reported
    assert rank.state.progress == 2


@pytest.fixture
def codes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The exit codes with which this process would have ended."""
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    return ended


def test_the_core_gets_the_reason_why_a_rank_ends(codes: list[int]) -> None:
    rank = Rank()
    workers._fail(7, RuntimeError("an illegal memory access"), rank.reports)
    assert rank.receive() == WorkerFailed("RuntimeError: an illegal memory access", user_error=False)
    assert codes == [1]
    rank.reports.close()


def test_ranks_that_wait_for_others_are_not_named() -> None:
    assert find_late_ranks({0: 10, 1: 10, 2: 11}, 5, waiting=[0]) == [1]
    assert find_late_ranks({0: 10, 1: 10}, 5, waiting=[0, 1]) == [0, 1]
    assert find_late_ranks({0: 10, 1: 8}, 5, waiting=[1]) == [1]  # it has not received the plan


def test_a_stack_shows_whether_a_rank_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[bool] = []

    class Group:
        def rank(self) -> int:
            return 0

        size = rank

    def look(*args: object, **kwargs: object) -> None:
        found.append(is_in_collective(sys._getframe()))

    monkeypatch.setattr("torch.distributed.all_reduce", look)
    GroupParallel(Group()).all_reduce(torch.zeros(1))  # type: ignore[arg-type]
    look()
    assert found == [True, False]
    monkeypatch.setattr("quire.kernels.cpu.shared.all_reduce", look)
    parallel = CpuParallel(Group(), timedelta(1))  # type: ignore[arg-type]
    parallel.all_reduce(torch.zeros(1))
    parallel.memory = torch.zeros(1)
    parallel.all_reduce(torch.zeros(1))
    assert found[2:] == [True, False]  # through shared memory, `is_ahead` tells
    assert not is_in_collective(None)


MOE = MoESpec(num_experts=4, top_k=2, intermediate_size=8)
CONV = ShortConvSpec(width=32, conv_size=3)
INDEXER = GroupIndexerSpec(num_heads=2, head_dim=4, norm=NORM, size=4, num_groups=2)
STREAMS = HyperConnectionSpec(num_streams=2, iterations=0, eps=0.0, norm=NORM)


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({}, False),
        ({"feed_forward": None}, False),
        ({"feed_forward": MOE}, True),
        ({"attention": None, "state": CONV}, True),
        ({"state": CONV}, True),
        ({"residual": STREAMS}, True),
        ({"attention": replace(TINY_ATTENTION, indexer=INDEXER)}, True),
    ],
)
def test_a_model_of_plain_layers_does_not_wait_for_all_kernels(changes: dict[str, Any], needed: bool) -> None:
    model = replace(TINY, layers=(replace(TINY_LAYER, **changes),) * TINY.num_layers)
    assert workers.needs_all_kernels(engine_config(architecture=model)) == needed


def test_layers_of_transformers_may_need_all_kernels() -> None:
    layer = TransformersLayerSpec(attention=TINY_ATTENTION, feed_forward=None, linears=(), others=0)
    model = replace(TINY, layers=(layer,))
    assert workers.needs_all_kernels(engine_config(architecture=model))
