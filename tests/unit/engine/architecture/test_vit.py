"""What config.json may say of a tower."""

from __future__ import annotations

from typing import Any

import pytest

from quire.engine.architecture.families import from_hf_config, of_text
from quire.engine.architecture.vit_spec import ViTSpec
from quire.engine.protocol.errors import ConfigError
from tests.fakes.families import SIZES

_VISION = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 5, "num_attention_heads": 2}
_VISION |= {"image_size": 28, "patch_size": 7}


def tower_of(architecture: str, text: str, vision: dict[str, Any], **settings: Any) -> ViTSpec:
    parts = {"text_config": SIZES | {"model_type": text}, "vision_config": _VISION | vision}
    arch = from_hf_config(of_text({"architectures": [f"{architecture}ForConditionalGeneration"], **parts, **settings}))
    assert arch.media is not None
    assert isinstance(arch.media.tower, ViTSpec)
    return arch.media.tower


def test_layers_behind_the_last_output_are_not_part_of_a_tower() -> None:
    tower = tower_of("Llava", "llama", {}, vision_feature_layer=[1, -3])
    assert (tower.outputs, len(tower.layers)) == ((1, 3), 3)
    assert len(tower_of("Llava", "llama", {}).layers) == 4  # the layer before the last one, if nothing is said


@pytest.mark.parametrize(
    ("architecture", "text", "vision", "settings", "message"),
    [
        ("Llava", "llama", {"model_type": "dinov2"}, {}, "dinov2.*--language-model-only serves text alone"),
        ("Gemma4", "gemma4_text", {"model_type": "pixtral"}, {}, "'pixtral' is not supported; .*'gemma4_vision'"),
        ("Llava", "llama", {}, {"vision_feature_layer": -9}, "there are 5 layers, but it names"),
        ("Llava", "llama", {}, {"vision_feature_select_strategy": "full"}, "'full' is not supported with this"),
        ("InternVL", "qwen2", {"image_size": [28, 56]}, {}, "which are not square"),
        ("InternVL", "qwen2", {"patch_size": 0}, {}, "patch_size must be from 1 to image_size 28, got 0"),
        ("InternVL", "qwen2", {"patch_size": 32}, {}, "patch_size must be from 1 to image_size 28, got 32"),
        ("Gemma3", "gemma3_text", {}, {}, "mm_tokens_per_image 256 .* image_size 28 and patch_size 7 .* 4 by 4"),
        ("Gemma3", "gemma3_text", {}, {"mm_tokens_per_image": 9}, "mm_tokens_per_image 9 is not supported with"),
        ("Gemma3n", "gemma3n_text", {}, {"num_kv_shared_layers": 0}, "vision_config: hidden_size 32 .*: 2048"),
        ("InternVL", "qwen2", {"norm_type": "batch_norm"}, {}, "norm_type 'batch_norm' is not supported"),
        ("LlavaOnevision", "qwen2", {}, {"vision_aspect_ratio": "pad"}, "vision_aspect_ratio 'pad' is not supported"),
        ("Mistral3", "mistral", {}, {"vision_feature_layer": [-1, -2]}, "several layers"),
        ("Mistral3", "mistral", {"num_attention_heads": 16}, {}, "2 features.*two axes"),
        ("AyaVision", "cohere2", {}, {"alignment_intermediate_size": 41}, "alignment_intermediate_size 41 is not even"),
        ("Llava", "llama", {"num_attention_heads": 3}, {}, "32 is not a multiple of the number of heads, 3"),
    ],
)
def test_what_a_tower_does_not_support_is_refused(
    architecture: str, text: str, vision: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        tower_of(architecture, text, vision, **settings)
