"""AMD's Quark: FP8 and INT8 with a scale for the weight or for each row, MXFP4, MXFP8 and NVFP4.

Source: quark/torch/export and quark/torch/quantization/config of AMD Quark.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from quire.engine.architecture.quantization.method import Method, Scheme
from quire.engine.architecture.quantization.mxfp4 import MxFp4
from quire.engine.architecture.quantization.nvfp4 import W4A16_MODELOPT
from quire.engine.architecture.quantization.settings import WHERE, is_excluded, matches, names, refuse_unknown
from quire.engine.architecture.quantization.unpacked import FP8, FP8_OF_ROWS, MXFP8, Unpacked
from quire.engine.protocol.errors import ConfigError

INT8 = Unpacked(values="int8", activations="int8")
INT8_OF_ROWS = Unpacked(values="int8", activations="int8", rows=1)
MXFP4 = MxFp4(packed=".weight")
_SUPPORTED = (
    "fp8_e4m3 and symmetric int8 per_tensor or per_channel, fp8_e4m3 and fp4 per_group of 32 with e8m0 scales, "
    "and fp4 per_group of 16 with fp8_e4m3 scales"
)
_KNOWN = (
    "global_quant_config", "layer_quant_config", "exclude", "export", "algo_config",
    "quant_mode", "log_severity_level", "version", "kv_cache_quant_config", "kv_cache_post_rope", "kv_cache_group",
)  # fmt: skip
_KNOWN_OF_LAYER = ("weight", "input_tensors", "output_tensors", "target_device")
_REAL = "real_quantized"
_ROTATIONS = ("rotation", "quarot")


@dataclass(frozen=True, kw_only=True)
class Quark(Method):
    name: str = "quark"
    names_heads: ClassVar[bool] = True
    of_layers: tuple[tuple[str, Scheme | None], ...] = ()
    """Schemes by wildcard; the first match counts."""
    of_others: Scheme | None
    excluded: tuple[str, ...] = ()

    def scheme(self, module: str) -> Scheme | None:
        if matches(module, self.excluded) or is_excluded(module, self.excluded):
            return None
        return next((each for name, each in self.of_layers if is_excluded(module, [name])), self.of_others)


def read(settings: Mapping[str, Any]) -> Quark:
    """Raises `ConfigError` for unsupported settings."""
    refuse_unknown(settings, _KNOWN)
    export = settings.get("export") or {}
    if (stored := export.get("weight_format", _REAL)) != _REAL:
        raise ConfigError(f"{WHERE}: weight_format {stored} is not supported; export as {_REAL}")
    algorithms = settings.get("algo_config") or []
    for each in algorithms if isinstance(algorithms, list) else [algorithms]:
        if isinstance(each, Mapping) and str(each.get("name")).lower() in _ROTATIONS:
            raise ConfigError(
                f"{WHERE}: algo_config {each['name']} is not supported, since inputs may need to be rotated"
            )
    of_layers = settings.get("layer_quant_config") or {}
    return Quark(
        of_layers=tuple((name, _scheme(each, name)) for name, each in of_layers.items()),
        of_others=_scheme(settings.get("global_quant_config") or {}, "global_quant_config"),
        excluded=names(settings, "exclude"),
    )


def _scheme(settings: Any, name: str) -> Scheme | None:
    where = f"{WHERE}: {name}"
    refuse_unknown(settings, _KNOWN_OF_LAYER, where)
    weight = settings.get("weight")
    if weight is None:
        return None
    scheme = _of_weight(weight, where)
    return scheme if settings.get("input_tensors") else replace(scheme, activations=None)


def _of_weight(weight: Any, where: str) -> Scheme:
    parts = weight if isinstance(weight, list) else [weight]
    of_rows = parts[0].get("ch_axis") in (None, 0)
    has_exponents = parts[0].get("scale_format") == "e8m0"
    is_symmetric = parts[0].get("symmetric") is not False
    layout = [(each.get("dtype"), each.get("qscheme"), each.get("group_size")) for each in parts]
    match layout:
        case [("fp8_e4m3", "per_tensor", _)]:
            return FP8
        case [("fp8_e4m3", "per_channel", _)] if of_rows:
            return FP8_OF_ROWS
        case [("int8", "per_tensor", _)] if is_symmetric:
            return INT8
        case [("int8", "per_channel", _)] if is_symmetric and of_rows:
            return INT8_OF_ROWS
        case [("fp4", "per_group", 32)] if has_exponents:
            return MXFP4
        case [("fp8_e4m3", "per_group", 32)] if has_exponents:
            return MXFP8
        case [("fp4", "per_group", 16), ("fp8_e4m3", "per_tensor", _)]:
            return W4A16_MODELOPT
    listed = " and ".join(f"{dtype} {qscheme} of {group}" for dtype, qscheme, group in layout)
    raise ConfigError(f"{where}: weights of {listed} are not supported; supported: {_SUPPORTED}")
