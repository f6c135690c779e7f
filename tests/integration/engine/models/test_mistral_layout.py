"""Models in Mistral's own layout against transformers' models with the same numbers."""

from __future__ import annotations

import re
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    Ministral3Config,
    Ministral3ForCausalLM,
    Mistral4Config,
    Mistral4ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from quire.engine.config.options import EngineOptions
from quire.engine.config.resolve import fetch_weights, resolve
from tests.fakes.mistral_layout import LATENT, PARAMS, stored, write_folder
from tests.fakes.model_logits import configure, logits
from tests.fakes.ranks import on_ranks

_SIZES: dict[str, Any] = {
    "hidden_size": PARAMS["dim"],
    "num_hidden_layers": PARAMS["n_layers"],
    "head_dim": PARAMS["head_dim"],
    "intermediate_size": PARAMS["hidden_dim"],
    "num_attention_heads": PARAMS["n_heads"],
    "num_key_value_heads": PARAMS["n_kv_heads"],
    "rms_norm_eps": PARAMS["norm_eps"],
    "vocab_size": PARAMS["vocab_size"],
    "max_position_embeddings": PARAMS["max_position_embeddings"],
    "initializer_range": 0.2,
    "sliding_window": None,
}
_THETA = {"rope_theta": PARAMS["rope_theta"]}
_YARN = {"factor": 4.0, "original_max_position_embeddings": 128, "beta": 32.0, "alpha": 1.0}
_HF_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, **_THETA}
_PLAIN = {"rope_parameters": {"rope_type": "default", **_THETA}}
_WHOLE = {"partial_rotary_factor": 1.0, "llama_4_scaling_beta": 0.0, "original_max_position_embeddings": 128}
_SCALED = {"original_max_position_embeddings": 128, "beta": 0.1}
_HF_LATENT = {
    **{name: value for name, value in LATENT.items() if name != "moe"},
    "head_dim": 8,  # the rotary part alone, all of it
    "num_key_value_heads": PARAMS["n_heads"],
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "moe_intermediate_size": 20,
    "n_shared_experts": 2,
}
_CASES: dict[str, tuple[type[Any], type[Any], dict[str, Any], dict[str, Any]]] = {
    "dense": (MistralConfig, MistralForCausalLM, {}, _PLAIN),
    "windows, tied": (
        MistralConfig,
        MistralForCausalLM,
        {"sliding_window": 24, "tied_embeddings": True},
        {"sliding_window": 24, "tie_word_embeddings": True, **_PLAIN},
    ),
    "yarn": (MistralConfig, MistralForCausalLM, {"yarn": _YARN}, {"rope_parameters": _HF_YARN}),
    "growing queries": (
        Ministral3Config,
        Ministral3ForCausalLM,
        {"yarn": {**_YARN, "apply_scale": False}, "llama_4_scaling": _SCALED},
        {"rope_parameters": {**_HF_YARN, "attention_factor": 1.0, "llama_4_scaling_beta": 0.1}},
    ),
    "experts": (
        MixtralConfig,
        MixtralForCausalLM,
        {"moe": {"num_experts": 4, "num_experts_per_tok": 2}},
        {"num_local_experts": 4, "num_experts_per_tok": 2, **_PLAIN},
    ),
    "latent attention": (
        Mistral4Config,
        Mistral4ForCausalLM,
        LATENT,
        _HF_LATENT | {"rope_parameters": {**_PLAIN["rope_parameters"], **_WHOLE}},
    ),
    "latent attention, yarn": (
        Mistral4Config,
        Mistral4ForCausalLM,
        LATENT | {"yarn": _YARN},
        _HF_LATENT | {"rope_parameters": {**_HF_YARN, **_WHOLE, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "latent attention, growing queries": (
        Mistral4Config,
        Mistral4ForCausalLM,
        LATENT | {"yarn": {**_YARN, "apply_scale": False}, "llama_4_scaling": _SCALED},
        _HF_LATENT | {"rope_parameters": {**_HF_YARN, **_WHOLE, "attention_factor": 1.0, "llama_4_scaling_beta": 0.1}},
    ),
}


@pytest.mark.parametrize("case", _CASES)
def test_logits_are_those_of_transformers(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config_class, model_class, params, changes = _CASES[case]
    torch.manual_seed(0)
    model = model_class(config_class(**deepcopy(_SIZES | changes))).train(False)  # it changes rope_parameters
    folder = write_folder(tmp_path / "model", **params)
    tensors = stored(model.state_dict(), PARAMS | params)
    if params.get("tied_embeddings"):
        del tensors["output.weight"]
    names = sorted(tensors)
    tensors["vision_encoder.conv.weight"] = torch.ones(2, 3)
    save_file({name: tensors[name] for name in names[::2]}, folder / "consolidated-00001-of-00002.safetensors")
    rest = {name: tensors[name] for name in (*names[1::2], "vision_encoder.conv.weight")}
    save_file(rest, folder / "consolidated-00002-of-00002.safetensors")
    tokens = torch.randint(0, 320, (150,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = model(tokens[None]).logits[0]
    asked = EngineOptions(model=str(folder), device="cpu")
    fetch_weights(asked, resolve(asked))
    for tp, pp in ((1, 1), (2, 1), (1, 2)):
        config = configure(folder, tensor_parallel_size=tp, pipeline_parallel_size=pp, max_model_len=256)
        for result in on_ranks(tp, partial(logits, config, tokens)):
            assert (result - expected).abs().max() <= 1e-4 * expected.abs().max(), (tp, pp)


def _of_transformers(state: dict[str, Any], stored_now: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    """transformers' tensors after changes to the tensors in `stored_now`: `stored` only moves numbers."""
    changed = {}
    for name, tensor in state.items():
        numbers = stored({name: torch.arange(tensor.numel(), dtype=torch.float64).view(tensor.shape)}, params)
        changed[name] = tensor.clone()
        for part, places in numbers.items():
            if part in stored_now:
                changed[name].view(-1)[places.flatten().long()] = stored_now[part].flatten()
    return changed


@pytest.mark.parametrize("case", ["dense", "latent attention"])
def test_fp8_weights_have_a_scale_each(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the weights of each expert, which transformers has in two stacks."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config_class, model_class, params, changes = _CASES[case]
    torch.manual_seed(0)
    model = model_class(config_class(**deepcopy(_SIZES | changes))).train(False)
    quantization = {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"}
    folder = write_folder(tmp_path / "model", quantization=quantization, **params)
    is_quantized = re.compile(r"layers\.\d+\.(attention|feed_forward|shared_experts|experts\.\d+)\.w\w+\.weight")
    tensors, exact = stored(model.state_dict(), PARAMS | params), {}
    for name in filter(is_quantized.fullmatch, list(tensors)):
        factor = tensors[name].abs().max() / 448
        tensors[name] = (tensors[name] / factor).to(torch.float8_e4m3fn)
        tensors[name.replace(".weight", ".qscale_weight")] = factor
        tensors[name.replace(".weight", ".qscale_act")] = torch.tensor(0.1)
        exact[name] = tensors[name].float() * factor
    assert len(exact) == {"dense": 3 * 7, "latent attention": 3 * 5 + 3 + 2 * (3 + 6 * 3)}[case]
    model.load_state_dict(_of_transformers(model.state_dict(), exact, PARAMS | params))
    save_file(tensors, folder / "consolidated.safetensors")
    tokens = torch.randint(0, 320, (40,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = model(tokens[None]).logits[0]
    for tp in (1, 2):
        config = configure(folder, tensor_parallel_size=tp, max_model_len=256)
        assert config.model.quantized is not None
        for result in on_ranks(tp, partial(logits, config, tokens)):
            assert (result - expected).norm() <= 1e-3 * expected.norm()
