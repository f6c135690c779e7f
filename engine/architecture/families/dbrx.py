"""DBRX: a mixture of experts with LayerNorm, and clamped queries, keys and values."""

from __future__ import annotations

from quire.engine.architecture.families.family import (
    Config,
    Family,
    activation,
    architecture,
    attention,
    head_dim,
    layer_norm,
    require,
    rope,
)
from quire.engine.architecture.feed_forward_spec import MoESpec
from quire.engine.architecture.model_spec import LayerSpec, ModelSpec


def _dbrx(name: str, config: Config) -> ModelSpec:
    """The base of rotary positions is in `attn_config`, where transformers does not look for it."""
    inner, mixture = config.get("attn_config") or {}, config.get("ffn_config") or {}
    require(mixture, "moe_normalize_expert_weights", 1, None)
    scaling = config.get("rope_parameters") or {}
    config = {
        **config,
        "rope_parameters": {**scaling, "rope_theta": inner.get("rope_theta") or scaling.get("rope_theta")},
        "num_key_value_heads": inner.get("kv_n_heads", 1),
    }
    norm = layer_norm(1e-5, bias=False)
    layer = LayerSpec(
        attention=attention(config, rope(config, head_dim(config)), clip=float(inner.get("clip_qkv") or 0)),
        attention_norm=norm,
        feed_forward=MoESpec(
            num_experts=int(mixture.get("moe_num_experts", 4)),
            top_k=int(mixture.get("moe_top_k", 1)),
            intermediate_size=int(mixture.get("ffn_hidden_size", 3584)),
            activation=activation((mixture.get("ffn_act_fn") or {}).get("name", "silu")),
            renormalize=mixture.get("moe_normalize_expert_weights", 1) is not None,
        ),
        feed_forward_norm=norm,
    )
    return architecture(name, config, [layer] * int(config["num_hidden_layers"]), norm)


_LAYER = "transformer.blocks.{layer}"
_NAMES = {
    "embedding": "transformer.wte",
    "layers.attention_norm": f"{_LAYER}.norm_attn_norm.norm_1",
    "layers.attention.qkv": f"{_LAYER}.norm_attn_norm.attn.Wqkv",
    "layers.attention.output": f"{_LAYER}.norm_attn_norm.attn.out_proj",
    "layers.feed_forward_norm": f"{_LAYER}.norm_attn_norm.norm_2",
    "layers.feed_forward.router": f"{_LAYER}.ffn.router.layer",
    "layers.feed_forward.experts.gate_up.gate.weight": f"{_LAYER}.ffn.experts.mlp.w1",
    "layers.feed_forward.experts.gate_up.up.weight": f"{_LAYER}.ffn.experts.mlp.v1",
    "layers.feed_forward.experts.down.weight": f"{_LAYER}.ffn.experts.mlp.w2",
    "norm": "transformer.norm_f",
    "head": "lm_head",
}
FAMILIES = {
    "DbrxForCausalLM": Family(
        _dbrx,
        _NAMES,
        {
            "hidden_size": 2048,
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
            "max_position_embeddings": 2048,
        },
        {"d_model": "hidden_size", "n_heads": "num_attention_heads", "n_layers": "num_hidden_layers"}
        | {"max_seq_len": "max_position_embeddings"},
        prefix="transformer.",
        is_transposed=lambda module: module == "layers.feed_forward.experts.down",
    ),
}
