"""Random-weight checkpoints in the shape of Qwen3-VL, with a tokenizer and processor files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from shapes import QUIET, VOCABULARY, write_tokenizer

MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' or 'image_url' in part %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_QWEN3_VL_2B: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "vision_start_token_id": VOCABULARY,
    "vision_end_token_id": VOCABULARY + 1,
    "image_token_id": VOCABULARY + 2,
    "video_token_id": VOCABULARY + 3,
    "tie_word_embeddings": True,
    "text_config": {
        "model_type": "qwen3_vl_text",
        "dtype": "bfloat16",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5000000,
        "rope_scaling": {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True},
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 2,
    },
    "vision_config": {
        "model_type": "qwen3_vl",
        "depth": 24,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_heads": 16,
        "hidden_act": "gelu_pytorch_tanh",
        "in_channels": 3,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 2048,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [5, 11, 17],
        "initializer_range": 0.02,
    },
}
_FEW: dict[str, Any] = {"vocab_size": 33024, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
_FEW |= {"num_attention_heads": 2, "num_key_value_heads": 2}
_SMALL = {"depth": 3, "hidden_size": 128, "intermediate_size": 256, "num_heads": 2, "out_hidden_size": 256}
MEDIA_SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-vl-2b": _QWEN3_VL_2B,
    "tiny": _QWEN3_VL_2B
    | {"text_config": _QWEN3_VL_2B["text_config"] | _FEW}
    | {"vision_config": _QWEN3_VL_2B["vision_config"] | _SMALL | {"deepstack_visual_indexes": [0, 1, 2]}},
}


def make_media_checkpoint(shape: str, cache: Path) -> Path:
    """The checkpoint of `MEDIA_SHAPES` in bfloat16, in the format of the hub; created at the first call."""
    folder = cache / shape / "bfloat16"
    if (folder / "complete").exists():
        return folder
    print(f"creating {folder}: random weights in the shape of {shape}", file=sys.stderr, flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    quiet = write_tokenizer(folder, MARKS, chat_template=_TEMPLATE)
    _write_processor(folder)
    _write_weights(folder, MEDIA_SHAPES[shape], quiet)
    (folder / "complete").touch()
    return folder


def _write_processor(folder: Path) -> None:
    """As the publisher ships them."""
    numbers = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "patch_size": 16, "temporal_patch_size": 2}
    both = {**numbers, "merge_size": 2, "processor_class": "Qwen3VLProcessor"}
    images = {
        "size": {"shortest_edge": 65536, "longest_edge": 16777216},
        "image_processor_type": "Qwen2VLImageProcessorFast",
    }
    videos = {
        "size": {"shortest_edge": 4096, "longest_edge": 25165824},
        "video_processor_type": "Qwen3VLVideoProcessor",
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(both | images, indent=1))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(both | videos, indent=1))


def _write_weights(folder: Path, config: dict[str, Any], quiet: list[int]) -> None:
    import torch
    import transformers
    from safetensors.torch import save_file

    (folder / "config.json").write_text(json.dumps(config, indent=1))
    # No end of sequence, so that servers without ignore_eos generate to the requested length.
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": False}))
    with torch.device("meta"):
        model: Any = transformers.Qwen3VLForConditionalGeneration(transformers.Qwen3VLConfig(**config))
    noise = torch.Generator().manual_seed(0)
    tensors = {}
    for name, parameter in model.named_parameters():
        tensor = torch.ones(parameter.shape) if "norm" in name and name.endswith("weight") else None
        tensor = torch.empty(parameter.shape).normal_(std=0.02, generator=noise) if tensor is None else tensor
        if name.endswith("embed_tokens.weight"):
            tensor[quiet] *= QUIET
            tensor[VOCABULARY:] *= QUIET
        tensors[name] = tensor.to(torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
