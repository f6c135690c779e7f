"""Codes and zero points in words of 32 bits."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from math import gcd
from typing import ClassVar

import torch
from torch import Tensor

from quire.engine.architecture.quantization.method import Shape
from quire.engine.checkpoints.quantized_tensors.reader import Cut, Reader, S
from quire.engine.protocol.errors import ConfigError


def unpack(words: Tensor, width: int, cut: slice, order: Sequence[int] = ()) -> Tensor:
    """A slice of the codes, uint8 `[…, codes]`, in int32 words `[…, words]`: a stream of `width` bits each, lowest bits
    first. Only words of the slice are read. `order` has each code's place in a word, if not in order."""
    codes, size = 32 // gcd(32, width), width // gcd(32, width)  # so many codes fill so many words
    first, last = cut.start // codes, -(-cut.stop // codes)
    octets = words[..., first * size : last * size].clone(memory_format=torch.contiguous_format).view(torch.uint8)
    octets = octets.view(*words.shape[:-1], last - first, 4 * size)
    unpacked = octets.new_empty((*octets.shape[:-1], codes))
    for code, place in enumerate(order or range(codes)):
        octet, shift = divmod(place * width, 8)
        unpacked[..., code] = octets[..., octet] >> shift
        if shift + width > 8:
            unpacked[..., code] |= octets[..., octet + 1] << 8 - shift
    unpacked &= 2**width - 1
    return unpacked.flatten(-2)[..., cut.start - first * codes : cut.stop - first * codes : cut.step]


class PackedWordsReader(Reader[S]):
    """The common part of GPTQ and AWQ: `scales` `[groups, out]`, and zero points, which need not be stored if
    symmetric."""

    asymmetric: ClassVar[str]
    """The setting that declares a zero point for each group, as in "set … in quantization_config"."""

    def __init__(self, scheme: S, module: str, shape: Shape, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(scheme, module, shape, tensors)
        self.module = module

    @property
    @abstractmethod
    def middle(self) -> int:
        """The zero point of symmetric codes."""

    @abstractmethod
    def zeros(self, cut: Cut) -> Tensor:
        """The stored zero points, uint8 `[rows, groups]`."""

    def scales(self, cut: Cut) -> Tensor:
        """Raises `ConfigError` if the settings say symmetric and zero points are not."""
        stored = ".qzeros" in self._tensors and not self.scheme.has_offsets
        if stored and bool((self.zeros(cut) != self.middle).any()):
            raise ConfigError(
                f"{self.module}.qzeros: not all zero points are {self.middle}, though quantization_config says that "
                f"weights are symmetric; set {self.asymmetric} in it"
            )
        rows, groups = cut
        return self._tensors[".scales"][groups, rows].T.float()

    def offsets(self, cut: Cut) -> Tensor | None:
        return -self.zeros(cut).float() if self.scheme.has_offsets else None
