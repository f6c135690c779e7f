"""Encoders for embeddings and classification: BERT, RoBERTa, DistilBERT, MPNet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quire.engine.architecture.encoder_spec import EncoderAttentionSpec, EncoderSpec
from quire.engine.architecture.families.family import Config, Family, HeadLayer, activation
from quire.engine.architecture.feed_forward_spec import MLPSpec
from quire.engine.architecture.model_spec import LayerSpec
from quire.engine.architecture.spec_parts import NormSpec
from quire.engine.protocol.errors import ConfigError


def _bert(name: str, config: Config, **changes: Any) -> EncoderSpec:
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    if hidden % heads:
        raise ConfigError(f"hidden_size {hidden} is not a multiple of {heads} attention heads")
    if config.get("lora_adaptations"):
        raise ConfigError(
            "lora_adaptations, the adapters of tasks, are not supported; use a checkpoint without them, such as one of "
            "JinaEmbeddingsV3Model"
        )
    if (kind := config.get("position_embedding_type", "absolute")) != "absolute":
        raise ConfigError(f"position_embedding_type {kind!r} is not supported; only absolute is")
    if config.get("is_decoder") or config.get("add_cross_attention"):
        raise ConfigError("is_decoder and add_cross_attention are not supported; the model is an encoder")
    norm = NormSpec(eps=float(config.get("layer_norm_eps", 1e-12)), kind="layer", bias=True)
    head_dim = hidden // heads
    layer = LayerSpec(
        attention=EncoderAttentionSpec(
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            rope=None,
            qkv_bias=True,
            output_bias=True,
        ),
        attention_norm=None,
        attention_post_norm=norm,
        feed_forward=MLPSpec(
            intermediate_size=int(config["intermediate_size"]),
            activation=activation(config.get("hidden_act", "gelu")),
            is_gated=False,
            bias=True,
        ),
        feed_forward_norm=None,
        feed_forward_post_norm=norm,
    )
    positions = int(config["max_position_embeddings"])
    offset = int(changes.get("position_offset", 0))
    return EncoderSpec(
        **{
            "name": name,
            "hidden_size": hidden,
            "vocab_size": int(config["vocab_size"]),
            "max_position": positions - offset,
            "layers": (layer,) * int(config["num_hidden_layers"]),
            "norm": None,
            "embedding_norm": norm,
            "tie_embeddings": True,
            "position_embeddings": positions,
            "token_types": int(config.get("type_vocab_size", 2)),
            **changes,
        }
    )


def _roberta(name: str, config: Config) -> EncoderSpec:
    padding = int(config.get("pad_token_id", 1))
    return _bert(name, config, padding_id=padding, position_offset=padding + 1)


def _mpnet(name: str, config: Config) -> EncoderSpec:
    buckets = int(config.get("relative_attention_num_buckets", 32))
    if buckets != 32:  # transformers always computes 32 buckets
        raise ConfigError(f"relative_attention_num_buckets {buckets} is not supported; only 32 is")
    return _bert(name, config, padding_id=1, position_offset=2, token_types=0, relative_buckets=buckets)


def _distilbert(name: str, config: Config) -> EncoderSpec:
    names = {
        "hidden_size": config["dim"],
        "intermediate_size": config["hidden_dim"],
        "num_hidden_layers": config["n_layers"],
        "num_attention_heads": config["n_heads"],
        "hidden_act": config.get("activation", "gelu"),
        "layer_norm_eps": 1e-12,
    }
    return _bert(name, {**config, **names}, token_types=0)


_BERT = {
    "embedding": "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "embedding_norm": "embeddings.LayerNorm",
    "layers.attention.qkv.q": "encoder.layer.{layer}.attention.self.query",
    "layers.attention.qkv.k": "encoder.layer.{layer}.attention.self.key",
    "layers.attention.qkv.v": "encoder.layer.{layer}.attention.self.value",
    "layers.attention.output": "encoder.layer.{layer}.attention.output.dense",
    "layers.attention_post_norm": "encoder.layer.{layer}.attention.output.LayerNorm",
    "layers.feed_forward.gate_up": "encoder.layer.{layer}.intermediate.dense",
    "layers.feed_forward.down": "encoder.layer.{layer}.output.dense",
    "layers.feed_forward_post_norm": "encoder.layer.{layer}.output.LayerNorm",
}
_MPNET = _BERT | {
    "distance_bias": "encoder.relative_attention_bias",
    **{f"layers.attention.qkv.{part}": f"encoder.layer.{{layer}}.attention.attn.{part}" for part in "qkv"},
    "layers.attention.output": "encoder.layer.{layer}.attention.attn.o",
    "layers.attention_post_norm": "encoder.layer.{layer}.attention.LayerNorm",
}
_DISTILBERT = _BERT | {
    **{f"layers.attention.qkv.{part}": f"transformer.layer.{{layer}}.attention.{part}_lin" for part in "qkv"},
    "layers.attention.output": "transformer.layer.{layer}.attention.out_lin",
    "layers.attention_post_norm": "transformer.layer.{layer}.sa_layer_norm",
    "layers.feed_forward.gate_up": "transformer.layer.{layer}.ffn.lin1",
    "layers.feed_forward.down": "transformer.layer.{layer}.ffn.lin2",
    "layers.feed_forward_post_norm": "transformer.layer.{layer}.output_layer_norm",
}
_BESIDE = ("pooler.", "cls.", "lm_head.", "vocab_", "embeddings.position_ids")
"""Prefixes of tensors that are not needed for vectors: heads, and BERT's own pooler."""


_ROBERTA_HEAD = HeadLayer("classifier.dense", "Tanh"), HeadLayer("classifier.out_proj")
_HEADS = {
    "bert.": (HeadLayer("bert.pooler.dense", "Tanh"), HeadLayer("classifier")),
    "distilbert.": (HeadLayer("pre_classifier", "ReLU"), HeadLayer("classifier")),
}


def _family(architecture: Callable[[str, Config], EncoderSpec], names: Mapping[str, str], prefix: str) -> Family:
    return Family(
        architecture,
        {module: prefix + name for module, name in names.items()},
        prefix=prefix,
        ignored_prefixes=(*_BESIDE, *(prefix + name for name in _BESIDE)),
        classifier=_HEADS.get(prefix, _ROBERTA_HEAD),
    )


_KINDS = {
    "Bert": _family(_bert, _BERT, "bert."),
    "Roberta": _family(_roberta, _BERT, "roberta."),
    "XLMRoberta": _family(_roberta, _BERT, "roberta."),
    "Camembert": _family(_roberta, _BERT, "roberta."),
    "DistilBert": _family(_distilbert, _DISTILBERT, "distilbert."),
    "MPNet": _family(_mpnet, _MPNET, "mpnet."),
}
_ENDS = ("Model", "ForMaskedLM", "ForSequenceClassification")
FAMILIES = {f"{kind}{end}": family for kind, family in _KINDS.items() for end in _ENDS}
