"""The encoder of MobileNetV5 with random weights by timm's names, and Gemma 3n of transformers with it in place of
timm, which tests do without.

The reference for both this encoder and Quire's is timm 1.0.31. With the weights of
`timm.create_model("mobilenetv5_300m_enc", channel_multiplier=0.125)`, copied by name, the features of Quire's tower
before the projector differ from `forward_features` by 6.4e-7 of the norm for 768 x 768 pixels, and by 1.4e-6 for
256 x 256, in float32 on a CPU.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

_STAGES = (
    ("er_k3_s2_e4", "er_k3_s1_e4", "er_k3_s1_e4"),
    ("uir_a3_k5_s2_e6", "uir_a5_k0_s1_e4", "uir_a3_k0_s1_e4", "uir_a5_k0_s1_e4", "uir_a3_k0_s1_e4"),
    ("uir_a5_k5_s2_e6", *["uir_a5_k0_s1_e4"] * 7, "uir_a0_k0_s1_e1", *("mqa_h12_v2_d64", "uir_a0_k0_s1_e2") * 14),
    ("uir_a5_k5_s2_e6", *("mqa_h16_v1_d96", "uir_a0_k0_s1_e2") * 19),
)
"""timm's strings: kernel before the expansion, in the middle, stride, expansion; heads, stride of keys, head size."""
IMAGE_TOKEN, END_TOKEN = 121, 120
"""Of these two, and six more, the tower has the embeddings."""
_MULTIPLIER, _CHANNELS = 0.05, (8, 16, 32, 64)
"""Channels of the stages, which have 20 times as many in the published model, rounded to multiples of 8."""


class TimmTower(nn.Module):
    """Takes the place of transformers' wrapper of timm's model."""

    def __init__(self) -> None:
        super().__init__()
        self.timm_model = nn.Module()
        self._add("conv_stem.conv", 64, 3, 3, 3)
        self._add("conv_stem.conv", 64, kind="bias")
        self._add("conv_stem.bn", 64)
        inputs = 64
        for stage, (blocks, outputs) in enumerate(zip(_STAGES, _CHANNELS, strict=True)):
            for number, text in enumerate(blocks):
                self._add_block(f"blocks.{stage}.{number}", text, inputs, outputs)
                inputs = outputs
        fused = sum(_CHANNELS[2:])
        self._add_inverted("msfa.ffn", fused, 2048, expansion=2)
        self._add("msfa.norm", 2048)

    def _add(self, name: str, *shape: int, kind: str = "weight") -> None:
        module = self.timm_model
        for part in name.split("."):
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = getattr(module, part)
        spread = torch.randn(shape)
        values = 1 + 0.2 * spread if len(shape) == 1 else spread * math.prod(shape[1:]) ** -0.5
        module.register_parameter(kind, nn.Parameter(values))

    def _add_normed(self, name: str, outputs: int, inputs: int, side: int = 1) -> None:
        self._add(f"{name}.conv", outputs, inputs, side, side)
        self._add(f"{name}.bn", outputs)

    def _add_inverted(self, name: str, inputs: int, outputs: int, *, expansion: int, a: int = 0, k: int = 0) -> None:
        inner = inputs * expansion
        if a:
            self._add_normed(f"{name}.dw_start", inputs, 1, a)
        self._add_normed(f"{name}.pw_exp", inner, inputs)
        if k:
            self._add_normed(f"{name}.dw_mid", inner, 1, k)
        self._add_normed(f"{name}.pw_proj", outputs, inner)

    def _add_block(self, name: str, text: str, inputs: int, outputs: int) -> None:
        own = _settings(text)
        if text.startswith("er"):
            self._add(f"{name}.conv_exp", inputs * own["e"], inputs, 3, 3)
            self._add(f"{name}.bn1", inputs * own["e"])
            self._add(f"{name}.conv_pwl", outputs, inputs * own["e"], 1, 1)
            self._add(f"{name}.bn2", outputs)
            return
        if text.startswith("uir"):
            self._add_inverted(name, inputs, outputs, expansion=own["e"], a=own["a"], k=own["k"])
        else:
            self._add(f"{name}.norm", inputs)
            self._add(f"{name}.attn.query.proj", own["h"] * own["d"], inputs, 1, 1)
            for part in ("key", "value"):
                if own["v"] > 1:
                    self._add(f"{name}.attn.{part}.down_conv", inputs, 1, 3, 3)
                    self._add(f"{name}.attn.{part}.norm", inputs)
                self._add(f"{name}.attn.{part}.proj", own["d"], inputs, 1, 1)
            self._add(f"{name}.attn.output.proj", outputs, own["h"] * own["d"], 1, 1)
        self._add(f"{name}.layer_scale", outputs, kind="gamma")

    def forward(self, pixel_values: Tensor, **_: Any) -> Any:
        x = F.gelu(self._normed("conv_stem", pixel_values, 2), approximate="tanh")
        outputs = []
        for stage, blocks in enumerate(_STAGES):
            for number, text in enumerate(blocks):
                x = self._block(f"blocks.{stage}.{number}", text, x)
            outputs.append(x)
        small = outputs[3].repeat_interleave(2, 2).repeat_interleave(2, 3)
        x = self._inverted("msfa.ffn", torch.cat((outputs[2], small), 1))
        side = x.shape[2] // 16
        x = x.reshape(len(x), -1, 16, side, 16, side).mean((3, 5))
        return SimpleNamespace(last_hidden_state=self._norm("msfa.norm", x))

    def _block(self, name: str, text: str, x: Tensor) -> Tensor:
        own, given = _settings(text), x
        if text.startswith("er"):
            x = F.gelu(self._norm(f"{name}.bn1", self._conv(f"{name}.conv_exp", x, own["s"])), approximate="tanh")
            x = self._norm(f"{name}.bn2", self._conv(f"{name}.conv_pwl", x))
            return x if own["s"] > 1 else x + given
        if text.startswith("uir"):
            x = self._inverted(name, x, own["a"], own["k"], own["s"])
        else:
            x = self._attention(f"{name}.attn", self._norm(f"{name}.norm", x), own)
        x = x * self.get_parameter(f"timm_model.{name}.layer_scale.gamma")[:, None, None]
        return x if own.get("s", 1) > 1 else x + given

    def _inverted(self, name: str, x: Tensor, a: int = 0, k: int = 0, stride: int = 1) -> Tensor:
        x = self._normed(f"{name}.dw_start", x) if a else x
        x = F.gelu(self._normed(f"{name}.pw_exp", x), approximate="tanh")
        x = F.gelu(self._normed(f"{name}.dw_mid", x, stride), approximate="tanh") if k else x
        return self._normed(f"{name}.pw_proj", x)

    def _attention(self, name: str, x: Tensor, own: dict[str, int]) -> Tensor:
        query = self._conv(f"{name}.query.proj", x)
        images, _, rows, columns = query.shape
        query = query.view(images, own["h"], own["d"], rows * columns)
        key, value = (
            self._conv(f"{name}.{part}.proj", x)
            if own["v"] == 1
            else self._conv(
                f"{name}.{part}.proj", self._norm(f"{name}.{part}.norm", self._conv(f"{name}.{part}.down_conv", x, 2))
            )
            for part in ("key", "value")
        )
        scores = torch.einsum("ihdq,idk->ihqk", query, key.flatten(2)) / own["d"] ** 0.5
        mixed = torch.einsum("ihqk,idk->ihdq", scores.softmax(-1), value.flatten(2))
        return self._conv(f"{name}.output.proj", mixed.reshape(images, -1, rows, columns))

    def _normed(self, name: str, x: Tensor, stride: int = 1) -> Tensor:
        return self._norm(f"{name}.bn", self._conv(f"{name}.conv", x, stride))

    def _conv(self, name: str, x: Tensor, stride: int = 1) -> Tensor:
        """With zeros around an image of even sides as TensorFlow's "same" has them."""
        module: Any = self.timm_model.get_submodule(name)
        more = module.weight.shape[-1] - stride
        x = F.pad(x, (more // 2, more - more // 2) * 2)
        groups = x.shape[1] // module.weight.shape[1]
        return F.conv2d(x, module.weight, getattr(module, "bias", None), stride, groups=groups)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight = self.get_parameter(f"timm_model.{name}.weight")
        return x * (x.square().mean(1, keepdim=True) + 1e-6).rsqrt() * weight[:, None, None]


def _settings(text: str) -> dict[str, int]:
    return {found[1]: int(found[2]) for found in re.finditer(r"_([a-z])(\d+)", text)}


def write_gemma3n(folder: Path, text: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Random Gemma 3n in `folder`, and itself in transformers; without the audio part."""
    import transformers
    from transformers.models.gemma3n import modeling_gemma3n

    modeling: Any = modeling_gemma3n
    towers = {"gemma3n_vision": TimmTower, "gemma3n_audio": nn.Module}
    original = modeling.AutoModel.from_config

    def from_config(config: Any, **options: Any) -> Any:
        return towers[config.model_type]() if config.model_type in towers else original(config, **options)

    monkeypatch.setattr(modeling, "AutoModel", SimpleNamespace(from_config=from_config))
    torch.manual_seed(0)
    torch.set_num_threads(1)  # as in `families.write_model`
    config = transformers.Gemma3nConfig(
        text_config=text | {"max_position_embeddings": 512},
        vision_config={"vocab_offset": 120, "vocab_size": 8, "model_args": {"channel_multiplier": _MULTIPLIER}},
        audio_config={"vocab_offset": 128, "vocab_size": 3, "hidden_size": 8},
        image_token_id=IMAGE_TOKEN,
        audio_token_id=129,
        tie_word_embeddings=True,
    )
    model = modeling.Gemma3nForConditionalGeneration(config).train(False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and ".timm_model." not in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
            elif name.startswith("model.embed_vision."):
                parameter.normal_(std=0.2)
    model.save_pretrained(folder)
    return model
