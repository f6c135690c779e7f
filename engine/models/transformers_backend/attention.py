"""An implementation of transformers' attention interface on the paged KV cache.

A model's attention modules call the function registered as `NAME`, which calls the `AttentionFunction` attached to
them: attention over the paged cache, or, before anything is loaded, a recorder of the calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from quire import kernels
from quire.engine.layers.attention import Batch, LayerCache
from quire.engine.protocol.errors import ConfigError

NAME = "quire"
_ATTRIBUTE = "quire_answer"
_IGNORED_ARGUMENTS = frozenset(
    (
        "dropout",
        "position_ids",
        "cache_position",
        "use_cache",
        "output_attentions",
        "position_embeddings",
        "deterministic",
    )
)
"""Arguments that have no effect on one flat batch without dropout."""


@dataclass(frozen=True)
class AttentionSettings:
    """The settings of one call of the attention interface."""

    scale: float
    window: int
    """Keys that a query attends to, including its own; 0: all."""
    softcap: float


class AttentionFunction(Protocol):
    """The attention that modules call. Queries, keys and values are `[tokens, heads, head_dim]`."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, settings: AttentionSettings, sinks: Tensor | None
    ) -> Tensor: ...


def attach(model: nn.Module, answer: AttentionFunction) -> None:
    for module in model.modules():
        setattr(module, _ATTRIBUTE, answer)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Implements the interface: `[1, heads, tokens, head_dim]` each → `[1, tokens, heads, value_dim]`.

    Source: https://huggingface.co/docs/transformers/attention_interface
    """
    if attention_mask is not None:
        raise ConfigError("its attention takes a mask of its own, which is not supported")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise ConfigError("its attention sees later tokens, which is not supported")
    if unknown := sorted(
        name for name, value in others.items() if name not in _IGNORED_ARGUMENTS and _has_effect(value)
    ):
        raise ConfigError(f"its attention takes {', '.join(unknown)}, which is not supported")
    if len(query) != 1 or query.shape[2] != key.shape[2]:
        raise ConfigError("its attention reads keys other than those of its own tokens, which is not supported")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    settings = AttentionSettings(scale, int(sliding_window or 0), float(softcap or 0.0))
    answer: AttentionFunction = getattr(module, _ATTRIBUTE)
    mixed = answer(query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), settings, s_aux)
    return mixed[None], None


def _has_effect(value: object) -> bool:
    return isinstance(value, Tensor) or callable(value)


AttentionInterface.register(NAME, _attention)


class PagedAttention:
    """Attention over paged caches, one for each call in a step, in order. Call `begin` at the start of each step."""

    def __init__(self) -> None:
        self._batch: Batch | None = None
        self._caches: Sequence[LayerCache] = ()
        self._next = 0

    def begin(self, batch: Batch, caches: Sequence[LayerCache]) -> None:
        self._batch, self._caches, self._next = batch, caches, 0

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, settings: AttentionSettings, sinks: Tensor | None
    ) -> Tensor:
        self._next += 1
        return self.answer(self._next - 1, query, key, value, settings, sinks)

    def answer(
        self, number: int, query: Tensor, key: Tensor, value: Tensor, settings: AttentionSettings, sinks: Tensor | None
    ) -> Tensor:
        """Run call `number` of the step."""
        assert self._batch is not None
        cache = self._caches[number].memory
        assert cache is not None
        batch = self._batch.for_group(self._caches[number].group)
        value_dim, size = value.shape[-1], max(query.shape[-1], value.shape[-1])
        if query.shape[-1] != value_dim:  # the cache's keys and values have the same size
            query, key, value = (F.pad(x, (0, size - x.shape[-1])) for x in (query, key, value))
        no_rotation = torch.empty(len(query), 0, device=query.device)
        query = kernels.rotary_write_kv(query, key, value, no_rotation, cache, batch.slot_mapping)
        mixed = kernels.paged_attention(
            query.contiguous(),
            cache,
            batch.block_tables,
            batch.sequence_lengths,
            batch.query_starts,
            settings.scale,
            window=settings.window,
            softcap=settings.softcap,
            sinks=None if sinks is None else sinks.float(),
            host=batch.host,
        )
        return mixed[..., :value_dim]


@dataclass(frozen=True)
class RecordedCall:
    """The heads and features of an attention call on this rank."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    settings: AttentionSettings
    has_sinks: bool


class CallRecorder:
    """Records each call and returns zeros."""

    def __init__(self) -> None:
        self.calls: list[RecordedCall] = []

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, settings: AttentionSettings, sinks: Tensor | None
    ) -> Tensor:
        self.calls.append(
            RecordedCall(
                query.shape[1], key.shape[1], query.shape[2], value.shape[2], settings, has_sinks=sinks is not None
            )
        )
        return query.new_zeros(*query.shape[:2], value.shape[2])
