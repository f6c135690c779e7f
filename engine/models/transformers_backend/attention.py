"""transformers' attention interface, answered from the paged KV cache.

A model's attention modules call the function that is registered under `NAME`, which asks the `AttentionFunction` that
was attached to them: the paged cache of the step, or, before anything is loaded, a recorder of what they ask for.
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
_HARMLESS = frozenset(
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
"""Arguments that change nothing for one flat batch without dropout."""


@dataclass(frozen=True)
class AttentionSettings:
    """One call of the attention interface, its settings alone."""

    scale: float
    window: int
    """Keys that a query sees, its own included; 0: all."""
    softcap: float


class AttentionFunction(Protocol):
    """What attention modules are answered by. Queries, keys and values are `[tokens, heads, head_dim]`."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, asked: AttentionSettings, sinks: Tensor | None
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
    """As the interface has it: `[1, heads, tokens, head_dim]` each → `[1, tokens, heads, value_dim]`.

    Source: https://huggingface.co/docs/transformers/attention_interface
    """
    if attention_mask is not None:
        raise ConfigError("its attention takes a mask of its own, which is not supported")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise ConfigError("its attention sees later tokens, which is not supported")
    if strange := sorted(name for name, value in others.items() if name not in _HARMLESS and _matters(value)):
        raise ConfigError(f"its attention takes {', '.join(strange)}, which is not supported")
    if len(query) != 1 or query.shape[2] != key.shape[2]:
        raise ConfigError("its attention asks for other keys than those of its own tokens, which is not supported")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    asked = AttentionSettings(scale, int(sliding_window or 0), float(softcap or 0.0))
    answer: AttentionFunction = getattr(module, _ATTRIBUTE)
    mixed = answer(query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), asked, s_aux)
    return mixed[None], None


def _matters(value: object) -> bool:
    return isinstance(value, Tensor) or callable(value)


AttentionInterface.register(NAME, _attention)


class PagedAttention:
    """Attention over the paged caches of the calls, in their order: `begin` each step."""

    def __init__(self) -> None:
        self._batch: Batch | None = None
        self._caches: Sequence[LayerCache] = ()
        self._next = 0

    def begin(self, batch: Batch, caches: Sequence[LayerCache]) -> None:
        self._batch, self._caches, self._next = batch, caches, 0

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, asked: AttentionSettings, sinks: Tensor | None
    ) -> Tensor:
        self._next += 1
        return self.answer(self._next - 1, query, key, value, asked, sinks)

    def answer(
        self, number: int, query: Tensor, key: Tensor, value: Tensor, asked: AttentionSettings, sinks: Tensor | None
    ) -> Tensor:
        """The call of this number in the step."""
        assert self._batch is not None
        cache, group = self._caches[number]
        batch = self._batch.of(group)
        value_dim, size = value.shape[-1], max(query.shape[-1], value.shape[-1])
        if query.shape[-1] != value_dim:  # the cache has rows of one size
            query, key, value = (F.pad(x, (0, size - x.shape[-1])) for x in (query, key, value))
        unturned = torch.empty(len(query), 0, device=query.device)
        query = kernels.rotary_write_kv(query, key, value, unturned, cache, batch.slot_mapping)
        mixed = kernels.paged_attention(
            query.contiguous(),
            cache,
            batch.block_tables,
            batch.sequence_lengths,
            batch.query_starts,
            asked.scale,
            window=asked.window,
            softcap=asked.softcap,
            sinks=None if sinks is None else sinks.float(),
            host=batch.host,
        )
        return mixed[..., :value_dim]


@dataclass(frozen=True)
class RecordedCall:
    """What a model asked of its attention: heads and features on this rank."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    asked: AttentionSettings
    has_sinks: bool


class CallRecorder:
    """Writes down each call; the answers are zeros."""

    def __init__(self) -> None:
        self.calls: list[RecordedCall] = []

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, asked: AttentionSettings, sinks: Tensor | None
    ) -> Tensor:
        self.calls.append(
            RecordedCall(
                query.shape[1], key.shape[1], query.shape[2], value.shape[2], asked, has_sinks=sinks is not None
            )
        )
        return query.new_zeros(*query.shape[:2], value.shape[2])
