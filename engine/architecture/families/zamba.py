"""Zamba and Zamba2: Mamba or Mamba-2 layers. Some have attention and an MLP before them, whose weights they share."""

from __future__ import annotations

from typing import Any

from quire.engine.architecture.families.family import (
    Config,
    Family,
    Runs,
    activation,
    architecture,
    attention,
    head_dim,
    require,
    rms_norm,
    rope,
)
from quire.engine.architecture.families.mamba import kinds_of_layers, mamba, mamba2
from quire.engine.architecture.feed_forward_spec import MLPSpec
from quire.engine.architecture.model_spec import LayerSpec, ModelSpec
from quire.engine.architecture.recurrent_spec import GroupedMambaSpec
from quire.engine.architecture.residual_spec import SharedBlockSpec
from quire.engine.protocol.errors import ConfigError

_PUBLISHED_KINDS = ["hybrid" if layer in (*range(6, 43, 6), 47, 51) else "linear_attention" for layer in range(54)]


def _zamba2(name: str, config: Config) -> ModelSpec:
    """As in Nemotron-H, steps are not limited by `time_step_min`, to which transformers raises them in prompts only."""
    require(config, "use_long_context", False)
    hidden, heads, count = (int(config[each]) for each in ("hidden_size", "n_mamba_heads", "num_hidden_layers"))
    kinds, bias = kinds_of_layers(config) or _PUBLISHED_KINDS, bool(config["add_bias_linear"])
    if len(kinds) != count or set(kinds) - {"linear_attention", "hybrid"}:
        raise ConfigError(f"layers_block_type must be {count} times linear_attention or hybrid")
    settings = {
        **config,
        "hidden_act": "silu",
        "mamba_n_heads": heads,
        "mamba_n_groups": config["mamba_ngroups"],
        "mamba_d_head": int(config["mamba_expand"] * hidden) // heads,
        "mamba_proj_bias": bias,
        "mamba_conv_bias": True,
        "head_dim": 2 * hidden // int(config["num_attention_heads"]),
    }
    norm = rms_norm(config)
    state = mamba2(settings, rms_norm({"rms_norm_eps": 1e-5}))
    shared: dict[str, Any] = {
        "attention": attention(
            settings,
            rope(settings, head_dim(settings)) if config["use_mem_rope"] else None,
            scale=(head_dim(settings) / 2) ** -0.5,
            input_size=2 * hidden,
            qkv_bias=False,
            output_bias=False,
        ),
        "feed_forward": MLPSpec(
            intermediate_size=int(config.get("intermediate_size") or 4 * hidden),
            activation=activation(config["hidden_act"]),
            bias=bias,
            is_adapted=True,
        ),
    }
    alone: dict[str, Any] = {"attention": None, "feed_forward": None}
    common: dict[str, Any] = {"state": state, "attention_norm": norm, "feed_forward_norm": None}
    with_block = [number for number, kind in enumerate(kinds) if kind == "hybrid"]
    layers = []
    for number in range(count):
        if number not in with_block:
            layers.append(LayerSpec(**alone, **common))
            continue
        use = with_block.index(number)
        block = SharedBlockSpec(
            source=with_block[use % int(config["num_mem_blocks"])],
            use=use,
            norm=norm,
            rank=int(config["adapter_rank"]),
            adapts_attention=bool(config["use_shared_attention_adapter"]),
        )
        layers.append(LayerSpec(**shared, **common, residual=block))
    return architecture(name, config, layers, norm, max_position=int(config["max_position_embeddings"]))


def _zamba(name: str, config: Config) -> ModelSpec:
    """Mamba with heads. All layers with a block have the same one, without adapters."""
    hidden, count = int(config["hidden_size"]), int(config["num_hidden_layers"])
    require(config, "attention_hidden_size", None, 2 * hidden)
    period, offset = int(config["attn_layer_period"]), int(config["attn_layer_offset"])
    kinds = kinds_of_layers(config)
    if not kinds:
        after = ("hybrid" if number % period == offset else "linear_attention" for number in range(count - 3))
        kinds = ["linear_attention", "linear_attention", "hybrid", *after][:count]
    if len(kinds) != count or set(kinds) - {"linear_attention", "hybrid"}:
        raise ConfigError(f"layers_block_type must be {count} times linear_attention or hybrid")
    norm = rms_norm(config)
    plain = mamba({**config, "hidden_act": config["hidden_mamba_act"]}, None)
    state = GroupedMambaSpec(**vars(plain), groups=int(config["n_mamba_heads"]))
    dim = int(config.get("attention_head_dim") or 2 * hidden // int(config["num_attention_heads"]))
    settings = {**config, "head_dim": dim}
    shared: dict[str, Any] = {
        "attention": attention(
            settings, None, scale=(dim / 2) ** -0.5, input_size=2 * hidden, qkv_bias=False, output_bias=False
        ),
        "feed_forward": MLPSpec(
            intermediate_size=int(config["intermediate_size"]), activation=activation(config["hidden_act"])
        ),
    }
    common: dict[str, Any] = {"state": state, "attention_norm": norm, "feed_forward_norm": None}
    with_block = [number for number, kind in enumerate(kinds) if kind == "hybrid"]
    layers = []
    for number in range(count):
        if number not in with_block:
            layers.append(LayerSpec(attention=None, feed_forward=None, **common))
            continue
        block = SharedBlockSpec(
            source=with_block[0], use=with_block.index(number), norm=norm, rank=0, adapts_attention=False
        )
        layers.append(LayerSpec(**shared, **common, residual=block))
    return architecture(name, config, layers, norm, max_position=int(config["max_position_embeddings"]))


def _alternating(layer: LayerSpec, module: str, part: str) -> Runs | None:
    """Rows of inputs and of gates alternate."""
    if module != "layers.state.input" or not isinstance(layer.state, GroupedMambaSpec):
        return None
    return [range("xz".index(part), 2 * layer.state.width, 2)]


_MAMBA, _BLOCK = "model.layers.{layer}.{beside_mamba_decoder}", "model.layers.{block}.shared_transformer"
_NAMES = {
    "embedding": "model.embed_tokens",
    "norm": "model.final_layernorm",
    "head": "lm_head",
    "layers.attention_norm": f"{_MAMBA}input_layernorm",
    "layers.state.input": f"{_MAMBA}mamba.in_proj",
    "layers.state.conv": f"{_MAMBA}mamba.conv1d",
    "layers.state.decay": f"{_MAMBA}mamba.A_log",
    "layers.state.skip": f"{_MAMBA}mamba.D",
    "layers.state.step_bias": f"{_MAMBA}mamba.dt_bias",
    "layers.state.norm": f"{_MAMBA}mamba.norm",
    "layers.state.output": f"{_MAMBA}mamba.out_proj",
    "layers.block.attention_norm": f"{_BLOCK}.input_layernorm",
    "layers.block.attention.qkv": f"{_BLOCK}.self_attn.{{part}}_proj",
    "layers.block.attention.output": f"{_BLOCK}.self_attn.o_proj",
    "layers.block.feed_forward_norm": f"{_BLOCK}.pre_ff_layernorm",
    "layers.block.feed_forward.gate_up": f"{_BLOCK}.feed_forward.gate_up_proj",
    "layers.block.feed_forward.down": f"{_BLOCK}.feed_forward.down_proj",
    "layers.block_output": "model.layers.{layer}.linear",
    "layers.attention_adapter.down": f"{_BLOCK}.self_attn.linear_{{part}}_adapter_list.{{use}}.0",
    "layers.feed_forward_adapter.down": f"{_BLOCK}.feed_forward.gate_up_proj_adapter_list.{{use}}.0",
    "layers.feed_forward_adapter.up.gate_up": f"{_BLOCK}.feed_forward.gate_up_proj_adapter_list.{{use}}.1",
    **{
        f"layers.attention_adapter.up.{part}": f"{_BLOCK}.self_attn.linear_{part}_adapter_list.{{use}}.1"
        for part in "qkv"
    },
}
_FIRST_BLOCK = "model.layers.{block}.shared_transf"
_FIRST_NAMES = {
    **{module: name for module, name in _NAMES.items() if not module.startswith(("layers.block.", "layers.state."))},
    "layers.state.input": f"{_MAMBA}mamba.in_proj",
    "layers.state.conv": f"{_MAMBA}mamba.conv1d",
    "layers.state.select.weight": f"{_MAMBA}mamba.x_proj_weight",
    "layers.state.step.weight": f"{_MAMBA}mamba.dt_proj_weight",
    "layers.state.step_bias": f"{_MAMBA}mamba.dt_proj_bias",
    "layers.state.decay": f"{_MAMBA}mamba.A_log",
    "layers.state.skip": f"{_MAMBA}mamba.D",
    "layers.state.output": f"{_MAMBA}mamba.out_proj",
    "layers.block.attention_norm": f"{_FIRST_BLOCK}.input_layernorm",
    "layers.block.attention.qkv": f"{_FIRST_BLOCK}.self_attn.{{part}}_proj",
    "layers.block.attention.output": f"{_FIRST_BLOCK}.self_attn.o_proj",
    "layers.block.feed_forward_norm": f"{_FIRST_BLOCK}.pre_ff_layernorm",
    "layers.block.feed_forward.gate_up": f"{_FIRST_BLOCK}.feed_forward.{{part}}_proj",
    "layers.block.feed_forward.down": f"{_FIRST_BLOCK}.feed_forward.down_proj",
}
FAMILIES = {
    "ZambaForCausalLM": Family(
        _zamba,
        _FIRST_NAMES,
        {
            "max_position_embeddings": 4096,
            "hidden_size": 3712,
            "intermediate_size": 14848,
            "num_hidden_layers": 76,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "n_mamba_heads": 2,
            "hidden_act": "gelu",
            "hidden_mamba_act": "silu",
            "rms_norm_eps": 1e-5,
            "attn_layer_period": 6,
            "attn_layer_offset": 4,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_dt_rank": "auto",
            "mamba_conv_bias": True,
            "mamba_proj_bias": False,
            "tie_word_embeddings": True,
        },
        rows=_alternating,
    ),
    "Zamba2ForCausalLM": Family(
        _zamba2,
        _NAMES,
        {
            "max_position_embeddings": 4096,
            "num_hidden_layers": 54,
            "mamba_d_state": 64,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_ngroups": 1,
            "n_mamba_heads": 8,
            "add_bias_linear": False,
            "hidden_act": "gelu",
            "num_mem_blocks": 1,
            "use_shared_attention_adapter": False,
            "adapter_rank": 128,
            "use_mem_rope": False,
            "use_long_context": False,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
        },
    ),
}
