"""Codes and factors of GGUF's blocks against the dequantization of llama.cpp's own package."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from quire.engine.architecture.quantization.gguf import SCHEMES
from quire.engine.checkpoints.quantized_tensors.gguf import GgufReader
from quire.kernels.quantized import VALUES

ROWS, COLUMNS = 6, 768
HALVES = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "MXFP4": (),
}
"""Places of float16 in a block: random bytes would be infinite or not a number."""


def random_blocks(name: str, shape: tuple[int, ...], zeros: float = 0.0) -> Tensor:
    """Any bytes, except for scales and minima, which are small numbers, some of them 0."""
    scheme, generator = SCHEMES[name], np.random.default_rng(len(name) + ord(name[1]))
    count = shape[-1] // scheme.block
    blocks = generator.integers(0, 256, (*shape[:-1], count, scheme.size), dtype=np.uint8)
    for at in HALVES[name]:
        numbers = generator.normal(scale=0.02, size=blocks.shape[:-1]).astype(np.float16)
        numbers[generator.random(numbers.shape) < zeros] = 0
        blocks[..., at : at + 2] = numbers[..., None].view(np.uint8)
    if name == "MXFP4":
        blocks[..., 0] = generator.integers(100, 140, blocks.shape[:-1])
    return torch.from_numpy(blocks).flatten(-2)


def expected(name: str, stored: Tensor) -> Tensor:
    quants = gguf.quants.dequantize(stored.numpy(), gguf.GGMLQuantizationType[name])
    return torch.from_numpy(quants)


def reader(name: str, stored: Tensor, shape: tuple[int, ...]) -> GgufReader:
    return GgufReader(SCHEMES[name], "blk", shape, {"blk.weight": stored})


def weight(of: GgufReader, cut: tuple[slice, ...]) -> Tensor:
    """As the kernels' oracle computes it, from codes and factors of whole groups."""
    groups = (*cut[:-1], slice(cut[-1].start // of.group, cut[-1].stop // of.group))
    codes, scales = of.codes(cut), of.scales(groups)
    values = VALUES[of.scheme.values][codes.int()].view(*scales.shape, of.group)
    if (offsets := of.offsets(groups)) is not None:
        values = values + offsets[..., None]
    return (values * scales[..., None]).flatten(-2)


@pytest.mark.parametrize("name", SCHEMES)
def test_weight_is_that_of_llama_cpp(name: str) -> None:
    shape = (ROWS, COLUMNS)
    stored = random_blocks(name, shape)
    found = reader(name, stored, shape)
    assert found.codes((slice(0, ROWS), slice(0, COLUMNS))).dtype == torch.uint8
    assert found.scales((slice(0, ROWS), slice(0, 1))).dtype == torch.float32
    torch.testing.assert_close(found[slice(0, ROWS), slice(0, COLUMNS)], expected(name, stored), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", SCHEMES)
def test_slices_are_those_of_the_weight(name: str) -> None:
    """Groups inside blocks, rows with a step, and columns that are not whole groups."""
    shape = (ROWS, COLUMNS)
    stored = random_blocks(name, shape)
    found, whole = reader(name, stored, shape), expected(name, stored)
    cut = (slice(1, ROWS, 2), slice(64, 704))
    torch.testing.assert_close(weight(found, cut), whole[cut], rtol=1e-6, atol=1e-6)
    cut = (slice(2, 4), slice(37, 300))
    assert found.codes(cut).shape == (2, 263)
    torch.testing.assert_close(found[cut], whole[cut], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_K"])
def test_stacks_of_experts(name: str) -> None:
    shape = (3, ROWS, COLUMNS)
    stored = random_blocks(name, shape)
    cut = (slice(1, 3), slice(0, 4), slice(256, 512))
    torch.testing.assert_close(
        weight(reader(name, stored, shape), cut), expected(name, stored)[cut], rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("name", [name for name, scheme in SCHEMES.items() if scheme.has_offsets])
def test_groups_without_a_scale_are_their_minimum(name: str) -> None:
    shape = (64, COLUMNS)
    stored = random_blocks(name, shape, zeros=0.5)
    found, whole = reader(name, stored, shape), (slice(0, 64), slice(0, COLUMNS))
    torch.testing.assert_close(found[whole], expected(name, stored), rtol=1e-6, atol=1e-6)
    offsets = found.offsets((slice(0, 64), slice(0, COLUMNS // found.group)))
    assert offsets is not None
    assert offsets.abs().max() < 65504  # packed weights have them as float16


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"])
def test_quantized_weights_are_close(name: str) -> None:
    """The package's quantized weights are near the weights, so that codes are not only consistent with its inverse."""
    plain = np.random.default_rng(0).normal(size=(4, 256)).astype(np.float32)
    stored = torch.from_numpy(gguf.quants.quantize(plain, gguf.GGMLQuantizationType[name]))
    found = reader(name, stored, (4, 256))[slice(0, 4), slice(0, 256)]
    assert (found - torch.from_numpy(plain)).abs().max() < 1.0
    assert (found - torch.from_numpy(plain)).abs().mean() < 0.15
