"""Towers of Qwen's families against transformers: the features of pictures and videos of many sizes."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from quire.engine.architecture import media_spec
from quire.engine.architecture.families import from_hf_config, of_text
from quire.engine.config.engine_config import EngineConfig
from quire.engine.distributed.communicator import Parallel
from quire.engine.layers.linear import Linear
from quire.engine.layers.rotary import Rotary
from quire.engine.models.build import load_model
from quire.engine.models.decoder import Decoder
from quire.engine.protocol.media import MediaItem, MediaRun
from tests.fakes.families import CASES as ALL
from tests.fakes.families import SIZES, name_as_published, write_model
from tests.fakes.late_device import encode
from tests.fakes.model_logits import CPU, configure
from tests.fakes.ranks import on_ranks

_AXES = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2]}}
_TEXT = SIZES | _AXES
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LINEAR = {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2, "head_dim": 48}
_LINEAR |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
_LINEAR |= {"linear_value_head_dim": 8}
_PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_VISION = {"depth": 3, "hidden_size": 32, "intermediate_size": 40, "num_heads": 2, "out_hidden_size": 48}
_POSITIONS = {"num_position_embeddings": 25}
_CLIP = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen2-VL": (
        "Qwen2VLForConditionalGeneration",
        {"text_config": _TEXT, "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 48, "num_heads": 2}},
    ),
    "Qwen2.5-VL": (
        "Qwen2_5_VLForConditionalGeneration",
        {"text_config": _TEXT, "vision_config": _VISION | {"fullatt_block_indexes": [1], "window_size": 112}},
    ),
    "Qwen3-VL": (
        "Qwen3VLForConditionalGeneration",
        {
            "text_config": _TEXT | {"head_dim": 12},
            "vision_config": _VISION | _POSITIONS | {"deepstack_visual_indexes": [0, 2]},
        },
    ),
    "Qwen3-VL MoE": (
        "Qwen3VLMoeForConditionalGeneration",
        {
            "text_config": _TEXT | _EXPERTS | {"head_dim": 12},
            "vision_config": _VISION | _POSITIONS | {"deepstack_visual_indexes": [1]},
        },
    ),
    "Qwen3.5": (
        "Qwen3_5ForConditionalGeneration",
        {"text_config": SIZES | _LINEAR, "vision_config": _VISION | _POSITIONS | {"num_heads": 3, "hidden_size": 24}},
    ),
    "Qwen3.5 MoE": (
        "Qwen3_5MoeForConditionalGeneration",
        {
            "text_config": SIZES | _LINEAR | _EXPERTS | {"shared_expert_intermediate_size": 24},
            "vision_config": _VISION | _POSITIONS,
        },
    ),
    "GLM-4.1V": (
        "Glm4vForConditionalGeneration",
        {
            "text_config": SIZES | {"rope_parameters": _PARTIAL | {"mrope_section": [1, 1, 1]}},
            "vision_config": _VISION | {"image_size": 70, "patch_size": 14},
        },
    ),
    "GLM-4.5V": (
        "Glm4vMoeForConditionalGeneration",
        {
            "text_config": SIZES
            | _EXPERTS
            | {"n_routed_experts": 6, "head_dim": 16, "attention_bias": True}
            | {"rope_parameters": _PARTIAL | {"mrope_section": [1, 1, 2]}},
            "vision_config": _VISION | {"image_size": 84, "patch_size": 14, "attention_bias": True},
        },
    ),
    "GLM-4.6V": ALL["GLM-4.6V by its own name, experts"],
    "GLM-OCR": ALL["GLM-OCR"],
    "ERNIE 4.5 VL": ALL["ERNIE 4.5 VL"],
    "GLM-5.3": ALL["GLM-5.3, decays without a bound"],
    "MiniMax-M3": (
        "MiniMaxM3SparseForConditionalGeneration",
        ALL["MiniMax-M3 with a vision part"][1] | {"vision_config": _CLIP},
    ),
}
GRIDS = [(1, 2, 2), (1, 4, 4), (1, 2, 14), (1, 18, 4), (1, 10, 12), (1, 8, 8), (1, 26, 22), (1, 6, 2)]
CLIPS = [(2, 4, 6), (3, 10, 18), (5, 2, 2)]


@pytest.fixture(scope="module", params=CASES)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder with a model, and transformers' model."""
    folder = tmp_path_factory.mktemp("model")
    return folder, write(request.param, folder)


def write(case: str, folder: Path) -> Any:
    name, settings = CASES[case]
    model = write_model(name, {**settings, "tie_word_embeddings": False}, folder)
    name_as_published(name, folder, model)
    return model


def item_of(model: Any, grid: tuple[int, int, int], kind: str) -> tuple[dict[str, Tensor], MediaItem]:
    vision = model.config.vision_config
    frames, rows, columns = grid
    pixels = 3 * getattr(vision, "temporal_patch_size", 1) * vision.patch_size**2
    generator = torch.Generator().manual_seed(sum(grid))
    merge = vision.spatial_merge_size
    run = MediaRun(0, frames * rows * columns // merge**2, (frames, rows // merge, columns // merge))
    if kind == "video":  # ERNIE 4.5 VL merges frames behind the layers
        frames *= getattr(vision, "temporal_merge_size", 1)
        grid = (frames, rows, columns)
    names = ("pixel_values", "image_grid_thw") if kind == "image" else ("pixel_values_videos", "video_grid_thw")
    arrays = (torch.randn(frames * rows * columns, pixels, generator=generator), torch.tensor([grid]))
    item = MediaItem(b"", "image" if kind == "image" else "video", 0, run.length, (run,))
    return dict(zip(names, arrays, strict=True)), item


def features_of(model: Any, arrays: Mapping[str, Tensor], kind: str) -> Tensor:
    """transformers' features, with those of the levels side by side."""
    with torch.inference_mode():
        found = getattr(model.model, f"get_{kind}_features")(*arrays.values())
    (features,) = found.pooler_output
    levels = [own for (own,) in getattr(found, "deepstack_features", None) or ()]
    return torch.cat((features, *levels), dim=-1)


def tower_of(config: EngineConfig, parallel: Parallel, **options: Any) -> Any:
    decoder = load_model(config, parallel.rank, parallel, CPU, **options)
    assert isinstance(decoder, Decoder)
    assert decoder.tower is not None
    return decoder.tower


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that pictures have several."""
    monkeypatch.setattr(media_spec, "_SLICE_ROWS", {"cpu": 24})
    monkeypatch.setattr(media_spec, "_SLICE_KEYS", {"cpu": 40})
    monkeypatch.setattr(media_spec, "_MIN_QUERIES", 7)


def check_close(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_features_are_those_of_transformers(written: tuple[Path, Any], caplog: pytest.LogCaptureFixture) -> None:
    """And all tensors of the checkpoint are used, and no layer computes more than a slice at once."""
    folder, model = written
    with caplog.at_level(logging.WARNING):
        tower = tower_of(configure(folder, max_model_len=64), Parallel())
    assert "does not use" not in caplog.text
    linears, calls = [each for each in tower.modules() if isinstance(each, Linear)], Counter[torch.nn.Module]()
    for each in linears:
        each.register_forward_pre_hook(lambda module, _: calls.update([module]))
    kinds = [("image", grid) for grid in GRIDS] + [("video", grid) for grid in CLIPS]
    for kind, grid in kinds:
        arrays, item = item_of(model, grid, kind)
        calls.clear()
        with torch.inference_mode():
            *paused, found = tower.encode(arrays, item)
        assert len(paused) == tower._spec.num_steps(item, "cpu")
        assert min(calls[each] for each in linears) >= tower._spec.num_slices(item, "cpu")
        assert len(found) == item.num_features
        check_close(found, features_of(model, arrays, kind))


def test_a_tower_never_waits_for_its_device(written: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, model = written
    tower = tower_of(configure(folder, max_model_len=64), Parallel(), pack=False)
    arrays, item = item_of(model, (2, 10, 12), "video")
    check_close(encode(tower, arrays, item, monkeypatch), features_of(model, arrays, "video"))


@pytest.mark.parametrize("written", ["Qwen2.5-VL"], indirect=True)
def test_patches_must_fill_their_grid(written: tuple[Path, Any]) -> None:
    folder, model = written
    arrays, item = item_of(model, (1, 4, 4), "image")
    arrays["image_grid_thw"] = torch.tensor([[1, 4, 2]])
    with pytest.raises(ValueError, match="there are 16 patches for a grid of 1 x 4 x 2"):
        tower_of(configure(folder), Parallel())(arrays, item)


def test_ranks_divide_a_tower(written: tuple[Path, Any]) -> None:
    """Also one whose heads they cannot divide."""
    folder, model = written
    config = configure(folder, max_model_len=64, tensor_parallel_size=2)
    arrays, item = item_of(model, (2, 10, 12), "video")

    def work(parallel: Parallel) -> tuple[Tensor, int]:
        tower = tower_of(config, parallel, pack=False)
        return tower(arrays, item), sum(weight.numel() for weight in tower.parameters())

    planned = [each for each in config.model.architecture.parameters_before() if each.module.startswith("tower.")]
    for features, count in on_ranks(2, work):
        check_close(features, features_of(model, arrays, "video"))
        assert count == sum(each.elements(2) for each in planned) < sum(each.elements(1) for each in planned)


@pytest.mark.parametrize("written", ["Qwen2.5-VL"], indirect=True)
def test_ranks_that_divide_items_have_whole_towers(written: tuple[Path, Any]) -> None:
    """And none waits for another."""
    folder, model = written
    config = configure(folder, max_model_len=64, tensor_parallel_size=2, mm_encoder_tp_mode="data")
    planned = [each for each in config.model.architecture.parameters_before() if each.module.startswith("tower.")]
    (_, (tower, count)) = on_ranks(
        2,
        lambda parallel: (
            own := tower_of(config, parallel, pack=False),
            sum(each.numel() for each in own.parameters()),
        ),
    )
    arrays, item = item_of(model, (2, 10, 12), "video")
    with torch.inference_mode():
        check_close(tower(arrays, item), features_of(model, arrays, "video"))
    assert count == sum(each.elements(2) for each in planned) == sum(each.elements(1) for each in planned)


@pytest.mark.parametrize("written", ["Qwen2.5-VL"], indirect=True)
def test_quantizing_leaves_a_tower_as_it_is(written: tuple[Path, Any]) -> None:
    folder, model = written
    arrays, item = item_of(model, (1, 10, 12), "image")
    for quantization in ("int8", "fp8"):
        tower = tower_of(configure(folder, max_model_len=64, quantization=quantization), Parallel())
        with torch.inference_mode():
            check_close(tower(arrays, item), features_of(model, arrays, "image"))


def test_a_model_for_text_alone_ignores_the_tower(written: tuple[Path, Any], caplog: pytest.LogCaptureFixture) -> None:
    folder, _ = written
    config = configure(folder, max_model_len=64)
    arch = from_hf_config(of_text(json.loads((folder / "config.json").read_text())), media=False)
    arch = replace(arch, separate_experts=config.model.architecture.separate_experts)
    assert arch.media is None
    ropes = [layer.attention.rope for layer in arch.layers if layer.attention is not None]
    assert not any(rope is not None and rope.sections for rope in ropes)
    with caplog.at_level(logging.WARNING):
        decoder = load_model(replace(config, model=replace(config.model, architecture=arch)), 0, Parallel(), CPU)
    assert isinstance(decoder, Decoder)
    assert decoder.tower is None
    assert "does not use" not in caplog.text


@pytest.mark.parametrize(
    ("case", "sections"), [("Qwen2-VL", (1, 2, 3)), ("Qwen3-VL", (2, 1, 3)), ("Qwen3.5", (3, 2, 1))]
)
def test_tokens_turn_along_three_axes(case: str, sections: tuple[int, ...]) -> None:
    name, settings = CASES[case]
    text = settings["text_config"] | {"head_dim": 12, "partial_rotary_factor": 1.0}
    turns = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [*sections], "partial_rotary_factor": 1.0}
    text |= {"rope_parameters": turns}
    config = {**settings, "text_config": text, "architectures": [name]}
    arch = from_hf_config(of_text(config))
    (rope,) = {layer.attention.rope for layer in arch.layers if layer.attention is not None}
    model = getattr(transformers, name)
    with torch.device("meta"):
        theirs = model(model.config_class(**config)).model.language_model.rotary_emb
    rotary = type(theirs)(theirs.config)
    positions = torch.randint(0, 5000, (3, 40), generator=torch.Generator().manual_seed(1))
    for own in (positions, positions[0]):
        cos, sin = rotary(torch.empty(0), own.view(-1, 1, 40).expand(3, 1, 40))
        expected = torch.cat((cos[0, :, :6], sin[0, :, :6]), dim=-1)
        torch.testing.assert_close(Rotary(rope, 5000)(own), expected)


def test_dummy_weights_are_those_of_one_rank_on_two(written: tuple[Path, Any]) -> None:
    folder, model = written
    arrays, item = item_of(model, (1, 4, 4), "image")

    def work(config: EngineConfig, parallel: Parallel) -> Tensor:
        features: Tensor = tower_of(config, parallel)(arrays, item)
        return features

    results = []
    for tp in (1, 2):
        config = configure(folder, max_model_len=64, load_format="dummy", tensor_parallel_size=tp)
        results += on_ranks(tp, partial(work, config))
    for result in results:
        check_close(result, results[0])
