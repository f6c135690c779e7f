"""NVFP4: 4-bit floats in groups of 16, each with an 8-bit float as its scale, and a scale of the whole weight."""

from __future__ import annotations

from dataclasses import dataclass

from quire.engine.models.quantization.method import Scheme, Shape, Stored


@dataclass(frozen=True, kw_only=True)
class NvFp4(Scheme):
    """Two codes in a byte, the first one low, `[…, out, in / 2]`; scales of groups `[…, out, in / 16]`, and one of the
    weight, or of each expert. Names are those of compressed-tensors, whose global scale divides.

    Inputs stay in the model's type where a publisher rounds them to 4 bits: that is more exact.
    """

    values: str = "e2m1"
    group: int = 16
    packed: str = ".weight_packed"
    scale: str = ".weight_scale"
    global_scale: str = ".weight_global_scale"
    divides: bool = True

    def tensors(self, module: str, shape: Shape) -> dict[str, Stored]:
        *experts, out, columns = shape
        of_weight = [(*experts, *ones) for ones in ((), (1,), (1, 1))]
        return {
            module + self.packed: Stored(("U8",), ((*experts, out, columns // 2),)),
            module + self.scale: Stored(("F8_E4M3",), ((*experts, out, columns // self.group),)),
            module + self.global_scale: Stored(("F32",), tuple(of_weight)),
        }


MODELOPT = NvFp4(packed=".weight", global_scale=".weight_scale_2", divides=False)
