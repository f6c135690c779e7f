"""Weights of 16 bits in a float32 model: kept as the checkpoint has them, with the same results to the last bit."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.engine.config.engine_config import EngineConfig
from quire.engine.config.memory_plan import MemoryPlan
from quire.engine.config.plan_text import plan_text
from quire.engine.distributed.communicator import Parallel
from quire.engine.models import packed_cache
from quire.engine.models.loader import load_model
from quire.engine.models.packed_cache import PackedCache
from tests.fakes.checkpoints import write_checkpoint
from tests.fakes.families import write
from tests.fakes.model_logits import CPU, configure, logits
from tests.fakes.quantized_checkpoints import quantize
from tests.fakes.ranks import on_ranks

CASES = [
    *("Llama", "GPT-2", "Gemma 3n", "Qwen3.5 MoE", "Mixtral", "gpt-oss", "Llama 4", "Nemotron-H", "Zamba2"),
    *("DeepSeek V3", "DeepSeek V4", "Hunyuan 4"),
]
TOKENS = torch.randint(0, 131, (70,), generator=torch.Generator().manual_seed(1))
WIDE = {"dtype": "float32"}


def store(folder: Path, dtype: torch.dtype, said: str = "") -> None:
    """Let a checkpoint have all its floats in this type; config.json says another one if `said` is given."""
    file, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    tensors = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, {"format": "pt"})
    config["dtype"] = said or str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config))


def on_all(config: EngineConfig) -> list[torch.Tensor]:
    return on_ranks(config.parallel.tensor_parallel_size, partial(logits, config, TOKENS))


def held_bytes(config: EngineConfig) -> int:
    parallel = Parallel()
    parallel.size = config.parallel.tensor_parallel_size
    tensors: list[torch.Tensor] = []
    packed_cache._to_plain(load_model(config, 0, parallel, CPU), tensors)
    return sum(tensor.nbytes for tensor in tensors)


def saving(narrow: EngineConfig, wide: EngineConfig) -> tuple[float, float]:
    """The memory of narrow weights over that of wide ones, as loaded and as planned."""
    plans = [MemoryPlan.of(each).weights[0] for each in (narrow, wide)]
    return held_bytes(narrow) / held_bytes(wide), plans[0] / plans[1]


@pytest.mark.parametrize("case", CASES)
def test_results_are_those_of_wide_weights_in_less_memory(case: str, tmp_path: Path) -> None:
    write(case, tmp_path)
    store(tmp_path, torch.float16 if case == "Llama" else torch.bfloat16)
    for tp in (1, 2):
        narrow = configure(tmp_path, max_model_len=128, tensor_parallel_size=tp)
        wide = configure(tmp_path, max_model_len=128, tensor_parallel_size=tp, hf_overrides=WIDE)
        for found, expected in zip(on_all(narrow), on_all(wide), strict=True):
            assert found.dtype == torch.float32
            assert torch.equal(found, expected)
        ratio, planned = saving(narrow, wide)
        assert ratio < 0.8
        assert ratio == pytest.approx(planned, rel=0.1)  # tiles are padded


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8", "checkpoint"])
def test_weights_are_quantized_from_the_same_numbers(quantization: str, tmp_path: Path) -> None:
    """Of a quantized checkpoint, the rest is as it is stored."""
    write_checkpoint("qwen2" if quantization == "int8" else "llama", tmp_path)
    store(tmp_path, torch.bfloat16)
    options: dict[str, Any] = {"max_model_len": 128}
    if quantization == "checkpoint":
        quantize(tmp_path, "compressed-tensors, 4 bits")
    else:
        options |= {"quantization": quantization}
    narrow, wide = configure(tmp_path, **options), configure(tmp_path, **options, hf_overrides=WIDE)
    assert torch.equal(on_all(narrow)[0], on_all(wide)[0])
    ratio, planned = saving(narrow, wide)
    assert ratio < 0.95
    assert ratio == pytest.approx(planned, rel=0.05)


def test_tensors_that_are_wider_than_config_json_says_are_not_rounded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write("Llama", tmp_path)
    store(tmp_path, torch.float32, said="bfloat16")
    found = on_all(configure(tmp_path, max_model_len=128))[0]
    assert torch.equal(found, on_all(configure(tmp_path, max_model_len=128, hf_overrides=WIDE))[0])
    (message,) = {record.getMessage() for record in caplog.records}
    assert "config.json says bfloat16, but tensors are float32" in message


def test_the_plan_says_so_and_the_packed_cache_keeps_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_PACKED_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    write("Llama", folder)
    store(folder, torch.bfloat16)
    config = configure(folder, max_model_len=128, packed_cache=1.0)
    assert "float32, bfloat16 weights, widened in registers, on cpu" in plan_text(config)
    first = load_model(config, 0, Parallel(), CPU)
    cache = PackedCache.of(config, 0)
    assert cache is not None
    thread = cache.save(first)
    assert thread is not None
    thread.join()
    expected = on_all(configure(folder, max_model_len=128))[0]
    monkeypatch.setattr("quire.engine.models.loader._fill", None)  # nothing is read from the checkpoint
    assert torch.equal(on_all(config)[0], expected)
