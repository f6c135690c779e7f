"""Logits of prompts with pictures against transformers, for every family that takes them: where features go, positions,
and what attends to what."""

from __future__ import annotations

import inspect
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.engine.protocol.media import MediaItem, MediaRun
from tests.fakes.families import SIZES, name_as_published, write_model
from tests.fakes.model_logits import configure, logits
from tests.fakes.ranks import on_ranks
from tests.integration.engine.models import test_image_towers, test_towers

BEGIN, IMAGE, END = 7, 120, 8
"""The tokens before an image, of it and behind it."""
DEFAULT = ("Gemma 4", "Qwen3.5", "Granite Vision")
"""In the default tier."""


def written(name: str, folder: Path) -> tuple[Any, list[dict[str, Tensor]], tuple[tuple[int, int, int], ...]]:
    """The case's model in transformers and in `folder`, two pictures, and the grids of their features, if they have
    any. Models of Cohere have no factor on logits, which transformers 5.24 forgets."""
    ids: dict[str, Any] = {"image_token_id": IMAGE, "image_token_index": IMAGE, "tie_word_embeddings": False}
    if name == "ERNIE 4.5 VL":
        ids |= {"image_start_token_id": BEGIN, "image_end_token_id": END}
    if name in test_towers.CASES:
        architecture, settings = test_towers.CASES[name]
        model = write_model(architecture, {**settings, **ids}, folder)
        name_as_published(architecture, folder, model)
        grids = ((1, 8, 6), (1, 2, 4))
        arrays = [test_towers.item_of(model, grid, "image")[0] for grid in grids]
        return model, arrays, tuple((1, rows // 2, columns // 2) for _, rows, columns in grids)
    case = test_image_towers.CASES[name]
    windows = {"sliding_window": 40, "layer_types": ["sliding_attention", "full_attention"]}
    text = SIZES | {"num_hidden_layers": 2, "model_type": case.text}
    text |= windows if case.text in ("gemma2", "gemma3_text", "gemma4_text") else {"logit_scale": 1.0}
    text |= test_image_towers._TEXT.get(case.text, {})
    if case.text == "gemma4_text":
        text |= {"use_bidirectional_attention": "vision", "hidden_size_per_layer_input": 8}
        text |= {"vocab_size_per_layer_input": 131}
    if case.text == "deepseek_ocr2_text":
        text |= {"mlp_layer_types": ["dense", "sparse"]}
    settings = {"text_config": text, "vision_config": case.vision, **case.settings, **ids}
    model = write_model(f"{case.architecture}ForConditionalGeneration", settings, folder)
    name_as_published(f"{case.architecture}ForConditionalGeneration", folder, model)
    if case.architecture == "Llama4":  # `write_model` returns its text part
        from transformers import Llama4ForConditionalGeneration

        model = Llama4ForConditionalGeneration.from_pretrained(folder)
    _, picture, *_ = case.images(model.config)
    grid = (0, 0, 0)
    if "image_grid_thw" in picture:
        ((frames, rows, columns),) = picture["image_grid_thw"].tolist()
        merge = case.vision.get("spatial_merge_size", 2)
        grid = (frames, rows // merge, columns // merge)
    return model, [picture] * 2, (grid, grid)


def cases() -> list[Any]:
    names = [*test_towers.CASES, *test_image_towers.CASES]
    return [pytest.param(name, marks=[] if name in DEFAULT else [pytest.mark.slow]) for name in names]


@pytest.mark.parametrize("name", cases())
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Of one rank, of two stages of two ranks, with spread experts, and with a quantized decoder."""
    model, pictures, grids = written(name, tmp_path)
    tokens, items = [5, 6, BEGIN], []
    for number, (arrays, grid) in enumerate(zip(pictures, grids, strict=True)):
        count = len(test_image_towers.features_of(model, arrays)) if not grid[0] else grid[1] * grid[2]
        runs: tuple[MediaRun, ...] = (MediaRun(0, count, grid),)
        if name == "Hunyuan VL":  # a feature behind each row, one before all and one behind
            count = grid[1] * (grid[2] + 1) + 2
            middle = MediaRun(1, count - 2, (1, grid[1], grid[2] + 1))
            runs = (MediaRun(0, 1, (1, 1, 1)), middle, MediaRun(count - 1, 1, (1, 1, 1)))
        items.append(MediaItem(bytes([number] * 16), "image", len(tokens), count, runs))
        tokens += [IMAGE] * count + [END, 9]
    with torch.inference_mode():
        inputs: dict[str, Tensor] = {"input_ids": torch.tensor([tokens])}
        types = (inputs["input_ids"] == IMAGE).int()
        if name.startswith("PaliGemma"):
            types = torch.zeros_like(types)  # the prompt
        taken = inspect.signature(model.forward).parameters
        inputs |= {kind: types for kind in ("token_type_ids", "mm_token_type_ids") if kind in taken}
        if "moe_mm_token_type_ids" in taken:
            inputs["moe_mm_token_type_ids"] = torch.isin(inputs["input_ids"], torch.tensor([BEGIN, IMAGE, END])).int()
        if hasattr(model, "vision_model"):  # Llama 4's parts, which transformers 5.24 cannot run as a whole
            embedded = model.get_input_embeddings()(inputs["input_ids"])
            features = torch.cat([test_image_towers.features_of(model, each) for each in pictures])
            embedded[types.bool()] = features
            expected = model.language_model(inputs_embeds=embedded).logits[0]
        else:
            together = {key: torch.cat([each[key] for each in pictures]) for key in pictures[0]}
            expected = model(**inputs, attention_mask=torch.ones_like(types), **together).logits[0]
    media = list(zip(pictures, items, strict=True))
    layouts: list[dict[str, Any]] = [{}, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}]
    if name == "ERNIE 4.5 VL":
        layouts.append({"tensor_parallel_size": 2, "enable_expert_parallel": True})
    if name == "Qwen3-VL":
        layouts.append({"quantization": "int8"})
    for layout in layouts:
        config = configure(tmp_path, max_model_len=max(256, len(tokens)), **layout)
        work = partial(logits, config, torch.tensor(tokens), media=media)
        for found in on_ranks(config.parallel.tensor_parallel_size, work):
            tolerance = 0.05 if "quantization" in layout else 1e-4
            assert (found - expected).norm() <= tolerance * expected.norm(), layout
