"""Towers that a checkpoint has quantized, or that are quantized while they are loaded, against transformers with the
numbers that they stand for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from quire.engine.config.engine_config import EngineConfig
from quire.engine.config.memory_plan import matrix_bytes, quantized_text
from quire.engine.config.plan_text import plan_text
from quire.engine.distributed.communicator import Parallel
from quire.engine.layers.linear import Linear
from quire.engine.layers.quantized import quantized_formats
from quire.engine.protocol.errors import ConfigError
from quire.kernels import packed_state
from tests.fakes.families import name_as_published, write_model
from tests.fakes.model_logits import configure
from tests.fakes.quantized_checkpoints import FORMATS
from tests.fakes.ranks import on_ranks
from tests.integration.engine.checkpoints.test_quantized import rounded
from tests.integration.engine.models.test_towers import CASES, features_of, item_of, tower_of

_VISION = {"hidden_size": 64, "intermediate_size": 96}
"""On two ranks, columns are not whole groups, and rows of 96 are not whole blocks of 64."""
_GRID = (1, 10, 12)


def write(folder: Path, case: str) -> Any:
    """Write a checkpoint; returns transformers' model."""
    name, settings = CASES[case]
    settings = settings | {"vision_config": settings["vision_config"] | _VISION}
    model = write_model(name, {**settings, "tie_word_embeddings": False}, folder)
    name_as_published(name, folder, model)
    return model


def linears(model: Any) -> dict[str, nn.Linear]:
    """Of the tower, by their paths."""
    modules = model.model.visual.named_modules()
    return {path: module for path, module in modules if isinstance(module, nn.Linear)}


def quantize(folder: Path, model: Any, name: str, more: Mapping[str, Any] = {}) -> None:
    """Store the tower's linear layers in a format, and give `model` the numbers that they stand for."""
    form, tensors, count = FORMATS[name], load_file(folder / "model.safetensors"), 0
    for path, module in linears(model).items():
        (key,) = [each for each in tensors if each.endswith(f"visual.{path}.weight")]
        own, numbers = form.pack(tensors.pop(key).float())
        tensors |= {key.removesuffix(".weight") + suffix: part.contiguous() for suffix, part in own.items()}
        module.weight.data, count = numbers, count + 1
    assert count
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {**form.settings, **more}}))


def on_each_rank(config: EngineConfig, arrays: Any, item: Any) -> list[Tensor]:
    """The features that each rank computes."""

    def work(parallel: Parallel) -> Tensor:
        tower = tower_of(config, parallel)
        with torch.inference_mode():
            features: Tensor = tower(arrays, item)
        return features

    return on_ranks(config.parallel.tensor_parallel_size, work)


def check_bytes(config: EngineConfig) -> None:
    """Check that a tower's packed weights take the bytes that are planned."""
    layers = [each for each in tower_of(config, Parallel()).modules() if isinstance(each, Linear)]
    products = [each._product for each in layers if each.may_be_quantized]
    loaded = sum(each.nbytes for product in products for each in packed_state.tensors_of(product))
    matrices = [*config.model.architecture.tower_matrices(1)]
    planned = sum(matrix_bytes(config.model, "cpu", *each) for each in matrices)
    assert len(products) == len(matrices)
    assert abs(loaded - planned) <= 0.08 * planned  # there is padding


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("Qwen3-VL", "compressed-tensors, zero points"),
        ("Qwen3-VL", "fp8 of blocks"),
        ("Qwen3-VL", "bitsandbytes, nested"),
        ("Qwen2.5-VL", "bitsandbytes, nf4"),
        ("Qwen2.5-VL", "awq"),
        ("Qwen2.5-VL", "gptq, act order"),
    ],
)
def test_a_tower_stays_as_it_is_stored(case: str, name: str, tmp_path: Path) -> None:
    """Also on ranks that have parts of groups."""
    model = write(tmp_path, case)
    quantize(tmp_path, model, name)
    arrays, item = item_of(model, _GRID, "image")
    expected = features_of(model, arrays, "image")
    for tp in (1, 2):
        for found in on_each_rank(configure(tmp_path, max_model_len=64, tensor_parallel_size=tp), arrays, item):
            assert error(found, expected) <= 2e-3
    check_bytes(configure(tmp_path, max_model_len=64))


def test_only_a_tower_may_be_quantized(tmp_path: Path) -> None:
    """In the checkpoint, while the decoder is quantized by the flag, or is not."""
    model = write(tmp_path, "Qwen2.5-VL")
    quantize(tmp_path, model, "bitsandbytes, int8", {"llm_int8_skip_modules": ["model.layers", "lm_head"]})
    arrays, item = item_of(model, _GRID, "image")
    expected = features_of(model, arrays, "image")
    for quantization in (None, "int8"):
        config = configure(tmp_path, max_model_len=64, quantization=quantization)
        (found,) = on_each_rank(config, arrays, item)
        assert error(found, expected) <= 1e-3
        assert {form.values for form in quantized_formats(config)} == {"int8"}, "kernels for it are prepared"
        check_bytes(config)
    text = quantized_text(config)
    assert text == "requantized from bitsandbytes (not the tower: int8 weights, widened in registers)"
    text = quantized_text(configure(tmp_path, max_model_len=64))
    assert "int8 weights, widened in registers (tower's layers, tower's merger)" in text
    assert "float32 weights (attention, feed forward)" in text


def test_inputs_are_rounded_as_the_publisher_does(tmp_path: Path) -> None:
    model = write(tmp_path, "Qwen3-VL")
    quantize(tmp_path, model, "compressed-tensors, int8")
    for module in linears(model).values():
        module.register_forward_pre_hook(rounded)
    arrays, item = item_of(model, _GRID, "image")
    (found,) = on_each_rank(configure(tmp_path, max_model_len=64), arrays, item)
    assert error(found, features_of(model, arrays, "image")) <= 0.01  # a number may be rounded either way


def test_tensors_of_a_tower_that_do_not_fit_are_named(tmp_path: Path) -> None:
    model = write(tmp_path, "Qwen3-VL")
    quantize(tmp_path, model, "fp8 of blocks")
    config = json.loads((tmp_path / "config.json").read_text())
    for name, message in {
        "awq": r"visual\.blocks\.0\.attn\.qkv\.qweight is missing",
        "nvfp4": r"visual\.blocks\.0\.attn\.qkv\.weight has the shape \[192, 64\], expected \[192, 32\]",
    }.items():
        (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": FORMATS[name].settings}))
        with pytest.raises(ConfigError, match=message):
            tower_of(configure(tmp_path, max_model_len=64), Parallel())


@pytest.mark.parametrize("case", ["Qwen3-VL", "Qwen2.5-VL"])
@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_a_tower_is_quantized_while_it_is_loaded(case: str, quantization: str | None, tmp_path: Path) -> None:
    """Whatever the decoder is, with the same features alone and beside another picture."""
    model = write(tmp_path, case)
    options = {"mm_encoder_quantization": "int8", "quantization": quantization}
    for module in linears(model).values():
        scales = module.weight.abs().amax(-1, keepdim=True) / 127
        module.weight.data = (module.weight / scales).round() * scales
        module.register_forward_pre_hook(rounded)
    (arrays, item), (others, other) = item_of(model, _GRID, "image"), item_of(model, (1, 4, 6), "image")
    expected = features_of(model, arrays, "image")
    config = configure(tmp_path, max_model_len=64, **options)
    (found,) = on_each_rank(config, arrays, item)
    assert error(found, expected) <= 0.01
    for each in on_each_rank(configure(tmp_path, max_model_len=64, tensor_parallel_size=2, **options), arrays, item):
        assert error(each, expected) <= 0.03  # a rank's part of a row has a scale of its own
    tower = tower_of(config, Parallel())
    with torch.inference_mode():
        beside = [first for first, _ in zip_longest(tower.encode(arrays, item), tower.encode(others, other))]
    assert beside[-1] is not None
    assert beside[-1].equal(found)
    check_bytes(config)
    assert "tower for images and videos with int8 weights" in plan_text(config)
