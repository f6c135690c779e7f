"""Reads the settings of an adapter: PEFT's adapter_config.json. No torch here.

Source: peft/tuners/lora/config.py of github.com/huggingface/peft. What is not supported is refused by its name.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from quire.engine.protocol.errors import ConfigError

T = TypeVar("T")

HARMLESS = frozenset(
    (
        *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "task_type"),
        *("corda_config", "eva_config", "lora_dropout", "lora_ga_config", "loftq_config", "qalora_group_size"),
        *("megatron_core", "runtime_config", "velora_config"),
        *("exclude_modules", "fan_in_fan_out", "layers_pattern", "layers_to_transform", "target_modules"),
        *("bias", "ensure_weight_tying", "modules_to_save"),
    )
)
"""Settings that say how the adapter was trained, or what the names of its tensors say, too."""
_OWN_BASE = ("corda", "loftq", "lora_ga", "olora", "pissa")
"""Values of `init_lora_weights`, or their starts, that change the base's weights."""
_PLAIN = (True, False, None, "eva", "gaussian", "mica", "orthogonal")
_MAX_PATTERNS = 4096
_MAX_QUANTIFIERS = 3
"""In a pattern of module names."""
_MAX_STEPS = 1 << 30
"""Of matching all patterns with all modules: some seconds."""
Patterns = tuple[tuple[re.Pattern[str], T], ...]
"""Patterns of module names, compiled, with their values."""


@dataclass(frozen=True)
class LoraSettings:
    """The settings that the meaning of the tensors depends on."""

    rank: int
    alpha: float
    rank_pattern: Patterns[int] = ()
    alpha_pattern: Patterns[float] = ()
    use_rslora: bool = False
    use_dora: bool = False
    lora_bias: bool = False
    invocation_tokens: tuple[int, ...] = ()
    target_parameters: tuple[str, ...] = ()
    modules_to_save: tuple[str, ...] = ()
    token_indices: tuple[int, ...] | Mapping[str, tuple[int, ...]] = ()
    swaps_square_stacks: bool | None = False
    """In stacks of square matrices, A belongs to the outputs, as PEFT before 0.19 has it; None: it is not known."""

    def rank_of(self, path: str) -> int:
        """The rank of a module, named by its path."""
        return _matching(self.rank_pattern, path, self.rank)

    def scaling(self, path: str) -> float:
        """The factor of a module's low-rank product. Raises `ConfigError` if it is no finite number."""
        alpha, rank = _matching(self.alpha_pattern, path, self.alpha), self.rank_of(path)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def check_steps(self, paths: Iterable[str]) -> None:
        """Raise `ConfigError` if it could take very long to match the patterns with these modules."""
        costs = Counter(_cost(pattern.pattern) for pattern, _ in (*self.rank_pattern, *self.alpha_pattern))
        steps = sum(
            math.comb(len(path) + repetitions, repetitions) * (path.count(".") + 1) * ways * count
            for path in (paths if costs else ())
            for (repetitions, ways), count in costs.items()
        )
        if steps > _MAX_STEPS:
            raise ConfigError("rank_pattern and alpha_pattern are too complex for so many modules, or such long names")


def _matching(patterns: Patterns[T], path: str, default: T) -> T:
    """The first pattern that matches counts."""
    return next((value for pattern, value in patterns if pattern.match(path)), default)


def _cost(pattern: str) -> tuple[int, int]:
    """The number of repetitions, and at most how many ways its alternatives allow."""
    own = pattern[len(_START) :]
    return len(_QUANTIFIER.findall(own)), math.prod(part.count("|") + 1 for part in re.split(r"[()]", own))


def read(settings: Mapping[str, Any]) -> LoraSettings:
    """Read adapter_config.json. Raises `ConfigError` that names a setting which is not supported or has a wrong
    value."""
    kind = settings.get("peft_type")
    if kind != "LORA":
        raise ConfigError(f"peft_type {kind!r} is not supported; supported: 'LORA'")
    init = settings.get("init_lora_weights")
    if isinstance(init, str) and init.startswith(_OWN_BASE):
        raise ConfigError(
            f"init_lora_weights {init!r} has changed the base's weights, which the adapter needs; convert it to plain "
            "LoRA with save_pretrained(path_initial_model_for_weight_conversion=…) of PEFT"
        )
    if not any(init is each for each in (True, False, None)) and init not in _PLAIN[3:]:
        raise ConfigError(f"init_lora_weights {init!r} is not supported; supported: {', '.join(map(repr, _PLAIN))}")
    unknown = settings.keys() - HARMLESS - {*_READ, "peft_type", "init_lora_weights"}
    if used := sorted(name for name in unknown if settings[name]):
        raise ConfigError(f"{used[0]} {str(settings[used[0]])[:80]} is not supported; use an adapter without it")
    if settings.get("trainable_token_indices") and not isinstance(settings["trainable_token_indices"], list | Mapping):
        raise ConfigError("trainable_token_indices must be a list of token ids, or such lists by the names of modules")
    indices = settings.get("trainable_token_indices") or []
    return LoraSettings(
        rank=_rank("r", settings.get("r", 8)),
        alpha=_alpha("lora_alpha", settings.get("lora_alpha", 8)),
        rank_pattern=_patterns(settings, "rank_pattern", _rank),
        alpha_pattern=_patterns(settings, "alpha_pattern", _alpha),
        use_rslora=_flag(settings, "use_rslora"),
        use_dora=_flag(settings, "use_dora"),
        lora_bias=_flag(settings, "lora_bias"),
        invocation_tokens=_ids("alora_invocation_tokens", settings.get("alora_invocation_tokens") or []),
        target_parameters=_names(settings, "target_parameters"),
        modules_to_save=_names(settings, "modules_to_save"),
        token_indices={name: _ids("trainable_token_indices", each) for name, each in indices.items()}
        if isinstance(indices, Mapping)
        else _ids("trainable_token_indices", indices),
        swaps_square_stacks=_swaps(settings.get("peft_version")),
    )


_READ = (
    *("alora_invocation_tokens", "alpha_pattern", "lora_alpha", "lora_bias", "r", "rank_pattern", "target_parameters"),
    *("trainable_token_indices", "use_dora", "use_rslora"),
)


def digested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What an adapter's digest covers: all settings that may change what it computes, with their defaults. The order
    of patterns is a part of them. Raises `ConfigError` like `read`."""
    own = {**vars(read(settings))}
    del own["modules_to_save"]  # the names of tensors say it, too
    patterns = {
        name: [(pattern.pattern, value) for pattern, value in own[name]] for name in ("rank_pattern", "alpha_pattern")
    }
    return own | patterns


def _swaps(version: Any) -> bool | None:
    """None, too, for development versions, which may have either order before 0.20."""
    found = re.match(r"(\d{1,9})\.(\d{1,9})", version) if isinstance(version, str) else None
    numbers = (int(found[1]), int(found[2])) if found else (0, 0)
    return None if not found or ("dev" in version and numbers < (0, 20)) else numbers < (0, 19)


def _rank(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} {value!r} is not a rank: it must be a whole number, at least 1")
    return value


def _alpha(name: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 1e30:
        raise ConfigError(f"{name} {value!r} is not a finite number")
    return float(value)


def _flag(settings: Mapping[str, Any], name: str) -> bool:
    value = settings.get(name)
    if value not in (True, False, None):
        raise ConfigError(f"{name} {value!r} must be true or false")
    return bool(value)


_START = r"(.*\.)?("
"""A pattern matches the whole path, or its end behind a dot, as in PEFT."""
_QUANTIFIER = re.compile(r"[*+?}]")


def _patterns(settings: Mapping[str, Any], name: str, value_of: Callable[[str, Any], T]) -> Patterns[T]:
    values = settings.get(name) or {}
    if not isinstance(values, Mapping):
        raise ConfigError(f"{name} must be an object with patterns of module names")
    if len(values) > _MAX_PATTERNS:
        raise ConfigError(f"{name} has {len(values)} patterns; at most {_MAX_PATTERNS} are supported")
    found = []
    for key, value in values.items():
        if len(_QUANTIFIER.findall(key)) > _MAX_QUANTIFIERS or re.search(r"\)[*+{]", key):
            raise ConfigError(
                f"{name}: {key[:80]!r} is too complex: at most {_MAX_QUANTIFIERS} repetitions are supported, and none "
                "of groups"
            )
        try:
            pattern = re.compile(f"{_START}{key})$")
        except (re.error, RecursionError, OverflowError) as error:
            raise ConfigError(f"{name}: {key[:80]!r} is not a regular expression: {error}") from None
        found.append((pattern, value_of(f"{name}[{key[:80]!r}]", value)))
    return tuple(found)


def _ids(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(each) is int and each >= 0 for each in value):
        raise ConfigError(f"{name} must be a list of token ids")
    return tuple(value)


def _names(settings: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = settings.get(name) or []
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise ConfigError(f"{name} must be a list of names")
    return tuple(value)
