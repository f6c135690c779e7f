"""Model folders with processors of many families, and tiny tokenizers; no weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import ImageFont

from tests.fakes import tokenizers

_QWEN = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
_QWEN_MARKS = {**_QWEN, "vision_start_token": "<|vision_start|>", "vision_end_token": "<|vision_end|>"}
_IMAGE = {"image_token": "<image>"}
_SQUARE = {"height": 28, "width": 28}
_PINPOINTS = [[28, 56], [56, 28], [56, 56]]
_LLAVA = {"vision_feature_select_strategy": "default", "patch_size": 14, "num_additional_image_tokens": 1}
_GEMMA = {"audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>"}
_GLM = {"image_token": "<|image|>", "video_token": "<|video|>"}
_GLM_SIZE = {"size": {"shortest_edge": 112 * 112, "longest_edge": 112 * 112 * 6}}
_COLQWEN = {"visual_prompt_prefix": "<|image_pad|>?", "query_prefix": "Q: "}
_IDEFICS = {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}}
_IDEFICS_TOKENS = {
    "image_token": "<image>",
    "fake_image_token": "<fake_token_around_image>",
    "end_of_utterance_token": "<end_of_utterance>",
    "global_image_token": "<global-img>",
}

FAMILIES: Mapping[str, tuple[str, str, dict[str, Any], dict[str, Any], dict[str, str]]] = {
    "qwen2_vl": ("Qwen2VLProcessor", "Qwen2VLImageProcessor", {"max_pixels": 28 * 28 * 16}, {}, _QWEN),
    "colqwen2": ("ColQwen2Processor", "Qwen2VLImageProcessor", {"max_pixels": 28 * 28 * 16}, _COLQWEN, _QWEN),
    "qwen2_5_vl": ("Qwen2_5_VLProcessor", "Qwen2VLImageProcessor", {"max_pixels": 28 * 28 * 16}, {}, _QWEN),
    "qwen3_vl": (
        "Qwen3VLProcessor",
        "Qwen2VLImageProcessorFast",  # as published
        {"patch_size": 16, "size": {"shortest_edge": 1024, "longest_edge": 32 * 32 * 16}},
        {},
        _QWEN_MARKS,
    ),
    "qwen3_vl_moe": ("Qwen3VLProcessor", "Qwen2VLImageProcessorFast", {"patch_size": 16}, {}, _QWEN_MARKS),
    "qwen3_5": ("Qwen3VLProcessor", "Qwen2VLImageProcessorFast", {"patch_size": 16}, {}, _QWEN_MARKS),
    "gemma3": (
        "Gemma3Processor",
        "Gemma3ImageProcessor",
        {"size": _SQUARE},
        {"image_seq_length": 4},
        {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
    ),
    "paligemma": (
        "PaliGemmaProcessor",
        "SiglipImageProcessor",
        {"size": _SQUARE, "image_seq_length": 4},
        {},
        {**_IMAGE, "bos_token": "<bos>"},
    ),
    "colpali": (
        "ColPaliProcessor",
        "SiglipImageProcessor",
        {"size": _SQUARE, "image_seq_length": 4},
        {"visual_prompt_prefix": "Read this.", "query_prefix": "Q: "},
        {**_IMAGE, "bos_token": "<bos>"},
    ),
    "gemma3n": (
        "Gemma3nProcessor",
        "SiglipImageProcessor",
        {"size": _SQUARE, "feature_extractor_type": "Gemma3nAudioFeatureExtractor"},
        {"image_seq_length": 4},
        {**_GEMMA, "image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
    ),
    "gemma4": (
        "Gemma4Processor",
        "Gemma4ImageProcessor",
        {"max_soft_tokens": 70},
        {"feature_extractor": {"feature_extractor_type": "Gemma4AudioFeatureExtractor"}},
        {**_GEMMA, "image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>"},
    ),
    "glm4v": ("Glm4vProcessor", "Glm4vImageProcessor", _GLM_SIZE, {}, _GLM),
    "glm46v": ("Glm46VProcessor", "Glm46VImageProcessor", _GLM_SIZE, {}, _GLM),
    "llava": (
        "LlavaProcessor",
        "CLIPImageProcessor",
        {"size": {"shortest_edge": 28}, "crop_size": _SQUARE},
        _LLAVA,
        _IMAGE,
    ),
    "llava_next": (
        "LlavaNextProcessor",
        "LlavaNextImageProcessor",
        {"size": {"shortest_edge": 28}, "crop_size": _SQUARE, "image_grid_pinpoints": _PINPOINTS},
        _LLAVA,
        _IMAGE,
    ),
    "llava_onevision": (
        "LlavaOnevisionProcessor",
        "LlavaOnevisionImageProcessor",
        {"size": _SQUARE, "image_grid_pinpoints": _PINPOINTS},
        {"num_image_tokens": 4, "vision_feature_select_strategy": "full"},
        {"image_token": "<image>", "video_token": "<video>"},
    ),
    "internvl": (
        "InternVLProcessor",
        "GotOcr2ImageProcessor",
        {"size": _SQUARE, "max_patches": 6},
        {"image_seq_length": 4},
        {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
    ),
    "idefics3": ("Idefics3Processor", "Idefics3ImageProcessor", _IDEFICS, {"image_seq_len": 4}, _IDEFICS_TOKENS),
    "smolvlm": (
        "SmolVLMProcessor",
        "SmolVLMImageProcessor",
        {**_IDEFICS, "video_sampling": {"fps": 2, "max_frames": 5, "video_size": {"longest_edge": 28}}},
        {"image_seq_len": 4},
        {**_IDEFICS_TOKENS, "video_token": "<video>"},
    ),
    "mistral3": (
        "PixtralProcessor",
        "PixtralImageProcessor",
        {"size": {"longest_edge": 112}, "patch_size": 14},
        {"patch_size": 14, "spatial_merge_size": 2},
        {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"},
    ),
    "aya_vision": (
        "AyaVisionProcessor",
        "GotOcr2ImageProcessor",
        {"size": _SQUARE, "max_patches": 6},
        {"patch_size": 14, "img_size": 28},
        {"image_token": "<image>", "img_patch_token": "<|IMG_PATCH|>"},
    ),
    "cohere2_vision": (
        "Cohere2VisionProcessor",
        "Cohere2VisionImageProcessor",
        {"size": _SQUARE, "patch_size": 2, "max_patches": 6},
        {},
        {
            "boi_token": "<|START_OF_IMG|>",
            "eoi_token": "<|END_OF_IMG|>",
            "image_token": "<|IMG_PATCH|>",
            "img_line_break_token": "<|IMG_LINE_BREAK|>",
        },
    ),
    "paddleocr_vl": (
        "PaddleOCRVLProcessor",
        "PaddleOCRVLImageProcessor",
        {"min_pixels": 28 * 28 * 4, "max_pixels": 28 * 28 * 16},
        {},
        {"image_token": "<|IMAGE_PLACEHOLDER|>"},
    ),
    "lfm2_vl": (
        "Lfm2VlProcessor",
        "Lfm2VlImageProcessor",
        {"encoder_patch_size": 4, "tile_size": 32, "min_image_tokens": 4, "max_image_tokens": 16},
        {},
        {
            "image_token": "<image>",
            "image_start_token": "<|image_start|>",
            "image_end_token": "<|image_end|>",
            "image_thumbnail_token": "<|img_thumbnail|>",
        },
    ),
    "minimax_m3_vl": (
        "MiniMaxM3VLProcessor",
        "MiniMaxM3VLImageProcessor",
        {"size": [672, 672]},  # as published
        {},
        {"image_token": "]<]image[>[", "video_token": "]<]video[>["},
    ),
    "step3p7": (
        "Step3p7Processor",
        "Step3p7ImageProcessor",
        {"size": {"height": 112, "width": 112}, "patch_size": 56},
        {},
        {"image_token": "<im_patch>"},
    ),
    "llama4": (
        "Llama4Processor",
        "Llama4ImageProcessor",
        {"size": _SQUARE, "max_patches": 4},
        {"patch_size": 7},
        {"image_token": "<|image|>", "patch_token": "<|patch|>"},
    ),
    "deepseek_ocr2": (
        "DeepseekOcr2Processor",
        "DeepseekOcr2ImageProcessor",
        {"size": {"height": 128, "width": 128}, "tile_size": 64},
        {},
        _IMAGE,
    ),
    "ernie4_5_vl_moe": (
        "Ernie4_5_VLMoeProcessor",
        "Ernie4_5_VLMoeImageProcessor",
        {"size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 16}},
        {
            "video_processor": {
                "size": {"shortest_edge": 28 * 28 * 4, "longest_edge": 28 * 28 * 16},
                "font": "Roboto-Regular.ttf",
                "draw_on_frames": True,
                "min_frames": 4,
            }
        },
        {
            **{f"{kind}_token": f"<|{kind}|>" for kind in ("image", "video")},
            **{f"{kind}_{end}_token": f"<|{kind}_{end}|>" for kind in ("image", "video") for end in ("start", "end")},
        },
    ),
    "deepseek_ocr": (
        "DeepseekVLV2Processor",
        "",
        {},
        {"size": {"height": 128, "width": 128}, "tile_size": 64, "image_mean": [0.5] * 3, "downsample_ratio": 4},
        _IMAGE,
    ),
    "deepseek_ocr2 as published": (
        "DeepseekVLV2Processor",
        "",
        {},
        {"size": {"height": 128, "width": 128}, "tile_size": 64},
        _IMAGE,
    ),
    "granite4_vision": (
        "Granite4VisionProcessor",
        "LlavaNextImageProcessor",
        {"size": {"shortest_edge": 28}, "crop_size": _SQUARE, "image_grid_pinpoints": _PINPOINTS},
        {"vision_feature_select_strategy": "full", "patch_size": 14, "downsample_rate": "1/2"},
        _IMAGE,
    ),
    "hunyuan_vl": (
        "HunYuanVLProcessor",
        "HunYuanVLImageProcessor",
        {"size": {"shortest_edge": 32 * 32, "longest_edge": 64 * 96}},
        {},
        {
            "image_token": "<img_pad>",
            "image_start_token": "<img_start>",
            "image_end_token": "<img_end>",
            "pad_token": "<pad>",
        },
    ),
    "kimi_k25": (
        "Kimi_K25Processor",
        "Kimi_K25ImageProcessor",
        {"max_patches": 32},
        {},
        {"image_token": "<|media_pad|>", "video_token": "<|kimi_k25_video_placeholder|>"},
    ),
    "got_ocr2": (
        "GotOcr2Processor",
        "GotOcr2ImageProcessor",
        {"size": {"height": 128, "width": 128}},
        {},
        {"image_token": "<imgpad>", "start_token": "<img>", "end_token": "</img>"},
    ),
    "janus": (
        "JanusProcessor",
        "JanusImageProcessor",
        {"size": _SQUARE},
        {"num_image_tokens": 16},
        {"image_token": "<image_placeholder>", "boi_token": "<begin_of_image>", "eoi_token": "<end_of_image>"},
    ),
    "vipllava": (
        "LlavaProcessor",
        "CLIPImageProcessor",
        {"size": {"shortest_edge": 28}, "crop_size": _SQUARE},
        {**_LLAVA, "patch_size": 7},
        _IMAGE,
    ),
    "video_llama_3": (
        "VideoLlama3Processor",
        "VideoLlama3ImageProcessor",
        {"max_pixels": 28 * 28 * 16, "min_pixels": 28 * 28 * 4},
        {},
        {"image_token": "<image>"},
    ),
    "ovis2": (
        "Ovis2Processor",
        "Ovis2ImageProcessor",
        {"size": _SQUARE, "crop_to_patches": True, "max_patches": 4},
        {"image_seq_length": 4},
        _IMAGE | {mark: f"<IMG_{mark}>" for mark in ("START", "ATOM", "GRID", "COL", "ROW", "END")},
    ),
}
"""By model type: the classes of processor and image processor, the settings of the image processor and of the
processor, and the tokenizer's tokens.
"""

PUBLISHED = {"deepseek_ocr": "DeepseekOCRForCausalLM", "deepseek_ocr2 as published": "DeepseekOCR2ForCausalLM"}
"""Families whose folders have no processor that transformers knows, and their architectures."""


def write_processor(family: str, folder: Path) -> Path:
    """Write the files of a model without weights."""
    name, image_name, image_settings, settings, tokens = FAMILIES[family]
    built = tokenizers.byte_level()
    built.add_special_tokens(sorted(tokens.values()))
    built.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "extra_special_tokens": tokens, "pad_token": "<|im_end|>"}
    model: dict[str, Any] = {"model_type": family}
    if family in PUBLISHED:
        model = {"model_type": "deepseek_vl_v2", "architectures": [PUBLISHED[family]]}
    files = {
        "tokenizer_config.json": config,
        "config.json": model,
        "preprocessor_config.json": {"image_processor_type": image_name, "processor_class": name, **image_settings},
        "processor_config.json": {"processor_class": name, **settings},
    }
    if family == "ernie4_5_vl_moe":
        font: Any = ImageFont.load_default(8)
        (folder / "Roboto-Regular.ttf").write_bytes(font.font_bytes)
    for file, content in files.items():
        (folder / file).write_text(json.dumps(content))
    return folder
