"""Ranks that share a GPU: gloo must not see the GPU's memory. The GPU is a fake, gloo is real."""

from __future__ import annotations

import os
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from quire.engine.config.engine_config import ExpertParallelConfig
from quire.engine.distributed.communicator import HostStagedParallel
from quire.engine.distributed.parallel_state import ParallelState, connect
from tests.fakes.late_device import GPU, DeviceTensor, LateDevice
from tests.fakes.processes import CONTEXT
from tests.integration.engine.distributed.test_parallel_state import CPU, grid

FIRST = torch.device("cuda", 0)


class SharedDevice(LateDevice):  # type: ignore[no-untyped-call]
    """Copies wait, like blocking ones; passing a device tensor to an exchange is an error."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            assert "DeviceTensor" not in repr([type(each) for each in tensors(args)]), f"{func} sees the device"
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _copy(self, func: Any, args: Any, kwargs: dict[str, Any], target: torch.device) -> Tensor:
        source = args[0]
        copy: Tensor = (source.held if isinstance(source, DeviceTensor) else source).clone()
        return DeviceTensor(copy) if target.type == GPU.type else copy


def tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    return [each for part in tree for each in tensors(part)] if isinstance(tree, list | tuple) else []


def put(x: Tensor) -> Tensor:
    return DeviceTensor(x)


def held(x: Tensor) -> list[Any]:
    """The numbers of a tensor, which must be on the device."""
    assert isinstance(x, DeviceTensor)
    numbers: list[Any] = x.held.tolist()
    return numbers


def exchanges(links: ParallelState, rank: int) -> dict[str, Any]:
    """The results of each kind of exchange among two stages of two ranks."""
    links.pipeline._device = GPU
    assert links.experts is not None
    with SharedDevice():
        wide = torch.arange(6.0).view(2, 3) + rank
        found: dict[str, Any] = {
            "sum": held(links.tp.all_reduce(put(wide))),
            "sum of a view": held(links.tp.all_reduce(put(wide.t()))),
            "gathered": held(links.tp.all_gather(put(wide.to(torch.bfloat16)))),
            "told": held(links.tp.broadcast(put(torch.tensor([rank])))),
            "rows": held(links.experts.all_ranks.all_to_all(put(wide), [1, 1], [1, 1])),
        }
        if links.pipeline.is_first:
            links.pipeline.send(put(wide))
        else:
            found["hidden"] = held(links.pipeline.receive((2, 3), torch.float32))
    links.pipeline.drain()
    return found


def serve(rank: int, init_method: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    config = replace(grid(2, 2), device="cuda", devices=(0,) * 4, experts=ExpertParallelConfig())
    links = connect(config, rank, init_method, FIRST)
    pipe.send((type(links.tp), dist.get_backend(), exchanges(links, rank)))
    pipe.recv()
    os._exit(0)


def test_exchanges_go_through_the_host(tmp_path: Path) -> None:
    started = []
    for rank in range(4):
        ours, theirs = CONTEXT.Pipe()
        process = CONTEXT.Process(target=serve, args=(rank, f"file://{tmp_path}/rendezvous", theirs))
        process.start()
        started.append((process, ours))
    try:
        reported = [pipe.recv() for _, pipe in started]
        for process, pipe in started:
            pipe.send(None)
            process.join(60)
    finally:
        for process, _ in started:
            process.kill()
            process.join()
    base = torch.arange(6.0).view(2, 3)
    for rank, (kind, backend, found) in enumerate(reported):
        assert (kind, backend) == (HostStagedParallel, "gloo")
        first = rank - rank % 2  # of the stage
        total = 2 * base + 2 * first + 1
        assert found["sum"] == total.tolist()
        assert found["sum of a view"] == total.t().tolist()
        assert found["gathered"] == torch.cat((base + first, base + first + 1), dim=-1).tolist()
        assert found["told"] == [first]
        assert found["rows"] == torch.stack(((base + first)[rank % 2], (base + first + 1)[rank % 2])).tolist()
        assert found.get("hidden") == (None if first == 0 else (base + rank - 2).tolist())


def test_the_fake_device_detects_tensors_passed_to_gloo(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", world_size=1, rank=0)
    try:
        with SharedDevice(), pytest.raises(AssertionError, match="sees the device"):
            dist.all_reduce(put(torch.ones(2)))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("devices", "through"), [((0, 1), FIRST), ((), FIRST), ((0, 0), CPU)])
def test_only_ranks_with_a_gpu_each_use_nccl(
    devices: tuple[int, ...], through: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: asked.append(backend))
    links = connect(replace(grid(1, 2), device="cuda", devices=devices), 0, "file:///rendezvous", FIRST)
    assert asked == ["gloo" if through is CPU else "nccl"]
    assert links.pipeline._transfer_device == through
