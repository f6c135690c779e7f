"""Pooling: how a prompt's hidden states become one vector, as configured in a sentence-transformers folder. No torch.

`SentenceTransformer.save` (https://sbert.net) writes the format: modules.json lists the modules and the folders of
their configurations; sentence_bert_config.json and config_sentence_transformers.json configure the input text. The
vector of a classifier (`quire.engine.config.classifier`) has a logit for each label.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from quire.engine.protocol.errors import ConfigError
from quire.engine.repository.model_files import read_json, read_json_list

MODULES = "modules.json"
"""The file that marks a sentence-transformers folder."""

Mode = Literal["cls", "max", "mean", "mean_sqrt_len", "weightedmean", "lasttoken"]
MODES: tuple[Mode, ...] = get_args(Mode)
"""The modes, in the order in which the vectors of several modes are concatenated."""
_FLAGS: dict[str, Mode] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
JINA_STRATEGY = "single_vector_pool_strategy"
"""The setting of config.json that marks Jina's embeddings v4, which pool the tokens of an image, or of a text."""
_IMAGE_TURN = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe the image.<|im_end|>"
_NUM_QUERY_PADS = 10
"""Padding tokens behind a query, whose vectors take part in the comparison."""
DenseActivation = Literal["Identity", "Tanh", "ReLU", "GELU", "Sigmoid"]
"""Names of torch classes."""


@dataclass(frozen=True, kw_only=True)
class Dense:
    """A linear layer and an activation after the pooling."""

    folder: str = ""
    """Folder of its weights; empty: the model's own checkpoint."""
    name: str = "linear"
    """The name of its tensors, without `.weight` and `.bias`."""
    in_features: int
    out_features: int
    bias: bool
    activation: DenseActivation = "Identity"
    rows: tuple[int, ...] = ()
    """The rows of a larger matrix, such as an output head, that form the weight; empty: the whole tensor."""
    is_difference: bool = False
    """The weight is the second one of two `rows`, minus the first."""
    total_rows: int = 0
    """Rows of that larger matrix."""

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The shapes of its tensors in the checkpoint, by name."""
        shapes: dict[str, tuple[int, ...]] = {
            f"{self.name}.weight": (self.total_rows or self.out_features, self.in_features)
        }
        return shapes | ({f"{self.name}.bias": (self.out_features,)} if self.bias else {})


@dataclass(frozen=True, kw_only=True)
class Norm:
    """A LayerNorm after the pooling, in a classifier's head. Its tensors are in the model's own checkpoint."""

    name: str
    size: int
    eps: float
    bias: bool

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """See `Dense`."""
        return {f"{self.name}.{kind}": (self.size,) for kind in ("weight", "bias")[: 1 + self.bias]}


Activation = Literal["identity", "sigmoid", "softmax"]


@dataclass(frozen=True, kw_only=True)
class Classes:
    """The meaning of a classifier's logits."""

    labels: tuple[str, ...]
    activation: Activation
    """Turns logits into probabilities or scores, unless a request asks for logits."""
    joins_texts: bool = False
    """A pair of texts is one text: the second is appended to the first. Otherwise the tokenizer joins their tokens."""

    def text(self) -> str:
        """Return the description in the printed plan."""
        count = len(self.labels)
        return f"{count:,} label{'s' * (count > 1)}, {self.activation}"


@dataclass(frozen=True, kw_only=True)
class Pooling:
    """How the last hidden states of a prompt become its vector, and how the input text is prepared."""

    modes: tuple[Mode, ...]
    """The vectors of several modes are concatenated. Empty: each token keeps its own (late interaction)."""
    pools_items: bool = False
    """Of a prompt with images or videos, only their tokens are pooled, with the ones before and behind each."""
    modules: tuple[Dense | Norm | Literal["normalize"], ...] = ()
    """The modules after the pooling, in order."""
    size: int
    """Dimensions of a vector."""
    is_matryoshka: bool = False
    """Whether a vector can be truncated to its first dimensions (Kusupati et al. 2022)."""
    dimensions: tuple[int, ...] = ()
    """Numbers of dimensions that a Matryoshka model supports; empty: any number."""
    max_length: int | None = None
    """Maximum prompt tokens that the model was trained for; None: the number of its positions."""
    lower_case: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Texts that a request can have prepended to its input, by name."""
    default_prompt: str | None = None
    """The name of the prompt that is prepended by default."""
    suffix: str = ""
    """The text behind each input."""
    adds_special_tokens: bool = True
    """Whether texts get the tokenizer's special tokens; otherwise `prompts` and `suffix` have all."""
    chat_template: str | None = None
    """The template of conversations and of inputs with images; None: the folder's."""
    include_prompt: bool = True
    """Whether the tokens of the prepended text are pooled too."""
    similarity: str = "cosine"
    """The similarity function for comparing vectors."""
    classes: Classes | None = None
    """The meaning of the numbers in a classifier's vector; None: the vector is an embedding."""

    @property
    def dense(self) -> list[Dense]:
        return [module for module in self.modules if isinstance(module, Dense)]

    @property
    def weighted(self) -> list[Dense | Norm]:
        """The modules that have weights."""
        return [module for module in self.modules if isinstance(module, Dense | Norm)]

    @property
    def is_normalized(self) -> bool:
        """Whether the final vector is normalized to length 1."""
        return self.modules[-1:] == ("normalize",)

    @property
    def needs_all_tokens(self) -> bool:
        """Whether pooling needs the hidden states of all tokens, or only of the last one."""
        return self.modes != ("lasttoken",)

    @property
    def is_multi_vector(self) -> bool:
        """Whether there is a vector of each token."""
        return not self.modes

    def text(self) -> str:
        """Return the description in the printed plan."""
        modules = [_text(module) for module in self.modules]
        steps = [f"{' and '.join(self.modes)} pooling" if self.modes else "a vector of each token", *modules]
        if self.classes is not None:
            return f"{', '.join(steps)}: {self.classes.text()}"
        shorter = ""
        if self.is_matryoshka:
            shorter = f", or the first {' or '.join(map(str, self.dimensions)) or 'of them'}"
        return f"{', '.join(steps)}: {self.size:,} numbers{shorter}, to be compared by {self.similarity}"


def _text(module: Dense | Norm | Literal["normalize"]) -> str:
    if isinstance(module, Dense):
        return f"dense to {module.out_features}"
    return "norm" if isinstance(module, Norm) else module


def read(folder: Path, config: Mapping[str, Any], hidden_size: int, *, default: Mode, token_layer: str = "") -> Pooling:
    """Read the pooling of a model folder from modules.json; without it, pooling is `default` with normalization. With a
    `token_layer` (`Family.token_layer`), each token keeps its vector.

    `config` is config.json, which may declare Matryoshka dimensions. Raises `ConfigError` for unsupported settings.
    """
    stated = config.get("matryoshka_dimensions") or config.get("matryoshka_dims")
    dimensions = tuple(sorted(int(each) for each in stated or ()))
    is_matryoshka = bool(dimensions or config.get("is_matryoshka"))
    common: dict[str, Any] = {"is_matryoshka": is_matryoshka, "dimensions": dimensions}
    if token_layer:
        return Pooling(**_late_interaction(folder, config, hidden_size, token_layer), **common)
    if JINA_STRATEGY in config:
        if (strategy := config[JINA_STRATEGY]) != "mean":
            raise ConfigError(f"config.json: {JINA_STRATEGY} {strategy!r} is not supported; supported: mean")
        return Pooling(
            modes=("mean",),
            modules=("normalize",),
            size=hidden_size,
            pools_items=True,
            prompts={"query": "Query: ", "passage": "Passage: "},
            chat_template=_template("", f"{_IMAGE_TURN}\n", ""),
            **common,
        )
    path = folder / MODULES
    if not path.exists():
        return Pooling(modes=(default,), modules=("normalize",), size=hidden_size, **common)
    modes: tuple[Mode, ...] = ()
    modules: list[Dense | Literal["normalize"]] = []
    size = hidden_size
    for index, module in enumerate(read_json_list(path)):
        kind, place = str(module.get("type", "")).rpartition(".")[2], str(module.get("path", ""))
        match kind:
            case "Transformer" if index == 0:
                if place:
                    raise ConfigError(
                        f"{path}: a Transformer in the subfolder {place!r} is not supported; it must be at the top"
                    )
            case "Pooling" if index == 1:
                settings = read_json(folder / place / "config.json")
                modes = _modes(settings, folder / place)
                size *= len(modes)
                common["include_prompt"] = bool(settings.get("include_prompt", True)) or modes == ("lasttoken",)
            case "Dense" if modes:
                dense = _dense(folder, place)
                if dense.in_features != size:
                    raise ConfigError(
                        f"{folder / place}: in_features is {dense.in_features}, but the input has size {size}"
                    )
                modules.append(dense)
                size = dense.out_features
            case "Normalize" if modes:
                modules.append("normalize")
            case _:
                raise ConfigError(
                    f"{path}: {kind or 'a module without a type'} at index {index} is not supported; supported are "
                    "Transformer, then Pooling, then Dense and Normalize"
                )
    if not modes:
        raise ConfigError(f"{path}: models without a Pooling module are not supported")
    pooling = Pooling(modes=modes, modules=tuple(modules), size=size, **common, **_text_settings(folder))
    if pooling.default_prompt is not None and not pooling.include_prompt:
        raise ConfigError(
            f"{folder}: a default prompt whose tokens are not pooled (include_prompt false) is not supported"
        )
    return pooling


class _LateTexts(NamedTuple):
    """What a processor for late interaction puts around queries and images, if its settings do not say it."""

    query: str
    pad: str
    image: str
    query_start: str = ""
    image_start: str = ""


_LATE_TEXTS = {
    # The processor of PaliGemma puts <bos> behind an image, and a line break behind the prompt.
    "ColPaliForRetrieval": _LateTexts("Question: ", "<pad>", "Describe the image.", "<bos>", "<image>"),
    "ColQwen2ForRetrieval": _LateTexts("Query: ", "<|endoftext|>", f"{_IMAGE_TURN}<|endoftext|>"),
}


def _late_interaction(folder: Path, config: Mapping[str, Any], hidden_size: int, token_layer: str) -> dict[str, Any]:
    """The pooling of ColPali and ColQwen2, whose processors have the texts around queries and images, special tokens
    included."""
    size = int(config.get("embedding_dim", 128))
    texts = next(_LATE_TEXTS[name] for name in config["architectures"] if name in _LATE_TEXTS)
    settings: dict[str, Any] = {}
    for name in ("preprocessor_config.json", "processor_config.json", "tokenizer_config.json"):
        settings |= read_json(path) if (path := folder / name).exists() else {}
    pad = settings.get("pad_token") or texts.pad
    pad = pad["content"] if isinstance(pad, Mapping) else pad
    query = texts.query_start + (settings.get("query_prefix") or texts.query)
    suffix, image = f"{pad * _NUM_QUERY_PADS}\n", settings.get("visual_prompt_prefix") or texts.image
    return {
        "modes": (),
        "modules": (Dense(name=token_layer, in_features=hidden_size, out_features=size, bias=True), "normalize"),
        "size": size,
        "prompts": {"query": query},
        "default_prompt": "query",
        "suffix": suffix,
        "adds_special_tokens": False,
        "chat_template": _template(query, texts.image_start + image, suffix),
        "similarity": "maxsim",
    }


def _template(before: str, image: str, behind: str) -> str:
    """A chat template that writes each text between two others, and each image as `image`."""
    text, shown = f"{{{{ {json.dumps(before)} + text + {json.dumps(behind)} }}}}", f"{{{{ {json.dumps(image)} }}}}"
    return (
        "{%- for message in messages %}{%- if message.content is string %}{%- set text = message.content %}"
        f"{text}{{%- else %}}{{%- for part in message.content %}}{{%- if part.type == 'text' %}}"
        f"{{%- set text = part.text %}}{text}{{%- else %}}{shown}{{%- endif %}}{{%- endfor %}}{{%- endif %}}"
        "{%- endfor %}"
    )


def _modes(settings: Mapping[str, Any], folder: Path) -> tuple[Mode, ...]:
    """Read the pooling modes: newer folders name them, older ones have a flag for each."""
    requested = settings.get("pooling_mode")
    if requested is None:
        switched = [name for name, value in settings.items() if name.startswith("pooling_mode_") and value is True]
        requested = [_FLAGS.get(name, name) for name in switched]
    elif isinstance(requested, str):
        requested = [requested]
    if unsupported := [mode for mode in requested if mode not in MODES]:
        raise ConfigError(f"{folder}: {unsupported[0]} is not supported; supported are {', '.join(MODES)}")
    if not requested:
        raise ConfigError(f"{folder}/config.json has no pooling mode; supported are {', '.join(MODES)}")
    return tuple(mode for mode in MODES if mode in requested)


def _dense(folder: Path, place: str) -> Dense:
    settings = read_json(folder / place / "config.json")
    activation = str(settings.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    if activation not in get_args(DenseActivation):
        raise ConfigError(
            f"{folder / place}: the activation {activation} is not supported; supported are "
            f"{', '.join(get_args(DenseActivation))}"
        )
    for name in ("module_input_name", "module_output_name"):
        if (value := settings.get(name)) not in (None, "sentence_embedding"):
            raise ConfigError(f"{folder / place}: {name} {value!r} is not supported; use sentence_embedding")
    try:
        return Dense(
            folder=place,
            in_features=int(settings["in_features"]),
            out_features=int(settings["out_features"]),
            bias=bool(settings.get("bias", True)),
            activation=activation,  # type: ignore[arg-type]  # checked above
        )
    except KeyError as missing:
        raise ConfigError(f"{folder / place}/config.json lacks {missing}") from None


def _text_settings(folder: Path) -> dict[str, Any]:
    """Read the settings of the input text and the similarity function."""
    settings_found: dict[str, Any] = {}
    # In old folders the name contains the model type: sentence_roberta_config.json and so on.
    for path in sorted(folder.glob("sentence_*_config.json")):
        settings = read_json(path)
        if (length := settings.get("max_seq_length")) is not None:
            settings_found["max_length"] = int(length)
        settings_found["lower_case"] = bool(settings.get("do_lower_case", False))
    path = folder / "config_sentence_transformers.json"
    if path.exists():
        settings = read_json(path)
        settings_found["prompts"] = {str(name): str(text) for name, text in (settings.get("prompts") or {}).items()}
        settings_found["default_prompt"] = settings.get("default_prompt_name")
        if (
            settings_found["default_prompt"] is not None
            and settings_found["default_prompt"] not in settings_found["prompts"]
        ):
            raise ConfigError(
                f"{path}: default_prompt_name {settings_found['default_prompt']!r} is not one of its prompts"
            )
        settings_found["similarity"] = settings.get("similarity_fn_name") or "cosine"
    return settings_found
