"""MXFP4: 4-bit floats in groups of 32, each with a power of two as its scale (OCP Microscaling Formats 1.0)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.engine.architecture.quantization.method import Method, Scheme, Shape, Stored
from quire.engine.architecture.quantization.settings import is_skipped, names, refuse_unknown


@dataclass(frozen=True, kw_only=True)
class MxFp4(Scheme):
    """Two codes in a byte, the first one low, `[…, out, in / 2]` or in groups of 16 bytes `[…, out, in / 32, 16]`;
    scales are exponents plus 127, `[…, out, in / 32]`. Uses compressed-tensors' names."""

    values: str = "e2m1"
    group: int = 32
    packed: str = ".weight_packed"
    scale: str = ".weight_scale"
    other_scale: str | None = None
    """Another name for scales."""

    def tensors(self, module: str, shape: Shape) -> dict[str, Stored]:
        *rows, columns = shape
        groups = columns // self.group
        others = () if self.other_scale is None else (module + self.other_scale,)
        return {
            module + self.packed: Stored(("U8", "I8"), ((*rows, columns // 2), (*rows, groups, self.group // 2))),
            module + self.scale: Stored(("U8", "F8_E8M0"), ((*rows, groups),), other_names=others),
        }


GPT_OSS = MxFp4(packed="_blocks", scale="_scales")
DEEPSEEK = MxFp4(packed=".weight", scale=".weight_scale_inv", other_scale=".scale")


@dataclass(frozen=True, kw_only=True)
class Mxfp4(Method):
    """As gpt-oss stores its experts: weights are stacked, and have no `.weight` in their names."""

    name: str = "mxfp4"
    skipped: tuple[str, ...] = ()

    def scheme(self, module: str) -> Scheme | None:
        return GPT_OSS if ".experts." in f".{module}." and not is_skipped(module, self.skipped) else None


def read(settings: Mapping[str, Any]) -> Mxfp4:
    """Raises `ConfigError` for unsupported settings."""
    refuse_unknown(settings, ("modules_to_not_convert", "dequantize"))
    return Mxfp4(skipped=names(settings, "modules_to_not_convert"))
