"""`--spec-method`, `--spec-tokens` and `--speculative-config` become one configuration, or an error."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.engine.architecture.draft_head_spec import DraftHeadSpec
from quire.engine.architecture.feed_forward_spec import MoESpec
from quire.engine.architecture.model_spec import ModelSpec
from quire.engine.config import draft_heads
from quire.engine.config.engine_config import EngineConfig, ModelConfig, SpeculativeConfig
from quire.engine.config.kv_cache_groups import cache_specs
from quire.engine.config.memory_plan import MemoryPlan
from quire.engine.config.options import DEMO_MODEL, EngineOptions
from quire.engine.config.plan_text import plan_text
from quire.engine.config.resolve import resolve
from quire.engine.protocol.errors import ConfigError
from tests.unit.engine.config.test_resolve import folder, options

NGRAM = SpeculativeConfig()
OF_OWN: dict[str, Any] = {"num_speculative_tokens": 5, "prompt_lookup_min": 3}
OWN = {"method": "ngram", "prompt_lookup_max": 4, **OF_OWN}


def speculative(tmp_path: Path, **given: Any) -> SpeculativeConfig | None:
    return resolve(options(folder(tmp_path), **given)).scheduler.speculative


def speculative_of(tmp_path: Path, changes: dict[str, Any], **given: Any) -> SpeculativeConfig:
    found = resolve(options(folder(tmp_path, **changes), **given)).scheduler.speculative
    assert found is not None
    return found


def head_of(found: SpeculativeConfig) -> DraftHeadSpec:
    assert found.model is not None
    assert isinstance(found.model.architecture, DraftHeadSpec)
    return found.model.architecture


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, NGRAM),
        ({"spec_method": "none"}, None),
        ({"spec_method": "none", "spec_tokens": 3}, None),
        ({"spec_method": "ngram"}, NGRAM),
        ({"spec_tokens": 3}, SpeculativeConfig(num_speculative_tokens=3)),
        ({"speculative_config": {}}, NGRAM),
        ({"speculative_config": {"method": "ngram"}}, NGRAM),
        ({"speculative_config": {"method": "none"}}, None),
        ({"speculative_config": {"model": "[ngram]", "method": "ngram"}}, NGRAM),
        ({"speculative_config": {"model": "[ngram]"}}, NGRAM),
        ({"speculative_config": {"prompt_lookup_max": 4}}, SpeculativeConfig(prompt_lookup_min=4)),
        ({"spec_method": "none", "spec_tokens": 9, "speculative_config": OWN}, SpeculativeConfig(**OF_OWN)),
    ],
)
def test_what_is_given(tmp_path: Path, given: dict[str, Any], expected: SpeculativeConfig | None) -> None:
    assert speculative(tmp_path, **given) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"speculative_config": {"method": "eagle3"}}, "eagle3 needs a model: --spec-model"),
        ({"spec_method": "mtp"}, "mtp is not supported for LlamaForCausalLM; supported: "),
        ({"speculative_config": {"method": "mtp", "model": "a/b"}}, "mtp uses the checkpoint of"),
        ({"speculative_config": {"model": "a/b", "method": "medusa"}}, "method 'medusa' is not supported"),
        ({"speculative_config": {"method": "draft_model"}}, "draft_model needs a model: --spec-model"),
        ({"spec_method": "draft_model"}, "draft_model needs a model: --spec-model"),
        ({"spec_method": "ngram", "spec_model": "a/b"}, "method ngram has no model of its own; omit a/b"),
        ({"speculative_config": {"model": 7}}, "model must be a folder or a repository, got 7"),
        ({"spec_method": "none", "speculative_config": {"draft_tensor_parallel_size": 1}}, "needs a draft model"),
        ({"speculative_config": {"method": ["ngram"]}}, "method ['ngram'] is not supported"),
        ({"speculative_config": {"method": "ngram", "model": "a/b"}}, "method ngram has no model of its own"),
        ({"speculative_config": {"method": "ngram", "draft_sample_method": "x"}}, "draft_sample_method is not"),
        ({"speculative_config": {"num_speculative_tokens": 0}}, "num_speculative_tokens must be at least 1 and at"),
        ({"speculative_config": {"num_speculative_tokens": "5"}}, "num_speculative_tokens must be at least 1"),
        ({"speculative_config": {"prompt_lookup_min": True}}, "prompt_lookup_min must be at least 1"),
        ({"speculative_config": {"prompt_lookup_min": 5, "prompt_lookup_max": 3}}, "more than prompt_lookup_max"),
        ({"spec_tokens": 99}, "--spec-tokens must be at least 1 and at most 32, got 99"),
    ],
)
def test_what_is_refused(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        speculative(tmp_path, **given)


def test_embedding_models_have_no_speculation(tmp_path: Path) -> None:
    assert speculative(tmp_path, runner="pooling") is None
    with pytest.raises(ConfigError, match="speculative decoding is not supported by embedding models"):
        speculative(tmp_path, runner="pooling", spec_method="ngram")


def test_memory_is_reserved_for_the_logits_of_drafts(tmp_path: Path) -> None:
    few = resolve(options(folder(tmp_path), max_num_seqs=2)).scheduler
    assert few.max_sampled_tokens == 1 + few.max_drafts == 1 + NGRAM.num_speculative_tokens == 17
    assert resolve(options(folder(tmp_path), max_num_seqs=2, spec_method="none")).scheduler.max_sampled_tokens == 2


def demo(**given: Any) -> EngineConfig:
    """The demo model without its tower, which drafters do not have."""
    defaults: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 256, "language_model_only": True}
    return resolve(EngineOptions(**defaults | given))


@pytest.mark.parametrize(
    "given",
    [
        {"spec_model": str(DEMO_MODEL)},
        {"spec_model": str(DEMO_MODEL), "spec_method": "draft_model", "spec_tokens": 5},
        {"speculative_config": {"method": "draft_model", "model": str(DEMO_MODEL), "num_speculative_tokens": 5}},
        {"speculative_config": {"model": str(DEMO_MODEL)}, "spec_method": "draft_model", "spec_model": "a/b"},
        {"speculative_config": {"model": "draft_model"}, "spec_model": str(DEMO_MODEL)},
    ],
)
def test_a_draft_model_is_resolved_like_a_model(given: dict[str, Any]) -> None:
    config = demo(**given, quantization="int8")
    found = config.scheduler.speculative
    assert found is not None
    assert (found.method, found.num_speculative_tokens, found.tensor_parallel_size) == ("draft_model", 5, 1)
    assert found.model is not None
    assert found.model.architecture == config.model.architecture
    assert (found.model.dtype, found.model.max_model_len) == ("float32", 256)
    assert (found.model.quantization, config.model.quantization) == ("int8", "int8")
    assert (found.prompt_lookup_min, found.num_lookup_tokens) == (2, 16)


def test_n_grams_beside_a_draft_model_have_a_minimum_too() -> None:
    config = demo(speculative_config={"model": str(DEMO_MODEL), "prompt_lookup_min": 3, "num_speculative_tokens": 20})
    found = config.scheduler.speculative
    assert found is not None
    assert (found.prompt_lookup_min, found.num_lookup_tokens, config.scheduler.max_drafts) == (3, 16, 20)
    few = demo(speculative_config={"model": str(DEMO_MODEL), "num_speculative_tokens": 2}, max_num_seqs=4).scheduler
    assert (few.max_drafts, few.max_sampled_tokens) == (16, 17)
    many = demo(speculative_config={"model": str(DEMO_MODEL), "num_speculative_tokens": 5}, max_num_seqs=8).scheduler
    assert many.max_sampled_tokens == 8 * 6


def test_its_weights_and_cache_are_planned_on_the_last_stage() -> None:
    """A layer of the target takes as much as one of the drafter, which is the same model."""
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    plain, drafting = demo(**sizes), demo(**sizes, spec_model=str(DEMO_MODEL))
    first = demo(**sizes, speculative_config={"model": str(DEMO_MODEL), "draft_tensor_parallel_size": 1})
    (whole,) = MemoryPlan.of(demo()).weights
    before, after, on_first = MemoryPlan.of(plain), MemoryPlan.of(drafting), MemoryPlan.of(first)
    assert [b // a for a, b in zip(before.kv_block, after.kv_block, strict=True)] == [1, 3]
    assert [b // a for a, b in zip(before.kv_block, on_first.kv_block, strict=True)] == [1, 5]
    assert after.weights[0] == on_first.weights[0] == before.weights[0]
    assert on_first.weights[1] - before.weights[1] == whole
    assert 0.5 * whole < after.weights[1] - before.weights[1] < 0.6 * whole
    assert drafting.scheduler.max_drafts == 16  # n-grams beside them
    text = f"draft model {demo().model.architecture.name} from"
    assert f"stage 1 also has the {text}" in plan_text(drafting)
    assert f"stage 1 (rank 2) also has the {text}" in plan_text(first)
    assert "draft model" not in plan_text(plain)


@pytest.mark.parametrize(
    ("changes", "given", "message"),
    [
        ({"vocab_size": 99}, {}, "has a vocabulary of 99 tokens, and"),
        ({"vocab_size": 99}, {}, "of 3,072; a draft model needs the same vocabulary"),
        ({"max_position_embeddings": 200}, {}, "has 200 positions, less than the 256 tokens of a request"),
        ({"architectures": ["BertModel"], "model_type": "bert"}, {}, "draft model "),
        ({}, {"tensor_parallel_size": 4, "draft_tensor_parallel_size": 2}, "must be 1 or 4, got 2"),
    ],
)
def test_a_draft_model_that_cannot_guess_is_refused(
    tmp_path: Path, changes: dict[str, Any], given: dict[str, Any], message: str
) -> None:
    settings = json.loads((DEMO_MODEL / "config.json").read_text())
    if changes.keys() <= settings["text_config"].keys() - settings.keys():
        changes = {"text_config": settings["text_config"] | changes}
    (tmp_path / "config.json").write_text(json.dumps(settings | changes))
    (tmp_path / "model.safetensors").symlink_to(DEMO_MODEL / "model.safetensors")
    tp = given.pop("tensor_parallel_size", 1)
    with pytest.raises(ConfigError, match=re.escape(message)):
        demo(speculative_config={"model": str(tmp_path)} | given, tensor_parallel_size=tp)


MIMO = {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1, "num_key_value_heads": 4}


@pytest.mark.parametrize("method", ["mtp", "mimo_mtp", "deepseek_mtp", "nemotron_h_mtp"])
def test_the_head_of_a_checkpoint(method: str, tmp_path: Path) -> None:
    found = speculative_of(tmp_path, MIMO, speculative_config={"method": method, "num_speculative_tokens": 2})
    assert (found.method, found.num_speculative_tokens, found.reads_hidden_states) == ("mtp", 2, True)
    assert found.model is not None
    assert found.model.path == tmp_path
    assert speculative_of(tmp_path, MIMO, spec_method="mtp").num_speculative_tokens == 1


MIMO_V2: dict[str, Any] = {
    "architectures": ["MiMoV2FlashForCausalLM"],
    "head_dim": 32,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}


def test_several_heads_of_a_checkpoint(tmp_path: Path) -> None:
    """Their number is the default of the drafts, and their maximum."""
    stated = {**MIMO_V2, "num_nextn_predict_layers": 3}
    found = speculative_of(tmp_path, stated, spec_method="mtp")
    assert (found.num_speculative_tokens, head_of(found).num_heads) == (3, 3)
    with pytest.raises(ConfigError, match=r"has 3 heads .*; 4 tokens are too many; use --spec-tokens 3 or less"):
        speculative_of(tmp_path, stated, spec_method="mtp", spec_tokens=4)
    assert len(head_of(speculative_of(tmp_path, MIMO_V2, spec_method="mtp", spec_tokens=1)).layers) == 1
    head = stored_head(tmp_path, *(f"model.mtp.layers.{number}.enorm.weight" for number in (0, 2, 1)))
    assert isinstance(head, DraftHeadSpec)
    assert (head.num_heads, head.layers) == (3, head_of(found).layers)
    for names, message in (
        (["model.layers.0.mlp.up_proj.weight"], "this checkpoint has no head; omit --spec-method mtp"),
        (
            ["model.mtp.layers.0.enorm.weight", "model.mtp.layers.2.enorm.weight"],
            "this checkpoint has no head 1 of 3; omit --spec-method mtp",
        ),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            stored_head(tmp_path, *names)


def stored_head(tmp_path: Path, *names: str) -> ModelSpec:
    """The head of a checkpoint with these tensors."""
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, "x")}))
    target = resolve(options(folder(tmp_path, **MIMO_V2))).model
    return draft_heads.mtp(replace(target, load_format="safetensors")).architecture


STEP: dict[str, Any] = {
    "architectures": ["Step3p5ForCausalLM"],
    "num_hidden_layers": 2,
    "num_attention_groups": 4,
    "head_dim": 32,
    "moe_num_experts": 4,
    "moe_top_k": 2,
    "moe_intermediate_size": 64,
    "share_expert_dim": 64,
    "moe_layers_enum": "1",
    "sliding_window": 32,
    "layer_types": ["full_attention", *["sliding_attention"] * 4],
}


@pytest.mark.parametrize("family", [MIMO_V2, STEP], ids=["MiMo-V2", "Step 3.5"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_no_more_heads_than_tokens(family: dict[str, Any], count: int, tmp_path: Path) -> None:
    """The windows of heads that read each other's output are longer by the tokens that are computed again."""
    asked = {"max_model_len": 256, "spec_method": "mtp", "spec_tokens": count}
    config = resolve(options(folder(tmp_path, **family, num_nextn_predict_layers=3), **asked))
    found = config.scheduler.speculative
    assert found is not None
    head = head_of(found)
    assert (head.num_heads, len(head.layers), found.num_speculative_tokens) == (count, count, count)
    specs = cache_specs(head, 1, 256, "float32", config.cache.block_size)
    (window,) = {kept.window for layer in specs for kept in layer}
    attention = head.layers[0].attention
    assert attention is not None
    assert attention.window is not None
    assert window == attention.window + (count - 1) * head.is_chained


def test_several_heads_beside_recurrent_states_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No family has both."""
    states = {"architectures": ["NemotronHForCausalLM"], "hybrid_override_pattern": "M*", "num_hidden_layers": 2}
    states |= {"num_key_value_heads": 4, "head_dim": 32, "mamba_num_heads": 8, "mamba_head_dim": 16}
    states |= {"ssm_state_size": 16, "mtp_hybrid_override_pattern": "**"}
    mtp = draft_heads.mtp

    def several(target: ModelConfig) -> ModelConfig:
        head = mtp(target)
        assert isinstance(head.architecture, DraftHeadSpec)
        return replace(head, architecture=replace(head.architecture, num_heads=2))

    monkeypatch.setattr(draft_heads, "mtp", several)
    with pytest.raises(ConfigError, match="several heads are not supported; use --spec-tokens 1"):
        speculative_of(tmp_path, states, spec_method="mtp")
    assert speculative_of(tmp_path, states, spec_method="mtp", spec_tokens=1).num_speculative_tokens == 1


EXAONE: dict[str, Any] = {
    "architectures": ["ExaoneMoeForCausalLM"],
    "num_key_value_heads": 4,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "num_hidden_layers": 3,
    "sliding_window": 32,
}


@pytest.mark.parametrize(
    ("stated", "window"),
    [
        ({}, 32),
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, None),
        ({"mtp_layer_types": ["full_attention"]}, None),
        ({"mtp_layer_types": ["sliding_attention"], "mtp_sliding_windows": [16]}, 16),
    ],
)
def test_the_window_of_exaones_head(stated: dict[str, Any], window: int | None, tmp_path: Path) -> None:
    """With rotary positions in any case, which the target's layers without windows do not have."""
    (layer,) = head_of(speculative_of(tmp_path, EXAONE | stated, spec_method="mtp")).layers
    assert layer.attention is not None
    assert layer.attention.rope is not None
    assert layer.attention.window == window


def test_layers_of_nemotrons_head(tmp_path: Path) -> None:
    def kinds(**stated: Any) -> list[tuple[bool, bool]]:
        settings = {"architectures": ["NemotronHForCausalLM"], "hybrid_override_pattern": "ME*", "num_hidden_layers": 3}
        settings |= {"num_key_value_heads": 4, "head_dim": 32, "moe_intermediate_size": 64, "mamba_num_heads": 8}
        settings |= {"moe_shared_expert_intermediate_size": 64, "mamba_head_dim": 16, "ssm_state_size": 16}
        layers = head_of(speculative_of(tmp_path, settings | stated, spec_method="mtp")).layers
        return [(each.attention is not None, isinstance(each.feed_forward, MoESpec)) for each in layers]

    attention, experts, mlp = (True, False), (False, True), (False, False)
    assert kinds() == [attention, experts]
    assert kinds(mtp_hybrid_override_pattern="**E-") == [attention, attention, experts, mlp]
    assert kinds(mtp_layers_block_type=["attention", "moe"], mtp_hybrid_override_pattern="*") == [attention, experts]
    with pytest.raises(ConfigError, match="layers with recurrent states are not supported in a head"):
        kinds(mtp_hybrid_override_pattern="*M")


def test_a_head_is_in_the_plan(tmp_path: Path) -> None:
    given = options(folder(tmp_path, **MIMO), pipeline_parallel_size=2, tensor_parallel_size=2)
    plain, drafting = resolve(given), resolve(replace(given, spec_method="mtp"))
    assert f"stage 1 also has the mtp head from {tmp_path}, for up to 1 tokens at once" in plan_text(drafting)
    before, after = MemoryPlan.of(plain), MemoryPlan.of(drafting)
    assert after.weights[0] == before.weights[0]
    layer, vectors = 256 * (256 + 256 + 640 * 3) // 2 * 4, 256 * (5 + 2 * 256) * 4
    biases = (256 + 2 * 128) // 2 * 4
    assert after.weights[1] - before.weights[1] == layer + 256 * 256 * 4 // 2 + vectors + biases + 2048 * 256 * 4 // 2
    assert after.kv_block[1] * 3 == before.kv_block[1] * 4
