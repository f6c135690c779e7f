"""Norms, rotary embedding and activations."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """RMSNorm (Zhang & Sennrich 2019) over the last dimension of `x`, with float32 sums.

    With an `offset` (1 for Gemma), the factor is `weight + offset`, and everything but the result is float32.
    """
    if offset == 0.0:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x.float(), weight.shape, weight.float() + offset, eps).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return `(rms_norm(residual + x), residual + x)`."""
    residual = residual + x
    return rms_norm(residual, weight, eps, offset), residual


def rotary(query: Tensor, key: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary position embedding (Su et al. 2021), in the layout that pairs the first half with the second half.

    `query` and `key` are `[tokens, heads, head_dim]`; `cos_sin` is float32 `[tokens, rotary_dim]`: the cosines of
    each token's rotary_dim / 2 angles, then their sines. The first rotary_dim features of a head are rotated;
    rotary_dim may be 0.
    """
    cos, sin = cos_sin.unsqueeze(1).tensor_split(2, dim=-1)  # [tokens, 1, rotary_dim / 2]
    return _rotate(query, cos, sin), _rotate(key, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    first, second, rest = x.tensor_split((half, 2 * half), dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((rotated.to(x.dtype), rest), dim=-1)


_LIMITED = {"silu_7": 7.0, "silu_16": 16.0}
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


def activate(x: Tensor, activation: str) -> Tensor:
    """Apply "silu", "gelu" (exact), "gelu_tanh" (tanh approximation), "quick_gelu" (logistic approximation, without
    gates only), "relu" or "relu2" (relu squared) to `x`."""
    return _ACTIVATIONS[activation](x)


def act_mul(x: Tensor, activation: str) -> Tensor:
    """A gated activation (Shazeer 2020): `activate(gate, activation) * up` for `x = [..., gate ‖ up]`.

    "swiglu_oai" (gpt-oss) is `gate * sigmoid(1.702 * gate) * (up + 1)`, with gates clamped to at most 7 and ups to
    [-7, 7]. "silu_7" and "silu_16" (Step 3.5) are "silu" with the activated gates clamped to at most the number, and
    ups in both directions; "silu_clamped" (DeepSeek-V4) is "silu" with gates clamped to at most 10 before it, and ups
    to [-10, 10].
    """
    gate, up = x.chunk(2, dim=-1)
    if activation in _LIMITED:
        limit = _LIMITED[activation]
        return (F.silu(gate.float()).clamp(max=limit) * up.float().clamp(-limit, limit)).to(x.dtype)
    if activation == "silu_clamped":
        return F.silu(gate.clamp(max=10.0)) * up.clamp(-10.0, 10.0)
    if activation == "swiglu_oai":
        gate, up = gate.float().clamp(max=7.0), up.float().clamp(-7.0, 7.0)
        return (gate * torch.sigmoid(1.702 * gate) * (up + 1)).to(x.dtype)
    return activate(gate, activation) * up
