"""What the tensors of an adapter change in the base's checkpoint, whichever library has named them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from quire.engine.architecture.adapter_spec import AdapterSpec, LowRank, Piece
from quire.engine.architecture.adapters import gguf, peft, settings
from quire.engine.architecture.adapters.base import Base, Module
from quire.engine.architecture.families import from_hf_config
from quire.engine.protocol.errors import ConfigError
from tests.fakes.adapters import LLAMA, SETTINGS, SHAPES, Q

_GPT_OSS = LLAMA | {
    "architectures": ["GptOssForCausalLM"],
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "head_dim": 4,
}
_MIXTRAL = LLAMA | {"architectures": ["MixtralForCausalLM"], "num_local_experts": 3, "num_experts_per_tok": 2}
_PHI = LLAMA | {"architectures": ["Phi3ForCausalLM"]}
_LAYER = "model.layers.0"
_HF = f"{_LAYER}.self_attn.q_proj.weight"


def base_of(config: Mapping[str, Any]) -> Base:
    return Base(from_hf_config(config))


def read(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], **changes: Any) -> AdapterSpec:
    return peft.read(settings.read(SETTINGS | changes), shapes, base_of(config))


def only(spec: AdapterSpec, tensor: str) -> LowRank:
    (change,) = spec.changes[tensor].low_rank
    return change


def places(module: Module | None) -> list[tuple[str, int | None, list[tuple[int, int, int]]]]:
    """Tensor, expert and rows of each slot, without the layer's name."""
    assert module is not None
    return [
        (slot.tensor.removeprefix(f"{_LAYER}."), slot.expert, [(run.start, run.stop, run.step) for run in slot.rows])
        for slot in module
    ]


@pytest.mark.parametrize(
    ("config", "path", "expected"),
    [
        (
            LLAMA,
            "self_attn.qkv_proj",
            [(f"self_attn.{part}_proj.weight", None, [(0, rows, 1)]) for part, rows in (("q", 16), ("k", 8), ("v", 8))],
        ),
        (LLAMA, "mlp.gate_up_proj", [(f"mlp.{part}_proj.weight", None, [(0, 24, 1)]) for part in ("gate", "up")]),
        (_PHI, "self_attn.k_proj", [("self_attn.qkv_proj.weight", None, [(16, 24, 1)])]),
        (_PHI, "self_attn.qkv_proj", [("self_attn.qkv_proj.weight", None, [(0, 32, 1)])]),
        (_PHI, "mlp.up_proj", [("mlp.gate_up_proj.weight", None, [(24, 48, 1)])]),
        (_MIXTRAL, "mlp.experts.2.up_proj", [("block_sparse_moe.experts.2.w3.weight", None, [(0, 24, 1)])]),
        (_MIXTRAL, "mlp.gate", [("block_sparse_moe.gate.weight", None, [(0, 3, 1)])]),
        (_GPT_OSS, "mlp.experts.2.up_proj", [("mlp.experts.gate_up_proj", 2, [(1, 48, 2)])]),
    ],
)
def test_modules_are_found_by_the_names_of_other_libraries(
    config: Mapping[str, Any], path: str, expected: list[tuple[str, int | None, list[tuple[int, int, int]]]]
) -> None:
    base = base_of(config)
    for prefix in ("model.", "", "model.language_model.", "language_model.model."):
        assert places(base.module(f"{prefix}layers.0.{path}")) == expected
    assert base.module(f"layers.0.{path}s") is None
    assert base.module(f"layers.2.{path}") is None


def test_scaling_follows_rank_and_patterns() -> None:
    def scaling(**changes: Any) -> float:
        return only(read(LLAMA, SHAPES, **changes), _HF).scaling

    assert scaling() == 2
    assert scaling(use_rslora=True) == 4
    assert scaling(r=9, rank_pattern={"q_proj": 4}, alpha_pattern={"self_attn": 1, "^model.layers.0.*": 6}) == 1.5
    assert scaling(rank_pattern={"o_proj": 5}, alpha_pattern={"proj": 1, r"layers\.1\..*": 1}) == 2


def test_stacks_are_divided_among_experts() -> None:
    """A has one expert after another, in B they take turns; the inner wrapper is for the first parameter."""
    start = f"base_model.model.{_LAYER}.mlp.experts"
    shapes = {f"{start}.base_layer.lora_A.weight": (6, 16), f"{start}.base_layer.lora_B.weight": (48, 6)}
    shapes |= {f"{start}.lora_A.weight": (6, 24), f"{start}.lora_B.weight": (16, 6)}
    spec = read(_MIXTRAL, shapes, r=2, target_parameters=["experts.gate_up_proj", "experts.down_proj"])
    up = only(spec, f"{_LAYER}.block_sparse_moe.experts.1.w3.weight")
    assert up.down == Piece(f"{start}.base_layer.lora_A.weight", (range(2, 4),), (range(16),))
    assert up.up == Piece(f"{start}.base_layer.lora_B.weight", (range(24, 48),), (range(1, 6, 3),))
    down = only(spec, f"{_LAYER}.block_sparse_moe.experts.2.w2.weight")
    assert down.down == Piece(f"{start}.lora_A.weight", (range(4, 6),), (range(24),))
    assert len(spec.changes) == 9
    assert spec.max_rank == 2


def test_layers_may_have_different_stacks() -> None:
    """Each layer has the one that is named for it."""
    config = _MIXTRAL | {"intermediate_size": 8}
    targets = ["layers.0.mlp.experts.gate_up_proj", "layers.1.mlp.experts.down_proj"]
    shapes = dict[str, tuple[int, ...]]()
    for number, (inputs, outputs) in enumerate(((16, 16), (8, 16))):
        start = f"base_model.model.model.layers.{number}.mlp.experts"
        shapes |= {f"{start}.lora_A.weight": (6, inputs), f"{start}.lora_B.weight": (outputs, 6)}
    found = {name.partition("experts.")[2] for name in read(config, shapes, r=2, target_parameters=targets).changes}
    assert found == {f"{expert}.{part}.weight" for expert in range(3) for part in ("w1", "w2", "w3")}


@pytest.mark.parametrize("version", [None, "nightly", "0.18.2.dev0@0123456", "0.19.0.dev0"])
def test_square_stacks_of_unknown_versions_are_refused(version: str | None) -> None:
    """PEFT 0.19 exchanged the roles of A and B, which sizes do not tell here."""
    square, start = _MIXTRAL | {"intermediate_size": 16}, f"base_model.model.{_LAYER}.mlp.experts"
    shapes = {f"{start}.lora_A.weight": (6, 16), f"{start}.lora_B.weight": (16, 6)}
    names = {"r": 2, "target_parameters": ["experts.down_proj"]}
    own = [
        only(read(square, shapes, peft_version=each, **names), f"{_LAYER}.block_sparse_moe.experts.0.w2.weight").down
        for each in ("0.18.1", "0.19.0", "0.21.1.dev0")
    ]
    assert [each.tensor.partition("lora_")[2] for each in own] == ["B.weight", "A.weight", "A.weight"]
    with pytest.raises(ConfigError, match=r"lora_A\.weight: it is not known whether"):
        read(square, shapes, peft_version=version, **names)


def test_rows_of_queries_have_the_order_of_the_base() -> None:
    """llama.cpp makes neighbours of the features that rotate together, also in a base in GGUF."""
    pairs = tuple(range(head + half, head + 4, 2) for head in range(0, 16, 4) for half in (0, 1))
    natural, interleaved = base_of(LLAMA), base_of(LLAMA | {"rope_interleave": True})
    a, b = "blk.0.attn_q.weight.lora_a", "blk.0.attn_q.weight.lora_b"
    metadata = {"general.architecture": "llama", "adapter.lora.alpha": 8.0}
    modules = {"blk.0.attn_q.weight": f"{_LAYER}.self_attn.q_proj"}

    def of_gguf(base: Base) -> LowRank:
        return only(gguf.read(metadata, modules, {a: (4, 16), b: (16, 4)}, base), _HF)

    change = of_gguf(natural)
    assert (change.up.rows, change.rows, change.scaling) == (pairs, (range(16),), 2.0)
    assert of_gguf(interleaved) == replace(change, up=replace(change.up, rows=(range(16),)))
    change = only(peft.read(settings.read(SETTINGS), SHAPES, interleaved), _HF)
    assert (change.up.rows, change.rows) == ((range(16),), pairs)


def test_a_resized_vocabulary_and_tied_heads() -> None:
    embedding, head = "base_model.model.model.embed_tokens", "base_model.model.lm_head"
    tied = LLAMA | {"tie_word_embeddings": True}
    for config in (LLAMA, tied):
        with pytest.raises(ConfigError, match=r"lm_head\.weight has 40 tokens, another tensor has 42"):
            read(config, {f"{embedding}.weight": (42, 16)})
    lora = {f"{head}.lora_A.weight": (4, 16), f"{head}.lora_B.weight": (42, 4)}
    spec = read(LLAMA, {f"{embedding}.base_layer.weight": (42, 16), f"{head}.base_layer.weight": (42, 16)} | lora)
    assert spec.changes["lm_head.weight"].shape == (42, 16)
    assert only(spec, "lm_head.weight").rows == (range(42),)
    assert {*read(tied, {f"{embedding}.weight": (40, 16)}).changes} == {"model.embed_tokens.weight"}


def test_the_bias_of_a_head_is_resized() -> None:
    phi = LLAMA | {"architectures": ["PhiForCausalLM"], "num_key_value_heads": 4}
    shapes = {f"base_model.model.{name}.weight": (42, 16) for name in ("model.embed_tokens", "lm_head")}
    assert read(phi, shapes | {"base_model.model.lm_head.bias": (42,)}).changes["lm_head.bias"].shape == (42,)
    with pytest.raises(ConfigError, match=r"lm_head\.bias has 40 tokens, another tensor has 42"):
        read(phi, shapes)


def test_copies_of_a_trained_module() -> None:
    """As PEFT saves an embedding that was resized."""
    names = [f"base_model.model.lm_head.{each}weight" for each in ("", "modules_to_save.", "original_module.")]
    shapes, base = dict.fromkeys(names, (40, 16)), base_of(LLAMA)

    def replacement(digests: list[bytes]) -> Piece | None:
        spec = peft.read(settings.read(SETTINGS), shapes, base, dict(zip(names, digests, strict=True)))
        return spec.changes["lm_head.weight"].replacement

    found = replacement([b"trained", b"trained", b"base"])
    assert found is not None
    assert found.tensor in names[:2]
    with pytest.raises(ConfigError, match="are the same tensor of the model"):
        replacement([b"base", b"trained", b"base"])


def test_adapters_that_an_invocation_activates() -> None:
    assert read(LLAMA, SHAPES, alora_invocation_tokens=[5, 6]).invocation_tokens == (5, 6)
    for token in (40, 2**70):
        with pytest.raises(ConfigError, match=f"alora_invocation_tokens has {token}, but the vocabulary has 40"):
            read(LLAMA, SHAPES, alora_invocation_tokens=[39, token])
    head = "base_model.model.lm_head.weight"
    with pytest.raises(ConfigError, match=rf"^{head}: alora_invocation_tokens are supported with low-rank changes"):
        read(LLAMA, SHAPES | {head: (40, 16)}, alora_invocation_tokens=[5, 6])
    with pytest.raises(ConfigError, match="lora_magnitude_vector: alora_invocation_tokens are supported"):
        read(LLAMA, SHAPES | {f"{Q}.lora_magnitude_vector": (16,)}, alora_invocation_tokens=[5, 6], use_dora=True)
