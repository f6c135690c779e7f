"""Ranks of one host as processes: through shared memory when all can, else by gloo; nothing is left of them."""

from __future__ import annotations

import hashlib
import os
import random
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from quire import kernels
from quire.engine.architecture.media_spec import TransformersTowerSpec
from quire.engine.distributed.communicator import GroupParallel
from quire.engine.distributed.cpu_communicator import CpuParallel
from quire.engine.distributed.parallel_state import connect
from quire.engine.models.tower import Tower
from quire.engine.protocol.media import MediaData, MediaItem, MediaRun
from quire.engine.protocol.scheduler_output import MediaPlan
from quire.engine.worker.encoder_cache import EncoderCache
from quire.engine.worker.worker import is_in_collective
from quire.kernels.cpu import op_replay, shared
from tests.fakes.processes import CONTEXT
from tests.integration.engine.distributed.test_parallel_state import CPU, grid

Work = Callable[[CpuParallel], Any]


def serve(tp: int, rank: int, init_method: str, prepared: bool, pipe: Connection) -> None:
    torch.set_num_threads(1)
    if prepared:
        kernels.prepare("cpu")()
    links = connect(grid(tp, 1), rank, init_method, CPU, timedelta(minutes=1))
    assert isinstance(links.tp, CpuParallel)
    links.tp.finalize()
    while (work := pipe.recv()) is not None:
        try:
            pipe.send(work(links.tp))
        except RuntimeError as error:
            pipe.send(error)
    links.close()


@contextmanager
def ranks(
    folder: Path, tp: int, unprepared: tuple[int, ...] = ()
) -> Iterator[list[tuple[ForkServerProcess, Connection]]]:
    """Settled ranks, each a process, that run the functions sent to them; `unprepared` ones have no compiled
    kernels."""
    started = []
    for rank in range(tp):
        ours, theirs = CONTEXT.Pipe()
        arguments = (tp, rank, f"file://{folder}/rendezvous", rank not in unprepared, theirs)
        process = CONTEXT.Process(target=serve, args=arguments)
        process.start()
        theirs.close()
        started.append((process, ours))
    try:
        yield started
        for process, pipe in started:
            if process.is_alive():
                pipe.send(None)
        for process, _ in started:
            process.join(60)
            assert process.exitcode in (0, -9)
    finally:
        for process, pipe in started:
            pipe.close()
            process.kill()
            process.join()


def everywhere(started: list[tuple[ForkServerProcess, Connection]], work: Work) -> list[Any]:
    for _, pipe in started:
        pipe.send(work)
    return [pipe.recv() for _, pipe in started]


def shares_memory(tp: CpuParallel) -> bool:
    return tp.memory is not None


def mixed_calls(tp: CpuParallel) -> str:
    """Random calls of all kinds against gloo's results; returns a digest of the bits of all sums."""
    rng, digest = random.Random(3), hashlib.sha256()
    for call in range(100):
        generator = torch.Generator().manual_seed(100 * call + tp.rank)
        rows, width = rng.choice((0, 1, 3, 17, 300)), rng.choice((1, 7, 64, 896))
        x = torch.randn(rows, width, generator=generator)
        match call % 4:
            case 0:
                assert torch.equal(tp.all_gather(x.t()), GroupParallel.all_gather(tp, x.t()))
            case 1:
                assert torch.equal(tp.broadcast(x.clone()), GroupParallel.broadcast(tp, x))
            case 2:
                summed = tp.all_reduce(x.clone())
                torch.testing.assert_close(summed, GroupParallel.all_reduce(tp, x.clone()))
                halved = tp.all_reduce(x.bfloat16())
                torch.testing.assert_close(halved.float(), summed, rtol=2e-2, atol=2e-2)
                digest.update(summed.numpy().tobytes() + halved.view(torch.int16).numpy().tobytes())
            case 3:
                counts = torch.full((width,), tp.rank + call)
                assert tp.all_reduce(counts).tolist() == [tp.size * call + tp.size * (tp.size - 1) // 2] * width
    return digest.hexdigest()


def back_to_back(tp: CpuParallel) -> bool:
    """A thousand sums without a pause, of sizes on either side of every limit."""
    rng, right = random.Random(5), True
    with torch.inference_mode():
        for _ in range(1000):
            length, base = rng.choice((1, 5, 896, 4001, 9000, 28672, 70000)), rng.randrange(1000)
            x = tp.all_reduce(torch.full((length,), float(base + tp.rank)))
            right &= bool((x == tp.size * base + tp.size * (tp.size - 1) // 2).all())
    return right


def one_sum(tp: CpuParallel) -> list[float]:
    return tp.all_reduce(torch.ones(2)).tolist()


def mapped_segments(tp: CpuParallel) -> list[str]:
    return re.findall(r"quire-collectives.*", Path("/proc/self/maps").read_text())


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """Under the name of its segments. (Other processes have files and folders in shared memory, too.)"""
    before = set(os.listdir("/dev/shm"))
    yield
    assert {name for name in os.listdir("/dev/shm") if "quire-collectives" in name} <= before


needs_compiler = pytest.mark.usefixtures("_compiled")


@pytest.fixture
def _compiled() -> None:
    if not shared.available():
        pytest.skip("the kernels are not compiled")


@needs_compiler
def test_sums_are_gloos_and_the_same_bits_on_every_rank(tmp_path: Path) -> None:
    """Groups of several stages are in tests/integration/engine/core."""
    with ranks(tmp_path, 3) as started:
        assert everywhere(started, shares_memory) == [True] * 3
        assert everywhere(started, mapped_segments) == [["quire-collectives (deleted)"]] * 3  # without a name
        digests = everywhere(started, mixed_calls)
        assert digests == digests[:1] * 3
        assert everywhere(started, back_to_back) == [True] * 3


@needs_compiler
def test_a_rank_without_kernels_has_all_use_gloo(tmp_path: Path) -> None:
    with ranks(tmp_path, 2, unprepared=(1,)) as started:
        assert everywhere(started, shares_memory) == [False, False]
        assert everywhere(started, mapped_segments) == [[], []]
        assert everywhere(started, one_sum) == [[2.0, 2.0]] * 2


@needs_compiler
def test_a_rank_that_is_killed_is_named_by_those_that_wait(tmp_path: Path) -> None:
    with ranks(tmp_path, 3) as started:
        assert everywhere(started, one_sum) == [[3.0, 3.0]] * 3
        everywhere(started, be_impatient)
        killed, _ = started.pop(1)
        for _, pipe in started:
            pipe.send(one_sum)
        killed.kill()
        killed.join()
        for _, pipe in started:
            assert "rank 1 of 3 did not join a collective within 1 s" in str(pipe.recv())
        for process, _ in started:  # to leave the group they would wait for it
            process.kill()
            process.join()


def be_impatient(tp: CpuParallel) -> None:
    assert tp._timeout == 60.0
    tp._timeout = 1.0


def wait_for_one(tp: CpuParallel) -> float:
    tp.begin_step()
    for _ in range(10):
        one_sum(tp)
        if tp.rank == 1:
            time.sleep(0.05)
    one_sum(tp)
    assert tp.waited < tp.spent
    return tp.waited


def wait_where_it_does_not_count(tp: CpuParallel) -> tuple[float, float]:
    """The waiting that counts, and all communication, in seconds."""
    before, spent = tp.waited, tp.spent
    tp.begin_step()
    if tp.rank == 1:
        time.sleep(0.05)
    one_sum(tp)
    if tp.rank == 0:
        time.sleep(0.05)
    tp.broadcast(torch.ones(2))
    return tp.waited - before, tp.spent - spent


@needs_compiler
@pytest.mark.parametrize("unprepared", [(), (2,)])
def test_the_rank_for_which_others_wait_waits_least(unprepared: tuple[int, ...], tmp_path: Path) -> None:
    with ranks(tmp_path, 3, unprepared=unprepared) as started:
        assert everywhere(started, shares_memory) == [not unprepared] * 3
        for _ in range(9):  # a busy machine may have rank 1 wait, too
            waited = everywhere(started, wait_for_one)
            if waited[1] < min(waited[0], waited[2]) / 2:
                break
        else:
            pytest.fail(f"seconds that each has waited: {waited}")
        if not unprepared:  # the last sum may still run when gloo's broadcast begins
            for _ in range(9):
                found = everywhere(started, wait_where_it_does_not_count)
                assert [waited for waited, _ in found] == [0.0] * 3
                spent = [seconds for _, seconds in found]
                if min(spent[0], spent[2]) > 0.03:
                    break
            else:
                pytest.fail(f"waiting is communication there, too; seconds of it: {spent}")


class _SlowTower(Tower):
    """Takes longer than collectives may."""

    def encode(
        self, arrays: Mapping[str, Tensor], item: MediaItem, adapter: kernels.OneAdapter | None = None
    ) -> Iterator[Tensor | None]:
        time.sleep(1.2)
        yield torch.full((item.num_features, 8), 7.0)


def encode_alone(tp: CpuParallel) -> bool:
    limit = timedelta(seconds=0.8)
    tp._timeout = limit.total_seconds()
    dist.distributed_c10d._set_pg_timeout(limit, tp._group)
    spec = TransformersTowerSpec(hidden_size=8, modules=(), num_parameters=1, values_per_feature=1, divides_items=True)
    cache = EncoderCache(_SlowTower(), spec, torch.float32, CPU, tp)
    item = MediaItem(b"\x01", "image", 0, 2, (MediaRun(0, 2),), data=MediaData((), 0))
    assert not cache.update(MediaPlan([item]))
    return bool((cache._features[item.digest] == 7.0).all())


@needs_compiler
@pytest.mark.parametrize("unprepared", [(), (1,)])
def test_a_rank_that_encodes_alone_may_take_longer_than_collectives(
    unprepared: tuple[int, ...], tmp_path: Path
) -> None:
    with ranks(tmp_path, 2, unprepared=unprepared) as started:
        assert everywhere(started, shares_memory) == [not unprepared] * 2
        assert everywhere(started, encode_alone) == [True] * 2


def record(tp: CpuParallel) -> bool:
    x = torch.zeros(2)
    with torch.inference_mode(), op_replay.OpReplay() as ops:
        x.copy_(tp.all_reduce(torch.ones_like(x)))
    tp.replay = ops.replay  # type: ignore[attr-defined]
    return tp.is_ahead


def replay_aside(tp: CpuParallel) -> tuple[bool, bool]:
    """Replay in a thread; returns when it waits for the others."""
    thread = tp.thread = threading.Thread(target=tp.replay)  # type: ignore[attr-defined]
    thread.start()
    while not tp.is_ahead:
        thread.join(0.01)
        assert thread.is_alive(), "it did not wait"
    assert thread.ident is not None
    return tp.is_ahead, is_in_collective(sys._current_frames()[thread.ident])


def is_ahead(tp: CpuParallel) -> bool:
    return tp.is_ahead


def replay(tp: CpuParallel) -> bool:
    tp.replay()  # type: ignore[attr-defined]
    return tp.is_ahead


def join(tp: CpuParallel) -> bool:
    tp.thread.join(60)  # type: ignore[attr-defined]
    return tp.is_ahead


@needs_compiler
def test_ranks_that_wait_in_replayed_operations_are_ahead_of_the_one_that_hangs(tmp_path: Path) -> None:
    with ranks(tmp_path, 3) as started:
        everywhere(started, record)
        late = started[1:2]
        others = [started[0], started[2]]
        assert everywhere(others, replay_aside) == [(True, False)] * 2
        assert everywhere(late, is_ahead) == [False]
        everywhere(late, replay)
        everywhere(others, join)
        assert everywhere(started, is_ahead) == [False] * 3


def test_ranks_of_different_hosts_use_gloo(tmp_path: Path) -> None:
    with ranks(tmp_path, 2) as started:
        assert everywhere(started, settle_elsewhere) == [False, False]
        assert everywhere(started, one_sum) == [[2.0, 2.0]] * 2


def settle_elsewhere(tp: CpuParallel) -> bool:
    from quire.engine.distributed import symmetric_memory

    symmetric_memory.host = lambda: ("another kernel", str(tp.rank))
    tp.finalize()
    return shares_memory(tp)


def test_a_group_is_gloos_until_it_has_settled(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", world_size=1, rank=0)
    try:
        assert dist.group.WORLD is not None
        tp = CpuParallel(dist.group.WORLD, timedelta(seconds=5))
        assert tp.memory is None
        assert one_sum(tp) == [1.0, 1.0]
        tp.finalize()
        assert shares_memory(tp) == shared.available()
        assert one_sum(tp) == [1.0, 1.0]
    finally:
        dist.destroy_process_group()
