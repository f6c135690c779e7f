"""FP8 checkpoints: blocks (DeepSeek, whose V4 has experts in MXFP4), one scale for a weight (AutoFP8, transformers), or
one for a row (FBGEMM)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from quire.engine.architecture.quantization.method import Method, Scheme
from quire.engine.architecture.quantization.mxfp4 import DEEPSEEK
from quire.engine.architecture.quantization.settings import WHERE, check_neutral, choose, expressions, match_any, names
from quire.engine.architecture.quantization.unpacked import FP8, FP8_OF_ROWS
from quire.engine.protocol.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Fp8(Method):
    """All linear layers alike, except perhaps experts."""

    layout: Scheme
    experts: Scheme | None = None
    """The scheme of experts that tokens are routed to, if it differs."""
    skipped: tuple[str, ...] = ()
    """Modules that are not quantized, by name, or by the start or end of their name."""
    expressions: tuple[str, ...] = ()
    """Regular expressions for such names, matched from the start."""

    def scheme(self, module: str) -> Scheme | None:
        parts = module.split(".")
        names = {".".join(parts[slice(*ends)]) for at in range(len(parts)) for ends in ((0, at + 1), (at, None))}
        if not names.isdisjoint(self.skipped) or match_any(self.expressions, module):
            return None
        return self.layout if self.experts is None or "experts" not in parts else self.experts


def read(settings: Mapping[str, Any]) -> Fp8:
    """Read the settings of `quant_method: fp8`. Raises `ConfigError` for unsupported settings.

    Keys without a meaning here tell how the checkpoint was made; headers tell if it is stored in another way.
    """
    choose(settings, "fmt", ("e4m3", "float8_e4m3fn"), default="e4m3")
    choose(settings, "activation_scheme", ("dynamic", "static"), default="dynamic")
    experts = choose(settings, "expert_dtype", ("fp8", "fp4"), default="fp8")
    check_neutral(settings, {"modules_to_convert": ()})
    block = settings.get("weight_block_size")
    if block is None:
        if experts == "fp4":
            raise ConfigError(f"{WHERE}: expert_dtype fp4 is supported with a weight_block_size only")
        return _method(settings, replace(FP8, other_scale=".weight_scale_inv"))
    if not isinstance(block, list | tuple) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
        raise ConfigError(f"{WHERE}: weight_block_size must be two positive numbers or null, got {block!r}")
    rows, columns = block
    layout = replace(FP8, rows=rows, group=columns, scale=".weight_scale_inv", other_scale=".scale")
    return replace(_method(settings, layout), experts=DEEPSEEK if experts == "fp4" else None)


def read_fbgemm(settings: Mapping[str, Any]) -> Fp8:
    """Read the settings of `quant_method: fbgemm_fp8`. `activation_scale_ub` bounds how inputs are rounded."""
    return _method(settings, FP8_OF_ROWS)


def _method(settings: Mapping[str, Any], layout: Scheme) -> Fp8:
    skipped = names(settings, "modules_to_not_convert") + names(settings, "ignored_layers")
    return Fp8(
        name=settings["quant_method"],
        layout=layout,
        skipped=tuple(name for name in skipped if not name.startswith("re:")),
        expressions=expressions(skipped),
    )
