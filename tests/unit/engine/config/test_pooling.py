"""The settings that sentence-transformers folders declare, and their effect on the plan."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from quire.engine.architecture.families.tensors import checkpoint_tensors
from quire.engine.config import pooling
from quire.engine.config.engine_config import EngineConfig
from quire.engine.config.options import EngineOptions
from quire.engine.config.plan_text import plan_text
from quire.engine.config.pooling import Pooling
from quire.engine.config.resolve import fetch_weights, resolve
from quire.engine.protocol.errors import ConfigError
from quire.server.text.chat_template import ChatTemplate
from tests.fakes.sentence import DENSE, NORMALIZE, POOLING, TRANSFORMER, write_modules
from tests.fakes.tokenizers import write_model

BERT: dict[str, Any] = {
    "architectures": ["BertModel"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 320,
    "max_position_embeddings": 128,
}
POOLED = [(TRANSFORMER, ""), (POOLING, "1_Pooling")]
PROJECTED = [*POOLED, (DENSE, "2_Dense")]


def read(folder: Path, config: Mapping[str, Any] = MappingProxyType({})) -> Pooling:
    return pooling.read(folder, config, 32, default="mean")


def configure(folder: Path, **options: Any) -> EngineConfig:
    return resolve(EngineOptions(model=str(folder), device="cpu", load_format="dummy", **options))


def bert(folder: Path, **changes: Any) -> Path:
    write_model(folder)
    (folder / "config.json").write_text(json.dumps(BERT | changes))
    return folder


def module(folder: Path, place: str, **config: Any) -> None:
    (folder / place).mkdir(exist_ok=True)
    (folder / place / "config.json").write_text(json.dumps(config))


def listed(folder: Path, *modules: tuple[str, str]) -> None:
    entries = [{"idx": i, "name": str(i), "path": place, "type": kind} for i, (kind, place) in enumerate(modules)]
    (folder / "modules.json").write_text(json.dumps(entries))


def test_a_folder_without_modules_has_the_default(tmp_path: Path) -> None:
    assert read(tmp_path) == Pooling(modes=("mean",), modules=("normalize",), size=32)


@pytest.mark.parametrize(
    ("settings", "modes"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, ("cls",)),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, ("max", "mean")),
        ({"pooling_mode_mean_sqrt_len_tokens": True}, ("mean_sqrt_len",)),
        ({"pooling_mode_weightedmean_tokens": True, "pooling_mode_lasttoken": True}, ("weightedmean", "lasttoken")),
        ({"pooling_mode": "lasttoken"}, ("lasttoken",)),
        ({"pooling_mode": ["mean", "cls"]}, ("cls", "mean")),
    ],
)
def test_modes_by_their_old_switches_and_by_name(
    settings: dict[str, Any], modes: tuple[str, ...], tmp_path: Path
) -> None:
    module(tmp_path, "1_Pooling", word_embedding_dimension=32, **settings)
    listed(tmp_path, *POOLED)
    found = read(tmp_path)
    assert found.modes == modes
    assert found.size == 32 * len(modes)
    assert not found.is_normalized
    assert found.needs_all_tokens == (modes != ("lasttoken",))


def test_everything_else(tmp_path: Path) -> None:
    (tmp_path / "1_Pooling").mkdir()
    write_modules(
        tmp_path,
        "mean",
        {},
        max_seq_length=100,
        do_lower_case=True,
        prompts={"query": "query: ", "document": ""},
        default_prompt_name="query",
        similarity_fn_name="dot",
    )
    found = read(tmp_path, {"matryoshka_dimensions": [16, 8]})
    assert found == Pooling(
        modes=("mean",),
        modules=("normalize",),
        size=32,
        is_matryoshka=True,
        dimensions=(8, 16),
        max_length=100,
        lower_case=True,
        prompts={"query": "query: ", "document": ""},
        default_prompt="query",
        similarity="dot",
    )
    assert found.is_normalized
    assert read(tmp_path, {"is_matryoshka": True}).dimensions == ()
    module(tmp_path, "3_Dense", in_features=32, out_features=8, bias=False, activation_function="torch.nn.Identity")
    listed(tmp_path, *POOLED, (DENSE, "3_Dense"), (NORMALIZE, ""))
    (dense,) = read(tmp_path).dense
    assert (dense.folder, dense.in_features, dense.out_features) == ("3_Dense", 32, 8)
    assert (dense.bias, dense.activation) == (False, "Identity")
    assert read(tmp_path).size == 8


@pytest.mark.parametrize(
    ("modules", "settings", "message"),
    [
        ([(TRANSFORMER, "0_Transformer"), POOLED[1]], {}, "a Transformer in the subfolder '0_Transformer'"),
        (POOLED, {"pooling_mode_attention": True}, "pooling_mode_attention is not supported"),
        (POOLED, {"pooling_mode": "xpool"}, "xpool is not supported; supported are cls,"),
        (POOLED, {"word": 1}, "has no pooling mode"),
        (POOLED[:1], {}, "without a Pooling module"),
        ([("a.WordEmbeddings", ""), POOLED[1]], {}, "WordEmbeddings at index 0 is not supported"),
        ([*POOLED, ("sentence_transformers.models.LSTM", "2")], {"pooling_mode": "mean"}, "LSTM at index 2 is not"),
        (PROJECTED, {"pooling_mode": ["mean", "max"]}, "in_features is 32, but the input has size 64"),
    ],
)
def test_unsupported_settings_are_named(
    modules: list[tuple[str, str]], settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    module(tmp_path, "1_Pooling", **settings)
    module(tmp_path, "2_Dense", in_features=32, out_features=8)
    listed(tmp_path, *modules)
    with pytest.raises(ConfigError, match=message):
        read(tmp_path)


@pytest.mark.parametrize(
    ("name", "value"), [("activation_function", "torch.nn.Softmax"), ("module_input_name", "token_embeddings")]
)
def test_dense_modules_of_another_kind_are_refused(name: str, value: str, tmp_path: Path) -> None:
    module(tmp_path, "1_Pooling", pooling_mode="mean")
    module(tmp_path, "2_Dense", in_features=32, out_features=8, **{name: value})
    listed(tmp_path, *PROJECTED)
    with pytest.raises(ConfigError, match=f"{value.rpartition('.')[2]}'? is not supported"):
        read(tmp_path)


def test_a_default_prompt_must_be_one_and_pooled(tmp_path: Path) -> None:
    write_modules(tmp_path, prompts={"query": "q: "}, default_prompt_name="other")
    with pytest.raises(ConfigError, match="default_prompt_name 'other' is not one of its prompts"):
        read(tmp_path)
    write_modules(tmp_path, prompts={"query": "q: "}, default_prompt_name="query")
    module(tmp_path, "1_Pooling", pooling_mode="mean", include_prompt=False)
    with pytest.raises(ConfigError, match="include_prompt"):
        read(tmp_path)
    module(tmp_path, "1_Pooling", pooling_mode="lasttoken", include_prompt=False)
    assert read(tmp_path).include_prompt


# --- the plan -------------------------------------------------------------------------------------------------


def test_an_encoder_runs_whole_prompts_and_keeps_nothing(tmp_path: Path) -> None:
    config = configure(write_modules(bert(tmp_path), "mean", {}, max_seq_length=100))
    assert config.model.pooling is not None
    assert config.model.max_model_len == 100
    assert (config.cache.num_blocks, config.cache.enable_prefix_caching) == (0, False)
    assert not config.scheduler.enable_chunked_prefill
    assert not config.scheduler.dynamic_chunking
    assert config.scheduler.max_num_batched_tokens >= 100
    text = plan_text(config)
    assert "embeds prompts of up to 100 tokens (--runner pooling): mean pooling, normalize: 32 numbers" in text
    assert "no KV cache" in text
    assert configure(tmp_path, max_model_len=128).model.max_model_len == 128
    with pytest.raises(ConfigError, match="--max-model-len 129 is more than the model's 128 positions"):
        configure(tmp_path, max_model_len=129)
    with pytest.raises(ConfigError, match="an encoder needs --max-num-batched-tokens of at least the model length"):
        configure(tmp_path, max_num_batched_tokens=99)
    with pytest.raises(ConfigError, match="Not enough memory: needs"):
        configure(bert(tmp_path, hidden_size=1 << 16, intermediate_size=1 << 20))


def test_who_embeds(tmp_path: Path) -> None:
    write_model(tmp_path)
    path = tmp_path / "config.json"
    llama = json.loads(path.read_text())
    assert configure(tmp_path).model.pooling is None
    asked = configure(tmp_path, runner="pooling")
    assert asked.model.pooling == Pooling(modes=("lasttoken",), modules=("normalize",), size=32)
    assert asked.cache.enable_prefix_caching
    assert asked.scheduler.enable_chunked_prefill
    assert "lasttoken pooling, normalize" in plan_text(asked)
    assert "KV cache holds" in plan_text(asked)

    path.write_text(json.dumps(llama | {"architectures": ["LlamaModel"]}))
    headless = configure(tmp_path)
    assert headless.model.pooling is not None
    assert headless.model.architecture == asked.model.architecture
    with pytest.raises(ConfigError, match="LlamaModel has no head to generate text; use it"):
        configure(tmp_path, runner="generate")

    path.write_text(json.dumps(llama))
    write_modules(tmp_path, "mean", max_seq_length=64)
    declared = configure(tmp_path)
    assert declared.model.pooling is not None
    assert declared.model.pooling.modes == ("mean",)
    assert declared.model.max_model_len == 64
    assert not declared.cache.enable_prefix_caching, "mean pooling needs the hidden states of all tokens"
    assert configure(tmp_path, runner="generate").model.pooling is None

    path.write_text(json.dumps(llama | {"is_causal": False}))
    plan = plan_text(configure(tmp_path))
    assert "mean pooling" in plan
    assert "no KV cache" in plan
    assert configure(tmp_path, runner="generate").model.pooling is None
    path.write_text(json.dumps(llama | {"is_causal": False, "architectures": ["LlamaForSequenceClassification"]}))
    with pytest.raises(ConfigError, match="bidirectional attention in a decoder are not supported"):
        configure(tmp_path)


def test_missing_weights_of_a_dense_module_are_named_at_once(tmp_path: Path) -> None:
    bert(tmp_path)
    write_modules(tmp_path)
    module(tmp_path, "2_Dense", in_features=32, out_features=8)
    listed(tmp_path, *PROJECTED)
    options = EngineOptions(model=str(tmp_path), device="cpu")
    config = resolve(options)
    tensors = checkpoint_tensors(config.model.architecture, has_head=False)
    save_file(
        {name: np.zeros(each.shape, np.float32) for name, each in tensors.items()}, tmp_path / "model.safetensors"
    )
    with pytest.raises(ConfigError, match=r"2_Dense: no \*.safetensors found"):
        fetch_weights(options, config)


def test_late_interaction_has_the_texts_of_the_processor(tmp_path: Path) -> None:
    """The template escapes them: they are no part of its code."""
    config = {"embedding_dim": 16, "architectures": ["ColQwen2ForRetrieval"]}
    plain = pooling.read(tmp_path, config, 32, default="lasttoken", token_layer="proj")
    assert (plain.is_multi_vector, plain.needs_all_tokens, plain.size) == (True, True, 16)
    assert (plain.prompts, plain.suffix) == ({"query": "Query: "}, f"{'<|endoftext|>' * 10}\n")
    assert plain.text() == "a vector of each token, dense to 16, normalize: 16 numbers, to be compared by maxsim"
    settings = {"query_prefix": "{{'\"Q", "visual_prompt_prefix": "%}\n<|image_pad|>"}
    (tmp_path / "processor_config.json").write_text(json.dumps(settings))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"pad_token": {"content": "_"}}))
    found = pooling.read(tmp_path, config, 32, default="lasttoken", token_layer="proj")
    assert found.chat_template is not None
    messages: list[Any] = [{"content": [{"type": "image"}, {"type": "text", "text": "a"}]}, {"content": "b"}]
    shown = ChatTemplate(found.chat_template, {}).render(messages, {})
    assert shown == "%}\n<|image_pad|>" + "".join(f"{{{{'\"Q{text}__________\n" for text in "ab")


def test_the_texts_of_colpali(tmp_path: Path) -> None:
    """Prompts have the special tokens. PaliGemma's processor completes those of images."""
    config = {"architectures": ["ColPaliForRetrieval"]}
    found = pooling.read(tmp_path, config, 32, default="lasttoken", token_layer="proj")
    assert (found.prompts, found.suffix) == ({"query": "<bos>Question: "}, f"{'<pad>' * 10}\n")
    assert not found.adds_special_tokens
    assert found.chat_template is not None
    messages: list[Any] = [{"content": [{"type": "image"}]}, {"content": "a"}]
    shown = ChatTemplate(found.chat_template, {}).render(messages, {})
    assert shown == f"<image>Describe the image.<bos>Question: a{found.suffix}"


def test_the_pooling_of_jinas_embeddings_v4(tmp_path: Path) -> None:
    found = pooling.read(tmp_path, {"single_vector_pool_strategy": "mean"}, 32, default="lasttoken")
    assert (found.modes, found.pools_items, found.is_normalized) == (("mean",), True, True)
    with pytest.raises(ConfigError, match="single_vector_pool_strategy 'max' is not supported"):
        pooling.read(tmp_path, {"single_vector_pool_strategy": "max"}, 32, default="lasttoken")
