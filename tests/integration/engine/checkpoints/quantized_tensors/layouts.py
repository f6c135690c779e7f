"""Common parts of the tests of readers: small floats by their bits, and a check of readers against the weights."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from quire.engine.architecture.quantization.method import Scheme, Shape
from quire.engine.checkpoints.quantized_tensors import READERS
from quire.engine.checkpoints.quantized_tensors.reader import Cut, Reader
from quire.kernels.quantized import QuantizedWeight

MODULE = "model.layers.0.mlp.down_proj"


def small_float(code: int, exponent_bits: int, mantissa_bits: int) -> float:
    """The value of the bits of a float with a bias of `2 ** (exponent_bits - 1) - 1`, without infinities."""
    mantissa = code & (1 << mantissa_bits) - 1
    exponent = code >> mantissa_bits & (1 << exponent_bits) - 1
    bias = (1 << exponent_bits - 1) - 1
    size = math.ldexp(mantissa / (1 << mantissa_bits) + (exponent > 0), max(exponent, 1) - bias)
    return -size if code >> exponent_bits + mantissa_bits else size


def table(exponent_bits: int, mantissa_bits: int) -> Tensor:
    bits = 1 + exponent_bits + mantissa_bits
    return torch.tensor([small_float(code, exponent_bits, mantissa_bits) for code in range(1 << bits)]).double()


E2M1 = table(2, 1)
E4M3 = table(4, 3)


def random_codes(seed: int, bits: int, *shape: int) -> Tensor:
    """Random codes as int64; of 8 bits, all but the two that are not numbers in E4M3."""
    codes = torch.randint(0, 1 << bits, shape, generator=torch.Generator().manual_seed(seed))
    return torch.where(codes & 127 == 127, 5, codes) if bits == 8 else codes


def in_bytes(codes: Tensor, high_first: bool = False) -> Tensor:
    """Two codes of 4 bits in a byte."""
    first, second = codes[..., ::2], codes[..., 1::2]
    return (16 * first + second if high_first else first + 16 * second).to(torch.uint8)


def open_reader(scheme: Scheme, shape: Shape, tensors: Mapping[str, Tensor]) -> Reader[Any]:
    """The reader of tensors, by names without the module's, after a check that the scheme allows them."""
    assert scheme.problem(shape) is None
    stored, named = scheme.tensors(MODULE, shape), {MODULE + name: each.contiguous() for name, each in tensors.items()}
    data = save(named)
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    names = {name: found for name, each in stored.items() if (found := each.name_in(named, name))}
    assert {name for name, each in stored.items() if not each.is_optional} <= names.keys()
    assert set(names.values()) == named.keys()
    for name, found in names.items():
        assert header[found]["dtype"] in stored[name].dtypes
        assert not stored[name].shapes or tuple(header[found]["shape"]) in stored[name].shapes
    return READERS[type(scheme)](scheme, MODULE, shape, {name: named[found] for name, found in names.items()})


def check(scheme: Scheme, expected: Tensor, tensors: Mapping[str, Tensor]) -> Reader[Any]:
    """Check that the reader of tensors, as for `open_reader`, gives `expected`, whole and in slices."""
    reader, shape = open_reader(scheme, tuple(expected.shape), tensors), tuple(expected.shape)
    close = partial(torch.testing.assert_close, rtol=1e-6, atol=1e-6 * float(expected.abs().max()))
    for cut in cuts(shape):
        close(reader[cut].double(), expected[cut].double())
        assert (reader.codes(cut).dtype, reader.codes(cut).shape) == (torch.uint8, expected[cut].shape)
    whole, groups = cuts(shape)[0], -(-shape[-1] // reader.group)
    of_groups = (*whole[:-1], slice(0, groups))
    scales, offsets = reader.scales(of_groups), reader.offsets(of_groups)
    assert (offsets is not None) == scheme.has_offsets
    for each in (scales, offsets):
        assert each is None or (each.dtype, each.shape) == (torch.float32, (*shape[:-1], groups))
    if reader.order() is None and shape[-1] == groups * reader.group:
        weight = QuantizedWeight(scheme.values, torch.float32, reader.codes(whole), scales, offsets)
        close(weight.dequantize().double(), expected.double())
    return reader


def cuts(shape: Shape) -> list[Cut]:
    """All, and parts that begin and end anywhere, of every row or every other one."""
    generator = torch.Generator().manual_seed(3)
    found: list[Cut] = [tuple(slice(0, size) for size in shape)]
    for _ in range(12):
        starts = [int(torch.randint(size, (), generator=generator)) for size in shape]
        stops = [
            start + 1 + int(torch.randint(size - start, (), generator=generator))
            for start, size in zip(starts, shape, strict=True)
        ]
        steps = [None] * (len(shape) - 2) + [int(torch.randint(1, 3, (), generator=generator)), None]
        found.append(tuple(map(slice, starts, stops, steps)))
    return found
