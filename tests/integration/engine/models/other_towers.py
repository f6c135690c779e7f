"""Tiny random models with towers that only transformers has, complete as their publishers ship them: weights, tokenizer
and processor. A line for each."""

from __future__ import annotations

import hashlib
import json
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from quire.engine.models.transformers_backend import pictures
from quire.engine.protocol.media import MediaItem
from quire.engine.repository.processors import load_processor
from tests.fakes.families import SIZES, write_model
from tests.fakes.media_prompts import MediaPrompt, media_data
from tests.fakes.processors import write_processor


class OtherTower(NamedTuple):
    """A model: its type, and that of its text part."""

    architecture: str
    family: str
    """In `tests.fakes.processors`."""
    text: str
    vision: Mapping[str, Any]
    settings: Mapping[str, Any] = MappingProxyType({})


_VIT = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 28}
_VIT |= {"patch_size": 7}

CASES = {
    "GOT-OCR 2": OtherTower(
        "GotOcr2ForConditionalGeneration",
        "got_ocr2",
        "qwen2",
        _VIT
        | {"image_size": 128, "patch_size": 2, "mlp_dim": 40, "window_size": 8, "global_attn_indexes": []}
        | {"output_channels": 24},
    ),
    "Janus": OtherTower(
        "JanusForConditionalGeneration",
        "janus",
        "llama",
        _VIT | {"projection_dim": 48, "num_image_tokens": 16},
        {
            "vq_config": {"base_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1, "num_embeddings": 16}
            | {"latent_channels": 32, "projection_dim": 48, "image_token_embed_dim": 48}
        },
    ),
    "ViP-LLaVA": OtherTower(
        "VipLlavaForConditionalGeneration",
        "vipllava",
        "llama",
        _VIT | {"model_type": "clip_vision_model"},
        {"vision_feature_layers": [-2, -1]},
    ),
    "VideoLLaMA 3": OtherTower(
        "VideoLlama3ForConditionalGeneration",
        "video_llama_3",
        "qwen2",
        {
            "hidden_size": 32,
            "intermediate_size": 40,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "patch_size": 14,
        },
    ),
    "LLaVA": OtherTower(
        "LlavaForConditionalGeneration", "vipllava", "llama", _VIT | {"model_type": "clip_vision_model"}
    ),
    "Qwen2-VL": OtherTower(
        "Qwen2VLForConditionalGeneration",
        "qwen2_vl",
        "",
        {"embed_dim": 32, "depth": 2, "num_heads": 2, "hidden_size": 48},
        {"video_token_id": 5},
    ),
    "Ovis2": OtherTower(
        "Ovis2ForConditionalGeneration",
        "ovis2",
        "qwen2",
        _VIT | {"vocab_size": 40, "hidden_stride": 2},
        {"hidden_size": 48},
    ),
}

REFUSED = {"Ovis2": "a small model of its kind gives different logits"}
"""Cases that do more with pictures than put features in place of tokens, and what the refusal says."""


def write(name: str, folder: Path, **text: Any) -> Any:
    """The case's model in `folder`; returns transformers' model."""
    case = CASES[name]
    write_processor(case.family, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_bytes())
    ids = {each["content"]: each["id"] for each in tokenizer["added_tokens"]}
    marks = json.loads((folder / "tokenizer_config.json").read_bytes())["extra_special_tokens"]
    part = SIZES | {"vocab_size": max(ids.values()) + 1, "max_position_embeddings": 1200}
    part |= {"model_type": case.text} if case.text else {}
    if case.family == "qwen2_vl":
        axes = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2]}
        part |= {"rope_parameters": axes}
    settings = {"text_config": part | text, "vision_config": dict(case.vision), **case.settings}
    image_id = ids[marks.get("ATOM", marks["image_token"])]
    settings |= {"image_token_id": image_id, "image_token_index": image_id}
    if case.family == "ovis2":
        indicators = [ids[marks[mark]] for mark in ("START", "GRID", "COL", "ROW", "END")]
        settings["visual_indicator_token_ids"] = indicators
    return write_model(case.architecture, {**settings, "tie_word_embeddings": False}, folder)


class Photo(NamedTuple):
    """Random pixels."""

    width: int
    height: int
    seed: int = 0


def prompt(folder: Path, model: Any, parts: Sequence[int | Photo], seed: int = 0) -> MediaPrompt:
    """So many random tokens of text, and pictures as the model's processor gives them."""
    processor, image_id = load_processor(str(folder)), pictures.image_token(model.config)
    rng = random.Random(seed)
    token_ids, items, inputs = list[int](), list[MediaItem](), defaultdict[str, list[Tensor]](list)
    for part in parts:
        if isinstance(part, int):
            token_ids += [rng.randrange(1, 256) for _ in range(part)]
            continue
        pixels = np.random.default_rng(part.seed).integers(0, 256, (part.height, part.width, 3), np.uint8)
        picture = pictures.processed(processor, image_id, Image.fromarray(pixels))
        data = media_data(dict(picture.arrays))
        digest = hashlib.blake2b(data.content, digest_size=16).digest()
        items.append(MediaItem(digest, "image", len(token_ids), len(picture.tokens), picture.runs, data=data))
        token_ids += picture.tokens
        for name, array in picture.arrays.items():
            inputs[name].append(array)
    types = (torch.tensor([token_ids]) == image_id).int()
    kinds = {"mm_token_type_ids": types} if hasattr(model.model, "get_rope_index") else {}
    return MediaPrompt(token_ids, items, {name: torch.cat(each) for name, each in inputs.items()} | kinds)
