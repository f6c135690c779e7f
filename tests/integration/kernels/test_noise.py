"""Noise is a fixed function of (seed, position, id), and looks random in each of the three."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from quire import kernels

COUNT = 1 << 16
AXES = ("seed", "position", "id")


def along(axis: str) -> Tensor:
    """Noise where only `axis` varies, from 0 on."""
    many = torch.arange(COUNT)
    ids = many.int() if axis == "id" else torch.tensor([7], dtype=torch.int32)
    few = torch.tensor([3]) if axis == "id" else torch.full((COUNT,), 3)
    seeds, positions = (many if axis == name else few for name in ("seed", "position"))
    return kernels.uniform_noise(seeds, positions, ids).flatten()


def integer_noise(seed: int, position: int, token: int) -> int:
    """The 31 bits behind `uniform_noise`, in Python's integers."""

    def mix64(x: int) -> int:
        x = (x + 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    key = mix64((mix64(seed % 2**64) + position * 0x9E3779B97F4A7C15) % 2**64)
    x = token ^ key % 2**32
    x = (x ^ x >> 16) * 0x7FEB352D % 2**32 ^ key >> 32
    x = (x ^ x >> 15) * 0x846CA68B % 2**32
    return (x ^ x >> 16) & 0x7FFFFFFF


def test_is_the_function_in_plain_integers() -> None:
    seeds = [0, 1, -1, 2**63 - 1, -(2**63), 123456789]
    positions = [0, 1, 131071, 5, 77, 2**31]
    ids = [0, 1, 17, 128255, 2**31 - 1]
    noise = kernels.uniform_noise(torch.tensor(seeds), torch.tensor(positions), torch.tensor(ids, dtype=torch.int32))
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        for column, token in enumerate(ids):
            exact = (integer_noise(seed, position, token) + 0.5) / 2**31
            assert math.isclose(noise[row, column].item(), min(exact, 1 - 2**-24), rel_tol=2**-22)


@pytest.mark.parametrize("axis", AXES)
def test_is_uniform_along_each_axis(axis: str) -> None:
    counts = torch.histc(along(axis), bins=256, min=0.0, max=1.0)
    chi_square = ((counts - COUNT / 256) ** 2 / (COUNT / 256)).sum().item()
    assert 160 < chi_square < 370  # 255 degrees of freedom, p within 1e-6 and 1 - 1e-6


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("lag", [1, 2, 64, 1024])
def test_adjacent_values_are_independent(axis: str, lag: int) -> None:
    noise = along(axis)
    cells = (noise[:-lag] * 16).long() * 16 + (noise[lag:] * 16).long()
    expected = len(cells) / 256
    chi_square = ((cells.bincount(minlength=256) - expected) ** 2 / expected).sum().item()
    assert chi_square < 370


def test_gumbel_has_its_moments_and_is_finite() -> None:
    noise = kernels.gumbel_noise(torch.arange(300), torch.zeros(300, dtype=torch.int64), 5000)
    assert noise.isfinite().all()
    assert abs(noise.mean().item() - 0.577216) < 5e-3
    assert abs(noise.var().item() - math.pi**2 / 6) < 1e-2
    assert noise.max().item() > 12.0


def test_gumbel_does_not_depend_on_the_rows_beside() -> None:
    seeds, positions = torch.arange(50) - 25, torch.arange(50) * 3
    together = kernels.gumbel_noise(seeds, positions, 30_000)
    order = torch.randperm(50)
    assert torch.equal(kernels.gumbel_noise(seeds[order], positions[order], 30_000), together[order])
    assert torch.equal(kernels.gumbel_noise(seeds[7:8], positions[7:8], 30_000), together[7:8])
    assert torch.equal(kernels.gumbel_noise(seeds, positions, 100), together[:, :100])
