"""The settings of a classifier's head in config.json, and their effect on the plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.engine.architecture.families import from_hf_config
from quire.engine.architecture.model_spec import ModelSpec
from quire.engine.config.engine_config import EngineConfig
from quire.engine.config.options import EngineOptions
from quire.engine.config.plan_text import plan_text
from quire.engine.config.pooling import Classes, Dense, Pooling
from quire.engine.config.resolve import resolve
from quire.engine.protocol.errors import ConfigError
from tests.fakes.tokenizers import write_model
from tests.unit.engine.config import test_pooling

BERT = test_pooling.BERT | {"architectures": ["BertForSequenceClassification"]}


def bert_spec() -> ModelSpec:
    return from_hf_config(BERT)


def configure(folder: Path, config: dict[str, Any], **options: Any) -> EngineConfig:
    write_model(folder)
    own = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(own | config))
    return resolve(EngineOptions(model=str(folder), device="cpu", load_format="dummy", **options))


def read(folder: Path, config: dict[str, Any], **options: Any) -> Pooling:
    pooling = configure(folder, config, **options).model.pooling
    assert pooling is not None
    return pooling


def classes(folder: Path, **config: Any) -> Classes:
    found = read(folder, BERT | config).classes
    assert found is not None
    return found


def test_labels_and_their_activation(tmp_path: Path) -> None:
    assert classes(tmp_path) == Classes(labels=("LABEL_0", "LABEL_1"), activation="softmax")
    named = {"id2label": {"0": "bad", "1": "good", "2": "so so"}}
    assert classes(tmp_path, **named).labels == ("bad", "good", "so so")
    assert classes(tmp_path, id2label={"0": "x"}) == Classes(labels=("x",), activation="sigmoid")
    assert classes(tmp_path, num_labels=1).activation == "sigmoid"
    assert classes(tmp_path, problem_type="multi_label_classification").activation == "sigmoid"
    assert classes(tmp_path, problem_type="single_label_classification").activation == "softmax"
    assert classes(tmp_path, num_labels=1, problem_type="regression").activation == "identity"
    identity = "torch.nn.modules.linear.Identity"
    assert classes(tmp_path, num_labels=1, sentence_transformers={"activation_fn": identity}).activation == "identity"
    assert classes(tmp_path, sbert_ce_default_activation_function=identity).activation == "identity"


def test_the_layers_of_a_head(tmp_path: Path) -> None:
    bert = read(tmp_path, BERT | {"num_labels": 3})
    assert bert.modes == ("cls",)
    assert bert.modules == (
        Dense(name="bert.pooler.dense", in_features=32, out_features=32, bias=True, activation="Tanh"),
        Dense(name="classifier", in_features=32, out_features=3, bias=True),
    )
    llama = read(tmp_path, {"architectures": ["LlamaForSequenceClassification"], "num_labels": 3})
    assert llama.modes == ("lasttoken",)
    assert llama.modules == (Dense(name="score", in_features=32, out_features=3, bias=False),)
    assert not llama.needs_all_tokens, "so prefixes are reused"


def test_the_plan(tmp_path: Path) -> None:
    text = plan_text(configure(tmp_path, BERT | {"num_labels": 1}))
    assert "classifies prompts of up to 128 tokens (--runner pooling): cls pooling, dense to 32, dense to 1" in text
    assert "1 label, sigmoid" in text


def test_heads_from_tokens(tmp_path: Path) -> None:
    overrides = {"architectures": ["LlamaForSequenceClassification"], "classifier_from_token": ["a", "b"]}
    write_model(tmp_path)
    vocabulary = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
    found = read(tmp_path, {}, hf_overrides=overrides)
    (dense,) = found.dense
    assert (dense.rows, dense.is_difference, dense.out_features) == ((vocabulary["a"], vocabulary["b"]), True, 1)
    assert found.classes == Classes(labels=("LABEL_0",), activation="sigmoid", joins_texts=True)
    found = read(tmp_path, {}, hf_overrides=overrides | {"method": "no_post_processing", "use_pad_token": True})
    assert found.classes == Classes(labels=("a", "b"), activation="softmax")


TOKENS: dict[str, Any] = {"architectures": ["LlamaForSequenceClassification"]}


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (BERT | {"num_labels": 0}, {}, "num_labels must be at least 1"),
        (BERT | {"id2label": ["a"]}, {}, "id2label must be an object"),
        (BERT | {"problem_type": "ranking"}, {}, "problem_type 'ranking' is not supported"),
        (BERT | {"sentence_transformers": {"activation_fn": "torch.nn.Tanh"}}, {}, "torch.nn.Tanh is not supported"),
        (BERT, {"runner": "generate"}, "is a classifier and cannot generate text; omit --runner generate"),
        (BERT, {"model_impl": "transformers"}, "cannot use --model-impl transformers"),
        ({"architectures": ["ElectraForSequenceClassification"]}, {}, "ElectraForSequenceClassification is not supp"),
        ({"architectures": ["InternLM2ForRewardModel"]}, {}, "InternLM2ForRewardModel is not supported; supported"),
        (TOKENS | {"classifier_from_token": ["a", "hello world"]}, {}, "has no token 'hello world'"),
        (TOKENS | {"classifier_from_token": "a"}, {}, "must be a list of tokens"),
        (TOKENS | {"classifier_from_token": ["a"], "method": "from_2_way_softmax"}, {}, "with 1 tokens"),
        (BERT | {"classifier_from_token": ["a", "b"]}, {}, "is not supported for BertForSequenceClassification"),
    ],
)
def test_what_is_refused(config: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        configure(tmp_path, config, **options)
