"""The settings that families read from config.json, their tensors in a checkpoint, and the resulting layers. Other
tests compare the whole with transformers, for some families in each run."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from quire.engine.architecture.attention_spec import MLASpec
from quire.engine.architecture.families import from_hf_config
from quire.engine.architecture.families.family import windows
from quire.engine.architecture.feed_forward_spec import MLPSpec
from quire.engine.architecture.model_spec import LayerSpec, ModelSpec
from quire.engine.architecture.residual_spec import NormedResidualSpec
from quire.engine.architecture.spec_parts import NormSpec
from quire.engine.checkpoints.checkpoint import find
from quire.engine.distributed.communicator import Parallel
from quire.engine.layers.kv_cache import LayerCache
from quire.engine.layers.linear import Partition, stacked
from quire.engine.layers.weight import Weight
from quire.engine.models.decoder_layer import FeedForwardLayer, LayerStep
from quire.engine.protocol.errors import ConfigError

HEADS, HEAD_DIM, HIDDEN = {"q": 2, "k": 1, "v": 1}, 4, 8
SIZES = {
    "vocab_size": 32,
    "hidden_size": HIDDEN,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS["q"],
    "num_key_value_heads": HEADS["k"],
    "head_dim": HEAD_DIM,
}


def spec(name: str, **settings: Any) -> ModelSpec:
    return from_hf_config({"architectures": [name], **SIZES, **settings})


@pytest.mark.parametrize("name", ["GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM"])
def test_the_first_gemmas_store_norms_minus_one(name: str) -> None:
    arch = spec(name)
    norms = {arch.norm, *(norm for each in arch.layers for norm in (each.attention_norm, each.feed_forward_norm))}
    assert {norm and norm.offset for norm in norms} == {1.0}


def test_windows_without_types_are_those_of_the_last_layers() -> None:
    config = {"sliding_window": 4, "num_hidden_layers": 3}
    assert windows({**config, "max_window_layers": 2}) == [None, None, 4]
    assert windows(config) == [4, 4, 4]
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert windows({**config, "max_window_layers": 2, "layer_types": kinds}) == [4, None, 4]


@pytest.mark.parametrize("mscale", [0.707, 1.0])
def test_yarn_makes_the_scores_of_deepseek_larger(mscale: float) -> None:
    """DeepSeek's own code: softmax_scale * mscale * mscale, with mscale = 0.1 * mscale_all_dim * ln(factor) + 1."""
    yarn = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0}
    experts = {
        "n_routed_experts": 8,
        "moe_intermediate_size": 16,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
    }
    arch = spec("DeepseekV3ForCausalLM", rope_scaling={**yarn, "mscale_all_dim": mscale}, **experts)
    attention = arch.layers[0].attention
    assert isinstance(attention, MLASpec)
    assert attention.scale == pytest.approx(192**-0.5 * (0.1 * mscale * math.log(40) + 1) ** 2)


def rows_of(arch: ModelSpec) -> dict[str, list[int] | None]:
    """The rows of queries, keys and values of the second layer in the checkpoint's tensors; None: all, in order."""
    parts = [Partition(name, heads * HEAD_DIM, 0, heads * HEAD_DIM) for name, heads in HEADS.items()]
    weight = Weight((sum(part.length for part in parts), HIDDEN), *stacked(parts, (HIDDEN,)))
    found = {shard.part: stored.rows for shard, stored in find("layers.1.attention.qkv.weight", weight, arch)}
    return {part: None if rows is None else rows.tolist() for part, rows in found.items()}


def test_parts_of_a_fused_matrix_follow_each_other() -> None:
    arch = spec("Phi3ForCausalLM")
    assert rows_of(arch) == {"q": [*range(8)], "k": [*range(8, 12)], "v": [*range(12, 16)]}


def test_neighbouring_rotary_features_are_loaded_as_halves() -> None:
    arch = spec("LlamaForCausalLM", rope_interleave=True)
    assert rows_of(arch) == {"q": [0, 2, 1, 3, 4, 6, 5, 7], "k": [0, 2, 1, 3], "v": None}
    assert rows_of(spec("LlamaForCausalLM")) == {"q": None, "k": None, "v": None}


def test_the_residual_multiplier_applies_to_the_feed_forward_layer() -> None:
    def added(multiplier: float) -> torch.Tensor:
        torch.manual_seed(0)
        norm = NormSpec(eps=1e-6)
        layer = FeedForwardLayer(
            LayerSpec(
                attention=None,
                attention_norm=None,
                feed_forward=MLPSpec(intermediate_size=16),
                feed_forward_norm=norm,
                residual_multiplier=multiplier,
            ),
            HIDDEN,
            Parallel(),
        )
        for weight in layer.parameters():
            nn.init.normal_(weight)
        x = torch.randn(3, HIDDEN)
        batch: Any = SimpleNamespace(adapters_of=lambda last_tokens: None)  # all that is read
        out: torch.Tensor
        out, residual = layer(x, None, LayerStep(batch, None, LayerCache()))
        assert torch.equal(residual, x)
        return out

    torch.testing.assert_close(added(0.25), 0.25 * added(1.0))


def test_only_plain_layers_are_parallel() -> None:
    """The classes of other residual paths would ignore it."""
    common: dict[str, Any] = dict.fromkeys(("attention", "attention_norm", "feed_forward", "feed_forward_norm"))
    with pytest.raises(AssertionError):
        LayerSpec(**common, residual=NormedResidualSpec(), is_parallel=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 32}, "the tower has features of size 32"),
        ({"num_heads": 3}, "is not a multiple of the number of heads, 3"),
        ({"hidden_act": "mish"}, "the activation 'mish' is not supported"),
        ({"depth": "many"}, "a value that Qwen2VLForConditionalGeneration cannot use"),
    ],
)
def test_a_tower_that_is_not_supported_can_be_left_out(changes: dict[str, Any], message: str) -> None:
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2} | changes
    config: dict[str, Any] = {**SIZES, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config |= {"head_dim": 16, "vision_config": vision}
    config |= {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    config |= {"architectures": ["Qwen2VLForConditionalGeneration"]}
    with pytest.raises(ConfigError, match=rf"{message}.*; with --language-model-only, the model takes only text"):
        from_hf_config(config)
    assert from_hf_config(config, media=False).media is None


def test_ernie_vl_is_the_same_as_published_and_in_transformers_format() -> None:
    text = SIZES | {"moe_k": 2, "rope_theta": 500000.0, "head_dim": 12, "moe_intermediate_size": [8, 6]}
    names = {"architectures": ["Ernie4_5_VLMoeForConditionalGeneration"]}
    turns = {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0, "mrope_section": [2, 2, 2]}}
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 128, "num_heads": 2}
    kinds = {"mlp_layer_types": ["dense", "sparse"], "moe_num_experts": 8}
    converted = from_hf_config(names | text | turns | kinds | {"vision_config": vision})
    layers: dict[str, Any] = {
        "moe_num_experts": [8, 8],
        "moe_layer_start_index": [1, 1],
        "moe_layer_end_index": [29, 28],
    }
    layers |= {"im_patch_id": 100295, "rope_scaling": {"type": "default", "mrope_section": [2, 2, 2]}}
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "mlp_ratio": 4, "num_heads": 2}
    assert from_hf_config(names | text | layers | {"vision_config": vision}) == converted
    with pytest.raises(ConfigError, match="moe_num_experts \\[8, 4\\]: different numbers"):
        from_hf_config(names | text | layers | {"moe_num_experts": [8, 4], "vision_config": vision})


def test_deepseek_ocr_2_is_the_same_as_published_and_in_transformers_format() -> None:
    text = SIZES | {"num_experts_per_tok": 2, "n_routed_experts": 4, "moe_intermediate_size": 8}
    reader: dict[str, Any] = {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
    }
    reader |= {"num_key_value_heads": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}}
    vision = {"sam_config": {"hidden_size": 768}, "encoder_config": reader}
    converted = from_hf_config(
        {"architectures": ["DeepseekOcr2ForConditionalGeneration"], **text, "vision_config": vision}
    )
    sam: dict[str, Any] = {"width": 768, "layers": 12, "heads": 12, "downsample_channels": [512, 1024]}
    width = {"qwen2-0-5b": {"dim": 896}, "sam_vit_b": sam | {"global_attn_indexes": [2, 5, 8, 11]}}
    published = from_hf_config(
        {"architectures": ["DeepseekOCR2ForCausalLM"], **text, "vision_config": {"width": width}}
    )
    assert published.layers == converted.layers
    assert published.media == converted.media
