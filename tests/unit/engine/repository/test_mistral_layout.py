"""Mistral's own layout: params.json, names of tensors, tekken.json, and the folder that is written for them."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex  # type: ignore[import-untyped]

from quire.engine.architecture.families import from_hf_config
from quire.engine.config.options import EngineOptions
from quire.engine.config.resolve import fetch_weights, resolve
from quire.engine.protocol.errors import ConfigError, InvalidParameter
from quire.engine.repository.mistral_layout import hf_config, hf_name
from quire.engine.repository.model_folder import locate
from quire.engine.repository.tekken import special_tokens
from quire.server.parsers.reasoning import detect_reasoning
from quire.server.parsers.tool_formats import detect_tools
from quire.server.text.chat_template import ChatTemplates
from quire.server.text.tokenizer import Tokenizer
from tests.fakes.mistral_layout import LATENT, PARAMS, PATTERN, SPECIAL, WORDS, tekken, write_folder
from tests.unit.server.text.test_sentencepiece import train


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tok_embeddings.weight", "model.embed_tokens.weight"),
        ("norm.weight", "model.norm.weight"),
        ("output.weight", "lm_head.weight"),
        ("layers.11.attention.wq.weight", "model.layers.11.self_attn.q_proj.weight"),
        ("layers.0.attention.wo.qscale_weight", "model.layers.0.self_attn.o_proj.weight_scale"),
        ("layers.0.feed_forward.w2.qscale_act", "model.layers.0.mlp.down_proj.input_scale"),
        ("layers.0.attention.kv_fake_quantizer.qscale_act", "model.layers.0.self_attn.kv_scale"),
        ("layers.2.feed_forward.experts.7.w3.weight", "model.layers.2.block_sparse_moe.experts.7.w3.weight"),
        ("layers.2.feed_forward.gate.weight", "model.layers.2.block_sparse_moe.gate.weight"),
        ("layers.3.gate.weight", "model.layers.3.mlp.gate.weight"),
        ("layers.3.experts.10.w2.qscale_weight", "model.layers.3.mlp.experts.10.down_proj.weight_scale"),
        ("layers.3.shared_experts.w1.qscale_act", "model.layers.3.mlp.shared_experts.gate_proj.input_scale"),
        ("layers.3.attention.wkv_a_with_mqa.weight", "model.layers.3.self_attn.kv_a_proj_with_mqa.weight"),
        ("layers.3.attention.q_a_norm.weight", "model.layers.3.self_attn.q_a_layernorm.weight"),
        ("layers.0.attention_norm.weight", "model.layers.0.input_layernorm.weight"),
        ("vision_encoder.transformer.layers.0.attention.wq.weight", None),
        ("vision_language_adapter.w_in.bias", None),
        ("something.else", "something.else"),
    ],
)
def test_names(name: str, expected: str | None) -> None:
    assert hf_name(name) == expected


NEMO = {
    "dim": 5120,
    "n_layers": 40,
    "head_dim": 128,
    "hidden_dim": 14336,
    "n_heads": 32,
    "n_kv_heads": 8,
    "norm_eps": 1e-05,
    "vocab_size": 131072,
    "rope_theta": 1000000.0,
}
"""The params.json of Mistral Nemo."""


def test_the_params_of_a_published_model() -> None:
    assert hf_config(NEMO) == {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "hidden_size": 5120,
        "num_hidden_layers": 40,
        "head_dim": 128,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "vocab_size": 131072,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "max_position_embeddings": 128000,
        "rope_interleave": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def test_newer_settings() -> None:
    found = hf_config(
        {
            **NEMO,
            "max_position_embeddings": 262144,
            "tied_embeddings": True,
            "q_lora_rank": None,
            "use_biases": False,
            "model_type": "transformer",
            "sliding_window": [None, 1024],
            "yarn": {
                "original_max_position_embeddings": 16384,
                "factor": 16,
                "apply_scale": False,
                "beta": 32,
                "alpha": 1,
            },
            "llama_4_scaling": {"original_max_position_embeddings": 16384, "beta": 0.1},
            "quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"},
            "vision_encoder": {"hidden_size": 1024},
        }
    )
    assert found["architectures"] == ["Ministral3ForCausalLM"]
    assert found["tie_word_embeddings"] is True
    assert found["max_position_embeddings"] == 262144
    assert found["layer_types"] == ["full_attention", "sliding_attention"] * 20
    assert found["sliding_window"] == 1024
    assert found["quantization_config"] == {"quant_method": "fp8", "activation_scheme": "static"}
    assert found["rope_parameters"] == {
        "rope_type": "yarn",
        "rope_theta": 1000000.0,
        "factor": 16,
        "original_max_position_embeddings": 16384,
        "beta_fast": 32,
        "beta_slow": 1,
        "attention_factor": 1.0,
        "llama_4_scaling_beta": 0.1,
    }


def test_latent_attention_is_that_of_mistral_4() -> None:
    found = hf_config(
        {
            **NEMO,
            **LATENT,
            "yarn": {"original_max_position_embeddings": 8192, "factor": 36, "beta": 32, "alpha": 1},
            "llama_4_scaling": {"original_max_position_embeddings": 8192, "beta": 0.1},
        }
    )
    assert found["architectures"] == ["Mistral4ForCausalLM"]
    assert found["model_type"] == "mistral4"
    sizes = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    assert [found[name] for name in sizes] == [24, 32, 12, 8, 10]
    experts = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts")
    assert [found[name] for name in experts] == [6, 2, 20, 2]
    assert (found["first_k_dense_replace"], found["routed_scaling_factor"]) == (1, 1.5)
    assert found["rope_parameters"] == {
        "rope_type": "yarn",
        "rope_theta": 1000000.0,
        "factor": 36,
        "original_max_position_embeddings": 8192,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    }


LARGE_3: dict[str, Any] = {
    "dim": 7168,
    "n_layers": 61,
    "head_dim": 128,
    "hidden_dim": 16384,
    "n_heads": 128,
    "n_kv_heads": 128,
    "rope_theta": 10000.0,
    "norm_eps": 1e-06,
    "vocab_size": 131072,
    "tied_embeddings": False,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe": {"first_k_dense_replace": 3, "num_experts": 128, "num_experts_per_tok": 4}
    | {"expert_hidden_dim": 4096, "num_shared_experts": 1},
}
SMALL_4: dict[str, Any] = {
    **LARGE_3,
    "dim": 4096,
    "n_layers": 36,
    "hidden_dim": 12288,
    "n_heads": 32,
    "n_kv_heads": 32,
    "q_lora_rank": 1024,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "moe": {"num_experts": 128, "num_experts_per_tok": 4, "expert_hidden_dim": 2048, "num_shared_experts": 1},
}
"""Sizes of Mistral Large 3 and Mistral Small 4."""


@pytest.mark.parametrize(("params", "billions"), [(LARGE_3, 673), (SMALL_4, 119)])
def test_models_with_latent_attention_have_their_published_numbers_of_parameters(
    params: dict[str, Any], billions: int
) -> None:
    arch = from_hf_config(hf_config(params))
    assert round(arch.stage_parameters([range(arch.num_layers)], 0, 1) / 1e9) == billions


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"q_lora_rank": 256}, "q_lora_rank 256 is not supported in Mistral's own layout; use the model's config"),
        ({"kv_lora_rank": 256}, "kv_lora_rank is not supported without moe in Mistral's own layout"),
        (LATENT | {"q_lora_rank": None}, "kv_lora_rank is not supported without q_lora_rank"),
        (LATENT | {"sliding_window": 32}, "sliding_window is not supported beside kv_lora_rank"),
        (LATENT | {"moe": {**LATENT["moe"], "num_expert_groups": 2}}, "moe.num_expert_groups 2 is not supported"),
        (LATENT | {"moe": {**LATENT["moe"], "route_every_n": 2}}, "moe.route_every_n 2 is not supported"),
        (LATENT | {"moe": {**LATENT["moe"], "noise": 2}}, "moe.noise 2 is not supported in Mistral's own layout"),
        (LATENT | {"moe": {"num_experts": 8, "num_experts_per_tok": 2}}, "moe lacks expert_hidden_dim"),
        ({"model_type": "mamba"}, "model_type 'mamba' is not supported"),
        ({"causal": False, "use_biases": True}, "use_biases True is not supported"),
        ({"dim": None}, "no dim"),
        ({"moe": {"num_experts": 8, "num_shared_experts": 1}}, "moe.num_shared_experts 1 is not supported"),
        ({"moe": {"num_experts_per_tok": 2}}, "moe lacks num_experts"),
        ({"moe": 8}, "moe must be an object or null, got 8"),
        ({"yarn": {"factor": 2.0, "gamma": 1}}, "yarn.gamma 1 is not supported"),
        ({"quantization": {"quant_method": "compressed-tensors"}}, "quantization 'compressed-tensors' is not supp"),
        ({"quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": "ROW"}}, "qscheme_act 'ROW' is not supp"),
        ({"sliding_window": [16, 32, None]}, "sliding_window .* is not supported; supported: one size"),
        ({"llama_4_scaling": {"beta": 0.1}}, "llama_4_scaling lacks original_max_position_embeddings"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        hf_config(NEMO | changes)


def merged(piece: bytes, ranks: dict[bytes, int]) -> list[int]:
    """tiktoken's algorithm: the neighbours that make the token of the lowest rank become it, until none do."""
    if piece in ranks:
        return [ranks[piece]]
    parts = [bytes([byte]) for byte in piece]
    while pairs := [(ranks[a + b], at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]:
        at = min(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [ranks[part] for part in parts]


TEXTS = (
    "hello world|the worlds, hello  world\n\n  12312 x|é中文 😀|aaaaaaa aaaa|helllo \t\r\n thé|| un used|[INST|a</ s>"
)


def test_tekken_gives_the_ids_of_its_algorithm(tmp_path: Path) -> None:
    found = Tokenizer.load(locate(str(write_folder(tmp_path / "model")), None, None))
    tokens = [bytes([byte]) for byte in range(256)] + [word.encode() for word in WORDS]
    ranks = {token: rank for rank, token in enumerate(tokens)}
    for text in TEXTS.split("|"):
        expected = [40 + rank for piece in regex.findall(PATTERN, text) for rank in merged(piece.encode(), ranks)]
        assert found.encode(text, add_special_tokens=False) == expected, text
        assert found.encode(text, add_special_tokens=True) == [1, *expected]
        assert found.decode(expected, skip_special_tokens=True) == text
    assert found.encode("[INST]hello[/INST]</s>", add_special_tokens=False) == [3, 40 + ranks[b"hello"], 4, 2]
    assert found.special_ids == set(range(40))
    assert found.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert found.decode([7], skip_special_tokens=False) == "<SPECIAL_7>"


def test_old_files_do_not_list_their_special_tokens() -> None:
    found = special_tokens(tekken(special=None, num_special=22))
    assert found[:5] == list(SPECIAL)
    assert found[9:18:4] == ["[TOOL_CALLS]", "[IMG_END]", "[SYSTEM_PROMPT]"]
    assert found[19:] == ["[TOOL_CONTENT]", "<SPECIAL_20>", "<SPECIAL_21>"]


def test_the_highest_version_of_sentencepiece_is_the_tokenizer(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    (folder / "tekken.json").unlink()
    with pytest.raises(ConfigError, match=r"no tekken\.json and no tokenizer\.model\.v3 or the like; set --tokenizer"):
        locate(str(folder), None, None)
    theirs = train(folder, control_symbols=["[INST]", "[/INST]"])
    (folder / "tokenizer.model").rename(folder / "tokenizer.model.v10")
    for version in (".v1", ".v3", ""):
        (folder / f"tokenizer.model{version}").write_text("")
    found = Tokenizer.load(locate(str(folder), None, None))
    assert found.special_tokens["eos_token"] == "</s>"
    ids = [theirs.bos_id(), theirs.piece_to_id("[INST]"), *theirs.encode("the tokens"), theirs.piece_to_id("[/INST]")]
    assert found.encode("[INST]the tokens[/INST]", add_special_tokens=True) == ids


def test_the_folder_has_everything_and_is_written_once(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    (folder / "consolidated.safetensors").write_bytes(b"")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "model.safetensors").write_bytes(b"")
    found = locate(str(folder), None, None)
    names = "chat_template.jinja config.json consolidated.safetensors params.json tokenizer.json tokenizer_config.json"
    assert " ".join(sorted(path.name for path in found.iterdir())) == names
    assert (found / "consolidated.safetensors").resolve() == folder / "consolidated.safetensors"
    assert locate(str(folder), None, None) == found
    assert not (locate(str(folder), None, None, has_tokenizer=False) / "tokenizer.json").exists()
    write_folder(folder, n_heads=4)
    assert json.loads((locate(str(folder), None, None) / "config.json").read_text())["num_attention_heads"] == 4


def test_weights_in_the_layout_of_transformers_come_first(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    (folder / "config.json").write_text("{}")
    (folder / "consolidated.safetensors").write_bytes(b"")
    assert locate(str(folder), None, None) != folder, "there are no others"
    (folder / "model.safetensors").write_bytes(b"")
    assert locate(str(folder), None, None) == folder


def test_missing_weights_and_damaged_files_are_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    (folder / "consolidated-00002-of-00002.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"of the 2 files consolidated-….safetensors, number 1 is missing"):
        locate(str(folder), None, None)
    (folder / "consolidated-00002-of-00002.safetensors").unlink()
    (folder / "tekken.json").write_text(json.dumps({"config": {"default_num_special_tokens": 3}}))
    with pytest.raises(ConfigError, match=r"tekken\.json: the ranks of special_tokens are not different ones below 3"):
        locate(str(folder), None, None)
    (folder / "tekken.json").write_text(json.dumps({"config": {}}))
    with pytest.raises(ConfigError, match=r"tekken\.json: damaged: the tokenizer is not complete"):
        locate(str(folder), None, None)
    (folder / "params.json").write_text(json.dumps({"dim": 3}))
    with pytest.raises(ConfigError, match=r"params\.json: no n_layers"):
        locate(str(folder), None, None)


def test_only_the_weights_of_the_layout_are_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = write_folder(tmp_path / "snapshot")
    asked: list[list[str]] = []

    def snapshot_download(
        repository: str, *, revision: str | None, cache_dir: str | None, allow_patterns: list[str]
    ) -> str:
        asked.append(allow_patterns)
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    files = ["params.json", "tekken.json", "consolidated.safetensors"]
    monkeypatch.setattr("huggingface_hub.list_repo_files", lambda repository, *, revision: files)
    options = EngineOptions(model="mistralai/some", device="cpu", kv_cache_memory_bytes=1 << 22)
    config = resolve(options)
    assert config.model.load_format == "mistral"
    assert config.model.eos_token_ids == (2,)
    assert config.model.architecture.hidden_size == PARAMS["dim"]
    with pytest.raises(ConfigError, match=r"consolidated\.safetensors: cannot be read: No such file"):
        fetch_weights(options, config)
    assert asked[-1] == ["consolidated*.safetensors"]


def test_the_implementation_of_transformers_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    (folder / "consolidated.safetensors").write_bytes(b"")
    for changes, problem in (
        ({"model_impl": "transformers"}, "transformers; transformers' implementation is not supported for"),
        ({"hf_overrides": {"hidden_act": "tanh"}}, "the activation 'tanh' is not supported"),
    ):
        with pytest.raises(ConfigError, match=problem):
            resolve(EngineOptions(model=str(folder), device="cpu", **changes))


TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]
TOOLS_TEXT = f"[AVAILABLE_TOOLS]{json.dumps(TOOLS)}[/AVAILABLE_TOOLS]"
CALLS = [{"id": "abcdefghi", "type": "function", "function": {"name": "now", "arguments": {"zone": "é"}}}]
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "Hi.", "reasoning_content": "Greet."},
    {"role": "user", "content": "The time?"},
    {"role": "assistant", "content": "", "tool_calls": [*CALLS, *CALLS]},
    {"role": "tool", "content": "noon", "tool_call_id": "abcdefghi"},
]
TWO_CALLS = '[TOOL_CALLS][{"name": "now", "arguments": {"zone": "é"}, "id": "abcdefghi"}, '
TWO_CALLS += TWO_CALLS.removeprefix("[TOOL_CALLS][").removesuffix(", ") + "]</s>"
SYSTEM = "[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT]"
PROMPTS = {
    "v3": f"<s>[INST]hello[/INST]Hi.</s>{TOOLS_TEXT}[INST]Be brief.\n\nThe time?[/INST]{TWO_CALLS}"
    '[TOOL_RESULTS]{"content": "noon", "call_id": "abcdefghi"}[/TOOL_RESULTS]',
    "v7": f"<s>{SYSTEM}[INST]hello[/INST]Hi.</s>{TOOLS_TEXT}[INST]The time?[/INST]{TWO_CALLS}"
    "[TOOL_RESULTS]abcdefghi[TOOL_CONTENT]noon[/TOOL_RESULTS]",
    "v11": f"<s>{SYSTEM}[INST]hello[/INST]Hi.</s>{TOOLS_TEXT}[INST]The time?[/INST]"
    + '[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{"zone": "é"}' * 2
    + "</s>[TOOL_RESULTS]abcdefghi[TOOL_CONTENT]noon[/TOOL_RESULTS]",
    "v13": f"<s>{SYSTEM}{TOOLS_TEXT}[INST]hello[/INST][THINK]Greet.[/THINK]Hi.</s>[INST]The time?[/INST]"
    + '[TOOL_CALLS]now[ARGS]{"zone": "é"}' * 2
    + "</s>[TOOL_RESULTS]noon[/TOOL_RESULTS]",
}
"""The prompts of InstructTokenizerV3, V7, V11 and V13 of mistral-common for CHAT, as text."""


@pytest.mark.parametrize("version", PROMPTS)
def test_the_version_of_the_tokenizer_has_a_chat_template(version: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    special = [*special_tokens(tekken(special=None)), "[THINK]", "[/THINK]"]
    (folder / "tekken.json").write_text(json.dumps(tekken(special=special, num_special=42, version=version)))
    found = locate(str(folder), None, None)
    templates = ChatTemplates.load(found, Tokenizer.load(found), None)
    assert templates is not None
    template = templates.choose(has_tools=True)
    assert template.render(CHAT, {"tools": TOOLS, "add_generation_prompt": True}) == PROMPTS[version]
    assert template.render(CHAT[1:2], {}) == "<s>[INST]hello[/INST]"
    assert detect_tools(template.source) == ("mistral" if version in ("v3", "v7") else "mistral_args")
    assert detect_reasoning(template.source) == ("mistral" if version == "v13" else None)
    with pytest.raises(InvalidParameter, match="messages of the role other are not supported"):
        template.render([{"role": "other", "content": ""}], {})
