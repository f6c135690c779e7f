"""NVIDIA's ModelOpt: FP8, MXFP8 and NVFP4.

Settings come from hf_quant_config.json, `{"quantization": {"quant_algo": …}}`, or from config.json, `{"quant_algo": …,
"ignore": […]}`. Source: github.com/NVIDIA/Model-Optimizer, modelopt/torch/export.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from quire.engine.architecture.quantization.method import Method, Scheme
from quire.engine.architecture.quantization.nvfp4 import MODELOPT, W4A16_MODELOPT
from quire.engine.architecture.quantization.settings import WHERE, is_excluded, names, refuse_unknown
from quire.engine.architecture.quantization.unpacked import FP8, FP8_OF_BLOCKS, FP8_OF_ROWS, MXFP8
from quire.engine.protocol.errors import ConfigError

SCHEMES: dict[str, Scheme] = {
    "FP8": FP8,
    "FP8_PER_CHANNEL_PER_TOKEN": FP8_OF_ROWS,
    "FP8_PB_WO": FP8_OF_BLOCKS,
    "MXFP8": MXFP8,
    "NVFP4": MODELOPT,
    "W4A16_NVFP4": W4A16_MODELOPT,
}
"""Schemes by `quant_algo`."""
_MIXED = "MIXED_PRECISION"
_KNOWN = (
    "quant_algo", "exclude_modules", "ignore", "group_size", "quantized_layers", "config_groups", "producer",
    "kv_cache_quant_algo", "kv_cache_scheme", "format", "quantization_status", "version",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ModelOpt(Method):
    name: str = "modelopt"
    names_heads: ClassVar[bool] = True
    layers: Mapping[str, Scheme | None] = field(default_factory=dict)
    """Schemes by the name of a module that contains the quantized modules; the empty name is the whole model."""
    excluded: tuple[str, ...] = ()

    def scheme(self, module: str) -> Scheme | None:
        if is_excluded(module, self.excluded):
            return None
        path = module
        while path not in self.layers and path:
            path = path.rpartition(".")[0]
        return self.layers.get(path)


def read(settings: Mapping[str, Any]) -> ModelOpt | None:
    """None if only the cache is quantized. Raises `ConfigError` for unsupported settings."""
    where, inner = WHERE, settings.get("quantization")
    if inner is not None:
        if not isinstance(inner, Mapping):
            raise ConfigError(f"hf_quant_config.json: quantization must be an object, got {inner!r}")
        refuse_unknown(settings, ("quantization", "producer"), "hf_quant_config.json")
        where, settings = "hf_quant_config.json", inner
    refuse_unknown(settings, _KNOWN, where)
    if settings.get("quant_algo") is None and settings.get("kv_cache_quant_algo"):
        return None
    excluded = (*names(settings, "exclude_modules", where), *names(settings, "ignore", where))
    if str(settings.get("quant_algo")).upper() != _MIXED:
        return ModelOpt(layers={"": _scheme(settings, where)}, excluded=excluded)
    layers = settings.get("quantized_layers")
    if not isinstance(layers, Mapping) or not layers:
        raise ConfigError(f"{where}: quant_algo {_MIXED} needs quantized_layers, which names each layer's quant_algo")
    found = {layer: _scheme(each, f"{where}: quantized_layers.{layer}") for layer, each in layers.items()}
    return ModelOpt(layers=found, excluded=excluded)


def _scheme(settings: Any, where: str) -> Scheme:
    algo = settings.get("quant_algo") if isinstance(settings, Mapping) else settings
    scheme = SCHEMES.get(str(algo).upper())
    if scheme is None:
        supported = ", ".join(SCHEMES)
        raise ConfigError(f"{where}: quant_algo {algo} is not supported; supported: {supported}, {_MIXED} of these")
    refuse_unknown(settings, _KNOWN, where)
    group = settings.get("group_size")
    if group and scheme.group and group != scheme.group:
        raise ConfigError(f"{where}: group_size {group} is not supported with {algo}; supported: {scheme.group}")
    return scheme
