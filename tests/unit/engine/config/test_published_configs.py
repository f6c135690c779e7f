"""config.json and the files beside it as publishers write them, in short: their names, lengths and ends of answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.engine.architecture.families import from_hf_config, transformers_backend
from quire.engine.architecture.families.transformers_backend import DescribeRequest
from quire.engine.architecture.model_spec import TransformersModelSpec
from quire.engine.config import devices
from quire.engine.config.engine_config import ModelConfig
from quire.engine.config.options import EngineOptions
from quire.engine.config.resolve import resolve
from quire.engine.models.transformers_backend.shrink import LENGTH, WINDOW, shrink
from quire.engine.protocol.errors import ConfigError
from tests.fakes import published

LLAMA_7B: dict[str, Any] = {
    "architectures": ["LLaMAForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_sequence_length": 2048,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "pad_token_id": -1,
    "vocab_size": 32000,
}
VICUNA_16K = LLAMA_7B | {
    "architectures": ["LlamaForCausalLM"],
    "max_position_embeddings": 4096,
    "max_sequence_length": 16384,
    "rope_scaling": {"factor": 4.0, "type": "linear"},
}
INTERNLM3_8B, QWEN3_8B = published.config("internlm3-8b-instruct"), published.config("Qwen3-8B")
ERNIE_03B = published.config("ERNIE-4.5-0.3B-PT") | {"architectures": ["Ernie4_5_ForCausalLM"]}
PHI_35_MOE: dict[str, Any] = {
    "architectures": ["PhiMoEForCausalLM"],
    "model_type": "phimoe",
    "attention_bias": True,
    "hidden_size": 4096,
    "intermediate_size": 6400,
    "lm_head_bias": True,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "original_max_position_embeddings": 4096,
    "rope_scaling": {
        "long_factor": [8.0] * 64,
        "long_mscale": 1.243163121016122,
        "original_max_position_embeddings": 4096,
        "short_factor": [1.0] * 64,
        "short_mscale": 1.243163121016122,
        "type": "longrope",
    },
    "rope_theta": 10000.0,
    "sliding_window": 131072,
    "vocab_size": 32064,
}
GLM4: dict[str, Any] = {
    "architectures": ["Glm4_ForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_glm4.Glm4_ForCausalLM"},
    "model_type": "glm4",
    "vocab_size": 151552,
}
GEMMA3_TEXT: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_attention_heads": 8,
    "num_hidden_layers": 34,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 1024,
    "vocab_size": 262208,
}
QWEN25_1M: dict[str, Any] = QWEN3_8B | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "dual_chunk_attention_config": {
        "chunk_size": 262144,
        "local_size": 8192,
        "original_max_position_embeddings": 262144,
    },
    "max_position_embeddings": 1010000,
}


@pytest.fixture(autouse=True)
def _large_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "free_host_memory", lambda: 1 << 40)


def model_of(folder: Path, config: dict[str, Any], **changes: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(config))
    return resolve(EngineOptions(model=str(folder), load_format="dummy", device="cpu", **changes)).model


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (LLAMA_7B, "LlamaForCausalLM"),
        ({**LLAMA_7B, "architectures": None}, "LlamaForCausalLM"),
        (INTERNLM3_8B, "LlamaForCausalLM"),
        (ERNIE_03B, "Ernie4_5ForCausalLM"),
        (PHI_35_MOE, "PhimoeForCausalLM"),
        ({**QWEN3_8B, "architectures": []}, "Qwen3ForCausalLM"),
    ],
)
def test_a_model_type_that_transformers_knows_stands_for_the_architecture(
    tmp_path: Path, config: dict[str, Any], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    found = model_of(tmp_path, config).architecture
    assert found == model_of(tmp_path, {**config, "architectures": [name]}).architecture
    (line,) = caplog.messages
    assert line.endswith(f"using {name}, which transformers builds for model_type {config['model_type']}")


def test_what_transformers_alone_builds_is_described_by_its_own_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str | None] = []

    def describe(request: DescribeRequest) -> TransformersModelSpec:
        asked.append(request.architecture)
        raise ConfigError("no matter")

    monkeypatch.setattr(transformers_backend, "describe", describe)
    for config, trust in ((GLM4, False), (GLM4, True), ({**GLM4, "auto_map": None}, True)):
        with pytest.raises(ConfigError, match=r"config\.json: Glm4_?ForCausalLM is not supported: it has no"):
            model_of(tmp_path, config, trust_remote_code=trust)
    assert asked == ["Glm4ForCausalLM", "Glm4_ForCausalLM", "Glm4ForCausalLM"]
    with pytest.raises(ConfigError, match=r"FooForClassification is not supported.*does not know it"):
        model_of(tmp_path, {**LLAMA_7B, "architectures": ["FooForClassification"]})
    with pytest.raises(ConfigError, match=r"BazForCausalLM is not supported: .* needs --trust-remote-code; docs/ref"):
        model_of(tmp_path, {**GLM4, "architectures": ["BazForCausalLM"], "model_type": "baz"})


def test_chunks_of_attention_begin_where_blocks_do(tmp_path: Path) -> None:
    scout = {**QWEN3_8B, "architectures": ["Llama4ForCausalLM"], "model_type": "llama4_text"}
    with pytest.raises(ConfigError, match=r"--block-size 24 does not divide the 8192 tokens of a chunk"):
        model_of(tmp_path, scout, block_size=24)
    model_of(tmp_path, scout, block_size=24, max_model_len=8192)  # there is one chunk
    model_of(tmp_path, scout, block_size=64)


def test_positions_of_images_are_those_of_text() -> None:
    """Qwen2-VL's first configs have no text part, and name scaling by axes."""
    plain = {"architectures": ["Qwen2VLForConditionalGeneration"], "hidden_size": 64, "num_hidden_layers": 2}
    plain |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 100}
    axes = {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    assert from_hf_config(plain | axes) == from_hf_config(plain)


def test_biases_under_the_names_of_internlm(tmp_path: Path) -> None:
    biased = model_of(tmp_path, {**INTERNLM3_8B, "bias": True, "qkv_bias": True}).architecture
    of_llama = {"attention_bias": True, "mlp_bias": True, "model_type": "llama"}
    assert biased == model_of(tmp_path, {**INTERNLM3_8B, **of_llama}).architecture
    with pytest.raises(ConfigError, match="qkv_bias True is not supported"):
        model_of(tmp_path, {**INTERNLM3_8B, "qkv_bias": True}, model_impl="quire")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LLAMA_7B, 2048),
        (VICUNA_16K, 16384),
        ({**VICUNA_16K, "max_sequence_length": None}, 16384),
        (GEMMA3_TEXT, 131072),
        (QWEN25_1M, 262144),
    ],
)
def test_the_length_is_what_the_publisher_says(tmp_path: Path, config: dict[str, Any], expected: int) -> None:
    assert model_of(tmp_path, config).max_model_len == expected
    with pytest.raises(ConfigError, match=f"--max-model-len {expected + 1}"):
        model_of(tmp_path, config, max_model_len=expected + 1)


def test_yarn_that_the_user_gives_extends_the_length(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    overridden = model_of(tmp_path, QWEN3_8B, hf_overrides={"rope_scaling": yarn})
    assert overridden.max_model_len == 131072
    assert overridden.architecture == model_of(tmp_path, {**QWEN3_8B, "rope_scaling": yarn}).architecture
    assert model_of(tmp_path, QWEN3_8B, hf_overrides={"max_position_embeddings": 50000}).max_model_len == 50000


def test_dual_chunk_attention_is_refused_where_it_has_an_effect(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = {name: value for name, value in QWEN25_1M.items() if name != "dual_chunk_attention_config"}
    assert model_of(tmp_path, QWEN25_1M, max_model_len=262144).max_model_len == 262144
    assert not caplog.messages
    model_of(tmp_path, QWEN25_1M)
    assert caplog.messages == [
        "dual_chunk_attention_config is not supported: the length is limited to 262,144 of the model's 1,010,000 "
        "tokens, where it has no effect"
    ]
    with pytest.raises(ConfigError, match=r"dual chunk attention .*use --max-model-len 262144 or less"):
        model_of(tmp_path, QWEN25_1M, max_model_len=300000)
    with pytest.raises(ConfigError, match="must have chunk_size and original_max_position_embeddings"):
        model_of(tmp_path, {**QWEN25_1M, "dual_chunk_attention_config": {"chunk_size": 5}})
    assert model_of(tmp_path, QWEN25_1M, hf_overrides={"dual_chunk_attention_config": None}, max_model_len=300000)
    assert model_of(tmp_path, plain, max_model_len=300000)


def test_a_window_that_is_not_below_the_length_stays_none_in_a_small_model() -> None:
    """Phi-3.5-MoE; transformers masks by it, and does not tell its attention function."""
    phi = {"max_position_embeddings": 131072, "sliding_window": 131072, "num_hidden_layers": 32}
    assert shrink(phi)["sliding_window"] == LENGTH
    assert shrink({**phi, "sliding_window": 2047})["sliding_window"] == WINDOW


def write(folder: Path, **files: Any) -> None:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


IM_END = {"content": "<|im_end|>", "lstrip": False, "normalized": False, "special": True}


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config": {"eos_token": "<|im_end|>", "added_tokens_decoder": {"32000": IM_END}}},
        {"tokenizer_config": {"eos_token": {**IM_END, "__type": "AddedToken"}}, "added_tokens": {"<|im_end|>": 32000}},
        {
            "tokenizer_config": {"eos_token": "</s>"},
            "special_tokens_map": {"eos_token": "<|im_end|>"},
            "tokenizer": {"added_tokens": [{"id": 32000, **IM_END}], "model": {"vocab": {"</s>": 2}}},
        },
        {"tokenizer_config": {"eos_token": "<|im_end|>"}, "tokenizer": {"model": {"vocab": {"<|im_end|>": 32000}}}},
        {"tokenizer_config": {"eos_token": "<|im_end|>"}, "vocab": {"<|im_end|>": 32000}},
    ],
)
def test_the_end_of_a_turn_that_only_the_tokenizer_names_ends_answers(tmp_path: Path, files: dict[str, Any]) -> None:
    """Fine-tunes of Mistral and Llama for ChatML, which still have the base model's config.json."""
    write(tmp_path, **files)
    config = {**LLAMA_7B, "eos_token_id": 2, "vocab_size": 32002}
    assert model_of(tmp_path, config).eos_token_ids == (2, 32000)
    write(tmp_path, generation_config={"eos_token_id": [32000, 2, 5]})
    assert model_of(tmp_path, config).eos_token_ids == (32000, 2, 5)
    assert model_of(
        tmp_path,
        {**LLAMA_7B, "vocab_size": 32000},
        generation_config="vllm",
        override_generation_config={"eos_token_id": 7},
    ).eos_token_ids == (7,)


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"tokenizer_config": {"eos_token": None}, "special_tokens_map": {}},
        {
            "tokenizer_config": {"eos_token": "</s>", "added_tokens_decoder": {"2": {"content": "</s>"}}},
            "special_tokens_map": {"eos_token": "<|im_end|>"},
            "added_tokens": {"<|im_end|>": 32000},
        },
    ],
)
def test_tokenizers_that_name_no_other_end(tmp_path: Path, files: dict[str, Any]) -> None:
    """transformers reads special_tokens_map.json only where tokenizer_config.json has no `added_tokens_decoder`."""
    write(tmp_path, **files)
    assert model_of(tmp_path, {**LLAMA_7B, "eos_token_id": 2}).eos_token_ids == (2,)


def test_a_token_without_an_id_is_one_clear_error(tmp_path: Path) -> None:
    write(tmp_path, tokenizer_config={"eos_token": "</s>", "added_tokens_decoder": {"two": {"content": "</s>"}}})
    with pytest.raises(ConfigError, match="a token with an entry of an unknown form"):
        model_of(tmp_path, LLAMA_7B)


def test_groups_of_heads_are_not_divided() -> None:
    """Each group's features are normalized together."""
    arch = from_hf_config(published.config("Mamba-Codestral-7B-v0.1"))
    with pytest.raises(ConfigError, match=r"16 does not divide this model's 8 groups of state-space heads; sizes that"):
        arch.check_divides(16)
