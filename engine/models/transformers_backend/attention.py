"""An implementation of transformers' attention interface on the paged KV cache.

A model's attention modules call the function registered as `NAME`, which calls the `AttentionFunction` attached to
them: attention over the paged cache, or, before anything is loaded, a recorder of the calls.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from quire.engine.architecture.attention_spec import AttentionSpec
from quire.engine.layers.batch import Batch
from quire.engine.layers.kv_cache import LayerCache
from quire.engine.protocol.errors import ConfigError

NAME = "quire"
_ATTRIBUTE, _NUM_BIASES, _BY_KEY = "quire_answer", "quire_num_biases", "quire_mask_by_key"
_FEATURES_OF_BIAS = 16
"""A bias of each key adds up to this many features to the heads of queries and keys, whose size is then a multiple of
it."""
# fmt: off
_IGNORED_ARGUMENTS = {
    "dropout", "position_ids", "cache_position", "use_cache",
    "output_attentions", "position_embeddings", "deterministic",
}
# fmt: on
"""Arguments that have no effect on one flat batch without dropout."""


@dataclass(frozen=True)
class AttentionSettings:
    """The settings of one call of the attention interface."""

    scale: float
    window: int
    """Keys that a query attends to, including its own; 0: all."""
    softcap: float


class Terms(NamedTuple):
    """The terms of the softmax besides scores; see `kernels.paged_attention`."""

    sinks: Tensor | None = None
    """`[heads]` or `[tokens, heads]`."""
    biases: Tensor | None = None
    """`[tokens, heads, keys]`."""


class AttentionFunction(Protocol):
    """The attention that modules call. Queries, keys and values are `[tokens, heads, head_dim]`."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, settings: AttentionSettings, terms: Terms
    ) -> Tensor: ...

    def within_tokens(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attention of each token's queries to vectors of its own: `[tokens, queries or keys, features]`."""
        ...


def attach(model: nn.Module, answer: AttentionFunction) -> None:
    for module in model.modules():
        setattr(module, _ATTRIBUTE, answer)


def request_biases(model: nn.Module) -> None:
    """Make modules return biases without a dimension of all keys.

    - Biases of queries and distances become `[1, heads, tokens, rel_extent]`: each query has biases for `rel_extent`
      keys, the last of which is its own. Modules compute the biases of all queries and keys, given their positions or
      distances, and none for a key at a distance of `rel_extent` or more. Here, modules are asked for biases as if all
      queries were at one position, with the keys up to it.
    - Masks of keys, the same for all queries, become `[1, heads, 1, tokens]`.
    """
    module: Any
    for path, module in model.named_modules():
        if hasattr(module, "prepare_dynamic_mask"):
            module.prepare_dynamic_mask = _mask_by_key
            setattr(module, _BY_KEY, True)
        extent = getattr(module, "rel_extent", None)
        if not isinstance(extent, int):
            continue
        names = inspect.signature(module.forward).parameters
        if {"query_positions", "key_positions"} <= names.keys() or "relative_distance" in names:
            module.register_forward_pre_hook(partial(_ask_in_one_place, extent), with_kwargs=True)
            for each in (module, model.get_submodule(path.rpartition(".")[0])):
                setattr(each, _NUM_BIASES, extent)


def has_key_biases(model: nn.Module) -> bool:
    """Whether modules of an attached model have masks of keys, which become features of the keys."""
    return any(hasattr(module, _BY_KEY) for module in model.modules())


def _mask_by_key(dt_states: Tensor, **others: object) -> Tensor:
    return dt_states[:, :, None]


def _ask_in_one_place(
    extent: int, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    forward: Callable[..., Any] = module.forward
    given = inspect.signature(forward).bind(*args, **kwargs)
    values = given.arguments
    if (distances := values.get("relative_distance")) is not None:
        own = torch.arange(extent - 1, -1, -1, device=distances.device)
        values["relative_distance"] = own.expand(len(distances), extent)
    else:
        queries = values["query_positions"]
        values["query_positions"] = torch.full_like(queries, extent - 1)
        values["key_positions"] = torch.arange(extent, device=queries.device)
    return given.args, given.kwargs


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
    sinks: Tensor | None = None,
    position_bias: Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Implements the interface: `[1, heads, tokens, head_dim]` each → `[1, tokens, heads, value_dim]`.

    Attention that is not causal has the tokens in the place of the heads: each attends to vectors of its own.

    Source: https://huggingface.co/docs/transformers/attention_interface
    """
    answer: AttentionFunction = getattr(module, _ATTRIBUTE)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    if attention_mask is not None:
        if softcap or not hasattr(module, _BY_KEY) or attention_mask.shape != (1, query.shape[1], 1, key.shape[2]):
            raise ConfigError("its attention takes a mask of its own, which is not supported")
        query, key = _with_biases(query, key, attention_mask[:, :: query.shape[1] // key.shape[1], 0] / scale)
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        return answer.within_tokens(query[0], key[0], value[0], scale).transpose(0, 1)[None], None
    others |= {} if position_bias is None or hasattr(module, _NUM_BIASES) else {"position_bias": position_bias}
    if sinks is not None and sinks.shape != (*query.shape[:3], 1):
        others["sinks"] = sinks
    if unknown := sorted(
        name for name, value in others.items() if name not in _IGNORED_ARGUMENTS and _has_effect(value)
    ):
        raise ConfigError(f"its attention takes {', '.join(unknown)}, which is not supported")
    if len(query) != 1 or query.shape[2] != key.shape[2]:
        raise ConfigError("its attention reads keys other than those of its own tokens, which is not supported")
    if position_bias is not None and position_bias.shape[-1] != getattr(module, _NUM_BIASES):
        raise ConfigError("its attention takes a position_bias that does not depend on distances alone")
    settings = AttentionSettings(scale, int(sliding_window or 0), float(softcap or 0.0))
    terms = Terms(
        sinks=s_aux if sinks is None else sinks[0, :, :, 0].T,
        biases=None if position_bias is None else position_bias[0].transpose(0, 1),
    )
    mixed = answer(query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), settings, terms)
    return mixed[None], None


def _with_biases(query: Tensor, key: Tensor, biases: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys whose products are larger by `biases` `[1, kv_heads, tokens]`, which are a feature of keys."""
    size = -query.shape[-1] % _FEATURES_OF_BIAS or _FEATURES_OF_BIAS
    ones = F.pad(query.new_ones(1), (0, size - 1)).expand(*query.shape[:-1], size)
    return torch.cat((query, ones), dim=-1), torch.cat((key, F.pad(biases[..., None], (0, size - 1))), dim=-1)


def _has_effect(value: object) -> bool:
    return isinstance(value, Tensor) or callable(value)


AttentionInterface.register(NAME, _attention)


class PagedAttention:
    """Attention over paged caches, one for each call in a step, in order. Call `begin` at the start of each step."""

    def __init__(self) -> None:
        self._batch: Batch | None = None
        self._caches: Sequence[LayerCache] = ()
        self._layers: Sequence[int] = ()
        self._next = self._num_complete = 0

    def begin(self, batch: Batch, caches: Sequence[LayerCache], layers: Sequence[int] = ()) -> None:
        """`layers` are the numbers in the stage of the layers that the caches belong to, in the order of the calls.
        `Batch.on_layer`, which needs them, is called for each when neither it nor one before it is still to come."""
        self._batch, self._caches, self._layers = batch, caches, layers
        self._next = self._num_complete = 0

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, settings: AttentionSettings, terms: Terms) -> Tensor:
        assert self._batch is not None
        cache = self._caches[self._next]
        self._next += 1
        value_dim, size = value.shape[-1], max(query.shape[-1], value.shape[-1])
        if query.shape[-1] != value_dim:  # the cache's keys and values have the same size
            query, key, value = (F.pad(x, (0, size - x.shape[-1])) for x in (query, key, value))
        no_rotation = torch.empty(len(query), 0, device=query.device)
        query = cache.write(query, key, value, no_rotation, self._batch)
        mixed = cache.attend(
            query.contiguous(),
            self._batch.attention(cache.group),
            settings.scale,
            window=settings.window,
            softcap=settings.softcap,
            sinks=None if terms.sinks is None else terms.sinks.float().contiguous(),
            biases=None if terms.biases is None else terms.biases.to(query.dtype),
        )
        if self._batch.on_layer is not None:
            end = min(self._layers[self._next :], default=max(self._layers) + 1)
            for number in range(self._num_complete, end):
                self._batch.on_layer(number)
            self._num_complete = end
        return mixed[..., :value_dim]

    def within_tokens(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, scale=scale)


class CallRecorder:
    """Describes each call, of `tokens` tokens on the first of `num_ranks` ranks, and returns zeros."""

    tokens = 2

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self.calls: list[AttentionSpec] = []

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, settings: AttentionSettings, terms: Terms) -> Tensor:
        self.calls.append(
            AttentionSpec(
                num_heads=query.shape[1] * self._num_ranks,
                num_kv_heads=key.shape[1] * self._num_ranks,
                head_dim=max(query.shape[2], value.shape[2]),
                scale=settings.scale,
                rope=None,
                window=settings.window or None,
                softcap=settings.softcap,
                has_sinks=terms.sinks is not None and terms.sinks.ndim == 1,
                has_own_sinks=terms.sinks is not None and terms.sinks.ndim == 2,
                num_biases=0 if terms.biases is None else terms.biases.shape[2],
            )
        )
        return query.new_zeros(*query.shape[:2], value.shape[2])

    def within_tokens(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        if len(query) != self.tokens or query.shape[1] == self.tokens or len(key) != self.tokens:
            raise ConfigError("its attention sees later tokens, which is not supported")
        return query.new_zeros(*query.shape[:2], value.shape[2])
