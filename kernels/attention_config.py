"""The properties of a model's layers, and of a step on the host, that paged attention needs."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

AttentionBackend = Literal["auto", "triton", "flashinfer", "reference"]


class HostMetadata(NamedTuple):
    """Host copies of a step's per-request numbers, int64 `[requests]`: reading them does not wait for the device."""

    counts: npt.NDArray[np.int64]
    """Tokens of each request in this step: the differences of `Batch.query_starts`."""
    lengths: npt.NDArray[np.int64]
    """`Batch.sequence_lengths`."""
    plans: dict[Hashable, object] | None = None
    """A backend's plans for this step, shared by all layers; empty at first. None if the numbers are only upper bounds
    (CUDA graph capture) or cover only part of the step: no plan may be made from them."""


@dataclass(frozen=True)
class AttentionLayer:
    """The parameters of one kind of attention layer, as one rank computes it."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int = 0
    softcap: float = 0.0
    has_sinks: bool = False
    has_own_sinks: bool = False
    """Whether every query has sinks of its own."""
    has_alibi: bool = False
    num_biases: int = 0
    """Keys, up to a query's own, whose scores get a bias of the query and the distance."""
    has_ends: bool = False
    """Whether queries may attend to keys behind their own."""
    is_mla: bool = False
    """Whether keys and values share memory, as in MLA."""
    is_partial: bool = False
    """Whether a rank has a part of the keys only, and needs the logarithms of sums."""


@dataclass(frozen=True)
class AttentionConfig:
    """The attention layers of a model, and the backend requested for them."""

    layers: tuple[AttentionLayer, ...] = ()
    """One entry for each distinct kind of layer."""
    block_size: int = 16
    cache_dtype: torch.dtype = torch.float32
    backend: AttentionBackend = "auto"


@dataclass(frozen=True)
class AttentionCase:
    """The arguments of one call to paged attention."""

    args: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, float]
    options: dict[str, Any]
    host: HostMetadata
