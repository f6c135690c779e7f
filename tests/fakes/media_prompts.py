"""Prompts with pictures and videos for tiny random models of Qwen's and Gemma's families, and transformers' answers."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from msgspec import structs
from torch import Tensor

from quire.engine.protocol.media import MediaArray, MediaData, MediaItem, MediaRun
from tests.fakes.families import CASES, SIZES, name_as_published, write_model

IMAGE, VIDEO = 120, 121
"""Token ids."""
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_TEXT = SIZES | {"rope_parameters": _ROPE | {"mrope_section": [2, 2, 2]}}
_VISION = {"depth": 3, "hidden_size": 32, "intermediate_size": 40, "num_heads": 2, "out_hidden_size": 48}
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen2-VL": (
        "Qwen2VLForConditionalGeneration",
        {"text_config": _TEXT, "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 48, "num_heads": 2}},
    ),
    "Qwen2.5-VL": (
        "Qwen2_5_VLForConditionalGeneration",
        {
            "text_config": _TEXT,
            "vision_config": _VISION | {"fullatt_block_indexes": [1], "window_size": 112, "tokens_per_second": 2},
        },
    ),
    "Qwen3-VL": (
        "Qwen3VLForConditionalGeneration",
        {
            "text_config": _TEXT | {"head_dim": 12},
            "vision_config": _VISION | {"num_position_embeddings": 25, "deepstack_visual_indexes": [0, 2]},
        },
    ),
    "Qwen3-VL MoE": (
        "Qwen3VLMoeForConditionalGeneration",
        {
            "text_config": _TEXT
            | {"head_dim": 12, "moe_intermediate_size": 20, "num_experts": 8, "num_experts_per_tok": 2},
            "vision_config": _VISION | {"num_position_embeddings": 25, "deepstack_visual_indexes": [0, 2]},
        },
    ),
    "Qwen3.5": (
        "Qwen3_5ForConditionalGeneration",
        {
            "text_config": SIZES
            | {"layer_types": ["linear_attention", "full_attention"] * 2, "head_dim": 24, "linear_key_head_dim": 8}
            | {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_value_head_dim": 8}
            | {"rope_parameters": _ROPE | {"mrope_section": [2, 2, 2], "partial_rotary_factor": 0.5}},
            "vision_config": _VISION | {"num_position_embeddings": 25},
        },
    ),
    "GLM-4.1V": (
        "Glm4vForConditionalGeneration",
        {
            "text_config": SIZES
            | {"rope_parameters": _ROPE | {"mrope_section": [1, 1, 1], "partial_rotary_factor": 0.5}},
            "vision_config": _VISION | {"image_size": 84, "patch_size": 14},
        },
    ),
    "ERNIE 4.5 VL": CASES["ERNIE 4.5 VL"],
    "Gemma 3": (
        "Gemma3ForConditionalGeneration",
        {
            "text_config": SIZES
            | {"head_dim": 12, "query_pre_attn_scalar": 20, "sliding_window": 8, "sliding_window_pattern": 2},
            "vision_config": {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1}
            | {"num_attention_heads": 2, "image_size": 28, "patch_size": 7, "model_type": "siglip_vision_model"},
            "mm_tokens_per_image": 16,
        },
    ),
    "PaliGemma 2": (
        "PaliGemmaForConditionalGeneration",
        {
            "text_config": SIZES | {"head_dim": 12, "query_pre_attn_scalar": 20, "model_type": "gemma2"},
            "vision_config": {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1}
            | {"num_attention_heads": 2, "image_size": 28, "patch_size": 7, "model_type": "siglip_vision_model"},
            "projection_dim": 48,
        },
    ),
}
QWEN_FAMILIES = ("Qwen2-VL", "Qwen2.5-VL", "Qwen3-VL")


def write_media_model(family: str, folder: Path, **text: Any) -> Any:
    """The model in `folder`, with these settings of its text part; returns transformers' model."""
    name, settings = _FAMILIES[family]
    settings = settings | {"text_config": settings["text_config"] | text}
    ids = {"image_token_id": IMAGE, "video_token_id": VIDEO}
    model = write_model(name, {**settings, **ids, "tie_word_embeddings": False}, folder)
    if family == "ERNIE 4.5 VL":  # transformers takes these tokens for text where the model has written them
        with torch.no_grad():
            model.lm_head.weight[[IMAGE, VIDEO]] = 0
        model.save_pretrained(folder)
    name_as_published(name, folder, model)
    return model


class Picture(NamedTuple):
    """Random pixels; the grid is before merging. All pictures of Gemma 3 and PaliGemma have one size."""

    grid: tuple[int, int, int]
    kind: Literal["image", "video"] = "image"
    seed: int = 0


@dataclass(frozen=True)
class MediaPrompt:
    token_ids: list[int]
    items: list[MediaItem]
    inputs: dict[str, Tensor]
    """What transformers' model takes besides the tokens."""


def media_prompt(model: Any, parts: Sequence[int | Picture], folder: Path | None = None, seed: int = 0) -> MediaPrompt:
    """So many random tokens of text, and pictures. The arrays are in files in `folder`, or in the items."""
    rng = random.Random(seed)
    token_ids: list[int] = []
    items: list[MediaItem] = []
    inputs: dict[str, list[Tensor]] = {}

    def add_text(count: int) -> None:
        token_ids.extend(rng.randrange(1, IMAGE) for _ in range(count))

    for part in parts:
        if isinstance(part, int):
            add_text(part)
            continue
        arrays, grids, is_split = _arrays(model, part)
        for name, each in arrays.items():
            inputs.setdefault(name, []).append(each)
        offset, runs = len(token_ids), []
        for length, grid in grids:
            add_text(2 * is_split)
            runs.append(MediaRun(len(token_ids) - offset, length, grid))
            token_ids += [IMAGE if part.kind == "image" else VIDEO] * length
        data = media_data(arrays)
        digest = hashlib.blake2b(data.content, digest_size=16).digest()
        if folder is not None:
            path = folder / digest.hex()
            path.write_bytes(data.content)
            data = structs.replace(data, path=str(path), content=b"")
        seconds = 1.0 if part.kind == "video" else 0.0  # what transformers takes where nothing is said
        items.append(MediaItem(digest, part.kind, offset, len(token_ids) - offset, tuple(runs), seconds, data))
    found = {name: torch.cat(each) for name, each in inputs.items()}
    types = torch.tensor([[{IMAGE: 1, VIDEO: 2}.get(token, 0) for token in token_ids]])
    name = type(model).__name__
    if "PaliGemma" not in name:
        of_types = ["token_type_ids" if "Gemma3" in name else "mm_token_type_ids"]
        found |= dict.fromkeys(of_types + ["moe_mm_token_type_ids"] * name.startswith("Ernie"), types)
    elif items:
        found["token_type_ids"] = torch.zeros_like(types)
    return MediaPrompt(token_ids, items, found)


def _arrays(model: Any, part: Picture) -> tuple[dict[str, Tensor], list[tuple[int, tuple[int, int, int]]], bool]:
    """The arrays of a picture, the length and the grid of each run of its tokens, and whether there is text between
    them."""
    vision, generator = model.config.vision_config, torch.Generator().manual_seed(part.seed + sum(part.grid))
    if "Gemma" in type(model).__name__:
        pixels = torch.randn(1, 3, vision.image_size, vision.image_size, generator=generator)
        return {"pixel_values": pixels}, [((vision.image_size // vision.patch_size) ** 2, (0, 0, 0))], False
    merge, is_video = vision.spatial_merge_size, part.kind == "video"
    frames, rows, columns = part.grid
    width = vision.in_channels * getattr(vision, "temporal_patch_size", 1) * vision.patch_size**2
    pixels = torch.randn(frames * rows * columns, width, generator=generator)
    names = ("pixel_values_videos", "video_grid_thw") if is_video else ("pixel_values", "image_grid_thw")
    is_split = is_video and type(model).__name__.startswith(("Qwen3VL", "Qwen3_5"))
    grid, count = (1 if is_split else frames, rows // merge, columns // merge), frames if is_split else 1
    arrays = dict(zip(names, (pixels, torch.tensor([part.grid])), strict=True))
    if is_video:  # ERNIE 4.5 VL merges frames
        grid = (grid[0] // getattr(vision, "temporal_merge_size", 1), *grid[1:])
    return arrays, [(grid[0] * grid[1] * grid[2], grid)] * count, is_split


def media_data(arrays: dict[str, Tensor]) -> MediaData:
    content, found = b"", []
    for name, array in arrays.items():
        content += bytes(-len(content) % 64)
        dtype: Any = str(array.dtype).removeprefix("torch.")
        found.append(MediaArray(name, dtype, tuple(array.shape), len(content)))
        content += array.numpy().tobytes()
    return MediaData(tuple(found), len(content), content=content)


def generate(model: Any, prompt: MediaPrompt, count: int) -> list[int]:
    """transformers' greedy continuation, not stopping at end of sequence. Prompts of Qwen's families must end in text:
    transformers 5.24 takes the kind of the last token for that of the new ones."""
    from transformers import GenerationConfig

    settings: Any = GenerationConfig
    model.generation_config = settings(max_new_tokens=count, do_sample=False, pad_token_id=0)
    tokens = torch.tensor([prompt.token_ids])
    out = model.generate(tokens, attention_mask=torch.ones_like(tokens), **prompt.inputs)
    return out[0, len(prompt.token_ids) :].tolist()  # type: ignore[no-any-return]
