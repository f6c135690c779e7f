"""The definition of a model family, and helpers that read config.json. No torch here."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from quire.engine.architecture.attention_spec import AttentionSpec
from quire.engine.architecture.draft_head_spec import DraftHeadSpec
from quire.engine.architecture.feed_forward_spec import MLPSpec, MoESpec
from quire.engine.architecture.model_spec import LayerSpec, ModelSpec
from quire.engine.architecture.spec_parts import Activation, NormSpec, QueryScaleSpec, RopeSpec
from quire.engine.protocol.errors import ConfigError

Config = Mapping[str, Any]
"""config.json, with the defaults of the family's transformers class."""
Runs = Sequence[range]
"""Rows of a tensor, as ranges."""


class HeadLayer(NamedTuple):
    """A linear layer of a classifier's head, after the pooling."""

    name: str
    """The name in the checkpoint, without `.weight`."""
    activation: Literal["Identity", "Tanh", "ReLU", "GELU"] = "Identity"
    """The name of a torch class."""
    bias: bool = True


@dataclass(frozen=True)
class DraftHeadLayout:
    """How a checkpoint stores a head that drafts (`quire.engine.architecture.draft_head_spec`), or several heads.

    `layer` is the prefix of the tensors' names in the head's layers, which otherwise follow the family. In it,
    `{layer}` is the layer's number among the heads' layers, and `{after}` is the number of the target's layers plus
    this number.
    """

    layer: str
    names: Mapping[str, str]
    """Names of our modules outside the layers, and of modules in the layers that have other names. `{prefix}` is
    `layer`, and `{last}` the number of the last layer. Norms after the layers are the target's unless they are
    named."""
    layers: Callable[[Config], Sequence[LayerSpec]] | None = None
    """Maps the target's config.json to the layers; None: one layer like the target's last one with attention."""
    heads: Literal["first", "stored", "listed"] = "first"
    """The heads that are used: the first one, or all, each for a token further ahead and with a layer of its own.
    "stored": as many as the checkpoint has, with equal layers; "listed": one for each of `layers`."""
    is_chained: bool = False
    has_own_logits: bool = False
    """Each head has a matrix for logits."""
    hidden_first: bool = False
    """The projection reads the hidden state before the embedded token."""
    reads_normed: bool = True
    """The head reads the target's hidden state after its last norm, and its own output after its norm; or both before
    them."""
    count: str = "num_nextn_predict_layers"
    """The setting of the target's config.json with the number of heads."""


HeadOf = Callable[[Mapping[str, Any]], Sequence[HeadLayer | tuple[str, NormSpec]]]
"""Maps config.json to a head that depends on it; it may have norms, with their names in the checkpoint."""


@dataclass(frozen=True)
class Family:
    """How to read the checkpoints of some architectures.

    `names` maps our modules (without layer numbers) to the checkpoint's names. The first key that exists is used:
    `module.part.weight` and `module.weight` map to the complete name of a tensor, `module.part` and `module` to the
    name without its last component. In these names, `{layer}` is the layer's number, `{previous}` is the previous
    layer's number, `{part}` is q, k, v, gate or up, and `{expert}` is an expert's number. If the name of a module with
    several parts does not contain the part, the parts are concatenated in one tensor; if the name of experts does not
    contain the number, they are stacked in one tensor.
    """

    architecture: Callable[[str, Config], ModelSpec]
    """Maps the architecture's name and config.json to the model."""
    names: Mapping[str, str] | Callable[[ModelSpec], Mapping[str, str]]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """transformers' defaults for settings that config.json omits. A setting whose default is None may be null."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of settings, mapped to the names that `architecture` reads, as in transformers' `attribute_map`."""
    prefix: str = "model."
    """Prefix of names that a checkpoint of the model without its head may omit."""
    is_transposed: Callable[[str], bool] = lambda module: False
    """Whether a module's matrices are stored as `[in, out]`."""
    rows: Callable[[LayerSpec, str, str], Runs | None] = lambda layer, module, part: None
    """For a layer, a module and its part: the rows of the part in the checkpoint's tensor. None: in order."""
    leading_ones: frozenset[str] = frozenset()
    """Vectors that are stored as `[1, size]`, by module and parameter."""
    scalars: frozenset[str] = frozenset()
    """Vectors of size 1 that are stored without dimensions, by module and parameter."""
    ignored_prefixes: tuple[str, ...] = ()
    """Prefixes of tensors that are not part of the model and are ignored without a warning."""
    ignored_pattern: str = r"rotary_emb\.inv_freq$"
    """A pattern of unneeded names in old checkpoints."""
    classifier: tuple[HeadLayer, ...] | HeadOf = (HeadLayer("score", bias=False),)
    """The head of `…ForSequenceClassification`; its last layer has a row for each label."""
    token_layer: str = ""
    """The layer that makes `embedding_dim` numbers of each token's hidden state, for late interaction (ColPali); empty:
    the model has none."""
    after_layers: str = ""
    """The purpose of extra layers after the last one, in checkpoints that have some; they are not part of the model."""
    media: Callable[[ModelSpec, Config], ModelSpec] | None = None
    """Gives the model its tower, described in config.json's vision_config; the tower's modules are in `names` behind
    `tower.`. None: Quire has no tower for the family."""
    draft_heads: Mapping[str, DraftHeadLayout] = field(default_factory=dict)
    """How checkpoints store heads that draft, by method: mtp with the model, others in a checkpoint of their own."""

    def complete(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """config.json with the names that `architecture` reads, and with the defaults."""
        own = {name: value for name, value in config.items() if name not in self.aliases}
        renamed = {self.aliases[name]: config[name] for name in self.aliases if config.get(name) is not None}
        return {**self.defaults, **own, **renamed}

    def names_of(self, arch: ModelSpec) -> Mapping[str, str]:
        return self.names(arch) if callable(self.names) else self.names

    def of_draft_head(self, arch: DraftHeadSpec) -> Family:
        """How to read a head that drafts; modules outside the layer are the target's unless the layout names others."""
        layout, own = self.draft_heads[arch.method], self.names_of(arch)
        prefix = arch.stored_layer or layout.layer.replace("{after}", "{layer}")
        outer = {"embedding": own["embedding"]}
        outer |= {f"heads.{module}": own[module] for module in ("norm", "head") if module in own}
        inner = {
            module: re.sub(r"^.*\blayers\.\{layer\}", prefix, name)
            for module, name in own.items()
            if module.startswith("layers.")
        }
        last = str(len(arch.layers) - 1)
        others = {
            module: name.replace("{prefix}", prefix).replace("{last}", last) for module, name in layout.names.items()
        }
        return replace(self, names={**outer, **inner, **others})

    def stacks_experts(self, arch: ModelSpec) -> bool:
        """Whether a model's experts are stacked in one tensor."""
        stacked = [name for module, name in self.names_of(arch).items() if _is_stacked(module, name)]
        return bool(stacked) and any(isinstance(layer.feed_forward, MoESpec) for layer in arch.layers)

    def with_separate_experts(self) -> Family:
        """The family of checkpoints that have the experts one by one, each with a matrix `[out, in]` for gate, up and
        down: LLM Compressor writes them so."""

        def names(arch: ModelSpec) -> Mapping[str, str]:
            own = self.names_of(arch)
            found = {module: name for module, name in own.items() if not _is_stacked(module, name)}
            for module, part in ((f"{_EXPERTS}gate_up", "{part}"), (f"{_EXPERTS}down", "down")):
                if module not in found:
                    stack = next(name for key, name in own.items() if key.startswith(module))
                    parent = re.sub(r"\.experts\..*$|\.[^.]*$", "", stack)
                    found[module] = f"{parent}.experts.{{expert}}.{part}_proj"
            return found

        def is_transposed(module: str) -> bool:
            return not module.startswith(_EXPERTS) and self.is_transposed(module)

        def rows(layer: LayerSpec, module: str, part: str) -> Runs | None:
            return None if module.startswith(_EXPERTS) else self.rows(layer, module, part)

        return replace(self, names=names, is_transposed=is_transposed, rows=rows)


_EXPERTS = "layers.feed_forward.experts."


def _is_stacked(module: str, name: str) -> bool:
    return module.startswith(_EXPERTS) and "{expert}" not in name


def grouped_rows(layer: LayerSpec, module: str, part: str) -> Runs | None:
    """Rows of a fused QKV matrix with, for each KV head, its query heads, then its key, then its value."""
    attention = layer.attention
    if module != "layers.attention.qkv" or not isinstance(attention, AttentionSpec):
        return None
    queries, dim = attention.num_heads // attention.num_kv_heads, attention.head_dim
    first, count = {"q": (0, queries), "k": (queries, 1), "v": (queries + 1, 1)}[part]
    groups = range(0, attention.num_kv_heads * (queries + 2), queries + 2)
    return [range((group + first) * dim, (group + first + count) * dim) for group in groups]


def activation(name: str) -> Activation:
    """Convert transformers' name of an activation to ours."""
    try:
        return _ACTIVATIONS[name]
    except KeyError:
        raise ConfigError(f"the activation {name!r} is not supported; supported: {', '.join(_ACTIVATIONS)}") from None


_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
}


def architecture(
    name: str, config: Config, layers: Sequence[LayerSpec], norm: NormSpec | None, **changes: Any
) -> ModelSpec:
    """The complete model, with `layers` followed by `norm`."""
    return ModelSpec(
        **{
            "name": name,
            "hidden_size": int(config["hidden_size"]),
            "vocab_size": int(config["vocab_size"]),
            "max_position": max((_reach(layer, config) for layer in layers), default=1),
            "layers": tuple(layers),
            "norm": norm,
            "tie_embeddings": bool(config.get("tie_word_embeddings", False)),
            **changes,
        }
    )


LENGTHS = "max_position_embeddings n_positions max_sequence_length max_seq_len seq_length n_ctx model_max_length"
"""Names of the longest sequence in config.json, the most specific first."""


def stated_length(config: Config) -> int:
    """The longest length in config.json: Command R and Vicuna leave max_position_embeddings at the length of one part
    of the training.
    """
    named = (config.get(name) for name in ("max_position_embeddings", "model_max_length", "max_sequence_length"))
    return max((int(length) for length in named if length), default=1)


def extended_length(length: int, kind: str, factor: float, original: int) -> int:
    """Return `length`, or the length to which scaling of kind `kind` extends `original` rotary positions: hand-edited
    configs do not always state it.
    """
    if kind not in ("linear", "dynamic", "yarn") or length < original:
        return length
    return max(length, int(original * factor))


def _reach(layer: LayerSpec, config: Config) -> int:
    if layer.attention is None or (rope := layer.attention.rope) is None:
        return int(config["max_position_embeddings"])
    return extended_length(stated_length(config), rope.kind, rope.factor, rope.original_max_position)


def layers_by_kind(
    kinds: Sequence[str],
    parts: Mapping[str, Mapping[str, Any]],
    feed_forwards: Sequence[MLPSpec | MoESpec] = (),
    **common: Any,
) -> list[LayerSpec]:
    """A layer for each of the `kinds`: with the `parts` of its kind, its feed-forward, and the fields in `common`."""
    if unknown := set(kinds) - parts.keys():
        raise ConfigError(
            f"layers of type {', '.join(sorted(map(str, unknown)))} are not supported; supported: {', '.join(parts)}"
        )
    if feed_forwards and len(kinds) != len(feed_forwards):
        raise ConfigError(f"config.json gives the types of {len(kinds)} layers, but there are {len(feed_forwards)}")
    inner = [{"feed_forward": each} for each in feed_forwards] or [{}] * len(kinds)
    return [LayerSpec(**{**common, **parts[kind], **each}) for kind, each in zip(kinds, inner, strict=True)]


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


def feed_forward(config: Config, *, intermediate_size: int | None = None, **changes: Any) -> MLPSpec:
    """A feed-forward with the usual names in config.json; `intermediate_size` replaces the one there."""
    return MLPSpec(
        **{
            "intermediate_size": int(config["intermediate_size"]) if intermediate_size is None else intermediate_size,
            "activation": activation(config.get("hidden_act", "silu")),
            "bias": bool(config.get("mlp_bias", False)),
            **changes,
        }
    )


def rms_norm(config: Config, **changes: Any) -> NormSpec:
    return NormSpec(**{"eps": float(config.get("rms_norm_eps", 1e-6)), **changes})


def layer_norm(eps: float, *, bias: bool = True) -> NormSpec:
    return NormSpec(eps=float(eps), kind="layer", bias=bias)


def require(config: Config, name: str, *supported: Any) -> None:
    """Reject a setting with an unsupported value; the first of `supported` is the default."""
    if (value := config.get(name, supported[0])) not in supported:
        raise ConfigError(f"{name} {value!r} is not supported; supported: {', '.join(map(repr, supported))}")


def head_dim(config: Config) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def query_scale(settings: Config) -> QueryScaleSpec | None:
    """Mistral's growing queries, from the settings of rope."""
    if not (weight := settings.get("llama_4_scaling_beta")):
        return None
    return QueryScaleSpec(weight=float(weight), every=int(settings["original_max_position_embeddings"]))


def of_multimodal(names: Mapping[str, str]) -> dict[str, str]:
    """The names in the checkpoint of a model that takes images, too."""
    return {module: name.replace("model.", "model.language_model.", 1) for module, name in names.items()}


def in_language_model(names: Mapping[str, str]) -> dict[str, str]:
    """The same where the head is in the text part, too."""
    return {module: f"language_model.{name}" for module, name in names.items()}


NOT_TEXT = tuple(
    f"{before}{part}."
    for before in ("", "model.")
    for part in (
        "vision_tower",
        "vision_model",
        "audio_tower",
        "embed_vision",
        "embed_audio",
        "visual",
        "multi_modal_projector",
        "mm_projector",
        "connector",
    )
)
"""Prefixes of the tensors of such a model that are not for text."""


def rope(config: Config, dim: int, kind: str | None = None, *, is_interleaved: bool = False) -> RopeSpec:
    """Rotary settings for heads of `dim` features.

    They are in transformers 5's `rope_parameters`, by layer type `kind` if layers differ, or in the older `rope_theta`
    and `rope_scaling`.
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
        case "default" | "mrope":  # axes of images, which are the same for text (Qwen2-VL)
            return RopeSpec(**common)
        case "linear":
            return RopeSpec(**common, kind="linear", factor=float(settings["factor"]), original_max_position=most)
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
        case "proportional":
            common |= {"dim": dim, "rotated_pairs": int(partial * dim // 2)}
            return RopeSpec(**common, kind="proportional", factor=float(settings.get("factor") or 1.0))
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
        f"rope scaling {name!r} is not supported; supported: default, linear, dynamic, llama3, yarn, longrope, "
        "proportional"
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
    """The window of each layer: layers given by `layer_types` have one, or else layers from `max_window_layers` on."""
    window, count = config.get("sliding_window"), int(config["num_hidden_layers"])
    first = min(count, int(config.get("max_window_layers", 0)))
    kinds = config.get("layer_types") or ["full_attention"] * first + ["sliding_attention"] * (count - first)
    if len(kinds) != count:
        raise ConfigError(f"layer_types has {len(kinds)} entries, but num_hidden_layers is {count}")
    if unknown := set(kinds) - {"full_attention", "sliding_attention"}:
        raise ConfigError(f"layers of type {', '.join(sorted(unknown))} are not supported")
    return [int(window) if window and kind == "sliding_attention" else None for kind in kinds]
