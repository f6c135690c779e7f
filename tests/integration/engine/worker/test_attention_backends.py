"""A rank's whole model with other attention backends than the platform's own: transformers' tokens."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.engine.distributed.parallel_state import connect
from quire.engine.layers.attention import attention_config
from quire.engine.protocol.errors import ConfigError
from quire.engine.protocol.sampling_params import SamplingParams
from quire.engine.worker.model_runner import ModelRunner
from quire.engine.worker.worker import Worker
from quire.kernels import backends, reference
from quire.kernels import flashinfer as ours
from quire.kernels.attention_config import AttentionBackend, AttentionConfig
from tests.fakes import flashinfer as fake
from tests.fakes.checkpoints import generate, write_checkpoint
from tests.fakes.model_logits import CPU, configure
from tests.fakes.plans import Driver, Request

COUNT = 12
WINDOWS = {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 0, "num_hidden_layers": 3}


@pytest.fixture(autouse=True)
def _chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """FlashInfer's interface, computed by the reference, so that any type and head size will do."""
    monkeypatch.setitem(sys.modules, "flashinfer", fake)
    monkeypatch.setattr(ours, "TYPES", (torch.float32,))
    monkeypatch.setattr(ours, "HEAD_DIMS", range(1000))
    monkeypatch.setattr(backends, "CHOSEN", {})
    fake.plans.clear()
    yield
    fake.plans.clear()


def decode(execute: Any, blocks: int, prompts: list[list[int]]) -> list[list[int]]:
    requests = [Request(prompt, SamplingParams(temperature=0.0)) for prompt in prompts]
    Driver(execute, 8, blocks, 4).decode(requests, COUNT, 20)
    return [request.output for request in requests]


@pytest.mark.parametrize("settings", [{}, WINDOWS], ids=["whole", "windows"])
def test_a_step_is_planned_once_for_all_its_layers(settings: dict[str, Any], tmp_path: Path) -> None:
    """And one with prompts once more for the last layer, which attends with the requests' last tokens alone."""
    folder = write_checkpoint("qwen3", tmp_path, **settings)
    rng = random.Random(1)
    prompts = [[rng.randrange(130) for _ in range(length)] for length in (1, 5, 16, 33)]
    config = configure(folder, block_size=4, max_num_seqs=8, max_model_len=128, enforce_eager=True)
    runner = ModelRunner(config, 0, connect(config.parallel, 0, None, CPU), CPU)
    backends.CHOSEN["cpu"] = ours.FlashInfer(CPU)
    expected: list[str] = []

    def execute(plan: Any) -> Any:
        expected.extend(["prompts", "decodes"] if plan.num_tokens > plan.num_rows else ["decodes"])
        return runner.launch(plan).result()

    assert decode(execute, config.cache.num_blocks, prompts) == generate(folder, prompts, COUNT)
    assert fake.plans == expected
    assert bool(attention_config(config).layers[0].window) == bool(settings)
    assert "prompts" in fake.plans


def test_the_reference_backend_is_used_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_checkpoint("qwen3", tmp_path)
    config = configure(folder, block_size=4, max_num_seqs=8, max_model_len=128, attention_backend="reference")
    called: list[int] = []
    attend = reference.paged_attention

    def counted(*args: Any, **options: Any) -> Any:
        called.append(len(args))
        return attend(*args, **options)

    monkeypatch.setattr(reference, "paged_attention", counted)
    worker = Worker(config, 0, None)
    prompts = [[1, 2, 3], list(range(9))]
    assert decode(lambda plan: worker.launch(plan).result(), config.cache.num_blocks, prompts) == generate(
        folder, prompts, COUNT
    )
    assert called
    called.clear()
    plain = Worker(configure(folder, block_size=4, max_num_seqs=8, max_model_len=128), 0, None)
    decode(lambda plan: plain.launch(plan).result(), config.cache.num_blocks, prompts)
    assert not called


def test_a_backend_that_fails_ends_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise backends.BackendUnavailable("--attention-backend triton: the kernel does not work")

    monkeypatch.setattr(backends, "choose", refuse)
    config = configure(write_checkpoint("qwen3", tmp_path), max_model_len=128)
    with pytest.raises(ConfigError, match="--attention-backend triton: the kernel does not work"):
        Worker(config, 0, None)


def test_a_gpu_that_cannot_read_the_cache_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the rank, as the host that resolved the options may not have its GPU; the reference accepts the type."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    gpu, dtype = torch.device("cuda", 3), torch.bfloat16

    def choose(cache: torch.dtype, backend: AttentionBackend) -> object:
        needs = AttentionConfig(cache_dtype=cache, backend=backend)
        return backends.choose(gpu, dtype, needs, reference.paged_attention)

    refusal = r"--kv-cache-dtype fp8 needs a GPU of compute capability 8.9 or higher; cuda:3 has 8.6. Use"
    with pytest.raises(backends.BackendUnavailable, match=refusal):
        choose(torch.float8_e4m3fn, "auto")
    assert choose(torch.float8_e4m3fn, "reference") is not None
    assert choose(torch.int8, "auto") is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert choose(torch.float8_e4m3fn, "auto") is None
