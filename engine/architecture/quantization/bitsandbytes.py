"""bitsandbytes: NF4 and FP4 in blocks of 64, with scales that may be quantized in turn (QLoRA), and LLM.int8."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from quire.engine.architecture.quantization.method import Method, Scheme, Shape, Stored
from quire.engine.architecture.quantization.settings import WHERE, choose, is_skipped, names, refuse_unknown
from quire.engine.architecture.quantization.unpacked import Unpacked
from quire.engine.protocol.errors import ConfigError

NESTED_BLOCK = 256
"""Number of scales that share a scale."""
_BYTES = {"uint8": 1, "int8": 1, "bfloat16": 2, "float16": 2, "float32": 4}
_DTYPES = {1: ("U8", "I8"), 2: ("BF16", "F16"), 4: ("F32",)}
_KNOWN = (
    "load_in_4bit", "load_in_8bit", "_load_in_4bit", "_load_in_8bit", "bnb_4bit_quant_type",
    "bnb_4bit_use_double_quant", "bnb_4bit_quant_storage", "bnb_4bit_compute_dtype", "llm_int8_skip_modules",
    "llm_int8_threshold", "llm_int8_enable_fp32_cpu_offload",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class BitsAndBytes4(Scheme):
    """Two codes in a byte, the first one high, of the flattened weight."""

    group: int = 64
    wide: bool = True
    is_flat: bool = True
    is_nested: bool = False
    """Scales are codes of 8 bits."""
    item: int = 1
    """Bytes of an element of the tensor that holds the codes."""

    @property
    def state(self) -> str:
        """Suffix of the tensor that contains the rest as JSON."""
        return f".weight.quant_state.bitsandbytes__{self.values}"

    def tensors(self, module: str, shape: Shape) -> dict[str, Stored]:
        size = prod(shape)
        blocks, items = -(-size // self.group), size // 2 // self.item
        weight = f"{module}.weight"
        found = {
            weight: Stored(_DTYPES[self.item], ((items, 1), (1, items))),
            f"{weight}.absmax": Stored(("U8",) if self.is_nested else ("F32",), ((blocks,),)),
            f"{weight}.quant_map": Stored(("F32",), ((16,),)),
            module + self.state: Stored(("U8",), ()),
        }
        if self.is_nested:
            found[f"{weight}.nested_absmax"] = Stored(("F32",), ((-(-blocks // NESTED_BLOCK),),))
            found[f"{weight}.nested_quant_map"] = Stored(("F32",), ((256,),))
        return found

    def problem(self, shape: Shape) -> str | None:
        if len(shape) != 2:
            return "stacks of weights are not supported"
        return f"{shape[1]} inputs are not pairs" if shape[1] % 2 else None


@dataclass(frozen=True, kw_only=True)
class BitsAndBytes8(Unpacked):
    """Rows of int8, and the largest absolute value of each. Inputs stay in the model's type, so the outliers that
    LLM.int8 keeps apart need no special treatment."""

    values: str = "int8"
    rows: int = 1
    scale: str = ".SCB"
    divisor: float = 127.0

    def tensors(self, module: str, shape: Shape) -> dict[str, Stored]:
        return {**super().tensors(module, shape), f"{module}.weight_format": Stored(("U8",), ((),), is_optional=True)}


@dataclass(frozen=True, kw_only=True)
class BitsAndBytes(Method):
    name: str = "bitsandbytes"
    of_linear: Scheme
    skipped: tuple[str, ...] = ()

    def scheme(self, module: str) -> Scheme | None:
        return None if is_skipped(module, self.skipped) else self.of_linear


def read(settings: Mapping[str, Any]) -> BitsAndBytes:
    """Raises `ConfigError` for unsupported settings."""
    refuse_unknown(settings, _KNOWN)  # llm_int8_has_fp16_weight: the weights are not quantized
    skipped = names(settings, "llm_int8_skip_modules")
    if settings.get("load_in_8bit"):
        return BitsAndBytes(of_linear=BitsAndBytes8(), skipped=skipped)
    if not settings.get("load_in_4bit"):
        raise ConfigError(f"{WHERE}: bitsandbytes needs load_in_4bit or load_in_8bit")
    values = choose(settings, "bnb_4bit_quant_type", ("nf4", "fp4"), default="fp4")
    storage = str(settings.get("bnb_4bit_quant_storage") or "uint8").removeprefix("torch.")
    choose({"bnb_4bit_quant_storage": storage}, "bnb_4bit_quant_storage", tuple(_BYTES))
    is_nested = bool(settings.get("bnb_4bit_use_double_quant"))
    scheme = BitsAndBytes4(values=values, is_nested=is_nested, item=_BYTES[storage])
    return BitsAndBytes(of_linear=scheme, skipped=skipped)
