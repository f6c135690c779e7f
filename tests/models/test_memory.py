"""What a rank's process takes while it loads: hardly more than the weights in the end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

HIDDEN, INNER, LAYERS, VOCABULARY = 768, 2048, 12, 4096
"""182 MB of bfloat16."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    config = {"hidden_size": HIDDEN, "intermediate_size": INNER, "vocab_size": VOCABULARY} | {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 12,
        "max_position_embeddings": 2048,
    }
    (path / "config.json").write_text(json.dumps(config))
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (VOCABULARY, HIDDEN),
        "lm_head": (VOCABULARY, HIDDEN),
        "model.norm": (HIDDEN,),
    }
    for layer in range(LAYERS):
        of_layer: dict[str, tuple[int, ...]] = {f"self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qkvo"}
        of_layer |= {"mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER)}
        of_layer |= {"input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,)}
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in of_layer.items()}
    numbers = torch.randn(VOCABULARY * HIDDEN, generator=torch.Generator().manual_seed(0)).bfloat16()
    tensors = {name: numbers[: torch.Size(shape).numel()].view(shape).clone() for name, shape in shapes.items()}
    save_file({f"{name}.weight": tensor for name, tensor in tensors.items()}, path / "model.safetensors")
    return path


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("dtype", "quantization"), [("float32", None), ("bfloat16", None), ("float32", "int8")])
def test_loading_takes_little_more_than_the_weights(
    folder: Path, dtype: str, quantization: str | None, tp: int
) -> None:
    command = [sys.executable, "-m", "tests.models.peak", str(folder), dtype, str(tp), *filter(None, [quantization])]
    peak, held = map(int, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
    assert 0.9 * held < peak <= 1.1 * held
