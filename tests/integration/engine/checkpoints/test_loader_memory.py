"""The memory of a rank's process while it loads: hardly more than the loaded weights."""

from __future__ import annotations

import json
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.engine.config.memory_plan import MemoryPlan
from tests.fakes.model_logits import configure
from tests.fakes.processes import CONTEXT
from tests.integration.engine.checkpoints import peak_memory

HIDDEN, INNER, LAYERS, VOCABULARY = 768, 2048, 12, 4096
"""182 MB of bfloat16."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    config = {"hidden_size": HIDDEN, "intermediate_size": INNER, "vocab_size": VOCABULARY} | {
        "architectures": ["LlamaForCausalLM"],
        "dtype": "bfloat16",
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


@pytest.mark.parametrize(
    ("dtype", "quantization", "tp"),
    [("float32", None, 1), ("bfloat16", None, 2), ("float32", "int8", 2), ("bfloat16", "fp8", 1)],
)
def test_loading_takes_little_more_than_the_weights(
    folder: Path, dtype: str, quantization: str | None, tp: int
) -> None:
    peak, held = measure(folder, dtype, tp, False, quantization)
    heaps = (8 << 20) * (quantization == "fp8")  # where four readers round weights
    assert 0.9 * held < peak <= 1.1 * held + heaps


def test_files_of_torch_are_not_held_in_memory(folder: Path, tmp_path: Path) -> None:
    """Neither one nor several: they are mapped, as safetensors are."""
    tensors = load_file(folder / "model.safetensors")
    files = {name: f"pytorch_model-{number % 3}.bin" for number, name in enumerate(tensors)}
    for file in set(files.values()):
        torch.save({name: tensor for name, tensor in tensors.items() if files[name] == file}, tmp_path / file)
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    peak, held = measure(tmp_path, "bfloat16", 2, False, None)
    assert 0.9 * held < peak <= 1.1 * held


def measure(folder: Path, dtype: str, tp: int, is_spread: bool, quantization: str | None) -> tuple[int, int]:
    """Measure in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=CONTEXT) as process:
        return process.submit(peak_memory.measure, folder, dtype, tp, is_spread, quantization).result()


EXPERTS, EXPERT_NUMBERS = 8, 3 * 512 * 1024


@pytest.fixture(scope="module")
def mixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """151 MB of bfloat16, nearly all of it experts: Mixtral's, each a tensor, or GraniteMoE's, a tensor for all."""
    path, is_stacked = tmp_path_factory.mktemp("mixture"), request.param == "stacked"
    hidden, inner, layers = 512, 1024, 6
    config = {"hidden_size": hidden, "intermediate_size": inner, "vocab_size": 64, "num_experts_per_tok": 2} | {
        "architectures": ["GraniteMoeForCausalLM" if is_stacked else "MixtralForCausalLM"],
        "dtype": "bfloat16",
        "num_local_experts": EXPERTS,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "max_position_embeddings": 2048,
    }
    if is_stacked:
        config |= {"attention_multiplier": 1.0, "embedding_multiplier": 1.0, "residual_multiplier": 1.0} | {
            "logits_scaling": 1.0
        }
    (path / "config.json").write_text(json.dumps(config))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (64, hidden), "lm_head": (64, hidden)}
    shapes["model.norm"] = (hidden,)
    for layer in range(layers):
        of_layer: dict[str, tuple[int, ...]] = {f"self_attn.{name}_proj": (hidden, hidden) for name in "qkvo"}
        of_layer |= {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
        if is_stacked:
            of_layer["block_sparse_moe.router.layer"] = (EXPERTS, hidden)
            of_layer["block_sparse_moe.input_linear"] = (EXPERTS, 2 * inner, hidden)
            of_layer["block_sparse_moe.output_linear"] = (EXPERTS, hidden, inner)
        else:
            of_layer["block_sparse_moe.gate"] = (EXPERTS, hidden)
            for expert in range(EXPERTS):
                name = f"block_sparse_moe.experts.{expert}"
                of_layer |= {
                    f"{name}.w1": (inner, hidden),
                    f"{name}.w3": (inner, hidden),
                    f"{name}.w2": (hidden, inner),
                }
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in of_layer.items()}
    most = max(torch.Size(shape).numel() for shape in shapes.values())
    numbers = torch.randn(most, generator=torch.Generator().manual_seed(0)).bfloat16()
    tensors = {name: numbers[: torch.Size(shape).numel()].view(shape).clone() for name, shape in shapes.items()}
    save_file({f"{name}.weight": tensor for name, tensor in tensors.items()}, path / "model.safetensors")
    return path


@pytest.mark.parametrize(
    ("mixture", "dtype", "quantization"),
    [
        ("one by one", "bfloat16", None),
        ("one by one", "float32", "int8"),
        ("stacked", "float32", None),
        ("stacked", "bfloat16", "fp8"),
        ("stacked", "bfloat16", "mxfp4"),
    ],
    indirect=["mixture"],
)
def test_only_the_experts_of_a_rank_are_loaded(mixture: Path, dtype: str, quantization: str | None) -> None:
    peak, held = measure(mixture, dtype, 2, True, quantization)
    one = configure(mixture, dtype=dtype, quantization=quantization, max_model_len=32)
    assert held < 0.55 * MemoryPlan.of(one).weights[0]
    # a layer that is being quantized, or its codes
    unpacked = EXPERTS // 2 * EXPERT_NUMBERS * (2 if quantization == "int8" else 1) + (8 << 20) if quantization else 0
    assert 0.9 * held < peak <= 1.1 * held + unpacked


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


@pytest.fixture(scope="module")
def quantized(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """130 MB of 4-bit weights, or twice as much of FP8."""
    path, hidden, inner, layers = tmp_path_factory.mktemp("quantized"), 1024, 2048, 24
    config = {"hidden_size": hidden, "intermediate_size": inner, "vocab_size": 512, "num_hidden_layers": layers} | {
        "architectures": ["LlamaForCausalLM"],
        "num_attention_heads": 8,
        "max_position_embeddings": 2048,
        "quantization_config": _GPTQ if request.param == "gptq" else _FP8,
    }
    (path / "config.json").write_text(json.dumps(config))
    whole = {"model.embed_tokens": (512, hidden), "lm_head": (512, hidden), "model.norm": (hidden,)}
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(layers):
        block = f"model.layers.{layer}"
        whole |= {f"{block}.{name}_layernorm": (hidden,) for name in ("input", "post_attention")}
        linears = {f"{block}.self_attn.{name}_proj": (hidden, hidden) for name in "qkvo"}
        linears |= {f"{block}.mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")}
        linears[f"{block}.mlp.down_proj"] = (hidden, inner)
        for name, (rows, columns) in linears.items():
            if request.param == "gptq":
                tensors[f"{name}.qweight"] = torch.randint(-(2**31), 2**31 - 1, (columns // 8, rows), dtype=torch.int32)
                tensors[f"{name}.scales"] = torch.rand(columns // 128, rows).half()
            else:
                codes = torch.randint(0, 100, (rows, columns), dtype=torch.uint8)
                tensors[f"{name}.weight"] = codes.view(torch.float8_e4m3fn)
                tensors[f"{name}.weight_scale_inv"] = torch.rand(rows // 128, columns // 128)
    tensors |= {f"{name}.weight": torch.randn(shape).bfloat16() for name, shape in whole.items()}
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.mark.parametrize(("quantized", "tp"), [("gptq", 2), ("fp8", 1)], indirect=["quantized"])
def test_loading_quantized_weights_takes_little_more_than_their_bytes(quantized: Path, tp: int) -> None:
    peak, held = measure(quantized, "bfloat16", tp, False, None)
    stored = sum(file.stat().st_size for file in quantized.glob("*.safetensors"))
    assert held <= 1.05 * stored / tp + (2 << 20)  # embedding and head
    heaps = 16 << 20  # where four readers unpack codes
    assert 0.9 * held < peak <= 1.1 * held + heaps
