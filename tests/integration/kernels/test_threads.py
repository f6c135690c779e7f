"""The threads that share a kernel's loop: a thread that comes late, or never, only costs time."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection

import pytest
import torch
from torch import Tensor

from quire import kernels
from quire.kernels import linear


@pytest.fixture(autouse=True)
def implementation() -> str:
    """The compiled kernels only."""
    kernels.prepare("cpu")()
    return "cpu"


@pytest.fixture
def many_threads() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield None
    torch.set_num_threads(before)


def products(weight: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """By our own threads on every processor: `pack_linear` may choose oneDNN, whose threads are OpenMP's."""
    product = linear.TiledLinear(weight)
    return [product(x, None) for x in inputs]


def test_any_number_of_threads_computes_the_same() -> None:
    before = torch.get_num_threads()
    weight, inputs = torch.randn(700, 300), [torch.randn(rows, 300) for rows in (1, 40, 300)]
    try:
        results = []
        for threads in (1, 2, 7, 3, 1):
            torch.set_num_threads(threads)
            results.append(products(weight, inputs))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.usefixtures("many_threads")
def test_callers_at_the_same_time_do_not_disturb_each_other() -> None:
    weights = [torch.randn(500, 200) for _ in range(4)]
    inputs = [torch.randn(rows, 200) for rows in (1, 3, 64, 200)] * 10
    alone = [products(weight, inputs) for weight in weights]
    with ThreadPoolExecutor(4) as callers:
        together = list(callers.map(lambda weight: products(weight, inputs), weights))
    for mine, theirs in zip(alone, together, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def _compute(result: Connection, weight: Tensor, x: Tensor) -> None:
    result.send_bytes(products(weight, [x])[0].numpy().tobytes())


@pytest.mark.usefixtures("many_threads")
def test_a_forked_process_does_without_the_threads_that_it_has_not() -> None:
    weight, x = torch.randn(500, 200), torch.randn(64, 200)
    expected = products(weight, [x])[0]
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_compute, args=(sender, weight, x))
    child.start()
    try:
        assert receiver.poll(60), "the forked process hangs"
        assert receiver.recv_bytes() == expected.numpy().tobytes()
    finally:
        child.kill()
        child.join()
