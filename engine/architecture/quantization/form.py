"""How a rank keeps a quantized weight in memory: the checkpoint's codes, with factors for the rank's own groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

from quire.engine.architecture.quantization.method import Scheme

INT4_GROUPS = (128, 64, 32)
"""Sizes of groups of `--quantization int4`, and of 4-bit weights that a CPU multiplies by inputs of 8 bits; the largest
one that divides the inputs, or the stored group, is used."""
_WORD, _MAX_GROUP = 8, 256
"""Inputs per word of codes, and the maximum number of inputs with one pair of factors in memory."""
_BLOCK_BYTES, _ROUNDED_GROUP = 64, 128
"""On a GPU: bytes of a feature in a block of codes, and the inputs of a row that are rounded with one scale."""
_FP4_GROUP = 16
"""The inputs of a row that are rounded with one scale if they are rounded to 4 bits."""
ORDERED_GROUP = 32
"""Inputs that share factors on a rank that has only a part of each group, as its columns are ordered."""


@dataclass(frozen=True)
class Form:
    """See `quire.kernels.quantized.QuantizedWeight` for the fields, and `CodedTiles`, or `CodedWords` on GPUs, for the
    bytes."""

    values: str
    bits: int
    group: int
    """Inputs that share factors; the inputs of the whole rank if all do."""
    has_offsets: bool
    wide: bool
    """Factors of 4-bit codes are float32 as well."""
    has_order: bool
    inputs: int
    """Columns of the whole weight: with an order, a rank's columns may be of any group."""
    activations: str | None
    has_rounding: bool

    def packed_bytes(self, rows: int, columns: int, device: str) -> int:
        """Bytes of a weight `[rows, columns]` of the rank."""
        factors, group = 1 + self.has_offsets, self.group
        if self.group == columns and not self.has_offsets:
            factors = 0
        if self.has_order and columns < self.inputs:
            stored = self.inputs // self.group
            columns = ORDERED_GROUP * max(stored, columns // ORDERED_GROUP + stored // 2)  # each is half empty or more
            group = ORDERED_GROUP
        size = 2 if self.bits == 4 and not self.wide else 4
        order = 8 * columns * self.has_order
        rounds = self.rounds_inputs(columns, device)
        if device == "cpu":
            if rounds and self.bits == 4:
                group = next(each for each in INT4_GROUPS if group % each == 0)
                return rows * columns // 2 + 8 * rows * columns // group
            groups = -(-columns // min(group, _MAX_GROUP))
            excess = 4 * rows * (rounds and self.has_rounding)
            return order + rows * columns * self.bits // 8 + factors * size * rows * groups + 4 * rows + excess
        if rounds and self.bits == 4:
            return rows * columns // 2 + rows * columns // group + 4 * rows + 4
        if rounds:
            return rows * columns + 4 * rows * columns // group
        block = _BLOCK_BYTES * 8 // self.bits
        if group % block:
            group = gcd(group, block)
        groups = -(-columns // max(group, block)) * max(group, block) // group
        return order + rows * -(-columns // block) * _BLOCK_BYTES + factors * size * rows * groups + 4 * rows

    def rounds_inputs(self, columns: int, device: str) -> bool:
        """Whether products with `columns` inputs round them: see `quire.kernels.linear.rounds_inputs`."""
        match self.values, self.activations:
            case _ if self.has_order:
                return False
            case "int4", "int8":
                return device == "cpu" and not self.has_rounding and self.group % INT4_GROUPS[-1] == 0
            case "int8", "int8":
                return self.group == columns and not self.has_offsets and (device == "cpu" or not self.has_rounding)
            case "fp8", "fp8":
                is_plain = not (self.has_offsets or self.has_rounding)
                return device != "cpu" and is_plain and self.group in (columns, _ROUNDED_GROUP)
            case "e2m1", "fp4":
                return device != "cpu" and self.group == _FP4_GROUP < columns
        return False


def form_of(schemes: Sequence[Scheme | None], start: int, length: int, inputs: int) -> Form | None:
    """The form of a rank's `length` columns of `inputs`, from `start` on, of weights that are concatenated; None: they
    have no common one, and are dequantized while they are loaded."""
    first, *others = {scheme and _kind(scheme) for scheme in schemes}
    scheme = schemes[0]
    if first is None or others or scheme is None:
        return None
    group = scheme.group
    if group and not scheme.has_order:
        group = gcd(group, start, length, inputs if scheme.is_flat else 0)
        if group % _WORD:
            return None
    return Form(
        values=scheme.values,
        bits=scheme.bits,
        group=group or length,
        has_offsets=scheme.has_offsets,
        wide=scheme.wide,
        has_order=scheme.has_order,
        inputs=inputs,
        activations=scheme.activations,
        has_rounding=scheme.has_rounding,
    )


def _kind(scheme: Scheme) -> tuple[object, ...]:
    inputs = scheme.has_order, scheme.activations, scheme.has_rounding
    return scheme.values, scheme.group, scheme.has_offsets, scheme.wide, *inputs
