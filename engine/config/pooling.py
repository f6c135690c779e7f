"""How a prompt's hidden states become one vector, as a sentence-transformers folder declares it. No torch here.

The format is what `SentenceTransformer.save` writes (https://sbert.net): modules.json lists the modules and the folders
that their configurations are in; sentence_bert_config.json and config_sentence_transformers.json are about the text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from quire.engine.config.model_files import read_json, read_json_list
from quire.engine.protocol.errors import ConfigError

MODULES = "modules.json"
"""Makes a model folder one of sentence-transformers."""

Mode = Literal["cls", "max", "mean", "mean_sqrt_len", "weightedmean", "lasttoken"]
MODES: tuple[Mode, ...] = get_args(Mode)
"""In the order in which the vectors of several modes are joined."""
_FLAGS: dict[str, Mode] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
DenseActivation = Literal["Identity", "Tanh", "ReLU", "GELU", "Sigmoid"]
"""torch's names."""


@dataclass(frozen=True, kw_only=True)
class Dense:
    """A linear layer and an activation, behind the pooling."""

    folder: str
    """With its weights."""
    in_features: int
    out_features: int
    bias: bool
    activation: DenseActivation


@dataclass(frozen=True, kw_only=True)
class Pooling:
    """From the last hidden states of a prompt to its vector, and what is done to the text before."""

    modes: tuple[Mode, ...]
    """More than one: their vectors are joined."""
    modules: tuple[Dense | Literal["normalize"], ...] = ()
    """Behind that, in their order."""
    size: int
    """Numbers in a vector."""
    is_matryoshka: bool = False
    """Whether the first numbers of a vector are a vector (Kusupati et al. 2022)."""
    dimensions: tuple[int, ...] = ()
    """Of a Matryoshka model: how many of them may be asked for; empty: any number."""
    max_length: int | None = None
    """Tokens of a prompt that the model was made for; None: as many as it has positions."""
    lower_case: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Texts that go before the input, by the name that a request may call them by."""
    default_prompt: str | None = None
    """The name of the one that goes before inputs for which none is named."""
    pools_prompts: bool = True
    """Whether the tokens of such a text are pooled, too."""
    similarity: str = "cosine"
    """How vectors are to be compared."""

    @property
    def dense(self) -> list[Dense]:
        return [module for module in self.modules if isinstance(module, Dense)]

    @property
    def is_normalized(self) -> bool:
        """Whether the vector is brought to length 1 in the end."""
        return self.modules[-1:] == ("normalize",)

    @property
    def needs_all_tokens(self) -> bool:
        """Whether the hidden states of all tokens are needed, or the last one's only."""
        return self.modes != ("lasttoken",)

    def text(self) -> str:
        """For the printed plan."""
        modules = [module if isinstance(module, str) else f"dense to {module.out_features}" for module in self.modules]
        steps = [f"{' and '.join(self.modes)} pooling", *modules]
        shorter = ""
        if self.is_matryoshka:
            shorter = f", or the first {' or '.join(map(str, self.dimensions)) or 'of them'}"
        return f"{', '.join(steps)}: {self.size:,} numbers{shorter}, to be compared by {self.similarity}"


def read(folder: Path, config: Mapping[str, Any], hidden_size: int, *, default: Mode) -> Pooling:
    """The pooling of a model folder: as modules.json says, or else by `default`, and normalized.

    `config` is config.json, which may call the vectors Matryoshka. Raises `ConfigError` for what is not served.
    """
    dimensions = tuple(sorted(int(each) for each in config.get("matryoshka_dimensions") or ()))
    is_matryoshka = bool(dimensions or config.get("is_matryoshka"))
    common: dict[str, Any] = {"is_matryoshka": is_matryoshka, "dimensions": dimensions}
    path = folder / MODULES
    if not path.exists():
        return Pooling(modes=(default,), modules=("normalize",), size=hidden_size, **common)
    modes: tuple[Mode, ...] = ()
    modules: list[Dense | Literal["normalize"]] = []
    size = hidden_size
    for at, module in enumerate(read_json_list(path)):
        kind, place = str(module.get("type", "")).rpartition(".")[2], str(module.get("path", ""))
        match kind:
            case "Transformer" if at == 0:
                if place:
                    raise ConfigError(
                        f"{path}: the transformer is in the folder {place!r}; only at the top it is served"
                    )
            case "Pooling" if at == 1:
                settings = read_json(folder / place / "config.json")
                modes = _modes(settings, folder / place)
                size *= len(modes)
                common["pools_prompts"] = bool(settings.get("include_prompt", True)) or modes == ("lasttoken",)
            case "Dense" if modes:
                dense = _dense(folder, place)
                if dense.in_features != size:
                    raise ConfigError(
                        f"{folder / place}: in_features is {dense.in_features}, but {size} numbers come in"
                    )
                modules.append(dense)
                size = dense.out_features
            case "Normalize" if modes:
                modules.append("normalize")
            case _:
                raise ConfigError(
                    f"{path}: {kind or 'a module without a type'} in place {at} is not served; served are Transformer, "
                    "then Pooling, then Dense and Normalize"
                )
    if not modes:
        raise ConfigError(f"{path}: there is no Pooling, so that a prompt has no one vector; that is not served")
    pooling = Pooling(modes=modes, modules=tuple(modules), size=size, **common, **_about_text(folder))
    if pooling.default_prompt is not None and not pooling.pools_prompts:
        raise ConfigError(
            f"{folder}: a default prompt whose tokens are not pooled (include_prompt false) is not served"
        )
    return pooling


def _modes(settings: Mapping[str, Any], folder: Path) -> tuple[Mode, ...]:
    """Newer folders name the mode (or several), older ones have a switch for each."""
    asked = settings.get("pooling_mode")
    if asked is None:
        switched = [name for name, value in settings.items() if name.startswith("pooling_mode_") and value is True]
        asked = [_FLAGS.get(name, name) for name in switched]
    elif isinstance(asked, str):
        asked = [asked]
    if bad := [mode for mode in asked if mode not in MODES]:
        raise ConfigError(f"{folder}: {bad[0]} is not served; served are {', '.join(MODES)}")
    if not asked:
        raise ConfigError(f"{folder}/config.json names no pooling mode; served are {', '.join(MODES)}")
    return tuple(mode for mode in MODES if mode in asked)


def _dense(folder: Path, place: str) -> Dense:
    settings = read_json(folder / place / "config.json")
    activation = str(settings.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    if activation not in get_args(DenseActivation):
        raise ConfigError(
            f"{folder / place}: the activation {activation} is not served; served are "
            f"{', '.join(get_args(DenseActivation))}"
        )
    for name in ("module_input_name", "module_output_name"):
        if (given := settings.get(name)) not in (None, "sentence_embedding"):
            raise ConfigError(f"{folder / place}: {name} {given!r} is not served; only sentence_embedding is")
    try:
        return Dense(
            folder=place,
            in_features=int(settings["in_features"]),
            out_features=int(settings["out_features"]),
            bias=bool(settings.get("bias", True)),
            activation=activation,  # type: ignore[arg-type]  # is one of these
        )
    except KeyError as missing:
        raise ConfigError(f"{folder / place}/config.json lacks {missing}") from None


def _about_text(folder: Path) -> dict[str, Any]:
    """What goes before the model, and how its vectors are compared."""
    found: dict[str, Any] = {}
    # Named after the kind of the model in old folders: sentence_roberta_config.json and so on.
    for path in sorted(folder.glob("sentence_*_config.json")):
        settings = read_json(path)
        if (length := settings.get("max_seq_length")) is not None:
            found["max_length"] = int(length)
        found["lower_case"] = bool(settings.get("do_lower_case", False))
    path = folder / "config_sentence_transformers.json"
    if path.exists():
        settings = read_json(path)
        found["prompts"] = {str(name): str(text) for name, text in (settings.get("prompts") or {}).items()}
        found["default_prompt"] = settings.get("default_prompt_name")
        if found["default_prompt"] is not None and found["default_prompt"] not in found["prompts"]:
            raise ConfigError(f"{path}: default_prompt_name {found['default_prompt']!r} is none of its prompts")
        found["similarity"] = settings.get("similarity_fn_name") or "cosine"
    return found
