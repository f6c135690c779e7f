"""`quire merge`: the merged checkpoint in transformers computes what PEFT does with base and adapter."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.engine.checkpoints import merge
from quire.engine.config.merge_request import MergeRequest
from quire.server.cli.main import main
from tests.fakes import families
from tests.fakes.checkpoints import TEXT_PARTS
from tests.fakes.families import SIZES, write_model

peft: Any = importlib.import_module("peft")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
"""PEFT warns of much, also of its own use of transformers."""

_LLAMA = "Llama"
_ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
_ALL = [*_ATTENTION, "gate_proj", "up_proj", "down_proj"]
_STACKS: dict[str, Any] = {
    "target_modules": ["q_proj", "o_proj"],
    "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
}
_TIED = {"tie_word_embeddings": True}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "LoRA": ("LlamaForCausalLM", {}, {"target_modules": _ALL, "lora_alpha": 12}),
    "rsLoRA": ("LlamaForCausalLM", {}, {"target_modules": _ALL, "use_rslora": True}),
    "DoRA": ("LlamaForCausalLM", {"attention_bias": True}, {"target_modules": _ALL, "use_dora": True}),
    "patterns": (
        "LlamaForCausalLM",
        {},
        {
            "target_modules": _ALL,
            "rank_pattern": {"layers.1.self_attn.q_proj": 7, "down_proj": 2, r".*\.[23]\..*\.up_proj": 5},
            "alpha_pattern": {"^model.layers.0.self_attn.q_proj": 32, "up_proj": 3},
        },
    ),
    "bias of B": (
        "LlamaForCausalLM",
        {"attention_bias": True, "mlp_bias": True},
        {"target_modules": _ALL, "lora_bias": True},
    ),
    "all biases": (
        "LlamaForCausalLM",
        {"attention_bias": True, "mlp_bias": True},
        {"target_modules": ["q_proj", "up_proj"], "bias": "all"},
    ),
    "biases of changed layers": (
        "Qwen2ForCausalLM",
        {},
        {"target_modules": ["q_proj", "v_proj", "up_proj"], "bias": "lora_only"},
    ),
    "whole modules": (
        "LlamaForCausalLM",
        {},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head", "input_layernorm"]},
    ),
    "a trained embedding that was tied": (
        "LlamaForCausalLM",
        _TIED,
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    ),
    "embedding": ("LlamaForCausalLM", {}, {"target_modules": ["embed_tokens", "lm_head", "q_proj"]}),
    "tied embedding": ("Qwen2ForCausalLM", _TIED, {"target_modules": ["embed_tokens", "v_proj"]}),
    "tied embedding and head": (
        "Qwen2ForCausalLM",
        _TIED,
        {"target_modules": ["embed_tokens", "lm_head"], "ensure_weight_tying": True},
    ),
    "DoRA of the embedding": ("LlamaForCausalLM", {}, {"target_modules": ["embed_tokens"], "use_dora": True}),
    "scaled embedding": ("GemmaForCausalLM", {"head_dim": 16}, {"target_modules": ["embed_tokens", "o_proj"]}),
    "tokens": ("LlamaForCausalLM", {}, {"target_modules": ["q_proj"], "trainable_token_indices": [3, 130, 7]}),
    "tied tokens": ("LlamaForCausalLM", _TIED, {"target_modules": ["q_proj"], "trainable_token_indices": [3, 7]}),
    "PiSSA, converted": ("LlamaForCausalLM", {}, {"target_modules": _ALL, "init_lora_weights": "pissa"}),
    "OLoRA, converted": ("LlamaForCausalLM", {}, {"target_modules": _ALL, "init_lora_weights": "olora"}),
    "convolutions of 1": (
        "GPT2LMHeadModel",
        {"n_embd": 48, "n_head": 4, "n_layer": 2, "n_positions": 256, "n_inner": 80},
        {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True},
    ),
    "matrices of several parts": ("Phi3ForCausalLM", {}, {"target_modules": ["qkv_proj", "gate_up_proj", "down_proj"]}),
    "stacks of Mixtral": ("MixtralForCausalLM", {"num_local_experts": 4}, _STACKS),
    "one stack of Mixtral": (
        "MixtralForCausalLM",
        {"num_local_experts": 4},
        {"target_modules": [], "target_parameters": ["experts.down_proj"]},
    ),
    "other stacks in other layers": (
        "MixtralForCausalLM",
        {"num_local_experts": 4},
        {
            "target_modules": [],
            "target_parameters": ["layers.0.mlp.experts.gate_up_proj", "layers.1.mlp.experts.down_proj"],
        },
    ),
    "router": ("MixtralForCausalLM", {"num_local_experts": 4}, {"target_parameters": ["mlp.gate.weight"]}),
    "stacks of Qwen": (
        "Qwen3MoeForCausalLM",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "head_dim": 16},
        _STACKS,
    ),
    "stacks of square matrices": (
        "Qwen3MoeForCausalLM",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 16},
        _STACKS,
    ),
    "stacks of gpt-oss": (
        "GptOssForCausalLM",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "intermediate_size": 48},
        _STACKS,
    ),
    "stacks of Granite": (
        "GraniteMoeForCausalLM",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 20},
        _STACKS,
    ),
    "latent attention": (
        "DeepseekV3ForCausalLM",
        families._LATENT,
        {"target_modules": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "down_proj"]},
    ),
    "recurrent layers": (
        "Qwen3NextForCausalLM",
        {
            **families._HYBRID,
            **families._EXPERTS,
            "num_hidden_layers": 4,
            "num_experts": 4,
            "shared_expert_intermediate_size": 20,
        },
        {"target_modules": ["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "shared_expert_gate"]},
    ),
    "a model that Quire has no code of": (
        "PersimmonForCausalLM",
        {},
        {"target_modules": ["query_key_value", "dense", "dense_h_to_4h"], "modules_to_save": ["final_layernorm"]},
    ),
    "Mamba": (
        "Mamba2ForCausalLM",
        {"num_heads": 8, "head_dim": 12, "state_size": 16, "n_groups": 2, "expand": 2},
        {"target_modules": ["in_proj"]},
    ),
}


def _randomize(model: Any, seed: int = 1) -> None:
    """PEFT starts B at 0, and whole modules as they are in the base."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name or "trainable_tokens" in name or parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)


def _logits(model: Any) -> Tensor:
    torch.manual_seed(2)
    with torch.inference_mode():
        found: Tensor = model.train(False)(torch.randint(0, 131, (2, 24))).logits
    return found


def _compare(folder: Path, expected: Tensor) -> None:
    """The checkpoint's logits, and that transformers finds each of its tensors."""
    kind: Any = transformers.AutoModelForCausalLM
    model, report = kind.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    error = (_logits(model) - expected).abs().max() / expected.abs().max()
    assert error < 1e-4


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(MergeRequest, "run", merge.run)


def _adapt(architecture: str, changes: dict[str, Any], settings: dict[str, Any], folder: Path) -> Any:
    """A model in `folder`/base, and itself in PEFT with a random adapter."""
    write_model(architecture, SIZES | {"num_hidden_layers": 2} | changes, folder / "base")
    model = getattr(transformers, architecture).from_pretrained(folder / "base", dtype=torch.float32)
    plain = _logits(model)
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"} | settings)
    adapted = peft.get_peft_model(model, config)
    if config.init_lora_weights in ("pissa", "olora"):
        adapted.save_pretrained(folder / "start")
    _randomize(adapted)
    assert (_logits(adapted) - plain).abs().max() > 1e-2 * plain.abs().max()
    return adapted


def _merge(folder: Path, adapter: Path | None = None) -> Path:
    assert main(["merge", str(folder / "base"), str(adapter or folder / "adapter"), str(folder / "out")]) == 0
    return folder / "out"


@pytest.mark.parametrize("case", CASES)
def test_a_merged_checkpoint_computes_what_peft_does(tmp_path: Path, case: str) -> None:
    adapted, start = _adapt(*CASES[case], tmp_path), tmp_path / "start"
    expected = _logits(adapted)
    converted = {"path_initial_model_for_weight_conversion": str(start)} if start.exists() else {}
    adapted.save_pretrained(tmp_path / "adapter", **converted)
    _compare(_merge(tmp_path), expected)


@pytest.mark.parametrize("modules", [None, ["embed_tokens"], ["embed_tokens", "lm_head"]])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "PhiForCausalLM"])
def test_a_resized_vocabulary(tmp_path: Path, architecture: str, modules: list[str] | None) -> None:
    """Qwen's head is tied to the embedding, Phi's has a bias."""
    tied = _TIED if architecture.startswith("Qwen") else {"tie_word_embeddings": False}
    write_model(architecture, SIZES | {"num_hidden_layers": 2} | tied, tmp_path / "base")
    model = getattr(transformers, architecture).from_pretrained(tmp_path / "base", dtype=torch.float32)
    model.resize_token_embeddings(model.config.vocab_size + 5)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=modules))
    _randomize(adapted)
    adapted.save_pretrained(tmp_path / "adapter")
    _compare(_merge(tmp_path), _logits(adapted))


Tensors = dict[str, Tensor]
_MIXTRAL: dict[str, Any] = {"num_local_experts": 3, "num_key_value_heads": 4}
_EXPERTS = "experts.base_layer.lora_{}.weight", "experts.lora_{}.weight"


def _fused(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """Queries, keys and values as one matrix, and gate and up, each with the ranks of all."""
    found = {name: each for name, each in tensors.items() if "o_proj" in name or "down_proj" in name}
    for name in tensors:
        for fused, parts in (("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj"))):
            if f"{parts[0]}.lora_A" in name:
                of_a = [tensors[name.replace(parts[0], part)] for part in parts]
                of_b = [tensors[name.replace(parts[0], part).replace("lora_A", "lora_B")] for part in parts]
                found[name.replace(parts[0], fused)] = torch.cat(of_a)
                found[name.replace(parts[0], fused).replace("lora_A", "lora_B")] = torch.block_diag(*of_b)  # type: ignore[no-untyped-call]
    config["rank_pattern"] = {"qkv_proj": 12, "gate_up_proj": 8}
    config["alpha_pattern"] = {"qkv_proj": 24, "gate_up_proj": 16}
    return found


def _separate(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """The parts of fused matrices alone."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        sizes = {"q": 48, "k": 24, "v": 24} if "qkv_proj" in name else {"gate": 80, "up": 80}
        rows = torch.split(tensor, [*sizes.values()]) if "lora_B" in name else (tensor,) * 3
        for part, own in zip(sizes, rows, strict=False):
            found[name.replace("qkv_proj", f"{part}_proj").replace("gate_up_proj", f"{part}_proj")] = own.clone()
    return found


def _by_expert(names: str) -> Callable[[Tensors, dict[str, Any]], Tensors]:
    """Experts one by one, with `names` such as mlp.experts.{}.{}_proj."""

    def rewrite(tensors: Tensors, config: dict[str, Any]) -> Tensors:
        inner, outer = _EXPERTS
        found = {name: each for name, each in tensors.items() if ".experts." not in name}
        for name in [name for name in tensors if name.endswith(inner.format("A"))]:
            start = name.removesuffix(inner.format("A"))
            for kind, parts in ((inner, ("gate", "up")), (outer, ("down",))):
                a, b = tensors[start + kind.format("A")], tensors[start + kind.format("B")]
                for expert in range(3):
                    for part, rows in zip(parts, b[:, expert::3].chunk(len(parts)), strict=True):
                        part = part if "proj" in names else {"gate": "w1", "up": "w3", "down": "w2"}[part]
                        module = re.sub(r"\w+\.$", "", start) + names.format(expert, part)
                        found[f"{module}.lora_A.weight"] = a[expert * 4 : expert * 4 + 4].clone()
                        found[f"{module}.lora_B.weight"] = rows.clone()
        config["target_parameters"] = None
        return found

    return rewrite


def _swapped(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """Stacks as PEFT before 0.19 writes them: A is for the second dimension of the stack."""
    config["peft_version"] = "0.18.1"
    found = dict(tensors)
    for name in [name for name in tensors if ".experts." in name and "lora_A" in name]:
        a, b = tensors[name], tensors[name.replace("lora_A", "lora_B")]
        of_experts = a.reshape(3, 4, -1), b.reshape(len(b), 4, 3)
        found[name] = of_experts[1].permute(2, 1, 0).reshape(12, -1).clone()
        found[name.replace("lora_A", "lora_B")] = of_experts[0].permute(2, 1, 0).reshape(-1, 12).clone()
    return found


_ON_MIXTRAL = ("MixtralForCausalLM", _MIXTRAL, _STACKS)
_REWRITTEN: dict[
    str, tuple[tuple[str, dict[str, Any], dict[str, Any]], Callable[[Tensors, dict[str, Any]], Tensors]]
] = {
    "fused": (("LlamaForCausalLM", {}, {"target_modules": _ALL}), _fused),
    "separate": (("Phi3ForCausalLM", {}, {"target_modules": ["qkv_proj", "gate_up_proj"]}), _separate),
    "Mixtral's experts by transformers 4": (_ON_MIXTRAL, _by_expert("block_sparse_moe.experts.{}.{}")),
    "experts one by one": (_ON_MIXTRAL, _by_expert("mlp.experts.{}.{}_proj")),
    "experts of a stack one by one": (
        ("GraniteMoeForCausalLM", {**_MIXTRAL, "num_experts_per_tok": 2, "intermediate_size": 20}, _STACKS),
        _by_expert("block_sparse_moe.experts.{}.{}_proj"),
    ),
    "stacks by older PEFT": (_ON_MIXTRAL, _swapped),
    "square stacks by older PEFT": (("MixtralForCausalLM", {**_MIXTRAL, "intermediate_size": 48}, _STACKS), _swapped),
    "without a prefix": (
        ("LlamaForCausalLM", {}, {"target_modules": _ALL}),
        lambda tensors, config: {name.removeprefix("base_model.model."): each for name, each in tensors.items()},
    ),
    "in 16 bits": (
        ("LlamaForCausalLM", {}, {"target_modules": _ALL}),
        lambda tensors, config: {name: each.bfloat16() for name, each in tensors.items()},
    ),
}


@pytest.mark.parametrize("case", _REWRITTEN)
def test_names_and_layouts_of_other_libraries(tmp_path: Path, case: str) -> None:
    model, rewrite = _REWRITTEN[case]
    adapted, folder = _adapt(*model, tmp_path), tmp_path / "adapter"
    if case == "in 16 bits":
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_" in name:
                    parameter.copy_(parameter.bfloat16())
    adapted.save_pretrained(folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = rewrite(load_file(folder / "adapter_model.safetensors"), config)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    _compare(_merge(tmp_path), _logits(adapted))


def _write_gguf(folder: Path, file: Path, architecture: str, names: dict[str, str]) -> None:
    """As convert_lora_to_gguf.py does; for llama, the rows of queries and keys are permuted."""
    writer, experts = gguf.GGUFWriter(file, architecture), dict[str, dict[int, Tensor]]()
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 8.0)
    tensors = dict[str, Tensor]()
    for name, tensor in load_file(folder / "adapter_model.safetensors").items():
        found = re.fullmatch(
            r"base_model\.model\.(?:model\.layers\.(\d+)\.)?(.*)\.lora_(embedding_)?([AB])(\.weight)?", name
        )
        assert found
        kind = found[4].lower()
        number = re.search(r"experts\.(\d+)", found[2])
        module = names[re.sub(r"experts\.\d+", "experts", found[2])]
        full = f"blk.{found[1]}.{module}.weight.lora_{kind}" if found[1] else f"{module}.weight.lora_{kind}"
        if architecture == "llama" and module in ("attn_q", "attn_k") and kind == "b":
            heads = 4 if module == "attn_q" else 2
            tensor = tensor.view(heads, 2, -1, tensor.shape[-1]).transpose(1, 2).reshape(tensor.shape)
        tensor = tensor.T if module == "token_embd" and kind == "a" else tensor
        if number is None:
            tensors[full] = tensor
        else:
            experts.setdefault(full, {})[int(number[1])] = tensor
    tensors |= {name: torch.stack([own[number] for number in sorted(own)]) for name, own in experts.items()}
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


_GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "lm_head": "output",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3moe"])
def test_gguf(tmp_path: Path, kind: str) -> None:
    of_experts = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "head_dim": 16}
    architecture, changes, settings = {
        "llama": ("LlamaForCausalLM", {}, {"target_modules": [*_ALL, "embed_tokens", "lm_head"]}),
        "qwen3": ("Qwen3ForCausalLM", {"head_dim": 16}, {"target_modules": _ALL}),
        "qwen3moe": ("Qwen3MoeForCausalLM", of_experts, _STACKS),
    }[kind]
    adapted, folder = _adapt(architecture, changes, settings, tmp_path), tmp_path / "adapter"
    adapted.save_pretrained(folder)
    tensors = {
        n: each for n, each in load_file(folder / "adapter_model.safetensors").items() if "base_layer.weight" not in n
    }
    tensors = _by_expert("mlp.experts.{}.{}_proj")(tensors, {}) if kind == "qwen3moe" else tensors
    save_file(tensors, folder / "adapter_model.safetensors")
    _write_gguf(folder, tmp_path / "adapter.gguf", kind, _GGUF_NAMES)
    _compare(_merge(tmp_path, tmp_path / "adapter.gguf"), _logits(adapted))


_POOLED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "an encoder": ("BertModel", {}, {"target_modules": ["query", "value", "dense", "word_embeddings"]}),
    "an encoder with its head": ("BertForMaskedLM", {}, {"target_modules": ["key", "dense"]}),
    "a classifier": ("Qwen2ForSequenceClassification", {"pad_token_id": 0}, {"task_type": "SEQ_CLS"}),
    "a decoder without its head": ("Qwen3Model", {"head_dim": 16}, {"target_modules": ["q_proj", "up_proj"]}),
}


@pytest.mark.parametrize("case", _POOLED)
def test_encoders_and_classifiers(tmp_path: Path, case: str) -> None:
    architecture, changes, settings = _POOLED[case]
    write_model(architecture, SIZES | {"num_hidden_layers": 2} | changes, tmp_path / "base")
    kind = getattr(transformers, architecture)
    model = kind.from_pretrained(tmp_path / "base", dtype=torch.float32)
    adapted = peft.get_peft_model(model, peft.LoraConfig(**{"r": 4, "task_type": "FEATURE_EXTRACTION"} | settings))
    _randomize(adapted)
    tokens = torch.arange(1, 25)[None]
    with torch.inference_mode():
        expected = adapted.train(False)(tokens)[0]
        adapted.save_pretrained(tmp_path / "adapter")
        found = kind.from_pretrained(_merge(tmp_path), dtype=torch.float32)(tokens)[0]
        plain = kind.from_pretrained(tmp_path / "base", dtype=torch.float32)(tokens)[0]
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max() < (plain - expected).abs().max()


_SPLIT_OTHERWISE = {
    "Lara Mini": "linear_attn.in_proj_a",
    "Zamba": "shared_transf.feed_forward.down_proj",
    "Zamba2": "shared_transformer.feed_forward.down_proj",
    "Zamba2, one block, rope, biases": "shared_transformer.feed_forward.down_proj",
    "Step 3.7": "mlp.experts",
    "ERNIE 4.5 VL": "mlp.text_moe.experts",
    "DeepSeek-OCR 2": "sam_encoder.layers.0.attn.proj",
    "Kimi K2.5": "vision_tower.layers.0.attn.k_proj",
    "A.X K2": "input_layernorm.mlp.fc1",
    "A.X K2, groups of experts": "input_layernorm.mlp.fc1",
}
"""Models that transformers 5 has in other modules than the checkpoint, whose adapters are refused by these names."""


@pytest.mark.parametrize("case", families.CASES)
def test_all_matrices_of_every_family(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The merged checkpoint has the tensors of PEFT's merged model, with towers and projectors."""
    architecture = families.CASES[case][0]
    families.write(case, tmp_path / "base")
    kind = getattr(transformers, TEXT_PARTS.get(architecture, architecture))
    model = kind.from_pretrained(tmp_path / "base", dtype=torch.float32)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    linear = torch.nn.Linear | transformers.pytorch_utils.Conv1D
    targets = [name for name, module in model.named_modules() if isinstance(module, linear)]
    head = model.get_output_embeddings()
    if head.weight is model.get_input_embeddings().weight:  # PEFT merges into both what is for one
        targets = [name for name in targets if model.get_submodule(name) is not head]
    stacks = {
        name.split(".layers.")[-1].partition(".")[2]
        for name, parameter in model.named_parameters()
        if "experts" in name and parameter.ndim == 3 and name.endswith("_proj")
    }
    monkeypatch.setattr(peft.tuners.tuners_utils, "_check_lora_target_modules_mamba", lambda *_: None)
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=targets, target_parameters=sorted(stacks) or None)
    adapted = peft.get_peft_model(model, config)
    _randomize(adapted)
    adapted.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    if case in _SPLIT_OTHERWISE:
        assert main(["merge", *(str(tmp_path / name) for name in ("base", "adapter", "out"))]) == 2
        assert re.search(rf"the base has no module .*{_SPLIT_OTHERWISE[case]}$", capsys.readouterr().err.strip())
        return
    merged = kind.from_pretrained(_merge(tmp_path), dtype=torch.float32).state_dict()
    expected = adapted.merge_and_unload().state_dict()
    assert merged.keys() == expected.keys()
    adapted_modules = {
        name.partition(".lora_")[0] for name in load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    }
    assert sum(not before[name].equal(tensor) for name, tensor in expected.items()) == len(adapted_modules) > 8
    for name, tensor in expected.items():
        assert (merged[name] - tensor).abs().max() <= 1e-5 * tensor.abs().max(), name


_TOWERS = {
    "Qwen2-VL": r".*(self_attn\.[qkv]_proj|attn\.qkv|attn\.proj|mlp\.fc1|merger\.mlp\.0|patch_embed\.proj)",
    "LLaVA": r".*(q_proj|fc1|linear_1|patch_embedding)",
    "Gemma 3 with a vision part": r".*(q_proj|out_proj|fc2)",
    "Qwen3-VL MoE": ["q_proj", "qkv", "linear_fc1"],
}


@pytest.mark.parametrize("case", _TOWERS)
def test_towers(tmp_path: Path, case: str) -> None:
    """The merged checkpoint has the tensors that PEFT's merged model has; a projector may be trained as a whole."""
    families.write(case, tmp_path / "base")
    kind = getattr(transformers, families.CASES[case][0])
    model = kind.from_pretrained(tmp_path / "base", dtype=torch.float32)
    parameters = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]} if "MoE" in case else {}
    whole = ["multi_modal_projector"] if case.startswith("Gemma") else None
    lora = peft.LoraConfig(r=4, target_modules=_TOWERS[case], modules_to_save=whole, **parameters)
    adapted = peft.get_peft_model(model, lora)
    _randomize(adapted)
    adapted.save_pretrained(tmp_path / "adapter")
    merged = kind.from_pretrained(_merge(tmp_path), dtype=torch.float32).state_dict()
    expected = adapted.merge_and_unload().state_dict()
    assert merged.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (merged[name] - tensor).abs().max() <= 1e-5 * tensor.abs().max(), name
