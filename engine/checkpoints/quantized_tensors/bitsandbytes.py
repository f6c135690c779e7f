"""Reads the layouts of bitsandbytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import gcd

import torch
from torch import Tensor

from quire.engine.architecture.quantization.bitsandbytes import NESTED_BLOCK, BitsAndBytes4, BitsAndBytes8
from quire.engine.architecture.quantization.method import Shape
from quire.engine.checkpoints.quantized_tensors.nibbles import unpack_nibbles
from quire.engine.checkpoints.quantized_tensors.reader import Cut, Reader
from quire.engine.checkpoints.quantized_tensors.unpacked import UnpackedReader
from quire.engine.protocol.errors import ConfigError
from quire.kernels.quantized import VALUES


class BitsAndBytes4Reader(Reader[BitsAndBytes4]):
    """Raises `ConfigError` if the weight is not stored as the settings say."""

    def __init__(self, scheme: BitsAndBytes4, module: str, shape: Shape, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(scheme, module, shape, tensors)
        state = json.loads(bytes(self._tensors[scheme.state].tolist()))
        expected = {"blocksize": scheme.group, "shape": list(shape)}
        if scheme.is_nested:
            expected["nested_blocksize"] = NESTED_BLOCK
        for key, value in expected.items():
            if state.get(key) != value:
                raise ConfigError(f"{module}{scheme.state}: {key} {state.get(key)} is not supported; expected {value}")
        if not torch.allclose(self._tensors[".weight.quant_map"], VALUES[scheme.values], atol=1e-6):
            raise ConfigError(f"{module}.weight.quant_map is not that of {scheme.values}, which is not supported")
        self._offset = float(state.get("nested_offset", 0))

    @property
    def group(self) -> int:
        """Inputs of a row that share a scale wherever the row begins in a block."""
        return gcd(self.scheme.group, self.shape[1])

    def codes(self, cut: Cut) -> Tensor:
        out, columns = self.shape
        packed = self._tensors[".weight"].flatten().view(torch.uint8)
        return unpack_nibbles(packed.view(out, columns // 2), cut, high_first=True)

    def scales(self, cut: Cut) -> Tensor:
        out, columns = self.shape
        groups, per_block = columns // self.group, self.scheme.group // self.group
        rows, own = torch.arange(out)[cut[0]], torch.arange(groups)[cut[1]]
        blocks = (rows[:, None] * groups + own) // per_block
        absmax = self._tensors[".weight.absmax"][blocks]
        if not self.scheme.is_nested:
            return absmax
        values = self._tensors[".weight.nested_quant_map"][absmax.int()]
        return values * self._tensors[".weight.nested_absmax"][blocks // NESTED_BLOCK] + self._offset


class BitsAndBytes8Reader(UnpackedReader[BitsAndBytes8]):
    """Raises `ConfigError` if rows are not stored in order."""

    def __init__(self, scheme: BitsAndBytes8, module: str, shape: Shape, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(scheme, module, shape, tensors)
        if ".weight_format" in self._tensors and self._tensors[".weight_format"].item() != 0:
            raise ConfigError(f"{module}.weight_format is not 0 (rows in order), which is not supported")
