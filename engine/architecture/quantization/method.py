"""A checkpoint's quantization: which weights are quantized, and how they are stored."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

Shape = tuple[int, ...]
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Types of plain tensors, by safetensors' names."""
FLOATS = tuple(DTYPES)
"""The same types, which most factors have, too."""
INTEGERS = ("I64", "I32")
"""Types of tables."""


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint."""

    dtypes: tuple[str, ...]
    """Types that it may have, by safetensors' names: F32, BF16, F16, F8_E4M3, I32, U8, …"""
    shapes: tuple[Shape, ...]
    """Shapes that it may have; none: any."""
    is_optional: bool = False
    other_names: tuple[str, ...] = ()
    """Names that it has in some checkpoints."""

    def name_in(self, names: Collection[str], name: str) -> str | None:
        """The tensor's name in a checkpoint with tensors of these `names`; None: the checkpoint lacks it."""
        return next((each for each in (name, *self.other_names) if each in names), None)


@dataclass(frozen=True, kw_only=True)
class Scheme(ABC):
    """How a weight `[out, in]`, or a stack of them, is stored, and its meaning; a subclass per layout.

    A weight is `(values[code] + offset) * scale`, with factors for groups of inputs: see `quire.kernels.quantized`.
    """

    values: str
    """The values of codes, a key of `quire.kernels.quantized.VALUES`."""
    group: int = 0
    """Inputs that share factors; 0: all."""
    has_offsets: bool = False
    wide: bool = False
    """Scales need the precision of float32."""
    has_order: bool = False
    """Columns are assigned to groups by a table (GPTQ's act order)."""
    is_flat: bool = False
    """Groups are those of the flattened weight: one may begin in one row and end in the next."""
    activations: Literal["int8", "fp8", "fp4"] | None = None
    """Type that the publisher rounds inputs to: a kernel may do so as well, with a scale for each row, or for the
    inputs of each group in it. Inputs in fp4 have a constant scale in addition, if it is stored."""
    has_rounding: bool = False
    """The publisher rounds inputs to int8 with a constant scale, and perhaps a zero point, which are stored."""

    @property
    def bits(self) -> int:
        """Bits of a code in memory."""
        return 8 if self.values in ("int8", "uint8", "fp8") else 4

    def of_embedding(self) -> Scheme:
        """The same for an embedding: its rows are looked up, with the factors as they are stored. A tied head, which
        multiplies by them, does not round its inputs."""
        return replace(self, wide=self.wide or self.bits == 4, activations=None, has_rounding=False)

    @abstractmethod
    def tensors(self, module: str, shape: Shape) -> dict[str, Stored]:
        """The tensors that are read for a module's weight of this `shape`, `[out, in]` or `[experts, out, in]`, by
        name. `module` is the weight's name without `.weight`."""

    def problem(self, shape: Shape) -> str | None:
        """Why a weight of this shape cannot be stored so, such as columns that are not whole groups; or None."""
        columns = shape[-1]
        return f"{columns} inputs are not whole groups of {self.group}" if self.group and columns % self.group else None


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """The quantization of a checkpoint: a subclass per format. Frozen, comparable and picklable."""

    name: str
    """The name, as `quant_method` in config.json."""
    names_heads: ClassVar[bool] = False
    """Whether the settings tell quantized heads from plain ones, without a look at the checkpoint's tensors."""
    names_embeddings: ClassVar[bool] = False
    """The same for embeddings."""

    @abstractmethod
    def scheme(self, module: str) -> Scheme | None:
        """How the weight of a linear layer, or of experts, is stored by the settings; None: not quantized.

        `module` is the weight's name in the checkpoint without `.weight`, such as model.layers.0.self_attn.q_proj.
        A module whose quantized tensors are missing while its plain weight is there is not quantized either, whatever
        this says: settings need not name routers, heads and the like.
        """


def with_names_of_stacks(module: str, stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """The tensors of a stack with second names, which lack `.weight`: `gate_up_proj`, `gate_up_proj_scale`, …"""
    found = {}
    for name, each in stored.items():
        names = (name, *each.other_names)
        others = tuple(module + other.removeprefix(module).removeprefix(".weight") for other in names)
        found[name] = replace(each, other_names=tuple(dict.fromkeys((*each.other_names, *others))))
    return found
