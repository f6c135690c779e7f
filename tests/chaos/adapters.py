"""Adapters of the demo model for servers that are attacked: some keep their weights, and one has others in turns."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from quire.engine.config.options import DEMO_MODEL

KEPT = ("first", "second", "third")
MOVING = "moving"
"""The name, and the folder, that mean the weights of one of `KEPT`."""
_RANK = 8
_WEIGHTS, _SETTINGS = "adapter_model.safetensors", "adapter_config.json"


def write_adapters(folder: Path) -> None:
    """PEFT folders whose random changes are large enough to change any answer."""
    text = json.loads((DEMO_MODEL / "config.json").read_text())["text_config"]
    hidden, width = text["hidden_size"], text["head_dim"]
    outputs = {"q_proj": text["num_attention_heads"] * width, "v_proj": text["num_key_value_heads"] * width}
    for seed, name in enumerate(KEPT):
        noise, tensors = np.random.default_rng(seed), {}
        for layer in range(text["num_hidden_layers"]):
            for module, rows in outputs.items():
                before = f"base_model.model.model.layers.{layer}.self_attn.{module}.lora"
                tensors[f"{before}_A.weight"] = noise.normal(0, 0.2, (_RANK, hidden)).astype(np.float32)
                tensors[f"{before}_B.weight"] = noise.normal(0, 0.2, (rows, _RANK)).astype(np.float32)
        (folder / name).mkdir(parents=True)
        save_file(tensors, folder / name / _WEIGHTS)
        settings = {"peft_type": "LORA", "r": _RANK, "lora_alpha": _RANK, "target_modules": list(outputs)}
        (folder / name / _SETTINGS).write_text(json.dumps(settings))
    shutil.copytree(folder / KEPT[0], folder / MOVING)


def move(folder: Path, name: str) -> None:
    """Give the folder of `MOVING` the weights of another adapter, at once."""
    fresh = folder / f"{MOVING}.part"
    shutil.copy(folder / name / _WEIGHTS, fresh)
    os.replace(fresh, folder / MOVING / _WEIGHTS)
