"""Rotary positions: an angle for each position and pair of features (Su et al. 2021)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire.engine.architecture import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Radians per position, float32 `[head_dim / 2]`."""
    frequencies = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    match rope.kind:
        case "default":
            return frequencies
        case "linear":
            return frequencies / rope.factor
        case "llama3":
            return _llama3(rope, frequencies)
    raise AssertionError(rope.kind)


def _llama3(rope: Rope, frequencies: Tensor) -> Tensor:
    """Llama 3.1's scaling: long waves slowed down by `factor`, short ones kept, a ramp between.

    Source: https://github.com/meta-llama/llama-models, `apply_scaling`.
    """
    turns = rope.original_max_position * frequencies / (2 * math.pi)  # over the original context
    ramp = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = ramp.clamp(0.0, 1.0)
    return kept * frequencies + (1 - kept) * frequencies / rope.factor


def rotations(positions: Tensor, frequencies: Tensor) -> Tensor:
    """What `kernels.rotary_write_kv` turns each token by, float32 `[tokens, head_dim]`: cosines, then sines."""
    angles = positions[:, None] * frequencies  # [tokens, head_dim / 2]
    return torch.cat((angles.cos(), angles.sin()), dim=-1)
