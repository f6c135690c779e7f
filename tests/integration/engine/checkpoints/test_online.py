"""16-bit checkpoints that are quantized while they are loaded, against transformers with the rounded numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.engine.architecture.families import transformers_backend
from quire.engine.architecture.quantization.online import Online
from quire.engine.config.memory_plan import MemoryPlan
from quire.engine.config.plan_text import plan_text
from quire.engine.distributed.communicator import Parallel
from quire.engine.models.transformers_backend import describe
from quire.engine.protocol.errors import ConfigError
from tests.fakes.families import CASES, name_as_published, write_model
from tests.fakes.model_logits import check_logits, configure, logits
from tests.fakes.quantized_checkpoints import E2M1
from tests.integration.engine.checkpoints.test_quantized import (
    _SIZES,
    KINDS,
    KINDS_OF_MXFP4,
    WITH_EXPERTS,
    all_layouts,
    configured,
    packed_bytes,
    whole_model,
)
from tests.integration.engine.models.test_towers import item_of

_LINEAR = re.compile(r"\.(\w*proj|c_attn|c_fc|query_key_value|\w*dense\w*|kv_a_proj_with_mqa)(\.weight)?$")


def fp8(weight: Tensor) -> Tensor:
    scales = weight.abs().amax(-1, keepdim=True) / 448
    return (weight / scales).to(torch.float8_e4m3fn).float() * scales


def mxfp4(weight: Tensor) -> Tensor:
    grouped = weight.unflatten(-1, (-1, 32))  # type: ignore[no-untyped-call]
    largest = grouped.abs().amax(-1, keepdim=True)
    powers = largest.log2().floor()
    powers += largest >= 1.75 * powers.exp2()
    scales = (powers - 2).exp2()
    nearest = E2M1[((grouped / scales)[..., None] - E2M1).abs().argmin(-1)]
    return torch.flatten(nearest * scales, -2)


def int8(weight: Tensor) -> Tensor:
    scales = weight.abs().amax(-1, keepdim=True) / 127.5
    return (weight / scales).round().clamp(-128, 127) * scales


def int4(weight: Tensor, group: int) -> Tensor:
    grouped = weight.unflatten(-1, (-1, group))  # type: ignore[no-untyped-call]
    low, high = grouped.amin(-1, keepdim=True).clamp(max=0), grouped.amax(-1, keepdim=True).clamp(min=0)
    scales = (high - low) / 15
    zeros = (-low / scales).round()
    return torch.flatten(((grouped / scales).round() + zeros).clamp(0, 15).sub(zeros) * scales, -2)


ROUNDED: dict[str, Callable[[Tensor], Tensor]] = {
    "fp8": fp8,
    "mxfp4": mxfp4,
    "int8": int8,
    "int4": partial(int4, group=128),
}


def write(folder: Path, kind: str, quantization: str) -> Any:
    """Write a checkpoint; returns transformers' model of the rounded numbers. int4 with experts has groups of 64; with
    int8 and int4, the head is int8."""
    architecture, changes = (KINDS | KINDS_OF_MXFP4)[kind]
    write_model(architecture, _SIZES | changes, folder)
    numbers, count, function = load_file(folder / "model.safetensors"), 0, ROUNDED[quantization]
    if quantization == "int4" and kind in ("experts", "latent"):
        function = partial(int4, group=64)
    for name, tensor in numbers.items():
        if _LINEAR.search(name) and "kv_b_proj" not in name and (quantization != "mxfp4" or ".experts." in name):
            is_transposed = kind == "transposed" or (kind == "stacked" and ".experts." in name)
            rounded = function((tensor.mT if is_transposed else tensor).float())
            numbers[name], count = (rounded.mT if is_transposed else rounded).contiguous(), count + 1
    assert count
    if quantization in ("int8", "int4"):
        head = next(name for name in numbers if name in ("lm_head.weight", "embed_out.weight"))
        numbers[head] = int8(numbers[head].float())
    (folder / "whole").mkdir()
    (folder / "whole" / "config.json").write_text((folder / "config.json").read_text())
    save_file(numbers, folder / "whole" / "model.safetensors", {"format": "pt"})
    return whole_model(architecture, folder)


@pytest.mark.parametrize(
    ("quantization", "kind"),
    [("fp8", kind) for kind in (*KINDS, "stacked")] + [("mxfp4", kind) for kind in WITH_EXPERTS],
)
def test_logits_are_those_of_the_rounded_numbers(quantization: str, kind: str, tmp_path: Path) -> None:
    model = write(tmp_path, kind, quantization)
    check_logits(model, all_layouts(tmp_path, kind, quantization=quantization), tolerance=1e-3)


@pytest.mark.parametrize(("quantization", "kind"), [("fp8", "experts"), ("mxfp4", "latent"), ("mxfp4", "stacked")])
def test_transformers_implementation_rounds_the_checkpoints_tensors(
    quantization: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its experts are stacks, for which the checkpoint has matrices, or transposed stacks."""
    monkeypatch.setattr(transformers_backend, "describe", describe.describe)
    model, options = write(tmp_path, kind, quantization), {"model_impl": "transformers", "quantization": quantization}
    check_logits(model, [configured(tmp_path, tp, 1, False, **options) for tp in (1, 2)], tolerance=1e-3)
    loaded, planned, _ = packed_bytes(tmp_path, **options)
    assert abs(loaded - planned) <= 0.05 * planned


def test_experts_for_media_are_quantized(tmp_path: Path) -> None:
    """Like those for text; the tower stays as it is."""
    architecture, settings = CASES["ERNIE 4.5 VL"]
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 6, 4]}
    text = settings["text_config"] | _SIZES | {"moe_intermediate_size": [64, 32], "rope_parameters": rope}
    ids = {"image_start_token_id": 7, "image_token_id": 120, "image_end_token_id": 8, "tie_word_embeddings": False}
    model = write_model(architecture, {**settings, **ids, "text_config": text}, tmp_path)
    name_as_published(architecture, tmp_path, model)
    numbers, whole = load_file(tmp_path / "model.safetensors"), tmp_path / "whole"
    for name in [name for name in numbers if name.startswith("model.layers.") and _LINEAR.search(name)]:
        numbers[name] = fp8(numbers[name])
    whole.mkdir()
    (whole / "config.json").write_text((tmp_path / "config.json").read_text())
    save_file(numbers, whole / "model.safetensors", {"format": "pt"})
    arrays, item = item_of(model, (1, 4, 6), "image")
    tokens, media = torch.tensor([5, 6, 7, *[120] * 6, 8, 9, 10]), [(arrays, structs.replace(item, offset=3))]
    expected = logits(configure(whole, max_model_len=64), tokens, Parallel(), media=media)
    config = configure(tmp_path, max_model_len=64, quantization="fp8")
    assert (logits(config, tokens, Parallel(), media=media) - expected).norm() <= 1e-3 * expected.norm()


def test_weights_take_the_bytes_that_are_planned(tmp_path: Path) -> None:
    write_model("LlamaForCausalLM", _SIZES, tmp_path)
    plain, _, _ = packed_bytes(tmp_path)
    for tp in (1, 2):
        loaded, planned, whole = packed_bytes(tmp_path, tensor_parallel_size=tp, quantization="fp8")
        assert whole == 1, "only the head is not quantized"
        assert abs(loaded - planned) <= 0.03 * planned
        assert planned < 0.6 * plain


def test_the_plan_says_how_weights_are_multiplied(tmp_path: Path) -> None:
    write_model("Qwen3MoeForCausalLM", _SIZES | {"num_experts": 4, "head_dim": 32}, tmp_path)
    config = configure(tmp_path, max_model_len=64, quantization="mxfp4")
    expected = "online mxfp4: e2m1 weights, widened in registers (experts); float32 weights (attention), on cpu"
    assert expected in plan_text(config)
    assert config.cache.dtype == "bfloat16"
    plain, mixed = (MemoryPlan.of(configure(tmp_path, max_model_len=64, quantization=q)) for q in (None, "mxfp4"))
    assert mixed.weights[0] < plain.weights[0]


def test_what_cannot_be_quantized_is_refused(tmp_path: Path) -> None:
    write_model("LlamaForCausalLM", _SIZES, tmp_path)
    with pytest.raises(ConfigError, match="mxfp4 quantizes experts, and LlamaForCausalLM has none; use fp8"):
        configure(tmp_path, quantization="mxfp4")
    assert isinstance(method := configure(tmp_path, quantization="fp8").model.quantized, Online)
    assert list(method.modules) == sorted(method.modules), "packed weights are known by it in all processes"
    with pytest.raises(ConfigError, match="--quantization fp8 is not supported with --load-format dummy"):
        configure(tmp_path, quantization="fp8", load_format="dummy")
    config = json.loads((tmp_path / "config.json").read_text())
    odd = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "head_dim": 32, "moe_intermediate_size": 48}
    (tmp_path / "config.json").write_text(json.dumps(config | odd))
    with pytest.raises(ConfigError, match=r"feed_forward.experts.down 48 inputs are not whole groups of 32; use fp8"):
        configure(tmp_path, quantization="mxfp4")


def test_numbers_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    write_model("Qwen3MoeForCausalLM", _SIZES | {"num_experts": 4, "head_dim": 32}, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    for value in (torch.nan, torch.inf):
        tensors[name][3, 5] = value
        save_file(tensors, tmp_path / "model.safetensors")
        for quantization in ("fp8", "mxfp4"):
            with pytest.raises(ConfigError, match=rf"{name} has values that are NaN or infinite"):
                logits(configure(tmp_path, quantization=quantization), torch.arange(4), Parallel())
