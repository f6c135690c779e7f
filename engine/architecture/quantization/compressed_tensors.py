"""Checkpoints of compressed-tensors (LLM Compressor), https://github.com/vllm-project/compressed-tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from quire.engine.architecture.quantization.method import FLOATS, Method, Scheme, Shape, Stored, with_names_of_stacks
from quire.engine.architecture.quantization.mxfp4 import MxFp4
from quire.engine.architecture.quantization.nvfp4 import NvFp4
from quire.engine.architecture.quantization.settings import WHERE, choose, expressions, match_any, names, refuse_unknown
from quire.engine.architecture.quantization.unpacked import Blocks, Unpacked
from quire.engine.protocol.errors import ConfigError

SCHEMES: dict[str, Scheme] = {"nvfp4-pack-quantized": NvFp4(), "mxfp4-pack-quantized": MxFp4()}
"""Schemes of formats that have one kind of weights."""
_PACKED, _BYTES = "pack-quantized", ("int-quantized", "naive-quantized", "float-quantized")
_PLAIN = ("dense", "fakequant")
_SPARSE = "sparse-24-bitmask"

_SETTINGS = (
    "quant_method", "config_groups", "format", "ignore", "sparsity_config", "transform_config", "kv_cache_scheme",
    "quantization_status", "global_compression_ratio", "version", "quantization_config",
    "run_compressed", "dequantize", "use_optimized_inference",
)  # fmt: skip
"""Scales of a cache are measured here, and a checkpoint's status does not tell what it stores."""
_GROUP = ("targets", "weights", "input_activations", "output_activations", "format")
_WEIGHTS = (
    "num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "dynamic", "actorder",
    "scale_dtype", "zp_dtype", "observer", "observer_kwargs",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PackedScheme(Blocks):
    """int4 or int8 in `weight_packed`, words of 32 bits with the first code lowest, `[…, out, ceil(in * bits / 32)]`. A
    code is the number plus 2 ** (bits - 1). `weight_zero_point` has the zero points of consecutive rows, as such codes,
    in a word, `[…, ceil(out * bits / 32), groups]`. `weight_g_idx` has the group of each column.
    """

    def tensors(self, module: str, shape: Shape) -> dict[str, Stored]:
        *experts, out, columns = shape
        weight = f"{module}.weight"
        found = {
            f"{weight}_packed": Stored(("I32",), ((*experts, out, self._words(columns)),)),
            f"{weight}_scale": self.stored_factors(FLOATS, shape),
            f"{weight}_shape": Stored(("I64", "I32"), (), is_optional=True),
        }
        if self.has_offsets:
            groups = self.factors(shape)[-1]
            found[f"{weight}_zero_point"] = Stored(("I32",), ((*experts, self._words(out), groups),))
        if self.has_order:
            found[f"{weight}_g_idx"] = Stored(("I32", "I64"), ((columns,),), is_optional=True)
        return with_names_of_stacks(module, found) if experts else found

    def _words(self, codes: int) -> int:
        return -(-codes * self.bits // 32)


@dataclass(frozen=True, kw_only=True)
class Sparse24Scheme(Unpacked):
    """Two of four columns are 0 and not stored: the others are in `compressed`, `[out, in / 2]`, and `bitmask`, uint8
    `[out, ceil(in / 8)]`, tells which, the first column in the lowest bit."""

    def tensors(self, module: str, shape: Shape) -> dict[str, Stored]:
        found = super().tensors(module, shape)
        out, columns = shape
        dtypes = found.pop(f"{module}.weight").dtypes
        found[f"{module}.compressed"] = Stored(dtypes, ((out, columns // 2),))
        found[f"{module}.bitmask"] = Stored(("U8",), ((out, -(-columns // 8)),))
        return found

    def problem(self, shape: Shape) -> str | None:
        if len(shape) != 2:
            return f"stacks of experts are not supported in {_SPARSE}"
        return f"{shape[1]} inputs are not whole groups of 4" if shape[1] % 4 else None


@dataclass(frozen=True, kw_only=True)
class Targets:
    """Modules by exact names, by regular expressions that match from the start, or all linear layers."""

    names: tuple[str, ...]
    expressions: tuple[str, ...]
    has_linear: bool

    @classmethod
    def read(cls, settings: Mapping[str, Any], key: str, where: str = WHERE) -> Targets:
        """Raises `ConfigError` if the value is no list of names and expressions."""
        patterns = names(settings, key, where)
        exact = tuple(each for each in patterns if not each.startswith("re:") and each != "Linear")
        return cls(names=exact, expressions=tuple(sorted(expressions(patterns))), has_linear="Linear" in patterns)

    def match(self, module: str) -> tuple[int, str] | None:
        """The precedence of the matching target, lowest first, as in `match_targets` of compressed-tensors."""
        if module in self.names:
            return 0, module
        if match_any(self.expressions, module):
            return 1, next(each for each in self.expressions if re.match(each, module))
        return (2, "") if self.has_linear else None


@dataclass(frozen=True, kw_only=True)
class CompressedTensors(Method):
    name: str = "compressed-tensors"
    names_heads: ClassVar[bool] = True
    groups: tuple[tuple[Targets, Scheme | None], ...]
    ignored: Targets
    sparse: Targets | None = None
    dense: Targets | None = None
    """Modules among `sparse` that are not sparse."""

    def scheme(self, module: str) -> Scheme | None:
        if self.ignored.match(module):
            return None
        matches = [(found, -number) for number, (each, _) in enumerate(self.groups) if (found := each.match(module))]
        scheme = self.groups[-min(matches)[1]][1] if matches else None
        if isinstance(scheme, Unpacked) and self.sparse is not None and self.sparse.match(module):
            return scheme if self.dense and self.dense.match(module) else Sparse24Scheme(**vars(scheme))
        return scheme


def read(settings: Mapping[str, Any]) -> CompressedTensors | None:
    """Read `quantization_config`, or the older `compression_config`; None if nothing is quantized.

    Raises `ConfigError` for unsupported settings. How inputs, outputs and the cache are rounded is a hint: computing
    more exactly is correct.
    """
    settings = {**settings, **(settings.get("quantization_config") or {})}
    if settings.get("transform_config") not in (None, {}, {"config_groups": {}}):
        raise ConfigError(
            f"{WHERE}: transform_config is not supported (inputs are rotated); use a checkpoint without it"
        )
    refuse_unknown(settings, _SETTINGS)
    groups = []
    for name, group in (settings.get("config_groups") or {}).items():
        where = f"{WHERE}: config_groups.{name}"
        refuse_unknown(group, _GROUP, where)
        targets = Targets.read(group, "targets", where)
        groups.append((targets, _scheme(group, group.get("format") or settings.get("format"), where)))
    sparsity = settings.get("sparsity_config") or {}
    sparse = dense = None
    if (layout := sparsity.get("format") or "dense") != "dense":
        schemes = [scheme for _, scheme in groups if scheme is not None]
        if layout != _SPARSE or not schemes or not all(isinstance(each, Unpacked) for each in schemes):
            raise ConfigError(
                f"{WHERE}: sparsity_config with format {layout} is not supported for these weights; "
                f"supported: dense, and {_SPARSE} for 8-bit weights that are not packed"
            )
        where = f"{WHERE}: sparsity_config"
        sparse = Targets.read({"targets": sparsity.get("targets") or ["Linear"]}, "targets", where)
        dense = Targets.read(sparsity, "ignore", where)
    if all(scheme is None for _, scheme in groups):
        return None
    return CompressedTensors(groups=tuple(groups), ignored=Targets.read(settings, "ignore"), sparse=sparse, dense=dense)


def _scheme(group: Mapping[str, Any], layout: str | None, where: str) -> Scheme | None:
    weights = group.get("weights")
    if weights is None or layout in _PLAIN:
        return None
    refuse_unknown(weights, _WEIGHTS, f"{where}.weights")
    kind, bits = str(weights.get("type") or "int").lower(), weights.get("num_bits", 8)
    symmetric, inputs = weights.get("symmetric", True), group.get("input_activations")
    if layout in SCHEMES:
        of_layout = {"type": "float", "num_bits": 4, "group_size": SCHEMES[layout].group, "symmetric": True}
        for key, value in of_layout.items():
            choose(weights, key, (value,), f"{where}.weights", default=value)
        is_fp4 = layout == "nvfp4-pack-quantized" and _activations(inputs) == "fp4"
        return replace(SCHEMES[layout], activations="fp4" if is_fp4 else None)
    if layout in (None, "mixed-precision"):
        layout = _PACKED if kind == "int" and not inputs else "naive-quantized"
    supported = {"float": (8,), "int": (4, 8) if layout == _PACKED else range(2, 9)}.get(kind, ())
    if layout not in (_PACKED, *_BYTES) or bits not in supported or (kind == "float" and layout == _PACKED):
        raise ConfigError(
            f"{where}: weights of type {kind} with num_bits {bits} in format {layout} are not supported; supported: "
            f"{', '.join(('int of 4 or 8 bits in pack-quantized', f'int and 8-bit float in {_BYTES[1]}', *SCHEMES))}"
        )
    if weights.get("dynamic") or (kind == "float" and not symmetric):
        raise ConfigError(f"{where}: weights that are dynamic, or float and not symmetric, are not supported")
    rows, columns = _block(weights, where)
    has_order = str(weights.get("actorder")).lower() in ("group", "dynamic", "true")
    if layout == _PACKED:
        if not symmetric and not rows:
            raise ConfigError(f"{where}: strategy tensor is not supported in {_PACKED} unless weights are symmetric")
        return PackedScheme(
            values=f"int{bits}",
            group=columns,
            rows=rows,
            has_offsets=not symmetric,
            has_order=has_order and columns > 0,
            activations=_activations(inputs),
        )
    if has_order:
        raise ConfigError(f"{where}: actorder group is not supported in {layout}; supported: weight, static, null")
    values = "fp8" if kind == "float" else "int4" if bits <= 4 else "int8"
    activations = _activations(inputs)
    return Unpacked(
        values=values,
        group=columns,
        rows=rows,
        has_offsets=not symmetric,
        activations=activations,
        has_rounding=activations == "int8" and inputs is not None and _is_static(inputs),
    )


def _is_static(inputs: Mapping[str, Any]) -> bool:
    return not inputs.get("dynamic") and inputs.get("strategy") in (None, "tensor")


def _block(weights: Mapping[str, Any], where: str) -> tuple[int, int]:
    """Rows and columns that share factors; 0: all."""
    size, block = weights.get("group_size"), weights.get("block_structure")
    inferred = "tensor" if size is None else "channel" if size == -1 else "group"
    match str(weights.get("strategy") or inferred).lower():
        case "tensor":
            return 0, 0
        case "channel":
            return 1, 0
        case "group" if isinstance(size, int) and size > 0:
            return 1, size
        case "block":
            sizes = [int(each) for each in re.findall(r"\d+", str(block))]
            if len(sizes) == 2 and all(sizes):
                return sizes[0], sizes[1]
    raise ConfigError(
        f"{where}: strategy {weights.get('strategy')} with group_size {size} and block_structure {block} is not "
        "supported; supported: tensor, channel, group (of a size), block (of rows and columns)"
    )


def _activations(inputs: Mapping[str, Any] | None) -> Literal["int8", "fp8", "fp4"] | None:
    """A kernel's 8-bit inputs have a scale for each row. This is no coarser than the published scales, except for
    groups, which are finer. Rows that are published with zero points are rounded within that rounding's own error, too.
    Floats lose next to nothing if more of them share a scale. 4-bit inputs follow NVFP4: the scales of groups are
    relative to a constant scale."""
    if not inputs:
        return None
    is_float = str(inputs.get("type") or "int").lower() == "float"
    match inputs.get("num_bits", 8):
        case 8 if is_float:
            return "fp8"
        case 8:
            return "int8" if inputs.get("strategy") in (None, "token", "tensor") else None
        case 4 if is_float and inputs.get("group_size") == 16 and inputs.get("dynamic") is not True:
            return "fp4"
    return None
