"""Small adapters, written without PEFT or torch."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
SETTINGS: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "peft_version": "0.21.2"}
Q = "base_model.model.model.layers.0.self_attn.q_proj"
SHAPES: dict[str, tuple[int, ...]] = {f"{Q}.lora_A.weight": (4, 16), f"{Q}.lora_B.weight": (16, 4)}
"""A change of the queries of the first layer of LLAMA."""
_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "F8_E4M3": 1}


def safetensors(tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]]) -> bytes:
    """A file with tensors: their types, shapes and bytes."""
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (len(data), len(data) + len(content))}  # type: ignore[dict-item]
        data += content
    encoded = json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + data


def content(shape: tuple[int, ...], dtype: str = "F32", seed: int = 1) -> bytes:
    """Bytes of a tensor; small numbers if it is of float32."""
    count = math.prod(shape)
    if dtype != "F32":
        return bytes(count * _SIZES[dtype])
    return struct.pack(f"<{count}f", *((seed * 37 + each * 17) % 29 / 29 - 0.5 for each in range(count)))


def write_adapter(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    settings: Mapping[str, Any] = SETTINGS,
    *,
    dtype: str = "F32",
    seed: int = 0,
) -> Path:
    """A PEFT folder with tensors of these shapes, which differ between seeds."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: (dtype, shape, content(shape, dtype, len(name) + seed)) for name, shape in shapes.items()}
    (folder / "adapter_model.safetensors").write_bytes(safetensors(tensors))
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder
