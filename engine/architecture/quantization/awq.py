"""AWQ (Lin et al. 2023): integers of 4 bits, in the GEMM layout of AutoAWQ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.engine.architecture.quantization.gptq import NEUTRAL, first_rule, read_rules
from quire.engine.architecture.quantization.method import FLOATS, Method, Scheme, Shape, Stored
from quire.engine.architecture.quantization.settings import WHERE, check_neutral, choose, names


@dataclass(frozen=True, kw_only=True)
class AwqScheme(Scheme):
    """Words of 32 bits have codes of 8 consecutive features, 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits up: `qweight`
    `[in, out / 8]`, and the zero points `qzeros` `[groups, out / 8]`. `scales` is `[groups, out]`.

    A weight is `(code - zero) * scale`. Zero points are per group, or 8 (symmetric).
    """

    def tensors(self, module: str, shape: Shape) -> dict[str, Stored]:
        out, columns = shape
        groups = columns // (self.group or columns)
        return {
            f"{module}.qweight": Stored(("I32",), ((columns, out // 8),)),
            f"{module}.qzeros": Stored(("I32",), ((groups, out // 8),), is_optional=not self.has_offsets),
            f"{module}.scales": Stored(FLOATS, ((groups, out),)),
        }

    def problem(self, shape: Shape) -> str | None:
        if len(shape) != 2:
            return "AWQ has no stacks of experts"
        return f"{shape[0]} outputs are not whole words of 8 codes" if shape[0] % 8 else super().problem(shape)


@dataclass(frozen=True, kw_only=True)
class Awq(Method):
    name: str = "awq"
    default: AwqScheme
    rules: tuple[tuple[str, AwqScheme | None], ...] = ()
    """Like `Gptq.rules`."""
    skipped: tuple[str, ...] = ()
    """A module is not quantized if its name contains one of these, as whole components."""

    def scheme(self, module: str) -> AwqScheme | None:
        if any(f".{part.strip('.')}." in f".{module}." for part in self.skipped):
            return None
        return first_rule(module, self.rules, self.default)


def read(settings: Mapping[str, Any]) -> Awq:
    """Read `quantization_config`, or AutoAWQ's quant_config.json. Raises `ConfigError` for unsupported settings."""
    return Awq(
        default=read_scheme(settings, WHERE),
        rules=read_rules(settings, read_scheme),
        skipped=names(settings, "modules_to_not_convert"),
    )


def read_scheme(settings: Mapping[str, Any], where: str) -> AwqScheme:
    """Like `gptq.read_scheme`."""
    check_neutral(settings, NEUTRAL, where)
    layout = settings.get("version") or settings.get("checkpoint_format") or settings.get("format") or "gemm"
    choose({"version": str(layout).lower()}, "version", ("gemm",), where)
    if settings.get("backend") == "llm-awq":
        choose(settings, "backend", ("autoawq",), where)
    older = {"bits": "w_bit", "group_size": "q_group_size"}
    settings = {**{key: settings[each] for key, each in older.items() if each in settings}, **settings}
    choose(settings, "bits", (4,), where)
    group = choose(settings, "group_size", (-1, 32, 64, 128), where)
    has_zeros = choose(settings, "zero_point", (True, False), where, default=True)
    return AwqScheme(values="uint4" if has_zeros else "int4", group=max(group, 0), has_offsets=has_zeros)
