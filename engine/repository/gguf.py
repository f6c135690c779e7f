"""Reads the headers of GGUF files: metadata, and where each tensor is. No torch.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quire.engine.architecture.quantization.gguf import SCHEMES
from quire.engine.protocol.errors import ConfigError
from quire.engine.repository.model_files import check_regular

PLAIN = {"F32": 4, "F16": 2, "BF16": 2}
"""Bytes of a number, by the types that are not quantized."""
_VERSIONS = (2, 3)
_TYPE_NAMES = (
    "F32 F16 Q4_0 Q4_1 Q4_2 Q4_3 Q5_0 Q5_1 Q8_0 Q8_1 Q2_K Q3_K Q4_K Q5_K Q6_K Q8_K IQ2_XXS IQ2_XS IQ3_XXS IQ1_S IQ4_NL "
    "IQ3_S IQ2_S IQ4_XS I8 I16 I32 I64 F64 IQ1_M BF16 Q4_0_4_4 Q4_0_4_8 Q4_0_8_8 TQ1_0 TQ2_0 IQ4_NL_4_4 IQ4_NL_4_8 "
    "IQ4_NL_8_8 MXFP4 NVFP4 Q1_0"
)
_TYPES = dict(enumerate(_TYPE_NAMES.split()))
"""ggml's names of tensors' types."""
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Types of metadata, by `struct`'s characters."""
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4


@dataclass(frozen=True)
class GgufTensor:
    """A tensor, or a part of it."""

    file: Path
    dtype: str
    """ggml's name: F32, Q4_K, …"""
    shape: tuple[int, ...]
    """The last dimension is contiguous: the reverse of ggml's."""
    start: int
    """Its first byte in the file."""
    added: float = 0.0
    """The number that llama.cpp has added to the published model's numbers."""

    @property
    def row_bytes(self) -> int:
        if self.dtype in PLAIN:
            return self.shape[-1] * PLAIN[self.dtype]
        return self.shape[-1] // SCHEMES[self.dtype].block * SCHEMES[self.dtype].size

    @property
    def bytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.row_bytes

    def at(self, index: int) -> GgufTensor:
        """One tensor of a stack."""
        first = replace(self, shape=self.shape[1:])
        return replace(first, start=self.start + index * first.bytes)

    def numbers(self) -> list[float]:
        """The content of a small tensor of the type F32."""
        assert self.dtype == "F32"
        with self.file.open("rb") as stream:
            stream.seek(self.start)
            return [_shortest(value) for (value,) in struct.iter_unpack("<f", stream.read(self.bytes))]


@dataclass(frozen=True)
class GgufFile:
    """A model: of a single file, or of all the files that it was split into."""

    path: Path
    metadata: Mapping[str, Any]
    """Numbers, texts and lists. Numbers of 32 bits are the shortest decimals that stand for them."""
    tensors: Mapping[str, GgufTensor]
    """By llama.cpp's names, such as blk.0.attn_q.weight."""

    @property
    def files(self) -> list[Path]:
        return sorted({self.path, *(tensor.file for tensor in self.tensors.values())})


def read(path: Path) -> GgufFile:
    """Read the header of a file, and of the other files of the model if it was split. Raises `ConfigError` for files
    that are damaged or truncated, and for types of tensors that are not supported."""
    metadata, tensors = _read_one(path)
    count = metadata.get("split.count", 1)
    if not isinstance(count, int) or count <= 1:
        return GgufFile(path, metadata, tensors)
    if not (match := re.fullmatch(rf"(.*)-00001-of-{count:05}\.gguf", path.name)):
        raise ConfigError(
            f"{path}: one of the {count} files of a split model; keep the names that it was published with, which end "
            f"in -00001-of-{count:05}.gguf, and pass the first one"
        )
    for number in range(2, count + 1):
        tensors |= _read_one(path.with_name(f"{match[1]}-{number:05}-of-{count:05}.gguf"))[1]
    return GgufFile(path, metadata, tensors)


def _read_one(path: Path) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    check_regular(path)
    try:
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return read_header(path, data, len(data))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}: not a GGUF file but an empty one; download it again") from None


def read_header(path: Path, data: bytes | mmap.mmap, size: int) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    """Metadata and tensors of one file of `size` bytes, which begins with `data`; errors as in `read`."""
    try:
        if data[:4] != b"GGUF":
            raise ConfigError(f"{path}: not a GGUF file; download it again")
        return _Header(path, data, size).read()
    except (struct.error, EOFError):
        raise ConfigError(f"{path}: truncated: the file ends inside of its header; download it again") from None
    except (ValueError, LookupError, TypeError, ArithmeticError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}: damaged: the header is not that of a GGUF file; download it again") from None


class _Header:
    """The header is read once, from start to end."""

    def __init__(self, path: Path, data: bytes | mmap.mmap, size: int) -> None:
        self._path, self._data, self._size, self._at = path, data, size, 4

    def read(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        version = self._number("I")
        if version not in _VERSIONS:
            reason = "it is for big-endian machines" if not version % 65536 else f"version {version}"
            raise ConfigError(f"{self._path}: {reason}, which is not supported; supported: little-endian versions 2, 3")
        tensor_count, count = self._number("Q"), self._number("Q")
        metadata = {self._string(): self._value(self._number("I")) for _ in range(count)}
        found = {self._string(): self._tensor() for _ in range(tensor_count)}
        if len(metadata) != count or len(found) != tensor_count:
            raise ValueError("a name occurs twice")
        alignment = metadata.get("general.alignment", 32)
        first = -(-self._at // alignment) * alignment
        tensors = {}
        for name, (kind, shape, offset) in found.items():
            dtype = _TYPES.get(kind, f"number {kind}")
            if dtype not in PLAIN and dtype not in SCHEMES:
                raise ConfigError(
                    f"{self._path}: {name} has the type {dtype}, which is not supported; supported: "
                    f"{', '.join((*PLAIN, *SCHEMES))}"
                )
            if dtype in SCHEMES and (problem := SCHEMES[dtype].problem(shape)):
                raise ConfigError(f"{self._path}: damaged: {name} has {problem}, as {dtype} needs; download it again")
            tensors[name] = GgufTensor(self._path, dtype, shape, first + offset)
        end = max((tensor.start + tensor.bytes for tensor in tensors.values()), default=0)
        if end > self._size:
            raise ConfigError(f"{self._path}: truncated: {self._size:,} bytes of {end:,}; download it again")
        return metadata, tensors

    def _tensor(self) -> tuple[int, tuple[int, ...], int]:
        count = self._number("I")
        if not 1 <= count <= _MAX_DIMENSIONS:
            raise ValueError("no number of dimensions")
        shape = tuple(self._number("Q") for _ in range(count))[::-1]
        return self._number("I"), shape, self._number("Q")

    def _number(self, kind: str) -> Any:
        (value,) = struct.unpack_from(f"<{kind}", self._data, self._at)
        self._at += struct.calcsize(f"<{kind}")
        return _shortest(value) if kind == "f" else value

    def _string(self) -> str:
        length = self._number("Q")
        self._at += length
        if self._at > len(self._data):
            raise EOFError
        return str(self._data[self._at - length : self._at], "utf-8")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._number(_NUMBERS[kind])
        kind, count = self._number("I"), self._number("Q")
        if kind in (_STRING, _ARRAY):
            return [self._value(kind) for _ in range(count)]
        values = struct.unpack_from(f"<{count}{_NUMBERS[kind]}", self._data, self._at)
        self._at += struct.calcsize(f"<{count}{_NUMBERS[kind]}")
        return list(values)


def _shortest(value: float) -> float:
    """1e-5 for the number of 32 bits that is nearest to it, which is 9.99999974737875e-06."""
    packed = struct.pack("<f", value)
    rounded = (float(f"{value:.{digits}g}") for digits in range(6, 10))
    return next((each for each in rounded if struct.pack("<f", each) == packed), value)
