"""Measures a model that transformers builds, and checks that it runs correctly here. Runs in its own process, for
`quire.engine.architecture.families.transformers_backend`.

A pickled request arrives on standard input; the answer goes to standard output. Only config.json (and code beside it)
is read. First, the model runs over two tokens, with linear layers and experts that return zeros and weights that take
no memory: this shows each layer's attention calls and the sizes on each rank. Then a small random model of the same
kind runs both in transformers and in Quire, with two requests at once, in chunks. If the logits differ, the model
depends on something other than its attention calls and the states that transformers' cache has.
"""

from __future__ import annotations

import copy
import os
import pickle
import re
import sys
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from quire import kernels
from quire.engine.architecture.attention_spec import AttentionSpec
from quire.engine.architecture.families.family import extended_length, stated_length
from quire.engine.architecture.families.transformers_backend import DescribeRequest
from quire.engine.architecture.feed_forward_spec import MLPSpec
from quire.engine.architecture.model_spec import TransformersLayerSpec, TransformersModelSpec
from quire.engine.architecture.recurrent_spec import TransformersStateSpec
from quire.engine.architecture.spec_parts import MatrixShape
from quire.engine.distributed.communicator import Parallel
from quire.engine.distributed.threads import ThreadParallel
from quire.engine.layers.batch import Batch, KVBlocks
from quire.engine.layers.kv_cache import LayerCache
from quire.engine.layers.linear import Linear
from quire.engine.layers.moe import ExpertMatrices, ExpertStack
from quire.engine.models.transformers_backend import attention, build
from quire.engine.models.transformers_backend.checkpoint import differences
from quire.engine.models.transformers_backend.decoder import TransformersDecoder
from quire.engine.models.transformers_backend.experts import PlannedExperts, is_experts
from quire.engine.models.transformers_backend.sharding import PlannedEmbedding, PlannedLinear, without_numbers
from quire.engine.models.transformers_backend.shrink import LENGTH, shrink
from quire.engine.models.transformers_backend.states import RecordingCache, has_states
from quire.engine.protocol.errors import ConfigError

_LENGTHS = (
    *("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length", "n_ctx"),
    "model_max_length",
)
_UNLIMITED = 1 << 20
_TOLERANCE = 1e-3
"""Maximum difference of logits, as a fraction of the largest logit."""
_KINDS = frozenset(
    ("full_attention", "sliding_attention", "linear_attention", "conv", "hybrid", "hybrid_sliding", "mlp", "moe")
)
"""The supported types of layers: with attention, a recurrent state, both or neither."""
_OTHER_STATE = "it keeps a recurrent state outside of transformers' cache, which is not supported"
_BLOCK, _REQUEST_BLOCKS = 4, 6
_META, _CPU = torch.device("meta"), torch.device("cpu")


def describe(request: DescribeRequest) -> TransformersModelSpec:
    """Describe the model. Raises `ConfigError` if it is not supported, or if transformers or the model's own code
    fails."""
    try:
        return _describe(request)
    except ConfigError:
        raise
    except Exception as error:
        if request.is_verbose:
            raise
        layout = "" if request.is_single else "in this layout "
        raise ConfigError(f"transformers cannot run it {layout}({_first_line(error)})") from None


def _describe(request: DescribeRequest) -> TransformersModelSpec:
    config = build.read_config(request.path, request.trust_remote_code, request.hf_overrides)
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config  # tensors are dequantized while they are read
    name = _check_kind(config, request.architecture)
    torch.set_num_threads(1)
    described = _measure(name, config, request)
    by_token = any(layer.state is not None for layer in described.layers)
    if request.is_checked:
        by_token = _compare(config, request, described.read_directly)
    return replace(described, continues_by_token=by_token)


def _check_kind(config: Any, architecture: str | None) -> str:
    """Check that the model generates text from text alone; returns the architecture's name."""
    text = config.get_text_config(decoder=True)
    if getattr(text, "recurrent_kv_cache_mode", "per_loop") != "per_loop":
        raise ConfigError(f"recurrent_kv_cache_mode {text.recurrent_kv_cache_mode!r} is not supported; use 'per_loop'")
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError("it is an encoder-decoder model, which is not supported")
    if parts := [each for each in config.sub_configs if re.search("vision|audio|image|video", each)]:
        raise ConfigError(f"it takes more than text ({', '.join(parts)}), which is not supported")
    if kinds := set(getattr(text, "layer_types", None) or ()) - _KINDS:
        raise ConfigError(f"its layers of {', '.join(sorted(kinds))} are not supported")
    return architecture or str((config.architectures or [type(config).__name__])[0])


def _build(
    config: Any,
    request: DescribeRequest,
    dtype: torch.dtype,
    device: torch.device,
    parallel: Parallel,
    layers: range,
    total: int,
    length: int,
) -> TransformersDecoder:
    return TransformersDecoder(
        copy.deepcopy(config),
        layers,
        total,
        parallel,
        device,
        dtype,
        length,
        trust_remote_code=request.trust_remote_code,
    )


class _MirroredRank(Parallel):
    """The first of `size` ranks, whose peers return the same values as this one."""

    def __init__(self, size: int) -> None:
        self.size = size

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat([x] * self.size, dim=-1)


def _build_without_weights(
    config: Any, request: DescribeRequest, dtype: torch.dtype
) -> tuple[TransformersDecoder, attention.CallRecorder]:
    """A whole model, and what records its calls of attention."""
    parallel, length = _MirroredRank(request.tensor_parallel_size), request.length or _UNLIMITED
    decoder, recorder = _build(config, request, dtype, _META, parallel, range(1), 1, length), attention.CallRecorder()
    attention.attach(decoder.hf_model, recorder)
    _replace_by_zeros(decoder)
    return decoder, recorder


def _states(config: Any, request: DescribeRequest) -> tuple[dict[int, TransformersStateSpec], list[int]]:
    """The states that each layer keeps in transformers' cache, and the layers that call attention, in order."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        decoder, _ = _build_without_weights(config, request, torch.bfloat16)
    finally:
        torch.set_default_dtype(before)
    decoder.cache = cache = RecordingCache(decoder.hf_model.config, decoder.hf_model)
    with torch.inference_mode():
        decoder.run(None, torch.tensor([1, 2]), torch.tensor([0, 1]))
    return cache.specs(), cache.attention_layers


def _measure(name: str, config: Any, request: DescribeRequest) -> TransformersModelSpec:
    tp = request.tensor_parallel_size
    decoder, recorder = _build_without_weights(config, request, torch.float32)
    _check_class(decoder.hf_model, name)
    try:
        with torch.inference_mode():
            hidden = decoder.run(None, torch.tensor([1, 2]), torch.tensor([0, 1]))
            logits = decoder.logits(hidden)
    except RuntimeError:
        heads = getattr(config.get_text_config(decoder=True), "num_key_value_heads", None)
        if isinstance(heads, int) and heads % tp:
            raise ConfigError(f"--tensor-parallel-size {tp} does not divide its {heads} KV heads") from None
        raise
    direct = _read_directly(decoder)
    sizes = _sizes(decoder, direct)
    calls = recorder.calls
    states: dict[int, TransformersStateSpec] = {}
    is_one_each = len(calls) == sizes.layers
    attending = [*range(len(calls))]
    if decoder.cache is not None:
        states, attending = _states(config, request)
        if not states:
            raise ConfigError(_OTHER_STATE)
        is_one_each = max((*attending, *states)) < sizes.layers
    elif not calls:
        raise ConfigError(build.NO_INTERFACE)
    total = max(sizes.layers, *(number + 1 for number in (*attending, *states)))
    numbers, by_layer = set(attending), dict(zip(attending, calls, strict=False))
    if not sizes.layers or len(calls) != len(numbers) or (decoder.cache is None and len(calls) < sizes.layers):
        raise ConfigError(f"{sizes.layers} layers call attention {len(calls)} times, which is not supported")
    widest = max(sizes.widest, *(call.heads * call.num_biases for call in calls), 0)
    layers = []
    for layer in range(total):
        call = by_layer.get(layer)
        layers.append(
            TransformersLayerSpec(
                attention=None
                if call is None
                else AttentionSpec(
                    num_heads=call.heads * tp,
                    num_kv_heads=call.kv_heads * tp,
                    head_dim=max(call.key_dim, call.value_dim),
                    scale=call.settings.scale,
                    rope=None,
                    window=call.settings.window or None,
                    softcap=call.settings.softcap,
                    has_sinks=call.has_sinks,
                    has_own_sinks=call.has_own_sinks,
                    num_biases=call.num_biases,
                ),
                state=states.get(layer),
                feed_forward=MLPSpec(intermediate_size=widest * tp),
                linears=tuple(sizes.linears[layer]),
                others=sizes.others[layer],
            )
        )
    if request.pipeline_parallel_size > 1:
        if not is_one_each:
            raise ConfigError("--pipeline-parallel-size: its layers run, or call attention, more than once")
        build.keep_stage(decoder.hf_model, range(1), sizes.layers)
    return TransformersModelSpec(
        name=name,
        hidden_size=hidden.shape[-1],
        vocab_size=logits.shape[-1],
        max_position=_length(config.get_text_config(decoder=True).to_dict()),
        layers=tuple(layers),
        norm=None,
        tie_embeddings=sizes.is_tied,
        embedding=sizes.embedding,
        head=sizes.head,
        before=sizes.before,
        after=sizes.after,
        read_directly=direct,
        attention_calls=tuple(attending),
        has_key_biases=attention.has_key_biases(decoder.hf_model),
    )


def _length(text: dict[str, Any]) -> int:
    """The model's length, with the scaling of its rotary positions; those by layer type are scaled in it already."""
    length = next((int(v) for name in _LENGTHS if isinstance(v := text.get(name), int) and v > 0), _UNLIMITED)
    rope = text.get("rope_parameters") or {}
    if "rope_type" in rope:
        factor, original = rope.get("factor") or 1.0, rope.get("original_max_position_embeddings") or length
        length = extended_length(max(length, stated_length(text)), rope["rope_type"], factor, original)
    return min(length, text.get("keep_window_size") or length)  # of more keys, some are masked


def _check_class(model: Any, name: str) -> None:
    built = type(model).__name__
    if built != name:
        raise ConfigError(f"it is not a causal language model in transformers, which builds {built} from its config")
    if (
        model.config.get_text_config(decoder=True) is not model.config
    ):  # a part declares the modalities of the whole model
        taken = {model.input_modalities} if isinstance(model.input_modalities, str) else set(model.input_modalities)
        if taken != {"text"}:
            raise ConfigError(f"it takes more than text ({', '.join(sorted(taken))}), which is not supported")
    is_in_cache = has_states(model.config)
    if is_in_cache or getattr(model, "_is_stateful", False):
        takes_cache = getattr(model, "_supports_default_dynamic_cache", lambda: True)()
        if not (is_in_cache and takes_cache):
            raise ConfigError(_OTHER_STATE)
    if not model._can_set_attn_implementation():
        raise ConfigError(build.NO_INTERFACE)


class _MeasuredSizes:
    """Sizes on a rank: for each layer, by the first number in a parameter's path, and before and after the layers."""

    def __init__(self) -> None:
        self.linears: dict[int, list[MatrixShape]] = defaultdict(list)
        self.others: dict[int, int] = defaultdict(int)
        self.embedding = self.head = MatrixShape(0, 0)
        self.layers = self.before = self.after = self.widest = 0
        self.is_tied = False


def _sizes(decoder: TransformersDecoder, direct: frozenset[str]) -> _MeasuredSizes:
    sizes, model = _MeasuredSizes(), decoder.hf_model
    base, head = build.base_of(model), model.get_output_embeddings()
    text = model.config.get_text_config(decoder=True)
    sizes.layers = int(text.num_hidden_layers)
    renamed, _ = differences(model)
    for path, module in model.named_modules():
        numbers = [int(part) for part in path.split(".") if part.isdigit()]
        within = bool(numbers) and numbers[0] < sizes.layers
        for name, weight in module._parameters.items():
            if weight is None:
                continue
            count = weight.numel()
            if module is head and name == "weight":
                sizes.is_tied = bool(getattr(module, "shares_weight", False))
                stored = decoder.tied.get(f"{path}.weight", f"{path}.weight").removesuffix(".weight")
                stored = sizes.embedding.module if sizes.is_tied else stored
                sizes.head = MatrixShape(len(weight), weight.shape[1], module=stored)
                sizes.after += 0 if sizes.is_tied else count
            elif not within:
                is_after = module is head or path.endswith("norm") or not _is_inside(module, base)
                sizes.after += count * is_after
                sizes.before += count * (not is_after)
                if isinstance(module, PlannedEmbedding):
                    sizes.embedding = MatrixShape(len(weight), weight.shape[1], module=path)
            elif isinstance(module, ExpertMatrices) and name == "weight":
                number, rows, columns = weight.shape
                name, inputs = renamed[f"{path}.weight"], module.in_features
                sizes.linears[numbers[0]].append(MatrixShape(rows, columns, number, name, inputs))
                sizes.widest = max(sizes.widest, rows)
            elif (
                isinstance(module, PlannedLinear)
                and name == "weight"
                and not module.is_router
                and without_numbers(path) not in direct
            ):
                sizes.linears[numbers[0]].append(MatrixShape(len(weight), weight.shape[1], 1, path, module.in_features))
                sizes.widest = max(sizes.widest, len(weight))
            else:
                sizes.others[numbers[0]] += count
    return sizes


def _is_inside(module: nn.Module, base: nn.Module) -> bool:
    return any(each is module for each in base.modules())


class _Zeros(kernels.PackedLinear):
    """A linear layer's product without weights."""

    def __init__(self, rows: int) -> None:
        self._rows, self.is_called = rows, False

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        self.is_called = True
        return x.new_zeros(len(x), self._rows)

    def state(self) -> list[Tensor]:
        return []


def _read_directly(decoder: TransformersDecoder) -> frozenset[str]:
    """Linear layers that are never called, with `*` for layer numbers: models read their weights directly."""
    called: dict[str, bool] = defaultdict(bool)
    for path, module in decoder.hf_model.named_modules():
        if isinstance(module, PlannedLinear):
            assert isinstance(module._product, _Zeros)
            called[without_numbers(path)] |= module._product.is_called
    return frozenset(path for path, is_called in called.items() if not is_called)


def _replace_by_zeros(decoder: TransformersDecoder) -> None:
    """Make linear layers and experts return zeros; other parameters become zeros that share one element of memory."""
    for module in decoder.hf_model.modules():
        if isinstance(module, Linear):
            module._product = _Zeros(len(module.weight))
        for name, weight in module._parameters.items():
            if weight is not None and weight.device.type == "meta":
                module._parameters[name] = nn.Parameter(
                    torch.zeros((), dtype=weight.dtype).expand(weight.shape), requires_grad=False
                )
        if isinstance(module, PlannedExperts) or is_experts(module):
            module.forward = lambda x, *others, **more: torch.zeros_like(x)


def _compare(config: Any, request: DescribeRequest, direct: frozenset[str]) -> bool:
    """Compare a small model in transformers and here. Returns whether it must continue requests by token."""
    tp = request.tensor_parallel_size
    try:
        small = type(config).from_dict(shrink(config.to_dict(), 1 << (tp - 1).bit_length()))
        small.architectures = config.architectures
        reference, state = _reference(small, request)
        specs = _states(small, request)[0] if has_states(small) else {}
    except Exception as error:
        if request.is_verbose:
            raise
        raise ConfigError(
            f"no small model of its kind can be built to compare with transformers ({_first_line(error)})"
        ) from None
    first, second = (torch.randint(4, 100, (count,), generator=torch.Generator().manual_seed(7)) for count in (21, 12))
    with torch.inference_mode():
        expected = [reference(tokens[None], use_cache=False).logits[0].float() for tokens in (first, second)]
    for by_token in (False, True) if specs else (False,):
        actual = _quire_logits(small, request, direct, state, specs, [first, second], by_token=by_token)
        pairs = zip(actual, expected, strict=True)
        errors = [float((ours - right).abs().max() / right.abs().max()) for ours, right in pairs]
        if all(each <= _TOLERANCE for each in errors):  # false if one is not a number
            return by_token
    raise ConfigError(
        "a small model of its kind gives different logits here than in transformers (by "
        f"{max(errors):.2g} of the largest): its output depends on more than attention to earlier tokens"
        + " and the states in transformers' cache"
        * bool(specs)
    )


def _reference(small: Any, request: DescribeRequest) -> tuple[Any, dict[str, Tensor]]:
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
    return model, model.state_dict()


def _quire_logits(
    small: Any,
    request: DescribeRequest,
    direct: frozenset[str],
    state: dict[str, Tensor],
    specs: dict[int, TransformersStateSpec],
    prompts: list[Tensor],
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
        [_build_with_weights(small, request, direct, layers, count, parallel, state) for layers in cuts]
        for parallel in ranks
    ]
    for decoder in chain(*grid):
        decoder.keep_states(specs, by_token=by_token)

    def run(stages: list[TransformersDecoder]) -> list[Tensor]:
        try:
            with torch.inference_mode():
                return _run(stages, prompts)
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
) -> TransformersDecoder:
    decoder = _build(small, request, torch.float32, _CPU, parallel, layers, count, LENGTH)
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
    """Allocates a cache for each call, at the first call."""

    def __init__(self) -> None:
        super().__init__()
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
            size = max(key.shape[-1], value.shape[-1])
            shape = (1, 2 * _REQUEST_BLOCKS, key.shape[1], _BLOCK, size)
            self._allocated.append(LayerCache(kernels.allocate_kv_cache(*shape, torch.float32, _CPU)[0]))
        return super().__call__(query, key, value, settings, terms)


def _run(stages: list[TransformersDecoder], prompts: list[Tensor]) -> list[Tensor]:
    """Run the prompts, of 21 and 12 tokens, together in three steps."""
    functions = [_GrowingCaches() for _ in stages]
    pages = [_pages(decoder) for decoder in stages]
    for decoder, function in zip(stages, functions, strict=True):
        attention.attach(decoder.hf_model, function)
    done = [0] * len(prompts)
    results: list[list[Tensor]] = [[] for _ in prompts]
    for counts in ([13, 1], [7, 10], [1, 1]):
        batch, x = _batch(prompts, done, counts), None
        for decoder, function, caches in zip(stages, functions, pages, strict=True):
            function.restart(batch)
            if decoder.states is not None:
                decoder.states.begin(batch, caches)
            x = decoder.run(x, batch.token_ids, batch.positions)
        assert x is not None
        logits = stages[-1].logits(x)
        for number, part in enumerate(torch.split(logits, counts)):
            results[number].append(part)
            done[number] += counts[number]
    return [torch.cat(parts) for parts in results]


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


def _batch(prompts: list[Tensor], done: list[int], counts: list[int]) -> Batch:
    """The prompts' next tokens; the blocks of request r start at r * _REQUEST_BLOCKS."""
    positions = [torch.arange(start, start + count) for start, count in zip(done, counts, strict=True)]
    starts = [number * _REQUEST_BLOCKS for number in range(len(prompts))]
    slots = torch.cat([begin * _BLOCK + places for begin, places in zip(starts, positions, strict=True)])
    tables = torch.stack([torch.arange(begin, begin + _REQUEST_BLOCKS) for begin in starts])
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


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines()] or [""]
    return f"{type(error).__name__}: {' '.join(lines[:2])[:300]}"


def main() -> None:
    """Answer one request; everything else that is printed goes to standard error."""
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    request: DescribeRequest = pickle.load(sys.stdin.buffer)
    try:
        answer: TransformersModelSpec | str = describe(request)
    except ConfigError as error:
        answer = str(error)
    pickle.dump(answer, output)
    output.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
