"""Gemma 1, 2, 3, 3n and 4, PaliGemma, EmbeddingGemma: norms stored minus 1, post-norms, scaled embeddings, windows,
soft-capping."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from quire.engine.architecture.encoder_spec import bidirectional
from quire.engine.architecture.families import gemma_vl, mobilenet, towers, vit
from quire.engine.architecture.families.family import (
    NOT_TEXT,
    Config,
    Family,
    activation,
    architecture,
    attention,
    feed_forward,
    head_dim,
    of_multimodal,
    require,
    rms_norm,
    rope,
    windows,
)
from quire.engine.architecture.families.llama import NAMES
from quire.engine.architecture.feed_forward_spec import MLPSpec, MoESpec
from quire.engine.architecture.model_spec import LayerSpec, ModelSpec
from quire.engine.architecture.residual_spec import AltUpSpec, LaurelSpec, LayerInputSpec, ScaledResidualSpec
from quire.engine.architecture.spec_parts import NormSpec
from quire.engine.protocol.errors import ConfigError

_BOTH = NAMES | {
    "layers.attention_post_norm": "model.layers.{layer}.post_attention_layernorm",
    "layers.feed_forward_norm": "model.layers.{layer}.pre_feedforward_layernorm",
    "layers.feed_forward_post_norm": "model.layers.{layer}.post_feedforward_layernorm",
}


def _gemma(name: str, config: Config) -> ModelSpec:
    norm, rope_spec = rms_norm(config, offset=1.0), rope(config, head_dim(config))
    layer = LayerSpec(
        attention=attention(config, rope_spec),
        attention_norm=norm,
        feed_forward=feed_forward(config, activation="gelu_tanh"),  # whatever config.json says
        feed_forward_norm=norm,
    )
    layers = [layer] * int(config["num_hidden_layers"])
    return architecture(name, config, layers, norm, embedding_multiplier=float(config["hidden_size"]) ** 0.5)


def _gemma2(name: str, config: Config) -> ModelSpec:
    """Gemma 2 and 3. Gemma 3 has QK norm instead of soft-capping, and another RoPE in sliding-window layers.

    EmbeddingGemma is an encoder: queries also attend to later tokens, in layers with a window to half of it on each
    side.
    """
    is_encoder = config.get("use_bidirectional_attention")
    require(config, "use_bidirectional_attention", None, False, *([True] if name.startswith("Gemma3") else []))
    norm, is_third = rms_norm(config, offset=1.0), name.startswith("Gemma3")
    count, every = int(config["num_hidden_layers"]), int(config["sliding_window_pattern"])
    kinds = ["full_attention" if (number + 1) % every == 0 else "sliding_attention" for number in range(count)]
    config = {"layer_types": kinds, **config}
    dim, local = head_dim(config), {**config, "rope_theta": config.get("rope_local_base_freq")}
    if not config.get("rope_parameters"):
        local["rope_scaling"] = None
    rope_spec = {
        True: rope(local if is_third else config, dim, "sliding_attention"),
        False: rope(config, dim, "full_attention"),
    }
    layers = {
        window: LayerSpec(
            attention=attention(
                config,
                rope_spec[window is not None],
                window=window,
                scale=float(config["query_pre_attn_scalar"]) ** -0.5,
                softcap=float(config.get("attn_logit_softcapping") or 0.0),
                qk_norm=norm if is_third else None,
            ),
            attention_norm=norm,
            attention_post_norm=norm,
            feed_forward=feed_forward(config, activation=activation(config["hidden_activation"])),
            feed_forward_norm=norm,
            feed_forward_post_norm=norm,
        )
        for window in set(windows(config))
    }
    arch = architecture(
        name,
        config,
        [layers[window] for window in windows(config)],
        norm,
        max_position=int(config["max_position_embeddings"]),  # includes the factor of Gemma 3's linear scaling
        embedding_multiplier=float(config["hidden_size"]) ** 0.5,
        logit_softcap=float(config.get("final_logit_softcapping") or 0.0),
    )
    return bidirectional(arch, reach=int(config["sliding_window"]) // 2) if is_encoder else arch


def _paligemma(name: str, config: Config) -> ModelSpec:
    """Gemma 1 or 2, by the `model_type` of the text part. transformers sets `use_bidirectional_attention`, which has no
    effect on prompts without images."""
    kind = config["model_type"]
    if kind not in _PALIGEMMA_TEXTS:
        raise ConfigError(
            f"text_config of model_type {kind!r} is not supported; supported: {', '.join(_PALIGEMMA_TEXTS)}"
        )
    text, defaults = _PALIGEMMA_TEXTS[kind]
    return text(name, {**defaults, **config, "use_bidirectional_attention": None})


def _paligemma_names(arch: ModelSpec) -> Mapping[str, str]:
    return of_multimodal(NAMES if arch.layers[0].attention_post_norm is None else _BOTH) | gemma_vl.PALIGEMMA_NAMES


def _colpali_names(arch: ModelSpec) -> Mapping[str, str]:
    return {module: name.replace("model.", "vlm.", 1) for module, name in _paligemma_names(arch).items()}


def _gemma4(name: str, config: Config) -> ModelSpec:
    """Layers without windows have heads of another size, and values that may be the keys. A layer may have an input of
    its own, experts beside its MLP, and, if it is one of the last, the keys and values of a layer before."""
    require(config, "use_bidirectional_attention", None, False, "vision")  # for text, "vision" means none
    count, norm = int(config["num_hidden_layers"]), rms_norm(config)
    kinds = list(config.get("layer_types") or _every(6, count))
    kinds[-1] = "full_attention"
    config = {**config, "layer_types": kinds}
    own = {int(number): settings for number, settings in (config.get("per_layer_config") or {}).items()}
    inputs, sources = _layer_inputs(config, norm), _kv_sources(config, kinds)
    layers = []
    for number, (kind, window, source) in enumerate(zip(kinds, windows(config), sources, strict=True)):
        mine = config
        if window is None:
            kv_heads = config.get("num_global_key_value_heads") if config["attention_k_eq_v"] else None
            mine = {**config, "head_dim": config["global_head_dim"]}
            mine["num_key_value_heads"] = kv_heads or config["num_key_value_heads"]
        mine = {**mine, **own.get(number, {})}
        size = int(config["intermediate_size"]) * (1 + (source is not None and bool(config["use_double_wide_mlp"])))
        dense = feed_forward(config, activation=activation(config["hidden_activation"]), intermediate_size=size)
        settings = mine if mine.get("rope_parameters") else {**mine, "rope_parameters": _GEMMA4_ROPE}
        layers.append(
            LayerSpec(
                attention=attention(
                    mine,
                    rope(settings, head_dim(mine), kind),
                    window=window,
                    scale=1.0,
                    qk_norm=norm,
                    value_norm=replace(norm, has_weight=False),
                    values_are_keys=window is None and bool(config["attention_k_eq_v"]),
                    kv_source=source,
                ),
                attention_norm=norm,
                attention_post_norm=norm,
                feed_forward=_gemma4_experts(config, dense, norm) if config["enable_moe_block"] else dense,
                feed_forward_norm=None if config["enable_moe_block"] else norm,
                feed_forward_post_norm=norm,
                residual=ScaledResidualSpec(layer_input=inputs),
            )
        )
    return architecture(
        name,
        config,
        layers,
        norm,
        max_position=int(config["max_position_embeddings"]),
        embedding_multiplier=float(config["hidden_size"]) ** 0.5,
        logit_softcap=float(config.get("final_logit_softcapping") or 0.0),
    )


def _gemma4_experts(config: Config, dense: MLPSpec, norm: NormSpec) -> MoESpec:
    return MoESpec(
        num_experts=int(config["num_experts"]),
        top_k=int(config["top_k_experts"]),
        intermediate_size=int(config["moe_intermediate_size"]),
        activation=dense.activation,
        renormalize=True,
        shared=dense,
        norm=norm,
        expert_scale=True,
    )


def _gemma3n(name: str, config: Config) -> ModelSpec:
    """Several residual streams, a residual of low rank, an input of each layer's own, and sparse activations."""
    count, norm = int(config["num_hidden_layers"]), rms_norm(config)
    kinds = list(config.get("layer_types") or _every(5, count))
    config = {**config, "layer_types": kinds}
    dim, local = head_dim(config), {**config, "rope_theta": config.get("rope_local_base_freq"), "rope_scaling": None}
    rope_spec = {
        kind: rope(settings, dim, kind) for kind, settings in (("sliding_attention", local), ("full_attention", config))
    }
    sizes, pattern = config["intermediate_size"], config.get("activation_sparsity_pattern")
    sizes = list(sizes) if isinstance(sizes, Sequence) else [sizes] * count
    pattern = list(pattern) if isinstance(pattern, Sequence) else [pattern or 0.0] * count
    if config.get("activation_sparsity_pattern") is None and count > 10:
        pattern[:10] = [0.95] * 10
    inputs, act = _layer_inputs(config, norm), activation(config["hidden_activation"])
    if inputs is None:
        raise ConfigError("hidden_size_per_layer_input 0 is not supported")
    alt_up = AltUpSpec(
        num_streams=int(config["altup_num_inputs"]),
        active=int(config["altup_active_idx"]),
        norm=norm,
        scales_output=bool(config["altup_correct_scale"]),
        laurel=LaurelSpec(rank=int(config["laurel_rank"]), norm=norm),
        layer_input=inputs,
    )
    layers = [
        LayerSpec(
            attention=attention(
                config,
                rope_spec[kind],
                window=window,
                scale=1.0,
                qk_norm=norm,
                value_norm=replace(norm, has_weight=False),
                kv_source=source,
            ),
            attention_norm=norm,
            attention_post_norm=norm,
            feed_forward=MLPSpec(intermediate_size=int(size), activation=act, sparsity=float(sparsity)),
            feed_forward_norm=norm,
            feed_forward_post_norm=norm,
            residual=alt_up,
        )
        for kind, window, source, size, sparsity in zip(
            kinds, windows(config), _kv_sources(config, kinds), sizes, pattern, strict=True
        )
    ]
    return architecture(
        name,
        config,
        layers,
        norm,
        max_position=int(config["max_position_embeddings"]),
        embedding_multiplier=float(config["hidden_size"]) ** 0.5,
        logit_softcap=float(config.get("final_logit_softcapping") or 0.0),
    )


def _every(period: int, count: int) -> list[str]:
    """The kinds of layers; the last layer of each `period` has no window."""
    return ["sliding_attention" if number % period else "full_attention" for number in range(1, count + 1)]


def _layer_inputs(config: Config, norm: NormSpec) -> LayerInputSpec | None:
    if not (size := int(config["hidden_size_per_layer_input"])):
        return None
    return LayerInputSpec(
        size=size,
        vocab_size=int(config["vocab_size_per_layer_input"]),
        activation=activation(config["hidden_activation"]),
        norm=norm,
    )


def _kv_sources(config: Config, kinds: Sequence[str]) -> list[int | None]:
    """For each layer, the layer whose keys and values it reads: the last of its kind that has its own."""
    shared = int(config["num_kv_shared_layers"])
    first = len(kinds) - shared
    last = {kind: number for number, kind in enumerate(kinds[:first])}
    if set(kinds[first:]) - last.keys():
        raise ConfigError(
            f"num_kv_shared_layers {shared}: no layer before has the keys and values of the last ones' kind"
        )
    return [None] * first + [last[kind] for kind in kinds[first:]]


_COMMON = {"tie_word_embeddings": True, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh"}
_GEMMA = {**_COMMON, "max_position_embeddings": 8192, "num_key_value_heads": 16}
_GEMMA2 = {
    **_COMMON,
    "max_position_embeddings": 8192,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 2,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}
_GEMMA3 = {
    **_COMMON,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
}
_GEMMA4 = {
    **_COMMON,
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "global_head_dim": 512,
    "attention_k_eq_v": False,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "enable_moe_block": False,
    "max_position_embeddings": 131072,
    "sliding_window": 512,
}
_GEMMA4_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.25},
}
_INPUT_NAMES = {
    "layer_inputs.embedding": "model.embed_tokens_per_layer",
    "layer_inputs.projection": "model.per_layer_model_projection",
    "layer_inputs.norm": "model.per_layer_projection_norm",
    "layers.layer_input.gate": "model.layers.{layer}.per_layer_input_gate",
    "layers.layer_input.projection": "model.layers.{layer}.per_layer_projection",
    "layers.layer_input.norm": "model.layers.{layer}.post_per_layer_input_norm",
}
_GEMMA4_NAMES = (
    _BOTH
    | _INPUT_NAMES
    | {
        "layers.scalar": "model.layers.{layer}.layer_scalar",
        "layers.feed_forward.router": "model.layers.{layer}.router.proj",
        "layers.feed_forward.router.norm.weight": "model.layers.{layer}.router.scale",
        "layers.feed_forward.router.expert_scale": "model.layers.{layer}.router.per_expert_scale",
        "layers.feed_forward.experts.gate_up.weight": "model.layers.{layer}.experts.gate_up_proj",
        "layers.feed_forward.experts.down.weight": "model.layers.{layer}.experts.down_proj",
        "layers.feed_forward.input_norm": "model.layers.{layer}.pre_feedforward_layernorm_2",
        "layers.feed_forward.output_norm": "model.layers.{layer}.post_feedforward_layernorm_2",
        "layers.feed_forward.shared_input_norm": "model.layers.{layer}.pre_feedforward_layernorm",
        "layers.feed_forward.shared_output_norm": "model.layers.{layer}.post_feedforward_layernorm_1",
        "layers.feed_forward.shared.gate_up": "model.layers.{layer}.mlp.{part}_proj",
        "layers.feed_forward.shared.down": "model.layers.{layer}.mlp.down_proj",
    }
)
_GEMMA3N = {
    **_COMMON,
    "vocab_size": 262400,
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "sliding_window": 512,
    "final_logit_softcapping": 30.0,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 256,
    "altup_num_inputs": 4,
    "altup_active_idx": 0,
    "altup_correct_scale": True,
    "num_kv_shared_layers": 15,
    "laurel_rank": 64,
}
_GEMMA3N_NAMES = (
    _BOTH
    | _INPUT_NAMES
    | {
        "expansion": "model.altup_projections.{part}",
        "merger": "model.altup_unembed_projections.{part}",
        "layers.alt_up.norm": "model.layers.{layer}.altup.router_norm",
        "layers.alt_up.router": "model.layers.{layer}.altup.modality_router",
        "layers.alt_up.prediction": "model.layers.{layer}.altup.prediction_coefs",
        "layers.alt_up.correction": "model.layers.{layer}.altup.correction_coefs",
        "layers.alt_up.scale": "model.layers.{layer}.altup.correct_output_scale",
        "layers.laurel.down": "model.layers.{layer}.laurel.linear_left",
        "layers.laurel.up": "model.layers.{layer}.laurel.linear_right",
        "layers.laurel.norm": "model.layers.{layer}.laurel.post_laurel_norm",
    }
)
_PALIGEMMA_TEXTS = {"gemma": (_gemma, _GEMMA), "gemma2": (_gemma2, _GEMMA2)}
_UNUSED = r"self_attn\.[kv]_(proj|norm)\.weight$"
"""Unused tensors of layers that read the keys and values of another layer."""
FAMILIES = {
    "Gemma3nForCausalLM": Family(_gemma3n, _GEMMA3N_NAMES, _GEMMA3N, ignored_pattern=_UNUSED),
    "Gemma3nForConditionalGeneration": Family(
        _gemma3n,
        of_multimodal(_GEMMA3N_NAMES) | mobilenet.NAMES,
        _GEMMA3N,
        ignored_prefixes=NOT_TEXT,
        ignored_pattern=_UNUSED,
        media=lambda arch, config: replace(arch, media=mobilenet.media(config)),
    ),
    "GemmaForCausalLM": Family(_gemma, NAMES, _GEMMA),
    "PaliGemmaForConditionalGeneration": Family(
        _paligemma,
        _paligemma_names,
        {"tie_word_embeddings": True, "use_bidirectional_attention": True},
        ignored_prefixes=NOT_TEXT,
        ignored_pattern=towers.UNUSED,
        media=vit.with_tower(gemma_vl.paligemma),
    ),
    "ColPaliForRetrieval": Family(
        _paligemma,
        _colpali_names,
        {"tie_word_embeddings": True, "use_bidirectional_attention": True},
        prefix="vlm.",
        ignored_prefixes=tuple(
            f"vlm.{part}." for part in ("lm_head", "language_model.lm_head", "vision_tower", "multi_modal_projector")
        ),
        ignored_pattern=towers.UNUSED,
        token_layer="embedding_proj_layer",
        media=vit.with_tower(gemma_vl.paligemma),
    ),
    "Gemma2ForCausalLM": Family(_gemma2, _BOTH, _GEMMA2),
    "Gemma3ForCausalLM": Family(_gemma2, _BOTH, _GEMMA3),
    "Gemma4ForCausalLM": Family(_gemma4, _GEMMA4_NAMES, _GEMMA4, ignored_pattern=_UNUSED),
    "Gemma4ForConditionalGeneration": Family(
        _gemma4,
        of_multimodal(_GEMMA4_NAMES) | gemma_vl.GEMMA4_NAMES,
        _GEMMA4,
        scalars=gemma_vl.GEMMA4_SCALARS,
        ignored_prefixes=NOT_TEXT,
        ignored_pattern=_UNUSED,
        media=vit.with_tower(gemma_vl.gemma4),
    ),
    "Gemma3ForConditionalGeneration": Family(
        _gemma2,
        of_multimodal(_BOTH) | gemma_vl.GEMMA3_NAMES,
        {
            **_GEMMA3,
            "vocab_size": 262208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
        },
        is_transposed=lambda module: module == "tower.projector.down",
        ignored_prefixes=NOT_TEXT,
        ignored_pattern=towers.UNUSED,
        media=vit.with_tower(gemma_vl.gemma3),
    ),
}
