"""Logits of real ranks for every kind of classification head equal transformers', for texts and for pairs."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    Gemma3TextConfig,
    Gemma3TextForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    GteConfig,
    GteForSequenceClassification,
    JinaEmbeddingsV3Config,
    JinaEmbeddingsV3ForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    ModernBertConfig,
    ModernBertForSequenceClassification,
    MPNetConfig,
    MPNetForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForSequenceClassification,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
)

from quire.engine.config.engine_config import EngineConfig
from quire.engine.config.pooling import Classes
from quire.engine.protocol.sampling_params import SamplingParams
from tests.fakes.core_with_ranks import Ranks
from tests.fakes.model_logits import configure
from tests.fakes.tokenizers import byte_level

SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 300,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 130,
}
DECODER: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 129}
SMALL: dict[str, Any] = {"dim": 64, "hidden_dim": 96, "n_layers": 2, "n_heads": 4}
GPT: dict[str, Any] = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 300, "pad_token_id": 129}
CASES: dict[str, tuple[type[PretrainedConfig], type[PreTrainedModel], dict[str, Any]]] = {
    "bert": (BertConfig, BertForSequenceClassification, {"num_labels": 1}),
    "xlm-roberta": (
        *(XLMRobertaConfig, XLMRobertaForSequenceClassification),
        {"num_labels": 1, "type_vocab_size": 1, "pad_token_id": 1},
    ),
    "distilbert": (DistilBertConfig, DistilBertForSequenceClassification, {**SMALL, "num_labels": 3}),
    "mpnet": (MPNetConfig, MPNetForSequenceClassification, {"num_labels": 2}),
    "modernbert": (
        *(ModernBertConfig, ModernBertForSequenceClassification),
        {"num_labels": 3, "local_attention": 12, "num_hidden_layers": 4, "pad_token_id": 0, "norm_bias": True},
    ),
    "modernbert, mean": (
        *(ModernBertConfig, ModernBertForSequenceClassification),
        {"num_labels": 1, "classifier_pooling": "mean", "classifier_bias": True, "pad_token_id": 0},
    ),
    "gte": (GteConfig, GteForSequenceClassification, {"num_labels": 1, "type_vocab_size": 2}),
    "jina v3": (JinaEmbeddingsV3Config, JinaEmbeddingsV3ForSequenceClassification, {"num_labels": 3}),
    "llama": (LlamaConfig, LlamaForSequenceClassification, {**DECODER, "num_labels": 1}),
    "qwen2": (Qwen2Config, Qwen2ForSequenceClassification, {**DECODER, "num_labels": 4}),
    "qwen3": (Qwen3Config, Qwen3ForSequenceClassification, {**DECODER, "num_labels": 2}),
    "gemma3": (Gemma3TextConfig, Gemma3TextForSequenceClassification, {**DECODER, "num_labels": 2}),
    "gpt2": (GPT2Config, GPT2ForSequenceClassification, {**GPT, "num_labels": 5}),
}
LENGTHS = (5, 1, 200, 33)
SECONDS = [3, 0, 120, 1]


def save(case: str, folder: Path) -> Path:
    config_class, model_class, changes = CASES[case]
    torch.manual_seed(0)
    model = model_class(config_class(**(SIZES | changes)))
    with torch.no_grad():
        for parameter in model.parameters():  # transformers starts biases at 0 and norms at 1, which hides them
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    model.save_pretrained(folder)
    return folder


def prompts() -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(128) for _ in range(length)] for length in LENGTHS]


def logits(config: EngineConfig, given: list[list[int]], seconds: list[int] | None = None) -> Tensor:
    """By real ranks, all asked at once."""
    with Ranks(config) as ranks:
        outputs = ranks.run([(prompt, SamplingParams()) for prompt in given], second_segments=seconds)
    return torch.stack(
        [torch.from_numpy(np.frombuffer(output.vector or b"", np.float32).copy()) for (output,) in outputs]
    )


@torch.inference_mode()
def expected(folder: Path, given: list[list[int]], seconds: list[int] | None = None) -> Tensor:
    torch.set_num_threads(1)
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    found = []
    for number, prompt in enumerate(given):
        second = (seconds or [0] * len(given))[number] or len(prompt)
        types = torch.tensor([[int(place >= second) for place in range(len(prompt))]])
        found.append(model(torch.tensor([prompt]), **({} if seconds is None else {"token_type_ids": types})).logits[0])
    return torch.stack(found)


def check(found: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4 * float(right.abs().max()))


@pytest.mark.parametrize("case", CASES)
def test_heads(case: str, tmp_path: Path) -> None:
    config = configure(save(case, tmp_path), max_num_seqs=4)
    assert config.model.pooling is not None
    assert config.model.pooling.classes is not None
    check(logits(config, prompts()), expected(tmp_path, prompts()))


@pytest.mark.parametrize("case", ["bert", "qwen3"])
def test_tensor_parallel_ranks(case: str, tmp_path: Path) -> None:
    config = configure(save(case, tmp_path), tensor_parallel_size=2, max_num_seqs=4)
    seconds = SECONDS if case == "bert" else None
    check(logits(config, prompts(), seconds), expected(tmp_path, prompts(), seconds))


def test_pairs_have_token_types(tmp_path: Path) -> None:
    config = configure(save("bert", tmp_path), max_num_seqs=4)
    found, right = logits(config, prompts(), SECONDS), expected(tmp_path, prompts(), SECONDS)
    check(found, right)
    one = logits(config, prompts())
    assert [bool(torch.equal(a, b)) for a, b in zip(found, one, strict=True)] == [second == 0 for second in SECONDS]


def test_a_reward_model_has_two_layers(tmp_path: Path) -> None:
    save("qwen2", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["score.weight"]
    head = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    tensors |= {f"score.{name}": tensor.data for name, tensor in head.named_parameters()}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["Qwen2ForRewardModel"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    from transformers import Qwen2Model

    model: Any = Qwen2Model.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.inference_mode():
        right = torch.stack([head(model(torch.tensor([prompt])).last_hidden_state[0, -1]) for prompt in prompts()])
    configured = configure(tmp_path, max_num_seqs=4)
    assert configured.model.pooling is not None
    assert configured.model.pooling.classes == Classes(labels=("LABEL_0",), activation="identity")
    check(logits(configured, prompts()), right)


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize(
    ("overrides", "kind"),
    [
        ({"classifier_from_token": ["no", "Ġyes"], "is_original_qwen3_reranker": True}, "difference"),
        ({"classifier_from_token": ["no", "Ġyes"], "method": "no_post_processing"}, "rows"),
    ],
)
def test_heads_from_tokens(is_tied: bool, overrides: dict[str, Any], kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = SIZES | DECODER | {"vocab_size": 330}
    Qwen3ForCausalLM(Qwen3Config(**sizes, tie_word_embeddings=is_tied)).save_pretrained(tmp_path)
    backend = byte_level()
    backend.add_tokens(["no", "Ġyes"])
    backend.save(str(tmp_path / "tokenizer.json"))
    no, yes = backend.token_to_id("no"), backend.token_to_id("Ġyes")
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.inference_mode():
        rows = torch.stack([model(torch.tensor([prompt])).logits[0, -1, [no, yes]] for prompt in prompts()])
    right = rows[:, 1:] - rows[:, :1] if kind == "difference" else rows
    config = configure(
        tmp_path, max_num_seqs=4, hf_overrides={"architectures": ["Qwen3ForSequenceClassification"], **overrides}
    )
    pooler = config.model.pooling
    assert pooler is not None
    assert pooler.classes is not None
    assert pooler.classes.joins_texts
    assert pooler.classes.activation == ("sigmoid" if kind == "difference" else "softmax")
    check(logits(config, prompts()), right)
