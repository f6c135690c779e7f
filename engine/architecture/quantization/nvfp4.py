"""NVFP4: 4-bit floats in groups of 16, each with an 8-bit float as its scale, and a scale of the whole weight."""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire.engine.architecture.quantization.method import Scheme, Shape, Stored


@dataclass(frozen=True, kw_only=True)
class NvFp4(Scheme):
    """Two codes in a byte, the first one low, `[…, out, in / 2]`; scales of groups `[…, out, in / 16]`, and one of the
    weight, or of each expert. Uses the names of compressed-tensors, whose global scale divides.

    If the publisher rounds inputs to 4 bits, too, they have a scale for each group and a constant scale, which is
    stored. If it is not stored, inputs stay in the model's type, which is more exact.
    """

    values: str = "e2m1"
    group: int = 16
    packed: str = ".weight_packed"
    scale: str = ".weight_scale"
    global_scale: str = ".weight_global_scale"
    input_scale: str = ".input_global_scale"
    divides: bool = True

    def tensors(self, module: str, shape: Shape) -> dict[str, Stored]:
        *experts, out, columns = shape
        of_weight = [(*experts, *ones) for ones in ((), (1,), (1, 1))]
        found = {
            module + self.packed: Stored(("U8",), ((*experts, out, columns // 2),)),
            module + self.scale: Stored(("F8_E4M3",), ((*experts, out, columns // self.group),)),
            module + self.global_scale: Stored(("F32",), tuple(of_weight)),
        }
        if self.activations:
            shapes = tuple(dict.fromkeys((*of_weight, (), (1,))))  # experts may have one in common
            found[module + self.input_scale] = Stored(("F32",), shapes, is_optional=True)
        return found


W4A16_MODELOPT = NvFp4(packed=".weight", global_scale=".weight_scale_2", input_scale=".input_scale", divides=False)
MODELOPT = replace(W4A16_MODELOPT, activations="fp4")
