"""torchao's tensors as safetensors hold them: `X._weight_qdata`, `X._weight_scale`, `X._weight_zero_point`.

Settings name a configuration class of torchao and its arguments. Source: torchao/prototype/safetensors and
torchao/quantization/quant_api.py of github.com/pytorch/ao.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from quire.engine.architecture.quantization.method import FLOATS, Method, Scheme, Shape, Stored
from quire.engine.architecture.quantization.settings import WHERE, choose, is_skipped, names, refuse_unknown
from quire.engine.architecture.quantization.unpacked import Unpacked
from quire.engine.protocol.errors import ConfigError

QDATA, SCALE, ZERO_POINT = "._weight_qdata", "._weight_scale", "._weight_zero_point"
Activations = Literal["int8", "fp8"]
_WHERE = f"{WHERE}: quant_type"
_SAFE = (
    "weight_dtype", "activation_dtype", "group_size", "granularity", "weight_granularity", "set_inductor_config",
    "mapping_type", "weight_mapping_type", "act_mapping_type", "scale_dtype", "weight_scale_dtype", "reduce_range",
    "int4_packing_format", "int4_choose_qparams_algorithm", "int4_tile_packed_ntile", "intx_packing_format",
    "intx_choose_qparams_algorithm", "packing_format", "mm_config", "kernel_preference", "weight_only_decode",
    "activation_value_lb", "activation_value_ub", "alg_id", "layout",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TorchAoInt4(Scheme):
    """Int4Tensor: numbers -8 … 7, two in a byte, the first one low, `[…, out, in / 2]`; scales and zeros, the weight
    that 0 stands for, `[…, in / group, out]`."""

    values: str = "int4"
    has_offsets: bool = True

    def tensors(self, module: str, shape: Shape) -> dict[str, Stored]:
        *experts, out, columns = shape
        factors = Stored(FLOATS, ((*experts, columns // self.group, out),))
        return {
            module + QDATA: Stored(("U8", "I8"), ((*experts, out, columns // 2),)),
            module + SCALE: factors,
            module + ZERO_POINT: factors,
        }


@dataclass(frozen=True, kw_only=True)
class TorchAo(Method):
    name: str = "torchao"
    schemes: tuple[tuple[str, Scheme | None], ...]
    """Schemes by name of a module or its weight, `re:` and a regular expression, or _default, in this order."""
    skipped: tuple[str, ...] = ()

    def scheme(self, module: str) -> Scheme | None:
        if is_skipped(module, self.skipped):
            return None
        exact, weight = dict(self.schemes), f"{module}.weight"
        for name in (weight, module):
            if name in exact:
                return exact[name]
        for name in (weight, module):
            for pattern, scheme in self.schemes:
                if pattern.startswith("re:") and re.fullmatch(pattern[3:], name):
                    return scheme
        return exact.get("_default")


def read(settings: Mapping[str, Any]) -> TorchAo:
    """Raises `ConfigError` for unsupported settings."""
    refuse_unknown(
        settings,
        ("quant_type", "modules_to_not_convert", "include_input_output_embeddings", "untie_embedding_weights"),
    )
    quant_type = settings.get("quant_type")
    if not isinstance(quant_type, Mapping) or set(quant_type) != {"default"}:
        raise ConfigError(f"{_WHERE} {quant_type!r} is not supported; save the model with torchao 0.14 or later")
    whole, skipped = quant_type["default"], names(settings, "modules_to_not_convert")
    if isinstance(whole, Mapping) and whole.get("_type") in ("FqnToConfig", "ModuleFqnToConfig"):
        arguments = whole.get("_data", {})
        each = arguments.get("fqn_to_config") or arguments.get("module_fqn_to_config") or {}
        schemes = tuple((name, None if one is None else _scheme(one)) for name, one in each.items())
        return TorchAo(schemes=schemes, skipped=skipped)
    return TorchAo(schemes=(("_default", _scheme(whole)),), skipped=skipped)


def _scheme(config: Any) -> Scheme:
    if not isinstance(config, Mapping) or not isinstance(config.get("_data"), Mapping):
        raise ConfigError(f"{_WHERE} must be a configuration of torchao, with _type and _data, got {config!r}")
    kind, arguments = config.get("_type"), config["_data"]
    if kind not in _BY_TYPE:
        raise ConfigError(f"{_WHERE} {kind} is not supported; supported: {', '.join(_BY_TYPE)}, FqnToConfig")
    if config.get("_version") != 2:
        raise ConfigError(f"{_WHERE} {kind} of version {config.get('_version')} is not supported; supported: 2")
    refuse_unknown(arguments, _SAFE, f"{_WHERE} {kind}")
    return _BY_TYPE[kind](arguments)


def _int4(arguments: Mapping[str, Any]) -> Scheme:
    _expect(arguments, "int4_packing_format", "PLAIN")
    return TorchAoInt4(group=choose(arguments, "group_size", (32, 64, 128, 256), _WHERE, default=128))


def _unpacked(values: str, activations: Activations | None, arguments: Mapping[str, Any]) -> Scheme:
    """Int8Tensor or Float8Tensor."""
    if values == "fp8":
        _expect(arguments, "weight_dtype", "float8_e4m3fn")
        _expect(arguments, "packing_format", "PLAIN")
    rows, group = _granularity(arguments.get("granularity"))
    return Unpacked(
        values=values,
        activations=activations,
        rows=rows,
        group=group,
        weight=QDATA,
        scale=SCALE,
        zero_point=ZERO_POINT,
    )


def _intx(prefix: str, activations: Activations | None, arguments: Mapping[str, Any]) -> Scheme:
    """IntxUnpackedToInt8Tensor."""
    _expect(arguments, "intx_packing_format", "UNPACKED_TO_INT8")
    dtype = _plain(arguments.get(f"{prefix}weight_dtype") or arguments.get("weight_dtype"))
    dtype = choose({"weight_dtype": dtype}, "weight_dtype", ("int4", "int8"), _WHERE, default="int8")
    rows, group = _granularity(arguments.get(f"{prefix}granularity"))
    is_symmetric = str(_plain(arguments.get(f"{prefix}mapping_type", "SYMMETRIC"))).startswith("SYMMETRIC")
    return Unpacked(
        values=dtype,
        activations=activations,
        rows=rows,
        group=group,
        has_offsets=not is_symmetric,
        weight=QDATA,
        scale=SCALE,
        zero_point=ZERO_POINT,
    )


def _granularity(value: Any) -> tuple[int, int]:
    """Rows and columns of the weights that share a scale, 0 for all. In a list, the activations' granularity comes
    first."""
    if isinstance(value, list):
        value = value[-1] if value else None
    kind, arguments = (value.get("_type"), value.get("_data") or {}) if isinstance(value, Mapping) else ("PerRow", {})
    if kind == "PerTensor":
        return 0, 0
    if (kind == "PerRow" and arguments.get("dim", -1) == -1) or (kind == "PerAxis" and arguments.get("axis") == 0):
        return 1, 0
    if kind == "PerGroup" and isinstance(arguments.get("group_size"), int):
        return 1, arguments["group_size"]
    if kind == "PerBlock" and isinstance(arguments.get("block_size"), list) and len(arguments["block_size"]) == 2:
        rows, columns = arguments["block_size"]
        return rows, columns
    raise ConfigError(
        f"{_WHERE}: granularity {kind} of {dict(arguments)} is not supported; "
        "supported: PerTensor, PerRow, PerAxis(0), PerGroup, PerBlock"
    )


def _expect(arguments: Mapping[str, Any], key: str, supported: str) -> None:
    choose({key: _plain(arguments.get(key))}, key, (supported, supported.lower()), _WHERE, default=supported)


def _plain(value: Any) -> Any:
    """The value of an encoded enumeration or data type."""
    return value.get("_data") if isinstance(value, Mapping) else value


_BY_TYPE: dict[str, Callable[[Mapping[str, Any]], Scheme]] = {
    "Int4WeightOnlyConfig": _int4,
    "Int8WeightOnlyConfig": lambda given: _unpacked("int8", None, given),
    "Int8DynamicActivationInt8WeightConfig": lambda given: _unpacked("int8", "int8", given),
    "Float8WeightOnlyConfig": lambda given: _unpacked("fp8", None, given),
    "Float8DynamicActivationFloat8WeightConfig": lambda given: _unpacked("fp8", "fp8", given),
    "IntxWeightOnlyConfig": lambda given: _intx("", None, given),
    "Int8DynamicActivationIntxWeightConfig": lambda given: _intx("weight_", "int8", given),
}
