"""Tiny random models that take pictures, complete as their publishers ship them: weights, tokenizer, chat template and
processor. It is imported where it is called: transformers takes seconds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from torch import Tensor

from tests.fakes.tokenizers import byte_level

MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
QWEN_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' or 'image' in part or 'image_url' in part %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part.type == 'video' or 'video' in part %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As that of Qwen2-VL and its successors."""
_TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,  # far enough from uniform that rounding cannot change the likeliest token
    "tie_word_embeddings": False,
}


def write_qwen2_vl(folder: Path, *, tower: Mapping[str, Any] | None = None, **settings: Any) -> Path:
    """A Qwen2-VL with pictures of 28 pixels squared for each token, at most 64 tokens; returns the folder. `settings`
    are those of its text part, and `tower` of its vision part."""
    import transformers
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    built = byte_level()
    built.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    tokenizer = transformers.PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=built, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=QWEN_TEMPLATE
    )
    start, end, image, video = (built.get_vocab()[mark] for mark in MARKS)
    vision = {"embed_dim": 32, "depth": 2, "num_heads": 2, "hidden_size": 64, "mlp_ratio": 2, "patch_size": 14}
    axes = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    torch.manual_seed(0)
    config = transformers.Qwen2VLConfig(
        text_config=_TEXT
        | {"vocab_size": built.get_vocab_size(), "rope_parameters": axes, "eos_token_id": 2, "bos_token_id": 0}
        | settings,
        vision_config=vision | {"initializer_range": 0.2} | dict(tower or {}),
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=False,
    )
    model: Any = transformers.Qwen2VLForConditionalGeneration(config)
    model.generation_config.eos_token_id = 2
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    size = {"shortest_edge": 4 * 28 * 28, "longest_edge": 64 * 28 * 28}
    images = Qwen2VLImageProcessorPil(patch_size=14, merge_size=2, size=size)
    settings_of_images = images.to_dict() | {"processor_class": "Qwen2VLProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings_of_images))
    return folder


def last_states(folder: Path, text: str, pictures: list[Any]) -> Tensor:
    """The last hidden states `[tokens, hidden]` of a prompt, by transformers in float32 with its own processor."""
    import transformers

    inputs, ids = _inputs(folder, text, pictures)
    model: Any = transformers.AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    types = (ids == model.config.image_token_id).int()
    with torch.inference_mode():
        found: Tensor = model.model(ids, mm_token_type_ids=types, **inputs).last_hidden_state[0]
    return found


def image_features(folder: Path, picture: Any) -> tuple[Mapping[str, Tensor], Tensor]:
    """What transformers' processor makes of a PIL picture, and the tower of that: features [tokens, width]."""
    import transformers
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    images: Any = Qwen2VLImageProcessorPil.from_pretrained(folder)
    inputs = images([picture], return_tensors="pt")
    model: Any = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return inputs, torch.cat(tuple(model.get_image_features(**inputs).pooler_output))


def answer(folder: Path, messages: list[dict[str, Any]], pictures: list[Any], count: int) -> list[int]:
    """transformers' greedy answer in float32 to a conversation with these PIL pictures, by its own processor."""
    import transformers

    torch.set_num_threads(1)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    inputs, ids = _inputs(folder, text, pictures)
    model: Any = transformers.AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    types = (ids == model.config.image_token_id).int()
    made = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        mm_token_type_ids=types,
        max_new_tokens=count,
        do_sample=False,
        **inputs,
    )
    found: list[int] = made[0, ids.shape[1] :].tolist()
    return found


def _inputs(folder: Path, text: str, pictures: list[Any]) -> tuple[dict[str, Tensor], Tensor]:
    """What a model takes for a prompt with these pictures: arrays, and token ids `[1, tokens]`."""
    import transformers
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    inputs: dict[str, Tensor] = {}
    if pictures:
        images: Any = Qwen2VLImageProcessorPil.from_pretrained(folder)(pictures, return_tensors="pt")
        inputs = {"pixel_values": images["pixel_values"], "image_grid_thw": images["image_grid_thw"]}
        counts = iter((images["image_grid_thw"].prod(-1) // 4).tolist())
        first, *others = text.split("<|image_pad|>")
        text = first + "".join("<|image_pad|>" * next(counts) + each for each in others)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    return inputs, tokenizer(text, return_tensors="pt")["input_ids"]
