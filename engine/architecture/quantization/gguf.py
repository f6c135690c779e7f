"""GGUF, llama.cpp's format: every tensor has a type of its own, and is rows of blocks of bytes.

Source of the blocks: ggml-common.h of github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from quire.engine.architecture.quantization.method import Method, Scheme, Shape, Stored
from quire.engine.architecture.quantization.settings import WHERE
from quire.engine.protocol.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Gguf(Scheme):
    """Rows of blocks; a block has codes and factors of some consecutive inputs."""

    type: str
    """ggml's name, such as Q4_K: also the type of the tensor in the headers."""
    block: int
    """Weights of a block."""
    size: int
    """Bytes of a block."""

    def tensors(self, module: str, shape: Shape) -> dict[str, Stored]:
        return {f"{module}.weight": Stored((self.type,), (shape,))}

    def problem(self, shape: Shape) -> str | None:
        rest = shape[-1] % self.block
        return f"{shape[-1]} inputs are not whole blocks of {self.block}" if rest else None


SCHEMES = {
    scheme.type: scheme
    for scheme in (
        Gguf(type="Q4_0", values="int4", group=32, block=32, size=18),
        Gguf(type="Q4_1", values="uint4", group=32, block=32, size=20, has_offsets=True),
        Gguf(type="Q5_0", values="int8", group=32, block=32, size=22),
        Gguf(type="Q5_1", values="uint8", group=32, block=32, size=24, has_offsets=True),
        Gguf(type="Q8_0", values="int8", group=32, block=32, size=34),
        Gguf(type="Q2_K", values="uint4", group=16, block=256, size=84, has_offsets=True),
        Gguf(type="Q3_K", values="int4", group=16, block=256, size=110),
        Gguf(type="Q4_K", values="uint4", group=32, block=256, size=144, has_offsets=True),
        Gguf(type="Q5_K", values="uint8", group=32, block=256, size=176, has_offsets=True),
        Gguf(type="Q6_K", values="int8", group=16, block=256, size=210),
        Gguf(type="IQ4_NL", values="iq4_nl", group=32, block=32, size=18),
        Gguf(type="IQ4_XS", values="iq4_nl", group=32, block=256, size=136),
        Gguf(type="MXFP4", values="e2m1", group=32, block=32, size=17),
    )
}
"""Schemes by type. Tensors of the types F32, F16 and BF16 are plain."""


@dataclass(frozen=True, kw_only=True)
class GgufMethod(Method):
    name: str = "gguf"
    names_heads: ClassVar[bool] = True
    names_embeddings: ClassVar[bool] = True
    types: Mapping[str, str]
    """The type of each module's weight, for modules that are quantized. The experts of a layer share an entry:
    model.layers.0.mlp.experts.7.up_proj has the entry model.layers.0.mlp.experts.up_proj."""

    def scheme(self, module: str) -> Scheme | None:
        return SCHEMES.get(self.types.get(without_expert(module), ""))


def without_expert(module: str) -> str:
    """The entry of a module in `GgufMethod.types`."""
    return re.sub(r"\.experts\.\d+\.", ".experts.", module)


def read(settings: Mapping[str, Any]) -> GgufMethod:
    """`quire.engine.repository.gguf_folder` writes the `settings`. Raises `ConfigError`."""
    types = settings.get("types")
    if not isinstance(types, Mapping) or not all(isinstance(each, str) for each in types.values()):
        raise ConfigError(f"{WHERE}: gguf needs types, an object with the type of each module's weight")
    if unknown := sorted(set(types.values()) - SCHEMES.keys()):
        raise ConfigError(f"{WHERE}: the type {unknown[0]} is not supported; supported: {', '.join(SCHEMES)}")
    return GgufMethod(types=dict(types))
