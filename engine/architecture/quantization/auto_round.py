"""AutoRound (Cheng et al. 2023): integers in the layout of GPTQ or AWQ, with settings of its own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from quire.engine.architecture.quantization import awq, gptq
from quire.engine.architecture.quantization.method import Method, Scheme
from quire.engine.architecture.quantization.settings import WHERE, check_expression, check_neutral, choose
from quire.engine.protocol.errors import ConfigError

PACKINGS = ("auto_round:auto_gptq", "auto_round:auto_awq", "auto_round")
"""The last is the layout of GPTQ v2, which stores zero points as they are."""
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "act_bits": (16, 32),
    "super_bits": (),
    "act_data_type": ("float", "fp", "int"),
}
_PATTERN = re.compile(r"[*+?^$()\[\]{}|\\]")
"""A module's name has none of these characters."""


@dataclass(frozen=True, kw_only=True)
class AutoRound(Method):
    name: str = "auto-round"
    names_heads: ClassVar[bool] = True
    default: Scheme
    modules: Mapping[str, Scheme | None]
    """Modules that are quantized in another way than the others."""
    rules: tuple[tuple[str, Scheme | None], ...] = ()
    """The same by expressions, in the order of precedence."""
    blocks: tuple[str, ...] = ()
    """Prefixes of the names of quantized modules; empty: all modules but heads are quantized."""

    def scheme(self, module: str) -> Scheme | None:
        if module in self.modules:
            return self.modules[module]
        for pattern, scheme in self.rules:
            if re.search(pattern, module):
                return scheme
        is_quantized = module.startswith(self.blocks) if self.blocks else not module.endswith("lm_head")
        return self.default if is_quantized else None


def read(settings: Mapping[str, Any]) -> AutoRound:
    """Raises `ConfigError` for unsupported settings."""
    packing = choose(settings, "packing_format", PACKINGS, default=PACKINGS[0])
    extra = settings.get("extra_config") or {}
    if not isinstance(extra, Mapping) or not all(isinstance(each, Mapping) for each in extra.values()):
        raise ConfigError(f"{WHERE}: extra_config must be an object with the settings of modules, got {extra!r}")
    blocks = settings.get("block_name_to_quantize") or settings.get("to_quant_block_names") or ()
    blocks = blocks.split(",") if isinstance(blocks, str) else blocks
    flat = [name for each in blocks for name in ([each] if isinstance(each, str) else each)]
    modules, rules = dict[str, Scheme | None](), list[tuple[str, Scheme | None]]()
    for name, changes in extra.items():
        where = f"{WHERE}: extra_config {name!r}"
        is_plain = changes.get("bits") in (16, 32)
        scheme = None if is_plain else _scheme({**settings, **changes}, packing, where)
        if _PATTERN.search(name):
            check_expression(name, where)
            rules.append((name, scheme))
        else:
            modules[name] = scheme
    return AutoRound(default=_scheme(settings, packing, WHERE), modules=modules, rules=tuple(rules), blocks=tuple(flat))


def _scheme(settings: Mapping[str, Any], packing: str, where: str) -> Scheme:
    choose(settings, "data_type", ("int",), where, default="int")
    check_neutral(settings, _NEUTRAL, where)
    common = {key: settings.get(key) for key in ("bits", "group_size")}
    symmetric = choose(settings, "sym", (True, False), where, default=True)
    if packing == "auto_round:auto_awq":
        return awq.read_scheme({**common, "zero_point": not symmetric}, where)
    layout = "gptq_v2" if packing == "auto_round" else "gptq"
    return gptq.read_scheme({**common, "sym": symmetric, "checkpoint_format": layout}, where)
