"""Every family against transformers: the same weights in float32, logits at every position."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.fakes.ranks import on_ranks
from tests.models.common import configure, logits

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}
BIASES = {"attention_bias": True, "mlp_bias": True}

CASES: dict[str, tuple[type[PretrainedConfig], type[PreTrainedModel], dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama, multi-head": (LlamaConfig, LlamaForCausalLM, {"num_key_value_heads": 4}),
    "llama, llama3 rope": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LLAMA3_ROPE}),
    "llama, linear rope": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LINEAR_ROPE}),
    "llama, biases": (LlamaConfig, LlamaForCausalLM, BIASES),
    "llama, head_dim": (LlamaConfig, LlamaForCausalLM, {"head_dim": 10}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 24}),
}


def save(case: str, folder: Path, *, tied: bool) -> PreTrainedModel:
    config_class, model_class, changes = CASES[case]
    sizes = {
        "vocab_size": 101,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "tie_word_embeddings": tied,
    }
    torch.manual_seed(0)
    model: PreTrainedModel = model_class(config_class(**(sizes | changes))).train(False)
    with torch.no_grad():
        for parameter in model.parameters():  # transformers starts biases at 0 and norms at 1, which hides them
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str, tied: bool, tmp_path: Path) -> None:
    model = save(case, tmp_path, tied=tied)
    tokens = torch.randint(0, 101, (150,))
    with torch.inference_mode():
        expected = model(tokens[None]).logits[0]
    for tp, pp in ((1, 1), (2, 1), (4, 1), (1, 2), (2, 3)):
        config = configure(tmp_path, tensor_parallel_size=tp, pipeline_parallel_size=pp)
        for result in on_ranks(tp, partial(logits, config, tokens)):
            assert (result - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_close(dtype: str, tmp_path: Path) -> None:
    save("qwen3", tmp_path, tied=False)
    tokens = torch.randint(0, 101, (60,))
    exact, rounded = (
        on_ranks(1, partial(logits, configure(tmp_path, dtype=name), tokens))[0] for name in ("float32", dtype)
    )
    assert rounded.dtype == torch.float32
    assert (rounded - exact).abs().mean() <= 0.03 * exact.abs().mean()
