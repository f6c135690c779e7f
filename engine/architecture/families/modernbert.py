"""ModernBERT: an encoder with rotary positions, norms before attention and feed-forward, and windows in most layers
(Warner et al. 2024).
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.engine.architecture.encoder_spec import EncoderAttentionSpec, EncoderSpec
from quire.engine.architecture.families.family import Config, Family, HeadLayer, activation, head_dim, layer_norm, rope
from quire.engine.architecture.feed_forward_spec import MLPSpec
from quire.engine.architecture.model_spec import LayerSpec
from quire.engine.architecture.spec_parts import NormSpec
from quire.engine.protocol.errors import ConfigError


def _modernbert(name: str, config: Config) -> EncoderSpec:
    count, every = int(config["num_hidden_layers"]), int(config["global_attn_every_n_layers"])
    kinds = config.get("layer_types") or [
        "sliding_attention" if number % every else "full_attention" for number in range(count)
    ]
    if len(kinds) != count or set(kinds) - {"full_attention", "sliding_attention"}:
        raise ConfigError(f"layer_types must have {count} entries, full_attention or sliding_attention, got {kinds!r}")
    dim, norm, has_bias = head_dim(config), _norm(config), bool(config["attention_bias"])
    ropes = {
        kind: rope({**config, "rope_theta": config[theta]}, dim, kind)
        for kind, theta in (("full_attention", "global_rope_theta"), ("sliding_attention", "local_rope_theta"))
    }

    def layer(number: int, kind: str) -> LayerSpec:
        heads = int(config["num_attention_heads"])
        return LayerSpec(
            attention=EncoderAttentionSpec(
                num_heads=heads,
                num_kv_heads=heads,
                head_dim=dim,
                scale=dim**-0.5,
                rope=ropes[kind],
                reach=None if kind == "full_attention" else int(config["local_attention"]) // 2,
                qkv_bias=has_bias,
                output_bias=has_bias,
            ),
            attention_norm=norm if number else None,  # the embeddings are normalized already
            feed_forward=MLPSpec(
                intermediate_size=int(config["intermediate_size"]),
                activation=activation(config["hidden_activation"]),
                bias=bool(config["mlp_bias"]),
            ),
            feed_forward_norm=norm,
        )

    return EncoderSpec(
        name=name,
        hidden_size=int(config["hidden_size"]),
        vocab_size=int(config["vocab_size"]),
        max_position=int(config["max_position_embeddings"]),
        layers=tuple(layer(number, kind) for number, kind in enumerate(kinds)),
        norm=norm,
        tie_embeddings=True,
        is_post_norm=False,
        embedding_norm=norm,
    )


def _norm(config: Config) -> NormSpec:
    return layer_norm(config["norm_eps"], bias=bool(config["norm_bias"]))


def _head(config: Config) -> Sequence[HeadLayer | tuple[str, NormSpec]]:
    if (kind := config["classifier_activation"]) != "gelu":
        raise ConfigError(f"classifier_activation {kind!r} is not supported; only gelu is")
    dense = HeadLayer("head.dense", "GELU", bias=bool(config["classifier_bias"]))
    return dense, ("head.norm", _norm(config)), HeadLayer("classifier")


_NAMES = {
    "embedding": "model.embeddings.tok_embeddings",
    "embedding_norm": "model.embeddings.norm",
    "layers.attention_norm": "model.layers.{layer}.attn_norm",
    "layers.attention.qkv": "model.layers.{layer}.attn.Wqkv",
    "layers.attention.output": "model.layers.{layer}.attn.Wo",
    "layers.feed_forward_norm": "model.layers.{layer}.mlp_norm",
    "layers.feed_forward.gate_up": "model.layers.{layer}.mlp.Wi",
    "layers.feed_forward.down": "model.layers.{layer}.mlp.Wo",
    "norm": "model.final_norm",
}
_DEFAULTS = {
    "attention_bias": False,
    "classifier_activation": "gelu",
    "classifier_bias": False,
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 160000.0,
    "hidden_activation": "gelu",
    "local_attention": 128,
    "local_rope_theta": 10000.0,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "norm_bias": False,
    "norm_eps": 1e-5,
}
_FAMILY = Family(
    _modernbert, _NAMES, _DEFAULTS, ignored_prefixes=("head.", "decoder.", "classifier."), classifier=_head
)
FAMILIES = {f"ModernBert{end}": _FAMILY for end in ("Model", "ForMaskedLM", "ForSequenceClassification")}
