"""Mamba and Mamba-2, and hybrids with attention: Falcon Mamba, Jamba, Bamba, Granite 4, Nemotron-H, Falcon-H1."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from quire.engine.architecture.families.family import (
    Config,
    DraftHeadLayout,
    Family,
    activation,
    architecture,
    attention,
    feed_forward,
    head_dim,
    layers_by_kind,
    require,
    rms_norm,
    rope,
)
from quire.engine.architecture.families.llama import NAMES
from quire.engine.architecture.feed_forward_spec import MLPSpec, MoESpec
from quire.engine.architecture.model_spec import LayerSpec, ModelSpec
from quire.engine.architecture.recurrent_spec import Mamba2Spec, MambaSpec
from quire.engine.architecture.spec_parts import NormSpec
from quire.engine.protocol.errors import ConfigError

_STATE_NAMES = {
    "layers.state.input": "model.layers.{layer}.mamba.in_proj",
    "layers.state.conv": "model.layers.{layer}.mamba.conv1d",
    "layers.state.decay": "model.layers.{layer}.mamba.A_log",
    "layers.state.skip": "model.layers.{layer}.mamba.D",
    "layers.state.step_bias": "model.layers.{layer}.mamba.dt_bias",
    "layers.state.norm": "model.layers.{layer}.mamba.norm",
    "layers.state.output": "model.layers.{layer}.mamba.out_proj",
}
_ALONE = {
    "embedding": "backbone.embeddings",
    "layers.attention_norm": "backbone.layers.{layer}.norm",
    "norm": "backbone.norm_f",
    "head": "lm_head",
} | {module: name.replace("model.", "backbone.").replace("mamba.", "mixer.") for module, name in _STATE_NAMES.items()}
_LEGACY_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}


def mamba2(config: Config, norm: NormSpec | None, **changes: Any) -> Mamba2Spec:
    """The state space with Bamba's names in config.json."""
    require(config, "hidden_act", "silu")
    heads, width = int(config["mamba_n_heads"]), config["mamba_d_head"]
    if width == "auto":
        inner = int(config.get("mamba_d_ssm") or config["mamba_expand"] * config["hidden_size"])
        if inner % heads:
            raise ConfigError(f"mamba_n_heads {heads} does not divide the {inner} features of the Mamba layers")
        width = inner // heads
    bias = bool(config["mamba_proj_bias"])
    return Mamba2Spec(
        **{
            "num_value_heads": heads,
            "value_head_dim": int(width),
            "groups": int(config["mamba_n_groups"]),
            "state_size": int(config["mamba_d_state"]),
            "conv_size": int(config["mamba_d_conv"]),
            "norm": norm,
            "conv_bias": bool(config["mamba_conv_bias"]),
            "input_bias": bias,
            "output_bias": bias,
            "step_limits": _limits(config.get("time_step_limit")),
            **changes,
        }
    )


def _limits(stored: Any) -> tuple[float, float]:
    """transformers writes infinity as an object."""
    if stored is None:
        return 0.0, math.inf
    low, high = (float(each["__float__"] if isinstance(each, Mapping) else each) for each in stored)
    return low, high


def _alone(name: str, config: Config) -> ModelSpec:
    """Layers with a state space only. There are no positions: lengths have no limit of the model's own."""
    norm, bias = rms_norm(config, eps=float(config["layer_norm_epsilon"])), bool(config["use_bias"])
    names = {"n_heads": "num_heads", "d_head": "head_dim", "n_groups": "n_groups", "d_state": "state_size"}
    names |= {"d_conv": "conv_kernel", "proj_bias": "use_bias", "conv_bias": "use_conv_bias"}
    settings = {**config, **{f"mamba_{ours}": config[theirs] for ours, theirs in names.items()}}
    layer = LayerSpec(
        attention=None,
        state=mamba2(settings, norm, input_bias=bias, output_bias=bias),
        attention_norm=norm,
        feed_forward=None,
        feed_forward_norm=None,
    )
    return architecture(name, config, [layer] * int(config["num_hidden_layers"]), norm)


def mamba(config: Config, norm: NormSpec | None) -> MambaSpec:
    """The state space with Jamba's names in config.json."""
    require(config, "hidden_act", "silu")
    hidden, rank = int(config["hidden_size"]), config["mamba_dt_rank"]
    return MambaSpec(
        width=int(config.get("mamba_d_ssm") or config["mamba_expand"] * hidden),
        state_size=int(config["mamba_d_state"]),
        rank=-(-hidden // 16) if rank == "auto" else int(rank),
        conv_size=int(config["mamba_d_conv"]),
        norm=norm,
        conv_bias=bool(config["mamba_conv_bias"]),
        bias=bool(config["mamba_proj_bias"]),
    )


def _mamba_alone(name: str, config: Config) -> ModelSpec:
    """Falcon Mamba has norms without weights in its layers."""
    names = {"expand": "expand", "d_state": "state_size", "dt_rank": "time_step_rank", "d_conv": "conv_kernel"}
    names |= {"proj_bias": "use_bias", "conv_bias": "use_conv_bias"}
    settings = {**config, **{f"mamba_{ours}": config[theirs] for ours, theirs in names.items()}}
    settings["mamba_d_ssm"] = config.get("intermediate_size")
    norm, inner = rms_norm(config, eps=float(config["layer_norm_epsilon"])), config.get("mixer_rms_eps")
    layer = LayerSpec(
        attention=None,
        state=mamba(settings, None if inner is None else NormSpec(eps=float(inner), has_weight=False)),
        attention_norm=norm,
        feed_forward=None,
        feed_forward_norm=None,
    )
    return architecture(name, config, [layer] * int(config["num_hidden_layers"]), norm)


def _jamba(name: str, config: Config) -> ModelSpec:
    """Attention has no positions. Some layers have experts."""
    norm, every = rms_norm(config), range(int(config["num_hidden_layers"]))
    mixers: dict[str, dict[str, Any]] = {
        "linear_attention": {"attention": None, "state": mamba(config, norm)},
        "full_attention": {"attention": attention(config, None)},
    }
    period, offset = int(config["attn_layer_period"]), int(config["attn_layer_offset"])
    kinds = ["full_attention" if number % period == offset else "linear_attention" for number in every]
    experts: MLPSpec | MoESpec = feed_forward(config)
    if int(config["num_experts"]) > 1:
        experts = MoESpec(
            num_experts=int(config["num_experts"]),
            top_k=int(config["num_experts_per_tok"]),
            intermediate_size=int(config["intermediate_size"]),
            activation=activation(config.get("hidden_act", "silu")),
        )
    period, offset = int(config["expert_layer_period"]), int(config["expert_layer_offset"])
    inner = [experts if number % period == offset else feed_forward(config) for number in every]
    layers = layers_by_kind(kinds, mixers, inner, attention_norm=norm, feed_forward_norm=norm)
    return architecture(name, config, layers, norm)


def kinds_of_layers(config: Config) -> list[str]:
    """The kinds of layers, under one of their names."""
    stored = config.get("layers_block_type") or config.get("layer_types") or []
    return [_LEGACY_KINDS.get(kind, kind) for kind in stored]


def _bamba(name: str, config: Config) -> ModelSpec:
    norm, count = rms_norm(config), int(config["num_hidden_layers"])
    mixers: dict[str, dict[str, Any]] = {
        "linear_attention": {"attention": None, "state": mamba2(config, norm)},
        "full_attention": {"attention": attention(config, rope(config, head_dim(config)))},
    }
    with_attention = set(config.get("attn_layer_indices") or ())
    kinds = ["full_attention" if number in with_attention else "linear_attention" for number in range(count)]
    dense = [feed_forward(config)] * count
    return architecture(
        name,
        config,
        layers_by_kind(kinds, mixers, dense, attention_norm=norm, feed_forward_norm=norm),
        norm,
    )


def _granite_hybrid(name: str, config: Config) -> ModelSpec:
    """Granite 4: an MLP or, if there are experts, a shared expert."""
    require(config, "position_embedding_type", None, "rope", "nope")
    norm, count = rms_norm(config), int(config["num_hidden_layers"])
    rope_spec = rope(config, head_dim(config)) if config.get("position_embedding_type") == "rope" else None
    mixers: dict[str, dict[str, Any]] = {
        "linear_attention": {"attention": None, "state": mamba2(config, norm)},
        "full_attention": {"attention": attention(config, rope_spec, scale=float(config["attention_multiplier"]))},
    }
    dense = feed_forward(config, intermediate_size=int(config["shared_intermediate_size"]))
    inner: MLPSpec | MoESpec = dense
    if config["num_local_experts"]:
        inner = MoESpec(
            num_experts=int(config["num_local_experts"]),
            top_k=int(config["num_experts_per_tok"]),
            intermediate_size=int(config["intermediate_size"]),
            activation=activation(config.get("hidden_act", "silu")),
            scoring="topk_softmax",
            shared=dense,
        )
    layers = layers_by_kind(
        kinds_of_layers(config) or ["linear_attention"] * count,
        mixers,
        [inner] * count,
        attention_norm=norm,
        feed_forward_norm=norm,
        residual_multiplier=float(config["residual_multiplier"]),
    )
    return architecture(
        name,
        config,
        layers,
        norm,
        embedding_multiplier=float(config["embedding_multiplier"]),
        logit_multiplier=1 / float(config["logits_scaling"]),
    )


def _nemotron_h(name: str, config: Config) -> ModelSpec:
    kinds = kinds_of_layers(config) or _nemotron_kinds(config.get("hybrid_override_pattern") or "ME*-")
    norm = rms_norm(config, eps=float(config["layer_norm_epsilon"]))
    return architecture(name, config, _nemotron_layers(config, kinds), norm)


def _nemotron_mtp(config: Config) -> list[LayerSpec]:
    """The layers of the head for multi-token prediction: attention, then experts, unless config.json states others."""
    stated, pattern = config.get("mtp_layers_block_type"), config.get("mtp_hybrid_override_pattern")
    kinds = kinds_of_layers({"layer_types": stated}) if stated else _nemotron_kinds(pattern or "*E")
    if "linear_attention" in kinds:
        raise ConfigError("mtp: layers with recurrent states are not supported in a head")
    return _nemotron_layers(config, kinds)


def _nemotron_kinds(pattern: str) -> list[str]:
    letters = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
    return [letters.get(letter, letter) for letter in pattern]


def _nemotron_layers(config: Config, kinds: Sequence[str]) -> list[LayerSpec]:
    """Each layer is one of a state space, attention without positions, an MLP, or experts. Steps are limited by
    `time_step_limit`, as by the publisher; transformers raises them to `time_step_min` in prompts, and not in decodes.
    """
    norm, bias = rms_norm(config, eps=float(config["layer_norm_epsilon"])), bool(config["use_bias"])
    require(config, "mamba_hidden_act", "silu")
    require(config, "sliding_window", None)
    names = {"n_heads": "mamba_num_heads", "d_head": "mamba_head_dim", "d_state": "ssm_state_size"}
    names |= {"n_groups": "n_groups", "d_conv": "conv_kernel", "conv_bias": "use_conv_bias", "proj_bias": "use_bias"}
    settings = {f"mamba_{ours}": config.get(f"mamba_{ours}", config[theirs]) for ours, theirs in names.items()}
    state = mamba2({**config, **settings}, norm, input_bias=bias, output_bias=bias)
    dense = feed_forward(config, activation=activation(config["mlp_hidden_act"]), is_gated=False)
    experts = MoESpec(
        num_experts=int(config.get("num_local_experts") or config["n_routed_experts"]),
        top_k=int(config["num_experts_per_tok"]),
        intermediate_size=int(config["moe_intermediate_size"]),
        activation=dense.activation,
        is_gated=False,
        latent_size=int(config.get("moe_latent_size") or 0),
        scoring="sigmoid",
        renormalize=bool(config["norm_topk_prob"]),
        scale=float(config["routed_scaling_factor"]),
        groups=int(config["n_group"]),
        top_groups=int(config["topk_group"]),
        group_score="top2_sum",
        correction_bias=True,
        shared=replace(dense, intermediate_size=int(config["moe_shared_expert_intermediate_size"])),
    )
    nothing: dict[str, Any] = {"attention": None, "attention_norm": None, "feed_forward": None}
    nothing["feed_forward_norm"] = None
    one_of = {
        "linear_attention": nothing | {"state": state, "attention_norm": norm},
        "full_attention": nothing
        | {"attention": attention(config, None, qkv_bias=False, output_bias=False), "attention_norm": norm},
        "mlp": nothing | {"feed_forward": dense, "feed_forward_norm": norm},
        "moe": nothing | {"feed_forward": experts, "feed_forward_norm": norm},
    }
    return layers_by_kind(kinds, one_of)


def _falcon_h1(name: str, config: Config) -> ModelSpec:
    """Each layer has attention and a state space, side by side."""
    norm, bias = rms_norm(config), bool(config["projectors_bias"])
    before, after = float(config["attention_in_multiplier"]), float(config["attention_out_multiplier"])
    if before != 1.0:
        require(config, "attention_bias", False)  # the factor on the input becomes one on the output
    by = float(config["ssm_in_multiplier"])
    if by != 1.0:
        require(config, "mamba_proj_bias", False)
    multipliers = [by * float(each) for each in config.get("ssm_multipliers") or [1.0] * 5]
    gate, down = (float(each) for each in config.get("mlp_multipliers") or (1.0, 1.0))
    layer = LayerSpec(
        attention=attention(
            config,
            rope(config, head_dim(config)),
            scale=head_dim(config) ** -0.5 * float(config["key_multiplier"]) * before**2,
            output_multiplier=before * after,
        ),
        state=mamba2(
            config,
            norm if config["mamba_rms_norm"] else None,
            norm_before_gate=bool(config["mamba_norm_before_gate"]),
            output_bias=bias,
            multipliers=tuple(multipliers),
            output_multiplier=float(config["ssm_out_multiplier"]),
        ),
        attention_norm=norm,
        feed_forward=feed_forward(config, gate_multiplier=gate, output_multiplier=down),
        feed_forward_norm=norm,
    )
    return architecture(
        name,
        config,
        [layer] * int(config["num_hidden_layers"]),
        norm,
        embedding_multiplier=float(config["embedding_multiplier"]),
        logit_multiplier=float(config["lm_head_multiplier"]),
    )


_BAMBA_NAMES = (
    NAMES
    | _STATE_NAMES
    | {
        "layers.feed_forward_norm": "model.layers.{layer}.pre_ff_layernorm",
        "layers.feed_forward.gate_up": "model.layers.{layer}.feed_forward.{part}_proj",
        "layers.feed_forward.down": "model.layers.{layer}.feed_forward.down_proj",
        "norm": "model.final_layernorm",
    }
)
_GRANITE_NAMES = (
    NAMES
    | _STATE_NAMES
    | {
        "layers.feed_forward.router": "model.layers.{layer}.block_sparse_moe.router.layer",
        "layers.feed_forward.experts.gate_up": "model.layers.{layer}.block_sparse_moe.input_linear",
        "layers.feed_forward.experts.down": "model.layers.{layer}.block_sparse_moe.output_linear",
        "layers.feed_forward.gate_up": "model.layers.{layer}.shared_mlp.input_linear",
        "layers.feed_forward.down": "model.layers.{layer}.shared_mlp.output_linear",
        "layers.feed_forward.shared.gate_up": "model.layers.{layer}.shared_mlp.input_linear",
        "layers.feed_forward.shared.down": "model.layers.{layer}.shared_mlp.output_linear",
    }
)
_JAMBA_NAMES = _BAMBA_NAMES | {
    "layers.state.select": "model.layers.{layer}.mamba.x_proj",
    "layers.state.step": "model.layers.{layer}.mamba.dt_proj",
    "layers.state.step_norm": "model.layers.{layer}.mamba.dt_layernorm",
    "layers.state.key_norm": "model.layers.{layer}.mamba.b_layernorm",
    "layers.state.query_norm": "model.layers.{layer}.mamba.c_layernorm",
    "layers.feed_forward.router": "model.layers.{layer}.feed_forward.router",
    "layers.feed_forward.experts.gate_up": "model.layers.{layer}.feed_forward.experts.{expert}.{part}_proj",
    "layers.feed_forward.experts.down": "model.layers.{layer}.feed_forward.experts.{expert}.down_proj",
}
_MAMBA_NAMES = _ALONE | {
    "layers.state.select": "backbone.layers.{layer}.mixer.x_proj",
    "layers.state.step": "backbone.layers.{layer}.mixer.dt_proj",
}
_NEMOTRON_NAMES = _ALONE | {
    "layers.attention.qkv": "backbone.layers.{layer}.mixer.{part}_proj",
    "layers.attention.output": "backbone.layers.{layer}.mixer.o_proj",
    "layers.feed_forward_norm": "backbone.layers.{layer}.norm",
    "layers.feed_forward.gate_up": "backbone.layers.{layer}.mixer.up_proj",
    "layers.feed_forward.down": "backbone.layers.{layer}.mixer.down_proj",
    "layers.feed_forward.router": "backbone.layers.{layer}.mixer.gate",
    "layers.feed_forward.router.correction_bias": "backbone.layers.{layer}.mixer.gate.e_score_correction_bias",
    "layers.feed_forward.experts.gate_up": "backbone.layers.{layer}.mixer.experts.{expert}.up_proj",
    "layers.feed_forward.experts.down": "backbone.layers.{layer}.mixer.experts.{expert}.down_proj",
    "layers.feed_forward.shared.gate_up": "backbone.layers.{layer}.mixer.shared_experts.up_proj",
    "layers.feed_forward.shared.down": "backbone.layers.{layer}.mixer.shared_experts.down_proj",
    "layers.feed_forward.latent_down": "backbone.layers.{layer}.mixer.fc1_latent_proj",
    "layers.feed_forward.latent_up": "backbone.layers.{layer}.mixer.fc2_latent_proj",
}
_NEMOTRON_MTP = DraftHeadLayout(
    layer="mtp.layers.{layer}",
    names={
        "heads.embedding_norm": "mtp.layers.0.enorm",
        "heads.hidden_norm": "mtp.layers.0.hnorm",
        "heads.projection": "mtp.layers.0.eh_proj",
        "heads.norm": "mtp.layers.{last}.final_layernorm",
    },
    layers=_nemotron_mtp,
)
_DEFAULTS = {
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}
_MAMBA = {
    "expand": 2,
    "state_size": 16,
    "conv_kernel": 4,
    "time_step_rank": "auto",
    "use_bias": False,
    "use_conv_bias": True,
    "layer_norm_epsilon": 1e-5,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": True,
}
FAMILIES = {
    "Mamba2ForCausalLM": Family(
        _alone,
        _ALONE,
        {
            "num_heads": 128,
            "head_dim": 64,
            "n_groups": 8,
            "state_size": 128,
            "conv_kernel": 4,
            "use_bias": False,
            "use_conv_bias": True,
            "layer_norm_epsilon": 1e-5,
            "max_position_embeddings": 262144,
        },
        prefix="backbone.",
    ),
    "MambaForCausalLM": Family(
        _mamba_alone,
        _MAMBA_NAMES,
        _MAMBA,
        prefix="backbone.",
    ),
    "FalconMambaForCausalLM": Family(_mamba_alone, _MAMBA_NAMES, _MAMBA | {"mixer_rms_eps": 1e-6}, prefix="backbone."),
    "JambaForCausalLM": Family(
        _jamba,
        _JAMBA_NAMES,
        {
            "num_key_value_heads": 8,
            "max_position_embeddings": 262144,
            "num_experts_per_tok": 2,
            "num_experts": 16,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "attn_layer_period": 8,
            "attn_layer_offset": 4,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_dt_rank": "auto",
            "mamba_conv_bias": True,
            "mamba_proj_bias": False,
        },
    ),
    "BambaForCausalLM": Family(
        _bamba,
        _BAMBA_NAMES,
        _DEFAULTS
        | {
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 262144,
            "partial_rotary_factor": 0.5,
        },
    ),
    "GraniteMoeHybridForCausalLM": Family(
        _granite_hybrid,
        _GRANITE_NAMES,
        _DEFAULTS
        | {
            "max_position_embeddings": 2048,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 1024,
            **dict.fromkeys(
                ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"), 1.0
            ),
        },
    ),
    "NemotronHForCausalLM": Family(
        _nemotron_h,
        _NEMOTRON_NAMES,
        {
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 4096,
            "mlp_hidden_act": "relu2",
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "ssm_state_size": 128,
            "n_groups": 8,
            "conv_kernel": 4,
            "use_bias": False,
            "use_conv_bias": True,
            "layer_norm_epsilon": 1e-5,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 7688,
            "moe_shared_expert_intermediate_size": 7688,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
        },
        prefix="backbone.",
        ignored_prefixes=("mtp.",),
        draft_heads={"mtp": _NEMOTRON_MTP},
    ),
    "FalconH1ForCausalLM": Family(
        _falcon_h1,
        _BAMBA_NAMES,
        _DEFAULTS
        | {
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 8192,
            "mamba_d_ssm": 1024,
            "mamba_norm_before_gate": True,
            "mamba_rms_norm": False,
            "projectors_bias": False,
            **dict.fromkeys(("embedding_multiplier", "lm_head_multiplier", "key_multiplier"), 1.0),
            **dict.fromkeys(("attention_in_multiplier", "attention_out_multiplier"), 1.0),
            **dict.fromkeys(("ssm_in_multiplier", "ssm_out_multiplier"), 1.0),
        },
    ),
}
