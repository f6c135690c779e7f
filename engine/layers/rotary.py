"""Rotary position embedding: an angle for each position and pair of features (Su et al. 2021)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire.engine.architecture.spec_parts import RopeSpec


class Rotary:
    """Cosines and sines for one kind of layer; None: no rotation. Positions go up to `max_length`."""

    def __init__(self, rope: RopeSpec | None, max_length: int) -> None:
        with torch.device("cpu"):  # on the meta device, arithmetic would import half of torch
            frequencies = torch.empty(0, dtype=torch.float32) if rope is None else inverse_frequencies(rope, max_length)
            axes = None if rope is None or not rope.sections else torch.tensor(rope.axes)
        self._frequencies = frequencies.to(torch.get_default_device())
        self._axes = None if axes is None else axes.to(torch.get_default_device())
        self._amplitude = 1.0 if rope is None else rope.amplitude

    def __call__(self, positions: Tensor) -> Tensor:
        """The cos/sin values for `kernels.rotary_write_kv`, float32 `[tokens, rope.dim]`: cosines, then sines.

        Positions are `[tokens]`, or with `rope.sections` also `[axes, tokens]`: along time, height and width. Then with
        `rope.splits_features`, features have cosines and sines of their own, `[tokens, 2 * rope.dim]`.
        """
        own, frequencies = positions[:, None], self._frequencies
        if positions.dim() == 2:
            assert self._axes is not None
            own = positions[self._axes].T
            frequencies = frequencies.repeat(len(self._axes) // len(frequencies))
        angles = own * frequencies  # [tokens, dim / 2]
        cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
        return cos_sin if self._amplitude == 1.0 else cos_sin * self._amplitude


def inverse_frequencies(rope: RopeSpec, max_length: int) -> Tensor:
    """Radians per position, float32 `[rope.dim / 2]`, for every sequence of up to `max_length`."""
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim
    frequencies = 1.0 / rope.theta**exponents
    match rope.kind:
        case "default":
            return frequencies
        case "none":
            return torch.zeros_like(frequencies)
        case "linear":
            return frequencies / rope.factor
        case "dynamic":
            return 1.0 / _ntk_theta(rope, max_length) ** exponents
        case "llama3":
            return _llama3(rope, frequencies)
        case "yarn":
            return _yarn(rope, frequencies)
        case "proportional":
            return torch.where(torch.arange(rope.dim // 2) < rope.rotated_pairs, frequencies / rope.factor, 0.0)
        case "longrope":
            factors = rope.long_factors if max_length > rope.original_max_position else rope.short_factors
            return 1.0 / (torch.tensor(factors, dtype=torch.float32) * rope.theta**exponents)


def _ntk_theta(rope: RopeSpec, max_length: int) -> float:
    """A base that stretches mainly the longest wavelengths, in proportion to `max_length` beyond the trained length."""
    stretch = rope.factor * max(max_length / rope.original_max_position, 1.0) - (rope.factor - 1)
    return rope.theta * float(stretch ** (rope.dim / (rope.dim - 2)))


def _llama3(rope: RopeSpec, frequencies: Tensor) -> Tensor:
    """Llama 3.1's scaling: long wavelengths are slowed down by `factor`, short ones are kept, with a ramp in between.

    Source: https://github.com/meta-llama/llama-models, `apply_scaling`.
    """
    rotations = rope.original_max_position * frequencies / (2 * math.pi)  # over the original context
    ramp = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = ramp.clamp(0.0, 1.0)
    return kept * frequencies + (1 - kept) * frequencies / rope.factor


def _yarn(rope: RopeSpec, frequencies: Tensor) -> Tensor:
    """YaRN (Peng et al. 2023): like Llama 3's scaling, with a ramp over the pairs between `beta_fast` and `beta_slow`
    rotations."""

    def feature(rotations: float) -> float:
        """The pair with this many rotations over the original context."""
        return rope.dim * math.log(rope.original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = feature(rope.beta_fast), feature(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.dim - 1)
    pairs = torch.arange(rope.dim // 2, dtype=torch.float32)
    slowed = ((pairs - first) / max(last - first, 0.001)).clamp(0.0, 1.0)
    return (1 - slowed) * frequencies + slowed * frequencies / rope.factor
