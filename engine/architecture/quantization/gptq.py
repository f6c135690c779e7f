"""GPTQ (Frantar et al. 2022): integers of 2, 3, 4 or 8 bits, as AutoGPTQ and GPTQModel store them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from quire.engine.architecture.quantization.method import FLOATS, Method, Scheme, Shape, Stored
from quire.engine.architecture.quantization.settings import WHERE, check_expression, check_neutral, choose
from quire.engine.protocol.errors import ConfigError

S = TypeVar("S", bound=Scheme)
GROUPS = (-1, 16, 32, 64, 128, 256, 512, 1024)
"""Values of `group_size`; -1 is all inputs."""
NEUTRAL: dict[str, tuple[object, ...]] = {
    "is_marlin_format": (),
    "pack_dtype": ("int32", "torch.int32"),
    "adapter": (),
    "rotation": (),
    "rotation_config": (),
}
"""Settings that change the meaning of tensors, and their values that do not. Other settings tell how the publisher
quantized; they are accepted unchecked, since each release of a tool writes new ones."""


@dataclass(frozen=True, kw_only=True)
class GptqScheme(Scheme):
    """Words of 32 bits, the first code lowest: `qweight` has the codes of consecutive inputs, `[in * width / 32, out]`,
    and `qzeros` the zero points of consecutive features, `[groups, out * width / 32]`. `scales` is `[groups, out]`.

    A weight is `(code - zero) * scale`. Zero points are per group, or constant (symmetric).
    """

    width: int
    """Bits of a stored code. Words of 3-bit codes are a stream: 32 codes in 3 words."""
    minus_one: bool
    """Zero points are stored minus one (gptq, in contrast to gptq_v2)."""

    def tensors(self, module: str, shape: Shape) -> dict[str, Stored]:
        out, columns = shape
        groups = columns // (self.group or columns)
        zeros, order = not self.has_offsets, not self.has_order
        return {
            f"{module}.qweight": Stored(("I32",), ((columns * self.width // 32, out),)),
            f"{module}.qzeros": Stored(("I32",), ((groups, out * self.width // 32),), is_optional=zeros),
            f"{module}.scales": Stored(FLOATS, ((groups, out),)),
            f"{module}.g_idx": Stored(("I32", "I64"), ((columns,),), is_optional=order),
        }

    def problem(self, shape: Shape) -> str | None:
        if len(shape) != 2:
            return "GPTQ has no stacks of experts"
        if any(size * self.width % 32 for size in shape):
            return f"{shape[0]} x {shape[1]} codes of {self.width} bits are not whole words of 32 bits"
        return super().problem(shape)


@dataclass(frozen=True, kw_only=True)
class Gptq(Method):
    name: str = "gptq"
    names_heads: ClassVar[bool] = True
    default: GptqScheme
    rules: tuple[tuple[str, GptqScheme | None], ...] = ()
    """Expressions for modules' names, in the order of precedence, and their schemes (`dynamic`)."""
    of_blocks: tuple[str, ...] = ()
    """The modules of a block that are quantized, by the end of their names, such as mlp.up_proj; empty: all."""
    lm_head: bool = False

    def scheme(self, module: str) -> GptqScheme | None:
        is_head = module.rpartition(".")[2] == "lm_head"
        if is_head and not self.lm_head:
            return None
        default = self.default if is_head or not self.of_blocks or _ends(module, self.of_blocks) else None
        return first_rule(module, self.rules, default)


def read(settings: Mapping[str, Any]) -> Gptq:
    """Read `quantization_config`, or quantize_config.json. Raises `ConfigError` for unsupported settings."""
    names = settings.get("modules_in_block_to_quantize") or ()
    flat = [name for each in names for name in ([each] if isinstance(each, str) else each)]
    return Gptq(
        default=read_scheme(settings, WHERE),
        rules=read_rules(settings, read_scheme),
        of_blocks=tuple(dict.fromkeys(flat)),
        lm_head=bool(settings.get("lm_head")),
    )


def read_scheme(settings: Mapping[str, Any], where: str) -> GptqScheme:
    """Raises `ConfigError` with a message that begins with `where`."""
    check_neutral(settings, NEUTRAL, where)
    layout = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    choose({"checkpoint_format": layout}, "checkpoint_format", ("gptq", "gptq_v2"), where)
    width = choose(settings, "bits", (2, 3, 4, 8), where)
    group = choose(settings, "group_size", GROUPS, where)
    symmetric = choose(settings, "sym", (True, False), where, default=True)
    ordered = choose(settings, "desc_act", (False, True), where, default=False)
    return GptqScheme(
        values=f"{'' if symmetric else 'u'}int{8 if width == 8 else 4}",
        group=max(group, 0),
        has_offsets=not symmetric,
        has_order=ordered and group > 0,
        width=width,
        minus_one=layout == "gptq",
    )


def read_rules(
    settings: Mapping[str, Any], scheme: Callable[[Mapping[str, Any], str], S]
) -> tuple[tuple[str, S | None], ...]:
    """GPTQModel's `dynamic`: settings of modules whose names match a regular expression, which may have +: before it;
    with -: they are not quantized. Raises `ConfigError`."""
    rules: list[tuple[str, S | None]] = []
    for key, changes in (settings.get("dynamic") or {}).items():
        where, pattern = f"{WHERE}: dynamic {key!r}", key.removeprefix("+:").removeprefix("-:")
        check_expression(pattern, where)
        if key.startswith("-:") or changes is False:
            rules.append((pattern, None))
        elif isinstance(changes, Mapping):
            rules.append((pattern, scheme({**settings, **changes}, where)))
        else:
            raise ConfigError(f"{where}: must be an object with settings, or false, got {changes!r}")
    return tuple(rules)


def first_rule(module: str, rules: tuple[tuple[str, S | None], ...], default: S | None) -> S | None:
    """The scheme of the first rule that matches the start of the module's name."""
    return next((scheme for pattern, scheme in rules if re.match(pattern, module)), default)


def _ends(module: str, names: tuple[str, ...]) -> bool:
    return any(f".{module}".endswith(f".{name}") for name in names)
