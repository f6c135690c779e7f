"""What a model family is, and how its mapping reads config.json. No torch here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.engine.models.model_spec import Activation, AttentionSpec, LayerSpec, MLPSpec, ModelSpec, NormSpec, RopeSpec
from quire.engine.protocol.errors import ConfigError

Config = Mapping[str, Any]
"""config.json, with what the family's transformers class assumes where it is silent."""
Runs = Sequence[range]
"""Rows of a tensor, run by run."""


@dataclass(frozen=True)
class Family:
    """How the checkpoints of some architectures are read.

    `names` maps our modules (layer numbers left out) to the checkpoint's. Keys, the first that is there counts:
    `module.part.weight` and `module.weight` give a tensor's whole name, `module.part` and `module` all but its last
    word. In what they give, `{layer}` is the layer's number, `{part}` q, k, v, gate or up, `{expert}` an expert's.
    Where a module of several parts has a name without them, they stand one after the other in one tensor; where
    experts have a name without their number, they are stacked in one tensor.
    """

    architecture: Callable[[str, Config], ModelSpec]
    """From the architecture's name and config.json."""
    names: Mapping[str, str] | Callable[[ModelSpec], Mapping[str, str]]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What transformers assumes where config.json is silent."""
    prefix: str = "model."
    """What a checkpoint of the model without its head may leave out at the start of names."""
    is_transposed: Callable[[str], bool] = lambda module: False
    """Whether a module's matrices are stored as `[in, out]`."""
    rows: Callable[[LayerSpec, str, str], Runs | None] = lambda layer, module, part: None
    """For a layer, a module and its part: the row of the checkpoint's tensor that each of the part's rows is.
    None: in order."""
    unused: tuple[str, ...] = ()
    """How the names of tensors begin that stand beside the model and are no surplus."""
    leftovers: str = r"rotary_emb\.inv_freq$"
    """A pattern of names that old checkpoints have and nobody needs."""
    behind_layers: str = ""
    """What layers behind the last are, where checkpoints have some that are not served."""

    def names_of(self, arch: ModelSpec) -> Mapping[str, str]:
        return self.names(arch) if callable(self.names) else self.names


def activation(name: str) -> Activation:
    """transformers' name of an activation, as ours."""
    try:
        return _ACTIVATIONS[name]
    except KeyError:
        raise ConfigError(f"the activation {name!r} is not served; served are: {', '.join(_ACTIVATIONS)}") from None


_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}


def architecture(
    name: str, config: Config, layers: Sequence[LayerSpec], norm: NormSpec | None, **changes: Any
) -> ModelSpec:
    """The whole model, of `layers`, whose last hidden states pass `norm`."""
    return ModelSpec(
        **{
            "name": name,
            "hidden_size": int(config["hidden_size"]),
            "vocab_size": int(config["vocab_size"]),
            "max_position": max((_reach(layer, int(config["max_position_embeddings"])) for layer in layers), default=1),
            "layers": tuple(layers),
            "norm": norm,
            "tie_embeddings": bool(config.get("tie_word_embeddings", False)),
            **changes,
        }
    )


def _reach(layer: LayerSpec, length: int) -> int:
    """The model's length, or what scaling stretches it to, which configs that were edited by hand do not always say."""
    rope = layer.attention.rope
    if rope is None or rope.kind not in ("dynamic", "yarn") or length < rope.original_max_position:
        return length
    return max(length, int(rope.original_max_position * rope.factor))


def attention(config: Config, rope: RopeSpec | None, **changes: Any) -> AttentionSpec:
    """Attention with the usual names in config.json."""
    heads = int(config["num_attention_heads"])
    dim, bias = head_dim(config), bool(config.get("attention_bias", False))
    return AttentionSpec(
        **{
            "num_heads": heads,
            "num_kv_heads": int(config.get("num_key_value_heads") or heads),
            "head_dim": dim,
            "scale": dim**-0.5,
            "rope": rope,
            "qkv_bias": bias,
            "output_bias": bias,
            **changes,
        }
    )


def feed_forward(config: Config, **changes: Any) -> MLPSpec:
    """A feed-forward with the usual names in config.json."""
    return MLPSpec(
        **{
            "size": int(config["intermediate_size"]),
            "activation": activation(config.get("hidden_act", "silu")),
            "bias": bool(config.get("mlp_bias", False)),
            **changes,
        }
    )


def rms_norm(config: Config, **changes: Any) -> NormSpec:
    return NormSpec(**{"eps": float(config.get("rms_norm_eps", 1e-6)), **changes})


def layer_norm(eps: float, *, bias: bool = True) -> NormSpec:
    return NormSpec(eps=float(eps), kind="layer", bias=bias)


def require(config: Config, name: str, *served: Any) -> None:
    """Refuse a setting that is none of those that are served; the first of these is what an absent one means."""
    if (value := config.get(name, served[0])) not in served:
        raise ConfigError(f"{name} {value!r} is not served; served: {', '.join(map(repr, served))}")


def head_dim(config: Config) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def rope(config: Config, dim: int, kind: str | None = None, *, is_interleaved: bool = False) -> RopeSpec:
    """Rotary settings for heads of `dim` features.

    They stand in transformers 5's `rope_parameters`, where layers differ under the layer type `kind`, or in the older
    `rope_theta` and `rope_scaling`.
    """
    settings = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if kind is not None and isinstance(settings.get(kind), Mapping):
        settings = dict(settings[kind])
    theta = float(settings.get("rope_theta") or config.get("rope_theta") or 10000.0)
    partial = settings.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    common: dict[str, Any] = {"theta": theta, "dim": int(dim * partial), "is_interleaved": is_interleaved}
    name = settings.get("rope_type") or settings.get("type") or "default"
    most = int(config["max_position_embeddings"])
    original = config.get("original_max_position_embeddings") or settings.get("original_max_position_embeddings")
    match name:
        case "default":
            return RopeSpec(**common)
        case "linear":
            return RopeSpec(**common, kind="linear", factor=float(settings["factor"]))
        case "dynamic":
            return RopeSpec(**common, kind="dynamic", factor=float(settings["factor"]), original_max_position=most)
        case "llama3":
            return RopeSpec(
                **common,
                kind="llama3",
                factor=float(settings["factor"]),
                low_freq_factor=float(settings["low_freq_factor"]),
                high_freq_factor=float(settings["high_freq_factor"]),
                original_max_position=int(original or most),
            )
        case "yarn":
            factor = float(settings.get("factor") or most / int(original or most))
            return RopeSpec(
                **common,
                kind="yarn",
                factor=factor,
                original_max_position=int(original or most),
                beta_fast=float(settings.get("beta_fast") or 32.0),
                beta_slow=float(settings.get("beta_slow") or 1.0),
                truncate=bool(settings.get("truncate", True)),
                amplitude=_yarn_amplitude(settings, factor),
            )
        case "longrope" | "su":
            trained = int(original or most)
            factor = float(settings.get("factor") or most / trained)
            amplitude = settings.get("attention_factor")
            if amplitude is None:
                amplitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained))
            return RopeSpec(
                **common,
                kind="longrope",
                factor=factor,
                original_max_position=trained,
                short_factors=tuple(map(float, settings["short_factor"])),
                long_factors=tuple(map(float, settings["long_factor"])),
                amplitude=float(amplitude),
            )
    raise ConfigError(
        f"rope scaling {name!r} is not served; served are default, linear, dynamic, llama3, yarn and longrope"
    )


def _yarn_amplitude(settings: Config, factor: float) -> float:
    """YaRN's temperature (Peng et al. 2023), as DeepSeek's configs may change it."""
    if settings.get("attention_factor") is not None:
        return float(settings["attention_factor"])
    both = settings.get("mscale"), settings.get("mscale_all_dim")
    if all(both):
        return yarn_temperature(factor, float(both[0] or 0)) / yarn_temperature(factor, float(both[1] or 0))
    return yarn_temperature(factor)


def yarn_temperature(factor: float, weight: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def windows(config: Config) -> list[int | None]:
    """The window of each layer: of those that `layer_types` names, or else of those from `max_window_layers` on."""
    window, count = config.get("sliding_window"), int(config["num_hidden_layers"])
    first = min(count, int(config.get("max_window_layers", 0)))
    kinds = config.get("layer_types") or ["full_attention"] * first + ["sliding_attention"] * (count - first)
    if len(kinds) != count:
        raise ConfigError(f"layer_types names {len(kinds)} layers, and num_hidden_layers is {count}")
    if unknown := set(kinds) - {"full_attention", "sliding_attention"}:
        raise ConfigError(f"layers of {', '.join(sorted(unknown))} are not served")
    return [int(window) if window and kind == "sliding_attention" else None for kind in kinds]
