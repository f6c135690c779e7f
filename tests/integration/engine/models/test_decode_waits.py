"""A decode step of every family is one that a CUDA graph can keep: nothing in it waits for the device."""

from __future__ import annotations

import importlib
import json
import pkgutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from quire.engine.distributed.communicator import Parallel
from quire.engine.distributed.expert_group import ExpertCommunicator, ExpertGroup
from quire.engine.models.build import load
from quire.engine.models.decoder import Decoder
from quire.engine.worker import cuda_graphs
from quire.engine.worker.kv_caches import allocate_caches
from quire.kernels import dispatch
from tests.fakes.families import CASES, SIZES
from tests.fakes.model_logits import CPU, configure
from tests.fakes.recorder import NoWaiting

pytest.importorskip("triton", reason="scripts/setup ci installs it")
triton = importlib.import_module("quire.kernels.triton")

ROWS = 5


class _Launch:
    """A kernel that does nothing with any arguments."""

    def __getitem__(self, grid: tuple[int, ...]) -> _Launch:
        assert all(isinstance(size, int) for size in grid)
        return self

    def __call__(self, *args: Any, **options: Any) -> None:
        pass


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Triton module without its kernels, so that results are the previous contents of memory."""
    for found in pkgutil.iter_modules(triton.__path__):
        module = importlib.import_module(f"{triton.__name__}.{found.name}")
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, _Launch())
    monkeypatch.setattr(dispatch, "PLATFORMS", {"cpu": triton})


def decode(folder: Path, case: str, **options: Any) -> None:
    """The step that is captured, and the logits of its rows."""
    architecture, changes = CASES[case]
    kind = getattr(transformers, architecture).config_class
    values = kind(**(SIZES | changes)).to_dict() | {"architectures": [architecture]}
    (folder / "config.json").write_text(json.dumps(values, default=str))
    config = configure(folder, load_format="dummy", max_num_seqs=8, max_model_len=64, **options)
    config = replace(config, graphs=replace(config.graphs, sizes=(ROWS,)))
    spread = config.parallel.experts
    group = None if spread is None else ExpertGroup(spread, Parallel(), ExpertCommunicator(), ExpertCommunicator())
    model = load(config, 0, Parallel(), CPU, experts=group, pack=False)  # as they are on CUDA
    assert isinstance(model, Decoder)
    caches = allocate_caches(config, 0, CPU)
    batch = cuda_graphs._Inputs(config, CPU, receives=False).batch(ROWS)
    with torch.inference_mode(), NoWaiting():
        hidden = model(None, batch, caches)
        logits = model.logits(hidden)
    assert logits.shape == (ROWS, SIZES["vocab_size"])


@pytest.mark.parametrize("case", CASES)
def test_no_family_waits_for_the_device(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if case.startswith("Gemma 4"):  # scales of experts are looked up by ids, which must be valid
        monkeypatch.delattr(triton, "route", raising=False)
    decode(tmp_path, case)


@pytest.mark.parametrize("case", ["Mixtral", "DeepSeek V3"])
def test_counting_the_load_of_experts_does_not_wait(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(triton, "route", raising=False)  # a kernel that does nothing would choose no experts
    decode(tmp_path, case, enable_expert_parallel=True, enable_eplb=True)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x.unique(),
        lambda x: float(x[0]),
        lambda x: bool((x > 0).any()),
        lambda x: int(x[0].item()),
        lambda x: x.tolist(),
        lambda x: x.cpu().numpy(),
        lambda x: x * x.new_tensor(2.0),
        lambda x: x + torch.tensor([1.0]),
        lambda x: x.repeat_interleave(torch.ones_like(x, dtype=torch.int64)),
        lambda x: x.masked_select(x > 0),
        lambda x: x.equal(x),
        lambda x: x.index_put_((x > 0,), x[0]),
        lambda x: torch.zeros(4)[x.bool()],
    ],
)
def test_what_waits_is_found(wrong: Any) -> None:
    x = torch.randn(4)
    wrong(x)
    with pytest.raises(AssertionError, match=r"waits|counted|copied"), NoWaiting():
        wrong(x)
