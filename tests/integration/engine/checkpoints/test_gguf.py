"""GGUF files against transformers with the numbers that llama.cpp's own package reads in them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Type

from quire.engine.config.options import EngineOptions
from quire.engine.config.plan_text import plan_text
from quire.engine.config.resolve import fetch_weights, resolve
from quire.engine.distributed.communicator import Parallel
from quire.engine.models.build import load
from tests.fakes.gguf_models import add_byte_level, close, config_of, names_of, tensors_of, writer
from tests.fakes.model_logits import CPU, check_logits, configure
from tests.fakes.tokenizers import byte_level
from tests.integration.engine.checkpoints.test_quantized import packed_bytes

Numbers = npt.NDArray[np.float32]
LAYOUTS: tuple[dict[str, Any], ...] = ({}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2})
_SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "moe_intermediate_size": 256}
_FACTORS = {Type.Q4_K: ((0, 2e-4), (2, 1e-3)), Type.Q6_K: ((208, 2e-5),), Type.IQ4_NL: ((0, 3e-4),)}
"""Places of float16 factors in a block, and values with which random codes are as large as weights."""


def packed(values: Numbers, kind: Type, generator: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Blocks of a type: of the values, or random ones where the package cannot quantize."""
    if kind not in _FACTORS:
        return gguf.quants.quantize(values, kind)
    weights, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = generator.integers(0, 256, (*values.shape[:-1], values.shape[-1] // weights, size), dtype=np.uint8)
    for at, factor in _FACTORS[kind]:
        blocks[..., at : at + 2] = np.array([factor], np.float16).view(np.uint8)
    return blocks.reshape(*values.shape[:-1], -1)


def permuted(rows: Numbers, heads: int, *, back: bool = False) -> Numbers:
    """Rows of queries or keys as llama.cpp orders them: pairs side by side instead of in halves."""
    first = (heads, -1, 2) if back else (heads, 2, rows.shape[0] // heads // 2)
    return rows.reshape(*first, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def write(file: Path, architecture: str, kind: Type, **changes: Any) -> Any:
    """A file, and transformers' model with the numbers in it."""
    config, generator = config_of(architecture) | _SIZES | changes, np.random.default_rng(0)
    tensors = {
        name: generator.normal(1.0 if "norm" in name else 0.0, 0.05, shape).astype(np.float32)
        for name, shape in tensors_of(config).items()
    }
    made, stacks = writer(file, config), dict[str, list[str]]()
    for name, found in names_of(config, tensors).items():
        stacks.setdefault(found, []).append(name)
    for found, names in stacks.items():
        values = np.stack([tensors[name] for name in names]) if "_exps" in found else tensors[names[0]]
        if values.ndim == 1 or "norm" in found or "gate_inp" in found:
            made.add_tensor(found, values)
            continue
        blocks = packed(values, kind, generator)
        made.add_tensor(found, blocks, raw_dtype=kind)
        numbers = gguf.quants.dequantize(blocks, kind)
        for number, name in enumerate(names):
            tensors[name] = numbers[number] if "_exps" in found else numbers
            if architecture == "LlamaForCausalLM" and name.endswith(("q_proj.weight", "k_proj.weight")):
                heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
                tensors[name] = permuted(numbers, heads, back=True)
    add_byte_level(made, byte_level(), "qwen2")
    made.add_eos_token_id(0)
    close(made)
    return model_of(architecture, config, tensors)


def model_of(architecture: str, config: Mapping[str, Any], tensors: Mapping[str, Numbers]) -> Any:
    kind = getattr(transformers, architecture)
    settings = {key: value for key, value in config.items() if key != "architectures"}
    folder_state = {name: torch.from_numpy(values) for name, values in tensors.items()}
    return kind.from_pretrained(None, config=kind.config_class(**settings), state_dict=folder_state).train(False)


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [
        ("LlamaForCausalLM", Type.Q8_0),
        ("LlamaForCausalLM", Type.Q4_K),
        ("Qwen3ForCausalLM", Type.Q4_0),
        ("Qwen3ForCausalLM", Type.Q5_1),
        ("Qwen3ForCausalLM", Type.Q6_K),
        ("Qwen3ForCausalLM", Type.IQ4_NL),
        ("Qwen3MoeForCausalLM", Type.Q4_K),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_logits_are_those_of_the_numbers(
    architecture: str, kind: Type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "model.gguf"
    model = write(file, architecture, kind)
    asked = EngineOptions(model=str(file), device="cpu")
    fetch_weights(asked, resolve(asked))
    configs = [configure(file, max_model_len=64, **layout) for layout in LAYOUTS]
    assert all("gguf: " in plan_text(config) for config in configs)
    check_logits(model, configs, tolerance=1e-3, vocabulary=300)


@pytest.mark.parametrize("kind", [Type.Q4_K, Type.Q6_K], ids=lambda kind: kind.name)
def test_a_tied_embedding_is_in_memory_once(kind: Type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "model.gguf"
    model = write(file, "Qwen3ForCausalLM", kind, tie_word_embeddings=True)
    check_logits(model, [configure(file, max_model_len=64, **layout) for layout in LAYOUTS], tolerance=1e-3)
    config, tokens = configure(file, max_model_len=64), torch.arange(320)
    packed, dequantized = (load(config, 0, Parallel(), CPU, pack=pack).embedding for pack in (True, False))
    assert packed is not None
    assert dequantized is not None
    assert packed(tokens).equal(dequantized.weight)
    for tp in (1, 2):
        loaded, planned, whole = packed_bytes(file, tensor_parallel_size=tp)
        assert whole == 0, "the head has no copy"
        assert abs(loaded - planned) <= 0.03 * planned
