"""Recurrent states that a model's modules keep in transformers' cache.

A module that uses such states runs once for each segment of a step (`kernels.StateSegments`): it gets the segment's
tokens, and the cache has the states before them, read from a page of the KV cache. The states after them are written to
a page. All other modules run over the tokens of all requests together.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, DynamicCache, LinearAttentionCacheLayerMixin

from quire.engine.architecture.recurrent_spec import KeptTensor, TransformersStateSpec
from quire.engine.layers.batch import Batch
from quire.engine.layers.kv_cache import LayerCache
from quire.engine.protocol.errors import ConfigError

_Cache: Any = DynamicCache
_KINDS: Mapping[str, Any] = DYNAMIC_LAYER_TYPE_MAPPING


class StateCache(_Cache):  # type: ignore[misc]
    """transformers' cache with the states of one request. It has no keys and values: attention is paged."""

    positions: Tensor
    """`[tokens]`, of the step's tokens in their requests."""

    def update(self, key_states: Tensor, value_states: Tensor, *others: Any, **more: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """There are no masks; biases are requested for other keys than these (`attention.request_biases`)."""
        return 1, 0

    def get_query_offset(self, layer_idx: int = 0) -> Tensor:
        """The offset to add to the number of each token in the step."""
        return self.positions - torch.arange(len(self.positions), device=self.positions.device)


def has_states(config: Any) -> bool:
    """Whether layers of the model keep recurrent states in transformers' cache."""
    kinds = set(getattr(config.get_text_config(decoder=True), "layer_types", None) or ())
    return any(issubclass(_KINDS.get(kind, object), LinearAttentionCacheLayerMixin) for kind in kinds)


class RecurrentStates:
    """The states of a stage whose first layer is `first`, in a model of type `dtype`. Call `begin` at the start of
    each step.

    With `by_token`, a segment that continues a request runs one token at a time: not all modules read a state if they
    get more than one.
    """

    def __init__(
        self,
        model: nn.Module,
        cache: Any,
        specs: Mapping[int, TransformersStateSpec],
        first: int,
        dtype: torch.dtype,
        *,
        by_token: bool,
    ) -> None:
        """`specs` describes the states of this stage's layers, by number."""
        self.specs, self._cache, self._first, self._dtype = specs, cache, first, dtype
        self._by_token = by_token
        self._batch: Batch | None = None
        self._caches: Sequence[LayerCache] = ()
        self._segments: dict[int, list[tuple[int, int, int, int]]] = {}
        self._calls: Counter[str] = Counter()
        """Calls of each module in this step. One that runs several times has the states of several layers, in order."""
        layers: dict[str, dict[int, list[tuple[KeptTensor, slice]]]] = defaultdict(dict)
        for layer, spec in sorted(specs.items()):
            for tensor, place in spec.places():
                layers[tensor.module].setdefault(layer, []).append((tensor, place))
        for path, own in layers.items():
            module: Any = model.get_submodule(path)
            module.forward = partial(self._run, module.forward, path, list(own.items()))

    def begin(self, batch: Batch, caches: Sequence[LayerCache]) -> None:
        """`caches` has the caches of the stage's layers."""
        self._batch, self._caches, self._segments = batch, caches, {}
        self._calls.clear()

    def _segments_of(self, group: int) -> list[tuple[int, int, int, int]]:
        """The segments of the step: first token, end (exclusive), and the pages read and written."""
        if group not in self._segments:
            assert self._batch is not None
            segments = self._batch.segments(group)
            starts, read, write = (each.tolist() for each in (segments.starts, segments.read, segments.write))
            self._segments[group] = [(*ends, *of) for ends, *of in zip(pairwise(starts), read, write, strict=True)]
        return self._segments[group]

    def _run(
        self,
        forward: Callable[..., Any],
        path: str,
        layers: Sequence[tuple[int, Sequence[tuple[KeptTensor, slice]]]],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """A module's `forward` over the segments of the step, one after another."""
        layer, places = layers[self._calls[path] % len(layers)]
        self._calls[path] += 1
        cache, kept = self._caches[layer - self._first], self._cache.layers[layer]
        assert cache.state is not None
        segments, pages = self._segments_of(cache.state_group), cache.state.matrices
        values, form = tree_flatten((args, kwargs))
        if any(isinstance(each, Tensor) and each.shape[:2] != (1, segments[-1][1]) for each in values):
            raise ConfigError("a module with a recurrent state takes more than its tokens, which is not supported")
        outputs: list[list[Any]] = []
        for start, end, read, write in segments:
            for tensor, place in places:
                self._load(kept, tensor, None if read < 0 else pages[read, 0, 0, place])
            cuts = range(start, end + 1) if self._by_token and read >= 0 else (start, end)
            for first, last in pairwise(cuts):
                own = [each[:, first:last] if isinstance(each, Tensor) else each for each in values]
                own_args, own_kwargs = tree_unflatten(own, form)
                output, output_form = tree_flatten(forward(*own_args, **own_kwargs))
                if any(isinstance(each, Tensor) and each.shape[:2] != (1, last - first) for each in output):
                    raise ConfigError("a module with a recurrent state returns more than its tokens' outputs")
                outputs.append(output)
            if write >= 0:
                for tensor, place in places:
                    state = getattr(kept, f"{tensor.kind}_states")[tensor.number]
                    pages[write, 0, 0, place].copy_(state.flatten())
        merged = [
            torch.cat(each, dim=1) if isinstance(each[0], Tensor) else each[0] for each in zip(*outputs, strict=True)
        ]
        return tree_unflatten(merged, output_form)

    def _load(self, kept: Any, tensor: KeptTensor, stored: Tensor | None) -> None:
        """Give a layer of transformers' cache this state; None: there is none yet."""
        state = None
        if stored is not None:  # a copy, as modules update their states in place
            dtype = torch.float32 if tensor.is_float32 else self._dtype
            state = stored.view(tensor.shape).to(dtype, copy=True)
        getattr(kept, f"{tensor.kind}_states")[tensor.number] = state
        getattr(kept, f"is_{tensor.kind}_states_initialized")[tensor.number] = state is not None
        kept.has_previous_state[tensor.number] = state is not None
        if tensor.kind == "conv":
            kept.conv_kernel_size[tensor.number] = tensor.shape[-1]


class RecordingCache(StateCache):
    """Records the modules that use each state, and the layers that call attention, in order.

    `model` must be in bfloat16: states that are then float32 are float32 in every type of model.
    """

    def __init__(self, config: Any, model: nn.Module) -> None:
        super().__init__(config=config)
        self.attention_layers: list[int] = []
        self._around_attention: set[str] = set()
        """The modules that attention was called in."""
        self._users: dict[tuple[int, str, int], set[str]] = defaultdict(set)
        self._running: list[str] = []
        for path, module in model.named_modules():
            module.register_forward_pre_hook(partial(self._enter, path))
            module.register_forward_hook(self._leave)

    def _enter(self, path: str, *others: object) -> None:
        self._running.append(path)

    def _leave(self, *others: object) -> None:
        self._running.pop()

    def _use(self, kind: str, layer_idx: int, state_idx: int = 0, **more: object) -> None:
        self._users[layer_idx, kind, state_idx].add(self._running[-1])

    def update(self, key_states: Tensor, value_states: Tensor, *others: Any, **more: Any) -> tuple[Tensor, Tensor]:
        self.attention_layers.append(others[0] if others else more["layer_idx"])
        self._around_attention |= set(self._running)
        return key_states, value_states

    def get_conv_state(self, *where: Any, **more: Any) -> Tensor | None:
        self._use("conv", *where, **more)
        state: Tensor | None = super().get_conv_state(*where, **more)
        return state

    def get_recurrent_state(self, *where: Any, **more: Any) -> Tensor | None:
        self._use("recurrent", *where, **more)
        state: Tensor | None = super().get_recurrent_state(*where, **more)
        return state

    def update_conv_state(self, conv_states: Tensor, *where: Any, **more: Any) -> Tensor:
        self._use("conv", *where, **more)
        state: Tensor = super().update_conv_state(conv_states, *where, **more)
        return state

    def update_recurrent_state(self, recurrent_states: Tensor, *where: Any, **more: Any) -> Tensor:
        self._use("recurrent", *where, **more)
        state: Tensor = super().update_recurrent_state(recurrent_states, *where, **more)
        return state

    def specs(self) -> dict[int, TransformersStateSpec]:
        """The states that each layer with states keeps, after a run over one request."""
        tensors: dict[int, list[KeptTensor]] = defaultdict(list)
        order: dict[str, list[int]] = defaultdict(list)
        """The layers whose states each module uses, in the order of its calls."""
        for (layer, _, _), uses in self._users.items():
            for module in uses:
                order[module] += [layer] * (layer not in order[module])
        for (layer, kind, number), (module, *others) in sorted((key, [*use]) for key, use in self._users.items()):
            state = getattr(self.layers[layer], f"{kind}_states")[number]
            if state is None:  # it was asked for, but this model does not have it
                continue
            if others or order[module] != sorted(order[module]):
                raise ConfigError("modules share a recurrent state, which is not supported")
            if module in self._around_attention:
                raise ConfigError("it calls attention in a module with a recurrent state, which is not supported")
            if state.dtype not in (torch.float32, torch.bfloat16):
                raise ConfigError(f"it keeps a recurrent state of {state.dtype}, which is not supported")
            tensors[layer].append(KeptTensor(kind, number, module, tuple(state.shape), state.dtype == torch.float32))
        return {layer: TransformersStateSpec(tensors=tuple(each)) for layer, each in tensors.items()}
