"""Operations of some families on heads between their projection and their rotation. A layer has a list of these
functions, chosen by its spec when it is made; in most families it is empty, or has only the norms of queries and
keys."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire import kernels
from quire.engine.architecture import attention_spec, spec_parts
from quire.engine.layers.norm import make_norm


class Heads(NamedTuple):
    """Queries, keys and values of tokens, `[tokens, heads, head_dim]`, before they are rotated."""

    query: Tensor
    key: Tensor
    value: Tensor
    positions: Tensor
    """`[tokens]`"""
    cos_sin: Tensor
    """Cosines and sines of the rotation that follows all changes."""


HeadChange = Callable[[Heads], Heads]


def head_changes(
    spec: attention_spec.AttentionSpec, query_norm: nn.Module | None, key_norm: nn.Module | None
) -> list[HeadChange]:
    """The changes in order. The norms belong to the layer; None: there are none."""
    changes: list[HeadChange] = []
    if spec.value_norm is not None and spec.kv_source is None:
        assert not spec.value_norm.has_weight, "it would not be loaded"
        value_norm = make_norm(spec.value_norm, spec.value_dim)
        changes.append(lambda heads: heads._replace(value=value_norm(heads.value)))
    if spec.value_dim < spec.head_dim and spec.kv_source is None:
        padding = 0, spec.head_dim - spec.value_dim
        changes.append(lambda heads: heads._replace(value=F.pad(heads.value, padding)))
    if spec.norm_after_rope:
        changes.append(_rotate)
    if query_norm is not None:
        changes.append(partial(_normalize, query_norm, key_norm))
    if spec.clip:
        changes.append(partial(_clip, spec.clip))
    if spec.query_scale is not None:
        scale = spec.query_scale
        changes.append(lambda heads: heads._replace(query=scale_queries(heads.query, heads.positions, scale)))
    return changes


def _rotate(heads: Heads) -> Heads:
    query, key, cos_sin = heads.query, heads.key, heads.cos_sin
    if cos_sin.shape[-1] <= query.shape[-1]:
        query, key = kernels.rotary(query, key, cos_sin)
    else:  # each feature has its own (`RopeSpec.splits_features`); those of a pair differ in images only
        cos, sin = (torch.stack(each.chunk(2, dim=-1)) for each in cos_sin.chunk(2, dim=-1))
        differ = (cos[0] != cos[1]).any(-1) | (sin[0] != sin[1]).any(-1)
        # Text is rotated by the same operation as in batches without images.
        as_text = kernels.rotary(query, key, torch.cat((cos[0], sin[0]), dim=-1))
        turned = (
            torch.where(differ[:, None, None], _rotated_apart(each, cos, sin), own)
            for each, own in zip((query, key), as_text, strict=True)
        )
        query, key = turned
    return heads._replace(query=query, key=key, cos_sin=cos_sin[:, :0])


def _rotated_apart(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `[tokens, heads, head_dim]`, whose pairs are halves, by cosines and sines `[2, tokens, head_dim / 2]` of
    the first and the second features of pairs."""
    first, second = x.float().chunk(2, dim=-1)
    (cos_first, cos_second), (sin_first, sin_second) = cos[:, :, None], sin[:, :, None]
    turned = (first * cos_first - second * sin_first, second * cos_second + first * sin_second)
    return torch.cat(turned, dim=-1).to(x.dtype)


def _normalize(query_norm: nn.Module, key_norm: nn.Module | None, heads: Heads) -> Heads:
    key = heads.key if key_norm is None else key_norm(heads.key)
    return heads._replace(query=query_norm(heads.query), key=key)


def _clip(limit: float, heads: Heads) -> Heads:
    query, key, value = (each.clamp(-limit, limit) for each in heads[:3])
    return heads._replace(query=query, key=key, value=value)


def scale_queries(query: Tensor, positions: Tensor, spec: spec_parts.QueryScaleSpec) -> Tensor:
    """`[tokens, heads, head_dim]`, scaled by the tokens' positions `[tokens]`."""
    periods = (positions + spec.offset) // spec.every
    factors = 1 + spec.weight * torch.log1p(periods.float())
    return query * factors.to(query.dtype)[:, None, None]
