"""Weights with a byte for each code, and scales of the whole weight, its rows, or blocks: FP8, INT8 and the like."""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire.engine.architecture.quantization.method import FLOATS, Scheme, Shape, Stored, with_names_of_stacks

INPUT_SCALE, INPUT_ZERO_POINT = ".input_scale", ".input_zero_point"


@dataclass(frozen=True, kw_only=True)
class Blocks(Scheme):
    """Factors for blocks of `rows` x `group` weights, the last blocks smaller."""

    rows: int = 0
    """Rows that share factors; 0: all."""

    def factors(self, shape: Shape) -> Shape:
        """The shape of factors: `[…, row blocks, groups]`."""
        *experts, out, columns = shape
        return (*experts, -(-out // (self.rows or out)), -(-columns // (self.group or columns)))

    def stored_factors(self, dtypes: tuple[str, ...], shape: Shape, *, is_optional: bool = False) -> Stored:
        """A tensor with a factor for each block. A stack's factors may be transposed, like its codes."""
        *experts, rows, groups = self.factors(shape)
        shapes: list[Shape] = [(*experts, rows, groups)]
        if self.rows > 1:
            shapes.append((*experts, rows, 1, groups, 1))
        if groups == 1:
            shapes.append((*experts, rows))
        if rows == groups == 1:
            shapes += [tuple(experts), (1,), ()]
        if experts:
            shapes.append((*experts, groups, rows))
        return Stored(dtypes, tuple(dict.fromkeys(shapes)), is_optional)


@dataclass(frozen=True, kw_only=True)
class Unpacked(Blocks):
    """Codes `[…, out, in]`: FP8 numbers or integers, including int4. Some publishers transpose stacks, `[experts, in,
    out]`, which the shape tells."""

    weight: str = ".weight"
    scale: str = ".weight_scale"
    other_scale: str | None = None
    """Another name for scales."""
    zero_point: str = ".weight_zero_point"
    """Name of zero points of integers, which must be 0 if they are stored, unless the scheme has offsets."""
    exponents: bool = False
    """Scales are powers of two, which may be stored as bytes, exponents plus 127."""
    divisor: float = 1.0
    """The number that scales are divided by."""

    def tensors(self, module: str, shape: Shape) -> dict[str, Stored]:
        *experts, out, columns = shape
        orders = (shape, (*experts, columns, out)) if experts else (shape,)
        others = () if self.other_scale is None else (module + self.other_scale,)
        scales = ("U8", "F8_E8M0") if self.exponents else (*FLOATS, "F8_E8M0")
        found = {
            module + self.weight: Stored(("F8_E4M3",) if self.values == "fp8" else ("I8",), orders),
            module + self.scale: replace(self.stored_factors(scales, shape), other_names=others),
        }
        if self.values != "fp8":
            zeros = self.stored_factors(("I8", "I32", *FLOATS), shape, is_optional=not self.has_offsets)
            found[module + self.zero_point] = zeros
        if self.has_rounding:
            found[module + INPUT_SCALE] = Stored(FLOATS, ((1,), ()))
            found[module + INPUT_ZERO_POINT] = Stored(("I8", "I32", *FLOATS), ((1,), ()), is_optional=True)
        return with_names_of_stacks(module, found) if experts else found

    def problem(self, shape: Shape) -> str | None:
        if len(shape) == 3 and shape[1] == shape[2]:
            return f"of a stack of square matrices, {list(shape)}, the shape does not tell rows from columns"
        return None


FP8 = Unpacked(values="fp8", activations="fp8")
FP8_OF_ROWS = Unpacked(values="fp8", activations="fp8", rows=1)
FP8_OF_BLOCKS = Unpacked(values="fp8", rows=128, group=128)
MXFP8 = Unpacked(values="fp8", activations="fp8", rows=1, group=32, exponents=True)
