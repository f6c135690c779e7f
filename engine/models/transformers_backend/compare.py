"""Compares a small model in transformers and here: two requests at once, in chunks. If the logits differ, the model
depends on something other than its attention calls and the states that transformers' cache has."""

from __future__ import annotations

import copy
import inspect
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from typing import Any

import msgspec
import torch
from torch import Tensor

from quire import kernels
from quire.engine.architecture.families.transformers_backend import DescribeRequest
from quire.engine.architecture.recurrent_spec import TransformersStateSpec
from quire.engine.distributed.communicator import Parallel
from quire.engine.distributed.threads import ThreadParallel
from quire.engine.layers.batch import Batch, KVBlocks
from quire.engine.layers.kv_cache import LayerCache
from quire.engine.layers.linear import Linear
from quire.engine.layers.media_positions import media_positions
from quire.engine.layers.moe import ExpertStack
from quire.engine.models.transformers_backend import attention, build
from quire.engine.models.transformers_backend.decoder import TransformersDecoder
from quire.engine.models.transformers_backend.pictures import Picture
from quire.engine.models.transformers_backend.shrink import LENGTH
from quire.engine.protocol.errors import ConfigError

_TOLERANCE = 1e-3
"""Maximum difference of logits, as a fraction of the largest logit."""
_BLOCK = 4
_BEFORE, _AFTER = 5, 6
"""Tokens before and after a picture."""
_CPU = torch.device("cpu")


def reference(small: Any, request: DescribeRequest) -> Any:
    """transformers' own model, with weights large enough that differences show."""
    torch.manual_seed(0)
    config = copy.deepcopy(small)
    model = build.from_config(
        config, attn_implementation="eager", dtype=torch.float32, trust_remote_code=request.trust_remote_code
    ).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(std=parameter.shape[-1] ** -0.5)
        else:
            parameter.data.add_(torch.randn_like(parameter), alpha=0.2)
    build.fix_frequencies(model, LENGTH)
    return model


def compare(
    small: Any,
    reference: Any,
    request: DescribeRequest,
    direct: frozenset[str],
    specs: dict[int, TransformersStateSpec],
    picture: Picture | None = None,
) -> bool:
    """Compare the logits of `reference`, transformers' model with the config `small`, with our layers' logits; our
    layers have the states `specs`. One of the prompts has the picture. Returns whether the model must continue requests
    one token at a time. Raises `ConfigError` if the logits differ."""
    prompts = [torch.randint(4, 100, (count,), generator=torch.Generator().manual_seed(7)) for count in (21, 12)]
    inputs: list[dict[str, Tensor]] = [{}, {}]
    if picture is not None:
        prompts[0] = torch.cat((prompts[0][:_BEFORE], torch.tensor(picture.tokens), prompts[0][-_AFTER:]))
        types = torch.zeros_like(prompts[0])
        types[_BEFORE + torch.tensor(picture.places)] = 1
        taken = inspect.signature(reference.forward).parameters
        kinds = {name: types[None] for name in ("token_type_ids", "mm_token_type_ids") if name in taken}
        inputs[0] = {**picture.arrays, **kinds}
    with torch.inference_mode():
        expected = [
            reference(tokens[None], **own, use_cache=False).logits[0].float()
            for tokens, own in zip(prompts, inputs, strict=True)
        ]
    for by_token in (False, True) if specs else (False,):
        actual = _quire_logits(
            small, request, direct, reference.state_dict(), specs, prompts, picture, by_token=by_token
        )
        pairs = zip(actual, expected, strict=True)
        errors = [float((ours - right).abs().max() / right.abs().max()) for ours, right in pairs]
        if all(each <= _TOLERANCE for each in errors):  # false if one is not a number
            return by_token
    raise ConfigError(
        "a small model of its kind gives different logits here than in transformers (by "
        f"{max(errors):.2g} of the largest): its output depends on more than attention to earlier tokens"
        + ", the features of images in place of their tokens" * (picture is not None)
        + " and the states in transformers' cache" * bool(specs)
    )


def _quire_logits(
    small: Any,
    request: DescribeRequest,
    direct: frozenset[str],
    state: dict[str, Tensor],
    specs: dict[int, TransformersStateSpec],
    prompts: list[Tensor],
    picture: Picture | None,
    *,
    by_token: bool,
) -> list[Tensor]:
    """Logits of the prompts, run together over the requested ranks, in chunks."""
    tp, count = request.tensor_parallel_size, int(small.get_text_config(decoder=True).num_hidden_layers)
    count = max(count, *(number + 1 for number in specs), 0)  # more, if layers run several times
    stages = min(request.pipeline_parallel_size, count)
    cuts = [range(stage * count // stages, (stage + 1) * count // stages) for stage in range(stages)]
    barrier, shared = threading.Barrier(tp), [torch.empty(0)] * tp
    ranks = [ThreadParallel(rank, tp, barrier, shared) if tp > 1 else Parallel() for rank in range(tp)]
    grid = [
        [
            _build_with_weights(small, request, direct, layers, count, parallel, state, None if picture else ())
            for layers in cuts
        ]
        for parallel in ranks
    ]
    for decoder in chain(*grid):
        decoder.keep_states(specs, by_token=by_token)

    def run(stages: list[TransformersDecoder]) -> list[Tensor]:
        try:
            with torch.inference_mode():
                return _run(stages, prompts, picture)
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(tp) as pool:
        futures = [pool.submit(run, decoders) for decoders in grid]
    errors = [error for future in futures if (error := future.exception())]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return futures[-1].result()


def _build_with_weights(
    small: Any,
    request: DescribeRequest,
    direct: frozenset[str],
    layers: range,
    count: int,
    parallel: Parallel,
    state: dict[str, Tensor],
    tower: tuple[str, ...] | None,
) -> TransformersDecoder:
    decoder = TransformersDecoder(
        copy.deepcopy(small),
        layers,
        count,
        parallel,
        device=_CPU,
        dtype=torch.float32,
        max_length=LENGTH,
        trust_remote_code=request.trust_remote_code,
        tower=tower,
    )
    for weight in decoder.hf_model.parameters():
        weight.data.zero_()
    decoder.find(None)
    for weight, shard, stored in decoder.places:
        weight.data[shard.target].copy_(stored.arranged(shard, state[stored.name][stored.slice(shard)]))
    decoder.keep_unpacked(direct)
    for module in decoder.hf_model.modules():
        if isinstance(module, Linear | ExpertStack):
            module.pack(None)
    return decoder


class _GrowingCaches(attention.PagedAttention):
    """Allocates a cache of `num_blocks` for each call, at the first call."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self._num_blocks = num_blocks
        self._allocated: list[LayerCache] = []

    def restart(self, batch: Batch) -> None:
        self.begin(batch, self._allocated)

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        settings: attention.AttentionSettings,
        terms: attention.Terms,
    ) -> Tensor:
        if self._next == len(self._allocated):
            memory = kernels.allocate_kv_cache(
                layers=1,
                num_blocks=self._num_blocks,
                kv_heads=key.shape[1],
                block_size=_BLOCK,
                head_dim=max(key.shape[-1], value.shape[-1]),
                dtype=torch.float32,
                device=_CPU,
            )
            self._allocated.append(LayerCache(memory[0]))
        return super().__call__(query, key, value, settings, terms)


def _run(stages: list[TransformersDecoder], prompts: list[Tensor], picture: Picture | None) -> list[Tensor]:
    """Run the prompts together in three steps. One of 21 tokens has 13 of them in the first step; a longer one as many
    for its length, so that a picture is divided."""
    blocks = 1 + max(map(len, prompts)) // _BLOCK
    functions = [_GrowingCaches(len(prompts) * blocks) for _ in stages]
    pages = [_pages(decoder) for decoder in stages]
    for decoder, function in zip(stages, functions, strict=True):
        attention.attach(decoder.hf_model, function)
    features, axes = torch.empty(0), None
    if picture is not None:
        tower = stages[0].tower
        assert tower is not None
        features = tower(picture.arrays, picture.item)
        if stages[0].has_axes:
            item = msgspec.structs.replace(picture.item, offset=_BEFORE)
            axes = torch.from_numpy(media_positions([item], len(prompts[0])))
    done = [0] * len(prompts)
    results: list[list[Tensor]] = [[] for _ in prompts]
    first = len(prompts[0]) * 13 // 21
    for counts in ([first, 1], [len(prompts[0]) - first - 1, len(prompts[1]) - 2], [1, 1]):
        batch, x = _batch(prompts, done, counts, blocks), None
        if picture is not None:
            batch = _with_picture(batch, picture, features, axes, range(done[0], done[0] + counts[0]))
        for decoder, function, caches in zip(stages, functions, pages, strict=True):
            function.restart(batch)
            if decoder.states is not None:
                decoder.states.begin(batch, caches)
            x = decoder.step(x, batch)
        assert x is not None
        logits = stages[-1].logits(x)
        for number, part in enumerate(torch.split(logits, counts)):
            results[number].append(part)
            done[number] += counts[number]
    return [torch.cat(parts) for parts in results]


def _with_picture(batch: Batch, picture: Picture, features: Tensor, axes: Tensor | None, tokens: range) -> Batch:
    """The batch, whose first tokens are those of the prompt with the picture; `axes` are the prompt's positions."""
    places = _BEFORE + torch.tensor(picture.places)
    own = (places >= tokens.start) & (places < tokens.stop)
    if axes is not None:
        along = batch.positions.expand(len(axes), -1).clone()
        along[:, : len(tokens)] = axes[:, tokens.start : tokens.stop]
        batch = replace(batch, rope_positions=along)
    if not own.any():
        return batch
    return replace(batch, media_tokens=places[own] - tokens.start, media_features=features[own])


def _pages(decoder: TransformersDecoder) -> list[LayerCache]:
    """A stage's pages of states: two for each request."""
    caches = []
    for number in decoder.layers:
        spec = None if decoder.states is None else decoder.states.specs.get(number)
        state = None
        if spec is not None:
            state = kernels.RecurrentState(torch.zeros(4, *spec.state_shape(1)), torch.zeros(4, *spec.input_shape(1)))
        caches.append(LayerCache(state=state, state_group=1))
    return caches


def _batch(prompts: list[Tensor], done: list[int], counts: list[int], blocks: int) -> Batch:
    """The prompts' next tokens; the blocks of request r start at r * blocks."""
    positions = [torch.arange(start, start + count) for start, count in zip(done, counts, strict=True)]
    starts = [number * blocks for number in range(len(prompts))]
    slots = torch.cat([begin * _BLOCK + places for begin, places in zip(starts, positions, strict=True)])
    tables = torch.stack([torch.arange(begin, begin + blocks) for begin in starts])
    return Batch(
        token_ids=torch.cat([prompt[places] for prompt, places in zip(prompts, positions, strict=True)]),
        positions=torch.cat(positions),
        sequence_lengths=torch.tensor([int(places[-1]) + 1 for places in positions]),
        query_starts=torch.tensor([0, *counts]).cumsum(0),
        logits_indices=torch.zeros(0, dtype=torch.int64),
        groups={0: KVBlocks(slots, tables), 1: _segments(done, counts)},
    )


def _segments(done: list[int], counts: list[int]) -> kernels.StateSegments:
    """Rows of more than 4 tokens have two segments, as where the state is kept for the prefix cache. Request r has the
    pages 2 r and 2 r + 1."""
    starts, rows, read, write = [0], [0], list[int](), list[int]()
    for request, (before, count) in enumerate(zip(done, counts, strict=True)):
        read.append(2 * request if before else -1)
        if count > 4:
            starts.append(starts[-1] + 3)
            write.append(2 * request + 1)
            read.append(2 * request + 1)
        write.append(2 * request)
        starts.append(sum(counts[: request + 1]))
        rows.append(len(write))
    return kernels.StateSegments(*map(torch.tensor, (starts, rows, read, write)))
