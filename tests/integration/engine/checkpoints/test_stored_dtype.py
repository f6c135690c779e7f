"""Weights of 16 bits in a float32 model: kept as the checkpoint has them, with the same results to the last bit."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.engine.checkpoints import packed_cache
from quire.engine.checkpoints.packed_cache import PackedCache
from quire.engine.config.engine_config import EngineConfig
from quire.engine.config.memory_plan import MemoryPlan
from quire.engine.config.plan_text import plan_text
from quire.engine.distributed.communicator import Parallel
from quire.engine.models.build import load_model
from quire.kernels import dispatch
from tests.fakes.checkpoints import write_checkpoint
from tests.fakes.families import write
from tests.fakes.model_logits import CPU, configure, logits
from tests.fakes.quantized_checkpoints import quantize
from tests.fakes.ranks import on_ranks

CASES = [
    *("Llama", "GPT-2", "Gemma 3n", "Qwen3.5 MoE", "Mixtral", "gpt-oss", "Llama 4", "Nemotron-H", "Zamba2"),
    *("DeepSeek V3", "DeepSeek V4", "Hunyuan 4", "Qwen4-Exp"),
]
TOKENS = torch.randint(0, 131, (70,), generator=torch.Generator().manual_seed(1))


def store(folder: Path, dtype: torch.dtype, said: str = "", **others: torch.dtype) -> None:
    """Store all floats of a checkpoint in this type, except those whose names end in one of `others`; config.json names
    another type if `said` is given."""
    file, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            own = [kind for end, kind in others.items() if name.endswith(f"{end}.weight")]
            tensors[name] = tensor.to(own[0] if own else dtype)
    save_file(tensors, file, {"format": "pt"})
    config["dtype"] = said or str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config))


def wide_copy(folder: Path) -> Path:
    """The same numbers in float32."""
    copy = folder.parent / f"{folder.name} wide"
    shutil.copytree(folder, copy)
    store(copy, torch.float32)
    return copy


def on_all(config: EngineConfig) -> list[torch.Tensor]:
    return on_ranks(config.parallel.tensor_parallel_size, partial(logits, config, TOKENS))


def held_bytes(config: EngineConfig) -> int:
    parallel = Parallel()
    parallel.size = config.parallel.tensor_parallel_size
    tensors: list[torch.Tensor] = []
    packed_cache._to_plain(load_model(config, 0, parallel, CPU), tensors)
    return sum(tensor.nbytes for tensor in tensors)


def saving(narrow: EngineConfig, wide: EngineConfig) -> tuple[float, float]:
    """The ratio of the memory of narrow weights to the memory of wide ones, as loaded and as planned."""
    plans = [MemoryPlan.of(each).weights[0] for each in (narrow, wide)]
    return held_bytes(narrow) / held_bytes(wide), plans[0] / plans[1]


@pytest.mark.parametrize("case", CASES)
def test_results_are_those_of_wide_weights_in_less_memory(case: str, tmp_path: Path) -> None:
    write(case, tmp_path)
    store(tmp_path, torch.float16 if case == "Llama" else torch.bfloat16)
    copy = wide_copy(tmp_path)
    for tp in (1, 2):
        narrow, wide = (configure(each, max_model_len=128, tensor_parallel_size=tp) for each in (tmp_path, copy))
        for found, expected in zip(on_all(narrow), on_all(wide), strict=True):
            assert found.dtype == torch.float32
            assert torch.equal(found, expected)
        ratio, planned = saving(narrow, wide)
        assert ratio < 0.8
        assert ratio == pytest.approx(planned, rel=0.15)  # tiles are padded


@pytest.mark.parametrize("quantization", ["int8", "int4", "checkpoint"])
def test_weights_are_quantized_from_the_same_numbers(quantization: str, tmp_path: Path) -> None:
    """Of a quantized checkpoint, the rest is as it is stored."""
    write_checkpoint("qwen2" if quantization == "int8" else "llama", tmp_path)
    store(tmp_path, torch.bfloat16)
    options: dict[str, Any] = {"max_model_len": 128}
    if quantization == "checkpoint":
        quantize(tmp_path, "compressed-tensors, 4 bits")
    else:
        options |= {"quantization": quantization}
    narrow, wide = configure(tmp_path, **options), configure(wide_copy(tmp_path), **options)
    assert torch.equal(on_all(narrow)[0], on_all(wide)[0])
    ratio, planned = saving(narrow, wide)
    assert ratio < 0.95
    assert ratio == pytest.approx(planned, rel=0.05)


def test_tensors_tell_their_types_whatever_config_json_says(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write("Llama", tmp_path)
    store(tmp_path, torch.float16, said="bfloat16")
    narrow, wide = configure(tmp_path, max_model_len=128), configure(wide_copy(tmp_path), max_model_len=128)
    assert (narrow.model.stored_dtype, wide.model.stored_dtype) == ("float16", None)
    assert torch.equal(on_all(narrow)[0], on_all(wide)[0])
    store(tmp_path, torch.float32, said="bfloat16")
    assert configure(tmp_path, max_model_len=128).model.stored_dtype is None
    assert not caplog.records


def test_parts_of_other_types_stay_wide(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Queries, keys and values are one matrix."""
    write("Llama", tmp_path)
    store(tmp_path, torch.bfloat16, q_proj=torch.float16, down_proj=torch.float32)
    found = on_all(configure(tmp_path, max_model_len=128))[0]
    assert torch.equal(found, on_all(configure(wide_copy(tmp_path), max_model_len=128))[0])
    (message,) = {record.getMessage() for record in caplog.records}
    assert "of weights planned in bfloat16, some are float32, which takes more memory (16): model.layers.0." in message


def test_without_compiled_kernels_weights_are_wide(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("Mixtral", tmp_path)
    store(tmp_path, torch.bfloat16)
    config = configure(tmp_path, max_model_len=128)
    expected = on_all(config)[0]
    monkeypatch.setattr(dispatch, "PLATFORMS", {})
    found = on_all(config)[0]
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert "install a C++ compiler, or use --dtype bfloat16" in caplog.text


@pytest.mark.parametrize("case", ["Gemma 3", "Qwen3.5"])
def test_a_tied_head_of_another_stage(case: str, tmp_path: Path) -> None:
    write(case, tmp_path)
    store(tmp_path, torch.bfloat16)
    narrow, wide = (
        configure(each, max_model_len=128, pipeline_parallel_size=2) for each in (tmp_path, wide_copy(tmp_path))
    )
    assert narrow.model.architecture.tie_embeddings
    assert torch.equal(on_all(narrow)[0], on_all(wide)[0])


def test_dummy_weights_are_as_config_json_says(tmp_path: Path) -> None:
    write("Llama", tmp_path)
    store(tmp_path, torch.bfloat16)
    narrow = configure(tmp_path, max_model_len=128, load_format="dummy")
    ratio, planned = saving(narrow, configure(wide_copy(tmp_path), max_model_len=128, load_format="dummy"))
    assert ratio == pytest.approx(planned, rel=0.1)
    assert on_all(narrow)[0].isfinite().all()


def test_the_plan_says_so_and_the_packed_cache_keeps_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_PACKED_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    write("Llama", folder)
    store(folder, torch.bfloat16)
    config = configure(folder, max_model_len=128, packed_cache=1.0)
    assert "float32 with bfloat16 weights on cpu" in plan_text(config)
    first = load_model(config, 0, Parallel(), CPU)
    cache = PackedCache.of(config, 0)
    assert cache is not None
    thread = cache.save(first)
    assert thread is not None
    thread.join()
    expected = on_all(configure(folder, max_model_len=128))[0]
    monkeypatch.setattr("quire.engine.checkpoints.loader._fill", None)  # nothing is read from the checkpoint
    assert torch.equal(on_all(config)[0], expected)
